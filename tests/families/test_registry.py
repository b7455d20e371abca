"""Properties of every registered family: views, gradients, exports, spaces, and refused arguments."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_families import small_constructor

from ofa_adapters import encode, families, load
from ofa_adapters.networks.mobile import MobileLayout
from ofa_adapters.registry import family_of
from subnetact.errors import InsertError, SpecError
from subnetact.latency.table import LatencyTable
from subnetact.operators import CALIBRATION_RULES, WeightSlice
from subnetact.space import SubnetSpace
from subnetact.supernet.statistics import batch_norms

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
GOLDEN = Path(__file__).parent.parent / "golden"


def test_the_registry() -> None:
    assert families() == tuple(NOTATION)
    with pytest.raises(SpecError, match="unknown family 'resnet'; choose from ofa_resnet50, ofa_mbv3"):
        load("resnet")


@pytest.mark.parametrize("family", ["ofa_mbv3", "ofa_resnet50"])
def test_published_latency_tables_are_of_the_family(family: str) -> None:
    """The space has the id that the tables in profiling/tables carry, and all of their subnets."""
    space = load(family).space
    named = family.replace("_", "-")
    (path,) = (GOLDEN.parents[1] / "profiling" / "tables").glob(f"*_{named}_*.json")
    table = LatencyTable.load(path)
    assert table.stamp["space"] == space.id
    assert all(space.parse(key).key == key for key in table.subnets)


@pytest.mark.parametrize("family", families())
def test_what_is_known_of_a_family(family: str, small: Any) -> None:
    known = family_of(family)
    assert known.source
    assert known.checkpoints
    assert known.licence in ("MIT", "Apache-2.0", "CC-BY-NC-4.0")
    assert known.calibration in CALIBRATION_RULES
    assert {norm.rule for norm in batch_norms(small(family).network).values()} <= {known.calibration}
    with pytest.raises(SpecError, match=rf"{family} has no constructor argument widht; it has "):
        load(family, None, widht=2)


@pytest.mark.parametrize("wrong", ["blocks.1.expand_cov", "block.1.depth_conv", "blocks.99.depth_conv"])
def test_an_entry_that_no_block_can_have_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ProxylessNAS has no squeeze-excitation, so its entries are left out; misspelt ones are not."""
    assert "blocks.1.squeeze_reduce" not in family_of("ofa_proxyless").build(width_mult=0.1)[2]
    elastic, entry = MobileLayout.elastic, WeightSlice.on(out="block0.mid")
    monkeypatch.setattr(MobileLayout, "elastic", lambda layout: elastic(layout) | {wrong: entry})
    with pytest.raises(InsertError, match=rf"the network has no module '{wrong}'; did you mean .*blocks\.1"):
        load("ofa_proxyless", width_mult=0.1)


@pytest.mark.parametrize("family", families())
def test_actuated_equals_extracted_row_by_row_and_trains(family: str, small: Any, inputs_of: Any) -> None:
    supernet = pickle.loads(pickle.dumps(small(family)))
    x = inputs_of(family)
    one = tuple(tensor[:1] for tensor in x)
    specs = [supernet.space.smallest(), supernet.space.largest(), supernet.space.sample(1)]
    with torch.no_grad():
        for spec in specs:
            supernet.actuate(spec)
            y = supernet(*x)
            assert y.shape[0] == 2
            torch.testing.assert_close(y, supernet.extract(spec)(*x), atol=5e-5, rtol=1e-5)
            torch.testing.assert_close(supernet(*one), y[:1], atol=5e-5, rtol=1e-4)
    supernet.train()
    supernet(*inputs_of(family, 4), subnet=specs[0]).square().mean().backward()
    gradients = [p.grad for p in supernet.parameters() if p.grad is not None]
    assert len(gradients) >= len([*supernet.subnet(specs[0]).parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


EXPORTS: dict[str, Callable[[torch.nn.Module, Any], Any]] = {
    "export": lambda network, inputs: torch.export.export(network, inputs).module()(*inputs),
    "script": lambda network, inputs: torch.jit.script(network)(*inputs),
    "trace": lambda network, inputs: torch.jit.trace(network, inputs)(*inputs),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", EXPORTS)
@pytest.mark.parametrize("family", ["ofa_mbv3", "autoformer", "dynabert", "slimmable_resnet50"])
def test_subnets_are_traced_scripted_and_exported(family: str, how: str, small: Any, inputs_of: Any) -> None:
    supernet, inputs = small(family), inputs_of(family)
    spec = supernet.space.sample(1)
    network = supernet.extract(spec) if how in ("export", "script") else supernet.subnet(spec)
    with torch.no_grad():
        expected = supernet.subnet(spec)(*inputs)
        torch.testing.assert_close(EXPORTS[how](network, inputs), expected, atol=5e-5, rtol=1e-5)


@cache
def published(family: str) -> SubnetSpace:
    with torch.device("meta"):
        return family_of(family).build()[1]


@pytest.mark.parametrize("family", families())
@settings(max_examples=15)
@given(st.integers(0, 10**9))
def test_random_configurations_round_trip(family: str, seed: int) -> None:
    space = published(family)
    spec = space.sample(seed)
    config = space.format(spec)
    assert space.parse(config) == spec
    assert space.parse(json.loads(json.dumps(config))) == spec
    sizes = dict(zip(space.dimensions, space.resolve(spec), strict=True))
    most = dict(zip(space.dimensions, space.resolve(space.largest()), strict=True))
    if family not in ("slimmable_resnet50", "us_mobilenet_v2"):
        assert all(0 <= size <= max(most[name], 1) for name, size in sizes.items())


MOBILE = {"ks": "kernel", "e": "expand", "d": "depth"}
NOTATION = {
    "ofa_resnet50": {"d": "depth", "e": "expand", "w": "w"},
    "ofa_mbv3": MOBILE,
    "ofa_proxyless": MOBILE,
    "compofa_mbv3": {"e": "expand", "d": "depth"},
    "autoformer": {"layer_num": "depth", "embed_dim": "embed", "num_heads": "heads", "mlp_ratio": "mlp"},
    "dynabert": {"width_mult": "width", "depth_mult": "depth"},
    "attentivenas": {
        **{"resolution": "resolution", "width": "width", "depth": "depth"},
        **{"kernel_size": "kernel", "expand_ratio": "expand"},
    },
    "slimmable_resnet50": {"width_mult": "width"},
    "us_mobilenet_v2": {"width_mult": "width"},
    "hydravit": {"heads": "heads"},
}
VALUES = st.one_of(
    st.integers(-50, 2000),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=3),
    st.none(),
    st.booleans(),
)


def is_choice(value: Any, choices: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return any(math.isclose(value, choice, rel_tol=1e-5) for choice in choices)


def legal_values(family: str, space: SubnetSpace, key: str, axis: str, i: int, config: Any) -> Any:
    """Return the choices at one position of a configuration; None stands for a skipped position."""
    if family == "ofa_resnet50" and key == "w":
        return range(3)
    if family == "compofa_mbv3" and key == "e":
        depth = config["d"][i // 4]
        return (config["e"][i],) if i % 4 < depth else None
    slots = next(a for a in space.axes if a.name == axis).slots
    if space.parse(config)[axis][i] is None:
        return None
    return (*slots[i].choices, *slots[i].aliases)


@pytest.mark.parametrize("family", families())
@settings(max_examples=30)
@given(data=st.data())
def test_illegal_values_are_refused_by_axis_and_choices(family: str, data: st.DataObject) -> None:
    space = published(family)
    config = space.format(space.sample(data.draw(st.integers(0, 10**6))))
    key = data.draw(st.sampled_from(sorted(NOTATION[family])))
    axis, value = NOTATION[family][key], data.draw(VALUES)
    if isinstance(config[key], list):
        i = data.draw(st.integers(0, len(config[key]) - 1))
        legal = legal_values(family, space, key, axis, 0 if axis == "embed" else i, config)
        assume(legal is not None and not is_choice(value, legal))
        if family == "ofa_resnet50" and key == "w":
            assume(not isinstance(value, int) or isinstance(value, bool) or value not in legal)
        spread = [value] * len(config[key]) if axis == "embed" else list(config[key])
        spread[i] = value
        config[key] = spread
    else:
        assume(not is_choice(value, legal_values(family, space, key, axis, 0, config)))
        config[key] = value
    with pytest.raises(SpecError) as error:
        space.parse(config)
    message = str(error.value)
    assert message.startswith(f"{family}: ")
    assert axis in message or key in message
    assert "choose from" in message or "is one of" in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ks": 3, "e": 0.2, "d": 0}, r"exactly the keys d, e, w; got \['d', 'e', 'ks'\]"),
        ({"d": 0, "e": 0.2, "w": 3}, r"w: 3 is not an index .* choose from 0\.\.2"),
        ({"d": 0, "e": 0.2, "w": [-1, 0, 0, 0, 0, 0]}, "w: -1"),
        ({"d": 1, "e": 0.9, "w": 1}, r"expand\[0\] \(block0\): 0.9 .* choose from 0.2, 0.25"),
        ({"d": [1, 9, 0, 0, 0], "e": 0.2, "w": 1}, r"depth\[1\] \(stage1\): 9"),
        ({"d": 1, "e": [0.2] * 14, "w": 1}, "expand needs one value for each slot"),
    ],
)
def test_upstreams_own_notation_is_validated(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        published("ofa_resnet50").parse(config)


def test_upstreams_other_notations() -> None:
    mobile = published("ofa_mbv3")
    scalars = mobile.parse({"ks": 5, "e": 4, "d": 3})
    assert set(scalars["depth"]) == {3}
    searched = {**mobile.format(scalars), "image_size": 224, "wid": None}
    assert mobile.parse(searched) == scalars
    proxyless = published("ofa_proxyless")
    assert proxyless.parse({"ks": 3, "e": 3, "d": 4})["depth"] == (4, 4, 4, 4, 4, 1)
    compound = published("compofa_mbv3")
    assert compound.size() == 243
    spec = compound.parse({"d": [2, 3, 4, 2, 3]})
    config = compound.format(spec)
    assert config["e"] == [3] * 4 + [4] * 4 + [6] * 4 + [3] * 4 + [4] * 4
    assert compound.parse({**config, "ks": [3] * 4 + [5] * 4 + [3] * 8 + [5] * 4}) == spec
    with pytest.raises(
        SpecError, match=r"imply kernel, .* leave out 'ks', or choose from \[3, 3, 3, 3, 5.* 7$"
    ):
        compound.parse({**config, "ks": 7})
    with pytest.raises(SpecError, match=r"imply expand, one value per block; .* got \[3, 3, 3\]"):
        compound.parse({**config, "e": [3, 3, 3]})
    former = published("autoformer")
    spec = former.sample(4)
    c = former.format(spec)
    assert former.parse({**c, "embed_dim": c["embed_dim"][0]}) == spec
    with pytest.raises(SpecError, match="embed_dim is one of 192, 216, 240, the same in every block"):
        former.parse({**c, "embed_dim": [192] * (c["layer_num"] - 1) + [216]})
    slim = published("slimmable_resnet50")
    assert slim.parse(0.5) == slim.parse({"width_mult": 0.5})


def test_elastic_compofa_has_a_kernel_axis() -> None:
    constructor = {**small_constructor("compofa_mbv3"), "fixed_kernel": False, "kernel_transform_mode": 1}
    supernet = load("compofa_mbv3", None, **constructor)
    assert [axis.name for axis in supernet.space.axes] == ["depth", "kernel"]
    spec = supernet.space.sample(0)
    assert supernet.space.parse(supernet.space.format(spec)) == spec
    assert any(name.endswith("7to5_matrix") for name in supernet.state_dict())
    independent = load("compofa_mbv3", None, **{**constructor, "compound": False})
    assert [axis.name for axis in independent.space.axes] == ["depth", "kernel", "expand"]
    with pytest.raises(SpecError, match="needs the key 'ks'"):
        supernet.space.parse({"d": 2})


WRONG_COUNTS = ["x", -1, 0, 10**9, 1.5, True, None]
WRONG_LISTS: list[Any] = [[], [-1], [9e3], ["a"], None, [float("nan")], [True]]


@pytest.mark.parametrize(
    ("family", "constructor", "message"),
    [
        ("autoformer", {"pre_norm": False}, "only pre_norm=True"),
        ("autoformer", {"change_qkv": False}, "change_qkv=True were ever published"),
        ("autoformer", {"embed_dim": 250}, "must be a multiple"),
        ("autoformer", {"embed_dim": 512}, "a head has 64 features"),
        ("autoformer", {"search_space": {"depth": [1]}}, "search_space has the keys embed_dim"),
        ("dynabert", {"model_type": "gpt2"}, "model_type is bert or roberta"),
        ("dynabert", {"hidden_size": 100}, "no multiple of 12 heads"),
        ("dynabert", {"width_mult_list": [0.01]}, r"must leave 1..12 heads"),
        ("compofa_mbv3", {"width_mult_list": [1.0, 1.2]}, "not elastic, give one"),
        ("compofa_mbv3", {"depth_list": [2, 3]}, "cannot be paired"),
        ("compofa_mbv3", {"depth_list": [3, 4, 5]}, "known for 4 blocks"),
        ("hydravit", {"embed_dim": 760}, "a head has 64 features"),
        ("hydravit", {"heads": [3, 13]}, "whole numbers from 1 to 12"),
        ("hydravit", {"heads": [3.5]}, "whole numbers from 1 to 12"),
        ("ofa_proxyless", {"base_stage_width": "huge"}, "neither None, 'google' nor nine widths"),
        *(("ofa_mbv3", {"n_classes": n}, "n_classes is .*; give a whole number") for n in WRONG_COUNTS),
        *(
            ("ofa_resnet50", {"width_mult_list": list_}, "1 to 8192 numbers from 0 to")
            for list_ in WRONG_LISTS
        ),
        ("ofa_resnet50", {"depth_list": [10**9]}, "."),
        ("ofa_resnet50", {"bn_param": 3}, "."),
        ("ofa_mbv3", {"width_mult": "wide"}, "."),
        ("autoformer", {"depth": 10**9}, "."),
        ("autoformer", {"search_space": 3}, "."),
        ("dynabert", {"num_attention_heads": 0}, "."),
        ("dynabert", {"hidden_size": "x"}, "."),
    ],
)
def test_arguments_without_meaning_are_refused(
    family: str, constructor: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        load(family, None, **constructor)


def test_features_of_unknown_encodings_and_sizes() -> None:
    space = published("ofa_mbv3")
    with pytest.raises(SpecError, match="image_size: 130 is not a choice of this encoding; choose from 128"):
        encode(space, space.largest(), 130)
    with pytest.raises(
        ValueError, match="no predictor encoding acc; upstream publishes arch_encoder, tutorial"
    ):
        encode(space, space.largest(), 128, "acc")
    with pytest.raises(SpecError, match="upstream publishes none"):
        encode(published("dynabert"), published("dynabert").largest(), 128)
