"""What holds for every registered family: spaces, refusals, checkpoints, the command line."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ofa_adapters import encode, families, identify, load
from ofa_adapters.__main__ import main
from ofa_adapters.registry import family_of
from subnetact.errors import CheckpointError, SpecError
from subnetact.operators import CALIBRATION_RULES, ElasticKernel
from subnetact.space import SubnetSpace
from subnetact.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
GOLDEN = Path(__file__).parent.parent / "golden"
STAGE = {"k": [3, 5], "t": [2, 3], "s": 2, "act_func": "swish", "se": True}
SMALL: dict[str, dict[str, Any]] = {
    "attentivenas": {
        "n_classes": 5,
        "supernet_cfg": {
            "use_v3_head": True,
            "resolutions": [32, 48],
            "first_conv": {"c": [8, 16], "s": 2, "act_func": "swish"},
            **{f"mb{i}": {**STAGE, "c": [8, 16, 24], "d": [1, 2], "s": 1 + i % 2} for i in range(1, 8)},
            "last_conv": {"c": [24, 32], "act_func": "swish"},
        },
    },
    "slimmable_resnet50": {"num_classes": 5, "width_mult_list": [0.0625, 0.125]},
    "us_mobilenet_v2": {
        "num_classes": 5,
        "width_mult_list": [0.5, 0.75, 1.0],
        "width_mult_range": [0.25, 0.5],
    },
}


def constructor_of(family: str) -> dict[str, Any]:
    path = GOLDEN / family / "cases.json"
    return json.loads(path.read_text())["constructor"] if path.exists() else SMALL[family]


@cache
def small(family: str) -> Supernet:
    torch.manual_seed(0)
    return load(family, None, **constructor_of(family))


def inputs_of(family: str, n: int = 2) -> tuple[torch.Tensor, ...]:
    if family == "dynabert":
        return (torch.randint(1, 90, (n, 9), generator=torch.Generator().manual_seed(0)),)
    size = 32 if family == "autoformer" else 64
    return (torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(0)),)


def test_the_registry() -> None:
    assert families() == (
        "ofa_resnet50",
        "ofa_mbv3",
        "ofa_proxyless",
        "compofa_mbv3",
        "autoformer",
        "dynabert",
        "attentivenas",
        "slimmable_resnet50",
        "us_mobilenet_v2",
    )
    with pytest.raises(ValueError, match="unknown family 'resnet'; choose from ofa_resnet50, ofa_mbv3"):
        load("resnet")


@pytest.mark.parametrize("family", families())
def test_what_is_known_of_a_family(family: str) -> None:
    known = family_of(family)
    assert known.source
    assert known.checkpoints
    assert known.licence in ("MIT", "Apache-2.0", "CC-BY-NC-4.0")
    assert known.calibration in CALIBRATION_RULES
    assert {norm.rule for norm in small(family).norm_operators().values()} <= {known.calibration}
    with pytest.raises(TypeError, match=rf"{family} has no constructor argument widht; it has "):
        load(family, None, widht=2)


@pytest.mark.parametrize("family", families())
def test_views_share_the_supernets_storage_and_nothing_else_is_big(family: str) -> None:
    supernet = small(family)
    shared = {t.untyped_storage().data_ptr() for t in supernet.state_dict().values()}
    shared |= {b.untyped_storage().data_ptr() for b in supernet.network.buffers()}
    largest = supernet.subnet(supernet.space.largest())
    for seed in range(3):
        view = supernet.subnet(supernet.space.sample(seed))
        made = {
            kernel.tensor.untyped_storage().data_ptr()
            for operator in supernet.network.modules()
            if isinstance(operator, ElasticKernel)
            for kernel in operator._computed.values()
        }
        for name, tensor in [*view.named_parameters(), *view.named_buffers()]:
            assert tensor.untyped_storage().data_ptr() in shared | made, name
        with pytest.raises(RuntimeError, match="a view shares its weights"):
            view.double()
        assert sum(p.numel() for p in view.parameters()) <= sum(p.numel() for p in largest.parameters())


@pytest.mark.parametrize("family", families())
def test_actuated_equals_extracted_and_gives_one_row_per_input(family: str) -> None:
    supernet = pickle.loads(pickle.dumps(small(family)))
    x, one = inputs_of(family), inputs_of(family, 1)
    specs = [supernet.space.smallest(), supernet.space.largest(), supernet.space.sample(1)]
    with torch.no_grad():
        for spec in specs:
            supernet.actuate(spec)
            torch.testing.assert_close(supernet(*x), supernet.extract(spec)(*x), atol=5e-5, rtol=1e-5)
            assert supernet(*x).shape[0] == 2
            assert supernet(*one).shape == (1, supernet(*x).shape[1])


@pytest.mark.parametrize("family", families())
def test_gradients_reach_what_the_subnet_uses(family: str) -> None:
    supernet = pickle.loads(pickle.dumps(small(family))).train()
    spec = supernet.space.smallest()
    supernet(*inputs_of(family, 4), subnet=spec).square().mean().backward()
    reached = {name for name, p in supernet.network.named_parameters() if p.grad is not None}
    view = supernet.subnet(spec)
    assert reached
    assert all(p.grad.isfinite().all() for p in supernet.parameters() if p.grad is not None)
    assert len(reached) >= len([*view.parameters()])


EXPORTS: dict[str, Callable[[torch.nn.Module, Any], Any]] = {
    "fx": lambda network, inputs: torch.fx.GraphModule(network, LeafTracer().trace(network, absent(network)))(
        *inputs
    ),
    "export": lambda network, inputs: torch.export.export(network, inputs).module()(*inputs),
    "script": lambda network, inputs: torch.jit.script(network)(*inputs),
    "trace": lambda network, inputs: torch.jit.trace(network, inputs)(*inputs),
}


class LeafTracer(torch.fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or type(m).__name__ == "Resize"


def absent(network: torch.nn.Module) -> dict[str, Any] | None:
    optional = {"attention_mask": None, "token_type_ids": None}
    return optional if hasattr(network, "encode") else None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", EXPORTS)
@pytest.mark.parametrize("family", families())
def test_subnets_can_be_traced_scripted_and_exported(family: str, how: str) -> None:
    supernet, inputs = small(family), inputs_of(family)
    spec = supernet.space.sample(1)
    network = supernet.extract(spec) if how in ("export", "script") else supernet.subnet(spec)
    with torch.no_grad():
        expected = supernet.subnet(spec)(*inputs)
        torch.testing.assert_close(EXPORTS[how](network, inputs), expected, atol=5e-5, rtol=1e-5)


# -- spaces ------------------------------------------------------------------------------------------

PUBLISHED: dict[str, SubnetSpace] = {}


def published(family: str) -> SubnetSpace:
    if family not in PUBLISHED:
        with torch.device("meta"):
            PUBLISHED[family] = family_of(family).build()[1]
    return PUBLISHED[family]


@pytest.mark.parametrize("family", families())
@settings(max_examples=30, deadline=None)
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


NOTATION = {
    "ofa_resnet50": {"d": "depth", "e": "expand", "w": "w"},
    "ofa_mbv3": {"ks": "kernel", "e": "expand", "d": "depth"},
    "ofa_proxyless": {"ks": "kernel", "e": "expand", "d": "depth"},
    "compofa_mbv3": {"e": "expand", "d": "depth"},
    "autoformer": {"layer_num": "depth", "embed_dim": "embed", "num_heads": "heads", "mlp_ratio": "mlp"},
    "dynabert": {"width_mult": "width", "depth_mult": "depth"},
    "attentivenas": {
        "resolution": "resolution",
        "width": "width",
        "depth": "depth",
        "kernel_size": "kernel",
        "expand_ratio": "expand",
    },
    "slimmable_resnet50": {"width_mult": "width"},
    "us_mobilenet_v2": {"width_mult": "width"},
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
    """Choices of one place of a configuration; None where the subnet skips it."""
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
@settings(max_examples=200, deadline=None)
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


@pytest.mark.parametrize("family", families())
def test_malformed_configurations_are_refused(family: str) -> None:
    space = published(family)
    config = space.format(space.largest())
    key = next(iter(NOTATION[family]))
    malformed: list[Any] = [
        {},
        {**config, "foo": 1},
        {k: v for k, v in config.items() if k not in NOTATION[family]},
        {**config, key: [1] * 99},
        {**config, key: {}},
        {**config, key: []},
        None,
        "largest",
        object(),
    ]
    for wrong in malformed:
        with pytest.raises(SpecError, match=family):
            space.parse(wrong)


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
    with pytest.raises(SpecError, match=r"kernel\[0\] \(block0\): 7 is not a choice; choose from 3"):
        compound.parse({**config, "ks": 7})
    with pytest.raises(SpecError, match=r"expand has 20 slots, got 3 values"):
        compound.parse({**config, "e": [3, 3, 3]})
    former = published("autoformer")
    spec = former.sample(4)
    c = former.format(spec)
    assert former.parse((c["layer_num"], *c["mlp_ratio"], *c["num_heads"], c["embed_dim"][0])) == spec
    with pytest.raises(SpecError, match="no released subnet; choose from AutoFormer-T"):
        former.parse("AutoFormer-X")
    with pytest.raises(SpecError, match="embed_dim is one of 192, 216, 240, the same in every block"):
        former.parse({**c, "embed_dim": [192] * (c["layer_num"] - 1) + [216]})
    slim = published("slimmable_resnet50")
    assert slim.parse(0.5) == slim.parse({"width_mult": 0.5})


def test_elastic_compofa_has_a_kernel_axis() -> None:
    constructor = {**constructor_of("compofa_mbv3"), "fixed_kernel": False, "kernel_transform_mode": 1}
    supernet = load("compofa_mbv3", None, **constructor)
    assert [axis.name for axis in supernet.space.axes] == ["depth", "kernel"]
    spec = supernet.space.sample(0)
    assert supernet.space.parse(supernet.space.format(spec)) == spec
    assert any(name.endswith("7to5_matrix") for name in supernet.state_dict())
    independent = load("compofa_mbv3", None, **{**constructor, "compound": False})
    assert [axis.name for axis in independent.space.axes] == ["depth", "kernel", "expand"]
    with pytest.raises(SpecError, match="needs the key 'ks'"):
        supernet.space.parse({"d": 2})


@pytest.mark.parametrize(
    ("family", "constructor", "message"),
    [
        ("autoformer", {"pre_norm": False}, "only pre_norm=True"),
        ("autoformer", {"embed_dim": 250}, "must be a multiple"),
        ("autoformer", {"embed_dim": 512}, "a head has 64 features"),
        ("autoformer", {"search_space": {"depth": [1]}}, "search_space has the keys embed_dim"),
        ("dynabert", {"model_type": "gpt2"}, "model_type is bert or roberta"),
        ("dynabert", {"hidden_size": 100}, "no multiple of 12 heads"),
        ("dynabert", {"width_mult_list": [0.01]}, r"must leave 1..12 heads"),
        ("compofa_mbv3", {"width_mult_list": [1.0, 1.2]}, "not elastic, give one"),
        ("compofa_mbv3", {"depth_list": [2, 3]}, "cannot be paired"),
        ("compofa_mbv3", {"depth_list": [3, 4, 5]}, "known for 4 blocks"),
        ("ofa_proxyless", {"base_stage_width": "huge"}, "neither None, 'google' nor nine widths"),
    ],
)
def test_constructor_arguments_without_meaning_are_refused(
    family: str, constructor: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(family, None, **constructor)


def test_features_of_unknown_encodings_and_sizes() -> None:
    space = published("ofa_mbv3")
    with pytest.raises(SpecError, match="image_size: 130 is not a choice of this encoding; choose from 128"):
        encode(space, space.largest(), 130)
    with pytest.raises(
        ValueError, match="no predictor encoding acc; upstream publishes arch_encoder, tutorial"
    ):
        encode(space, space.largest(), 128, "acc")
    with pytest.raises(ValueError, match="upstream publishes none"):
        encode(published("dynabert"), published("dynabert").largest(), 128)


# -- checkpoints -------------------------------------------------------------------------------------

GOLDENS = sorted(path.parent.name for path in GOLDEN.glob("*/cases.json"))


def golden_state(family: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / family / "state_dict.safetensors")


@pytest.mark.parametrize("family", GOLDENS)
@pytest.mark.parametrize("wrap", ["state_dict", "model", "both", "module"])
def test_wrappers_and_prefixes_load(family: str, wrap: str, tmp_path: Path) -> None:
    state: Any = golden_state(family)
    expected = load(family, state, **constructor_of(family)).fingerprint()
    if wrap == "module":
        state = {f"module.{name}": tensor for name, tensor in state.items()}
    elif wrap == "both":
        state = {"model": {"state_dict": state, "epoch": 3}, "optimizer": {}}
    else:
        state = {wrap: state, "epoch": 3}
    assert load(family, state, **constructor_of(family)).fingerprint() == expected
    torch.save(state, tmp_path / "checkpoint.pth")
    assert load(family, tmp_path / "checkpoint.pth", **constructor_of(family)).fingerprint() == expected


def test_a_command_line_saved_beside_the_weights_is_no_code(tmp_path: Path) -> None:
    import argparse

    torch.save(
        {
            "model": golden_state("autoformer"),
            "args": argparse.Namespace(gp=True, lr=1e-3),
            "best": np.float64(74.7),
        },
        tmp_path / "supernet.pth",
    )
    supernet = load("autoformer", tmp_path / "supernet.pth", **constructor_of("autoformer"))
    assert supernet.fingerprint() == small_fingerprint("autoformer")


def small_fingerprint(family: str) -> str:
    return load(family, golden_state(family), **constructor_of(family)).fingerprint()


@pytest.mark.parametrize("family", ["ofa_mbv3", "ofa_proxyless"])
def test_old_names_load(family: str) -> None:
    state = golden_state(family)
    old = {
        k.replace(".conv.", ".mobile_inverted_conv.", 1) if k.startswith("blocks.") else k: t
        for k, t in state.items()
    }
    assert any(".mobile_inverted_conv." in name for name in old)
    assert load(family, old, **constructor_of(family)).fingerprint() == small_fingerprint(family)
    assert identify(old) == family


def test_new_names_and_stray_matrices_load_as_compofa() -> None:
    state = golden_state("compofa_mbv3")
    new = {k.replace(".mobile_inverted_conv.", ".conv."): t for k, t in state.items()}
    new["blocks.1.conv.depth_conv.conv.5to3_matrix"] = torch.eye(9)
    constructor = constructor_of("compofa_mbv3")
    assert load("compofa_mbv3", new, **constructor).fingerprint() == small_fingerprint("compofa_mbv3")


@pytest.mark.parametrize("family", GOLDENS)
@pytest.mark.parametrize("other", GOLDENS)
def test_another_familys_checkpoint_is_refused_by_name(family: str, other: str) -> None:
    state = golden_state(other)
    assert identify(state) == other
    if family == other:
        return
    with pytest.raises(CheckpointError) as error:
        load(family, state, **({} if family == "dynabert" else constructor_of(family)))
    message = str(error.value)
    assert message.startswith(f"{family}: state_dict does not fit: ")
    assert f"It looks like {other}: load it as that" in message
    assert "missing: " in message or "extra: " in message or "of another shape: " in message


@pytest.mark.parametrize("family", GOLDENS)
def test_partial_and_misshaped_checkpoints_are_listed(family: str) -> None:
    state = golden_state(family)
    weights = [name for name in state if name.endswith("weight")]
    gone = weights[len(weights) // 2]
    misshaped = weights[1]
    del state[gone]
    state[misshaped] = torch.zeros(2, 3)
    state["foo.bar"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as error:
        load(family, state, **constructor_of(family))
    message = str(error.value)
    assert f"1 missing: {family_of(family).rename(gone)}" in message
    assert "1 extra: foo.bar" in message
    assert f"1 of another shape: {misshaped} (2, 3) should be (" in message
    assert "Check the constructor arguments" in message


@pytest.mark.parametrize("family", families())
def test_foreign_tensors_are_refused(family: str) -> None:
    foreign = {"layer1.weight": torch.zeros(3, 3), "layer1.bias": torch.zeros(3)}
    assert identify(foreign) is None
    with pytest.raises(CheckpointError, match=r"2 extra: layer1.weight, layer1.bias. It looks like no"):
        load(family, foreign, **constructor_of(family))
    for empty in ({}, {"state_dict": {}}, {"epoch": 3}, {"weight": [1.0]}):
        with pytest.raises(CheckpointError, match="holds no state_dict"):
            load(family, empty, **constructor_of(family))


@pytest.mark.parametrize("family", families())
def test_truncated_files_are_refused(family: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save({"state_dict": small(family).state_dict()}, path)
    whole = path.read_bytes()
    for cut in (0, 100, len(whole) // 2, len(whole) - 50):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="checkpoint"):
            load(family, path, **constructor_of(family))
    save_file({k: v.contiguous() for k, v in small(family).state_dict().items()}, tmp_path / "c.safetensors")
    data = (tmp_path / "c.safetensors").read_bytes()
    (tmp_path / "c.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        load(family, tmp_path / "c.safetensors", **constructor_of(family))


# -- command line ------------------------------------------------------------------------------------


def test_listing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for family in families():
        assert f"{family}: " in text
        for name in family_of(family).checkpoints:
            assert name in text
    for fact in (
        "ofa_mbv3: 7,678,880 parameters",
        "axis         depth[6]: 2, 3, 4 | 1",
        "calibration  cumulative_unbiased",
        "compofa_mbv3: 7,664,760 parameters, 243 subnets",
        "us_mobilenet_v2: 3,504,872 parameters, 27 subnets",
    ):
        assert fact in text


@pytest.mark.parametrize("family", GOLDENS)
def test_inspect(family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(GOLDEN / family / "state_dict.safetensors")
    assert main(["inspect", path]) == 0
    text = capsys.readouterr().out
    assert f"looks like {family}, published at {family_of(family).source}" in text
    assert "constructor arguments" in text
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in golden_state(family).items()}}, tmp_path / "c.pth"
    )
    assert main(["inspect", str(tmp_path / "c.pth")]) == 0
    assert f"looks like {family}" in capsys.readouterr().out


def test_inspect_of_a_published_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    torch.save(load("us_mobilenet_v2", None).state_dict(), path)
    assert main(["inspect", str(path)]) == 1  # own names are no upstream names
    text = capsys.readouterr().out
    assert "of no family known here; its first names: stem_conv.weight" in text
    from ofa.imagenet_classification.elastic_nn.networks import OFAMobileNetV3

    torch.manual_seed(0)
    lists = {"ks_list": [3, 5, 7], "expand_ratio_list": [3, 4, 6], "depth_list": [2, 3, 4]}
    torch.save({"state_dict": OFAMobileNetV3(**lists).state_dict()}, path)
    assert main(["inspect", str(path)]) == 0
    assert f"fits: ofa_adapters.load('ofa_mbv3', {str(path)!r})" in capsys.readouterr().out


def test_inspect_runs_no_code_and_explains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
            return (tmp_path / "ran").touch, ()

    torch.save({"state_dict": Evil()}, tmp_path / "evil.pth")
    assert main(["inspect", str(tmp_path / "evil.pth")]) == 2
    assert not (tmp_path / "ran").exists()
    assert "holds more than tensors" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "absent.pth")]) == 2
    assert "no such file" in capsys.readouterr().err
