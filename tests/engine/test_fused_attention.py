"""Fused programs of attention networks: packed layers, merged products, overwritten outputs, and reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_networks import in_threads, one_width
from torch import Tensor, nn

from ofa_adapters import load
from subnetact import Engine
from subnetact.engine import head_attention, packed_linear
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.head_attention import attention_by_heads
from subnetact.engine.packed_linear import (
    ONEDNN_ROWS,
    SMALLEST_WIDTH,
    PackedLinear,
    can_pack_linear,
    is_intel,
)
from subnetact.supernet.batches import map_tensors
from subnetact.supernet.views import private_view

pytestmark = pytest.mark.skipif(
    not can_pack_linear(nn.Linear(SMALLEST_WIDTH, SMALLEST_WIDTH)),
    reason="this build of torch has no packed matrix products",
)
WIDTH, TOKENS = 128, 5
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True, scope="module")
def narrow_layers_are_packed() -> Iterator[None]:
    """Pack layers and attend by heads on every CPU: what is not faster has to be right nevertheless."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_linear, "SMALLEST_WIDTH", WIDTH)
        patch.setattr(head_attention, "LEAST_PRODUCT", 0)
        patch.setattr(head_attention, "heads_pay", lambda: packed_linear.ONEDNN)
        yield


class Block(nn.Module):
    """A transformer block with separate queries, keys and values, and a feed-forward network."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_norm(x)
        q, k, v = (f(y).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(attended), 0.1, self.training)
        return x + self.fc2(self.activation(self.fc1(self.second_norm(x))))


class Encoder(nn.Module):
    """Two blocks, and one more where control flow depends on values, so that it cannot be traced."""

    def __init__(self, traceable: bool = True) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(nn.GELU("tanh")))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.traceable = traceable

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.traceable and bool(x[0, 0, 0] > 1e30):
            return x
        x = self.blocks(x + torch.cat([self.shift, self.shift]).view(2, -1)[1].exp())
        x = x if mask is None else x * mask[..., None]
        return self.head(x.mean(1))


def engine_of(network: nn.Module, sample: Any, **options: Any) -> Engine:
    blocks = [path for path, module in network.named_modules() if isinstance(module, Block)]
    parts = {f"{path}.{name}": side for path in blocks for name, side in (("fc1", "out"), ("fc2", "in"))}
    supernet = one_width(network, parts, (WIDTH, 2 * WIDTH))
    specs = [supernet.space.smallest(), supernet.space.largest()]
    example = map_tensors(lambda part: part[None], sample)
    return Engine(supernet, specs, example=example, **{"memory_budget_mb": 64, **options})


def tensor() -> Tensor:
    return torch.randn(TOKENS, WIDTH)


def program_of(engine: Engine, traced: bool = True) -> FusedProgram:
    view, _ = private_view(engine.supernet, engine.specs[0])
    return FusedProgram(view, traced=traced)


class Written(nn.Module):
    """A block whose attention is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(7, 4))
        self.register_buffer("places", torch.arange(TOKENS * TOKENS) % 7)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.places].view(TOKENS, TOKENS, -1).permute(2, 0, 1)
        y = (0.2 * q.matmul(k.transpose(2, 3)) + bias.unsqueeze(0)).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(n, t, -1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "traceable": Encoder,
    "not traceable": lambda: Encoder(traceable=False),
    "written out": lambda: nn.Sequential(Written(), Block()),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_those_of_the_view_with_nan_and_infinite_values(name: str) -> None:
    engine = engine_of(NETWORKS[name](), tensor())
    for subnet in (0, 1):
        pinned = engine.pin(subnet)
        assert pinned, pinned.reason
        for strange in (None, NAN, INF, -INF, 1e30):
            x = torch.randn(3, TOKENS, WIDTH)
            if strange is not None:
                x[1, 2, 3] = strange
            before = x.clone()
            expected = engine.supernet(x, subnet=engine.specs[subnet])
            assert expected[0].isfinite().all()
            torch.testing.assert_close(engine(x, subnet), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
            assert torch.equal(x.nan_to_num(), before.nan_to_num()), "the input is overwritten"
        for batch in (1, 2, 9):
            x = torch.randn(batch, TOKENS, WIDTH)
            expected = engine.supernet(x, subnet=engine.specs[subnet])
            torch.testing.assert_close(engine(x, subnet), expected, rtol=1e-4, atol=1e-5)
    assert engine.stats().fused == 2
    assert not engine.stats().unfused


@pytest.mark.parametrize("traceable", [True, False])
def test_autocast_reaches_fused_subnets_and_leaves_nothing_behind(traceable: bool) -> None:
    x, cast = torch.randn(3, TOKENS, WIDTH), torch.autocast("cpu", dtype=torch.bfloat16)
    with cast:
        engine = engine_of(Encoder(traceable), tensor())
        assert engine.pin(0)
    for _ in range(2):
        expected = engine.supernet(x, subnet=engine.specs[0])
        torch.testing.assert_close(engine(x, 0), expected, rtol=1e-4, atol=1e-5)
        with cast:
            expected, run = engine.supernet(x, subnet=engine.specs[0]), engine.start(0, list(x), 3)
            assert expected.dtype == torch.bfloat16
            assert torch.equal(engine(x, 0), expected)
            run.step(run.blocks)
        assert torch.equal(torch.stack(list(run.outputs())), expected)
        with torch.no_grad():
            engine.supernet.network.shift.add_(0.5)
    assert engine.is_fused(0)


def test_outputs_are_overwritten_and_the_budget_holds_for_packed_weights() -> None:
    engine = engine_of(Encoder(), tensor())
    program = program_of(engine)
    code = str(program.graph)
    assert sum(isinstance(value, PackedLinear) for value in program.values.values()) == 6 * 2
    # In each block: the activation and both residual additions. The first addition reads the input's sum.
    assert code.count("over_") >= 3 * 2
    assert "dropout" not in code
    assert "gelu(" not in code
    assert engine.pin(1)
    copies = 2 if is_intel() else 1  # Narrow layers are packed for both libraries on Intel CPUs.
    packed = 2 * copies * (4 + 4) * WIDTH * WIDTH * 4
    assert packed <= engine.stats().fused_bytes <= 2 * packed  # The smaller subnet may be fused, too.
    tight = engine_of(Encoder(), tensor(), memory_budget_mb=0.25)
    pinned = tight.pin(1)
    assert not pinned
    assert "does not fit in the budget" in pinned.reason
    assert tight.stats().fused_bytes == 0


def test_programs_serve_threads_at_once() -> None:
    engine, xs = engine_of(Encoder(), tensor()), torch.randn(4, 2, TOKENS, WIDTH)
    assert engine.pin(1)
    expected = [engine.supernet(x, subnet=engine.specs[1]) for x in xs]

    def same(i: int) -> bool:
        outputs = (engine(xs[i], 1) for _ in range(30))
        return all(torch.allclose(output, expected[i], rtol=1e-4, atol=1e-5) for output in outputs)

    assert all(in_threads(*(partial(same, i) for i in range(4))))


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
    config = transformers.BertConfig(vocab_size=50, **sizes)
    return transformers.BertForSequenceClassification(config).eval()  # type: ignore[no-any-return]


MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 7])
SEVERAL: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "own": (Encoder, {"x": torch.randn(3, 7, WIDTH), "mask": MASK.float()}),
    "hugging face": (bert, {"input_ids": torch.randint(0, 50, (3, 7)), "attention_mask": MASK}),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_networks_of_several_inputs_become_programs_or_packed_layers(name: str) -> None:
    make, batch = SEVERAL[name]
    engine = engine_of(make(), {name: part[0] for name, part in batch.items()})
    pinned = engine.pin(0)
    assert pinned, pinned.reason
    with torch.inference_mode():
        expected = engine.supernet.subnet(engine.specs[0])(**batch)
    output = engine(batch, 0)
    logits = getattr(output, "logits", output), getattr(expected, "logits", expected)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    assert engine.stats().fused_bytes > 0


class InPlace(nn.Module):
    """Adds in place to a value that is read again, and lets MultiheadAttention read a layer's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        z = y
        y += self.first(x)
        y *= self.second(z)
        return self.attention(z, y, y)[0]  # type: ignore[no-any-return]


def test_what_the_network_overwrites_itself_is_overwritten() -> None:
    engine = engine_of(InPlace(), tensor())
    assert engine.pin(0)
    x = torch.randn(2, TOKENS, WIDTH)
    expected = engine.supernet(x, subnet=engine.specs[0])
    torch.testing.assert_close(engine(x, 0), expected, rtol=1e-4, atol=1e-5)
    assert (
        program_of(engine, traced=False).nbytes < 2 * 3 * WIDTH * WIDTH * 4
    )  # first and second, but not attention.out_proj


class Counting(nn.Module):
    """Counts its calls in a buffer, and adds the count to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.view(-1).add_(1)
        return self.layer(x) + self.calls.mul(2)


def test_state_that_the_network_changes_is_no_constant_and_keeps_an_engine_from_fusing() -> None:
    x = torch.zeros(1, WIDTH)
    with torch.inference_mode():
        program = FusedProgram(Counting().eval(), probe=torch.randn(2, WIDTH))
        first, second = (program(x) for _ in range(2))
    torch.testing.assert_close(second - first, torch.full((1, WIDTH), 2.0))
    engine = engine_of(Counting(), torch.zeros(WIDTH), check=False)
    pinned = engine.pin(0)
    assert not pinned
    assert pinned.reason == "its forward changes its own buffers"
    first, second = (engine(x, 0) for _ in range(2))
    torch.testing.assert_close(second - first, torch.full((1, WIDTH), 2.0))


def test_products_take_any_shape_and_any_number_of_threads() -> None:
    layers = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
    wide = nn.Linear(2 * WIDTH, 2 * WIDTH)
    wide.weight = nn.Parameter(torch.randn(3 * WIDTH, 3 * WIDTH)[: 2 * WIDTH, : 2 * WIDTH].detach())
    products, sliced = [PackedLinear(layer) for layer in layers], PackedLinear(wide)
    threads = torch.get_num_threads()
    try:
        for count in (2, 1):
            torch.set_num_threads(count)
            with torch.inference_mode():
                for shape in ((), (0,), (3, 0), (2, 7), (2, ONEDNN_ROWS), (1,)):
                    x = torch.randn(*shape, WIDTH)
                    for product, layer in zip(products, layers, strict=True):
                        torch.testing.assert_close(product(x), layer(x), rtol=1e-4, atol=1e-5)
                for rows in (6, ONEDNN_ROWS):
                    x = torch.randn(2 * WIDTH, rows).t()
                    torch.testing.assert_close(sliced(x), wide(x), rtol=1e-4, atol=1e-4)
                x[3, 4] = NAN
                assert sliced(x)[3].isnan().all()
                assert sliced(x).isnan().sum() == 2 * WIDTH
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.3}, {"is_causal": True}, {"attn_mask": torch.ones(9, 11).tril()}, {"dropout_p": 0}],
)
def test_attention_by_heads_is_torchs_attention(options: dict[str, Any]) -> None:
    strided = torch.randn(2, 11, 3, 4, 16).permute(2, 0, 3, 1, 4)
    q, k, v = strided[0, :, :, :9], strided[1], strided[2]
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    answer = attention_by_heads(q, k, v, **options)
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
    if not options.keys() - {"scale"}:  # Attended by heads: in memory as an answer of torch's fast kernel.
        assert answer.transpose(1, 2).is_contiguous()
    expected = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    assert torch.equal(attention_by_heads(q, k[:, :2], v[:, :2], enable_gqa=True), expected)


FAMILIES: dict[str, dict[str, Any]] = {
    "autoformer": {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5},
    "hydravit": {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 192, "num_heads": 3},
    "dynabert": {
        **{"vocab_size": 50, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 256},
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_attention_are_traced_and_fused(family: str) -> None:
    supernet = load(family, **FAMILIES[family]).eval()
    x = torch.randint(0, 50, (2, 7)) if family == "dynabert" else torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        for spec in (supernet.space.smallest(), supernet.space.largest()):
            program, expected = (
                FusedProgram(private_view(supernet, spec)[0], probe=x),
                supernet(x, subnet=spec),
            )
            for rows in (2, 1):
                torch.testing.assert_close(program(x[:rows]), expected[:rows], rtol=1e-4, atol=1e-5)
            assert program.nbytes > 0
            plain = [v for v in program.values.values() if can_pack_linear(v)]
            assert not plain, "a linear layer is not packed"
