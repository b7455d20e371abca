"""insert_ with ordinary models: what becomes elastic, and what subnets compute."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import subnetact
import subnetact.insertion
from subnetact.errors import InsertError
from subnetact.insertion.analysis import TracedModel
from subnetact.insertion.description import Description, Group, Member
from subnetact.insertion.description_proof import Proof
from subnetact.operators import ElasticAttribute, WeightSlice
from subnetact.spec import SubnetSpec
from subnetact.supernet.module_outputs import outputs_of

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")


models = torchvision.models
SHALLOW: dict[str, Callable[[], nn.Module]] = {
    "densenet": lambda: models.DenseNet(16, (2, 2), 32),
    "resnext": lambda: models.ResNet(models.resnet.Bottleneck, [1, 2, 1, 1], groups=32, width_per_group=4),
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
    **dict.fromkeys(("resnext", "mobilenet_v2", "regnet_y_400mf"), (64, {}, CHANNELS)),
    "densenet": (64, {}, {"width", "stream"}),
    "vit": (64, {}, {"depth", "stream", "ffn", "heads"}),
    "timm:resnet26d": (64, {}, CHANNELS),
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
    smallest = supernet.extract(supernet.space.smallest())
    share = sum(p.numel() for p in smallest.parameters()) / sum(p.numel() for p in supernet.parameters())
    assert share <= 0.5


class Hidden(nn.Module):
    """Two convolutions, of which the second reads `pick` of the first one's channels."""

    def __init__(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)
        self.pick = pick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.pick(self.first(x))).mean((2, 3)))


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_a_plain_network_is_elastic_in_all_hidden_widths() -> None:
    description = subnetact.describe(Hidden(torch.relu).eval(), X)
    assert {name: group.full for name, group in description.groups.items()} == {
        "first.width": 16,
        "second.width": 8,
    }
    assert list(description.refused) == ["head"]


@pytest.mark.parametrize(
    "pick",
    [
        lambda t: t.flip(1),
        lambda t: torch.sort(t, 1).values,
        lambda t: t.softmax(1),
        lambda t: t / t.std(1, keepdim=True),
    ],
    ids=["flipped", "sorted", "softmax", "normalised"],
)
def test_widths_that_a_prefix_does_not_describe_are_refused(pick: Any) -> None:
    description = subnetact.describe(Hidden(pick).eval(), X)
    assert list(description.groups) == ["second.width"]
    assert set(description.refused) & {"first", "first.width"}


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


class Dense(nn.Module):
    """A stem, two dense layers with bottlenecks, a ghost module, and a perceptron as its head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.narrow = nn.ModuleList([nn.Conv2d(16 + 8 * i, 32, 1) for i in range(2)])
        self.grow = nn.ModuleList([nn.Conv2d(32, 8, 3, padding=1) for _ in range(2)])
        self.primary, self.cheap = nn.Conv2d(32, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.hidden, self.head = nn.Linear(48, 64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for narrow, grow in zip(self.narrow, self.grow, strict=True):
            x = torch.cat([x, grow(narrow(x).relu())], 1)
        x = self.primary(x)
        x = torch.cat([x, self.cheap(x)], 1).mean((2, 3))
        return self.head(self.hidden(x).relu())


def axes_of(description: Description) -> dict[str, set[str]]:
    found = {axis.name: {slot.name for slot in axis.slots} for axis in description.space.axes}
    return {axis: {name.removesuffix(f".{axis}") for name in names} for axis, names in found.items()}


def test_channels_of_one_layer_and_of_several_are_axes_of_their_own() -> None:
    model = make("resnet18")
    hidden = {"layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1", "layer2.1.conv1"}
    shared = {"conv1", "layer2.0.conv2"}
    found = subnetact.describe(model, X, axes=("width", "stream"), only=["conv1", "layer[12].*"], proof=False)
    assert axes_of(found) == {"width": hidden, "stream": shared}
    dense = {"width": {"narrow.0", "narrow.1", "primary"}, "stream": {"stem", "grow.0", "grow.1"}}
    assert axes_of(subnetact.describe(Dense().eval(), X)) == {**dense, "ffn": {"hidden"}}


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


class Partial(nn.Module):
    """A layer for a quarter of the channels, whose next layer reads these and the rest, and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.part = nn.Conv2d(3, 16, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.down = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)
        self.scales = nn.Parameter(torch.ones(8, 1, 1))
        self.left, self.right, self.head = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        first, rest = x.split((4, 12), 1)
        x = x + self.down(self.up(torch.cat([self.part(first), rest], 1)).relu())
        x = torch.cat([self.left(x), self.right(x)], 1) * self.scales
        return self.head(x.mean((2, 3)))


def test_a_part_of_two_sizes_is_left_out_and_the_rest_is_elastic() -> None:
    model = Partial().eval()
    full = outputs_of(model, X)[0]
    supernet = subnetact.insert_(model, example=X)
    assert torch.equal(outputs_of(supernet, X)[0], full)
    names = {slot.name for axis in supernet.space.axes for slot in axis.slots}
    assert {"up.width", "part.stream"} <= names
    assert not names & {"stem.stream", "left.stream", "right.stream"}
    refused = subnetact.describe(Partial().eval(), X).refused
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


class WithoutTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)

    def forward(self, x: torch.Tensor) -> object:
        return SimpleNamespace(best=self.first(x).argmax(1))


class Counting(Hidden):
    def __init__(self) -> None:
        super().__init__(torch.relu)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 99 else 2)


class Caching(Hidden):
    def __init__(self) -> None:
        super().__init__(torch.relu)
        self.bias, self.cache = nn.Parameter(torch.ones(16, 1, 1)), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "bias" not in self.cache:
            self.cache["bias"] = self.bias * 2
        return self.head(self.second(self.first(x) + self.cache["bias"]).mean((2, 3)))


class Remembering(Caching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache["mean"] = 0.5 * self.cache.get("mean", 0.0) + x.mean()
        return super().forward(x) + self.cache["mean"]


class Tables(Hidden):
    def __init__(self) -> None:
        super().__init__(torch.relu)
        self.tables = {"shift": torch.ones(1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.tables["shift"]


def branching(t: torch.Tensor) -> torch.Tensor:
    return t if t.sum() > 0 else -t


def refused_models() -> dict[str, tuple[Callable[[], Any], str]]:
    def plain() -> Hidden:
        return Hidden(torch.relu).eval()

    def hooked() -> nn.Module:
        model = plain()
        model.first.register_forward_hook(lambda *_: None)
        return model

    def parametrised() -> nn.Module:
        model = plain()
        nn.utils.parametrizations.weight_norm(model.second)
        return model

    def hooked_backward() -> nn.Module:
        model = plain()
        model.first.register_full_backward_pre_hook(lambda *_: None)
        return model

    def compiled_in_place() -> nn.Module:
        model = plain()
        model.second.compile(backend="eager")
        return model

    def partly_training() -> nn.Module:
        model = plain()
        model.second.train()
        return model

    def inserted() -> nn.Module:
        return subnetact.insert_(plain(), example=X).network

    def quantised() -> nn.Module:
        return torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear})

    return {
        "training": (lambda: plain().train(), r"call model.eval\(\) first"),
        "hooks": (hooked, "Hidden.first has hooks"),
        "backward hooks": (hooked_backward, "Hidden.first has hooks"),
        "compiled in place": (compiled_in_place, "Hidden.second is compiled in place"),
        "partly training": (partly_training, r"Hidden.second is in training mode; call model.eval\(\) first"),
        "lazy": (lambda: nn.LazyConv2d(4, 3).eval(), "LazyConv2d has no weights yet; run the model once"),
        "tables": (lambda: Tables().eval(), "in 'tables', .* register them as buffers"),
        "remembering": (lambda: Remembering().eval(), "keeps tensors between calls, in 'cache', and answers"),
        "counting": (lambda: Counting().eval(), "its forward changes attributes of the model"),
        "parametrised": (
            parametrised,
            r"Hidden.second computes its weight .* with subnetact.insertion.fold_",
        ),
        "inserted": (inserted, "already has operators"),
        "quantised": (quantised, "is quantised"),
        "parallel": (lambda: nn.DataParallel(plain()).eval(), r"give the model inside, .module"),
        "compiled": (lambda: torch.compile(plain()), r"give the model inside, ._orig_mod"),
        "scripted": (lambda: torch.jit.trace(plain(), X), "scripted module"),
        "branching": (lambda: Hidden(branching).eval(), "cannot be traced"),
        "another input": (lambda: nn.Linear(4, 2).eval(), "does not run on the example"),
        "random": (lambda: Hidden(lambda t: F.dropout(t)).eval(), "output differs from run to run"),
        "no tensors": (lambda: WithoutTensors().eval(), "returns no floating-point tensors"),
        "no model": (lambda: torch.relu, "expected a model"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", refused_models())
def test_models_that_are_refused_stay_as_they_are(case: str) -> None:
    factory, message = refused_models()[case]
    model = factory()
    before = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    with pytest.raises(InsertError, match=message):
        subnetact.insert_(model, example=X)
    if before:
        assert dict(model.named_modules()) == before


def test_what_a_forward_keeps_for_later_calls_is_computed_anew_by_every_view() -> None:
    torch.manual_seed(0)
    model = Caching().eval()
    supernet = subnetact.insert_(model, example=X)
    assert set(supernet.description.groups) == {"first.stream", "second.width"}
    views = [supernet.subnet(spec) for spec in (supernet.space.largest(), supernet.space.smallest())]
    with torch.no_grad():
        for view in views:
            view(X)
        model.bias.mul_(-3.0)
        weights = {name: p[: len(p) // 2] for name, p in model.named_parameters() if "head" not in name}
        plain = F.conv2d(X, weights["first.weight"], weights["first.bias"], padding=1) + 2 * weights["bias"]
        columns = weights["second.weight"][:, : plain.shape[1]]
        second = F.conv2d(plain, columns, weights["second.bias"], padding=1).mean((2, 3))
        expected = F.linear(second, model.head.weight[:, : second.shape[1]], model.head.bias)
        torch.testing.assert_close(views[1](X), expected, rtol=5e-5, atol=5e-5)
        torch.testing.assert_close(views[0](X), supernet.extract(supernet.space.largest())(X))


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
    model = Hidden(torch.relu).eval()
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
    assert set(model.state_dict()) == set(Hidden(torch.relu).state_dict())
    assert type(model.first) is nn.Conv2d
    supernet = subnetact.insert_(model, example=X)
    torch.testing.assert_close(outputs_of(supernet, X)[0], expected, rtol=5e-5, atol=5e-5)
    assert set(supernet.description.groups) == {"first.width", "second.width"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case",
    ["compiled in place", "lazy", "inserted", "quantised", "parallel", "compiled", "scripted", "no model"],
)
def test_a_description_by_hand_does_not_change_which_models_are_refused(case: str) -> None:
    factory, message = refused_models()[case]
    space = subnetact.SubnetSpace(
        "s", [subnetact.Axis.uniform("c", ["all"], [1])], lambda v: {"c": v["c"][0]}
    )
    with pytest.raises(InsertError, match=message):
        subnetact.insert_(factory(), space, {})


def test_a_wrong_description_is_refused_with_its_name_and_the_model_is_untouched() -> None:
    model = Hidden(torch.relu).eval()
    modules = dict(model.named_modules())
    description = subnetact.describe(model, X)
    group = description.groups["first.width"]
    wrong = subnetact.insertion.Description(
        "wrong", [group.__class__(group.name, "width", 16, group.members[:1], sizes=group.sizes)]
    )
    with pytest.raises(InsertError, match=r"first\.width: a subnet does not run"):
        subnetact.insert_(model, wrong, example=X)
    flipped = Hidden(lambda t: t.flip(1)).eval()
    with pytest.raises(
        InsertError, match=r"first\.width: a subnet differs from the model with unused weights"
    ):
        subnetact.insert_(flipped, description, example=X)
    assert dict(model.named_modules()) == modules


def test_the_proof_sees_through_scales_that_begin_at_zero() -> None:
    class Residual(Hidden):
        def __init__(self) -> None:
            super().__init__(lambda t: t.flip(1))
            self.norm = nn.BatchNorm2d(8)
            self.stem = nn.Conv2d(3, 8, 1)
            nn.init.zeros_(self.norm.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.second(self.pick(self.first(x))))
            return self.head((self.stem(x) + y).mean((2, 3)))

    torch.manual_seed(0)
    good = subnetact.describe(Hidden(torch.relu).eval(), X, only="first")
    model = Residual().eval()
    _, culprits = Proof(model, good, [(X, outputs_of(model, X))]).failure() or ("", {})
    assert list(culprits) == ["first.width"]


def test_the_largest_subnet_keeps_the_statistics_of_the_model() -> None:
    supernet = subnetact.insert_(make("resnet18"), example=torch.randn(1, 3, 64, 64))
    assert supernet.calibrated(supernet.space.largest())
    assert not supernet.calibrated(supernet.space.smallest())


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


def test_remove_keeps_what_was_trained() -> None:
    model = Hidden(torch.relu).eval()
    supernet = subnetact.insert_(model, example=X).train()
    supernet.double()
    supernet(X.double(), subnet=supernet.space.smallest()).sum().backward()
    with torch.no_grad():
        for parameter in supernet.parameters():
            parameter.sub_(parameter.grad)
    expected = supernet.eval()(X.double())
    supernet.train()
    plain = supernet.remove()
    assert all(module.training for module in plain.modules())
    assert torch.equal(plain.eval()(X.double()), expected)


def test_tied_weights_are_narrowed_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)
            self.three.weight = self.one.weight
            self.hidden, self.out = nn.Linear(16, 12), nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.hidden(self.three(self.two(self.one(x)).relu()).relu()).relu())

    description = subnetact.describe(Tied().eval(), torch.randn(2, 8))
    assert [group.full for group in description.groups.values()] == [16, 12]
    members = {(member.module, member.part) for member in next(iter(description.groups.values())).members}
    assert members == {("one", "out"), ("two", "in_"), ("three", "out"), ("hidden", "in_")}


def test_an_output_of_zeros_hides_nothing() -> None:
    model = Hidden(torch.relu).eval()
    description = subnetact.describe(model, X)
    broken = Hidden(lambda t: t.flip(1)).eval()
    for network in (model, broken):
        nn.init.zeros_(network.head.weight)
        nn.init.zeros_(network.head.bias)
    subnetact.insert_(model, description, example=X)
    with pytest.raises(InsertError, match=r"first\.width: a subnet differs"):
        subnetact.insert_(broken, description, example=X)


@pytest.mark.parametrize("part", range(3))
def test_wrong_rows_of_queries_keys_or_values_are_noticed(part: int) -> None:
    """Queries and keys hardly matter to the output of a network with small weights."""
    model = make("timm:vit_tiny_patch16_224", img_size=64, depth=1)
    x = torch.randn(1, 3, 64, 64)
    description = subnetact.describe(model, x, axes=("heads",))
    (group,) = description.groups.values()
    members = list(group.members)
    segment = next(i for i, m in enumerate(members) if m.start == part * 192)
    members[segment : segment + 1] = [
        replace(members[segment], multiple=32, start=part * 192),
        replace(members[segment], multiple=32, start=part * 192 + 96),
    ]
    wrong = subnetact.insertion.Description("wrong", [replace(group, members=tuple(members))])
    with pytest.raises(InsertError, match="differs from the model with unused weights"):
        subnetact.insert_(model, wrong, example=x)


def test_handwritten_descriptions_are_checked_on_an_example() -> None:
    found = subnetact.describe(Hidden(torch.relu).eval(), X)
    model = Hidden(lambda t: t.flip(1)).eval()
    modules = dict(model.named_modules())
    with pytest.raises(InsertError, match="differs from the original network"):
        subnetact.insert_(model, found.space, found.elastic, example=X)
    assert dict(model.named_modules()) == modules
    supernet = subnetact.insert_(model, example=X, elastic={"second": None, "head": None})
    assert "second" in supernet.report.fixed


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


def test_what_is_found_and_proven_does_not_depend_on_the_speed_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[SubnetSpec] = []
    wrong = Proof._wrong

    def noting(self: Proof, spec: SubnetSpec, located: bool = True) -> str | None:
        tried.append(spec)
        return wrong(self, spec, located)

    monkeypatch.setattr(Proof, "_wrong", noting)
    model = Hidden(lambda t: t.flip(1)).eval()
    expected = subnetact.describe(model, X)
    subnets = list(tried)
    tried.clear()
    seconds = itertools.count(0, 1000)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    assert str(subnetact.describe(model, X)) == str(expected)
    assert tried == subnets


def test_groups_that_are_wrong_are_told_apart_for_a_number_of_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Hidden(torch.relu).eval()
    description = subnetact.describe(model, X)
    proof = Proof(model, description, [(X, outputs_of(model, X))])
    monkeypatch.setattr(Proof, "_wrong", lambda *_, **__: "wrong")
    monkeypatch.setattr("subnetact.insertion.description_proof.MOST_TRIALS", 0)
    _, culprits = proof.failure() or ("", {})
    assert culprits.keys() == description.slots.keys()


class Gated(nn.Module):
    """The two halves of one convolution are multiplied; a scale belongs to the network itself."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.second = nn.Conv2d(3, 32, 1), nn.Conv2d(16, 16, 1)
        self.scale = nn.Parameter(torch.ones(16, 1, 1))
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.both(x).chunk(2, 1)
        y = self.second(one * other.sigmoid()) * self.scale
        return self.head(F.adaptive_avg_pool2d(y, 4).flatten(1))


class Branches(nn.Module):
    """A concatenation, a transposed convolution, GroupNorm, PReLU, and an output in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.PReLU(16))
        self.coarse = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        fine = self.fine(x)
        return {"mask": self.last(torch.cat([fine, self.up(self.coarse(fine))], 1))}


class Shuffled(nn.Module):
    """Half of the channels of the first layer go to other places, so that no prefix of them can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 8, 1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = y.reshape(2, 4, 4, 8, 8).transpose(1, 2).reshape(2, 16, 8, 8)
        return self.head(self.second(y).relu().mean((2, 3)))


class Reshaped(nn.Module):
    """Two reshapes read the same number."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = 16
        self.first, self.head = nn.Conv2d(3, 16, 1), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).reshape(2, self.channels, 64).relu()
        return self.head(y.reshape(2, self.channels, 8, 8).mean((2, 3)))


class Divided(Reshaped):
    """Divides by a number that equals the number of channels and has nothing to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.tokens


class Both(Reshaped):
    """Reads another number of the same value in the module that reshapes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).reshape(2, self.channels, 64).relu() / self.tokens
        return self.head(y.reshape(2, self.channels, 8, 8).mean((2, 3)))


@pytest.mark.parametrize("kind", [Divided, Both])
def test_numbers_of_the_same_value_are_told_apart(kind: type[nn.Module]) -> None:
    model = kind().eval()
    before = dict(vars(model))
    description = subnetact.describe(model, X)
    (group,) = description.groups.values()
    assert [m.part for m in group.members if m.operator is ElasticAttribute] == ["channels"]
    assert vars(model) == before
    assert type(model.channels) is int


class ResponseNorm(nn.Module):
    """Scales channels by how their norms compare with each other, and adds its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.rand(channels)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = x.norm(p=2, dim=(2, 3), keepdim=True)
        scale, shift = self.scale.view(1, -1, 1, 1), self.shift.view(1, -1, 1, 1)
        return x + torch.addcmul(shift, scale, x * norm / norm.mean(1, keepdim=True))


class Shortcut(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def test_a_norm_that_compares_channels_keeps_them_and_is_a_part_of_its_block() -> None:
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Conv2d(16, 32, 1), ResponseNorm(32), nn.Conv2d(32, 16, 1)) for _ in range(3)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Sequential(*map(Shortcut, inner)), *head).eval()
    description = subnetact.describe(model, X)
    assert list(description.groups) == ["0.stream"]
    for block in range(3):  # The graph tells, so that no proof has to fail.
        assert "averages over its outputs" in description.refused[f"1.{block}.inner.0"]
    assert {name: set(stage.blocks) for name, stage in description.stages.items()} == {
        "1.depth": {"1.0", "1.1", "1.2"}
    }


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


class Levels(nn.Module):
    """The backbone of a detector: two levels of features, behind norms that are frozen."""

    out_channels = (16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, 4, 1), channel_norm("frozen", 2, 16)
        self.fine, self.coarse = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.fine(self.norm(self.first(x)).relu()).relu()
        return {"fine": x, "coarse": self.coarse(x).relu()}


def test_a_detector_is_inserted_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    detection = torchvision.models.detection
    best = lambda boxes, scores, *_: scores.argsort(descending=True)  # noqa: E731
    monkeypatch.setattr(torchvision.ops.boxes, "batched_nms", best)  # its operator is missing here
    torch.manual_seed(0)
    anchors = detection.anchor_utils.DefaultBoxGenerator([[2], [2]])
    options = {"score_thresh": 0.0, "topk_candidates": 10, "detections_per_img": 5}
    model = detection.ssd.SSD(Levels(), anchors, (32, 32), 3, **options).eval()
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


class Standardised(nn.Module):
    """Two convolutions, of which the second one standardises its weight in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1)
        self.third, self.head = nn.Conv2d(16, 12, 1), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.second.weight
        flat = F.batch_norm(weight.reshape(1, 16, -1), None, None, training=True)
        x = F.conv2d(self.first(x).relu(), flat.reshape_as(weight), self.second.bias)
        return self.head(self.third(x).relu().mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (Standardised, {"third.width": 12}),
        (Reshaped, {"first.width": 16}),
        (Gated, {"both.width": 16, "second.width": 16}),
        (Branches, {"fine.0.stream": 16, "coarse.0.width": 32, "up.stream": 16}),
        (Shuffled, {"second.width": 8}),
    ],
)
def test_segments_and_what_is_no_segment(model: type[nn.Module], sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    network = model().eval()
    expected = outputs_of(network, X)[0]
    supernet = subnetact.insert_(network, example=X)
    assert {
        slot.name: max(slot.choices) for axis in supernet.space.axes for slot in axis.slots
    } == dict.fromkeys(sizes, 1.0)
    row = dict(zip(supernet.space.dimensions, supernet.space.resolve(supernet.space.largest()), strict=True))
    assert {name: row[name] for name in sizes} == sizes
    assert torch.equal(outputs_of(supernet, X)[0], expected)


class Weighted(nn.Module):
    """A network that divides what its blocks return by their number, the last block excepted."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(16) for _ in range(4)])
        self.head = nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        for block in self.blocks[:2]:
            x = block(x) / 2
        for block in self.blocks[2:]:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.outer(F.relu(self.inner(x)))


def test_blocks_whose_outputs_the_network_changes_are_not_skipped() -> None:
    x = torch.randn(2, 16)
    supernet = subnetact.insert_(Weighted().eval(), example=x)
    description = subnetact.describe(supernet.remove(), x)
    assert description.stages["blocks.depth"].blocks == ("blocks.3",)
    assert "changes the output of blocks.0" in description.refused["blocks.0.depth"]
    supernet = subnetact.insert_(Weighted().eval(), description, example=x)
    supernet.check(x)


class Chaotic(nn.Module):
    """A network that multiplies rounding errors by a million."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 256), nn.Linear(256, 16), nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        y = torch.sigmoid(self.second(F.relu(self.first(x))))
        for _ in range(20):
            y = 3.9 * y * (1 - y)
        return self.head(y)


def test_rounding_is_not_taken_for_a_mistake() -> None:
    description = subnetact.describe(Chaotic().eval(), torch.randn(4, 16))
    assert list(description.groups) == ["first.ffn", "second.ffn"]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 16), nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.left(x) + self.right(x))


def test_groups_that_are_wrong_together_are_found_although_the_smallest_subnet_is_right() -> None:
    model, x = Sum().eval(), torch.randn(2, 4)
    sizes = {0.5: 8, 0.75: 12, 1.0: 16}
    left = Member("left", "out", WeightSlice), Member("head", "in_", WeightSlice)
    groups = [
        Group("left.width", "width", 16, left, sizes=sizes),
        Group("right.width", "width", 16, (Member("right", "out", WeightSlice),), sizes=sizes),
    ]
    proof = Proof(model, Description("Sum", groups), [(x, outputs_of(model, x))])
    wrong, culprits = proof.failure() or ("", {})
    assert "does not run" in wrong
    assert culprits


class Rivals(nn.Module):
    """Two networks side by side, of which both change as soon as they are narrow together."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.left(x) + self.right(x)
        return 2 * y if len(self.left[0].weight) + len(self.right[0].weight) < 24 else y


def test_groups_that_are_wrong_only_together_are_left_out_together() -> None:
    torch.manual_seed(0)
    model, x = Rivals().eval(), torch.randn(2, 4)
    sizes = {0.5: 8, 1.0: 16}
    groups = [
        Group(
            f"{side}.ffn",
            "ffn",
            16,
            (Member(f"{side}.0", "out", WeightSlice), Member(f"{side}.2", "in_", WeightSlice)),
            sizes=sizes,
        )
        for side in ("left", "right")
    ]
    proof = Proof(model, Description("Rivals", groups), [(x, outputs_of(model, x))])
    wrong, culprits = proof.failure() or ("", {})
    assert "differs" in wrong
    assert list(culprits) == ["left.ffn", "right.ffn"]


def test_a_model_that_cannot_be_copied_as_a_whole_becomes_elastic() -> None:
    model = Hidden(torch.relu).eval()
    model.lock = threading.Lock()  # copy.deepcopy refuses locks
    supernet = subnetact.insert_(model, example=X)
    assert supernet.network is model
    assert list(supernet.space.dimensions) == ["first.width", "second.width"]


def test_layers_of_one_stream_are_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = [nn.Sequential(nn.Conv2d(8, 12, 1), nn.ReLU(), nn.Conv2d(12, 8, 1)) for _ in range(3)]
            self.stem, self.blocks = nn.Conv2d(3, 8, 1), nn.Sequential(*map(Shortcut, inner))
            self.last, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.blocks(self.stem(x))
            return self.head(self.last(x).mean((2, 3))), x

    asked = []
    group = TracedModel._group
    monkeypatch.setattr(TracedModel, "_group", lambda self, layer: asked.append(layer) or group(self, layer))
    description = subnetact.describe(Returned().eval(), X, axes=("width", "stream"))
    assert list(description.groups) == [*(f"blocks.{i}.inner.0.width" for i in range(3)), "last.width"]
    assert sorted(asked) == [*(f"blocks.{i}.inner.0" for i in range(3)), "head", "last", "stem"]
    reasons = [description.refused[layer] for layer in ("stem", *(f"blocks.{i}.inner.2" for i in range(3)))]
    place = "its outputs are inputs or outputs of the model, tensor 2 of those returned"
    assert reasons == [f"{place}; leave it out there to narrow it"] * 4


class Flipping(nn.Module):
    """Convolutions in a row, of which some have their outputs in another order."""

    def __init__(self, flipped: set[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3 if i == 0 else 8, 8, 1) for i in range(9)])
        self.flipped = flipped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).relu()
            x = x.flip(1) if i in self.flipped else x
        return x


@pytest.mark.parametrize(
    ("flipped", "most"), [({7}, 5), ({0}, 6), ({2, 5}, 10), (set(range(8)), 14)], ids=str
)
def test_all_culprits_are_found_with_few_trials(
    flipped: set[int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    good = subnetact.describe(Flipping(set()).eval(), X, proof=False)
    assert len(good.groups) == 8
    model = Flipping(flipped).eval()
    proof = Proof(model, good, [(X, outputs_of(model, X))])
    tried, wrong = [], proof._wrong
    monkeypatch.setattr(proof, "_wrong", lambda *a, **options: tried.append(1) or wrong(*a, **options))
    first, culprits = proof.failure() or ("", {})
    assert "first at" in first
    assert set(culprits) == {f"layers.{i}.width" for i in flipped}
    assert all("first at" in why for why in culprits.values())
    assert len(tried) <= most + 2  # The smallest subnet fails in both precisions.


def test_an_example_may_hold_plain_values() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.layers(scale * x)  # type: ignore[no-any-return]

    model, x = Scaled().eval(), torch.randn(2, 4)
    expected = model(x, scale=2.0)
    supernet = subnetact.insert_(model, example={"x": x, "scale": 2.0})
    assert torch.equal(supernet(x, scale=2.0), expected)
    assert supernet.space.size() > 1
