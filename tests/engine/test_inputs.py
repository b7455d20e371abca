"""Tensors, tuples and dictionaries of tensors through an engine and a batcher."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import subnetact
import subnetact.serving
from subnetact.engine.inputs import (
    Stager,
    check_input,
    samples_of,
    shapes,
)
from subnetact.engine.outputs import unstack
from subnetact.errors import EngineError, InvalidRequest, SpecError
from subnetact.supernet.batches import call_with
from subnetact.supernet.supernet import Supernet

CPU = torch.device("cpu")
IMAGE = torch.zeros(1, 16, 16)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_tensors_tuples_and_dictionaries_are_stacked_and_padded() -> None:
    stager = Stager(CPU)
    samples = [torch.full((2,), float(i)) for i in range(3)]
    assert stager.stack(samples, 3).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert stager.stack(samples, 4).tolist() == [[0, 0], [1, 1], [2, 2], [2, 2]]
    pairs = stager.stack([(sample, {"b": 2 * sample}) for sample in samples], 3)
    assert isinstance(pairs, tuple)
    assert torch.equal(pairs[1]["b"], 2 * pairs[0])
    tracked = torch.ones(2, requires_grad=True)
    assert not stager.stack([tracked], 1).requires_grad


def test_outputs_are_given_back_one_by_one() -> None:
    y = torch.arange(6.0).reshape(3, 2)
    assert [sample.tolist() for sample in unstack(y, 2, 3)] == [[0, 1], [2, 3]]
    assert [sample["a"].tolist() for sample in unstack(OrderedDict(a=y, b=None), 3, 3)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    first, second = unstack((y, [y + 1]), 2, 3)[1]
    assert (first.tolist(), second[0].tolist()) == ([2, 3], [3, 4])
    with pytest.raises(EngineError, match="returned int"):
        unstack(3, 1, 1)


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


@pytest.mark.parametrize("output", [torch.tensor(1.0), torch.zeros(2, 4), torch.zeros(0), torch.zeros(4, 4)])
def test_a_tensor_without_one_entry_per_sample_is_no_output_of_a_batch(output: Tensor) -> None:
    with pytest.raises(EngineError, match=r"output\['a'\]\[1\]: .* for a batch of 3, .* must be the batch"):
        unstack({"a": (torch.zeros(3), output)}, 2, 3)


@pytest.fixture
def language_model() -> Supernet:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    return subnetact.insert_(model, example={"input_ids": torch.arange(5)[None]})


def test_a_cache_among_the_outputs_is_refused_when_the_engine_is_made(language_model: Supernet) -> None:
    specs = [language_model.space.largest()]
    example = {"input_ids": torch.arange(5)[None]}
    with pytest.raises(EngineError, match=r"output\['past_key_values'\]: .*DynamicCache.*use_cache is False"):
        subnetact.Engine(language_model, specs, example=example)
    unchecked = subnetact.Engine(language_model, specs, example=example, check=False)
    assert unchecked({"input_ids": torch.arange(5)[None]}, 0).past_key_values is not None


def test_a_language_model_without_its_cache_is_served_what_a_tokenizer_returns(
    language_model: Supernet,
) -> None:
    from transformers import BatchEncoding

    language_model.network.config.use_cache = False
    specs = [language_model.space.smallest(), language_model.space.largest()]
    tokens = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(0))
    inputs: list[Any] = [BatchEncoding({"input_ids": ids}) for ids in tokens]
    example = BatchEncoding({"input_ids": tokens})
    engine = subnetact.Engine(language_model, specs, example=example, accuracy=[60.0, 70.0])
    table = subnetact.profile_latency(engine, [1, 4], warmup_ms=0, min_time_ms=1)
    with subnetact.Batcher(engine, policy=subnetact.serving.Fixed(table, 1), slo_ms=1e4) as batcher:
        answers = [future.result(60) for future in [batcher.submit(x, 1e4) for x in inputs]]
    with torch.no_grad():
        expected = language_model(tokens, subnet=specs[1]).logits
    torch.testing.assert_close(torch.stack([a.output["logits"] for a in answers]), expected)


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
def test_a_lack_of_memory_says_nothing_about_an_input(
    digits: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"allow_uncalibrated": True, "example": IMAGE[None], "backend": "views"}
    engine = subnetact.Engine(digits, [digits.space.smallest()], **options)

    def short(network: Any, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(digits.network), "forward", short)
    with pytest.raises(torch.OutOfMemoryError):
        subnetact.Engine(digits, [digits.space.smallest()], **options)
    with pytest.raises(torch.OutOfMemoryError):
        engine(torch.zeros(1, 1, 4096, 4096), 0)


def test_values_that_are_not_finite_are_found_wherever_they_are() -> None:
    bad = torch.tensor([1.0, float("nan")])
    check_input(bad, None, CPU)
    check_input((torch.tensor([1]), torch.tensor([True])), None, CPU, finite=True)
    for x in (bad, {"a": (torch.ones(2), bad)}, torch.tensor([complex(float("inf"), 0)])):
        with pytest.raises(InvalidRequest, match="not finite"):
            check_input(x, None, CPU, finite=True)


def test_structures_are_kept_by_the_helpers() -> None:
    assert shapes((IMAGE, {"a": torch.zeros(3)})) == [[1, 16, 16], {"a": [3]}]
    batch = (torch.ones(2, requires_grad=True),)
    (sample,) = samples_of(batch)
    assert not sample.requires_grad
    assert sample.untyped_storage().nbytes() == 4
    assert call_with(lambda a, b: a - b, (3, 1)) == 2
    assert call_with(lambda a, b: a - b, {"b": 3, "a": 1}) == -2


@pytest.fixture
def bert() -> Supernet:
    from ofa_adapters import load

    return load(
        "dynabert",
        None,
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_a_text_network_is_served_with_its_named_inputs(bert: Supernet, form: str, tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (12, 8), generator=generator)
    masks = torch.ones(12, 8, dtype=torch.long)
    masks[::2, 6:] = 0
    names = ("input_ids", "attention_mask")
    inputs: list[Any] = [
        dict(zip(names, sample, strict=True)) if form == "dict" else sample
        for sample in zip(ids, masks, strict=True)
    ]
    example = dict(zip(names, (ids, masks), strict=True)) if form == "dict" else (ids, masks)
    engine = subnetact.Engine(
        bert, [bert.space.smallest(), bert.space.largest()], example=example, memory_budget_mb=4
    )
    engine.prepare([1, 4])
    assert not engine.pin(0)
    table = subnetact.profile_latency(engine, [1, 4, 8], [70.0, 80.0], warmup_ms=0, min_time_ms=3)
    assert table.stamp["input_shape"] == ([[8], [8]] if form == "tuple" else {name: [8] for name in names})
    expected = [
        [bert(ids[i : i + 1], masks[i : i + 1], subnet=spec)[0] for i in range(12)] for spec in engine.specs
    ]

    async def serve() -> Any:
        async with subnetact.Batcher(engine, table=table, slo_ms=1e4, workers=2) as batcher:
            with pytest.raises(InvalidRequest, match="expected a"):
                await batcher.infer(ids[0], deadline_ms=1e4)
            return await asyncio.gather(*(batcher.infer(x, deadline_ms=1e4) for x in inputs))

    for i, answer in enumerate(asyncio.run(serve())):
        torch.testing.assert_close(answer.output, expected[answer.subnet][i], atol=1e-5, rtol=1e-4)
    engine.save(tmp_path / "bundle")
    again = subnetact.Engine.load(tmp_path / "bundle")
    assert shapes(again.sample) == shapes(engine.sample)
    again.check(inputs[3])


def test_a_compiled_engine_is_given_the_prepared_size(digits: Supernet) -> None:
    subnetact.calibrate(digits, [digits.space.smallest()], [torch.randn(20, 1, 16, 16)], progress=False)
    engine = subnetact.Engine(digits, [digits.space.smallest()], example=IMAGE[None], backend="eager")
    engine.prepare([4])
    samples = list(torch.randn(3, 1, 16, 16))
    outputs = engine.run(0, samples, batch_size=4)
    assert len(outputs) == 3
    with pytest.raises(InvalidRequest, match="a compiled engine serves single tensors, got tuple"):
        engine((samples[0],), subnet=0)
    torch.testing.assert_close(
        torch.stack(list(outputs)), engine.supernet(torch.stack(samples), subnet=engine.specs[0])
    )


def test_each_worker_sets_its_own_number_of_threads(digits: Supernet) -> None:
    subnetact.calibrate(digits, [digits.space.smallest()], [torch.randn(20, 1, 16, 16)], progress=False)
    engine = subnetact.Engine(digits, [digits.space.smallest()], example=IMAGE[None])
    table = subnetact.LatencyTable(engine.keys, [60.0], [1], [[1.0]])
    seen: list[int] = []

    class Watching(subnetact.HullFit):
        def decide(self, context: Any) -> tuple[int, int] | None:
            seen.append(torch.get_num_threads())
            return super().decide(context)

    before = torch.get_num_threads()
    try:
        policy = Watching(table, slo_ms=36.0)
        with subnetact.Batcher(engine, policy=policy, threads_per_worker=2) as batcher:
            batcher.submit(IMAGE, deadline_ms=1e5).result(30)
    finally:
        torch.set_num_threads(before)
    assert seen == [2]


@pytest.mark.parametrize("wrong", ["0", 0.0, 1.5, True, None])
def test_ids_are_ints(digits: Supernet, wrong: Any) -> None:
    subnetact.calibrate(digits, [digits.space.smallest()], [torch.randn(20, 1, 16, 16)], progress=False)
    engine = subnetact.Engine(digits, [digits.space.smallest()], example=IMAGE[None])
    for use in (engine.ready, engine.remove, lambda i: engine(IMAGE[None], subnet=i)):
        with pytest.raises(SpecError, match="is not an id; ids are ints"):
            use(wrong)
    assert engine.ready(torch.tensor(0)).id == 0  # type: ignore[arg-type]
