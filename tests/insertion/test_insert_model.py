"""insert_ with ordinary models: what becomes elastic, and what subnets compute."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_spaces import space_of
from torch import nn
from written_networks import Written, seeded

import subnetact
import subnetact.insertion
import subnetact.serving
from subnetact.errors import ExportError, InsertError
from subnetact.export import load_exported, to_onnx, to_torchscript
from subnetact.insertion.description import Description
from subnetact.insertion.description_proof import Proof
from subnetact.operators import ElasticAttribute, WeightSlice
from subnetact.supernet.module_outputs import outputs_of
from subnetact.supernet.statistics import batch_norms, is_calibrated

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")


models = torchvision.models
SHALLOW: dict[str, Callable[[], nn.Module]] = {
    "densenet": lambda: models.DenseNet(16, (2, 2), 32),
    "vit": lambda: models.VisionTransformer(64, 16, 2, 3, 192, 384),
}
"""Architectures of torchvision in a few layers."""


def make(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if name in SHALLOW:
        return SHALLOW[name]().eval()
    if name.startswith("timm:"):
        model: nn.Module = timm.create_model(name.removeprefix("timm:"), **options)
    else:
        model = torchvision.models.get_model(name, **options)
    return model.eval()


CHANNELS = {"depth", "width", "stream"}
QUICK = {
    "resnet18": (64, {}, CHANNELS),
    "mobilenet_v3_small": (64, {}, {"depth", "width", "stream", "ffn"}),
    "timm:convnext_atto": (64, {}, CHANNELS),
    "timm:vit_tiny_patch16_224": (64, {"img_size": 64, "depth": 2}, {"depth", "stream", "ffn", "heads"}),
}
SLOW = {
    "densenet": (64, {}, {"width", "stream"}),
    "vit": (64, {}, {"depth", "stream", "ffn", "heads"}),
    "timm:efficientnet_b0": (64, {}, CHANNELS),
    "timm:mixer_s32_224": (64, {"img_size": 64}, {"depth", "stream", "ffn"}),
}
"""Model -> image size, options, axes that are elastic."""
PACKED = ("densenet", "timm:vit_tiny_patch16_224")
"""Models with fused layers or concatenations, whose slices are copies in part."""


@pytest.mark.parametrize(
    ("name", "count"),
    [(name, 6) for name in QUICK] + [pytest.param(name, 8, marks=pytest.mark.slow) for name in SLOW],
)
def test_an_ordinary_model_becomes_a_supernet(name: str, count: int) -> None:
    size, options, axes = {**QUICK, **SLOW}[name]
    model = make(name, **options)
    keys = list(model.state_dict())
    x = torch.randn(2, 3, size, size)
    full = outputs_of(model, x)[0]
    supernet = subnetact.insert_(model, example=x)
    assert axes <= {axis.name for axis in supernet.space.axes}
    assert list(supernet.state_dict()) == keys
    storages = {p.untyped_storage().data_ptr() for p in supernet.parameters()}
    with torch.no_grad():
        assert (supernet(x) - full).abs().max() <= 1e-5 * full.abs().max()
        specs = supernet.space.sample(0, count)
        assert len(specs) == count
        for spec in specs:
            view, extracted = supernet.subnet(spec), supernet.extract(spec).requires_grad_(False)
            torch.testing.assert_close(view(x), extracted(x), rtol=5e-5, atol=5e-5)
            copies = [p for p in view.parameters() if p.untyped_storage().data_ptr() not in storages]
            assert all(getattr(p, "packed", None) is not None for p in copies)
            assert not copies or name in PACKED
    if batch_norms(supernet.network):
        assert is_calibrated(supernet, supernet.space.largest())
        assert not is_calibrated(supernet, supernet.space.smallest())
    smallest = supernet.extract(supernet.space.smallest())
    share = sum(p.numel() for p in smallest.parameters()) / sum(p.numel() for p in supernet.parameters())
    assert share <= 0.5


class Hidden(Written):
    """Two convolutions, of which the second reads `pick` of the first one's channels."""

    def __init__(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        layers = {"first": nn.Conv2d(3, 16, 3, padding=1), "second": nn.Conv2d(16, 8, 3, padding=1)}
        super().__init__(lambda m, x: m.head(m.second(pick(m.first(x))).mean((2, 3))), **layers, head=(8, 5))


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_axes_choices_only_and_fixed() -> None:
    model = make("resnet18")
    x = torch.randn(1, 3, 64, 64)
    found = subnetact.describe(model, x, axes=("width",), only="layer[34].*", proof=False)
    assert list(found.groups) == [f"layer{i}.{j}.conv1.width" for i in (3, 4) for j in (0, 1)]
    assert not found.stages
    chosen = {"width": (0.25, 1.0), "layer3.*": (0.5, 1.0), "layer4.1.conv1.width": (64, 512)}
    found = subnetact.describe(model, x, choices=chosen, fixed="layer4.0*", proof=False)
    assert "layer4.0.conv1.width" not in found.groups
    assert found.groups["layer3.0.conv1.width"].sizes == {0.5: 128, 1.0: 256}
    assert found.groups["layer2.0.conv1.width"].sizes == {0.25: 32, 1.0: 128}
    assert found.groups["layer4.1.conv1.width"].sizes == {64: 64, 512: 512}
    assert found.stages["layer1.depth"].sizes == {0.5: 1, 0.75: 1, 1.0: 2}
    each = subnetact.describe(model, x, axes=("depth",), choices=(0, 1), each_block=True, proof=False)
    assert [stage.blocks for stage in each.stages.values()][:2] == [("layer1.0",), ("layer1.1",)]


def dense() -> nn.Module:
    """Return a stem, two dense layers with bottlenecks, a ghost module, and a perceptron as its head."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.stem(x)
        for narrow, grow in zip(m.narrow, m.grow, strict=True):
            x = torch.cat([x, grow(narrow(x).relu())], 1)
        x = m.primary(x)
        x = torch.cat([x, m.cheap(x)], 1).mean((2, 3))
        return m.head(m.hidden(x).relu())  # type: ignore[no-any-return]

    narrow = nn.ModuleList([nn.Conv2d(16 + 8 * i, 32, 1) for i in range(2)])
    grow = nn.ModuleList([nn.Conv2d(32, 8, 3, padding=1) for _ in range(2)])
    ghost = {"primary": nn.Conv2d(32, 24, 1), "cheap": nn.Conv2d(24, 24, 3, padding=1, groups=24)}
    ends = {"stem": nn.Conv2d(3, 16, 1), "hidden": (48, 64), "head": (64, 3)}
    return Written(forward, narrow=narrow, grow=grow, **ghost, **ends).eval()


def axes_of(description: Description) -> dict[str, set[str]]:
    found = {axis.name: {slot.name for slot in axis.slots} for axis in description.space.axes}
    return {axis: {name.removesuffix(f".{axis}") for name in names} for axis, names in found.items()}


def test_channels_of_one_layer_and_of_several_are_axes_of_their_own() -> None:
    model = make("resnet18")
    hidden = {"layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1", "layer2.1.conv1"}
    shared = {"conv1", "layer2.0.conv2"}
    found = subnetact.describe(model, X, axes=("width", "stream"), only=["conv1", "layer[12].*"], proof=False)
    assert axes_of(found) == {"width": hidden, "stream": shared}
    channels = {"width": {"narrow.0", "narrow.1", "primary"}, "stream": {"stem", "grow.0", "grow.1"}}
    assert axes_of(subnetact.describe(dense(), X)) == {**channels, "ffn": {"hidden"}}


@pytest.mark.parametrize("axis", ["width", "stream"])
def test_one_kind_of_channels_alone_becomes_narrow(axis: str) -> None:
    model = make("resnet18")
    full = outputs_of(model, X)[0]
    supernet = subnetact.insert_(model, example=X, axes=(axis,))
    assert [a.name for a in supernet.space.axes] == [axis]
    assert torch.equal(outputs_of(supernet, X)[0], full)
    block = supernet.extract(supernet.space.smallest()).get_submodule("layer2.1")
    width, stream = (64, 128) if axis == "width" else (128, 64)
    assert (block.conv1.in_channels, block.conv1.out_channels) == (stream, width)
    assert (block.conv2.in_channels, block.conv2.out_channels) == (width, stream)


def partial_layer() -> nn.Module:
    """Return a layer for a quarter of the channels, and one that reads these and the rest."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.stem(x)
        first, rest = x.split((4, 12), 1)
        x = x + m.down(m.up(torch.cat([m.part(first), rest], 1)).relu())
        return m.head((torch.cat([m.left(x), m.right(x)], 1) * m.scales).mean((2, 3)))  # type: ignore[no-any-return]

    sizes = {"stem": (3, 16), "up": (16, 32), "down": (32, 16), "left": (16, 4), "right": (16, 4)}
    layers = {name: nn.Conv2d(*pair, 1) for name, pair in sizes.items()}
    scales, part = nn.Parameter(torch.ones(8, 1, 1)), nn.Conv2d(4, 4, 3, padding=1)
    return Written(forward, **layers, part=part, scales=scales, head=(8, 3)).eval()


def test_a_part_of_two_sizes_is_left_out_and_the_rest_is_elastic() -> None:
    model = partial_layer()
    full = outputs_of(model, X)[0]
    supernet = subnetact.insert_(model, example=X)
    assert torch.equal(outputs_of(supernet, X)[0], full)
    names = {slot.name for axis in supernet.space.axes for slot in axis.slots}
    assert {"up.width", "part.stream"} <= names
    assert not names & {"stem.stream", "left.stream", "right.stream"}
    refused = subnetact.describe(partial_layer(), X).refused
    assert "in parts that are not equal" in refused["stem"]
    assert "scales.0 consists of several segments" in refused["left"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axes": ("widths",)}, "choose from depth, width, stream, ffn, heads"),
        ({"axes": ()}, "axes: none is unknown; choose from depth, width, stream, ffn, heads"),
        ({"only": 4}, "only: 4 is neither a pattern of names of modules nor a list of them"),
        ({"fixed": None}, "fixed: None is neither a pattern"),
        ({"choices": 0.5}, "choices: 0.5 is neither a list nor a mapping"),
        ({"choices": {"width": None}}, "first.width: None are no choices"),
        ({"choices": {4: (0.5,)}}, "no group or stage matches 4"),
        ({"only": "nothing.*"}, "only: no module matches 'nothing.*'"),
        ({"fixed": ["first", "4"]}, "fixed: no module matches '4'"),
        ({"choices": {"width": (0.5, 2.0)}}, r"first.width: 2.0 is not a choice"),
        ({"choices": {"width": (32,)}}, r"first.width: 32 is not a choice"),
        ({"choices": {"third.width": (0.5,)}}, "no group or stage matches 'third.width'"),
        ({"choices": {"heads": (0.5,)}}, "no group or stage matches 'heads'"),
        ({"only": "head"}, "nothing in Hidden can be elastic; head: its outputs are inputs or outputs"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InsertError, match=message):
        subnetact.describe(Hidden(torch.relu).eval(), X, **options)


def test_an_example_that_hides_everything_behind_nan_is_refused() -> None:
    model = Hidden(torch.relu).eval()
    with pytest.raises(InsertError, match="returns nothing but NaN and infinity"):
        subnetact.describe(model, X * float("nan"))
    assert subnetact.describe(model, torch.stack([X[0], X[1] * float("nan")])).groups


def caching(m: Any, x: torch.Tensor) -> torch.Tensor:
    if "bias" not in m.cache:
        m.cache["bias"] = m.shift * 2
    return m.head(m.second(m.first(x) + m.cache["bias"]).mean((2, 3)))  # type: ignore[no-any-return]


def remembering(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.cache["mean"] = 0.5 * m.cache.get("mean", 0.0) + x.mean()
    return caching(m, x) + m.cache["mean"]


def keeping(compute: Callable[..., Any]) -> Any:
    """Return a network with a dictionary for what it computes."""
    layers = {"first": nn.Conv2d(3, 16, 3, padding=1), "second": nn.Conv2d(16, 8, 3, padding=1)}
    more: dict[str, Any] = {
        "shift": nn.Parameter(torch.ones(16, 1, 1)),
        "cache": {},
        "tables": {"a": torch.ones(1)},
    }
    return seeded(compute, **layers, head=(8, 5), **more)


def plain() -> Any:
    return Hidden(torch.relu).eval()


def changed(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """Return a maker of a model to which something was done."""

    def made() -> nn.Module:
        model = plain()
        change(model)
        return model  # type: ignore[no-any-return]

    return made


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "training": (lambda: plain().train(), r"call model.eval\(\) first"),
    "hooks": (changed(lambda m: m.first.register_forward_hook(print)), "Hidden.first has hooks"),
    "backward hooks": (
        changed(lambda m: m.first.register_full_backward_pre_hook(print)),
        "Hidden.first has hooks",
    ),
    "partly training": (
        changed(lambda m: m.second.train()),
        r"Hidden.second is in training mode; call model.eval\(\) first",
    ),
    "tables": (
        lambda: keeping(lambda m, x: m.first(x) + m.tables["a"]),
        "in 'tables', .* register them as buffers",
    ),
    "remembering": (lambda: keeping(remembering), "keeps tensors between calls, in 'cache', and answers"),
    "branching": (lambda: Hidden(lambda t: t if t.sum() > 0 else -t).eval(), "cannot be traced"),
    "another input": (lambda: nn.Linear(4, 2).eval(), "^Linear does not run on a .* tensor of .*: Linear: "),
    "random": (lambda: Hidden(lambda t: F.dropout(t)).eval(), "output differs from run to run"),
    "no tensors": (
        lambda: seeded(lambda m, x: SimpleNamespace(best=m.first(x).argmax(1)), first=nn.Conv2d(3, 16, 3)),
        "returns no floating-point tensors",
    ),
}
REFUSED_BY_HAND: dict[str, tuple[Callable[[], Any], str]] = {
    "compiled in place": (
        changed(lambda m: m.second.compile(backend="eager")),
        "Hidden.second is compiled in place",
    ),
    "lazy": (lambda: nn.LazyConv2d(4, 3).eval(), "LazyConv2d has no weights yet; run the model once"),
    "parametrised": (changed(lambda m: nn.utils.parametrizations.weight_norm(m.second)), "fold_"),
    "pruned": (changed(lambda m: nn.utils.prune.l1_unstructured(m.second, "weight", 0.5)), "fold_"),
    "bound": (changed(lambda m: setattr(m, "run", m.forward)), "'run' holds a method bound"),
    "inserted": (lambda: subnetact.insert_(plain(), example=X).network, "already has operators"),
    "quantised": (lambda: torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear}), "is quantised"),
    "parallel": (lambda: nn.DataParallel(plain()).eval(), r"give the model inside, .module"),
    "compiled": (lambda: torch.compile(plain()), r"give the model inside, ._orig_mod"),
    "scripted": (lambda: torch.jit.trace(plain(), X), "scripted module"),
    "no model": (lambda: torch.relu, "expected a model"),
}
"""Models that are refused with an example, and those that are refused without one, too."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED | REFUSED_BY_HAND)
def test_models_that_are_refused_stay_as_they_are(case: str) -> None:
    factory, message = (REFUSED | REFUSED_BY_HAND)[case]
    model = factory()
    before = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    with pytest.raises(InsertError, match=message):
        subnetact.insert_(model, example=X)
    if before:
        assert dict(model.named_modules()) == before
    if case in REFUSED_BY_HAND:
        elastic = {"second": WeightSlice.on(out="c")} if case in ("parametrised", "pruned") else {}
        with pytest.raises(InsertError, match=message):
            subnetact.insert_(factory(), space_of(c=[2, 8]), elastic)


def test_what_a_forward_keeps_for_later_calls_is_computed_anew_by_every_view() -> None:
    model = keeping(caching)
    supernet = subnetact.insert_(model, example=X)
    assert set(supernet.description.groups) == {"first.stream", "second.width"}
    small, large = (supernet.subnet(s) for s in (supernet.space.smallest(), supernet.space.largest()))
    with torch.no_grad():
        small(X), large(X)
        model.shift.mul_(-3.0)
        torch.testing.assert_close(small(X), supernet.extract(supernet.space.smallest())(X))
        torch.testing.assert_close(large(X), caching(copy.copy(model), X), rtol=5e-5, atol=5e-5)


@pytest.mark.filterwarnings("ignore")  # torch advises against the old functions
@pytest.mark.parametrize(
    "norm",
    [
        *(nn.utils.weight_norm, nn.utils.spectral_norm),
        *(nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm),
        lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.3),
    ],
)
def test_norms_of_weights_are_made_permanent_on_request(norm: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    model = plain()
    for layer in (model.first, model.second):
        norm(layer)
    expected, state = outputs_of(model, X)[0], list(model.state_dict())
    with pytest.raises(InsertError, match=r"Hidden.first computes its weight .* subnetact.insertion.fold_"):
        subnetact.insert_(model, example=X)
    with pytest.raises(InsertError, match=r"Hidden.first is in training mode"):
        subnetact.insertion.fold_(model.train())
    assert list(model.eval().state_dict()) == state
    assert subnetact.insertion.fold_(model) == ("first.weight", "second.weight")
    assert subnetact.insertion.fold_(model) == ()
    assert set(model.state_dict()) == set(plain().state_dict())
    assert type(model.first) is nn.Conv2d
    supernet = subnetact.insert_(model, example=X)
    torch.testing.assert_close(outputs_of(supernet, X)[0], expected, rtol=5e-5, atol=5e-5)
    assert set(supernet.description.groups) == {"first.width", "second.width"}


def test_the_proof_sees_through_scales_that_begin_at_zero() -> None:
    class Residual(Hidden):
        def __init__(self) -> None:
            super().__init__(lambda t: t.flip(1))
            self.norm = nn.BatchNorm2d(8)
            self.stem = nn.Conv2d(3, 8, 1)
            nn.init.zeros_(self.norm.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.second(self.first(x).flip(1)))
            return self.head((self.stem(x) + y).mean((2, 3)))

    torch.manual_seed(0)
    good = subnetact.describe(Hidden(torch.relu).eval(), X, only="first")
    model = Residual().eval()
    _, culprits = Proof(model, good, [(X, outputs_of(model, X))]).failure() or ("", {})
    assert list(culprits) == ["first.width"]


def snapshot(model: nn.Module) -> list[tuple[str, nn.Module, dict[str, Any]]]:
    return [
        (path, module, {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()})
        for path, module in model.named_modules()
    ]


def same_objects(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(one[key] is other[key] for key in one)
    return one is other


@pytest.mark.parametrize("name", ["resnet18", "timm:vit_tiny_patch16_224"])
def test_remove_gives_the_same_modules_back(name: str) -> None:
    model = make(name, **({} if name == "resnet18" else {"img_size": 64, "depth": 2}))
    x = torch.randn(1, 3, 64, 64)
    full = outputs_of(model, x)[0]
    before = snapshot(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    supernet = subnetact.insert_(model, example=x)
    view = supernet.subnet(supernet.space.smallest())
    answer = view(x)
    assert supernet.remove() is model
    after = snapshot(model)
    assert [path for path, _, _ in after] == [path for path, _, _ in before]
    for (path, module, attributes), (_, same, others) in zip(before, after, strict=True):
        assert module is same, path
        assert attributes.keys() == others.keys(), path
        assert not [key for key in attributes if not same_objects(attributes[key], others[key])], path
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(outputs_of(model, x)[0], full)
    assert torch.equal(view(x), answer)
    with pytest.raises(InsertError, match="were removed"):
        supernet(x)
    assert subnetact.insert_(model, example=x).space.id == supernet.space.id


@pytest.mark.parametrize("error", [MemoryError("none left"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_lack_of_memory_is_no_answer(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    description = subnetact.describe(Hidden(torch.relu).eval(), X)
    calls: list[int] = []
    forward = Hidden.forward

    def failing(self: Any, x: Any) -> Any:
        calls.append(0)
        if len(calls) == fatal[0]:
            raise error
        return forward(self, x)

    monkeypatch.setattr(Hidden, "forward", failing)
    fatal = [0]
    subnetact.insert_(Hidden(torch.relu).eval(), description, example=X)
    for fatal[0] in range(1, len(calls) + 1):
        calls.clear()
        model = Hidden(torch.relu).eval()
        with pytest.raises(type(error)):
            subnetact.insert_(model, description, example=X)
        assert type(model.first) is nn.Conv2d


def branches() -> nn.Module:
    """Return a concatenation, a transposed convolution, GroupNorm, PReLU, and an output in a dictionary."""

    def forward(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        fine = m.fine(x)
        return {"mask": m.last(torch.cat([fine, m.up(m.coarse(fine))], 1))}

    fine = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.PReLU(16))
    coarse = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    ends = {"up": nn.ConvTranspose2d(32, 16, 2, stride=2), "last": nn.Conv2d(32, 2, 1)}
    return seeded(forward, fine=fine, coarse=coarse, **ends)


def reshaped(divided: str) -> nn.Module:
    """Return two reshapes that read the same number, and a division by another number of the same value."""

    def inner(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.first(x).reshape(2, m.channels, 64).relu() / (m.tokens if divided == "inside" else 1)
        return m.head(y.reshape(2, m.channels, 8, 8).mean((2, 3)))  # type: ignore[no-any-return]

    network = Written(inner, first=nn.Conv2d(3, 16, 1), head=(16, 3), channels=16, tokens=16).eval()
    if divided == "inside":
        return network
    return Written(lambda m, x: m.inner(x) / m.tokens, inner=network, tokens=16).eval()


@pytest.mark.parametrize("divided", ["inside", "outside"])
def test_numbers_of_the_same_value_are_told_apart(divided: str) -> None:
    model = reshaped(divided)
    before = dict(vars(model))
    (group,) = subnetact.describe(model, X).groups.values()
    assert [m.part for m in group.members if m.operator is ElasticAttribute] == ["channels"]
    assert vars(model) == before
    assert type(model.tokens) is int


def test_a_concatenation_and_layers_of_every_kind_are_elastic_and_an_output_in_a_dictionary_stays() -> None:
    network = branches()
    expected = outputs_of(network, X)[0]
    supernet = subnetact.insert_(network, example=X)
    description: Any = supernet.description
    sizes = {name: group.full for name, group in description.groups.items()}
    assert sizes == {"fine.0.stream": 16, "coarse.0.width": 32, "up.stream": 16}
    assert torch.equal(outputs_of(supernet, X)[0], expected)


def channel_norm(kind: str, dims: int, channels: int) -> nn.Module:
    """Return a norm that treats every channel by itself, with random numbers in all of its tensors."""
    if kind == "frozen":
        norm: nn.Module = torchvision.ops.FrozenBatchNorm2d(channels)
    else:
        options = {"affine": "affine" in kind, "track_running_stats": "statistics" in kind}
        norm = getattr(nn, f"InstanceNorm{dims}d")(channels, **options)
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    return norm


@pytest.mark.parametrize(
    ("kind", "dims"),
    [("plain", 1), ("affine", 2), ("affine", 3), ("statistics", 2), ("affine statistics", 2), ("frozen", 2)],
)
def test_a_norm_of_each_channel_is_narrow_as_in_a_pruned_network(kind: str, dims: int) -> None:
    torch.manual_seed(0)
    conv = getattr(nn, f"Conv{dims}d")

    def network(channels: int) -> nn.Module:
        hidden = conv(3, channels, 3), channel_norm(kind, dims, channels), nn.ReLU(), conv(channels, 4, 1)
        return nn.Sequential(*hidden, nn.Flatten()).eval()

    model, pruned = network(16), network(8)
    x = torch.randn(2, 3, *(5,) * dims)
    before = model.state_dict()
    numbers = torch.arange(16).float()

    def prune(order: torch.Tensor) -> torch.Tensor:
        for name, tensor in pruned.state_dict().items():
            full = before[name].index_select(1, order) if name == "3.weight" else before[name]
            tensor.copy_(full if full.shape == tensor.shape or name == "3.weight" else full[order])
        return outputs_of(pruned, x)[0]

    first, last = prune(torch.arange(8)), prune(torch.arange(15, 7, -1))
    supernet = subnetact.insert_(model, example=x)
    small = supernet.space.smallest()
    assert supernet.space.resolve(small)[0] == 8
    for network_of_eight in (supernet.subnet(small), supernet.extract(small)):
        torch.testing.assert_close(outputs_of(network_of_eight, x)[0], first, rtol=5e-5, atol=5e-5)
    assert supernet.check(x).ran
    assert subnetact.reorder_(supernet, lambda _: numbers, x).reordered == {"0.out": 16}
    torch.testing.assert_close(outputs_of(supernet.subnet(small), x)[0], last, rtol=5e-5, atol=5e-5)


def levels(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return two levels of features, behind norms that are frozen: the backbone of a detector."""
    x = m.fine(m.norm(m.first(x)).relu()).relu()
    return {"fine": x, "coarse": m.coarse(x).relu()}


def test_a_detector_is_inserted_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    detection = torchvision.models.detection
    best = lambda boxes, scores, *_: scores.argsort(descending=True)  # noqa: E731
    monkeypatch.setattr(torchvision.ops.boxes, "batched_nms", best)  # its operator is missing here
    layers = {"first": nn.Conv2d(3, 16, 3, 4, 1), "norm": channel_norm("frozen", 2, 16)}
    layers |= {"fine": nn.Conv2d(16, 16, 1), "coarse": nn.Conv2d(16, 16, 3, 2, 1)}
    backbone = seeded(levels, **layers, out_channels=[16, 16])
    anchors = detection.anchor_utils.DefaultBoxGenerator([[2], [2]])
    options = {"score_thresh": 0.0, "topk_candidates": 10, "detections_per_img": 5}
    model = detection.ssd.SSD(backbone, anchors, (32, 32), 3, **options).eval()
    images = [torch.rand(3, 32, 24)]
    zeroed = copy.deepcopy(model)
    supernet = subnetact.insert_(model, example=(images,))
    groups = {"backbone.first.width", "backbone.fine.width", "backbone.coarse.width"}
    assert set(supernet.description.groups) == groups
    with torch.no_grad():
        for name in ("first", "fine", "coarse"):
            layer = zeroed.backbone.get_submodule(name)
            layer.weight[8:], layer.bias[8:] = 0, 0
        zeroed.backbone.norm.weight[8:], zeroed.backbone.norm.bias[8:] = 0, 0
        small = supernet.extract(supernet.space.smallest())
        assert small.backbone.norm.running_var.shape == (8,)
        features = [network.backbone(images[0][None]) for network in (small, zeroed)]
        for ours, theirs in zip(*(network.values() for network in features), strict=True):
            torch.testing.assert_close(ours, theirs[:, :8], rtol=5e-5, atol=5e-5)
        heads = small.head(list(features[0].values())), zeroed.head(list(features[1].values()))
        torch.testing.assert_close(*heads, rtol=5e-5, atol=5e-5)
        found, expected = supernet(images, subnet=supernet.space.smallest()), zeroed(images)
    assert [len(boxes["boxes"]) for boxes in found] == [5]
    torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5)


def chaotic(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Multiply rounding errors by a million."""
    y = torch.sigmoid(m.second(F.relu(m.first(x))))
    for _ in range(20):
        y = 3.9 * y * (1 - y)
    return m.head(y)  # type: ignore[no-any-return]


def test_rounding_is_not_taken_for_a_mistake() -> None:
    model = seeded(chaotic, first=(16, 256), second=(256, 16), head=(16, 3))
    assert list(subnetact.describe(model, torch.randn(4, 16)).groups) == ["first.ffn", "second.ffn"]


def test_a_model_that_cannot_be_copied_as_a_whole_becomes_elastic() -> None:
    model: Any = Hidden(torch.relu).eval()
    model.lock = threading.Lock()  # copy.deepcopy refuses locks
    supernet = subnetact.insert_(model, example=X)
    assert supernet.network is model
    assert list(supernet.space.dimensions) == ["first.width", "second.width"]


def test_a_transformer_encoder_of_torch_is_exported_in_the_way_that_the_refusal_names(tmp_path: Path) -> None:
    x = torch.randn(2, 6, 32)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    network = nn.Sequential(layers, nn.Linear(32, 5)).eval()
    supernet = subnetact.insert_(network, example=x)
    engine = subnetact.Engine(supernet, supernet.space.sample(0, 1), example=x[:1])
    with pytest.raises(ExportError, match=r"use subnetact\.export\.to_onnx or to_pt2"):
        to_torchscript(engine, tmp_path / "model.pt", progress=False)
    to_onnx(engine, tmp_path / "programs", progress=False)
    expected = supernet.extract(engine.specs[0])(x)
    programs = load_exported(tmp_path / "programs", trusted=True)
    torch.testing.assert_close(programs(x, subnet=0), expected, rtol=0, atol=5e-5)
