"""One step of the sandwich rule equals the sum of losses that are written by hand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_networks import one_width
from torch import Tensor, nn
from torch.nn import functional as F
from torchrun import in_two_processes

from subnetact import SubnetSpec, Supernet
from subnetact.errors import InsertError, SpecError
from subnetact.training import sandwich_step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


PARTS = {"conv": "out", "bn": "norm", "head": "in"}


def new_supernet(network: type[Net] = Net, **more: str) -> Supernet:
    torch.manual_seed(0)
    return one_width(network(), {**PARTS, **more}, [2, 4, 6, 8], "net").train()


def data(n: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 6, 6, generator=generator), torch.randint(5, (n,), generator=generator)


def gradients(supernet: Supernet) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in supernet.named_parameters() if p.grad is not None}


def pruned_scores(supernet: Supernet, x: Tensor, width: int) -> Tensor:
    """The scores of a subnet, from the full parameters and slices by hand."""
    net: Any = supernet.network
    y = F.conv2d(x, net.conv.weight[:width], net.conv.bias[:width], padding=1)
    y = F.batch_norm(y, None, None, net.bn.weight[:width], net.bn.bias[:width], training=True)
    return F.linear(F.relu(y).mean((2, 3)), net.head.weight[:, :width], net.head.bias)


def by_hand(x: Tensor, labels: Tensor, widths: list[int], alpha: float) -> dict[str, Tensor]:
    supernet = new_supernet()
    largest = pruned_scores(supernet, x, widths[0])
    total = F.cross_entropy(largest, labels)
    teacher = largest.detach().softmax(1)
    for width in widths[1:]:
        scores = pruned_scores(supernet, x, width)
        soft = -(teacher * scores.log_softmax(1)).sum(1).mean()
        total = total + (1 - alpha) * F.cross_entropy(scores, labels) + alpha * soft
    total.backward()
    return gradients(supernet)


def widths_of(specs: Any) -> list[int]:
    return [dict(spec.values)["w"][0] for spec in specs]


@pytest.mark.parametrize("alpha", [1.0, 0.25, 0.0])
def test_gradients_are_those_of_the_losses_by_hand(alpha: float) -> None:
    supernet, (x, labels) = new_supernet(), data()
    found = sandwich_step(supernet, x, labels, rng=random.Random(3), distillation=alpha)
    widths = widths_of(found)
    assert widths[:2] == [8, 2]
    assert len(widths) > 2
    expected = by_hand(x, labels, widths, alpha)
    for name, grad in gradients(supernet).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


def test_a_teacher_of_its_own_teaches_all_subnets() -> None:
    supernet, (x, labels) = new_supernet(), data()
    scores = torch.randn(8, 5)
    calls: list[bool] = []

    def teacher(images: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        assert torch.equal(images, x)
        return scores

    found = sandwich_step(supernet, x, labels, rng=random.Random(0), teacher=teacher, random_subnets=0)
    assert calls == [False]
    for width, loss in zip((8, 2), found.values(), strict=True):
        expected = -(scores.softmax(1) * pruned_scores(supernet, x, width).log_softmax(1)).sum(1).mean()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-4)


def test_chosen_subnets_and_an_own_loss_and_backward() -> None:
    supernet, (x, labels) = new_supernet(), data()
    chosen = [supernet.space.spec(w=[w]) for w in (6, 4)]
    seen: list[float] = []

    def backward(loss: Tensor) -> None:
        seen.append(float(loss.detach()))
        (2 * loss).backward()

    options: dict[str, Any] = {"rng": random.Random(0), "subnets": chosen, "distillation": 0.0}
    options["loss"] = lambda scores, y: F.cross_entropy(scores, y, label_smoothing=0.1)
    with pytest.warns(RuntimeWarning, match="leave the largest out"):
        found = sandwich_step(supernet, x, labels, backward=backward, **options)
    sandwich_step(supernet, x, labels, **options)  # It was said.
    assert list(found) == chosen
    assert list(found.values()) == pytest.approx(seen)
    assert float(supernet.network.conv.weight.grad[6:].abs().max()) == 0.0  # type: ignore[union-attr, operator, index]


def test_it_works_under_autocast_and_with_as_many_subnets_in_every_process() -> None:
    supernet, (x, labels) = new_supernet(), data()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sandwich_step(supernet, x, labels, rng=random.Random(0))
    expected = by_hand(x, labels, widths_of(found), 1.0)
    for name, grad in gradients(supernet).items():
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, expected[name], rtol=0.2, atol=0.02)
    draws = [random.Random(seed) for seed in range(8)]
    counts = {len(sandwich_step(supernet, x, labels, rng=rng, random_subnets=1)) for rng in draws}
    assert counts == {3}  # Forwards of a sharded network wait for those of the other processes.
    assert len(sandwich_step(supernet, x, labels, rng=draws[0], random_subnets=9)) == supernet.space.size()


def test_bad_arguments_change_nothing() -> None:
    supernet, (x, labels) = new_supernet(), data()
    rng = random.Random(0)
    foreign = SubnetSpec("other", (("w", (8,)),))
    for options, message in (
        ({"distillation": 1.5}, "distillation"),
        ({"random_subnets": -1}, "random_subnets"),
        ({"subnets": []}, "at least one"),
        ({"subnets": [foreign]}, "other"),
        ({"loss": lambda scores, y: scores, "distillation": 0.0}, "scalar"),
    ):
        options_: dict[str, Any] = options
        with pytest.raises(SpecError, match=message):
            sandwich_step(supernet, x, labels, rng=rng, **options_)
        assert not gradients(supernet)
    with pytest.raises(SpecError, match=r"supernet\.train\(\)"):
        sandwich_step(new_supernet().eval(), x, labels, rng=rng)
    with pytest.raises(InsertError, match="Supernet"):
        sandwich_step(Net(), x, labels, rng=rng)  # type: ignore[arg-type]


class Regression(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(1)


class Heads(Net):
    def forward(self, x: Tensor) -> Any:
        return {"classes": super().forward(x)}


def of_classes(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output["classes"], labels)


@pytest.mark.parametrize(("network", "loss"), [(Regression, F.mse_loss), (Heads, of_classes)])
def test_outputs_that_are_no_scores_need_no_distillation(network: type[Net], loss: Any) -> None:
    supernet, (x, labels) = new_supernet(network), data()
    given: dict[str, Any] = {"rng": random.Random(0), "loss": loss}
    target = labels.float() if network is Regression else labels
    with pytest.raises(SpecError, match=r"distillation=0\.0"):
        sandwich_step(supernet, x, target, **given)
    assert not gradients(supernet)
    assert len(sandwich_step(supernet, x, target, distillation=0.0, **given)) >= 2


def test_an_output_whose_tensors_cannot_be_detached_is_refused_in_words() -> None:
    (x, labels), categorical = data(), torch.distributions.Categorical
    given: dict[str, Any] = {"rng": random.Random(0), "output": lambda scores: categorical(logits=scores)}
    given["loss"] = lambda found, labels: -found.log_prob(labels).mean()
    given["divergence"] = lambda found, wanted: torch.distributions.kl_divergence(wanted, found).mean()
    with pytest.raises(SpecError, match="Categorical keeps the gradients of the teacher"):
        sandwich_step(new_supernet(), x, labels, **given)


AVERAGING = f"""
import random, runpy
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from subnetact.training import sandwich_step

sandwich = runpy.run_path({__file__!r})
torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank, supernet, widths = distributed.get_rank(), sandwich["new_supernet"](), []
model, rng = DistributedDataParallel(supernet), random.Random(rank)
for step in range(2):  # It accumulates two batches before the gradients are averaged.
    x, labels = sandwich["data"](seed=10 + 2 * rank + step)
    found = sandwich_step(model, x, labels, rng=rng, random_subnets=1, average=step == 1)
    widths.append(sandwich["widths_of"](found))
torch.save(dict(gradients=sandwich["gradients"](supernet), widths=widths), "result.pt")
"""


def test_two_processes_average_their_gradients(tmp_path: Path) -> None:
    """Each process has half of the batch and other random subnets; the mean is that of both by hand."""
    in_two_processes(AVERAGING, tmp_path)
    results = [torch.load(tmp_path / f"{rank}" / "result.pt", weights_only=True) for rank in range(2)]
    assert results[0]["widths"] != results[1]["widths"], "the processes draw different subnets"
    expected: dict[str, Tensor] = {}
    for rank, result in enumerate(results):
        for step in range(2):
            x, labels = data(seed=10 + 2 * rank + step)
            for name, grad in by_hand(x, labels, result["widths"][step], 1.0).items():
                expected[name] = expected.get(name, torch.zeros_like(grad)) + grad / 2
    for result in results:
        assert result["gradients"].keys() == expected.keys()
        for name, grad in result["gradients"].items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


class Auxiliary(Net):
    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        features = F.relu(self.bn(self.conv(x))).mean((2, 3))
        scores = self.head(features)
        return (scores, self.aux(features)) if self.training else scores


def test_a_branch_that_only_training_runs_is_named() -> None:
    x, labels = data()
    message = r"although the first one does: aux \(Linear\).*an auxiliary classifier.*\(fixed=\.\.\.\)"
    with pytest.raises(InsertError, match=message):
        sandwich_step(new_supernet(Auxiliary), x, labels, rng=random.Random(0))
    assert sandwich_step(new_supernet(Auxiliary, aux="in"), x, labels, rng=random.Random(0))


def test_scores_of_tokens_are_distilled_over_their_classes() -> None:
    """The network maps (N, tokens, 4) to scores of shape (N, tokens, 6)."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    supernet = one_width(network, {"0": "out", "2": "in"}, [2, 8]).train()
    space = supernet.space
    x, target = torch.randn(3, 5, 4), torch.randint(6, (3, 5))

    def loss(scores: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())

    given: dict[str, Any] = {"rng": random.Random(0), "random_subnets": 0, "loss": loss}
    losses = sandwich_step(supernet, x, target, class_dim=-1, **given)
    wanted = supernet(x, subnet=space.largest()).detach().flatten(0, 1).softmax(1)
    expected = F.cross_entropy(supernet(x, subnet=space.smallest()).flatten(0, 1), wanted)
    # The loss of torch averages over the tokens as well, once the classes are its second dimension.
    assert losses[space.smallest()] == pytest.approx(float(expected.detach()), rel=1e-5)
    with pytest.raises(SpecError, match="class_dim=-1 for language models"):
        sandwich_step(supernet, x, target, **given)
    for wrong in (0, 3, -3, 1.0, True):
        with pytest.raises(SpecError, match="class_dim"):
            sandwich_step(supernet, x, target, class_dim=wrong, **given)  # type: ignore[arg-type]
