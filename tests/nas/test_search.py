"""Search: legality, resumption, fronts, remeasurement."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_families import small_supernet
from torch import nn

import subnetact
import subnetact.costs
import subnetact.nas
from subnetact import Axis, LatencyTable, insert_, pareto_front, search
from subnetact.digits import load_digits_supernet, new_digits_supernet
from subnetact.errors import FileFormatError, ResumeMismatch, SearchError, TableError
from subnetact.files.journal import Journal
from subnetact.latency import hypervolume
from subnetact.nas.genes import Variation
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

SMALL_FAMILIES = ["ofa_resnet50", "ofa_mbv3", "compofa_mbv3"]


@pytest.fixture(scope="module")
def spaces() -> dict[str, SubnetSpace]:
    found = {name: small_supernet(name).space for name in SMALL_FAMILIES}
    return {"digits": new_digits_supernet().space, **found}


@pytest.mark.parametrize("name", ["digits", *SMALL_FAMILIES])
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_every_variation_is_legal_and_canonical(spaces: dict[str, SubnetSpace], name: str, seed: int) -> None:
    space = spaces[name]
    variation = Variation(space, np.random.default_rng(seed))
    initial = variation.initial(4)
    one, two, *rest = (next(initial) for _ in range(14))
    assert (one, two) == (space.smallest(), space.largest())
    for other in rest:
        one, two = two, variation.spec(variation.mutate(variation.cross(one, other)))
        for spec in (other, two):
            assert space.check(spec) == spec
            assert variation.spec(variation.genes(spec)) == spec


def law(supernet: Supernet) -> tuple[Callable[[SubnetSpec], float], Callable[[SubnetSpec], float]]:
    """A made-up accuracy and latency that pull in opposite directions, not quite in step."""
    model = subnetact.costs.CostModel(supernet, torch.empty(1, 1, 16, 16))

    def accuracy(spec: SubnetSpec) -> float:
        depth, expand = (sum(float(v or 0) for v in spec[axis]) for axis in ("depth", "expand"))
        return 40 + 3 * depth + 8 * expand + 20 * float(spec["width"][0] or 0)

    return accuracy, cache(lambda spec: model(spec).macs / 1e6)


@pytest.fixture(scope="module")
def made_up() -> tuple[Supernet, Any, Any]:
    supernet = new_digits_supernet()
    return supernet, *law(supernet)


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize(
    ("method", "share"),
    [("evolution", 0.6), ("exhaustive", 0.995)],  # the last is killed as it measures again
)
def test_a_killed_search_goes_on(
    made_up: tuple[Supernet, Any, Any], tmp_path: Path, method: str, share: float
) -> None:
    supernet, accuracy, latency = made_up
    state = tmp_path / "state.json"
    asked: list[SubnetSpec] = []

    def run(dies: float, path: Path | None) -> subnetact.nas.SearchResult:
        left = dies

        def counted(spec: SubnetSpec) -> float:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            asked.append(spec)
            return float(accuracy(spec))

        def again(spec: SubnetSpec) -> float:
            return counted(spec) * 0 + 1.1 * float(latency(spec)) + 0.4 * (sum(map(ord, spec.key)) % 2)

        options: dict[str, Any] = {"remeasure": again, "remeasure_accuracy": counted, "resume": path}
        options |= {"size": 8, "evaluations": 60, "method": method, "seed": 4, "progress": False}
        return search(supernet, counted, latency, **options)

    whole = run(math.inf, None)
    total = len(asked)
    assert total <= 864 + 60 + 8
    done = int(share * total)
    with pytest.raises(Killed):
        run(done, state)
    asked.clear()
    assert run(math.inf, state) == whole
    assert len(asked) == total - done, "nothing is evaluated twice"
    asked.clear()
    assert run(math.inf, state) == whole
    assert not asked


def test_evolution_evaluates_distinct_subnets_and_all_count(made_up: tuple[Supernet, Any, Any]) -> None:
    supernet, accuracy, latency = made_up
    found = search(supernet, accuracy, latency, evaluations=60, seed=1, progress=False)
    assert found.method == "evolution"
    specs = [c.spec for c in found.evaluated]
    assert len(set(specs)) == len(specs) == 60
    expected = pareto_front(found.evaluated, cost=lambda c: c.latency_ms, gain=lambda c: c.accuracy)
    assert list(found.front) == expected
    assert search(supernet, accuracy, latency, evaluations=60, seed=1, progress=False) == found
    options = {"method": "random", "progress": False}
    one, other = (search(supernet, accuracy, latency, seed=seed, **options) for seed in (1, np.int64(2)))
    assert [c.spec for c in one.evaluated] != [c.spec for c in other.evaluated]


@pytest.fixture(scope="module")
def true_digits() -> tuple[Supernet, dict[SubnetSpec, float], dict[SubnetSpec, float]]:
    """True accuracies of all 864 subnets, which benchmarks/search.py evaluated, and their million MACs."""
    supernet = load_digits_supernet()
    data = json.loads((Path(__file__).parents[1] / "golden" / "digits" / "accuracy.json").read_text())
    assert data["space"] == supernet.space.id
    assert data["supernet"] == supernet.fingerprint()
    model = subnetact.costs.CostModel(supernet, torch.empty(1, 1, 16, 16))
    specs = list(supernet.space.enumerate())
    return supernet, dict(zip(specs, data["accuracy"], strict=True)), {s: model(s).macs / 1e6 for s in specs}


@pytest.mark.parametrize(("evaluations", "share"), [(50, 0.975), (100, 0.985)])
def test_few_evaluations_find_the_front(true_digits: Any, evaluations: int, share: float) -> None:
    supernet, accuracy, macs = true_digits
    reference = min(accuracy.values()), max(macs.values())
    whole = hypervolume([(accuracy[spec], macs[spec]) for spec in accuracy], reference)
    for seed in range(3):
        volume = {}
        for method in ("evolution", "random"):
            result = search(
                supernet, accuracy.__getitem__, macs.__getitem__,
                evaluations=evaluations, seed=seed, method=method, progress=False,
            )  # fmt: skip
            assert len(result.evaluated) == evaluations
            volume[method] = result.hypervolume(reference)
        assert volume["evolution"] >= max(share * whole, volume["random"])


def test_accuracies_measured_again_are_not_flattered(true_digits: Any, tmp_path: Path) -> None:
    supernet, true, macs = true_digits
    rng = np.random.default_rng(0)
    first, second = ({spec: true[spec] + 2 * rng.standard_normal() for spec in true} for _ in range(2))
    asked: list[SubnetSpec] = []

    def judge(spec: SubnetSpec) -> float:
        asked.append(spec)
        return second[spec]

    def run(**further: Any) -> subnetact.nas.SearchResult:
        named = {"evaluations": 864, "size": 1000, "progress": False, **further}
        return search(supernet, first.__getitem__, macs.__getitem__, **named)

    plain, judged = run(), run(remeasure_accuracy=judge, resume=tmp_path / "state.jsonl")
    specs = [one.spec for one in judged.front]
    assert specs == [one.spec for one in plain.front] == asked, "the second accuracy chooses nothing"
    assert [one.chosen_accuracy for one in judged.front] == [one.accuracy for one in plain.front]
    assert [one.accuracy for one in judged.front] == [second[spec] for spec in specs]
    assert judged.evaluated == plain.evaluated
    flattery = [np.mean([value[spec] - true[spec] for spec in specs]) for value in (first, second)]
    assert flattery[0] > 1.0 > 3 * abs(flattery[1])
    assert run(remeasure_accuracy=judge, resume=tmp_path / "state.jsonl") == judged
    assert asked == specs, "nothing is evaluated twice"


def test_a_table_serves_as_the_latency_of_its_own_subnets(true_digits: Any) -> None:
    supernet, accuracy, macs = true_digits
    keys, ms = [spec.key for spec in macs], [[value, 4 * value] for value in macs.values()]
    table = LatencyTable(keys, list(accuracy.values()), [1, 4], ms)
    latencies = [table.latency_of(1), table.latency_of(2)]
    result = search(supernet, accuracy.__getitem__, latencies, evaluations=864, progress=False)
    for one in result.front:
        np.testing.assert_allclose(one.latencies_ms, [macs[one.spec], 2 * macs[one.spec]])
    with pytest.raises(TableError, match="batch size 5"):
        table.latency_of(5)
    with pytest.raises(TableError, match="LatencyPredictor fitted to these predicts others"):
        search(supernet, accuracy.__getitem__, table.select([0, 1]).latency_of(1), progress=False)


def test_a_budget_near_the_space_is_spent() -> None:
    widths = Axis.uniform("width", ["a", "b", "c"], (1, 2, 3, 4))
    space = SubnetSpace("small", [widths], lambda v: dict(zip("abc", v["width"], strict=True)))
    supernet = insert_(nn.Sequential(nn.Linear(4, 4)).eval(), space, {})
    accuracy, latency = (
        (lambda spec: float(sum(space.resolve(spec)))),
        (lambda spec: float(space.resolve(spec)[0])),
    )
    options: dict[str, Any] = {"evaluations": 62, "method": "evolution", "progress": False}
    found = search(supernet, accuracy, latency, **options)
    assert space.size() == 64
    assert len({c.spec for c in found.evaluated}) == 62


def test_several_batch_sizes_are_objectives_together(made_up: tuple[Supernet, Any, Any]) -> None:
    supernet, accuracy, latency = made_up
    second = lambda spec: 5.0 - latency(spec) * 0.1 + float(spec["depth"][0] or 0)  # noqa: E731
    found = search(supernet, accuracy, [latency, second], evaluations=864, progress=False)
    assert found.method == "exhaustive"
    rows = {(c.accuracy, *c.latencies_ms) for c in found.evaluated}
    assert len(found.front) > 20
    for one in found.front:
        mine = (one.accuracy, *one.latencies_ms)
        assert not any(r != mine and r[0] >= mine[0] and r[1] <= mine[1] and r[2] <= mine[2] for r in rows)


def test_the_size_asked_for_is_spread_evenly(made_up: tuple[Supernet, Any, Any]) -> None:
    supernet, _, latency = made_up
    found = search(supernet, latency, latency, size=9, evaluations=864, progress=False)
    ms = [c.latency_ms for c in found.front]
    assert len(ms) == 9
    gaps = np.diff(ms)
    assert gaps.max() < 2 * gaps.min()


def test_only_what_was_measured_again_is_trusted(made_up: tuple[Supernet, Any, Any]) -> None:
    supernet, accuracy, latency = made_up
    plain = search(supernet, accuracy, latency, evaluations=864, progress=False)
    slow = {c.spec for c in plain.front[1:-1:2]}
    asked: list[SubnetSpec] = []

    def remeasure(spec: SubnetSpec) -> float:
        asked.append(spec)
        return 100.0 + float(latency(spec)) if spec in slow else 2 * float(latency(spec))

    found = search(supernet, accuracy, latency, size=8, evaluations=864, remeasure=remeasure, progress=False)
    assert len(asked) == len(set(asked))
    assert {c.spec for c in found.front} <= set(asked) - slow
    assert all(c.latency_ms == 2 * latency(c.spec) for c in found.front)
    assert len(found.front) == 8 < len(plain.front)


def test_searches_that_cannot_be_are_refused(made_up: tuple[Supernet, Any, Any]) -> None:
    supernet, accuracy, latency = made_up
    for given_, words in (
        ({"evaluations": 1}, "evaluations"),
        ({"evaluations": 20.5}, "evaluations: 20.5 must be a whole number"),
        ({"seed": -1}, "seed: -1 must be"),
        ({"method": "greedy"}, "evolution, exhaustive, random"),
        ({"size": 0}, "size"),
        ({"latency": []}, "latency"),
        ({"accuracy": lambda _: float("nan")}, "finite"),
        ({"accuracy": lambda _: None}, "finite"),
        ({"latency": lambda _: -1.0}, "at least 0 ms"),
        ({"remeasure": lambda _: -1.0}, "at least 0 ms"),
        ({"remeasure": lambda _: [1.0, 2.0]}, "remeasure"),
        ({"remeasure_accuracy": lambda _: float("nan")}, "finite"),
        ({"remeasure_accuracy": [70.0]}, "remeasure_accuracy: .* is no function"),
    ):
        arguments = {"accuracy": accuracy, "latency": latency, "evaluations": 20, "progress": False, **given_}
        with pytest.raises(SearchError, match=words):
            search(supernet, **arguments)
    large = small_supernet("ofa_resnet50")
    assert large.space.size() > 1_000_000
    with pytest.raises(SearchError, match="exhaustive would evaluate all"):
        search(large, accuracy, latency, method="exhaustive", progress=False)


def test_a_state_of_another_search_is_refused(made_up: tuple[Supernet, Any, Any], tmp_path: Path) -> None:
    supernet, accuracy, latency = made_up
    path = tmp_path / "state.json"

    def run(**given_: Any) -> subnetact.nas.SearchResult:
        arguments = {"evaluations": 30, "seed": 0, "resume": path, "progress": False, **given_}
        return search(supernet, accuracy, latency, **arguments)

    run()
    before = path.read_text()
    for given_, words in (({"seed": 1}, "seed"), ({"evaluations": 31}, "evaluations")):
        with pytest.raises(ResumeMismatch, match=words):
            run(**given_)
    other = small_supernet("compofa_mbv3")
    with pytest.raises(ResumeMismatch, match="space"):
        search(other, accuracy, latency, evaluations=30, resume=path, progress=False)
    assert path.read_text() == before


@pytest.mark.parametrize("record", ["evaluated", "remeasured", "remeasured_accuracy"])
@pytest.mark.parametrize(
    "facts",
    [
        {"objectives": [70.0, 1.0]},
        {"spec": {"space": "other", "values": {}}, "objectives": [70.0, 1.0]},
        {"spec": "smallest", "objectives": [70.0, math.inf]},
        {"spec": "smallest", "objectives": [70.0, 1.0, 1.0]},
        {"spec": "smallest", "objectives": "x"},
        {"spec": "smallest"},
    ],
)
def test_damaged_states(
    made_up: tuple[Supernet, Any, Any], tmp_path: Path, record: str, facts: dict[str, Any]
) -> None:
    supernet, accuracy, latency = made_up
    path = tmp_path / "state.jsonl"
    arguments = {"evaluations": 30, "resume": path, "remeasure": latency, "progress": False}
    arguments["remeasure_accuracy"] = accuracy
    search(supernet, accuracy, latency, **arguments)
    environment = json.loads(path.read_text().splitlines()[0])["environment"]
    if facts.get("spec") == "smallest":
        facts = {**facts, "spec": supernet.space.smallest().to_json()}
    path.unlink()
    Journal(path, environment).append(record, **facts)
    with pytest.raises(FileFormatError, match="damaged"):
        search(supernet, accuracy, latency, **arguments)
