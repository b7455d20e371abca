"""distill_: subnets learn from any outputs and labels, a kill changes nothing, bad input loses nothing."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distilled import STEPS, Batches, Net, distilled, labelled, new_supernet
from small_decoders import small_decoder
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from written_networks import seeded

from subnetact import calibrate, evaluate, insert_
from subnetact.errors import (
    FileFormatError,
    ResumeMismatch,
    SpecError,
    TrainingError,
    UncalibratedSubnetWarning,
    WriteError,
)
from subnetact.operators.tensor_version import changes_of
from subnetact.supernet.supernet import Supernet
from subnetact.training import DistillationReport, distill_, distillation, run, state

QUIET: dict[str, Any] = {"progress": False, "calibration": 2}


def numbers(report: DistillationReport) -> Tensor:
    return torch.tensor([*report.before, *report.after, *(x for entry in report.losses for x in entry)])


@pytest.mark.parametrize(("own", "deadly"), [("default", 5), ("own", 13)])
def test_a_killed_run_ends_like_one_that_was_not(tmp_path: Path, own: str, deadly: int) -> None:
    expected = distilled(None, own == "own")
    path = tmp_path / "state.safetensors"
    script = Path(__file__).parents[1] / "distilled.py"
    ended = subprocess.run([sys.executable, script, path, str(deadly), own], check=False)
    assert ended.returncode == -9
    assert path.exists()
    found = distilled(str(path), own == "own")
    assert found.steps == STEPS
    torch.testing.assert_close(numbers(found), numbers(expected))
    again = distilled(str(path), own == "own")  # It is finished, and trains no more.
    torch.testing.assert_close(numbers(again), numbers(expected))
    assert again.to_json()["subnets"] == found.to_json()["subnets"]
    with pytest.raises(ResumeMismatch, match="optimizer"):
        distilled(str(path), own != "own")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FileFormatError):
        distilled(str(path), own == "own")


def test_the_report_is_of_the_held_out_batches_and_of_calibrated_subnets() -> None:
    supernet, held_out = new_supernet(), labelled(4, 5)
    specs = [supernet.space.largest(), supernet.space.smallest()]
    stale = supernet.space.spec(width=0.5)
    calibrate(supernet, [stale], [x for x, _ in labelled(4, 1)], progress=False)
    options: dict[str, Any] = {"steps": 60, "subnets": specs, "learning_rate": 0.02, **QUIET}
    with pytest.warns(UncalibratedSubnetWarning, match=r"of 1 subnet\(s\) belonged to the former weights"):
        report = distill_(supernet, labelled(4, 1), held_out=held_out, **options)
    assert report.after == pytest.approx(evaluate(supernet, specs, held_out, progress=False))
    assert min(report.after) > max(report.before)
    assert set(supernet.norms) == set(specs)
    assert not supernet.training


def elastic(network: nn.Module, example: Any, **options: Any) -> Supernet:
    torch.manual_seed(0)
    return insert_(network.eval(), example=example, choices=(0.25, 0.5, 1.0), **options)


def rows(n: int, seed: int) -> list[Tensor]:
    return list(torch.randn(n, 16, 6, generator=torch.Generator().manual_seed(seed)))


def tokens(n: int, seed: int, mask: bool = False) -> list[dict[str, Any]]:
    """Sentences that count up; behind the mask, there is noise."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n):
        ids = (torch.randint(3, 50, (4, 1), generator=generator) + torch.arange(12)) % 47 + 3
        given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if mask:
            given["attention_mask"] = (torch.arange(12) < 9).long().repeat(4, 1)
            given["input_ids"] = torch.where(given["attention_mask"] == 1, ids, 3)
        found.append(given)
    return found


@pytest.mark.parametrize("teacher", [None, "own"])
def test_a_regressor_learns_from_labels_and_an_embedder_from_a_teacher(teacher: str | None) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))

    own = network()
    given = copy.deepcopy(own) if teacher else None
    supernet = elastic(own, torch.randn(2, 6))
    options: dict[str, Any] = {"steps": 40, "learning_rate": 0.01, **QUIET}
    report = distill_(supernet, rows(8, 1), given, held_out=rows(4, 2), task="vectors", **options)
    assert report.metric == "cosine with the teacher"
    assert report.before[0] == pytest.approx(1.0, abs=1e-5)
    assert report.after[0] > 0.98
    assert report.after[-1] > report.before[-1] + 0.02
    data = [[(x, x[:, :3] * x[:, 3:]) for x in rows(8, seed)] for seed in (1, 2)]
    torch.manual_seed(0)
    supernet, options["learning_rate"] = elastic(network(), torch.randn(2, 6)), 0.02
    report = distill_(supernet, data[0], held_out=data[1], task="values", **options)
    assert report.metric == "mean squared error"
    assert max(report.after) < 0.9 * min(report.before)


@pytest.fixture
def decoder() -> Supernet:
    pytest.importorskip("transformers")
    examples = [tokens(1, 1, mask)[0] for mask in (False, True)]
    return elastic(small_decoder("LlamaConfig"), examples, axes=("ffn",))


def test_only_the_subnets_that_were_chosen_are_trained(
    decoder: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, trained = decoder.space.sample(1, 4)[2:], list[list[Any]]()
    step = run.sandwich_step

    def noting(*args: Any, subnets: list[Any], **options: Any) -> Any:
        trained.append(subnets)
        return step(*args, subnets=subnets, **options)

    monkeypatch.setattr(run, "sandwich_step", noting)
    specs = [decoder.space.largest(), chosen[0]]
    given = {"subnets": specs, "trained": chosen, "random_subnets": 1, "importance": None, **QUIET}
    distill_(decoder, tokens(6, 1), held_out=tokens(3, 2), task="tokens", steps=6, **given)
    assert {subnet for subnets in trained for subnet in subnets} == {specs[0], *chosen}
    assert all(subnets[0] == specs[0] and len(subnets) == 2 for subnets in trained)


def test_long_texts_are_sorted_by_a_passage_that_has_something_to_predict(decoder: Supernet) -> None:
    ids = torch.randint(3, 50, (3, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 300, dtype=torch.long)
    mask[1, 280:], mask[2, :40] = 1, 1
    data = [{"input_ids": ids.roll(i, 1), "attention_mask": mask, "use_cache": False} for i in range(2)]
    report = distill_(decoder, data, held_out=data[:1], task="tokens", steps=1, **QUIET)
    assert "sorted by taylor" in report.order


@pytest.mark.parametrize("mask", [False, True])
def test_a_language_model_learns(decoder: Supernet, mask: bool) -> None:
    data, supernet = tokens(6, 1, mask), decoder
    held_out = tokens(3, 2, mask)
    report = distill_(supernet, data, held_out=held_out, task="tokens", steps=30, learning_rate=0.01, **QUIET)
    assert report.metric == "perplexity"
    assert "sorted by taylor" in report.order
    assert max(report.after) < 0.6 * min(report.before)
    total, count = 0.0, 0
    for batch in held_out:
        kept = 9 if mask else 12
        with torch.no_grad():
            scores = supernet.extract(supernet.space.smallest())(**batch).logits[:, : kept - 1].flatten(0, 1)
        wanted = batch["input_ids"][:, 1:kept].flatten()
        total, count = total + float(F.cross_entropy(scores, wanted, reduction="sum")), count + len(wanted)
    assert report.after[-1] == pytest.approx(float(torch.tensor(total / count).exp()), rel=1e-4)


def test_what_is_not_finite_ends_the_training_at_the_last_good_step(tmp_path: Path) -> None:
    good = labelled(4, 1)
    bad = [*good[:2], (good[2][0] * float("nan"), good[2][1]), good[3]]
    path = tmp_path / "state.safetensors"
    options = {"held_out": labelled(1, 2), "steps": 4, "resume": path, **QUIET}
    supernet = new_supernet()
    with pytest.raises(TrainingError, match=r"step 3: a loss is nan.*after step 2"):
        distill_(supernet, bad, **options)
    assert all(tensor.isfinite().all() for tensor in supernet.state_dict().values())
    assert not len(supernet.norms)  # They would be those of other weights.
    went_on = distill_(new_supernet(), good, **options)
    expected = distill_(new_supernet(), good, **{**options, "resume": None})
    torch.testing.assert_close(numbers(went_on), numbers(expected))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock that stands still unless `seconds` are added; at `stop`, the user stops the training."""
    found = SimpleNamespace(seconds=0.0, stop=float("inf"))
    for module in (distillation, run, state):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: found.seconds))
    return found


def ticking(batches: list[Any], clock: SimpleNamespace) -> Any:
    """Return batches that take a second each."""

    class Ticking(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                clock.seconds += 1.0
                if clock.seconds == clock.stop:
                    raise KeyboardInterrupt
                yield batch

    return Ticking(batches)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_minutes_and_16_bits_go_on(autocast: torch.dtype, tmp_path: Path, clock: SimpleNamespace) -> None:
    slow = ticking(labelled(4, 1), clock)
    options = {"held_out": labelled(2, 2), "autocast": autocast, "learning_rate": 0.02, **QUIET}
    expected = distill_(new_supernet(), labelled(4, 1), steps=18, **options)
    assert sum(expected.after) > sum(expected.before) + 50.0
    options |= {"minutes": 20 / 60, "resume": tmp_path / "s", "save_every_s": 0.0}
    clock.stop = 12.0
    with pytest.raises(KeyboardInterrupt):
        distill_(new_supernet(), slow, **options)
    found = distill_(new_supernet(), slow, **options)
    assert (found.steps, found.seconds) == (18, 18.0)  # Two batches were read before the first step.
    torch.testing.assert_close(numbers(found), numbers(expected))


def test_minutes_are_those_of_measuring_and_training_and_saving_takes_few(
    clock: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out, batches = ticking(labelled(10, 2), clock), ticking(labelled(4, 1), clock)
    report = distill_(new_supernet(), batches, held_out=held_out, minutes=1.0, **QUIET)
    assert report.batches == 3  # A twentieth of a minute.
    assert report.steps == 60 - 2 * 3 - QUIET["calibration"]
    assert clock.seconds == 60
    again = distill_(new_supernet(), labelled(4, 1), held_out=held_out[:3], steps=report.steps, **QUIET)
    torch.testing.assert_close(numbers(report), numbers(again))
    write, saved = state.write_tensors, list[float]()

    def slow(*arguments: Any) -> None:
        clock.seconds += 10.0
        saved.append(clock.seconds)
        write(*arguments)

    monkeypatch.setattr(state, "write_tensors", slow)
    distill_(new_supernet(), batches, held_out=labelled(1, 2), steps=250, resume=tmp_path / "s", **QUIET)
    first, second, _ = saved
    assert second - first == 10.0 + 200.0


def test_work_is_said_without_a_terminal_and_reports_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = distill_(new_supernet(), labelled(2, 1), held_out=labelled(1, 2), steps=2, calibration=2)
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    for task in ("measuring 4 subnets", "sorting by l1", "distilling"):
        assert [line for line in lines if f"distill_: {task}: 100%" in line], lines
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == report.to_json()
    assert "2 steps" in str(report)


@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_gradients_that_are_never_finite_end_the_training(autocast: torch.dtype | None) -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels) + 0.0 * (scores - scores.detach()).abs().sqrt().sum()

    supernet = new_supernet()
    options = {"held_out": labelled(1, 2), "steps": 60, "importance": None, "autocast": autocast, **QUIET}
    before = [parameter.clone() for parameter in supernet.parameters()]
    with pytest.raises(TrainingError, match=r"step \d+: the norm of the gradients is nan"):
        distill_(supernet, labelled(4, 1), loss=loss, **options)
    assert all(torch.equal(a, b) for a, b in zip(supernet.parameters(), before, strict=True))


def test_a_full_disk_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = state.write_tensors, [0]

    def full(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] > 1:
            raise WriteError("no space left")
        write(*arguments)

    monkeypatch.setattr(state, "write_tensors", full)
    options = {"held_out": labelled(1, 2), "steps": 5, **QUIET}
    with pytest.warns(RuntimeWarning, match="the training goes on"):
        found = distill_(new_supernet(), labelled(4, 1), resume=tmp_path / "s", save_every_s=0.0, **options)
    expected = distill_(new_supernet(), labelled(4, 1), **options)
    torch.testing.assert_close(numbers(found), numbers(expected))
    with pytest.raises(WriteError):  # The disk is full from the beginning.
        distill_(new_supernet(), labelled(4, 1), resume=tmp_path / "t", **options)


def test_accumulated_halves_of_a_batch_are_the_batch() -> None:
    options = {"held_out": labelled(1, 2), "steps": 1, **QUIET}
    half = [(x[:8], labels[:8]) for x, labels in labelled(1, 1)]
    half += [(x[8:], labels[8:]) for x, labels in labelled(1, 1)]
    found = []
    for batches, count in ((labelled(1, 1), 1), (half, 2)):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(50, 16), nn.ReLU(), nn.Linear(16, 4)
        plain = elastic(nn.Sequential(*layers), half[0][0])
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        distill_(plain, batches, accumulate=count, optimizer=optimizer, **options)
        found.append(torch.cat([parameter.detach().flatten() for parameter in plain.parameters()]))
    torch.testing.assert_close(*found)


def test_other_batches_are_refused_on_resume(tmp_path: Path) -> None:
    options = {"held_out": labelled(1, 2), "resume": tmp_path / "s", **QUIET}
    distill_(new_supernet(), Batches(), steps=2, **options)
    with pytest.raises(ResumeMismatch, match="another one"):
        distill_(new_supernet(), labelled(4, 9), steps=3, **options)
    other = new_supernet()
    torch.nn.init.ones_(next(other.parameters()))
    with pytest.raises(ResumeMismatch, match="weights"):
        distill_(other, Batches(), steps=3, **options)


class Pixels(nn.Module):
    """Maps (N, 2, H, W) to three scores per pixel and to something else, as networks of torchvision do."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 16, 1), nn.BatchNorm2d(16)
        self.out, self.aux = nn.Conv2d(16, classes, 1), nn.Conv2d(16, classes, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.norm(self.first(x)))
        return {"out": self.out(x), "aux": self.aux(x)}


def maps(m: Any, x: Tensor) -> Any:
    """Map (N, 6) to nested lists of outputs, as the heads of detectors do."""
    x = m.first(x).relu()
    return [[m.a(x), m.b(x)], m.c(x)]


def scenes(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches whose class is decided by two values; a third of the pixels does not count."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x = torch.randn(4, 2, 8, 8, generator=generator)
        masks = (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()
        found.append((x, masks.masked_fill(torch.rand(masks.shape, generator=generator) < 1 / 3, -100)))
    return found


class Counts:
    """A metric with a state: how often every class is found, and how many batches there were."""

    def __init__(self) -> None:
        self.found, self.batches = torch.zeros(3), 0

    def update(self, scores: Tensor, masks: Tensor) -> None:
        self.found += torch.bincount(scores.argmax(1).flatten(), minlength=3)
        self.batches += 1

    def compute(self) -> Tensor:
        return self.found[0] + self.batches / 10


def test_the_pixels_that_count_are_learnt_and_measured() -> None:
    unlabelled = [(torch.randn(n, 2, 8, 8), torch.full((n, 8, 8), -100)) for n in (1, 2)]
    supernet, held_out = elastic(Pixels(), torch.randn(2, 2, 8, 8)), [*scenes(3, 2), unlabelled[0]]
    bytes_of_files = [(x, masks.clamp(min=0).byte()) for x, masks in scenes(3, 1)]
    distill_(supernet, bytes_of_files, held_out=held_out, steps=1, **QUIET)
    training = [*scenes(6, 1), unlabelled[1]]
    taylor = {"output": lambda found, x: found["out"], "importance": "taylor"}
    report = distill_(supernet, training, held_out=held_out, steps=30, learning_rate=0.04, **taylor, **QUIET)
    assert report.order == "1 groups sorted by taylor"
    right = counted = 0
    with torch.no_grad():
        for x, masks in held_out:
            found = supernet.extract(supernet.space.smallest())(x)["out"].argmax(1)
            right += int((found == masks).sum())
            counted += int((masks >= 0).sum())
    assert report.after[-1] == pytest.approx(100 * right / counted, abs=0.5)
    assert min(report.after) > 60 > max(report.before)
    own = {"metric": (metric := Counts()), "output": lambda found, x: found["out"]}
    counts = distill_(supernet, training, held_out=held_out, steps=1, importance=None, **own, **QUIET)
    assert (metric.batches, counts.metric) == (0, "Counts")
    for value in counts.after:
        assert value == pytest.approx(int(value) + 0.4, abs=1e-3)


def test_all_of_several_outputs_are_learnt_without_labels() -> None:
    heads = seeded(maps, first=(6, 16), a=(16, 3), b=(16, 5), c=(16, 1))
    supernet, seen = elastic(heads, torch.randn(2, 6)), set()

    def joined(found: Any, x: Tensor) -> Tensor:
        (a, b), c = found
        seen.add((a.shape[1], b.shape[1], c.shape[1]))
        return torch.cat([a, b], 1)

    data = [torch.randn(16, 6, generator=torch.Generator().manual_seed(i)) for i in range(9)]
    given: dict[str, Any] = {"held_out": data[6:], "task": "values", "labels": False, "output": joined}
    report = distill_(supernet, data[:6], steps=40, learning_rate=0.04, **given, **QUIET)
    assert report.before[0] == pytest.approx(0.0, abs=1e-6)
    assert report.after[-1] < 0.5 * report.before[-1]
    assert seen == {(3, 5, 1)}


def test_a_frozen_teacher_has_the_statistics_of_its_weights() -> None:
    supernet = elastic(Pixels(), torch.randn(2, 2, 8, 8))
    with torch.no_grad():
        supernet.get_parameter("first.weight").mul_(5.0)  # as a training of one's own changes it
    data = [3.0 * x + 2.0 for x, _ in scenes(3, 1)]
    report = distill_(supernet, data[:2], held_out=data[2:], labels=False, steps=1, **QUIET)
    assert report.metric == "agreement with the teacher (%)"
    assert report.before[0] == pytest.approx(100.0, abs=0.5)


def test_a_compiled_fused_step_counts_as_a_change() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    torch.autograd.backward(layer(torch.randn(2, 4)).sum())
    before = changes_of(layer.parameters())
    torch.compile(optimizer.step, backend="aot_eager")()
    assert changes_of(layer.parameters()) > before


SAME = labelled(2, 1)
WORKERS: Any = DataLoader(labelled(2, 1), batch_size=None, num_workers=1, persistent_workers=True)
OTHER = nn.Sequential(nn.Flatten(), nn.Linear(50, 7))
REFUSED: list[tuple[Callable[[Supernet], dict[str, Any]], str]] = [
    (lambda s: {"teacher": OTHER}, r"shape \(16, 7\), the supernet .*\(16, 4\)"),
    (lambda s: {"teacher": nn.Linear(3, 4)}, "teacher does not run on "),
    (lambda s: {"teacher": s.network}, "shares weights"),
    (lambda s: {"teacher": "fixed"}, "frozen"),
    (lambda s: {"batches": [x for x, _ in labelled(2, 1)]}, "no labels"),
    (lambda s: {"batches": [(x, None) for x, _ in labelled(2, 1)]}, "no labels"),
    (lambda s: {"batches": iter(labelled(2, 1))}, "read again"),
    (lambda s: {"batches": []}, "at least one"),
    (lambda s: {"held_out": []}, "at least one"),
    (lambda s: {"batches": SAME, "held_out": SAME}, "measure on other data"),
    (lambda s: {"batches": WORKERS, "resume": "state"}, "persistent_workers=False"),
    (lambda s: {"minutes": 1.0}, "either steps or minutes"),
    (lambda s: {"steps": 0}, "steps: 0"),
    (lambda s: {"clip": float("nan")}, "clip"),
    (lambda s: {"trained": []}, "at least one; got none"),
    (lambda s: {"trained": ["width=0.5"]}, "SubnetSpec"),
    (lambda s: {"trained": [s.space.smallest()], "random_subnets": 0}, "give at least 1"),
    (lambda s: {"divergence": "alpha"}, "divergence: 'alpha' is no function"),
    (lambda s: {"labels": False, "distillation": 0.5}, "needs labels"),
    (lambda s: {"optimizer": torch.optim.SGD(Net().parameters(), 0.1)}, "no parameter of the supernet"),
]


def masked(change: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {"batches": [(x, change(masks)) for x, masks in scenes(2, 1)]}


REFUSED_PIXELS: list[tuple[dict[str, Any], str]] = [
    (masked(lambda m: m.clone().fill_(255)), "a label is 255, but the classes are 0 to 2.*-100"),
    (masked(lambda m: m.clone().fill_(-1)), "a label is -1"),
    (masked(lambda m: m[:, None]), r"shape \(4, 8, 8\) for scores of shape \(4, 3, 8, 8\)"),
    (masked(lambda m: m[:, ::2, ::2]), "resize the scores with output="),
    (masked(lambda m: m.float()), "whole numbers"),
    (masked(lambda m: m.numpy()), "labels are a tensor, got ndarray"),
    ({"output": lambda found, x: found["out"][:, :1]}, "make two"),
    ({"output": lambda found, x: found}, "what is learnt is a dictionary"),
    ({"task": "vectors", "batches": [x for x, _ in scenes(2, 1)]}, "give output="),
    ({"labels": False}, "does not run on a tuple of 2.*pair"),
    ({"metric": lambda scores, masks: scores.mean(1)}, "no single number"),
    ({"metric": lambda scores, masks: {"iou": 1.0}}, "no single number"),
]


def test_what_is_wrong_or_does_not_fit_is_refused_and_changes_nothing() -> None:
    classes, pixels = new_supernet(), elastic(Pixels(), torch.randn(2, 2, 8, 8))
    cases = [(classes, labelled, change(classes), message) for change, message in REFUSED]
    for supernet, data, given, message in [*cases, *((pixels, scenes, *one) for one in REFUSED_PIXELS)]:
        before = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}
        options = {"batches": data(2, 1), "held_out": data(1, 2), "steps": 1, **QUIET, **given}
        with pytest.raises((TrainingError, SpecError), match=message):
            distill_(supernet, **options)
        assert all(torch.equal(tensor, before[name]) for name, tensor in supernet.state_dict().items())
        assert not supernet.training


ATEN = torch.ops.aten
READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select")
WAITS = [getattr(ATEN, name).default for name in READS]


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a GPU would be waited for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func in (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default) and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        self.count += func in WAITS or masks
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("of_texts", [False, True])
@pytest.mark.parametrize("distillation", [1.0, 0.5])
def test_a_step_waits_once_however_many_subnets_it_trains(of_texts: bool, distillation: float) -> None:
    counts, ids = set(), torch.randint(3, 50, (2, 9))
    for number in (0, 6):
        supernet, options = new_supernet(), {"random_subnets": number, "distillation": distillation}
        batches = [(x, torch.where(torch.arange(16) % 3 == 0, -100, y)) for x, y in labelled(3, 1)]
        if of_texts:
            words = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 50))
            supernet = insert_(words.eval(), example=ids, choices=(0.25, 0.5, 0.75, 1.0))
            options |= {"task": "tokens", "labels": True}
            batches = [(ids, torch.where(ids % 5 == 0, -100, ids))] * 3
        options |= {"steps": 4, "importance": None, "progress": False}
        with Waits() as waits:  # type: ignore[no-untyped-call]
            distill_(supernet, batches[:2], held_out=batches[2:], **options)
        counts.add(waits.count)
    assert len(counts) == 1
