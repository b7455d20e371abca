"""Checkpoints of every family: which ones load, which are refused, and the command line."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_families import golden_fingerprint, golden_state, small_constructor

import ofa_adapters
from ofa_adapters import families, identify, load, upstream_state_dict
from ofa_adapters.__main__ import main
from ofa_adapters.registry import family_of
from subnetact import from_pretrained
from subnetact.digits import new_digits_supernet
from subnetact.errors import CheckpointError, SpecError

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
GOLDEN = Path(__file__).parent.parent / "golden"
GOLDENS = sorted(path.parent.name for path in GOLDEN.glob("*/cases.json"))


@pytest.mark.parametrize(
    ("family", "wrap"),
    [(family, wrap) for family in GOLDENS for wrap in ("both", "module")]
    + [("ofa_resnet50", wrap) for wrap in ("state_dict", "model")],
)
def test_wrappers_and_prefixes_load(family: str, wrap: str, tmp_path: Path) -> None:
    state: Any = golden_state(family)
    expected = golden_fingerprint(family)
    if wrap == "module":
        state = {f"module.{name}": tensor for name, tensor in state.items()}
    elif wrap == "both":
        state = {"model": {"state_dict": state, "epoch": 3}, "optimizer": {}}
    else:
        state = {wrap: state, "epoch": 3}
    assert load(family, state, **small_constructor(family)).fingerprint() == expected
    torch.save(state, tmp_path / "checkpoint.pth")
    assert load(family, tmp_path / "checkpoint.pth", **small_constructor(family)).fingerprint() == expected


@pytest.mark.parametrize("family", GOLDENS)
def test_weights_are_written_with_upstreams_names(family: str, written_back: Any) -> None:
    written_back(family, golden_state(family), **small_constructor(family))


def test_what_has_no_upstream_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"of one of ofa_resnet50, .* is needed, this one is of digits"):
        upstream_state_dict(new_digits_supernet())
    family, state = "compofa_mbv3", golden_state("compofa_mbv3")
    load(family, state, **small_constructor(family)).save_pretrained(tmp_path / "bundle")
    saved: Any = from_pretrained(tmp_path / "bundle")
    found = upstream_state_dict(saved)
    assert set(found) == set(state)
    assert all(tensor.equal(state[name]) for name, tensor in found.items())


def test_a_saved_command_line_is_no_code(tmp_path: Path) -> None:
    import argparse

    torch.save(
        {
            "model": golden_state("autoformer"),
            "args": argparse.Namespace(gp=True, lr=1e-3),
            "best": np.float64(74.7),
        },
        tmp_path / "supernet.pth",
    )
    supernet = load("autoformer", tmp_path / "supernet.pth", **small_constructor("autoformer"))
    assert supernet.fingerprint() == golden_fingerprint("autoformer")


@pytest.mark.parametrize("family", ["ofa_mbv3", "ofa_proxyless", "compofa_mbv3"])
def test_old_and_new_names_load(family: str) -> None:
    state, names = golden_state(family), (".conv.", ".mobile_inverted_conv.")
    used, other = names[::-1] if family == "compofa_mbv3" else names
    renamed = {k.replace(used, other, 1) if k.startswith("blocks.") else k: t for k, t in state.items()}
    assert any(other in name for name in renamed)
    if family == "compofa_mbv3":
        renamed["blocks.1.conv.depth_conv.conv.5to3_matrix"] = torch.eye(9)  # a stray one
    else:
        assert identify(renamed) == family
    assert load(family, renamed, **small_constructor(family)).fingerprint() == golden_fingerprint(family)


ALIKE = [family for family in GOLDENS if family.startswith(("ofa_", "compofa_"))]


@pytest.mark.parametrize(
    ("family", "other"),
    dict.fromkeys([*itertools.product(ALIKE, ALIKE), *zip(GOLDENS, [*GOLDENS[1:], GOLDENS[0]], strict=True)]),
)
def test_another_familys_checkpoint_is_named(family: str, other: str) -> None:
    state = golden_state(other)
    assert identify(state) == (None if other == "dynabert" else other)
    if family == other:
        return
    with pytest.raises(CheckpointError) as error:
        load(family, state, **({} if family == "dynabert" else small_constructor(family)))
    message = str(error.value)
    assert message.startswith(f"{family}: state_dict does not fit: ")
    if other == "dynabert":
        assert "it has the names of a BERT or RoBERTa: if it was trained as dynabert, load it" in message
        assert "subnetact.insert_(model, example=x)" in message
    else:
        assert f"state_dict does not fit: it looks like {other}: load it as that family." in message
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
        load(family, state, **small_constructor(family))
    message = str(error.value)
    assert f"1 missing: {gone}" in message
    assert "1 extra: foo.bar" in message
    assert f"1 of another shape: {misshaped} (2, 3) should be (" in message


@pytest.mark.parametrize("family", families())
def test_what_the_tensors_show_need_not_be_given(family: str, small: Any, tmp_path: Path) -> None:
    constructor = small(family).origin["constructor"]
    facts, state = family_of(family), upstream_state_dict(small(family))
    largest = ["depth_list", "expand_ratio_list", *(["width_mult_list"] if family == "ofa_resnet50" else [])]
    kept = {*largest, "num_attention_heads"}  # Tensors show the largest choice, and no number of heads.
    hidden = {name: v for name, v in constructor.items() if name not in facts.shown or name in kept}
    loaded = load(family, state, **hidden)
    assert loaded.fingerprint() == small(family).fingerprint()
    for name, value in constructor.items():
        if name in facts.shown and name != "width_mult_range":  # only its last entry shapes tensors
            assert loaded.origin["constructor"].get(name, value) == value
    counts = next(name for name in facts.shown if name in ("n_classes", "num_classes", "num_labels"))
    with pytest.raises(CheckpointError, match=rf"does not fit: .*show: {counts}=\d+ \(it was 77\)"):
        load(family, state, **{**hidden, counts: 77})


def test_choices_that_no_tensor_shows_are_named_with_the_largest(small: Any) -> None:
    from ofa.imagenet_classification.elastic_nn.networks import OFAMobileNetV3, OFAResNets

    lists = {"ks_list": [3, 5], "expand_ratio_list": [2, 3], "depth_list": [1, 2]}
    state = OFAMobileNetV3(n_classes=3, width_mult=0.25, **lists).state_dict()
    words = r"expand_ratio_list=3.0 at the largest \(it was \[3, 4, 6\]\), depth_list=2 at the largest"
    with pytest.raises(CheckpointError, match=words):
        load("ofa_mbv3", state)
    loaded = load("ofa_mbv3", state, expand_ratio_list=[2, 3], depth_list=[1, 2])
    assert loaded.origin["constructor"] == {"n_classes": 3, "width_mult": 0.25, **lists}
    lists = {"depth_list": [0, 1], "expand_ratio_list": [0.2, 0.25], "width_mult_list": [0.1, 0.2]}
    state = OFAResNets(n_classes=3, **lists).state_dict()
    with pytest.raises(CheckpointError, match=r"depth_list=1 at .*ratio_list=0.25 at .*mult_list=0.2 at"):
        load("ofa_resnet50", state)
    assert load("ofa_resnet50", state, **lists).space.size() > 1


def test_what_inspect_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, path, state = "autoformer", tmp_path / "c.pth", golden_state("autoformer")
    extra = {"ema.decay": torch.tensor(0.9), "ema.steps": torch.tensor(3)}
    for content in ({"net": state}, {"state_dict_ema": state, "epoch": 3, "best": torch.tensor(1.0)}):
        torch.save(content, path)
        assert load(family, path).fingerprint() == golden_fingerprint(family)
    for several in ({"net": state, "ema": state}, {"module": state, "optimizer": {"a": torch.ones(2)}}):
        with pytest.raises(CheckpointError, match=r"several state_dicts, .*weights_only=True\)\['"):
            load(family, several)
    with pytest.raises(CheckpointError, match=r"ignore=\['ema.decay', 'ema.steps'\] loads it without"):
        load(family, {**state, **extra})
    many = {f"ema[{i}].decay": torch.tensor(0.9) for i in range(20)}
    for more, ignored in ((extra, ["ema.*"]), (extra, "ema.*"), (many, iter(many)), (many, "ema*")):
        loaded = load(family, {**state, **more}, ignore=ignored)  # type: ignore[arg-type]
        assert loaded.fingerprint() == golden_fingerprint(family)
    with pytest.raises(CheckpointError, match=r"ignore=\[their names, or a pattern\] loads it without"):
        load(family, {**state, **many})
    with pytest.raises(CheckpointError, match="does not fit"):
        load(family, state, ignore=["head.*"])
    torch.save(state, path)
    assert main(["inspect", str(path)]) == 0
    call = capsys.readouterr().out.partition("fits: ")[2]
    assert "num_classes=" in call
    assert eval(call, {"ofa_adapters": ofa_adapters}).state_dict().keys() == loaded.state_dict().keys()
    del state["norm.weight"]
    torch.save(state, path)
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert (
        "it lacks tensors: fetch it again, or save the whole network. It has 1 missing: norm.weight" in said
    )


@pytest.mark.parametrize("family", families())
def test_foreign_tensors_are_refused(family: str) -> None:
    foreign = {"layer1.weight": torch.zeros(3, 3), "layer1.bias": torch.zeros(3)}
    assert identify(foreign) is None
    with pytest.raises(CheckpointError, match=r"it looks like no .* 2 extra: layer1.weight, layer1.bias"):
        load(family, foreign, **small_constructor(family))
    for empty in ({}, {"state_dict": {}}, {"epoch": 3}, {"weight": [1.0]}):
        with pytest.raises(CheckpointError, match="holds no state_dict"):
            load(family, empty, **small_constructor(family))


def test_truncated_files_are_refused(tmp_path: Path, small: Any) -> None:
    family, path = "ofa_mbv3", tmp_path / "checkpoint.pth"
    torch.save({"state_dict": small(family).state_dict()}, path)
    whole = path.read_bytes()
    for cut in (0, 100, len(whole) // 2, len(whole) - 50):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="checkpoint"):
            load(family, path, **small_constructor(family))
    save_file({k: v.contiguous() for k, v in small(family).state_dict().items()}, tmp_path / "c.safetensors")
    data = (tmp_path / "c.safetensors").read_bytes()
    (tmp_path / "c.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        load(family, tmp_path / "c.safetensors", **small_constructor(family))


def test_listing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for family in families():
        assert f"{family}: " in text
        for name in family_of(family).checkpoints:
            assert name in text
    assert "compofa_mbv3: 7,664,760 parameters, 243 subnets" in text
    assert "axis         depth[6]: 2, 3, 4 | 1" in text


@pytest.mark.parametrize("family", GOLDENS)
def test_inspect(family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(GOLDEN / family / "state_dict.safetensors")
    assert main(["inspect", path]) == 0
    text = capsys.readouterr().out
    said = f"trained as {family}" if family == "dynabert" else f"looks like {family}"
    assert f"{said}, published at {family_of(family).source}" in text
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in golden_state(family).items()}}, tmp_path / "c.pth"
    )
    assert main(["inspect", str(tmp_path / "c.pth")]) == 0
    text = capsys.readouterr().out
    assert said in text
    assert ("has the names of a BERT or RoBERTa: make it elastic with" in text) == (family == "dynabert")


def test_ordinary_models_are_no_family() -> None:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    transformers = pytest.importorskip("transformers")
    vit = timm.create_model("vit_tiny_patch16_224").state_dict()
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    bert = transformers.BertForSequenceClassification(config).state_dict()
    assert identify(vit) is identify(bert) is None
    with pytest.raises(CheckpointError, match=r"names of a vision transformer of timm: if it was trained as"):
        load("ofa_resnet50", vit)


def test_inspect_runs_no_code_and_explains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
            return (tmp_path / "ran").touch, ()

    torch.save({"state_dict": Evil()}, tmp_path / "evil.pth")
    assert main(["inspect", str(tmp_path / "evil.pth")]) == 2
    assert not (tmp_path / "ran").exists()
    said = capsys.readouterr().err
    assert "holds more than tensors" in said
    assert "weights_only=False" not in said
    assert "add_safe_globals" not in said
    assert said.isprintable() or said.rstrip().isprintable()
    assert main(["inspect", str(tmp_path / "absent.pth")]) == 2
    assert "no file is there" in capsys.readouterr().err


def _self_referential() -> Any:
    content: dict[str, Any] = {}
    content["state_dict"] = content
    return content


HOSTILE: dict[str, tuple[Callable[[dict[str, Any], str], Any], str]] = {
    "self-referential": (lambda state, name: _self_referential(), "entries that are not tensors: state_dict"),
    "sparse": (lambda state, name: {**state, name: state[name].to_sparse()}, "of layout torch.sparse_coo"),
    "compressed": (
        lambda state, name: {**state, name: state[name].reshape(len(state[name]), -1).to_sparse_csr()},
        "of layout torch.sparse_csr",
    ),
    "on no device": (lambda state, name: {**state, name: state[name].to("meta")}, "without values"),
    "nested": (
        lambda state, name: {
            **state,
            name: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        },
        "nested|of layout",
    ),
    "quantised": (
        lambda state, name: {**state, name: torch.quantize_per_tensor(state[name], 0.1, 0, torch.qint8)},
        "quantised",
    ),
    "complex": (lambda state, name: {**state, name: state[name].to(torch.complex64)}, "torch.complex64"),
    "whole numbers": (lambda state, name: {**state, name: state[name].to(torch.int64)}, "is torch.int64"),
    "not a number": (lambda state, name: {**state, name: state[name] * float("nan")}, "NaN or infinite"),
    "huge claim": (
        lambda state, name: {**state, name: torch.zeros(1).expand(10**6, 10**6)},
        "claim 4,000,0.*bytes",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.filterwarnings(
    "ignore:Sparse CSR|The PyTorch API of nested|torch.quantize_per_tensor|TypedStorage:UserWarning"
)
def test_hostile_checkpoints(kind: str, tmp_path: Path) -> None:
    change, words = HOSTILE[kind]
    state = golden_state("ofa_mbv3")
    name = next(name for name, tensor in state.items() if tensor.is_floating_point())
    try:
        torch.save(change(dict(state), name), tmp_path / "hostile.pth")
    except NotImplementedError:
        pytest.skip("this torch cannot save it")
    with pytest.raises(CheckpointError, match=words):
        load("ofa_mbv3", tmp_path / "hostile.pth", **small_constructor("ofa_mbv3"))
    assert main(["inspect", str(tmp_path / "hostile.pth")]) in (0, 2)


def test_weights_that_are_not_finite_load_on_demand() -> None:
    state = golden_state("ofa_mbv3")
    name = next(name for name, tensor in state.items() if tensor.is_floating_point())
    diverged = {**state, name: state[name] * float("inf")}
    load("ofa_mbv3", diverged, allow_nonfinite=True, **small_constructor("ofa_mbv3"))


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pth")
    with pytest.raises(CheckpointError, match="a pipe and not a file"):
        load("ofa_mbv3", tmp_path / "pipe.pth")
