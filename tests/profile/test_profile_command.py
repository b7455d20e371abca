"""`python -m subnetact.profile` goes from a checkpoint to a bundle, and survives a kill at any moment."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_families import small_constructor, small_supernet

import ofa_adapters
import subnetact
import subnetact.nas
from subnetact import Engine, LatencyTable, SlackFit, from_pretrained, profile_latency, simulate
from subnetact.command import import_name
from subnetact.costs import CostModel
from subnetact.elastic.__main__ import main as elastic
from subnetact.errors import SpecError
from subnetact.files.journal import Journal, signed
from subnetact.latency.origin import count_stable, run_otherwise
from subnetact.profile.cli import build_parser, main
from subnetact.profile.modes import TimedRunner
from subnetact.profile.options import call_with_options
from subnetact.profile.pipeline import ProfileJob, run_profile
from subnetact.profile.selection import SelectionRequest, fitted_latencies
from subnetact.profile.source import ProfileSource, load_source
from subnetact.profile.sweep import SweepSettings
from subnetact.supernet.statistics import is_calibrated
from subnetact.supernet.supernet import Supernet

QUICK = ["--device", "cpu", "--threads", "1", "--min-time-ms", "3", "--warmup-ms", "0", "--windows", "3",
         "--max-windows", "3"]  # fmt: skip
FACTORY = "profile_factory"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def run(tmp_path: Path, *arguments: Any) -> int:
    """Run the command; a table of other options, which it would not replace, is moved away before."""
    if "--resume" not in arguments:
        for path in tmp_path.glob("t*.json"):
            path.unlink()
    return main([*QUICK, "--out", str(tmp_path / "t.json"), *map(str, arguments)])


@pytest.fixture
def refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Require that the command refuses arguments in some words."""

    def check(words: str, *arguments: Any) -> None:
        assert run(tmp_path, *arguments) == 2
        assert words in capsys.readouterr().err

    return check


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run the command, and interrupt it, or send a signal, instead of recording a window."""

    def run_until(windows: int, *arguments: Any, sent: signal.Signals | None = None) -> None:
        append, left = Journal.append, iter(range(windows))

        def recorded(journal: Journal, record: str, **facts: Any) -> None:
            if record == "window" and next(left, None) is None:
                if sent is None:
                    raise KeyboardInterrupt
                signal.raise_signal(sent)
            append(journal, record, **facts)

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append", recorded)
            assert run(tmp_path, *arguments) == 130

    return run_until


def table_in(tmp_path: Path) -> LatencyTable:
    return LatencyTable.load(tmp_path / "t.json")


def sign_again(journal: Path) -> None:
    """Give an edited journal checksums that fit."""
    known, texts = "", []
    for line in map(json.loads, journal.read_text().splitlines()):
        text, known = signed(known, {key: value for key, value in line.items() if key != "sum"})
        texts.append(text)
    journal.write_text("".join(texts))


def test_a_search_ends_in_tables_and_a_bundle_whose_names_show_the_front(tmp_path: Path, capsys: Any) -> None:
    bundle, x = tmp_path / "b", torch.randn(2, 1, 16, 16)
    sizes = ("--batch-sizes", 1, 4, "--save-bundle", bundle)
    arguments = (
        "--subnets", 6, *sizes, "--accuracy", f"{FACTORY}:accuracy", "--fit-subnets", 0,
        "--remeasure-accuracy", f"{FACTORY}:later_accuracy", "--calibrate-on", f"{FACTORY}:batches",
        "--quantiles", 50, 75,
    )  # fmt: skip
    assert run(tmp_path, *arguments) == 0
    table, engine = table_in(tmp_path), Engine.load(bundle)
    accuracy = import_name(f"{FACTORY}:accuracy")(engine.supernet)
    assert table.accuracy == pytest.approx([accuracy(spec) - 7.0 for spec in engine.specs])
    assert list(table.accuracy) == sorted(table.accuracy)
    assert table.stamp["accuracy_source"] == f"{FACTORY}:accuracy, then {FACTORY}:later_accuracy"
    assert table.stamp["calibrated_on"] == f"{FACTORY}:batches"
    assert {"mean", "std", "min", "p50", "p75", "stable", "runs"} <= set(table.statistics)
    assert "p99" not in table.statistics
    np.testing.assert_array_equal(table.latency_ms, table.statistics["p50"])
    scheduler = LatencyTable.load(tmp_path / "t.scheduler.json")
    assert scheduler == table.monotone()
    assert (engine.keys, engine.accuracy) == (table.subnets, table.accuracy)
    assert engine.tables == {"measured": table, "scheduler": scheduler}
    assert all(is_calibrated(engine.supernet, spec) for spec in engine.specs)
    policy = SlackFit(scheduler, slo_ms=1000)
    assert simulate([0.0, 1.0], scheduler, policy, slo_ms=1000).attainment == 1.0
    rows = zip(engine.names, table.latency_ms, table.accuracy, strict=True)
    cells = {name: (*ms, -percent) for name, ms, percent in rows}
    for name, costs in cells.items():
        beaten = any(all(a <= b for a, b in zip(o, costs, strict=True)) for o in cells.values() if o != costs)
        assert name.startswith("subnet-" if beaten else "pareto-")
    for kind in ("pareto", "subnet"):
        ascending = [name for name in sorted(cells, key=cells.__getitem__) if name.startswith(kind)]
        assert ascending == [f"{kind}-{i}" for i in range(len(ascending))]
    for name, key in zip(engine.names, engine.keys, strict=True):
        by_name, by_key = (from_pretrained(bundle, subnet=one) for one in (name, key))
        assert torch.equal(by_name(x), by_key(x))
    with pytest.raises(SpecError, match="no subnet is called 'pareto-9'; choose from pareto-0, "):
        from_pretrained(bundle, subnet="pareto-9")
    assert run(tmp_path, "--bundle", bundle, *sizes) == 0
    assert Engine.load(bundle).names == engine.names, "names stay when a bundle is profiled again"
    printed = capsys.readouterr().out
    assert all(f"  {name}\n" in printed for name in engine.names)
    assert elastic([str(bundle), "--card"]) == 0
    card = capsys.readouterr().out.splitlines()
    assert card.count("BatchNorm statistics: their own statistics.") == 1
    heading = next(line for line in card if line.startswith("| subnet"))
    assert heading.count("| ms, ") == 1, "the table for schedulers is of the same measurement"
    assert f"| ms, zero-copy, batch size 1, 1 thread, {table.stamp['device_name'] or 'cpu'}, " in heading
    assert heading.endswith(", statistic p50, dtype float32, input_shape [1, 16, 16] |")
    assert run(tmp_path, "--subnets", "random:3", "--batch-sizes", 1, "--save-bundle", tmp_path / "r") == 0
    random_ones: Any = from_pretrained(tmp_path / "r")
    assert set(random_ones.card.subnets) == {"subnet-0", "subnet-1", "subnet-2"}


def test_a_search_measures_before_it_trusts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runners: list[TimedRunner] = []
    prepared = TimedRunner.prepared

    def noted(runner: TimedRunner, subnet: int, batch_size: int) -> AbstractContextManager[Any]:
        if not runners or runners[-1] is not runner:
            runners.append(runner)
        return prepared(runner, subnet, batch_size)

    monkeypatch.setattr(TimedRunner, "prepared", noted)
    arguments = ("--subnets", 3, "--batch-sizes", 1, 2, "--fit-subnets", 8, "--evaluations", 40)
    assert run(tmp_path, *arguments, "--accuracy", f"{FACTORY}:accuracy") == 0
    assert table_in(tmp_path).stamp["measured_before_trusted"] is True
    fitted, *trusted, profiled = [len(runner.engine.keys) for runner in runners]
    assert (fitted, profiled) == (8, 3)
    assert len(trusted) >= 3
    assert set(trusted) == {1}


def test_a_search_without_accuracies_says_so_and_needs_scipy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: Any
) -> None:
    assert run(tmp_path, "--subnets", 4, "--batch-sizes", 1, "--fit-subnets", 8, "--evaluations", 1000) == 0
    table = table_in(tmp_path)
    assert np.isnan(table.accuracy).all()
    assert table.stamp["accuracy_source"].startswith("not known")
    assert "each predicted from" in table.stamp["search_latency"]["batch 1"]
    assert table.stamp["evaluated"] == 864
    assert table.stamp["calibrated_on"] == (
        "not calibrated: 4 of 4 subnets ran on the supernet's shared BatchNorm statistics; latencies are "
        "valid, accuracies are not"
    )
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    refuses("subnetact[nas]", "--subnets", 8)
    few = ("--evaluations", 4, "--batch-sizes", 1)
    assert run(tmp_path, "--subnets", 2, "--fit-subnets", 0, *few) == 0


def test_accuracy_from_a_predictors_checkpoint(tmp_path: Path, refuses: Any) -> None:
    family = small_supernet("ofa_resnet50")
    space, encode = family.space, partial(ofa_adapters.encode, family.space, image_size=128)
    predictor = subnetact.nas.AccuracyPredictor(encode, len(encode(space.smallest())))
    with torch.no_grad():
        predictor.network.base_acc.fill_(0.7)
    torch.save(predictor.network.state_dict(), tmp_path / "predictor.pth")
    torch.save(family.state_dict(), tmp_path / "family.pth")
    constructor = json.dumps(small_constructor("ofa_resnet50"))
    arguments = (
        "--family", "ofa_resnet50", "--checkpoint", tmp_path / "family.pth", "--constructor", constructor,
        "--subnets", 3, "--fit-subnets", "0", "--evaluations", 20, "--batch-sizes", 1,
        "--accuracy", tmp_path / "predictor.pth",
    )  # fmt: skip
    refuses("choose from 128, 144", *arguments, "--input-shape", 3, 96, 96)
    assert run(tmp_path, *arguments, "--input-shape", 3, 128, 128) == 0
    table = table_in(tmp_path)
    assert table.stamp["accuracy_source"] == "predicted by predictor.pth"
    assert table.stamp["supernet"] == family.fingerprint()
    percents = dict(zip(table.subnets, table.accuracy, strict=True))
    known = [spec for spec in (space.smallest(), space.largest()) if spec.key in percents]
    assert known
    assert [percents[spec.key] for spec in known] == pytest.approx(list(map(predictor, known)))


def test_subnets_of_a_file_and_of_a_bundle(tmp_path: Path, digits: Supernet, refuses: Any) -> None:
    space, listed, bundle = digits.space, tmp_path / "subnets.json", ("--bundle", tmp_path / "b")
    chosen = [space.smallest(), space.largest()]
    listed.write_text(json.dumps([space.format(chosen[0]), chosen[1].to_json()]))
    arguments = ("--model", f"{FACTORY}:supernet", "--input-shape", 1, 16, 16, "--batch-sizes", 2)
    assert run(tmp_path, *arguments, "--subnets", listed, "--accuracy", 50, 60.5,
               "--calibrate-on", "random:5", "--save-bundle", tmp_path / "b") == 0  # fmt: skip
    table = table_in(tmp_path)
    assert table.subnets == tuple(spec.key for spec in chosen)
    assert table.accuracy == (50.0, 60.5)
    assert "latency only" in table.stamp["calibrated_on"]
    assert run(tmp_path, *bundle, "--batch-sizes", 1, "--mode", "fused") == 0
    again = table_in(tmp_path)
    assert (again.subnets, again.accuracy, again.batch_sizes) == (table.subnets, table.accuracy, (1,))
    facts = ("fused", table.stamp["supernet"], "their own statistics")
    assert tuple(again.stamp[name] for name in ("mode", "supernet", "calibrated_on")) == facts
    assert run(tmp_path, *bundle, "--batch-sizes", 1, "--accuracy", 70, 60.5) == 0
    assert table_in(tmp_path).accuracy == (70.0, 60.5)
    served = Engine(Engine.load(tmp_path / "b").supernet, chosen, example=torch.zeros(1, 1, 16, 16))
    served.tables["scheduler"] = again  # which alone knows the accuracies
    served.save(tmp_path / "s")
    options = ("--bundle", tmp_path / "s", "--mode", "as served", "--batch-sizes", 1)
    assert run(tmp_path, *options, "--save-bundle", tmp_path / "s") == 0
    served = Engine.load(tmp_path / "s")
    assert served.tables["scheduler"].accuracy == (50.0, 60.5)
    assert run_otherwise(served.tables["scheduler"], served) == ""
    refuses("1 values for 2 subnets", *bundle, "--batch-sizes", 1, "--accuracy", 70)
    listed.write_text(json.dumps({"subnets": []}))
    refuses("expected a JSON list", "--subnets", listed)
    choices = {"depth": 1, "expand": 0.25, "width": 0.125}
    listed.write_text(json.dumps([choices, {**choices, "precision": "int8"}]))
    options = ("--batch-sizes", 1, "--calibrate-on", "random:8", "--save-bundle", tmp_path / "q")
    quantised = ("--subnets", listed, *options)
    assert run(tmp_path, *quantised, "--precision", "float32", "int8") == 0
    assert [key.count("precision=int8") for key in table_in(tmp_path).subnets] == [0, 1]
    assert [spec.precision for spec in Engine.load(tmp_path / "q").specs] == ["float32", "int8"]
    lower = ("--bundle", tmp_path / "q", "--precision", "float32", "--batch-sizes", 1)
    refuses("precision: the supernet has int8, float32", *lower)
    refuses("precision", *quantised)


def test_unstable_cells_fail_a_strict_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--subnets", "random:2", "--batch-sizes", 1, "--tolerance", 300)  # 3 windows tell nothing
    assert run(tmp_path, *arguments) == 0
    assert "2 of 2 cells are unstable" in capsys.readouterr().out
    assert run(tmp_path, *arguments, "--strict") == 3
    assert table_in(tmp_path).statistics["stable"].tolist() == [[0.0], [0.0]]
    five = ("--windows", 5, "--max-windows", 5)
    assert run(tmp_path, *arguments[:-1], 1e8, "--strict", *five) == 0
    stable = {"stable": [[1, math.nan]], "stable_of_view": [[0, math.nan]]}
    table = LatencyTable(["a"], [70.0], [1, 2], [[2.0, math.nan]], stable)
    assert count_stable(table) == (2, 1), "further modes count, too"


def test_tables_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = LatencyTable(["a", "b"], [math.nan] * 2, [1, 2], [[1.0, 2.0], [3.0, 4.0]])
    table.save(tmp_path / "a.json")
    table.scaled(1.04).save(tmp_path / "b.json")
    compared = ["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main(compared) == 0
    assert "0 of 4 cells differ by more than 5 %" in capsys.readouterr().out
    assert main([*compared, "--tolerance", "3"]) == 3
    assert "4 of 4 cells differ by more than 3 %" in capsys.readouterr().out
    assert main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "none.json")]) == 2
    assert main([*compared, "--statistic", "p98"]) == 2
    assert "a table has no 'p98'; it has none" in capsys.readouterr().err


WRONG: list[tuple[str, str]] = [  # options, of which the last word is not split, and what is said
    ("--family resnet", "choose from"),
    ("--device nonsense", "device 'nonsense' cannot be used"),
    ("--checkpoint x.pth", "say with --family"),
    ("--family ofa_resnet50 --checkpoint /none.pth", "no file is there"),
    ("--family ofa_resnet50 --bundle b", "give one of them"),
    ("--subnets -1", "at least 1"),
    ("--subnets none.json", "is no file"),
    ("--subnets 3 --accuracy 70 71 72", "function of a subnet"),
    (f"--subnets all --accuracy {FACTORY}:accuracy --remeasure-accuracy f:g", "for a search"),
    (f"--subnets 3 --remeasure-accuracy {FACTORY}:accuracy", "for a search, --subnets N, with"),
    ("--subnets random:2 --batch-sizes 4 1", "does not ascend"),
    ("--subnets random:2 --input-shape 3 16 16", "expected input"),
    ("--subnets random:2 --mode graphs", "for cuda"),
    ("--threads 0", "at least 1"),
    ("--dtype float31", "float31"),
    (f"--model {FACTORY}:no_supernet", "must return a Supernet"),
    ("--save-bundle .", "neither new nor a bundle"),
    ("--calibrate-on random:0", "at least random:1"),
    ("--subnets random:2 --calibrate-on x.npy", "not readable as an array"),
    ("--out /none/t.json", "folder that exists"),
    ("--subnets random:2 --accuracy 70 p.pth", "only one of them"),
    ("--fit-subnets 3", "0 or at least 8"),
    ('--bundle b --constructor {"a":1}', "arguments for --family or --model"),
    ("--calibrate-on wide.npy", "images are [1, 16, 17], --input-shape is [1, 16, 16]"),
    (f"--model {FACTORY}:broken", f"model '{FACTORY}:broken' raised KeyError: 'own'"),
    (f"--model {FACTORY}:none", "has no attribute 'none')\n"),
    (f"--model {FACTORY}", "write pkg.mod:name"),
    ("--model nowhere:f", "name the folder in PYTHONPATH"),
    (f'--model {FACTORY}:supernet --constructor {{"a":1}}', "raised TypeError: supernet()"),
    (f"--subnets random:2 --accuracy {FACTORY}:broken", "raised TypeError: broken()"),
    (f"--subnets random:2 --calibrate-on {FACTORY}:broken", "raised KeyError: 'own'"),
    ("--evaluations 1", "--evaluations: 1 must be at least 2"),
    ("--subnets random:2 --accuracy 70", "1 values for 2 subnets"),
    (f"--model {FACTORY}:supernet", "for example --input-shape 3 224 224"),
    ("--memory-budget-mb nan", "memory_budget_mb: nan must be a number"),
    ("--subnets random:2 --batch-sizes 99999999999", "larger than 65536"),
    ("--subnets random:2 --batch-sizes 0", "batch_sizes["),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_arguments(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.txt").touch()
    np.save(tmp_path / "here" / "wide.npy", np.zeros((2, 1, 16, 17), np.float32))
    monkeypatch.chdir(tmp_path / "here")
    assert main([*QUICK, "--batch-sizes", "1", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert ("profile_factory.py" in said) == ("raised KeyError" in words), (
        "an error in a factory has its place"
    )
    assert not (tmp_path / "here" / "latency.json").exists()


def test_an_unfinished_run_is_resumed_and_nothing_is_overwritten(
    tmp_path: Path, refuses: Any, interrupted: Any, digits: Supernet, capsys: Any
) -> None:
    listed, space, journal = tmp_path / "s.json", digits.space, tmp_path / "t.json.work" / "journal.jsonl"
    listed.write_text(json.dumps([space.format(space.smallest())]))
    arguments = ("--subnets", listed, "--batch-sizes", 1, 2, 4)
    interrupted(4, *arguments)
    assert "--resume continues" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()
    refuses("5 records of an earlier run; resume it", *arguments)
    refuses(f"or remove the folder {journal.parent}", *arguments)
    refuses("min_time_ms was 3.0, is 4.0", *arguments, "--resume", "--min-time-ms", 4)
    refuses("request.seed was 0, is 1", *arguments, "--resume", "--seed", 1)
    assert run(tmp_path, *arguments, "--resume") == 0
    table = table_in(tmp_path)
    assert table.statistics["windows"].tolist() == [[3.0] * 3]
    journal.write_text(journal.read_text().replace(f'"at": "{table.stamp["measured"]}"', '"at": "long ago"'))
    refuses("changed since it was written", *arguments, "--resume")
    sign_again(journal)
    assert run(tmp_path, *arguments, "--resume") == 0
    assert table_in(tmp_path).stamp["measured"] == "long ago"
    listed.write_text(json.dumps([space.format(space.largest())]))
    refuses("sha256", *arguments, "--resume")
    assert run(tmp_path, *arguments) == 0  # a finished one is begun afresh
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    command = [*QUICK, *map(str, arguments), "--out", str(tmp_path / "t.json")]
    for others in (["--seed", "5"], ["--batch-sizes", "1"]):
        assert main([*command, *others]) == 2
        assert "choose another --out, or continue with --resume" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == kept
    (tmp_path / "t.json").write_text("a thesis")
    assert main(command) == 2
    assert main([*command, "--out", str(tmp_path / "five.json")]) == 0


def test_statistics_of_an_evaluation_survive(tmp_path: Path, interrupted: Any) -> None:
    arguments = ("--subnets", 3, "--fit-subnets", "0", "--evaluations", 8, "--batch-sizes", 1,
                 "--accuracy", f"{FACTORY}:calibrated_accuracy", "--save-bundle")  # fmt: skip
    assert run(tmp_path, *arguments, tmp_path / "whole") == 0
    interrupted(0, *arguments, tmp_path / "cut")
    assert run(tmp_path, *arguments, tmp_path / "cut", "--resume") == 0
    engines = [Engine.load(tmp_path / name) for name in ("whole", "cut")]
    for engine in engines:
        assert set(engine.supernet.norms) == set(engine.specs)
        assert engine.tables["measured"].stamp["calibrated_on"] == "their own statistics"
    for spec in engines[0].specs:
        assert torch.equal(*(engine.supernet.norms.rows[spec].flat for engine in engines))


def test_latencies_are_fitted_to_what_ran(digits: Supernet) -> None:
    costs = CostModel(digits, torch.zeros(1, 1, 16, 16))
    specs = list(digits.space.enumerate())[:9]

    def measure(some: Any, sizes: Any) -> list[list[float]]:
        return [[math.nan if i == 0 else 1.0 + i, math.nan if i < 2 else 2.0 + i] for i in range(len(some))]

    (one,) = fitted_latencies(costs, specs, [1, 64], measure)
    assert (one.batch_size, one.error.test) == (1, 8)
    with pytest.raises(SpecError, match=r"7 ran at batch size 1, 6 ran at batch size 64.*--fit-subnets 0"):
        fitted_latencies(costs, specs[:8], [1, 64], measure)


@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_sources_keep_dtypes_and_inputs_and_own_networks_are_given_again(
    digits: Supernet, tmp_path: Path, refuses: Any, capsys: Any
) -> None:
    example = torch.zeros(1, 1, 16, 16, dtype=torch.float64)
    digits.double()
    Engine(digits, [digits.space.smallest()], example=example, allow_uncalibrated=True).save(tmp_path / "b")
    kept = load_source(bundle=str(tmp_path / "b"))
    assert (kept.sample.dtype, kept.supernet.fingerprint()) == (torch.float64, digits.fingerprint())
    cast = load_source(bundle=str(tmp_path / "b"), dtype="bfloat16")
    assert cast.sample.dtype == next(cast.supernet.parameters()).dtype == torch.bfloat16
    pair = import_name(f"{FACTORY}:two_inputs")()
    inputs = (torch.ones(1, 4), torch.zeros(1, 4))
    Engine(pair, [pair.space.smallest()], example=inputs).save(tmp_path / "pair")
    with pytest.raises(SpecError, match=r"its input is a tuple.*subnetact\.profile_latency"):
        load_source(model=f"{FACTORY}:two_inputs", bundle=str(tmp_path / "pair"))
    sizes = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96}
    constructor = {**sizes, "vocab_size": 30}
    tokens = load_source(family="dynabert", constructor=constructor).sample
    assert (tokens.shape, tokens.dtype) == ((128,), torch.int64)
    model, bundle = ("--model", f"{FACTORY}:own_network"), tmp_path / "own"
    options = ("--subnets", "all", "--input-shape", 4, "--batch-sizes", 1, "--save-bundle", bundle)
    assert run(tmp_path, *model, *options) == 0
    assert f"Engine.load({str(bundle)!r}, supernet=yours)" in capsys.readouterr().out
    first = table_in(tmp_path)
    refuses("", "--bundle", bundle, "--batch-sizes", 1)
    (tmp_path / "again").mkdir()
    assert run(tmp_path / "again", *model, "--bundle", bundle, "--batch-sizes", 1, 2) == 0
    again = table_in(tmp_path / "again")
    assert first.subnets == again.subnets
    assert first.stamp["supernet"] == again.stamp["supernet"]
    chosen = ("--family", "dynabert", "--constructor", json.dumps(constructor), "--subnets", "random:1")
    words = "see --input-shape and --input-dtype"
    refuses(words, *chosen, "--input-dtype", "float32", "--input-shape", "3")


def options_for(folder: Path, *more: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    arguments = [
        "--subnets", "3", "--fit-subnets", "0", "--evaluations", "8", "--batch-sizes", "1", "2",
        "--calibrate-on", "random:4", "--out", str(folder / "t.json"),
        "--save-bundle", str(folder / "bundle"),
    ]  # fmt: skip
    return [*QUICK, *arguments, *more]


FORKS = """
import os, sys
import subnetact.profile.pipeline  # once for all of the processes
from subnetact.profile.cli import main
while sys.stdin.readline():
    process = os.fork()
    if not process:
        os._exit(main(sys.argv[1:]))
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def lines_of(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def test_killed_anywhere_it_ends_with_the_same_bundle(tmp_path: Path, capsys: Any) -> None:
    assert main(options_for(tmp_path / "whole")) == 0
    folder, journal = tmp_path / "killed", tmp_path / "killed" / "t.json.work" / "journal.jsonl"
    rng, kills = random.Random(0), 0
    command = [sys.executable, "-c", FORKS, *options_for(folder, "--resume")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None
        for _ in range(2):
            enough = lines_of(journal) + rng.randint(1, 8)
            print(file=forks.stdin, flush=True)
            process = int(forks.stdout.readline())
            while Path(f"/proc/{process}/exe").exists() and lines_of(journal) < enough:
                time.sleep(0.001)
            kept = journal.read_bytes()
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            kills += int(forks.stdout.readline()) == -signal.SIGKILL
            assert journal.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
        forks.stdin.close()
    assert kills
    capsys.readouterr()
    assert main(options_for(folder, "--resume")) == 0
    assert "profiling" not in capsys.readouterr().err  # progress bars stay out of log files
    folders = (tmp_path / "whole", folder)
    tables, engines = map(table_in, folders), [Engine.load(one / "bundle") for one in folders]
    first, last = tables
    assert (first.subnets, first.batch_sizes) == (last.subnets, last.batch_sizes)
    assert first.statistics["windows"].tolist() == last.statistics["windows"].tolist()
    for key in set(first.stamp) - {"measured", "command", "load_average", "clock_mhz"}:
        assert first.stamp[key] == last.stamp[key]
    for name in ("model.safetensors", "norms.safetensors"):
        tensors = [load_file(one / "bundle" / name) for one in folders]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
    assert engines[0].specs == engines[1].specs
    assert engines[1].tables["measured"] == last


def test_a_terminated_run_leaves_what_was_measured(tmp_path: Path, capsys: Any, interrupted: Any) -> None:
    interrupted(1, "--subnets", "random:2", "--batch-sizes", 1, sent=signal.SIGTERM)
    errors = capsys.readouterr().err
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "t.json").exists()
    records = map(json.loads, (tmp_path / "t.json.work" / "journal.jsonl").read_text().splitlines()[1:])
    assert [record["record"] for record in records] == ["chosen", "window"]


def test_the_command_and_the_functions_have_the_same_defaults() -> None:
    args = build_parser().parse_args([])
    request = SelectionRequest()
    assert call_with_options(SweepSettings, args) == SweepSettings()
    assert call_with_options(SelectionRequest, args, subnets=request.subnets) == request
    assert call_with_options(ProfileJob, args, device="cpu") == ProfileJob()
    names = [ProfileJob(out=Path(name)).scheduler_out.name for name in ("t.json", "a.v1", "a.v2")]
    assert names == ["t.scheduler.json", "a.v1.scheduler.json", "a.v2.scheduler.json"]
    for name, parameter in signature(profile_latency).parameters.items():
        if hasattr(SweepSettings, name):
            assert parameter.default == getattr(SweepSettings, name)
    assert SweepSettings().max_windows == 10
    assert SweepSettings(windows=60).max_windows == 60


def test_help_is_grouped_explains_every_option_and_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(action.help for action in build_parser()._actions)
    with pytest.raises(SystemExit) as exited:
        main(["--help"])
    assert exited.value.code == 0
    printed = capsys.readouterr().out
    for words in ("how times are measured:", "(default: 20.0)", "(default: (1, 2, 4, 8, 16))", "exit status:",
                  "(default: 10, or --windows)", "--compare monday.json", "def FACTORY("):  # fmt: skip
        assert words in printed
    assert "(default: None)" not in printed
    assert "(default: ())" not in printed


def test_a_stamp_rebuilds_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[tuple[ProfileJob, ProfileSource]] = []

    def noted(job: ProfileJob, source: ProfileSource, command: Any) -> LatencyTable:
        requests.append((replace(job, resume=False), source))
        return run_profile(job, source, command)

    monkeypatch.setattr("subnetact.profile.cli.run_profile", noted)
    np.save(tmp_path / "images.npy", np.ones((4, 3, 32, 32), np.float32))
    family = small_supernet("ofa_resnet50")
    torch.save(family.state_dict(), tmp_path / "family.pth")
    arguments = (
        "--family", "ofa_resnet50", "--checkpoint", tmp_path / "family.pth", "--input-shape", 3, 32, 32,
        "--constructor", json.dumps(small_constructor("ofa_resnet50")), "--seed", 7, "--subnets", 2,
        "--batch-sizes", 1, 2, "--fit-subnets", 8, "--evaluations", 9, "--tolerance", 7.5, "--resume",
        "--accuracy", f"{FACTORY}:accuracy", "--calibrate-on", tmp_path / "images.npy", "--beside", "extract",
    )  # fmt: skip
    assert run(tmp_path, *arguments) == 0
    printed, table = capsys.readouterr().out, table_in(tmp_path)
    for size, error in table.stamp["search_latency"].items():
        assert f"the search's latencies at {size}: {error}\n" in printed
    assert main(table.stamp["command"]) == 0  # the same command may replace its own table
    first, again = requests
    assert first[0] == again[0]
    assert first[1].origin == again[1].origin
    stamp = table_in(tmp_path).stamp
    assert [stamp[name] for name in ("request", "source", "files")] == [
        table.stamp[name] for name in ("request", "source", "files")
    ]
    assert (stamp["request"]["seed"], stamp["request"]["fit_subnets"], stamp["source"]["family"]) == (
        7, 8, "ofa_resnet50",
    )  # fmt: skip
    named = (tmp_path / "family.pth", tmp_path / "images.npy", Path(__file__).with_name(f"{FACTORY}.py"))
    hashes = {hashlib.sha256(path.read_bytes()).hexdigest() for path in named}
    assert hashes == {one["sha256"] for one in stamp["files"].values()}
    assert stamp["versions"]["numpy"] == np.__version__
    assert "p50_of_extract" in table.statistics
    assert (tmp_path / "t.json.work.before" / "done").exists()  # the journal of the first run
