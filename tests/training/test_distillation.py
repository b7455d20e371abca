"""distill_: narrow subnets learn, a kill changes nothing, and bad input loses nothing."""

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
from torch.utils.data import DataLoader

from subnetact import calibrate, evaluate, insert_
from subnetact.errors import (
    FileFormatError,
    ResumeMismatch,
    SpecError,
    TrainingError,
    UncalibratedSubnetWarning,
    WriteError,
)
from subnetact.supernet.supernet import Supernet
from subnetact.training import DistillationReport, distill_, distillation, measurement, run, state

QUIET: dict[str, Any] = {"progress": False, "calibration": 2}


def facts(report: DistillationReport) -> dict[str, Any]:
    found = report.to_json()
    del found["seconds"]
    return found


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
    assert facts(again)["subnets"] == facts(found)["subnets"]
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


class Rows(nn.Module):
    """Maps numbers (N, 6) to numbers (N, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def elastic(network: nn.Module, example: Any, **options: Any) -> Supernet:
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


def test_a_regressor_learns_from_labels() -> None:
    supernet = elastic(Rows(), torch.randn(2, 6))
    data = [[(x, x[:, :3] * x[:, 3:]) for x in rows(8, seed)] for seed in (1, 2)]
    report = distill_(
        supernet, data[0], held_out=data[1], task="values", steps=40, learning_rate=0.02, **QUIET
    )
    assert report.metric == "mean squared error"
    assert max(report.after) < 0.9 * min(report.before)


@pytest.mark.parametrize("teacher", [None, "own"])
def test_an_embedder_learns_from_a_teacher_without_labels(teacher: str | None) -> None:
    network = Rows()
    given = copy.deepcopy(network) if teacher else None
    supernet = elastic(network, torch.randn(2, 6))
    report = distill_(
        supernet,
        rows(8, 1),
        given,
        held_out=rows(4, 2),
        task="vectors",
        steps=40,
        learning_rate=0.01,
        **QUIET,
    )
    assert report.metric == "cosine with the teacher"
    assert report.before[0] == pytest.approx(1.0, abs=1e-5)
    assert report.after[0] > 0.98
    assert report.after[-1] > report.before[-1] + 0.02


def test_only_the_subnets_that_were_chosen_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    data = tokens(6, 1)
    supernet = elastic(small_decoder("LlamaConfig"), {**data[0]}, axes=("ffn",))
    chosen, trained = supernet.space.sample(1, 4)[2:], list[list[Any]]()
    step = run.sandwich_step

    def noting(*args: Any, subnets: list[Any], **options: Any) -> Any:
        trained.append(subnets)
        return step(*args, subnets=subnets, **options)

    monkeypatch.setattr(run, "sandwich_step", noting)
    given = {"task": "tokens", "steps": 6, "learning_rate": 0.01, "importance": None, **QUIET}
    specs = [supernet.space.largest(), chosen[0]]
    distill_(
        supernet,
        data,
        held_out=tokens(3, 2),
        subnets=specs,
        trained=chosen,
        random_subnets=1,
        **given,
    )
    assert {subnet for subnets in trained for subnet in subnets} == {specs[0], *chosen}
    assert all(subnets[0] == specs[0] and len(subnets) == 2 for subnets in trained)


@pytest.mark.parametrize("mask", [False, True])
def test_a_language_model_learns(mask: bool) -> None:
    pytest.importorskip("transformers")
    data = tokens(6, 1, mask)
    supernet = elastic(small_decoder("LlamaConfig"), {**data[0]}, axes=("ffn",))
    held_out = tokens(3, 2, mask)
    report = distill_(
        supernet,
        data,
        held_out=held_out,
        task="tokens",
        steps=30,
        learning_rate=0.01,
        **QUIET,
    )
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


def test_long_texts_are_sorted_by_a_passage_that_has_something_to_predict() -> None:
    pytest.importorskip("transformers")
    ids = torch.randint(3, 50, (3, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 300, dtype=torch.long)
    mask[1, 280:], mask[2, :40] = 1, 1
    data = [{"input_ids": ids.roll(i, 1), "attention_mask": mask, "use_cache": False} for i in range(2)]
    supernet = elastic(small_decoder("LlamaConfig"), {**data[0]}, axes=("ffn",))
    report = distill_(supernet, data, held_out=data[:1], task="tokens", steps=1, **QUIET)
    assert "sorted by taylor" in report.order


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


class Slow(list[Any]):
    """Batches that take a second of a clock each; at a number of seconds, the user stops the training."""

    seconds, stop = 0.0, float("inf")

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.seconds += 1.0
            if self.seconds == self.stop:
                raise KeyboardInterrupt
            yield batch


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_minutes_and_16_bits_go_on_after_a_stop(
    autocast: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(labelled(4, 1))
    for module in (distillation, measurement, run, state):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: slow.seconds))
    options = {"held_out": labelled(2, 2), "autocast": autocast, "learning_rate": 0.02, **QUIET}
    expected = distill_(new_supernet(), labelled(4, 1), steps=18, **options)
    assert sum(expected.after) > sum(expected.before) + 50.0
    options |= {"minutes": 20 / 60, "resume": tmp_path / "s", "save_every_s": 0.0}
    slow.stop = 12.0
    with pytest.raises(KeyboardInterrupt):
        distill_(new_supernet(), slow, **options)
    found = distill_(new_supernet(), slow, **options)
    assert (found.steps, found.seconds) == (18, 18.0)  # Two batches were read before the first step.
    torch.testing.assert_close(numbers(found), numbers(expected))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock that stands still unless `seconds` are added."""
    found = SimpleNamespace(seconds=0.0)
    for module in (distillation, measurement, run, state):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: found.seconds))
    return found


def ticking(batches: list[Any], clock: SimpleNamespace) -> Any:
    """Return batches that take a second each."""

    class Ticking(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                clock.seconds += 1.0
                yield batch

    return Ticking(batches)


def test_minutes_are_those_of_measuring_and_training(clock: SimpleNamespace) -> None:
    held_out = ticking(labelled(10, 2), clock)
    report = distill_(new_supernet(), ticking(labelled(4, 1), clock), held_out=held_out, minutes=1.0, **QUIET)
    assert report.batches == 3  # A twentieth of a minute.
    assert report.steps == 60 - 2 * 3 - QUIET["calibration"]
    assert clock.seconds == 60
    again = distill_(new_supernet(), labelled(4, 1), held_out=held_out[:3], steps=report.steps, **QUIET)
    torch.testing.assert_close(numbers(report), numbers(again))


def test_saving_takes_a_small_share_of_the_time(
    clock: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, saved = state.write_tensors, list[float]()

    def slow(*arguments: Any) -> None:
        clock.seconds += 10.0
        saved.append(clock.seconds)
        write(*arguments)

    monkeypatch.setattr(state, "write_tensors", slow)
    batches, options = ticking(labelled(4, 1), clock), {"held_out": labelled(1, 2), "steps": 250}
    distill_(new_supernet(), batches, resume=tmp_path / "s", **options, **QUIET)
    first, second, _ = saved
    assert second - first == 10.0 + 200.0


def test_what_is_done_is_said_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    distill_(new_supernet(), labelled(2, 1), held_out=labelled(1, 2), steps=2, calibration=2)
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    for task in ("measuring 4 subnets", "sorting by l1", "distilling"):
        assert [line for line in lines if f"distill_: {task}: 100%" in line], lines


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
        plain = elastic(
            nn.Sequential(nn.Flatten(), nn.Linear(50, 16), nn.ReLU(), nn.Linear(16, 4)), half[0][0]
        )
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        distill_(plain, batches, accumulate=count, optimizer=optimizer, **options)
        found.append(torch.cat([parameter.detach().flatten() for parameter in plain.parameters()]))
    torch.testing.assert_close(*found)


OTHER = nn.Sequential(nn.Flatten(), nn.Linear(50, 7))
WORKERS: Any = DataLoader(labelled(2, 1), batch_size=None, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"teacher": OTHER}, r"shape \(16, 7\), the supernet .*\(16, 4\)"),
        (lambda s: {"teacher": nn.Linear(3, 4)}, "does not run on the first batch"),
        (lambda s: {"teacher": s.network}, "shares weights"),
        (lambda s: {"teacher": "fixed"}, "frozen"),
        (lambda s: {"batches": [x for x, _ in labelled(2, 1)]}, "no labels"),
        (lambda s: {"batches": [(x, None) for x, _ in labelled(2, 1)]}, "no labels"),
        (lambda s: {"batches": iter(labelled(2, 1))}, "read again"),
        (lambda s: {"batches": []}, "at least one"),
        (lambda s: {"held_out": []}, "at least one"),
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
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(
    change: Callable[[Supernet], dict[str, Any]], message: str
) -> None:
    supernet = new_supernet()
    before = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}
    given = {"batches": labelled(2, 1), "held_out": labelled(1, 2), "steps": 1, **QUIET, **change(supernet)}
    with pytest.raises((TrainingError, SpecError), match=message):
        distill_(supernet, **given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in supernet.state_dict().items())
    assert not supernet.training


def test_the_training_data_is_no_held_out_data() -> None:
    data = labelled(2, 1)
    with pytest.raises(TrainingError, match="measure on other data"):
        distill_(new_supernet(), data, held_out=data, steps=1)


def test_other_batches_are_refused_on_resume(tmp_path: Path) -> None:
    options = {"held_out": labelled(1, 2), "resume": tmp_path / "s", **QUIET}
    distill_(new_supernet(), Batches(), steps=2, **options)
    with pytest.raises(ResumeMismatch, match="another one"):
        distill_(new_supernet(), labelled(4, 9), steps=3, **options)
    other = new_supernet()
    torch.nn.init.ones_(next(other.parameters()))
    with pytest.raises(ResumeMismatch, match="weights"):
        distill_(other, Batches(), steps=3, **options)


def test_a_report_can_be_saved(tmp_path: Path) -> None:
    report = distill_(new_supernet(), labelled(2, 1), held_out=labelled(1, 2), steps=2, **QUIET)
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == report.to_json()
    assert "2 steps" in str(report)
