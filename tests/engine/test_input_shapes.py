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
    engine = Engine(supernet, [space.largest()], example=examples, padding=0, check=False)
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


class Tagger(nn.Module):
    """Scores per token, and their mean, of tokens that look at all others that the mask leaves."""

    def __init__(self, masked: bool = True, pooled: bool = False) -> None:
        super().__init__()
        self.masked, self.pooled = masked, pooled
        self.table, self.inner, self.score = nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 9)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        mask = mask[:, :, None] if self.masked else torch.ones_like(mask)[:, :, None]
        x = self.table(ids)
        x = x + (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        scores = self.score(self.inner(x).relu())
        # Nine classes, as many as the longer example has tokens: an axis that only coincides.
        pooled = scores.mean(1) if self.pooled else (scores * mask).sum(1)
        return {"scores": scores, "turned": scores.transpose(1, 2), "pooled": pooled}


def tagger(**options: bool) -> Supernet:
    torch.manual_seed(0)
    space = SubnetSpace("tags", [Axis.uniform("w", ["all"], [8, 16])], lambda v: {"w": v["w"][0]})
    elastic = {"inner": WeightSlice.on(out="w"), "score": WeightSlice.on(in_="w")}
    return insert_(Tagger(**options).eval(), space, elastic)


def tagged(length: int) -> dict[str, Tensor]:
    return {"ids": torch.arange(1, length + 1), "mask": torch.ones(length, dtype=torch.long)}


TAGGED = [{name: t[None] for name, t in tagged(n).items()} for n in (4, 9)]


@pytest.mark.parametrize(
    ("options", "padding", "harmless"),
    [
        ({}, {"ids": 0, "mask": 0}, True),
        ({}, {"ids": 7, "mask": 0}, True),
        ({}, {"ids": 0, "mask": 1}, False),
        ({"masked": False}, {"ids": 0, "mask": 0}, False),
        ({"pooled": True}, {"ids": 0, "mask": 0}, False),
    ],
)
def test_padding_that_changes_answers_is_refused(
    options: dict[str, bool], padding: dict[str, int], harmless: bool
) -> None:
    supernet = tagger(**options)
    specs = list(supernet.space.enumerate())
    if not harmless:
        with pytest.raises(EngineError, match=r"padding: it changes .*attention_mask.*check=False"):
            Engine(supernet, specs, example=TAGGED, padding=padding)
    engine = Engine(supernet, specs, example=TAGGED, padding=padding, check=harmless)
    assert Engine(supernet, specs, example=TAGGED).run(0, [tagged(4)], 1)[0]["scores"].shape == (4, 9)
    for chosen in ([2], [2, 7], [4, 9], [1, 9, 3]):
        outputs = engine.run(1, [tagged(n) for n in chosen], len(chosen))
        for length, output in zip(chosen, outputs, strict=True):
            assert [tuple(t.shape) for t in output.values()] == [(length, 9), (9, length), (9,)]
            alone = supernet(**{n: t[None] for n, t in tagged(length).items()}, subnet=specs[1])
            for name in output if harmless else ():
                torch.testing.assert_close(output[name], alone[name][0], rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize(("large", "ambiguous"), [((8, 12), False), ((8, 8), True)])
def test_images_of_two_sizes_are_cut_to_their_own(large: tuple[int, int], ambiguous: bool) -> None:
    """Padding changes the pixels at the border, so `check=False` accepts it; 1x1 kernels change nothing."""
    space = SubnetSpace("maps", [Axis.uniform("w", ["all"], [4, 8])], lambda v: {"w": v["w"][0]})
    elastic = {"0": WeightSlice.on(out="w"), "2": WeightSlice.on(in_="w")}
    examples = [torch.zeros(1, 3, 6, 6), torch.zeros(1, 3, *large)]
    for kernel in (1, 3):
        layers = [
            nn.Conv2d(3, 8, kernel, padding=kernel // 2),
            nn.ReLU(),
            nn.Conv2d(8, 2, kernel, padding=kernel // 2),
        ]
        supernet = insert_(nn.Sequential(*layers).eval(), space, elastic)
        if kernel == 3:
            with pytest.raises(EngineError, match="padding"):
                Engine(supernet, [space.largest()], example=examples, padding=0)
        engine = Engine(supernet, [space.largest()], example=examples, padding=0, check=kernel == 1)
        for size in ((5, 5), (4, 6)):
            x, run = torch.rand(3, *size), engine.start(0, [torch.rand(3, *size)], 1)
            run.step(run.blocks)
            # Of two axes that grow alike, nothing tells which one an axis of the output follows.
            shape = (2, 6, 6) if ambiguous and size[0] != size[1] else (2, *size)
            assert engine.run(0, [x], 1)[0].shape == run.outputs()[0].shape == shape
            if kernel == 1:
                expected = supernet(x[None], subnet=space.largest())[0]
                torch.testing.assert_close(engine.run(0, [x], 1)[0][:, : size[0], : size[1]], expected)


def test_workers_batchers_and_bundles_cut_outputs_too(tmp_path: Path) -> None:
    supernet = tagger()
    specs = list(supernet.space.enumerate())
    engine = Engine(supernet, specs, example=TAGGED, padding={"ids": 0, "mask": 0}, accuracy=[70.0, 80.0])
    sent = Engine.from_config(supernet, engine.config)  # as worker processes get it
    engine.save(tmp_path / "bundle")
    loaded = Engine.load(tmp_path / "bundle", supernet=tagger())
    for one in (sent, loaded):
        assert [y["scores"].shape for y in one.run(0, [tagged(2), tagged(7)], 2)] == [(2, 9), (7, 9)]
    tables = [profile_latency(engine, [1, 4], min_time_ms=1.0, shape=i) for i in range(2)]
    with Batcher(engine, policy=Fixed(tables[-1], 1), table=tables, slo_ms=10_000.0) as batcher:
        futures = [(n, batcher.submit(tagged(n), 10_000.0)) for n in (3, 9, 5, 1)]
        assert all(future.result(60).output["scores"].shape == (n, 9) for n, future in futures)


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
