"""One engine, several input shapes: the smallest that fits, padding, one latency table per shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_families import small_supernet
from torch import Tensor, nn

from subnetact import Axis, Batcher, Engine, SubnetSpace, Supernet, WeightSlice, insert_, profile_latency
from subnetact.errors import EngineError, InvalidRequest, TableError
from subnetact.serving import Fixed

PADDING = {"input_ids": 0, "attention_mask": 0}


def tokens(length: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, 90, (length,), generator=generator),
        "attention_mask": torch.ones(length, dtype=torch.long),
    }


def batch(length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: part[None] for name, part in tokens(length, seed).items()}


@pytest.fixture(scope="module")
def supernet() -> Supernet:
    return small_supernet("dynabert")


def engine_of(supernet: Supernet, lengths: tuple[int, ...] = (4, 9), padding: Any = PADDING) -> Engine:
    specs = [supernet.space.smallest(), supernet.space.largest()]
    return Engine(
        supernet, specs, example=[batch(n) for n in lengths], padding=padding, accuracy=[70.0, 80.0]
    )


def test_padded_inputs_give_what_each_gives_alone(supernet: Supernet) -> None:
    engine = engine_of(supernet)
    inputs = [tokens(length, seed=length) for length in (1, 3, 4, 6, 9)]
    assert [engine.shape_of(x) for x in inputs] == [0, 0, 0, 1, 1]
    for subnet, spec in enumerate(engine.specs):
        alone = [supernet(**{n: t[None] for n, t in x.items()}, subnet=spec)[0] for x in inputs]
        for chosen in ([0, 1, 2], [3, 4], [0, 4, 2]):
            for x in chosen:
                engine.check(inputs[x])
            outputs = engine.run(subnet, [inputs[i] for i in chosen], 8)
            for i, output in zip(chosen, outputs, strict=True):
                torch.testing.assert_close(output, alone[i], rtol=5e-5, atol=5e-5)


def test_every_shape_is_tried_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    space = SubnetSpace("pooled", [Axis.uniform("w", ["all"], [2, 4])], lambda v: {"w": v["w"][0]})
    network = nn.Sequential(nn.Conv1d(1, 4, 3), nn.AvgPool1d(3), nn.Conv1d(4, 2, 1))
    supernet = insert_(network.eval(), space, {"0": WeightSlice.on(out="w"), "2": WeightSlice.on(in_="w")})
    with pytest.raises(InvalidRequest, match=r"of shape \(1, 4\): 1 \(AvgPool1d\)"):
        Engine(supernet, [space.largest()], example=[torch.zeros(1, 1, n) for n in (9, 4)])
    seen: list[Any] = []
    monkeypatch.setattr(Supernet, "check", lambda self, x, thorough: seen.append(x.shape))
    for _ in range(2):
        Engine(supernet, [space.largest()], example=[torch.zeros(1, 1, n) for n in (9, 5, 7)])
    assert seen == [(1, 1, 5), (1, 1, 7), (1, 1, 9)]


def test_named_inputs_are_padded_by_their_names_in_any_order(supernet: Supernet) -> None:
    engine = engine_of(supernet, padding={"attention_mask": 0})
    x = {**tokens(4), "attention_mask": torch.ones(3, dtype=torch.long)}
    turned = dict(reversed(x.items()))
    assert engine.shape_of(turned) == engine.shape_of(x) == 0
    assert torch.equal(engine.run(0, [turned], 1)[0], engine.run(0, [x], 1)[0])
    with pytest.raises(InvalidRequest, match="fits in none"):
        engine.check(tuple(x.values()))


class Lengths(nn.Module):
    """Returns the length that the input was padded to, and the input's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sums = (x[:, :, None] + 0 * self.scale(x[:, :, None]).sum(-1, keepdim=True)).sum(1)
        return torch.cat([torch.full_like(sums, float(x.shape[1])), sums], 1)


def test_the_smallest_shape_that_fits_runs() -> None:
    space = SubnetSpace("lengths", [Axis.uniform("w", ["all"], [1, 2])], lambda v: {"w": v["w"][0]})
    supernet = insert_(Lengths().eval(), space, {"scale": WeightSlice.on(out="w")})
    examples = [torch.zeros(1, n) for n in (8, 2, 4)]
    engine = Engine(supernet, [space.largest()], example=examples, padding=0)
    assert [len(x) for x in engine.samples] == [2, 4, 8]
    for lengths, padded in (((1, 2), 2), ((2, 3), 4), ((1, 5, 2), 8)):
        outputs = engine.run(0, [torch.ones(n) for n in lengths], 4)
        assert [output.tolist() for output in outputs] == [[padded, float(n)] for n in lengths]


def test_inputs_that_fit_nowhere_are_refused(supernet: Supernet) -> None:
    engine = engine_of(supernet)
    for x in (tokens(10), tokens(4)["input_ids"], (tokens(4)["input_ids"],), {**tokens(4), "more": 3}, 7):
        with pytest.raises(InvalidRequest, match="input"):
            engine.check(x)
    other = {**tokens(4), "attention_mask": torch.ones(4)}
    with pytest.raises(InvalidRequest, match="float32"):
        engine.check(other)
    exact = engine_of(supernet, padding=None)
    exact.check(tokens(4))
    with pytest.raises(InvalidRequest, match="fits in none"):
        exact.check(tokens(3))
    with pytest.raises(InvalidRequest, match="padding"):
        exact.run(0, [tokens(4), tokens(9)], 2)


@pytest.mark.parametrize(
    ("example", "padding"),
    [
        ([], None),
        ([batch(4), batch(4, seed=1)], PADDING),
        ([batch(4), batch(9)["input_ids"]], PADDING),
        ([batch(4), batch(9)], {"nothing": 0}),
        ([batch(4), batch(9)], {"input_ids": "0"}),
        ([batch(4), batch(9)], 0),
        (batch(4), PADDING),
    ],
)
def test_shapes_that_contradict_themselves_are_refused(
    supernet: Supernet, example: Any, padding: Any
) -> None:
    with pytest.raises(EngineError, match=r"example|padding"):
        Engine(supernet, [supernet.space.smallest()], example=example, padding=padding)


def test_a_table_per_shape(supernet: Supernet) -> None:
    engine = engine_of(supernet)
    tables = [profile_latency(engine, [1, 2], min_time_ms=1.0, warmup_ms=0.0, shape=i) for i in (0, 1)]
    lengths = [table.stamp["input_shape"]["input_ids"] for table in tables]
    assert lengths == [[4], [9]]
    assert profile_latency(engine, [1], min_time_ms=1.0).stamp["input_shape"]["input_ids"] == [9]
    with pytest.raises(TableError, match="shape"):
        profile_latency(engine, [1], shape=2)


def test_bundles_keep_the_shapes(supernet: Supernet, tmp_path: Path) -> None:
    engine = engine_of(supernet)
    engine.save(tmp_path / "bundle")
    found = Engine.load(tmp_path / "bundle", supernet=small_supernet("dynabert"))
    assert found.shape_of(tokens(3)) == 0
    expected = engine.run(1, [tokens(3)], 1)[0]
    torch.testing.assert_close(found.run(1, [tokens(3)], 1)[0], expected)


def test_a_batcher_serves_all_lengths(supernet: Supernet) -> None:
    engine = engine_of(supernet)
    tables = [profile_latency(engine, [1, 4], min_time_ms=1.0, shape=i) for i in range(2)]
    with Batcher(engine, policy=Fixed(tables[-1], 1), table=tables, slo_ms=10_000.0) as batcher:
        inputs = [tokens(1 + i % 9, seed=i) for i in range(30)]
        answers = [batcher.submit(x, 10_000.0) for x in inputs]
        for x, future in zip(inputs, answers, strict=True):
            expected = supernet(**{n: t[None] for n, t in x.items()}, subnet=engine.specs[1])[0]
            torch.testing.assert_close(future.result(60).output, expected, rtol=5e-5, atol=5e-5)
