"""Changes bundles of every kind, and reads them: an error of the library or a correct load, nothing executed.

A change is an accident, of which checksums tell, or hostile: then all checksums are right, as an attacker can
make them. An audit hook watches what reading does.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fuzz.inputs import NASTY, Finding, changed_once, damaged, json_file, signed, tensor_file, text
from small_families import small_supernet
from small_models import small_model
from torch import nn

from subnetact import Engine, LatencyTable, calibrate, describe, from_pretrained, insert_
from subnetact.digits import load_digits_supernet
from subnetact.elastic.__main__ import main
from subnetact.errors import SubnetActError

__all__ = ["KINDS", "fuzz_folder", "saved"]

KINDS = ("digits", "decoder", "encoder", "mixture", "timm", "torchvision", "autoformer", "own")
INDEX, SHARDS = "elastic.json", "model.safetensors.index.json"
NAMES = (
    *("os.system", "builtins.eval", "subprocess.Popen", "torch.load", "evil", "evil.py--Evil", "evil/kernel"),
    *("__import__('os').mkdir('executed')", "hf-hub:evil/evil", "local-dir:../outside", "../outside/evil.py"),
    *("http://127.0.0.1:9/evil", "file:///etc/hostname", "../outside/model.safetensors", "/etc/hostname"),
    *("PreTrainedModel", "AutoModel", "Trainer", "pipeline", "GPT2LMHeadModel", "LlamaForCausalLM"),
    *("resnet18", "vit_tiny_patch16_224", "quantized_resnet18", "raft_small", "ofa_mbv3", "digits"),
)
"""What may stand where a file names a factory, a function, a module or a file."""
LIBRARIES = ("subnetact", "ofa_adapters", "transformers", "timm", "torchvision", "os", "evil", "../outside")
ARGUMENTS: dict[str, Any] = {
    **{"pretrained": True, "checkpoint_path": "/etc/hostname", "weights": "DEFAULT", "scriptable": True},
    **{"pretrained_cfg": {"url": "http://127.0.0.1:9/evil", "file": "../outside/model.safetensors"}},
    **{"pretrained_cfg_overlay": {"hf_hub_id": "evil/evil"}, "cache_dir": "../outside", "progress": True},
    **{"features_only": True, "act_layer": "os.system", "norm_layer": "evil", "num_classes": 10**9},
    **{"depth": 10**6, "embed_dim": 10**7, "attention": "evil/kernel", "img_size": 10**6, "patch_size": 0},
    **{"config": {"hidden_size": 10**6}, "checkpoint": "../outside/model.safetensors", "block_fn": "eval"},
}
FIELDS: dict[str, Any] = {
    **{"auto_map": {"AutoModel": "evil.py--Evil"}, "attn_implementation": "evil/kernel"},
    **{"_name_or_path": "x", "_attn_implementation": "evil/kernel"},
    **{"quantization_config": {"quant_method": "gptq", "bits": 4}},
    **{"custom_generate": "evil", "use_kernels": True, "architectures": ["os.system"], "num_labels": 10**9},
    **{"torch_dtype": "os.system", "dtype": "float64", "model_type": "evil", "hidden_act": "os.system"},
    **{"transformers_weights": "../outside/model.safetensors", "vocab_size": 10**9, "is_decoder": True},
    **{"num_hidden_layers": 10**9, "hidden_size": 10**8, "intermediate_size": 2**40, "head_dim": 2**31},
    **{"max_position_embeddings": 10**9, "rope_parameters": {"rope_type": "os.system"}, "num_experts": 10**7},
    **{"fusion_config": {"evil": "evil"}, "base_model_tp_plan": {"*": "evil"}, "id2label": {"x": "y"}},
    **{"distributed_config": {"tp_size": 10**6}, "layer_types": ["x"] * 10**5, "tie_word_embeddings": None},
}
"""Fields with which a `config.json` may try to make transformers do more than build a model."""


def fuzz_folder(source: random.Random, place: Path) -> None:
    """Change a bundle, and read it in one of the ways that there are."""
    kind = source.choice(KINDS)
    folder = place / "folder"
    shutil.copytree(saved(kind), folder)
    (place / "outside").mkdir()
    (place / "outside" / "evil.py").write_text("import os; os.mkdir('executed')\n")
    shutil.copy(folder / "norms.safetensors", place / "outside" / "model.safetensors")
    document = json.loads((folder / INDEX).read_text())
    fingerprint = document["fingerprint"]
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        source.choice(CHANGES)(folder, document, source)
    accident = source.random() < 0.25
    index = folder / INDEX
    if not accident and index.is_file() and isinstance(document, dict):
        signed(index, document)
    with watched(place):
        supernet = _read(folder, kind, accident, source)
    if accident and supernet is not None and supernet.fingerprint() != fingerprint:
        raise Finding(f"{kind}: a bundle that was changed by accident is read as another one")


def _read(folder: Path, kind: str, accident: bool, source: random.Random) -> Any:
    own = network() if kind == "own" else None
    before = None if own is None else {name: t.clone() for name, t in own.state_dict().items()}
    way = source.choice(("supernet", "subnet", "engine", "check", "card"))
    try:
        if way == "supernet" or accident:
            return from_pretrained(folder, model=own, verify=accident)
        if way == "subnet":
            from_pretrained(folder, "small", model=own, mapped=source.random() < 0.5)
        elif way == "engine" and own is None:
            Engine.load(folder, allow_uncalibrated=True)
        elif main([str(folder), "--card"] if way == "card" else [str(folder)]) not in (0, 2):
            raise Finding(f"exit status of python -m subnetact.elastic, {way}")
    except SubnetActError:
        if own is not None and any(not torch.equal(t, before[name]) for name, t in own.state_dict().items()):
            raise Finding("the given model is not as it was") from None
        raise
    return None


# -- seeds ------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval()


@cache
def saved(kind: str) -> Path:
    """Return a valid bundle of a small model; that of the decoder has several files of weights."""
    supernet: Any
    if kind == "digits":
        supernet = load_digits_supernet()
        images = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
        calibrate(supernet, [supernet.space.smallest()], [images], progress=False)
    elif kind == "autoformer":
        supernet = small_supernet(kind)
    elif kind == "own":
        supernet = insert_(network(), example=torch.randn(3, 4))
    else:
        model, x, options = small_model(kind)
        supernet = insert_(model, describe(model, x, **options), example=x)
        if kind == "encoder":
            supernet.enable_precision("bfloat16")
    space, folder = supernet.space, Path(tempfile.mkdtemp(prefix="subnetact-fuzz-")) / kind
    subnets = {"small": space.smallest(), "large": space.largest()}
    keys = [spec.key for spec in subnets.values()]
    table = LatencyTable(keys, [60.0, 70.0], [1, 2], [[1.0, 2.0], [2.0, 3.0]])
    facts = {"quality": {"small": {"accuracy": 60.0}}, "source": "made up", "tables": {"cpu": table}}
    shard_bytes = 2**13 if kind == "decoder" else 2**40
    supernet.save_pretrained(folder, subnets=subnets, licence="mit", shard_bytes=shard_bytes, **facts)
    if kind == "digits":
        again: Any = from_pretrained(folder, mapped=False)  # It knows the names of subnets.
        x = torch.zeros(1, 1, 16, 16)
        engine = Engine(again, list(subnets.values()), example=x, allow_uncalibrated=True)
        engine.tables["cpu"] = table
        engine.save(folder)
    (folder / "evil.py").write_text("import os; os.mkdir('executed')\n")
    return folder


# -- changes ----------------------------------------------------------------------------------------


def _any_file(folder: Path, source: random.Random, suffix: str = "") -> Path:
    files = [p for p in sorted(folder.iterdir()) if p.name.endswith(suffix) and p.is_file()]
    return source.choice(files or [folder / "model.safetensors"])


def change_bytes(folder: Path, document: dict[str, Any], source: random.Random) -> None:
    path = _any_file(folder, source)
    path.write_bytes(damaged(path.read_bytes() if path.is_file() else b"", source))


def change_files(folder: Path, document: dict[str, Any], source: random.Random) -> None:
    """Remove a file, or put something else in its place."""
    path, other = _any_file(folder, source), _any_file(folder, source)
    data = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    links = (path, "/dev/zero", folder.parent / "outside" / "model.safetensors")
    foreign, old = saved(source.choice(KINDS)), other.read_bytes() if other.is_file() else b""
    puts: list[Callable[[], Any]] = [lambda: None, path.touch, path.mkdir, lambda: os.mkfifo(path)]
    puts += [lambda link=link: path.symlink_to(link) for link in links]
    puts += [lambda: path.write_bytes(_any_file(foreign, source).read_bytes())]
    puts += [lambda: path.write_bytes(old) and other.write_bytes(data)]
    source.choice(puts)()


def change_json(folder: Path, document: dict[str, Any], source: random.Random) -> None:
    """Change a file of JSON: a value, its bytes, or all of it into many brackets."""
    path = _any_file(folder, source, ".json")
    if path.name == INDEX:
        change_index(folder, document, source)
    elif source.random() < 0.1:
        path.write_bytes(source.choice((b"[", b'{"a":')) * 10 ** source.choice((3, 5)))
    elif path.is_file():
        _json_file(path, source)


def _json_file(path: Path, source: random.Random) -> None:
    try:
        json_file(path, source)
    except (ValueError, RecursionError):  # Another change has damaged it before.
        path.write_bytes(text(source.choice(NASTY)))


def change_index(folder: Path, document: dict[str, Any], source: random.Random) -> None:
    kind = source.random()
    if kind < 0.1:
        document[source.choice(("x", "code", "__class__", "auto_map"))] = source.choice((*NASTY, *NAMES))
    elif kind < 0.2:
        document.pop(source.choice(list(document)), None)
    else:
        key = source.choice(list(document))
        document[key] = source.choice(NAMES) if kind < 0.3 else changed_once(document[key], source)
    if not (folder / INDEX).is_dir():
        (folder / INDEX).unlink(missing_ok=True)  # Another change may have put a pipe there.
        (folder / INDEX).write_bytes(text(document))


def change_model(folder: Path, document: dict[str, Any], source: random.Random) -> None:
    stated = document.get("model")
    stated = dict(stated) if isinstance(stated, dict) else {"library": "timm", "name": "x", "arguments": {}}
    kind = source.random()
    if kind < 0.3:
        stated["library"] = source.choice(LIBRARIES)
    if kind < 0.6:
        stated["name"] = source.choice(NAMES)
    if kind > 0.5:
        name = source.choice(list(ARGUMENTS))
        given = stated["arguments"] if isinstance(stated.get("arguments"), dict) else {}
        stated["arguments"] = {**given, name: source.choice((ARGUMENTS[name], *NASTY))}
    document["model"] = stated


def change_config(folder: Path, document: dict[str, Any], source: random.Random) -> None:
    """Add fields to `config.json` that a library may obey, or make its numbers huge."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text()) if path.is_file() else {}
    except (ValueError, RecursionError):
        config = {}
    if path.is_dir() or not isinstance(config, dict):
        return
    numbers = [name for name, value in config.items() if isinstance(value, int | float)]
    if numbers and source.random() < 0.4:
        config[source.choice(numbers)] = source.choice((10**9, 2**31, 2**63, -1, 0, 1e300, 10**6, 0.5, 3))
    else:
        name = source.choice(list(FIELDS))
        config[name] = source.choice((FIELDS[name], FIELDS[name], source.choice((*NASTY, *NAMES))))
    path.unlink(missing_ok=True)
    path.write_bytes(text(config))


def change_tensors(folder: Path, document: dict[str, Any], source: random.Random) -> None:
    path = _any_file(folder, source, ".safetensors")
    if not path.is_file():
        return
    try:
        tensor_file(path, source)
    except Exception:  # Another change has damaged it before.
        path.unlink(missing_ok=True)


def change_shards(folder: Path, document: dict[str, Any], source: random.Random) -> None:
    """Say that tensors lie in other files."""
    path = folder / SHARDS
    names = [*NAMES, INDEX, "norms.safetensors", "model.safetensors", "./model.safetensors", ""]
    try:
        placed = json.loads(path.read_text() if path.is_file() else "{}")["weight_map"]
        placed[source.choice(list(placed))] = source.choice((*names, *NASTY))
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        placed = {"x": source.choice(names)}
    if not path.is_dir():
        path.unlink(missing_ok=True)
        path.write_bytes(text({"weight_map": placed}))


def change_listing(folder: Path, document: dict[str, Any], source: random.Random) -> None:
    """List files that lie elsewhere, or let a field name one."""
    name = source.choice((*NAMES, "config.json", INDEX, "a/b", "\0", "."))
    field = source.choice(("files", "files", "statistics", "shared_statistics", "tables"))
    known = {"bytes": 0, "sha256": "0" * 64}
    if field in ("files", "tables"):
        listed = document.get(field)
        listed = listed if isinstance(listed, dict) else {}
        document[field] = {**listed, name: known if field == "files" else "cpu"}
    else:
        document[field] = name
        if isinstance(document.get("files"), dict) and source.random() < 0.5:
            document["files"][name] = known


CHANGES: tuple[Callable[[Path, dict[str, Any], random.Random], None], ...] = (
    *(change_bytes, change_files, change_json, change_index, change_index, change_model, change_model),
    *(change_config, change_config, change_tensors, change_tensors, change_shards, change_listing),
)


# -- what reading may not do ------------------------------------------------------------------------

FORBIDDEN = {
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"),
    *("subprocess.Popen", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"),
    *("urllib.Request", "http.client.connect", "pickle.find_class", "webbrowser.open"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.link", "os.symlink"),
    *("os.truncate", "shutil.rmtree", "shutil.move", "shutil.copyfile", "tempfile.mkstemp", "os.kill"),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_place: Path | None = None
_seen: list[str] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _place is None:
        return
    outside, bad = f"{_place}/outside", event in FORBIDDEN
    if event == "open":
        path, flags = str(args[0]), args[2]
        written = isinstance(flags, int) and flags & _WRITING
        bad = path.startswith(outside) or bool(written and path != os.devnull and "__pycache__" not in path)
    elif event == "import":
        bad = str(args[0]).split(".")[0] == "evil" or str(args[1]).startswith(str(_place))
    elif event == "exec":
        bad = getattr(args[0], "co_filename", "").startswith(str(_place))
    elif event == "compile":
        bad = b"executed" in (args[0] if isinstance(args[0], bytes) else str(args[0]).encode())
    if bad and "torchinductor" not in str(args[:1]):  # a folder that importing a part of torch makes
        _seen.append(f"{event} {args!r:.200}")


_hooked = cache(lambda: sys.addaudithook(_audit))


@contextmanager
def watched(place: Path) -> Iterator[None]:
    """Raise Finding if the block runs code of a file, starts a process, connects, or writes anywhere."""
    global _place
    _hooked()
    _seen.clear()
    _place = place
    try:
        yield
    finally:
        _place = None
        if _seen:
            raise Finding(f"reading a bundle did what it must not: {_seen[:3]}")
