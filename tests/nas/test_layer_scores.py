"""Scores of layers, and budgets: what is added up, what is chosen, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_decoders import small_decoder
from torch import Tensor, nn
from written_networks import Written

from subnetact import calibrate, insert_, search
from subnetact.digits import load_digits_supernet
from subnetact.errors import ResumeMismatch, SearchError, SpecError, StaleWeights
from subnetact.latency.table import LatencyTable
from subnetact.nas import LayerScores, score_layers
from subnetact.spec import SubnetSpec
from subnetact.supernet.statistics import batch_norms
from subnetact.supernet.supernet import Supernet

TOKENS = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(8, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def block() -> nn.Module:
    compute = lambda m, x: x + m.three(m.two(m.one(x).relu()).relu())  # noqa: E731
    inner = nn.Conv2d(16, 16, 3, padding=1)
    return Written(compute, one=nn.Conv2d(8, 16, 1), two=inner, three=nn.Conv2d(16, 8, 1))


def chain() -> tuple[Supernet, Any, str]:
    """Return residual layers between two convolutions whose channels multiply each other's cost."""
    torch.manual_seed(0)
    compute = lambda m, x: m.head(m.blocks(m.stem(x).mul_(0.5)).mean((2, 3)))  # noqa: E731
    stem, blocks = nn.Conv2d(1, 8, 3, padding=1), nn.Sequential(*(block() for _ in range(3)))
    network = Written(compute, stem=stem, blocks=blocks, head=(8, 5)).eval()
    options = {"axes": ("depth", "width"), "each_block": True}
    return insert_(network, example=IMAGES[:1], **options), IMAGES, "classes"


def decoder() -> tuple[Supernet, Any, str]:
    example = {"input_ids": TOKENS, "use_cache": False}
    model = small_decoder("LlamaConfig", num_hidden_layers=3)
    axes = ("ffn", "heads", "depth")
    return insert_(model, example=example, axes=axes, each_block=True), example, "tokens"


def digits() -> tuple[Supernet, Any, str]:
    return load_digits_supernet(), IMAGES, "classes"


SUPERNETS = {"chain": chain, "decoder": decoder, "digits": digits}


@pytest.fixture(scope="module", params=SUPERNETS)
def scored(request: pytest.FixtureRequest) -> LayerScores:
    supernet, batch, task = SUPERNETS[request.param]()
    return score_layers(supernet, [batch], task=task, progress=False)


def scores_of(output: Any) -> Tensor:
    """Return log-probabilities in the last axis."""
    scores = output.logits[:, :-1] if hasattr(output, "logits") else output
    return scores.log_softmax(-1)


def test_a_score_is_the_divergence_of_a_whole_forward_pass(scored: LayerScores) -> None:
    supernet, largest = scored.supernet, scored.supernet.space.largest()
    batch = dict(scored.example) if isinstance(scored.example, dict) else {"x": scored.example}
    given = (batch.pop("x"),) if "x" in batch else ()
    run: Any = lambda spec: supernet(*given, **batch, subnet=spec)  # noqa: E731
    if batch_norms(supernet.network):
        calibrate(supernet, [largest], [scored.example], progress=False)
    whole = scores_of(run(largest))
    for (axis, at, value), loss in scored.losses.items():
        values = {name: list(own) for name, own in supernet.space.values(largest).items()}
        values[axis][at] = value
        spec = supernet.space.spec(**values)
        if batch_norms(supernet.network):
            calibrate(supernet, [spec], [scored.example], progress=False)
        alone = scores_of(run(spec))
        expected = float(F.kl_div(alone, whole, log_target=True, reduction="none").sum(-1).mean())
        assert loss == pytest.approx(expected, abs=2e-5)
        if spec != largest:
            supernet.norms.drop([spec])
    supernet.norms.drop([largest])


def costs_of(scores: LayerScores, specs: list[SubnetSpec]) -> list[float]:
    return [scores.costs(spec).macs for spec in specs]


@pytest.mark.parametrize("share", [0.45, 0.8])
def test_no_subnet_within_the_budget_is_expected_to_lose_less(scored: LayerScores, share: float) -> None:
    space = scored.supernet.space
    if space.size() > 2_000:
        pytest.skip("too many subnets to try them all")
    limit = share * scored.costs(space.largest()).macs
    if scored.costs(space.smallest()).macs > limit:
        pytest.skip("no subnet is so small")
    chosen = scored.best({"macs": share})
    assert scored.costs(chosen).macs <= limit
    fitting = [spec for spec in space.enumerate() if scored.costs(spec).macs <= limit]
    least = min(map(scored.expected, fitting))
    # Costs of layers in a row multiply, and are linear about the subnet that was found before only.
    assert scored.expected(chosen) <= least + 0.1 * (scored.expected(space.smallest()) - least)


def test_what_is_skipped_loses_nothing_more(scored: LayerScores) -> None:
    space = scored.supernet.space
    depth = next((axis for axis in space.axes if axis.name == "depth"), None)
    if depth is None or len(depth.slots) < 2:
        pytest.skip("it has no slot per block")
    skipped = {"depth": [depth.slots[0].choices[0], *(slot.choices[-1] for slot in depth.slots[1:])]}
    values = {a.name: [s.choices[-1] for s in a.slots] for a in space.axes} | skipped
    whole = space.spec(**values)
    others = {a.name: [a.slots[0].choices[0], *(s.choices[-1] for s in a.slots[1:])] for a in space.axes}
    if "heads" in others:
        assert scored.expected(space.spec(**{**values, **others})) == scored.expected(whole)


def test_several_costs_and_absolute_numbers_are_kept_to(scored: LayerScores) -> None:
    space = scored.supernet.space
    full = scored.costs(space.largest())
    budget = {"macs": int(0.8 * full.macs), "parameters": 0.9, "bytes": int(0.85 * full.weight_bytes)}
    chosen = scored.costs(scored.best(budget))
    assert chosen.macs <= 0.8 * full.macs
    assert chosen.parameters <= 0.9 * full.parameters
    assert chosen.weight_bytes <= 0.85 * full.weight_bytes


def test_a_front_rises_in_cost_and_falls_in_loss(scored: LayerScores) -> None:
    front = scored.front(5)
    assert front[0] == scored.supernet.space.smallest()
    assert front[-1] == scored.supernet.space.largest()
    costs, losses = costs_of(scored, front), [scored.expected(spec) for spec in front]
    assert costs == sorted(costs)
    assert losses == sorted(losses, reverse=True)


def test_latencies_come_from_a_table_or_a_function() -> None:
    supernet, batch, task = decoder()
    scores = score_layers(supernet, [batch], task=task, progress=False)
    specs = supernet.space.sample(0, 24)

    def milliseconds(spec: SubnetSpec) -> float:
        return 1.0 + scores.costs(spec).macs / 1e4

    table = LatencyTable([s.key for s in specs], [None] * 24, [1], [[milliseconds(s)] for s in specs])
    limit = 0.7 * milliseconds(supernet.space.largest())
    for latency in (table, milliseconds):
        chosen = scores.best({"latency_ms": 0.7}, latency)
        assert 0.8 * limit <= milliseconds(chosen) <= 1.02 * limit


def test_scores_of_a_finished_file_choose_the_same_and_belong_to_their_weights(tmp_path: Path) -> None:
    supernet, batch, task = decoder()
    given: dict[str, Any] = {"task": task, "resume": tmp_path / "scores.jsonl", "progress": False}
    scores, again = score_layers(supernet, [batch], **given), score_layers(supernet, [batch], **given)
    assert again.losses == scores.losses
    assert again.best({"macs": 0.7}) == scores.best({"macs": 0.7})
    with torch.no_grad():
        next(supernet.parameters()).mul_(1.01)
    for stale in (lambda: scores.best({"macs": 0.7}), lambda: scores.front(3)):
        with pytest.raises(StaleWeights, match="call score_layers again"):
            stale()
    with pytest.raises(ResumeMismatch, match="weights"):
        score_layers(supernet, [batch], **given)


def test_an_interrupted_scoring_goes_on_where_it_was(tmp_path: Path) -> None:
    supernet, batch, task = chain()
    whole = score_layers(supernet, [batch[:4], batch[4:]], task=task, progress=False)
    runs: list[int] = []

    def divergence(student: Tensor, teacher: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 9:
            raise KeyboardInterrupt
        return F.kl_div(
            student.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="batchmean"
        )

    given: dict[str, Any] = {"divergence": divergence, "resume": tmp_path / "scores.jsonl", "progress": False}
    with pytest.raises(KeyboardInterrupt):
        score_layers(supernet, [batch[:4], batch[4:]], **given)
    done = len(runs) - 1
    scores = score_layers(supernet, [batch[:4], batch[4:]], **given)
    changed = sum(loss > 0 for loss in whole.losses.values())
    assert len(runs) <= done + 1 + 2 * changed + 3
    assert scores.losses == pytest.approx(whole.losses, abs=1e-5)
    with pytest.raises(ResumeMismatch):
        score_layers(supernet, [batch[:4]], **given)


def test_a_search_begins_with_the_subnets_that_scores_choose() -> None:
    supernet, batch, task = chain()
    scores = score_layers(supernet, [batch], task=task, progress=False)
    front = scores.front(4)
    options: dict[str, Any] = {"evaluations": 12, "method": "evolution", "initial": front, "progress": False}
    accuracy, cost = (lambda spec: -scores.expected(spec)), (lambda spec: scores.costs(spec).macs / 1e6)
    result = search(supernet, accuracy, cost, **options)
    assert [one.spec for one in result.evaluated[: len(front)]] == front


@pytest.mark.parametrize(
    ("budget", "latency", "words"),
    [
        ({}, None, "is no mapping"),
        (0.5, None, "is no mapping"),
        ({"flops": 0.5}, None, "no cost 'flops'; choose from macs, parameters, bytes, latency_ms"),
        ({"macs": "half"}, None, "is a positive number"),
        ({"macs": True}, None, "is a positive number"),
        ({"macs": float("nan")}, None, "is a positive number"),
        ({"macs": 0.0}, None, "is a positive number"),
        ({"macs": 1e-6}, None, "below the smallest subnet"),
        ({"latency_ms": 0.5}, None, "needs latency="),
    ],
)
def test_wrong_budgets_are_refused(scored: LayerScores, budget: Any, latency: Any, words: str) -> None:
    with pytest.raises(SearchError, match=words):
        scored.best(budget, latency)


def test_wrong_batches_and_tasks_are_refused() -> None:
    supernet, batch, _ = chain()
    for batches, options, words in (
        ([], {}, "give a list of batches"),
        (batch, {}, "give a list of batches"),
        ([batch], {"task": "images"}, "choose from"),
        ([batch], {"divergence": lambda a, b: (a - b).sum() * torch.nan}, "look for NaN"),
    ):
        with pytest.raises(SearchError, match=words):
            score_layers(supernet, batches, progress=False, **options)
    with pytest.raises((SearchError, SpecError), match="does not run"):
        score_layers(supernet, [torch.zeros(2, 3, 16, 16)], progress=False)
    with pytest.raises(SearchError, match="at least 2"):
        score_layers(supernet, [batch], progress=False).front(1)
