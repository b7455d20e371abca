"""An export from an attacker runs no code: not when it is loaded, and not when it is called."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import subnetact
from subnetact.digits import load_digits_supernet
from subnetact.errors import ExportError, FileFormatError, SubnetActError
from subnetact.export import load_exported, to_exported_programs

IMAGES = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
Document = dict[str, Any]
MARK = "pwned"
CODE = f"__import__('pathlib').Path('{MARK}').touch()"


class Payload:
    def __reduce__(self) -> Any:
        return eval, (CODE,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    supernet = load_digits_supernet()
    specs = [supernet.space.smallest()]
    subnetact.calibrate(supernet, specs, [IMAGES], progress=False)
    engine = subnetact.Engine(supernet, specs, example=IMAGES[0])
    return to_exported_programs(engine, tmp_path_factory.mktemp("x") / "p", progress=False)


def checksum(document: Document) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def sign(folder: Path, **facts: Any) -> None:
    """Write the manifest again, as an attacker does who can compute checksums."""
    path = folder / "export.json"
    document = {**json.loads(path.read_text()), **facts}
    document.pop("checksum")
    for name in document["files"]:
        data = (folder / name).read_bytes()
        document["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps({**document, "checksum": checksum(document)}))


def rewrite(folder: Path, change: Callable[[dict[str, bytes]], None], compressed: bool = False) -> None:
    path = folder / "program-0.pt2"
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    change(records)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        for name, payload in records.items():
            archive.writestr(name, payload)
    sign(folder)


def graph(change: Callable[[Document], None]) -> Callable[[dict[str, bytes]], None]:
    def whole(records: dict[str, bytes]) -> None:
        (name,) = (name for name in records if name.endswith("/models/model.json"))
        document = json.loads(records[name])
        change(document)
        records[name] = json.dumps(document).encode()

    return whole


def nodes(document: Document) -> list[Document]:
    found: list[Document] = document["graph_module"]["graph"]["nodes"]
    return found


def everywhere(key: str, value: Any) -> Callable[[Document], None]:
    """Replace every value under a key, wherever the key is."""

    def replaced(part: Any) -> Any:
        if isinstance(part, dict):
            return {k: value if k == key else replaced(v) for k, v in part.items()}
        return [replaced(one) for one in part] if isinstance(part, list) else part

    return lambda document: document.update(replaced(document))


def call(target: str, **arguments: Any) -> Callable[[Document], None]:
    """Append a call to the graph, as an attacker would who knows the format."""

    def change(document: Document) -> None:
        inputs = [{"name": name, "arg": arg, "kind": 2} for name, arg in arguments.items()]
        outputs = [{"as_tensor": {"name": "attack"}}]
        nodes(document).append({"target": target, "inputs": inputs, "outputs": outputs, "metadata": {}})

    return change


def first(**facts: Any) -> Callable[[Document], None]:
    return lambda document: nodes(document)[0].update(facts)


STRING = {"as_string": MARK}
IGNORED: dict[str, Callable[[Document], None]] = {
    "expression": everywhere("expr_str", CODE),
    "guards": lambda document: document.update(guards_code=[CODE, f"L['x'].size()[0] > 0 or {CODE}"]),
    "range": lambda document: document.update(range_constraints={CODE: {"min_val": 1, "max_val": None}}),
    "stack trace": everywhere("metadata", {"stack_trace": CODE, "source_fn_stack": f"x,{CODE}"}),
    "module stack": everywhere("nn_module_stack", f"a,{CODE},{CODE}"),
    "input structure": everywhere("in_spec", f'[1, {{"type": "{CODE}"}}]'),
    "argument names": everywhere("forward_arg_names", [f"x=({CODE})"]),
    "node name": first(name=f"x); {CODE}; ("),
}
REFUSED: dict[str, Callable[[Document], None]] = {
    "system": first(target="torch.os.system"),
    "hub": first(target="torch.hub.load"),
    "eval": first(target="_operator.methodcaller"),
    "attribute": first(target="torch.ops.aten.__class__.mro"),
    "dunder": first(target="torch.ops.aten.relu.__init__"),
    "another space": first(target="torch.ops.profiler._record_function_enter.default"),
    "extension": first(target="#CODE"),
    "not a string": first(target=["torch.ops.aten.relu.default"]),
    "power": first(target="_operator.pow"),
    "save": call("torch.ops.aten.save.default", item=STRING, filename=STRING),
    "from_file": call("torch.ops.aten.from_file.default", filename=STRING, shared={"as_bool": True}),
    "print": call("torch.ops.aten._print.default", s=STRING),
    "unwritten memory": call("torch.ops.aten.empty.memory_format", size={"as_ints": [10**6]}),
    "sparse": call("torch.ops.aten._sparse_coo_tensor_unsafe.default", size={"as_ints": [1]}),
    "custom object": call(
        "torch.ops.aten.relu.default", self={"as_custom_obj": {"name": "x", "class_fqn": "y"}}
    ),
    "operator argument": call("torch.ops.aten.relu.default", self={"as_operator": "torch.os.system"}),
    "unknown value": call("torch.ops.aten.relu.default", self={"as_tensor": {"name": "nowhere"}}),
    "huge number": call("torch.ops.aten.relu.default", self={"as_int": 10**400}),
    "another device": call("torch.ops.aten.relu.default", self={"as_device": {"type": "meta", "index": 0}}),
    "no argument": first(inputs=[{"name": "x", "arg": {}}]),
    "two of a name": lambda document: nodes(document).append(nodes(document)[0]),
    "output type": everywhere(
        "out_spec", '[1, {"type": "os.system", "context": "null", "children_spec": []}]'
    ),
    "output not JSON": everywhere("out_spec", CODE),
    "deep output": everywhere("out_spec", "[" * 5000),
    "more outputs": lambda document: document["graph_module"]["graph"]["outputs"].append(
        {"as_tensor": {"name": "x"}}
    ),
    "mutation": lambda document: document["graph_module"]["signature"].update(
        output_specs=[{"buffer_mutation": {"arg": {"name": "linear"}, "buffer_name": "bn.running_mean"}}]
    ),
    "another tensor": everywhere("parameter_name", "../../etc/passwd"),
    "nothing": lambda document: document.clear(),
    "another version": lambda document: document.update(schema_version={"major": 9, "minor": 0}),
    "wrong types": lambda document: document.update(graph_module=[[[]]]),
}


@pytest.fixture
def copy(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.mark.parametrize("name", IGNORED)
def test_strings_in_a_graph_are_not_evaluated(folder: Path, copy: Path, name: str) -> None:
    rewrite(copy, graph(IGNORED[name]))
    torch.testing.assert_close(load_exported(copy)(IMAGES, subnet=0), load_exported(folder)(IMAGES, subnet=0))
    assert not (copy.parent / MARK).exists()


@pytest.mark.parametrize("name", REFUSED)
def test_other_steps_are_refused(copy: Path, name: str) -> None:
    rewrite(copy, graph(REFUSED[name]))
    with pytest.raises(FileFormatError, match=r"program-0\.pt2: not a program"):
        load_exported(copy)
    assert not (copy.parent / MARK).exists()


def test_other_records_are_not_read(folder: Path, copy: Path) -> None:
    def change(records: dict[str, bytes]) -> None:
        root = next(iter(records)).split("/")[0]
        for name in list(records):
            if "sample_inputs" in name or "weight_" in name:
                records[name] = pickle.dumps(Payload())
        records[f"{root}/data/aotinductor/model/evil.so"] = b"\x7fELF"
        records[f"{root}/data/constants/custom_obj_0"] = pickle.dumps(Payload())
        records[f"{root}/extra/code.py"] = CODE.encode()

    rewrite(copy, change)
    torch.testing.assert_close(load_exported(copy)(IMAGES, subnet=0), load_exported(folder)(IMAGES, subnet=0))
    assert not (copy.parent / MARK).exists()


def test_an_archive_that_is_none_is_refused(copy: Path) -> None:
    def doubled(records: dict[str, bytes]) -> None:
        records["other/models/model.json"] = b"{}"

    for change, compressed, words in (
        (doubled, False, "too many values"),
        (lambda records: records.clear(), False, "not enough values"),
        (lambda records: None, True, "is compressed"),
        (lambda records: records.update({"a/models/model.json": b"[" * 10**6}), False, "not enough|too many"),
    ):
        again = Path(shutil.copytree(copy, copy.parent / f"again{words[:5]}{compressed}", dirs_exist_ok=True))
        rewrite(again, change, compressed)
        with pytest.raises(FileFormatError, match=words):
            load_exported(again)
    (copy / "program-0.pt2").write_bytes(b"no archive")
    sign(copy)
    with pytest.raises(FileFormatError, match="not a program of"):
        load_exported(copy)


def test_whole_numbers_stay_small(copy: Path) -> None:
    def square(document: Document) -> None:
        steps = nodes(document)
        arg: Document = {"as_int": 2**40}
        for i in range(40):
            steps.append(
                {
                    "target": "_operator.mul",
                    "inputs": [{"name": "", "arg": arg, "kind": 1}] * 2,
                    "outputs": [{"as_sym_int": {"as_name": f"n{i}"}}],
                    "metadata": {},
                }
            )
            arg = {"as_sym_int": {"as_name": f"n{i}"}}

    rewrite(copy, graph(square))
    loaded = load_exported(copy)
    with pytest.raises(SubnetActError, match="more than 64 bits"):
        loaded(IMAGES, subnet=0)


@pytest.mark.parametrize("path", ["/dev/zero", "../copy/program-0.pt2", "missing.pt2"])
def test_paths_outside_the_folder_are_refused(copy: Path, path: str) -> None:
    document = json.loads((copy / "export.json").read_text())
    document["subnets"][0]["program"] = path
    sign(copy, subnets=document["subnets"])
    with pytest.raises(FileFormatError, match="does not list"):
        load_exported(copy)


def test_a_claimed_input_is_bounded(copy: Path) -> None:
    sign(copy, example=["float32", [10**6, 10**6]])
    with pytest.raises(FileFormatError, match="an input of shape"):
        load_exported(copy)


def test_native_code_needs_trust(copy: Path) -> None:
    document = json.loads((copy / "export.json").read_text())
    sign(
        copy, compile="aoti", capability=str(torch.backends.cpu.get_cpu_capability()), torch=document["torch"]
    )
    with pytest.raises(ExportError, match=r"native code.*trusted=True"):
        load_exported(copy)
