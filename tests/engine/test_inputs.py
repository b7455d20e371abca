"""Inputs of an engine: tensors, tuples and dictionaries of them, of one shape or of several with padding."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_networks import one_width
from short_windows import SHORT
from small_decoders import small_decoder
from small_families import small_supernet
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import subnetact
import subnetact.serving
from subnetact import Batcher, Engine, Supernet, calibrate, insert_, profile_latency
from subnetact.engine.inputs import Stager, check_input, samples_of, shapes, unstack
from subnetact.errors import EngineError, InvalidRequest, TableError
from subnetact.serving import Fixed
from subnetact.supernet.batches import call_with

CPU = torch.device("cpu")


IMAGE = torch.zeros(1, 16, 16)


def test_tensors_tuples_and_dictionaries_are_stacked_padded_and_given_back_one_by_one() -> None:
    stager, samples = Stager(CPU), [torch.full((2,), float(i)) for i in range(3)]
    assert stager.stack(samples, 3).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert stager.stack(samples, 4).tolist() == [[0, 0], [1, 1], [2, 2], [2, 2]]
    pairs = stager.stack([(sample, {"b": 2 * sample}) for sample in samples], 3)
    assert isinstance(pairs, tuple)
    assert torch.equal(pairs[1]["b"], 2 * pairs[0])
    assert not stager.stack([torch.ones(2, requires_grad=True)], 1).requires_grad
    y, rows = torch.arange(6.0).reshape(3, 2), [[0, 1], [2, 3], [4, 5]]
    assert [sample.tolist() for sample in unstack(y, 2, 3)] == rows[:2]
    assert [sample["a"].tolist() for sample in unstack(OrderedDict(a=y, b=None), 3, 3)] == rows
    first, second = unstack((y, [y + 1]), 2, 3)[1]
    assert (first.tolist(), second[0].tolist()) == ([2, 3], [3, 4])
    with pytest.raises(EngineError, match="returned int"):
        unstack(3, 1, 1)
    for wrong in (torch.tensor(1.0), torch.zeros(2, 4), torch.zeros(0), torch.zeros(4, 4)):
        with pytest.raises(
            EngineError, match=r"output\['a'\]\[1\]: .* for a batch of 3, .* must be the batch"
        ):
            unstack({"a": (torch.zeros(3), wrong)}, 2, 3)


def test_every_output_is_in_memory_of_its_own() -> None:
    """Neither the answers to others nor weights can be read or changed through one of them."""
    weight = torch.nn.Parameter(torch.zeros(4))
    names = torch.arange(4.0)
    output = {
        "y": torch.randn(3, 5),
        "nested": (torch.randn(3), [torch.randn(3, 2, 2).permute(0, 2, 1)]),
        "weight": weight.expand(3, 4),
        "whole": torch.nn.Parameter(torch.zeros(3, 2)),
        "names": names.expand(3, 4),
    }
    first, second = unstack(output, 2, 3)
    leaves = [tree_leaves(one) for one in (first, second)]
    assert len(leaves[0]) == 6
    for one, other in zip(*leaves, strict=True):
        for tensor in (one, other):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            assert not tensor.requires_grad
        before = other.clone()
        one.add_(1.0)
        assert torch.equal(other, before)
    assert torch.equal(weight, torch.zeros(4))
    assert torch.equal(names, torch.arange(4.0))


@pytest.fixture
def language_model() -> Supernet:
    pytest.importorskip("transformers")
    model = small_decoder("LlamaConfig", num_hidden_layers=2)
    return insert_(model, example={"input_ids": torch.arange(5)[None]})


def test_a_language_model_is_served_what_a_tokenizer_returns_not_its_cache(language_model: Supernet) -> None:
    from transformers import BatchEncoding

    specs = [language_model.space.smallest(), language_model.space.largest()]
    ids = {"input_ids": torch.arange(5)[None]}
    with pytest.raises(EngineError, match=r"output\['past_key_values'\]: .*DynamicCache.*use_cache is False"):
        Engine(language_model, specs, example=ids)
    unchecked = Engine(language_model, specs, example=ids, check=False)
    assert unchecked(ids, 0).past_key_values is not None
    language_model.network.config.use_cache = False
    tokens = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(0))
    inputs: list[Any] = [BatchEncoding({"input_ids": ids}) for ids in tokens]
    example = BatchEncoding({"input_ids": tokens})
    engine = Engine(language_model, specs, example=example, accuracy=[60.0, 70.0])
    table = profile_latency(engine, [1, 4], warmup_ms=0, min_time_ms=1)
    with Batcher(engine, policy=subnetact.serving.Fixed(table, 1), slo_ms=1e4) as batcher:
        answers = [future.result(60) for future in [batcher.submit(x, 1e4) for x in inputs]]
    with torch.no_grad():
        expected = language_model(tokens, subnet=specs[1]).logits
    torch.testing.assert_close(
        torch.stack([a.output["logits"] for a in answers]), expected, rtol=1e-4, atol=5e-5
    )


EXAMPLE = {"ids": torch.zeros(4, dtype=torch.long), "mask": torch.zeros(4)}


@pytest.mark.parametrize(
    ("x", "example", "match"),
    [
        (torch.zeros(1, 1, 16, 16), IMAGE, r"input: .*drop it: x\[0\]"),
        (torch.zeros(1, 8, 8), IMAGE, r"input: got .*\(1, 8, 8\).*\(1, 16, 16\), without a batch"),
        (IMAGE.double(), IMAGE, "float64"),
        (IMAGE.to_sparse(), None, "layout torch.sparse"),
        (torch.zeros(1, device="meta"), None, "it is on meta, this engine is on cpu"),
        ("digit", IMAGE, "expected a torch.float32 tensor of shape"),
        ("digit", None, "or a tuple or dictionary of them, got str"),
        ([IMAGE], None, "got list"),
        ((), None, "got tuple"),
        (IMAGE, EXAMPLE, "expected a dictionary of 'ids', 'mask', got a torch.float32"),
        (
            {"ids": EXAMPLE["ids"]},
            EXAMPLE,
            "expected a dictionary of 'ids', 'mask', got a dictionary of 'ids'",
        ),
        ({**EXAMPLE, "mask": torch.zeros(5)}, EXAMPLE, r"input\['mask'\]: got .*\(5,\)"),
        ((IMAGE,), (IMAGE, IMAGE), "expected a tuple of 2, got a tuple of 1"),
        (({"a": "x"},), None, r"input\[0\]\['a'\]: .* got str"),
    ],
)
def test_what_cannot_run_is_refused_by_name(x: Any, example: Any, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        check_input(x, example, CPU)


@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_a_lack_of_memory_is_no_wrong_input(digits: Supernet, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"allow_uncalibrated": True, "example": IMAGE[None], "backend": "views"}
    engine = Engine(digits, [digits.space.smallest()], **options)

    def short(network: Any, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(digits.network), "forward", short)
    with pytest.raises(torch.OutOfMemoryError):
        Engine(digits, [digits.space.smallest()], **options)
    with pytest.raises(torch.OutOfMemoryError):
        engine(torch.zeros(1, 1, 4096, 4096), 0)


def test_values_that_are_not_finite_are_found_and_structures_are_kept() -> None:
    bad = torch.tensor([1.0, float("nan")])
    check_input(bad, None, CPU)
    check_input((torch.tensor([1]), torch.tensor([True])), None, CPU, finite=True)
    for x in (bad, {"a": (torch.ones(2), bad)}, torch.tensor([complex(float("inf"), 0)])):
        with pytest.raises(InvalidRequest, match="not finite"):
            check_input(x, None, CPU, finite=True)
    assert shapes((IMAGE, {"a": torch.zeros(3)})) == [[1, 16, 16], {"a": [3]}]
    (sample,) = samples_of((torch.ones(2, requires_grad=True),))
    assert not sample.requires_grad
    assert sample.untyped_storage().nbytes() == 4
    assert call_with(lambda a, b: a - b, (3, 1)) == 2
    assert call_with(lambda a, b: a - b, {"b": 3, "a": 1}) == -2


def test_a_compiled_engine_is_given_the_prepared_size(digits: Supernet) -> None:
    calibrate(digits, [digits.space.smallest()], [torch.randn(20, 1, 16, 16)], progress=False)
    engine = Engine(digits, [digits.space.smallest()], example=IMAGE[None], backend="eager")
    engine.prepare([4])
    samples = list(torch.randn(3, 1, 16, 16))
    outputs = engine.run(0, samples, batch_size=4)
    assert len(outputs) == 3
    with pytest.raises(InvalidRequest, match="a compiled engine serves single tensors, got tuple"):
        engine((samples[0],), subnet=0)
    torch.testing.assert_close(
        torch.stack(list(outputs)), engine.supernet(torch.stack(samples), subnet=engine.specs[0])
    )


PADDING = {"input_ids": 0, "attention_mask": 0}


def tokens(length: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, 90, (length,), generator=generator),
        "attention_mask": torch.ones(length, dtype=torch.long),
    }


def batch(length: int, seed: int = 0) -> dict[str, Tensor]:
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
    network = nn.Sequential(nn.Conv1d(1, 4, 3), nn.AvgPool1d(3), nn.Conv1d(4, 2, 1))
    supernet, seen = one_width(network, {"0": "out", "2": "in"}, (2, 4)), list[Any]()
    largest = [supernet.space.largest()]
    with pytest.raises(InvalidRequest, match=r"of shape \(1, 4\): 1 \(AvgPool1d\)"):
        Engine(supernet, largest, example=[torch.zeros(1, 1, n) for n in (9, 4)])
    monkeypatch.setattr(Supernet, "check", lambda self, x, thorough: seen.append(x.shape))
    for _ in range(2):
        Engine(supernet, largest, example=[torch.zeros(1, 1, n) for n in (9, 5, 7)])
    assert seen == [(1, 1, 5), (1, 1, 7), (1, 1, 9)]


class Lengths(nn.Module):
    """Returns the length that the input was padded to, and the input's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sums = (x[:, :, None] + 0 * self.scale(x[:, :, None]).sum(-1, keepdim=True)).sum(1)
        return torch.cat([torch.full_like(sums, float(x.shape[1])), sums], 1)


def test_the_smallest_shape_that_fits_runs() -> None:
    supernet = one_width(Lengths(), {"scale": "out"}, (1, 2))
    examples, zero = [torch.zeros(1, n) for n in (8, 2, 4)], torch.zeros(()).numpy()[()]
    engine = Engine(supernet, [supernet.space.largest()], example=examples, padding=zero, check=False)
    assert [len(x) for x in engine.samples] == [2, 4, 8]
    for lengths, padded in (((1, 2), 2), ((2, 3), 4), ((1, 5, 2), 8)):
        outputs = engine.run(0, [torch.ones(n) for n in lengths], 4)
        assert [output.tolist() for output in outputs] == [[padded, float(n)] for n in lengths]


def test_inputs_are_padded_by_their_names_and_refused_where_they_fit_nowhere(supernet: Supernet) -> None:
    engine = engine_of(supernet)
    for x in (tokens(10), tokens(4)["input_ids"], (tokens(4)["input_ids"],), {**tokens(4), "more": 3}, 7):
        with pytest.raises(InvalidRequest, match="input"):
            engine.check(x)
    with pytest.raises(InvalidRequest, match="float32"):
        engine.check({**tokens(4), "attention_mask": torch.ones(4)})
    named = engine_of(supernet, padding={"attention_mask": 0})
    x = {**tokens(4), "attention_mask": torch.ones(3, dtype=torch.long)}
    turned = dict(reversed(x.items()))
    assert named.shape_of(turned) == named.shape_of(x) == 0
    assert torch.equal(named.run(0, [turned], 1)[0], named.run(0, [x], 1)[0])
    exact = engine_of(supernet, padding=None)
    exact.check(tokens(4))
    for refusing, y in ((named, tuple(x.values())), (exact, tokens(3))):
        with pytest.raises(InvalidRequest, match="fits in none"):
            refusing.check(y)
    with pytest.raises(InvalidRequest, match="padding"):
        exact.run(0, [tokens(4), tokens(9)], 2)
    contradicting: list[tuple[Any, Any]] = [
        ([], None),
        ([batch(4), batch(4, seed=1)], PADDING),
        ([batch(4), batch(9)["input_ids"]], PADDING),
        ([batch(4), batch(9)], {"nothing": 0}),
        ([batch(4), batch(9)], {"input_ids": "0"}),
        ([batch(4), batch(9)], 0),
        (batch(4), PADDING),
    ]
    for example, padding in contradicting:
        with pytest.raises(EngineError, match=r"example|padding"):
            Engine(supernet, [supernet.space.smallest()], example=example, padding=padding)


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
    return one_width(Tagger(**options), {"inner": "out", "score": "in"}, (8, 16))


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
def test_harmful_padding_is_refused(
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
    examples = [torch.zeros(1, 3, 6, 6), torch.zeros(1, 3, *large)]
    for kernel in (1, 3):
        convolutions = (nn.Conv2d(c, n, kernel, padding=kernel // 2) for c, n in ((3, 8), (8, 2)))
        first, last = convolutions
        supernet = one_width(nn.Sequential(first, nn.ReLU(), last), {"0": "out", "2": "in"})
        largest = supernet.space.largest()
        if kernel == 3:
            with pytest.raises(EngineError, match="padding"):
                Engine(supernet, [largest], example=examples, padding=0)
        engine = Engine(supernet, [largest], example=examples, padding=0, check=kernel == 1)
        for size in ((5, 5), (4, 6)):
            x, run = torch.rand(3, *size), engine.start(0, [torch.rand(3, *size)], 1)
            run.step(run.blocks)
            # Of two axes that grow alike, nothing tells which one an axis of the output follows.
            shape = (2, 6, 6) if ambiguous and size[0] != size[1] else (2, *size)
            assert engine.run(0, [x], 1)[0].shape == run.outputs()[0].shape == shape
            if kernel == 1:
                expected = supernet(x[None], subnet=largest)[0]
                torch.testing.assert_close(engine.run(0, [x], 1)[0][:, : size[0], : size[1]], expected)


def test_inputs_that_fit_in_no_common_shape_are_not_cropped() -> None:
    supernet = one_width(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)), {"0": "out", "1": "in"})
    examples = [torch.zeros(1, 3, 6, 10), torch.zeros(1, 3, 10, 6)]
    engine = Engine(supernet, [supernet.space.largest()], example=examples, padding=0)
    wide, high, small = torch.randn(3, 6, 10), torch.randn(3, 10, 6), torch.randn(3, 6, 6)
    with pytest.raises(InvalidRequest, match="no common shape"):
        engine.run(0, [wide, high], 2)
    outputs = engine.run(0, [small, high], 2)
    for output, x in zip(outputs, (small, high), strict=True):
        torch.testing.assert_close(output[:, :6, :6], supernet(x[None])[0][:, :6, :6])


def test_workers_batchers_and_bundles_cut_outputs_too(tmp_path: Path) -> None:
    supernet = tagger()
    specs = list(supernet.space.enumerate())
    engine = Engine(supernet, specs, example=TAGGED, padding={"ids": 0, "mask": 0}, accuracy=[70.0, 80.0])
    sent = Engine.from_config(supernet, engine.config)  # as worker processes get it
    engine.save(tmp_path / "bundle")
    loaded = Engine.load(tmp_path / "bundle", supernet=tagger())
    for one in (sent, loaded):
        assert one.shape_of(tagged(3)) == 0
        assert [y["scores"].shape for y in one.run(0, [tagged(2), tagged(7)], 2)] == [(2, 9), (7, 9)]
    tables = [profile_latency(engine, [1, 4], shape=i, **SHORT) for i in range(2)]
    assert [table.stamp["input_shape"]["ids"] for table in tables] == [[4], [9]]
    assert profile_latency(engine, [1], **SHORT).stamp["input_shape"]["ids"] == [9]
    with pytest.raises(TableError, match="shape"):
        profile_latency(engine, [1], shape=2)
    with Batcher(engine, policy=Fixed(tables[-1], 1), table=tables, slo_ms=10_000.0) as batcher:
        futures = [(n, batcher.submit(tagged(n), 10_000.0)) for n in (3, 9, 5, 1)]
        for n, future in futures:
            alone = supernet(**{name: t[None] for name, t in tagged(n).items()}, subnet=specs[1])
            for name, output in future.result(60).output.items():
                torch.testing.assert_close(output, alone[name][0], rtol=5e-5, atol=5e-5)
