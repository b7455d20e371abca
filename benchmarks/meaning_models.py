"""The models of `meaning.py`: small networks of every kind, each with an example and other inputs.

Most are a `Net`: named parts and a function of itself and its inputs. Examples are random, because a model is
proved by what its example shows; only some of those that must be refused have one that shows nothing. Tables
have one row a model: its name, its inputs, its function, and its parts.
"""

from __future__ import annotations

import importlib
import math
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import Conv1d, Conv2d, Embedding, LayerNorm, Linear, ModuleList, Parameter, Sequential

Batch = Any


@dataclass(frozen=True)
class Case:
    """One model: how it is made, the example that it is inserted with, and what else it is compared on."""

    kind: str
    name: str
    inputs: tuple[Batch, ...]  # the example first
    make: Callable[[], nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)  # of insert_
    small: bool = True  # insert it with small choices, too
    training: bool = True  # compare what it computes in training mode, and gradients
    tolerance: float = 2e-4  # of the largest output


CASES: list[Case] = []


class Net(nn.Module):
    """Named parts and a function of the network and its inputs.

    A part (8, 16) is a linear layer, (3, 16, 3) a convolution with a kernel of 3; functions make a part.
    """

    def __init__(self, compute: Callable[..., Any], /, **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, given in parts.items():
            part: Any = given() if isinstance(given, FunctionType | partial) else given
            if isinstance(part, tuple):
                part = Linear(*part) if len(part) == 2 else conv(*part)
            if isinstance(part, Tensor) and not isinstance(part, Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.compute(self, *inputs)


def add(kind: str, models: Mapping[str, tuple[Any, ...]], **facts: Any) -> None:
    """Add models: a row is (inputs, what makes it), or (inputs, function of a `Net`, its parts)."""
    for name, (inputs, make, *parts) in models.items():
        made = partial(Net, make, **parts[0]) if parts else make
        CASES.append(Case(kind, name, inputs, made, **facts))


_DRAW = torch.Generator().manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_DRAW)


def ids(*shape: int, below: int = 40) -> Tensor:
    return torch.randint(0, below, shape, generator=_DRAW)


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> Conv2d:
    return Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def weights(*shape: int, scale: float = 1.0) -> Parameter:
    return Parameter(torch.randn(shape) * scale)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


def times(number: int, make: Callable[[], nn.Module]) -> ModuleList:
    return ModuleList(make() for _ in range(number))


def mean(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def _stacked(m: Any, x: Tensor) -> Any:
    x = m.first(x)
    for block in m.blocks:
        x = block(x)
    return m.head(mean(x) if x.dim() == 4 else x)


def stack(block: Callable[[], nn.Module], first: Any = (8, 16)) -> Net:
    """Return three blocks of 16 features between a first layer and a head."""
    return Net(_stacked, first=first, blocks=times(3, block), head=(16, 5))


def residual() -> Net:
    return Net(lambda m, x: x + m.down(m.up(x).relu()), up=(16, 32), down=(32, 16))


IMAGE = rand(2, 3, 16, 16)
IMAGES = (IMAGE, rand(1, 3, 16, 16), rand(3, 3, 20, 12), torch.zeros(1, 3, 16, 16), -50 * IMAGE)
VECTORS = (rand(3, 8), rand(1, 8), 100 * rand(4, 8))
PAIRS = tuple((rand(n, 8), rand(n, 8)) for n in (3, 1, 5))
TOKENS = (rand(2, 9, 16), rand(1, 5, 16), rand(3, 20, 16), torch.zeros(1, 4, 16))
LENGTHS = (rand(2, 16, 20), rand(1, 16, 9), rand(3, 16, 33))
IDS = (ids(2, 7), ids(1, 3), torch.zeros(2, 12, dtype=torch.long))

# Operations over channels

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "every other": lambda x: x[:, ::2],
    "last eight": lambda x: x[:, -8:],
    "first eight": lambda x: x[:, :8],
    "first half": lambda x: x[:, : x.shape[1] // 2],
    "listed": lambda x: x[:, [0, 2, 4, 6]],
    "listed backwards": lambda x: x[:, list(range(15, -1, -1))],
    "halves swapped": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "GLU": lambda x: F.glu(x, 1),
    "gated halves": lambda x: x.chunk(2, 1)[0].sigmoid() * x.chunk(2, 1)[1],
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "topk": lambda x: x.topk(8, 1)[0],
    "sort": lambda x: x.sort(1)[0],
    "amax": lambda x: x.amax(1, keepdim=True),
    "max": lambda x: x.max(1, keepdim=True).values,
    "mean": lambda x: x.mean(1, keepdim=True),
    "sum": lambda x: x.sum(1, keepdim=True),
    "median": lambda x: x.median(1, keepdim=True).values,
    "normalize": lambda x: F.normalize(x, dim=1),
    "norm": lambda x: x.norm(dim=1, keepdim=True),
    "logsumexp": lambda x: x.logsumexp(1, keepdim=True),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "where, added": lambda x: torch.where(x > 0, x, x + 1.0),
    "exp": lambda x: x.exp(),
    "cos": lambda x: x.cos(),
    "plus one": lambda x: x + 1,
    "gram": lambda x: torch.einsum("bchw,bdhw->bcd", x, x).sum((1, 2))[:, None, None, None],
    "prod": lambda x: x.prod(1, keepdim=True),
    "padded behind": lambda x: F.pad(x, (0, 0, 0, 0, 0, 8)),
    "padded around": lambda x: F.pad(x, (0, 0, 0, 0, 4, 4)),
    "local response norm": lambda x: F.local_response_norm(x, 5),
    "fft": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "standardised": lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5),
    "layer_norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],)).permute(0, 3, 1, 2),
    "scaled by width": lambda x: x * x.shape[1] ** -0.5,
    "max pool of pairs": lambda x: F.max_pool3d(x.relu()[:, None], (2, 1, 1))[:, 0],
    "average pool of pairs": lambda x: F.avg_pool3d(x[:, None], (2, 1, 1))[:, 0],
    "interpolate": lambda x: F.interpolate(x, size=(8, 8), mode="bilinear"),
    "unfold": lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1),
    "sum of four groups": lambda x: x.view(x.shape[0], 4, -1, *x.shape[2:]).sum(1),
    "sum of groups of four": lambda x: x.view(x.shape[0], -1, 4, *x.shape[2:]).sum(2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "tril": lambda x: x.tril(),
    "clamped by the largest": lambda x: torch.minimum(x, x.amax(1, keepdim=True) * 0.5),
    "gather": lambda x: x.gather(1, torch.zeros(len(x), 1, *x.shape[2:], dtype=torch.long)),
    "baddbmm": lambda x: torch.baddbmm(
        torch.zeros(len(x), x.shape[1], x.shape[2] * x.shape[3]),
        *(torch.eye(x.shape[1]).expand(len(x), -1, -1), x.flatten(2)),
    ).view_as(x),
    "arange": lambda x: x * torch.arange(x.shape[1])[:, None, None],
    "linspace": lambda x: x * torch.linspace(1, 2, x.shape[1])[:, None, None],
    "twos": lambda x: x * (torch.ones(x.shape[1]) * 2)[:, None, None],
    "three parts": lambda x: torch.cat([x[:, :4] * 2, x[:, 4:8], x[:, 8:] * 3], 1),
    "unbind": lambda x: torch.stack([c * (i + 1) for i, c in enumerate(x.unbind(1))], 1),
    "loop": lambda x: torch.stack([x[:, i] for i in range(x.shape[1])], 1),
    "weighted loop": lambda x: torch.stack([x[:, i] * (i + 1) for i in range(x.shape[1])]).sum(0)[:, None],
    "tensor_split": lambda x: x.tensor_split([x.shape[1] // 4], 1)[1],
    "attention of channels": lambda x: (((f := x.flatten(2)) @ f.mT).softmax(-1) @ f).view_as(x),
    "divided by the largest": lambda x: x / (x.abs().amax((1, 2, 3), keepdim=True) + 1e-6),
    "divided by the norm": lambda x: x / x.norm(),
    "divided by the mean": lambda x: x * x.abs().mean().reciprocal(),
    "times positives": lambda x: x * (x > 0).sum(1, keepdim=True),
    "times share of negatives": lambda x: x * (x <= 0).float().mean((1, 2, 3), keepdim=True),
    "divided by numel": lambda x: x / (x.numel() / x.shape[0]),
    "cdist": lambda x: torch.cdist(x.flatten(2).mT, x.flatten(2).mT)[:, None, :16, :16],
}
SOME = ("normalize", "gram", "unfold", "repeat", "repeat_interleave", "sum", "where", "first half", "arange")
"""Operations that are tried with small choices as well."""
FEWER = {"exp": IMAGES[:4], "prod": IMAGES[:4], "cdist": IMAGES[:2], "LayerNorm of images": IMAGES[:2]}
"""At 50 s.d., `exp` overflows and a product of 16 numbers is rounded, in the reference, too; what cancels in
`cdist` is rounded by the size of the image; a LayerNorm over images takes one size."""


def _over_channels(
    layer: Callable[[], nn.Module] | None, kernel: int = 3, operation: Callable[[Tensor], Tensor] = torch.relu
) -> Any:
    """Return a convolution, the layer or operation that is tried, a convolution and a head."""
    tried = layer() if layer else operation
    with torch.no_grad():
        channels = tried(torch.randn(2, 16, 16, 16)).shape[1]
    made: Any = Net(
        lambda m, x: m.head(mean(m.last(m.tried[0](m.first(x))).relu())),
        **{"first": (3, 16, 3), "last": (channels, 8, kernel), "head": (8, 5)},
    )
    made.tried = ModuleList([tried]) if isinstance(tried, nn.Module) else [tried]
    return made


for _name, _operation in OPERATIONS.items():
    _tried = partial(_over_channels, None, operation=_operation)
    add("operations over channels", {_name: (FEWER.get(_name, IMAGES), _tried)}, small=_name in SOME)

# Layers and norms


class NormThenReLU(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class PositiveNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        w, training = self.weight.abs(), self.training
        return F.batch_norm(input, self.running_mean, self.running_var, w, self.bias, training, 0.1, self.eps)


class RMSNorm(nn.Module):
    """As language models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


# fmt: off
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GroupNorm of 4": lambda: nn.GroupNorm(4, 16), "GroupNorm of 1": lambda: nn.GroupNorm(1, 16),
    "GroupNorm of 16": lambda: nn.GroupNorm(16, 16), "InstanceNorm": lambda: nn.InstanceNorm2d(16),
    "InstanceNorm, affine": lambda: nn.InstanceNorm2d(16, affine=True),
    "InstanceNorm with statistics": lambda: nn.InstanceNorm2d(16, affine=True, track_running_stats=True),
    "BatchNorm without weights": lambda: nn.BatchNorm2d(16, affine=False),
    "BatchNorm, cumulative": lambda: nn.BatchNorm2d(16, momentum=None),
    "BatchNorm without statistics": lambda: nn.BatchNorm2d(16, track_running_stats=False),
    "BatchNorm with ReLU": lambda: NormThenReLU(16), "BatchNorm, absolute weights": lambda: PositiveNorm(16),
    "PReLU": lambda: nn.PReLU(16), "PReLU, shared": nn.PReLU, "Softmax2d": nn.Softmax2d,
    "LayerNorm of images": lambda: LayerNorm([16, 16, 16]), "local response": lambda: nn.LocalResponseNorm(5),
    "Dropout2d": nn.Dropout2d, "ChannelShuffle": lambda: nn.ChannelShuffle(4),
    "MaxPool2d": lambda: nn.MaxPool2d(2), "LPPool2d": lambda: nn.LPPool2d(2, 2),
    "depthwise, two each": lambda: conv(16, 32, groups=16), "grouped": lambda: conv(16, 16, groups=2),
    "circular": lambda: conv(16, 16, padding_mode="circular"),
    "reflected": lambda: conv(16, 16, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(16, 16, 3, 2, 1, output_padding=1),
    "transposed, grouped": lambda: nn.ConvTranspose2d(16, 32, 2, 2, groups=4),
    "upsampling": lambda: nn.UpsamplingBilinear2d(scale_factor=2), "CELU": nn.CELU, "RReLU": nn.RReLU,
    "Softsign": nn.Softsign, "LogSigmoid": nn.LogSigmoid, "Threshold": lambda: nn.Threshold(0.1, 20.0),
    "Hardshrink": nn.Hardshrink,
}
# fmt: on
add(
    "layers and norms",
    {name: (FEWER.get(name, IMAGES), partial(_over_channels, layer, 1)) for name, layer in LAYERS.items()},
)

# Attention


def _rotated(halves: bool) -> Callable[[Tensor], Tensor]:
    """Return rotary positions, of the halves of a head or of neighbours."""

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[-2])[:, None] * 10.0 ** (-torch.arange(half) / (2 * half))
        a, b = (x[..., :half], x[..., half:]) if halves else (x[..., ::2], x[..., 1::2])
        turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)

    return rotate


def _distances(tokens: int) -> Tensor:
    return torch.arange(tokens)[:, None] - torch.arange(tokens)


PACKINGS: dict[str, Callable[[Any, Tensor], Any]] = {
    "(3, heads, d)": lambda m, y: y.view(*y.shape[:2], 3, m.num_heads, m.head_dim).permute(2, 0, 3, 1, 4),
    "(heads, 3, d)": lambda m, y: y.view(*y.shape[:2], m.num_heads, 3, m.head_dim).permute(3, 0, 2, 1, 4),
    "(heads, d, 3)": lambda m, y: y.view(*y.shape[:2], m.num_heads, m.head_dim, 3).permute(4, 0, 2, 1, 3),
    "value first": lambda m, y: [m.heads(part) for part in y.chunk(3, -1)][::-1],
    "(d, heads)": lambda m, y: [
        part.view(*y.shape[:2], m.head_dim, m.num_heads).permute(0, 3, 1, 2) for part in y.chunk(3, -1)
    ],
}
SCORES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "bias table": lambda m, s: s + m.extra[_distances(s.shape[-1]).clamp(-7, 7) + 7].permute(2, 0, 1),
    "temperature": lambda m, s: s * m.extra,
    "talking heads": lambda m, s: m.extra(s.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "causal": lambda _, s: s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), float("-inf")),
    "ALiBi": lambda m, s: (
        s - (2.0 ** -torch.arange(1.0, m.num_heads + 1))[:, None, None] * _distances(s.shape[-1]).abs()
    ),
}
EXTRA: dict[str, Callable[[], Any]] = {
    "bias table": lambda: weights(15, 4),
    "temperature": lambda: Parameter(positive(4, 1, 1)),
    "talking heads": lambda: Linear(4, 4),
    "sink": lambda: weights(4),
    "norms of a head": lambda: times(2, lambda: LayerNorm(8)),
    "norms of all heads": lambda: times(2, lambda: RMSNorm(32)),
    "scale of a head": lambda: Parameter(positive(4)),
}


class Attention(nn.Module):
    def __init__(self, form: str, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads, self.form = 4, 8, kv_heads, form
        if form in PACKINGS:
            self.qkv = Linear(32, 96)
        else:
            self.q, self.k, self.v = Linear(32, 32), Linear(32, kv_heads * 8), Linear(32, kv_heads * 8)
        self.proj = Linear(32, 32)
        if form in EXTRA:
            self.extra = EXTRA[form]()

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Any:
        form = self.form
        if form in PACKINGS:
            q, k, v = PACKINGS[form](self, self.qkv(x))
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
            if form == "norms of all heads":
                q, k = self.extra[0](q), self.extra[1](k)
            q, k, v = self.heads(q), self.heads(k), self.heads(v)
        if form == "norms of a head":
            q, k = self.extra[0](q), self.extra[1](k)
        if form.startswith("rotary"):
            q, k = (_rotated(form == "rotary")(part) for part in (q, k))
        if (shared := self.num_heads // self.num_kv_heads) > 1:
            tiled = form == "tiled"
            k, v = (t.repeat(1, shared, 1, 1) if tiled else t.repeat_interleave(shared, 1) for t in (k, v))
        scores = q @ k.mT * self.head_dim**-0.5
        if form in SCORES:
            scores = SCORES[form](self, scores)
        if form == "sink":
            sink = self.extra.view(1, -1, 1, 1).expand(len(x), -1, x.shape[1], 1)
            shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        y = shares @ v
        if form == "scale of a head":
            y = y * self.extra[:, None, None]
        if form == "mean of heads":
            y = y + y.mean(1, keepdim=True)
        y = y.permute(0, 2, 3, 1) if form == "(d, heads)" else y.transpose(1, 2)
        return self.proj(y.reshape(*x.shape[:2], self.num_heads * self.head_dim))


class TransformerBlock(nn.Module):
    def __init__(self, form: str = "plain", kv_heads: int = 4, norm_first: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm_first = LayerNorm(32), LayerNorm(32), norm_first
        self.attention, self.fc1, self.fc2 = Attention(form, kv_heads), Linear(32, 64), Linear(64, 32)

    def forward(self, x: Tensor) -> Any:
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


def transformer(form: str, kv_heads: int = 4, norm_first: bool = True) -> Net:
    blocks = times(2, lambda: TransformerBlock(form, kv_heads, norm_first))
    return Net(_stacked, first=(16, 32), blocks=blocks, head=(32, 5))


def _with_torch_attention(m: Any, x: Tensor) -> Any:
    q = m.first(x)
    k = x if m.of_input else q
    return m.head(q + m.attention(q, k, k, need_weights=False)[0])


def _torch_attention(**options: Any) -> Net:
    attention = nn.MultiheadAttention(32, 4, batch_first=True, **options)
    parts = {"first": (16, 32), "attention": attention, "head": (32, 5)}
    return Net(_with_torch_attention, **parts, of_input="kdim" in options)


def _torch_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)


_PADDED = (torch.zeros(2, 9).bool(), torch.tensor([[0] * 9, [0] * 5 + [1] * 4]).bool())
_FORMS = dict.fromkeys((*PACKINGS, "plain", "rotary", *SCORES, *EXTRA, "mean of heads"))
# fmt: off
add("attention", {
    **{form: (TOKENS, partial(transformer, form)) for form in _FORMS},
    "norm last": (TOKENS, partial(transformer, "plain", norm_first=False)),
    "two key heads": (TOKENS, partial(transformer, "plain", 2)),
    "one key head": (TOKENS, partial(transformer, "plain", 1)),
    "two key heads, tiled": (TOKENS, partial(transformer, "tiled", 2)),
    "rotary neighbours, two key heads": (TOKENS, partial(transformer, "rotary neighbours", 2)),
    "torch's": (TOKENS, _torch_attention),
    "torch's, add_bias_kv": (TOKENS, partial(_torch_attention, add_bias_kv=True)),
    "torch's, add_zero_attn": (TOKENS, partial(_torch_attention, add_zero_attn=True)),
    "torch's, kdim": (TOKENS, partial(_torch_attention, kdim=16, vdim=16)),
    "torch's encoder": (
        TOKENS, lambda m, x: m.head(m.t(m.a(x))), {"a": (16, 32), "t": _torch_encoder, "head": (32, 5)}),
    "torch's encoder, padded": (
        tuple((TOKENS[0], padded) for padded in _PADDED), lambda m, x, padded: m.head(
            m.t(m.a(x), src_key_padding_mask=padded).masked_fill(padded[..., None], 0)),
        {"a": (16, 32), "t": _torch_encoder, "head": (32, 5)}),
    "torch's transformer": (
        ((TOKENS[0], rand(2, 6, 16)), (rand(1, 3, 16), rand(1, 11, 16))),
        lambda m, x, y: m.head(m.t(m.a(x), m.a(y))),
        {"a": (16, 32), "t": lambda: nn.Transformer(32, 4, 1, 2, 64, batch_first=True), "head": (32, 5)}),
})
# fmt: on

# Architectures


def squeeze_excite(channels: int) -> Net:
    parts = {"a": (channels, channels // 4, 1), "b": (channels // 4, channels, 1)}
    return Net(lambda m, x: x * m.b(m.a(x.mean((2, 3), keepdim=True)).relu()).sigmoid(), **parts)


def _inverted_residual() -> Net:
    layers = Sequential(
        *(Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU()),
        *(conv(32, 32, groups=32), nn.BatchNorm2d(32), nn.SiLU()),
        *(squeeze_excite(32), Conv2d(32, 16, 1), nn.BatchNorm2d(16)),
    )
    return Net(lambda m, x: x + m.layers(x), layers=layers)


def _convnext_forward(m: Any, x: Tensor) -> Tensor:
    y = m.scale * m.down(F.gelu(m.up(m.norm(m.depthwise(x).permute(0, 2, 3, 1)))))
    added: Tensor = x + y.permute(0, 3, 1, 2)
    return added


def _convnext_block() -> Net:
    layers = {"depthwise": conv(16, 16, groups=16), "norm": LayerNorm(16), "scale": Parameter(torch.ones(16))}
    return Net(_convnext_forward, **layers, up=(16, 64), down=(64, 16))


def _dropped_block() -> Net:
    from torchvision.ops import StochasticDepth

    layers = Sequential(conv(16, 32), nn.BatchNorm2d(32), nn.ReLU(), Conv2d(32, 16, 1))
    return Net(lambda m, x: x + m.drop(m.layers(x)), layers=layers, drop=StochasticDepth(0.3, "row"))


def _dense(m: Any, x: Tensor) -> Any:
    a = m.a(x).relu()
    b = m.b(a).relu()
    c = m.c(torch.cat([b, a], 1)).relu()
    return m.head(mean(m.d(m.norm(torch.cat([c, a, b], 1)).relu())))


def _shuffled(m: Any, x: Tensor) -> Any:
    x = m.b(m.a(x).relu())
    n, channels, *size = x.shape
    x = x.view(n, 2, channels // 2, *size).transpose(1, 2).reshape(n, channels, *size)
    return m.head(mean(m.c(x).relu()))


def _in_place(m: Any, x: Tensor) -> Any:
    h = m.a(x)
    h += 1
    h[:, :, 0] = 0
    y = m.b(h).relu_()
    y.mul_(2).add_(h)
    y[:, :4] = 0.5
    return m.head(mean(y))


def _flattened(m: Any, x: Tensor) -> Any:
    y = m.layers(x)
    return m.head(m.f((y.permute(0, 2, 3, 1) if m.channels_last else y).flatten(1)).relu())


def _gated(m: Any, x: Tensor) -> Any:
    return m.head(mean(m.b(m.gate(m.a(x))).relu()))


def _by_attribute(m: Any, x: Tensor) -> Any:
    h = m.a(x).relu()
    return m.head((h.reshape(len(h), m.dim, -1).transpose(1, 2).reshape(len(h), -1, m.dim) / m.dim).mean(1))


def _gated_linear_units(m: Any, x: Tensor) -> Any:
    x = m.a(x)
    a, b = m.halves(x).chunk(2, -1)
    x = x + m.down1(F.silu(b) * a)
    pairs = m.pairs(x)
    return m.head(x + m.down2(pairs[..., ::2] * pairs[..., 1::2].sigmoid()))


def _by_name(m: Any, x: Tensor) -> Any:
    for i, key in enumerate("ab"):
        x = m.functions["rt"[i]](m.layers[key](x)) * m.scales[i]
    return {"scores": m.layers["c"](x), "squares": x.pow(2).sum(-1)}


def _weights_read(m: Any, x: Tensor) -> Any:
    h = m.a(x).relu()
    h = F.linear(h, m.b.weight.t()) + m.b(h)
    return m.head(h), m.b.weight.pow(2).sum(), F.linear(h, m.head.weight)


def _siamese(m: Any, x: Tensor, y: Tensor) -> Any:
    a, b = (m.f(m.e(part).relu()) for part in (x, y))
    return m.head((a - b).abs()), F.cosine_similarity(a, b), (a * b).sum(-1)


def _conditioned(m: Any, x: Tensor, y: Tensor) -> Any:
    made, h = m.made(y).view(-1, 16, 4), m.a(x).relu()
    scale, shift = m.film(y).chunk(2, -1)
    return torch.einsum("bc,bcd->bd", h, made), m.head(h * (1 + scale) + shift)


def _mean_of_blocks(m: Any, x: Tensor) -> Any:
    outputs = [x := block(x if i else m.first(x)) for i, block in enumerate(m.blocks)]
    return m.head(torch.stack(outputs).mean(0))


def _counted(m: Any, x: Tensor) -> Any:
    m.calls += 1
    return m.head(m.a(x).relu())


def _kept(m: Any, x: Tensor) -> Any:
    h = m.a(x).relu()
    m.kept = m.b(h)
    return m.head(h)


def _recurrent(layer: nn.Module) -> Net:
    width = layer(torch.randn(1, 2, 32))[0].shape[-1]
    return Net(
        lambda m, x: m.head(m.o(m.layer(m.a(x).relu())[0]).relu()),
        **{"a": (16, 32), "layer": layer, "o": (width, 16), "head": (16, 5)},
    )


def _gru_cell(m: Any, x: Tensor) -> Any:
    h = torch.zeros(len(x), 32)
    for step in range(x.shape[1]):
        h = m.cell(m.a(x[:, step]).relu(), h)
    return m.head(h)


def _own_recurrence(m: Any, x: Tensor) -> Any:
    h = m.a(x[:, 0]).tanh()
    for step in range(1, x.shape[1]):
        h = (m.a(x[:, step]) + m.u(h)).tanh()
    return m.head(h)


def _wavenet(m: Any, x: Tensor) -> Any:
    x, skipped = m.a(x), 0
    for i, (both, out, skip) in enumerate(zip(m.both, m.outs, m.skips, strict=True)):
        gate, values = both(F.pad(x, (2**i, 0))).chunk(2, 1)
        z = gate.sigmoid() * values.tanh()
        x, skipped = x + out(z), skipped + skip(z)
    return m.head(skipped.relu())  # type: ignore[attr-defined]


def _tied_language_model(m: Any, i: Tensor) -> Any:
    x = m.e(i) * 32**0.5 + m.p.weight[: i.shape[1]]
    return m.head(x + m.g(m.f(m.n(x)).relu()))


def _tied() -> Any:
    net: Any = Net(
        *(_tied_language_model,),
        **{"e": Embedding(40, 32, padding_idx=0), "p": Embedding(32, 32), "n": LayerNorm(32)},
        **{"f": (32, 64), "g": (64, 32), "head": Linear(32, 40, bias=False)},
    )
    net.head.weight = net.e.weight
    return net


def _mixer(m: Any, x: Tensor) -> Any:
    x = m.a(x)
    x = x + m.t2(F.gelu(m.t1(x.mT))).mT
    return m.head((x + m.c2(F.gelu(m.c1(x)))).mean(1))


def _temporal_shift(m: Any, x: Tensor) -> Any:
    x = m.a(x)
    quarter, y = x.shape[-1] // 4, torch.zeros_like(x)
    y[:, 1:, :quarter] = x[:, :-1, :quarter]
    y[:, :-1, quarter : 2 * quarter] = x[:, 1:, quarter : 2 * quarter]
    y[:, :, 2 * quarter :] = x[:, :, 2 * quarter :]
    return m.head(m.b(y).relu())


def _same_block(m: Any, x: Tensor) -> Any:
    x = m.a(x)
    for _ in range(3):
        x = m.block(x)
    return m.head(x)


def _scales() -> nn.ParameterList:
    return nn.ParameterList([Parameter(torch.rand(16)) for _ in range(2)])


_TO_16 = {"a": (3, 16, 3), "b": (16, 16, 3), "head": (16, 5)}
_MLP = {"a": (8, 16), "b": (16, 16), "head": (16, 5)}
_BLOCKS = {"first": (8, 16), "blocks": lambda: times(4, residual), "head": (16, 5)}
_RNN = {"a": (16, 32), "head": (32, 5)}
_TO_FLAT = {
    "layers": lambda: Sequential(conv(3, 8), nn.ReLU(), conv(8, 16, stride=2), nn.ReLU()),
    **{"f": (1024, 32), "head": (32, 5)},
}
# fmt: off
add("architectures", {
    "convolution, twice": (IMAGES, lambda m, x: m.head(mean(m.b(m.b(m.a(x).relu()).relu()).relu())), _TO_16),
    "ConvNeXt": (IMAGES, lambda: stack(_convnext_block, (3, 16, 3))),
    "MBConv with squeeze and excitation": (IMAGES, lambda: stack(_inverted_residual, conv(3, 16, stride=2))),
    "stochastic depth": (IMAGES, lambda: stack(_dropped_block, (3, 16, 3))),
    "DenseNet": (IMAGES, _dense, {
        "a": (3, 8, 3), "b": (8, 8, 3), "c": (16, 8, 3), "d": (24, 12, 3), "norm": lambda: nn.BatchNorm2d(24),
        "head": (12, 5)}),
    "channel shuffle": (IMAGES, _shuffled, {
        **_TO_16, "b": lambda: conv(16, 16, groups=2), "c": lambda: conv(16, 16, groups=2)}),
    "pixel shuffle": (IMAGES, lambda m, x: m.e(m.down(m.c(m.up(m.b(m.a(x).relu()))).relu())), {
        "a": (3, 16, 3), "b": (16, 32, 3), "c": (8, 8, 3), "e": (32, 4, 3), "up": lambda: nn.PixelShuffle(2),
        "down": lambda: nn.PixelUnshuffle(2)}),
    "ECA": (IMAGES, _gated, {**_TO_16, "gate": lambda: Net(
        lambda m, x: x * m.c(x.mean((2, 3))[:, None])[:, 0, :, None, None].sigmoid(),
        c=lambda: Conv1d(1, 1, 3, padding=1))}),
    "CBAM": (IMAGES, _gated, {**_TO_16, "gate": lambda: Net(
        lambda m, x: x * m.c(torch.cat([x.amax(1, True), x.mean(1, True)], 1)).sigmoid(), c=(2, 1, 7))}),
    "buffer and parameter as scales": (
        IMAGES, lambda m, x: m.head(mean(m.b(m.a(x) * m.scale).relu() * m.p)),
        {**_TO_16, "scale": lambda: positive(16, 1, 1), "p": lambda: Parameter(torch.rand(1, 16, 1, 1))}),
    "a plain tensor as scale": (
        IMAGES, lambda m, x: m.head(mean(m.b(m.a(x) * m.held[0]).relu())),
        {**_TO_16, "held": lambda: [positive(16, 1, 1)]}),
    "in place": (IMAGES, _in_place, _TO_16),
    "features too": (
        IMAGES,
        lambda m, x: {"maps": [b := m.b(m.a(x).relu()).relu(), (b.sum(1),)], "scores": m.head(mean(m.c(b)))},
        {**_TO_16, "c": (16, 24, 3), "head": (24, 5)}),
    "by an attribute": (IMAGES, _by_attribute, {**_TO_16, "dim": 16}),
    "flattened": (IMAGES[:2], _flattened, {**_TO_FLAT, "channels_last": False}),
    "flattened, channels last": (IMAGES[:2], _flattened, {**_TO_FLAT, "channels_last": True}),
    "U-Net": (
        (IMAGE, rand(1, 3, 32, 16)),
        lambda m, x: m.out(m.d(torch.cat([m.up(m.c(m.b(a := m.a(x).relu()).relu()).relu()), a], 1)).relu()), {
        "a": (3, 8, 3), "b": lambda: conv(8, 16, stride=2), "c": (16, 16, 3), "d": (16, 8, 3),
        "up": lambda: nn.ConvTranspose2d(16, 8, 2, 2), "out": (8, 2, 3)}),
    # of vectors
    "highway": (VECTORS, lambda: stack(lambda: Net(
        lambda m, x: x * (1 - (gate := m.gate(x).sigmoid())) + gate * m.down(m.up(x).relu()),
        up=(16, 32), down=(32, 16), gate=(16, 16)))),
    "scaled shortcut": (VECTORS, lambda: stack(lambda: Net(
        lambda m, x: m.down(m.up(x).relu()) * m.s + x * m.r, up=(16, 32), down=(32, 16),
        s=Parameter(torch.tensor(0.5)), r=Parameter(torch.tensor(0.7))))),
    "gate of one column": (
        VECTORS, lambda m, x: m.head(m.b(h := m.a(x).tanh()) * h[:, :1]), _MLP),
    "gated linear units": (VECTORS, _gated_linear_units, {
        **_MLP, "halves": (16, 64), "down1": (32, 16), "pairs": (16, 64), "down2": (32, 16)}),
    "layers by name": (VECTORS, _by_name, {
        "layers": lambda: nn.ModuleDict({n: Linear(*s) for n, s in zip("abc", _MLP.values(), strict=True)}),
        "functions": {"r": torch.relu, "t": torch.tanh}, "scales": _scales}),
    "memory of keys": (VECTORS, lambda m, x: m.head((m.a(x) @ m.k.T).softmax(-1) @ m.v), {
        "a": (8, 16), "k": lambda: weights(20, 16), "v": lambda: weights(20, 12), "head": (12, 5)}),
    "vector quantisation": (VECTORS, lambda m, x: (
        m.head((z := m.a(x)) + (m.codes(i := torch.cdist(z, m.codes.weight).argmin(-1)) - z)), i),
        {**_MLP, "codes": lambda: Embedding(20, 16)}),
    "weights that the model reads": (VECTORS, _weights_read, _MLP),
    "tied autoencoder": (
        VECTORS,
        lambda m, x: F.linear(F.linear(m.b(m.a(x).relu()).relu(), m.b.weight.t()).relu(), m.a.weight.t()),
        {"a": (8, 16), "b": (16, 12)}),
    "mean over the blocks": (VECTORS, _mean_of_blocks, _BLOCKS),
    "parallel blocks": (
        VECTORS, lambda m, x: (lambda h: m.head(torch.stack([b(h) for b in m.blocks]).sum(0)))(m.first(x)),
        _BLOCKS),
    "scaled by the number of blocks": (
        VECTORS, lambda m, x: m.head(m.blocks[1](m.blocks[0](m.first(x)) / len(m.blocks)) * len(m.blocks)),
        {**_BLOCKS, "blocks": lambda: times(2, residual)}),
    "divided by a configured width": (
        VECTORS, lambda m, x: m.head(m.b(m.a(x).relu()) / m.config["dim"]), {**_MLP, "config": {"dim": 16}}),
    "divided by out_features": (VECTORS, lambda m, x: m.head(m.b(m.a(x).relu()) / m.b.out_features), _MLP),
    "divided by out_features, normalised": (
        VECTORS, lambda m, x: F.normalize(m.head(m.b(m.a(x).relu()) / m.b.out_features), dim=-1), _MLP),
    "a counter": (VECTORS, _counted, {**_MLP, "calls": 0}),
    "an auxiliary output kept": (VECTORS, _kept, {**_MLP, "kept": None}),
    # of pairs
    "a layer used on two inputs": (
        PAIRS, lambda m, x, y: m.head(torch.cat([m.f(m.e(x).relu()).relu(), m.f(m.e(y).relu()).tanh()], -1)),
        {"e": (8, 32), "f": (32, 32), "head": (64, 5)}),
    "siamese": (PAIRS, _siamese, {"e": (8, 32), "f": (32, 32), "head": (32, 5)}),
    "bilinear": (PAIRS, lambda m, x, y: m.head(m.w(m.a(x).relu(), m.b(y).relu()).relu()), {
        "a": (8, 16), "b": (8, 12), "w": lambda: nn.Bilinear(16, 12, 10), "head": (10, 5)}),
    "weights made, and FiLM": (PAIRS, _conditioned, {**_MLP, "made": (8, 64), "film": (8, 32)}),
    "broadcast": (PAIRS, lambda m, x, y: m.head(m.c(m.b(y)).relu() * (a := m.a(x))[:, :1] + a[:, 1:]), {
        "a": (8, 2), "b": (8, 16), "c": (16, 16), "head": (16, 5)}),
    # of sequences
    "GRU": (TOKENS, lambda: _recurrent(nn.GRU(32, 24, batch_first=True))),
    "LSTM of two directions": (
        TOKENS, lambda: _recurrent(nn.LSTM(32, 24, 2, batch_first=True, bidirectional=True))),
    "LSTM with projection": (TOKENS, lambda: _recurrent(nn.LSTM(32, 24, batch_first=True, proj_size=12))),
    "GRU cell": (TOKENS, _gru_cell, {**_RNN, "cell": lambda: nn.GRUCell(32, 32)}),
    "own recurrence": (TOKENS, _own_recurrence, {**_RNN, "u": (32, 32)}),
    "causal dilated convolutions": (LENGTHS, _wavenet, {
        "both": lambda: ModuleList(Conv1d(32, 64, 2, dilation=2**i) for i in range(3)),
        "outs": lambda: times(3, lambda: Conv1d(32, 32, 1)), "a": lambda: Conv1d(16, 32, 1),
        "skips": lambda: times(3, lambda: Conv1d(32, 16, 1)), "head": lambda: Conv1d(16, 5, 1)}),
    "tied embedding": (IDS, _tied),
    "bag of embeddings": (
        IDS, lambda m, i: m.g(m.f(m.e(i)).relu()),
        {"e": lambda: nn.EmbeddingBag(40, 32), "f": (32, 64), "g": (64, 5)}),
    "mixer": ((rand(2, 9, 16), rand(1, 9, 16)), _mixer, {
        **_RNN, "t1": (9, 18), "t2": (18, 9), "c1": (32, 64), "c2": (64, 32)}),
    "temporal shift": (TOKENS, _temporal_shift, {**_RNN, "b": (32, 32)}),
    "one block thrice": (TOKENS, _same_block, {**_RNN, "block": lambda: TransformerBlock()}),
})
# fmt: on

# Second round


class WindowAttention(nn.Module):
    """Attention in shifted windows of 4 x 4, with a table of relative positions."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.num_heads, self.shift, self.table = 4, shift, weights(49, 4)
        self.qkv, self.proj = Linear(32, 96), Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        n, height, width, channels = x.shape
        x = x.roll((-self.shift, -self.shift), (1, 2)).view(n, height // 4, 4, width // 4, 4, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, channels)
        q, k, v = self.qkv(x).reshape(len(x), 16, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None] + 3
        scores = q @ k.mT * q.shape[-1] ** -0.5 + self.table[apart[0] * 7 + apart[1]].permute(2, 0, 1)
        y = self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(len(x), 16, -1))
        y = y.view(n, height // 4, width // 4, 4, 4, -1).permute(0, 1, 3, 2, 4, 5)
        return y.reshape(n, height, width, -1).roll((self.shift, self.shift), (1, 2))


def _window_block(shift: int) -> Net:
    return Net(
        lambda m, x: (y := x + m.attention(m.n1(x))) + m.mlp(m.n2(y)),
        **{"n1": LayerNorm(32), "attention": WindowAttention(shift), "n2": LayerNorm(32)},
        mlp=Sequential(Linear(32, 64), nn.GELU(), Linear(64, 32)),
    )


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.dim_head = 4, 8
        self.to_q, self.to_kv = Linear(32, 32, bias=False), Linear(16, 64, bias=False)
        self.to_out = Linear(32, 32)

    def forward(self, latent: Tensor, x: Tensor) -> Any:
        parts = (self.to_q(latent), *self.to_kv(x).chunk(2, -1))
        q, k, v = (t.reshape(len(t), -1, self.heads, self.dim_head).transpose(1, 2) for t in parts)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 8
        self.q, self.k, self.v, self.o = (Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        layers = (self.q, self.k, self.v)
        q, k, v = (f(x).view(len(x), -1, self.num_heads, self.head_dim).transpose(1, 2) for f in layers)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        summed = 1 / (torch.einsum("bhtd,bhd->bht", q, k.sum(2)) + 1e-6)
        products = torch.einsum("bhtd,bhte->bhde", k, v)
        return self.o(torch.einsum("bhtd,bhde,bht->bthe", q, products, summed).flatten(2))


class StandardisedConv(Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(input, w, self.bias, self.stride, self.padding)


def _squares_kept(m: Any, x: Tensor) -> Any:
    y = m.down(m.up(x).relu())
    m.square = y.pow(2).mean()
    return x + y


def _of_squares(tapped: bool) -> Net:
    def block() -> Net:
        return Net(_squares_kept, up=Linear(16, 32), down=Linear(32, 16), square=0.0)

    return Net(
        *(_outputs_of_blocks,),
        **{"first": Linear(8, 16), "blocks": times(3, block), "head": Linear(16, 5), "tapped": tapped},
    )


def _outputs_of_blocks(m: Any, x: Tensor) -> Any:
    x, outputs = m.first(x), []
    for block in m.blocks:
        outputs.append(x := block(x))
    return m.head(x), torch.stack([block.square for block in m.blocks]).sum(), outputs if m.tapped else ()


def _with_index(m: Any, x: Tensor) -> Any:
    x = m.first(x)
    for i, block in enumerate(m.blocks):
        x = block(x, m.table.weight[i])
    return m.head(x)


def _one_head(fused: bool) -> Net:
    def attend(m: Any, x: Tensor) -> Any:
        q, k, v = m.q(x), m.k(x), m.v(x)
        if fused:
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return ((q @ k.mT) / 32**0.5).softmax(-1) @ v

    parts = {"a": Linear(16, 32), "q": Linear(32, 32), "k": Linear(32, 32), "v": Linear(32, 24)}
    return Net(lambda m, x: m.head(attend(m, m.a(x))), **parts, head=Linear(24, 5))


def _functional_attention(m: Any, x: Tensor) -> Any:
    x, rest = m.a(x), (m.w, m.b, None, None, False, 0.0, m.o.weight, m.o.bias)
    return m.head(F.multi_head_attention_forward(x, x, x, 32, 4, *rest)[0])


def _spectral(m: Any, x: Tensor) -> Any:
    x = m.a(x)
    waves = torch.fft.rfft2(x)
    made = torch.zeros_like(waves)
    made[..., :4, :4] = torch.einsum("bixy,ioxy->boxy", waves[..., :4, :4], m.w)
    return m.head((torch.fft.irfft2(made, s=x.shape[-2:]) + m.b(x)).relu())


def _sampled(m: Any, x: Tensor) -> Any:
    y = m.a(x).relu()
    grid = m.offsets(y).permute(0, 2, 3, 1).tanh()
    return m.head(mean(m.b(F.grid_sample(y, grid, align_corners=False)).relu()))


def _skipping_mlp(m: Any, x: Tensor) -> Any:
    h = x
    for i, layer in enumerate(m.layers):
        h = layer(torch.cat([h, x], -1) if i == 2 else h).relu()
    return m.head(h)


def _graph_attention(m: Any, x: Tensor, edges: Tensor) -> Any:
    z = m.w(x).view(len(x), 4, 8)
    scores = (z * m.source).sum(-1)[edges[0]] + (z * m.target).sum(-1)[edges[1]]
    shares = F.leaky_relu(scores, 0.2).exp()
    total = torch.zeros(len(x), 4).index_add(0, edges[1], shares)
    summed = torch.zeros_like(z).index_add(0, edges[1], shares[..., None] * z[edges[0]])
    return m.head((summed / (total[..., None] + 1e-6)).flatten(1).relu())


def _tied_dilations(m: Any, x: Tensor) -> Any:
    x = m.a(x)
    for d in (1, 2, 4):
        x = x + F.conv1d(F.pad(x, (2 * d, 0)), m.c.weight, m.c.bias, dilation=d).relu()
    return m.head(x)


def _numbered(m: Any, x: Tensor) -> Any:
    for i, gain in enumerate(m.gains):
        x = getattr(m, f"fc{i}")(x) * gain
        x = x.relu() if i < 2 else x
    return x


def _rezero(m: Any, x: Tensor) -> Any:
    x = m.a(x)
    for up, down, gate in zip(m.ups, m.downs, m.gates, strict=True):
        x = x + gate * down(up(m.norm(x)).relu())
    return m.head(m.norm(x))


_Answer = namedtuple("_Answer", "scores features")
_SQUARE = (rand(2, 16, 16), rand(1, 16, 16))
_LONGER = (rand(2, 9, 16), rand(1, 5, 16), rand(2, 30, 16))
_SIXTEEN = (rand(2, 16, 8), rand(3, 16, 8))
# fmt: off
add("second round", {
    "outputs of all blocks": (VECTORS, partial(_of_squares, True)),
    "auxiliary loss of blocks": (VECTORS, partial(_of_squares, False)),
    "blocks called with their index": (VECTORS, _with_index, {
        "first": (8, 16), "table": lambda: Embedding(3, 16), "head": (16, 5), "blocks": lambda: times(
            3, lambda: Net(lambda m, x, e: x + m.g(m.f(x + e).relu()), f=(16, 32), g=(32, 16)))}),
    "shifted windows": (
        (rand(2, 8, 8, 16), rand(1, 8, 8, 16), rand(1, 16, 8, 16)),
        lambda m, x: m.head(m.blocks(m.a(x)).mean((1, 2))),
        {**_RNN, "blocks": lambda: Sequential(_window_block(0), _window_block(2))}),
    "Perceiver": (
        _LONGER,
        lambda m, x: m.head(((q := m.latent.expand(len(x), -1, -1)) + m.cross(q, x)).mean(1)),
        {"latent": lambda: weights(6, 32), "cross": lambda: CrossAttention(), "head": (32, 5)}),
    "linear attention": (
        _LONGER, lambda m, x: m.head((h := m.a(x)) + m.attention(h)),
        {**_RNN, "attention": lambda: LinearAttention()}),
    "one head, all width": (_LONGER, partial(_one_head, False)),
    "one head, scaled_dot_product_attention": (_LONGER, partial(_one_head, True)),
    "F.multi_head_attention_forward": ((rand(9, 2, 16), rand(5, 1, 16)), _functional_attention, {
        **_RNN, "w": lambda: weights(96, 32, scale=0.2), "b": lambda: weights(96), "o": (32, 32)}),
    "LoRA": (VECTORS, lambda m, x: m.head((m.a(x) + x @ m.down.T @ m.up.T).relu()), {
        "a": (8, 32), "down": lambda: weights(4, 8, scale=0.3), "up": lambda: weights(32, 4, scale=0.3),
        "head": (32, 5)}),
    "einsum of own parameters": (
        (rand(3, 4, 8), rand(1, 4, 8)), lambda m, x: m.head((torch.einsum(
            "bht,htd->bd", torch.einsum("btc,cht->bht", x, m.w).relu(), m.v) @ m.c).relu()),
        {"w": lambda: weights(8, 6, 4), "v": lambda: weights(6, 4, 5), "c": lambda: weights(5, 12),
         "head": (12, 3)}),
    "products with own parameters": (VECTORS, lambda m, x: m.b((x @ m.w + m.bias).relu()).relu() @ m.v, {
        "w": lambda: weights(8, 16), "bias": lambda: weights(16), "b": (16, 16),
        "v": lambda: weights(16, 5)}),
    "maximum of two streams": (
        ((IMAGE, IMAGE.flip(0)), (IMAGES[1], IMAGES[1])),
        lambda m, x, y: m.head(mean(m.c(torch.maximum(m.a(x), m.b(y))).relu())),
        {"a": (3, 16, 3), "b": (3, 16, 3), "c": (16, 12, 1), "head": (12, 5)}),
    "maxout of halves": (VECTORS, lambda m, x: m.head(m.b(torch.maximum(*m.a(x).chunk(2, -1))).relu()), {
        **_MLP, "a": (8, 32)}),
    "maxout of pairs": (VECTORS, lambda m, x: m.head(m.b(m.a(x).view(len(x), 16, 2).amax(-1)).relu()), {
        **_MLP, "a": (8, 32)}),
    "SELU and AlphaDropout": (
        VECTORS, lambda m, x: m.head(m.drop(F.selu(m.a(x)))),
        {"a": (8, 32), "head": (32, 5), "drop": lambda: nn.AlphaDropout(0.1)}),
    "a named tuple": (VECTORS, lambda m, x: _Answer(m.head(h := m.a(x).relu()), h), _MLP),
    "BatchNorm1d of two ranks": (
        (rand(4, 8, 10), rand(2, 8, 7)),
        lambda m, x: m.head(m.norm2(m.b(m.norm1(m.a(x)).relu().mean(-1))).relu()),
        {"a": lambda: Conv1d(8, 32, 3), "norm1": lambda: nn.BatchNorm1d(32), "b": (32, 16),
         "norm2": lambda: nn.BatchNorm1d(16), "head": (16, 5)}),
    "as many tokens as features": (
        _SQUARE, lambda m, x: m.head(m.b((h := m.a(x).relu()) + m.t(h.mT).mT).relu()),
        {"a": (16, 16), "t": (16, 16), "b": (16, 16), "head": (16, 5)}),
    "tokens times features": (_SQUARE, lambda m, x: m.head(((h := m.a(x).relu()) @ h).relu()), {
        "a": (16, 16), "head": (16, 5)}),
    "length and width of equal numbers": (
        _SIXTEEN, lambda m, x: m.head(m.b(m.a(x).relu().reshape(-1, m.tokens, m.dim)).mean(1)),
        {**_MLP, "tokens": 16, "dim": 16}),
    "one number": (
        _SIXTEEN, lambda m, x: m.head(m.b(m.a(x).relu().reshape(-1, m.tokens, m.dim)).relu()).mean(),
        {**_MLP, "tokens": 16, "dim": 16}),
    "weight standardisation": (IMAGES[:3], lambda m, x: m.head(mean(m.b(m.norm(m.a(x)).relu()).relu())), {
        "a": lambda: StandardisedConv(3, 16, 3, padding=1), "norm": lambda: nn.GroupNorm(4, 16),
        "b": lambda: StandardisedConv(16, 16, 3, padding=1), "head": (16, 5)}),
    "grid_sample": (IMAGES[:3], _sampled, {
        "a": (3, 16, 3), "offsets": (16, 2, 1), "b": (16, 8, 1), "head": (8, 5)}),
    "Fourier neural operator": (IMAGES[:2], _spectral, {
        "a": (3, 16, 1), "b": (16, 16, 1), "head": (16, 2, 1),
        "w": lambda: Parameter(torch.randn(16, 16, 4, 4, dtype=torch.cfloat) * 0.1)}),
    "Fourier features": (
        VECTORS[:2],
        lambda m, x: m.head(m.a(torch.cat([(p := m.waves(x) * 6.28).sin(), p.cos()], -1)).relu()),
        {"waves": lambda: Linear(8, 16, bias=False), "a": (32, 32), "head": (32, 5)}),
    "NeRF": (VECTORS, _skipping_mlp, {
        "layers": lambda: ModuleList(Linear(n, 32) for n in (8, 32, 40, 32)), "head": (32, 5)}),
    "graph convolution": (
        ((rand(2, 6, 8), rand(2, 6, 6).abs()), (rand(1, 4, 8), rand(1, 4, 4).abs())),
        lambda m, x, near: m.head((near @ m.b((near @ m.a(x)).relu())).relu().amax(1)), _MLP),
    "graph attention": (
        ((rand(6, 8), ids(2, 14, below=6)), (rand(5, 8), ids(2, 9, below=5))), _graph_attention,
        {"w": (8, 32), "source": lambda: weights(4, 8), "target": lambda: weights(4, 8), "head": (32, 5),
         "num_heads": 4}),
    "one weight for all dilations": (LENGTHS, _tied_dilations, {
        "a": lambda: Conv1d(16, 16, 1), "c": lambda: Conv1d(16, 16, 3), "head": lambda: Conv1d(16, 5, 1)}),
    "numbered layers": (VECTORS, _numbered, {
        "fc0": (8, 32), "fc1": (32, 24), "fc2": (24, 5), "gains": [1.0, 2.0, 0.5]}),
    "ReZero and a shared norm": (VECTORS, _rezero, {
        "a": (8, 16), "norm": lambda: LayerNorm(16), "ups": lambda: times(2, lambda: Linear(16, 32)),
        "downs": lambda: times(2, lambda: Linear(32, 16)), "head": (16, 5),
        "gates": lambda: nn.ParameterList([Parameter(torch.zeros(1)) for _ in range(2)])}),
})
# In training, the norm of a time step takes its statistics over the features that a subnet has, in the
# reference over zeros as well. With running statistics, both agree.
add("second round", {"BatchNorm1d over time": (
    (rand(4, 10, 8), rand(2, 10, 8)), lambda m, x: m.head(m.norm(m.a(x)).relu()),
    {"a": (8, 32), "head": (32, 5), "norm": lambda: nn.BatchNorm1d(10)})}, training=False)
# fmt: on

# Decoders of transformers

_LEFT = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
_PROMPTS = (
    *({"input_ids": ids(*shape, below=50)} for shape in ((2, 6), (1, 1), (3, 17))),
    *({"input_ids": ids(2, 9, below=50), "attention_mask": mask} for mask in (_LEFT, _LEFT.flip(1))),
)
_PADDED_FIRST = (_PROMPTS[3], *_PROMPTS[:3], _PROMPTS[4])
"""For DiffLlama, which branches on whether there is a mask: insert_ proves one example."""
DECODERS = """
    Llama Mistral Ministral Qwen2 Qwen3 Gemma Gemma2 Gemma3Text VaultGemma RecurrentGemma Phi Phi3 Olmo
    Olmo2 Olmo3 GPTNeoX GPT2 GPTBigCode OPT Bloom Mpt StableLm Cohere Cohere2 Starcoder2 Granite SmolLM3
    DiffLlama Glm Glm4 Nemotron Exaone4 HunYuanDenseV1 SeedOss Arcee Helium Persimmon BioGpt XGLM Jais2
    Ernie4_5 Lfm2
"""


def _decoder(name: str, **sizes: Any) -> Any:
    make = importlib.import_module("small_decoders").small_decoder
    return make(f"{name}Config", num_hidden_layers=3, use_cache=False, **sizes)


for _name in DECODERS.split():
    _inputs = _PADDED_FIRST if _name == "DiffLlama" else _PROMPTS
    add("decoders of transformers", {_name: (_inputs, partial(_decoder, _name))}, small=False, tolerance=5e-4)

# Must be refused, or right


@dataclass
class Scores:
    features: Tensor
    scores: Tensor


class FrozenNorm(nn.BatchNorm2d):
    """Stays in evaluation mode, as fine-tuning recipes want it."""

    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(mode and False)


class ScaledLinear(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.in_features


class EqualisedLinear(Linear):
    """The equalised learning rate of StyleGAN, computed in the forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / math.sqrt(self.weight.shape[1]), self.bias)


def _shortcut_block(inputs: int, outputs: int) -> Net:
    return Net(
        lambda m, x: x + y if (y := m.layers(x)).shape == x.shape else y,
        layers=Sequential(conv(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU()),
    )


def _reversible(m: Any, x: Tensor) -> Any:
    p, q = m.a(x).chunk(2, -1)
    for f, g in zip(m.f, m.g, strict=True):
        p = p + f(q)
        q = q + g(p)
    return m.head(torch.cat([p, q], -1))


def _pointer(m: Any, x: Tensor, padded: Tensor) -> Any:
    h = m.e(x).relu()
    q, k = m.q(h.mean(1)), m.k(h)
    scores = torch.einsum("bc,btc->bt", q, k) / q.shape[-1] ** 0.5
    return scores.masked_fill(padded, m.least)


def _divided(finish: Callable[..., Any], scale: float = -1.0, bias: bool = True) -> Callable[[], Net]:
    """Return a network whose hidden features are divided by their number, or multiplied by it."""

    def compute(m: Any, x: Tensor) -> Any:
        h = m.a(x).relu()
        y = m.b(h).relu()
        return finish(m, h, y * y.shape[-1] ** scale)

    sizes = {"a": (8, 32), "b": (32, 32), "c": (32, 6), "d": (32, 16)}
    return lambda: Net(compute, **{name: Linear(*size, bias=bias) for name, size in sizes.items()})


def _policy(finish: Callable[..., Any]) -> Callable[[], Net]:
    """Return an actor and critic, of which the actor's answer is in an object."""
    parts = {"a": (8, 32), "mu": (32, 6), "spread": (32, 6), "value": (32, 1)}
    return lambda: Net(lambda m, x: (m.value(h := m.a(x).tanh()), finish(m, h)), **parts)


def _between_relus(layer: Callable[[int, int], nn.Module]) -> Sequential:
    return Sequential(layer(8, 32), nn.ReLU(), layer(32, 32), nn.ReLU(), layer(32, 6))


def _attend(m: Any, x: Tensor) -> Any:
    q, k, v = (f(x).unflatten(-1, (m.num_heads, 8)).transpose(1, 2) for f in (m.q, m.k, m.v))
    scores = q @ k.mT / (m.num_heads * 8 if m.form == "all width" else 8) ** 0.5
    if m.form == "ALiBi":
        slopes = 2.0 ** (-8.0 * torch.arange(1, m.num_heads + 1) / m.num_heads)
        scores = scores - slopes[:, None, None] * _distances(x.shape[1]).abs()
    return m.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def _attention_scaled(form: str, first: Callable[[], nn.Module], bias: bool = True) -> Sequential:
    layers = {name: Linear(32, 32, bias=bias) for name in "qkvo"}
    return Sequential(first(), Net(_attend, num_heads=4, form=form, **layers), Linear(32, 50))


_FREE, _PART = torch.zeros(2, 7).bool(), torch.tensor([[0] * 5 + [1] * 2, [0] * 7]).bool()
_ALL, _SOME = torch.ones(4, 6).bool(), torch.tensor([[1, 1, 1, 1, 0, 1]] * 4).bool()
_WORDS, _STATES, _ALIKE = rand(2, 7, 8), (rand(4, 8), rand(2, 8)), torch.ones(1, 9, dtype=torch.long)
_FAR = (_STATES[0], 1e6 * rand(4, 8))
_EXAMPLES = {"random numbers": rand(2, 8, 32), "one token": rand(2, 1, 32), "ones": torch.ones(1, 8, 32)}
_EXAMPLES["zeros"] = torch.zeros(1, 8, 32)
# fmt: off
add("must be refused", {
    "shortcut where shapes fit": (
        _STATES,
        lambda m, x: m.head(y + h if (y := m.b(h := m.a(x).relu()).relu()).shape == h.shape else y),
        {"a": (8, 32), "b": (32, 64), "head": (64, 10)}),
    "convolutions with shortcuts": (IMAGES[:2], lambda m, x: m.head(mean(m.blocks(x))), {
        "blocks": lambda: Sequential(*map(_shortcut_block, (3, 16, 32, 64), (16, 32, 64, 64))),
        "head": (64, 5)}),
    "RevNet": (_STATES, _reversible, {
        "a": (8, 32), "head": (32, 5), **dict.fromkeys("fg", lambda: times(
            3, lambda: Sequential(Linear(16, 32), nn.ReLU(), Linear(32, 16))))}),
    **{f"pointer, {least:.0e} where padded": (((_WORDS, _PART), (_WORDS + 1, _FREE)), _pointer, {
        "e": (8, 32), "q": (32, 32), "k": (32, 32), "least": least})
        for least in (-1e4, -1e9, torch.finfo(torch.float32).min, float("-inf"))},
    "pointer, none padded": (((_WORDS, _FREE), (_WORDS + 1, _PART)), _pointer, {
        "e": (8, 32), "q": (32, 32), "k": (32, 32), "least": -1e9}),
    "masked actions": (
        ((_STATES[0], _SOME), (rand(4, 8), _ALL)), lambda m, x, allowed: m.head(
            (h := m.b(m.a(x).relu()).relu()) / h.shape[-1] ** 0.5).masked_fill(~allowed, -1e9),
        {"a": (8, 32), "b": (32, 64), "head": (64, 6)}),
    "a large constant beside": (
        _STATES, _divided(lambda m, _, y: torch.cat([m.c(y), torch.full((len(y), 1), 1e6)], 1))),
    "complex output beside": (_STATES, _divided(lambda m, h, y: (m.c(h), torch.fft.fft(m.d(y))))),
    "argmax beside": (
        (rand(64, 8), rand(200, 8)), _divided(lambda m, h, y: (m.c(h), (m.d(y) + 1).argmax(-1)), scale=1.0)),
    "example of zeros, no biases": (
        (torch.zeros(4, 8), rand(4, 8)), _divided(lambda m, _, y: m.c(y), bias=False)),
    "thresholded": (_FAR, _divided(lambda m, _, y: (m.c(y) > 1e3).float())),
    "nothing detected": (
        _FAR, _divided(lambda m, h, y: ((z := m.c(y))[z[:, 0] > 1e3], h.sum(-1) * 0))),
    "saturated": ((_STATES[0], 3e7 * _STATES[0]), _divided(lambda m, _, y: (m.c(y) * 1e-4 + 10).sigmoid())),
    "clamped": (
        (rand(4, 8).abs(), 1e-3 * rand(4, 8)),
        _divided(lambda m, h, y: F.hardtanh(m.c(y) + 50 * (h.mean() - 0.15).relu()))),
    "Normal beside": (_STATES, _policy(lambda m, h: Normal(m.mu(h), m.spread(h).exp(), validate_args=False))),
    "Normal beside, one spread": (
        _STATES, _policy(lambda m, h: Normal(m.mu(h), torch.tensor(0.1), validate_args=False))),
    "Categorical beside": (_STATES, _policy(lambda m, h: Categorical(logits=m.mu(h), validate_args=False))),
    "dataclass beside": (_STATES, _policy(lambda m, h: Scores(h, m.mu(h)))),
    "frozen BatchNorm": (IMAGES[:2], partial(_over_channels, lambda: FrozenNorm(16))),
    "scaled output": (_STATES, lambda: Sequential(Linear(8, 32), nn.ReLU(), ScaledLinear(32, 6))),
    "scaled outputs": (_STATES, lambda: _between_relus(ScaledLinear)),
    "equalised learning rate": (_STATES, lambda: _between_relus(EqualisedLinear)),
    **{f"words all alike, {form}": (
        (_ALIKE, IDS[0]), partial(_attention_scaled, form, lambda: Embedding(50, 32)))
        for form in ("all width", "ALiBi")},
    **{f"attention scaled by {form}{'' if bias else ', no biases'}, example of {shown}": (
        (line, rand(2, 8, 32)), partial(_attention_scaled, form, lambda: Linear(32, 32), bias))
        for shown, line in _EXAMPLES.items() for form in ("all width", "ALiBi", "one head")
        for bias in (True, False)},
}, small=False)
add("must be refused", {"experts of 24 neurons": (
    _PROMPTS, partial(_decoder, "Olmoe", num_experts=8, num_experts_per_tok=2))},
    options={"axes": ("ffn",)}, small=False)
# fmt: on
