"""A folder holds every size: bit-equal in a new process, and its own library opens the largest alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_families import small_inputs, small_supernet
from small_models import IMAGES, TOKENS, small_model

from ofa_adapters import families
from subnetact import Engine, LatencyTable, SubnetSpec, Supernet, describe, from_pretrained, insert_
from subnetact.elastic.__main__ import main
from subnetact.errors import FileFormatError, InsertError, SpecError
from subnetact.supernet.batches import call_with, tensors_of

for package in ("torchvision", "timm", "transformers"):
    pytest.importorskip(package)
pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


CUT = {  # what the library's own class can have: the same share in every layer, or fewer layers in a stage
    "decoder": {"depth": 0.5, "ffn": 0.5},
    "encoder": {"depth": 0.5, "ffn": 0.5},
}


def chosen(supernet: Supernet, choices: dict[str, Any]) -> SubnetSpec:
    return supernet.space.spec(**{axis.name: choices.get(axis.name, 1.0) for axis in supernet.space.axes})


def outputs(network: Any, x: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(tensors_of(call_with(network, x)))[:1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with a bundle per library and per family, and in `expected` what their subnets answer."""
    place = tmp_path_factory.mktemp("folders")
    (place / "expected").mkdir()
    for name in ("torchvision", "timm", "decoder", "encoder", "mixture", *families()):
        if name in families():
            supernet, x = small_supernet(name), small_inputs(name)
        else:
            model, x, options = small_model(name)
            supernet = insert_(model, describe(model, x, **options), example=x)
        space = supernet.space
        subnets = {"small": space.smallest(), "middle": space.sample(1), "large": space.largest()}
        supernet.save_pretrained(place / name, subnets=subnets, licence="mit")
        if name in CUT:
            subnets["cut"] = chosen(supernet, CUT[name])
            supernet.save_pretrained(place / f"{name}-cut", only=subnets["cut"], example=x)
            assert not (place / f"{name}-cut" / "elastic.json").exists()
        answers = {n: outputs(supernet.subnet(s), x)[0] for n, s in subnets.items()}
        inputs = x if isinstance(x, dict) else {"x": x}
        save_file({**inputs, **{f"answer.{n}": t for n, t in answers.items()}}, place / "expected" / name)
    return place


IN_A_NEW_PROCESS = """
import sys, os, torch
from pathlib import Path
from safetensors.torch import load_file
import timm, torchvision, transformers
torch.set_num_threads(1)
place = Path(sys.argv[1])
def check(name, network, answer):
    facts = load_file(place / "expected" / name)
    with torch.no_grad():
        found = network.eval()(facts["x"])
    found, atol = getattr(found, "logits", found), 5e-5 if answer == "cut" else 0
    torch.testing.assert_close(found, facts["answer." + answer], rtol=0, atol=atol)
shufflenet = torchvision.models.shufflenet_v2_x0_5(num_classes=5)
shufflenet.load_state_dict(load_file(place / "torchvision" / "model.safetensors"))
check("torchvision", shufflenet, "large")
options = dict(img_size=32, patch_size=8, depth=2, num_classes=5)
checkpoint = str(place / "timm" / "model.safetensors")
check("timm", timm.create_model("vit_tiny_patch16_224", checkpoint_path=checkpoint, **options), "large")
check("decoder", transformers.AutoModelForCausalLM.from_pretrained(place / "decoder"), "large")
check("mixture", transformers.AutoModelForCausalLM.from_pretrained(place / "mixture"), "large")
check("encoder", transformers.AutoModelForSequenceClassification.from_pretrained(place / "encoder"), "large")
for name in ("decoder", "encoder"):
    code = (place / f"{name}-cut" / "README.md").read_text().split("```")[1].removeprefix("python")
    made = {}
    exec(code.replace("folder", str(place / f"{name}-cut")), made)
    check(name, made["model"], "cut")
assert "subnetact" not in sys.modules

import subnetact
from subnetact.supernet.batches import call_with, tensors_of
for path in sorted((place / "expected").iterdir()):
    facts = load_file(path)
    x = {n: t for n, t in facts.items() if not n.startswith("answer.")}
    x = x["x"] if set(x) == {"x"} else x
    one = path.name in ("ofa_mbv3", "timm", "decoder")  # Mapping does not depend on the network.
    for mapped in (False, True)[: 1 + one]:
        supernet = subnetact.from_pretrained(place / path.name, mapped=mapped, verify=not mapped)
        for name, spec in supernet.card.subnets.items():
            answer, off = facts[f"answer.{name}"], 5e-5 if mapped else 0.0
            with torch.no_grad():
                found = next(iter(tensors_of(call_with(supernet.subnet(spec), x))))
            torch.testing.assert_close(found, answer, rtol=off, atol=off)
            if not mapped:
                print(path.name, name)
"""


def test_libraries_open_the_largest_and_cut_outs_and_sizes_are_bit_equal(saved: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_A_NEW_PROCESS, str(saved)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == 2 * 3 * (5 + len(families()))


def test_subnets_that_no_class_can_have_are_refused_with_the_reason(saved: Path, tmp_path: Path) -> None:
    words = {
        "torchvision": ({"width": 0.5}, "only a model of transformers can be cut out"),
        "timm": ({"depth": 0.5}, "only a model of transformers can be cut out"),
        "encoder": ({"heads": 0.5}, "no configuration of BertForSequenceClassification describes this"),
    }
    for name, (choices, message) in words.items():
        supernet: Any = from_pretrained(saved / name)
        x = load_file(saved / "expected" / name)["x"]
        with pytest.raises(InsertError, match=message):
            supernet.save_pretrained(tmp_path / "cut", only=chosen(supernet, choices), example=x)
    family: Any = from_pretrained(saved / "hydravit")
    with pytest.raises(InsertError, match="only a model of transformers can be cut out"):
        family.save_pretrained(tmp_path / "cut", only="small", example=IMAGES)
    assert not (tmp_path / "cut").exists()
    with pytest.raises(SpecError, match="give example=x"):
        supernet.save_pretrained(tmp_path / "cut", only="large")
    with pytest.raises(FileFormatError, match="choose a new directory"):
        supernet.save_pretrained(saved / "encoder", only="large", example=x)


def test_the_subnets_of_a_language_model_are_in_its_vocabulary(saved: Path) -> None:
    document = json.loads((saved / "decoder" / "elastic.json").read_text())
    small = document["subnets"]["small"]["config"]
    assert {"intermediate_size"} <= {field for fields in small.values() for field in fields}
    supernet: Any = from_pretrained(saved / "decoder")
    assert supernet.space.parse(small) == supernet.space.smallest() == supernet.card.subnets["small"]
    assert supernet.card.licence == "mit"
    view = from_pretrained(saved / "decoder", subnet=small)
    expected = load_file(saved / "expected" / "decoder")["answer.small"]
    assert torch.equal(outputs(view, TOKENS)[0], expected)
    with pytest.raises(SpecError, match="no subnet is called 'tiny'; choose from small, middle, large"):
        from_pretrained(saved / "decoder", subnet="tiny")


def test_the_folder_is_written_again_with_what_was_known_and_added(saved: Path, tmp_path: Path) -> None:
    supernet: Any = from_pretrained(saved / "torchvision")
    table = LatencyTable([supernet.space.largest().key], [70.0], [1], [[2.5]], stamp={"device": "a CPU"})
    figures = {"large": {"accuracy": 70.0, "top5": 90.0}}
    supernet.save_pretrained(tmp_path / "f", quality=figures, source="made up", tables={"cpu": table})
    (tmp_path / "f" / "README.md").write_text("mine")
    (tmp_path / "f" / "1_Pooling").mkdir()
    (tmp_path / "f" / "1_Pooling" / "config.json").write_text("{}")
    again: Any = from_pretrained(tmp_path / "f")
    again.save_pretrained(tmp_path / "f", subnets={"large": again.space.largest()})
    document = json.loads((tmp_path / "f" / "elastic.json").read_text())
    assert document["subnets"]["large"]["quality"]["top5"] == {"value": 90.0, "source": "made up"}
    assert document["licence"] == "mit"
    assert document["model"]["name"] == "shufflenet_v2_x0_5"
    names = {path.name for path in (tmp_path / "f").iterdir()}
    assert "README.md" in names
    assert (tmp_path / "f" / "1_Pooling" / "config.json").read_text() == "{}"
    assert "latency-0.json" not in names
    again.network.conv1[0].weight.data.add_(1.0)
    before = supernet.subnet(supernet.space.largest())(IMAGES)
    fresh: Any = from_pretrained(tmp_path / "f", subnet="large")
    assert torch.equal(fresh(IMAGES), before), "training in memory changes no file"


def test_an_engine_serves_the_folder_and_the_validator_and_the_card_read_it(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine.load(saved / "encoder", allow_uncalibrated=True)
    assert len(engine) == 3
    expected = load_file(saved / "expected" / "encoder")
    found = next(iter(tensors_of(engine(TOKENS, subnet=2))))
    torch.testing.assert_close(found, expected["answer.large"], rtol=1e-3, atol=1e-4)
    assert main([str(saved / "encoder")]) == 0
    assert "transformers BertForSequenceClassification" in capsys.readouterr().out
    assert main([str(saved / "encoder"), "--card"]) == 0
    card = capsys.readouterr().out
    assert card.startswith('---\nlicense: "mit"\nlibrary_name: subnetact\ntags: [elastic, transformers]')
    assert "| small |" in card
    (tmp_path / "elastic.json").write_text("{}")
    assert main([str(tmp_path)]) == 2


def test_names_stay_and_others_get_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    supernet = small_supernet("ofa_mbv3")
    small, large, middle, other = supernet.space.sample(0, 4)
    named = {small.key: small, "subnet-0": large, "mine": middle}  # earlier versions took keys as names
    tables = {
        name: LatencyTable([small.key], [60.0], [2], [[ms]], stamp=stamp)
        for name, ms, stamp in (("here", 2.5, {}), ("a", 3.5, {"device": "x"}), ("b", 4.5, {"device": "x"}))
    }
    figures = {small.key: {"accuracy": 60.0}}
    supernet.save_pretrained(tmp_path / "f", subnets=named, quality=figures, tables=tables)
    assert main([str(tmp_path / "f"), "--card"]) == 0
    card = capsys.readouterr().out
    assert "| accuracy | ms, batch size 2, here | ms, batch size 2, x | ms, batch size 2, x, b |\n" in card
    assert f"| {small.key} | " in card
    assert "| 60 | 2.5 | 3.5 | 4.5 |" in card
    options: Any = {"example": IMAGES, "allow_uncalibrated": True}
    engine = Engine(from_pretrained(tmp_path / "f"), [other, middle, small], **options)
    assert engine.names == ("subnet-1", "mine", small.key)
    engine.save(tmp_path / "f")
    again: Any = from_pretrained(tmp_path / "f")
    assert again.card.subnets == {**named, "subnet-1": other}
    loaded = Engine.load(tmp_path / "f", allow_uncalibrated=True)
    assert (loaded.names, loaded.accuracy) == (engine.names, (None, None, 60.0))
    sizes = [tensor.shape for tensor in supernet.extract(other).parameters()]
    for name in ("subnet-1", other.key):
        view = from_pretrained(tmp_path / "f", subnet=name)
        assert [tensor.shape for tensor in view.parameters()] == sizes


def test_weights_in_several_files_and_hostile_configurations(saved: Path, tmp_path: Path) -> None:
    """`auto_map` and kernels of a hub are left out; absurd depths are refused before anything is built."""
    from subnetact.elastic.factories import make_network

    supernet: Any = from_pretrained(saved / "decoder")
    supernet.save_pretrained(tmp_path / "decoder", shard_bytes=2**14)
    assert len(list((tmp_path / "decoder").glob("model-*.safetensors"))) > 1
    again: Any = from_pretrained(tmp_path / "decoder")
    assert again.fingerprint() == supernet.fingerprint()
    index = tmp_path / "decoder" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(FileFormatError, match="changed since it was written"):
        from_pretrained(tmp_path / "decoder")
    config = json.loads((saved / "decoder" / "config.json").read_text())
    hostile = {"auto_map": {"AutoModel": "evil.py--Evil"}, "attn_implementation": "evil/kernel"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **hostile}))
    factory = {"library": "transformers", "name": "LlamaForCausalLM", "arguments": {}}
    network: Any = make_network(factory, tmp_path, 10**6)
    assert network.config._attn_implementation in ("sdpa", "eager")
    assert not hasattr(network.config, "auto_map")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(FileFormatError, match="num_hidden_layers is 1000000000"):
        make_network(factory, tmp_path, 10**6)


def test_a_network_of_the_user_is_given_and_filled(tmp_path: Path) -> None:
    def network() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).eval()

    x = torch.randn(3, 4)
    supernet = insert_(network(), example=x)
    supernet.save_pretrained(tmp_path / "f")
    other = network()
    view = from_pretrained(tmp_path / "f", subnet="smallest", model=other)
    assert torch.equal(view(x), supernet.subnet(supernet.space.smallest())(x))
    other.load_state_dict(load_file(tmp_path / "f" / "model.safetensors"))
    with pytest.raises(FileFormatError, match=r"own network.*model="):
        from_pretrained(tmp_path / "f")
    with pytest.raises((FileFormatError, InsertError)):
        from_pretrained(tmp_path / "f", model=torch.nn.Linear(4, 2))
    with pytest.raises(SpecError, match="another network"):
        supernet.save_pretrained(
            tmp_path / "g", factory={"library": "torchvision", "name": "resnet18", "arguments": {}}
        )
    assert not (tmp_path / "g").exists()
