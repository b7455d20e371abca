"""`to_triton`: writes a model for NVIDIA Triton Inference Server."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.elastic.folder import INDEX
from subnetact.engine.engine import Engine
from subnetact.engine.inputs import DATATYPES, batch_like
from subnetact.errors import ExportError
from subnetact.export.subnet_program import chosen_specs, quiet, writing_folder
from subnetact.export.torchscript import to_torchscript
from subnetact.files.documents import StrPath
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.policies.registry import make_policy

TRITON_KIND = "subnetact.triton"
FLAVOURS = ("libtorch", "python")
TYPES = {dtype: name for dtype, name in DATATYPES.items() if dtype != torch.bfloat16}
"""Those of the types that Triton's interface of NumPy has."""


def to_triton(
    engine: Engine,
    repository: StrPath,
    flavour: str = "libtorch",
    *,
    name: str = "subnetact",
    table: LatencyTable | None = None,
    slo_ms: float | None = None,
    max_batch_size: int | None = None,
    external_scheduler: bool = False,
    queue_delay_us: int = 0,
    policy: str = "hullfit",
) -> Path:
    """Write one model, the directory `<repository>/<name>`, with its `config.pbtxt` and version 1.

    In the flavour "libtorch" the model is one TorchScript file, and the client chooses the subnet. INPUT__0
    is the batch (B, ...). INPUT__1 names the subnet by its shape (B, id + 1); its values are booleans and do
    not matter. Triton never batches inputs of different shapes, so its dynamic batching never mixes subnets.
    It warms up every subnet at batch sizes 1 and `max_batch_size` before it serves.
    Ids are positions among the subnets that the engine serves. With `external_scheduler` Triton does not
    batch (`max_batch_size: 0`): clients send whole batches, and INPUT__1 is the id, int64 of shape (1,).

    In the flavour "python" the model is a bundle and a short `model.py` around the `Batcher`. Its policy
    chooses the subnet of each batch by the request parameters `deadline_ms` and `min_accuracy`. The outputs
    are OUTPUT__0, the SUBNET (int32), and MET, whether the deadline was met, each with one entry per sample.
    Triton's Python needs subnetact installed.

    Args:
        engine: the engine with the subnets, the example input and the device.
        repository: the model repository; other models in it are not changed.
        flavour: "libtorch" or "python".
        name: name of the model.
        table: latencies of the engine's subnets, which the Python flavour needs. A table whose stamp names
            other weights is refused.
        slo_ms: time in ms that a request has if it names no deadline. Required with a table.
        max_batch_size: largest batch of Triton's batcher. If None, the largest in the table, or 16 without a
            table.
        external_scheduler: whether clients send whole batches; for "libtorch" only.
        queue_delay_us: time in microseconds that Triton's batcher waits for a batch to fill; for "libtorch"
            only.
        policy: name of the policy, as `subnetact.serving.make_policy` takes it; for "python" only.

    Returns:
        The directory of the model.

    Raises:
        ExportError: the flavour cannot take an argument, or the network.
        ProfileMismatch: the table belongs to other subnets or other weights.
        PolicyError: no subnet meets `slo_ms`, or the policy is not known.
        FileFormatError: the directory of the model contains something else.

    Example:
        >>> to_triton(engine, "models", "python", name="digits", table=table, slo_ms=36.0)
    """
    if flavour not in FLAVOURS:
        raise ExportError(f"flavour: {flavour!r} is not known; choose from {', '.join(FLAVOURS)}")
    given: Any = name
    if not isinstance(given, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", given):
        raise ExportError(f"name: {name!r} is not a model name; use letters, digits, _, - and .")
    if slo_ms is not None and not 0 < slo_ms < math.inf:
        raise ExportError(f"slo_ms: {slo_ms} must be finite and > 0")
    libtorch = flavour == "libtorch"
    if not libtorch and (external_scheduler or queue_delay_us):
        raise ExportError(
            "external_scheduler, queue_delay_us: the Python flavour queues and schedules itself; choose "
            "flavour='libtorch'"
        )
    if libtorch and policy != "hullfit":
        raise ExportError("policy: in the flavour 'libtorch' the client chooses; choose flavour='python'")
    usual = 16 if table is None else table.batch_sizes[-1]
    size = usual if max_batch_size is None else max_batch_size
    for option, count, least in (("max_batch_size", size, 1), ("queue_delay_us", queue_delay_us, 0)):
        if type(count) is not int or count < least:
            raise ExportError(f"{option}: {count!r} must be a whole number of at least {least}")
    chosen = chosen_specs(engine, None)
    if not isinstance(engine.sample, Tensor):
        raise ExportError(
            "to_triton takes networks with one input tensor; export this one with to_torchscript or to_onnx "
            "and configure Triton for its inputs, or serve the Engine itself: python -m subnetact.serve"
        )
    x = batch_like(engine.sample, 1, engine.device)
    made = [engine(x, i) for i in engine.ids]
    if not all(isinstance(output, Tensor) for output in made):
        raise ExportError(f"the network returns {type(made[0]).__name__}; Triton models return one tensor")
    target = Path(repository) / name
    with writing_folder(engine, chosen, target, TRITON_KIND, {"flavour": flavour}) as folder:
        version = folder / "1"
        version.mkdir()
        batched = not external_scheduler
        inputs = [_tensor("INPUT__0", [x], batched)]
        outputs = [_tensor("OUTPUT__0", made, batched)]
        if libtorch:
            path = version / "model.pt"
            with quiet():
                scripted = to_torchscript(engine, path, table=table, slo_ms=slo_ms)
                if batched:
                    torch.jit.save(torch.jit.script(ShapeCoded(scripted).eval()), path)
            code = "TYPE_BOOL dims: [ -1 ]" if batched else "TYPE_INT64 dims: [ 1 ]"
            inputs.append(f'name: "INPUT__1" data_type: {code}')
            lines = ['platform: "pytorch_libtorch"', f"max_batch_size: {size if batched else 0}"]
            if batched:
                lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {queue_delay_us} }}")
                lines += [_warm_up(x, i, count) for i in range(len(chosen)) for count in sorted({1, size})]
        else:
            outputs += [
                'name: "SUBNET" data_type: TYPE_INT32 dims: [ 1 ]',
                'name: "MET" data_type: TYPE_BOOL dims: [ 1 ]',
            ]
            parameters = _write_python(engine, version, table, slo_ms, policy)
            lines = ['backend: "python"', f"max_batch_size: {size}", "dynamic_batching { }"]
            lines += [
                f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
                for key, value in parameters.items()
            ]
        kind = "KIND_GPU" if engine.device.type == "cuda" else "KIND_CPU"
        lines = [
            f'name: "{name}"',
            *lines,
            *(f"input [ {{ {text} }} ]" for text in inputs),
            *(f"output [ {{ {text} }} ]" for text in outputs),
            f"instance_group [ {{ count: 1 kind: {kind} }} ]",
        ]
        (folder / "config.pbtxt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


class ShapeCoded(nn.Module):
    """The module that `to_torchscript` wrote, with the subnet named by the width of its second input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        """Run a batch x (B, ...); `code` is of shape (B, id + 1), and its values do not matter."""
        if code.dim() != 2 or code.size(0) != x.size(0) or code.size(1) == 0:
            raise ValueError("INPUT__1 has shape " + str(code.size()) + "; give (batch, subnet + 1)")
        subnet = torch.full([1], code.size(1) - 1, dtype=torch.int64)
        output: Tensor = self.inner(x, subnet)
        return output


def _tensor(name: str, seen: Sequence[Tensor], batched: bool) -> str:
    """Return Triton's description of a tensor; sizes that differ among subnets are variable (-1)."""
    kind = TYPES.get(seen[0].dtype)
    if kind is None:
        raise ExportError(
            f"{name}: {seen[0].dtype} has no type in Triton's numpy interface; use float32 or float16"
        )
    shapes = {x.shape[1:] for x in seen}
    if len({len(shape) for shape in shapes}) > 1:
        raise ExportError(f"{name}: subnets differ in its number of dimensions; Triton needs one")
    dims = [sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True)]
    if not dims and batched:
        raise ExportError(
            f"{name}: Triton needs a dimension beside the batch, got shape {tuple(seen[0].shape)}"
        )
    dims = dims if batched else [-1, *dims]
    return f'name: "{name}" data_type: TYPE_{kind} dims: [ {", ".join(map(str, dims))} ]'


def _warm_up(x: Tensor, subnet: int, size: int) -> str:
    """Return a batch of zeros of a `size` for a subnet, which Triton runs before it serves."""
    seen = {"INPUT__0": (TYPES[x.dtype], list(x.shape[1:])), "INPUT__1": ("BOOL", [subnet + 1])}
    inputs = " ".join(
        f'inputs {{ key: "{name}" value: {{ data_type: TYPE_{kind} dims: {dims} zero_data: true }} }}'
        for name, (kind, dims) in seen.items()
    )
    return f'model_warmup [ {{ name: "subnet {subnet}, batch {size}" batch_size: {size} {inputs} }} ]'


def _write_python(
    engine: Engine, version: Path, table: LatencyTable | None, slo_ms: float | None, policy: str
) -> dict[str, str]:
    """Write bundle, table and `model.py`, and return the parameters that `model.py` reads."""
    if table is None or slo_ms is None:
        raise ExportError(
            "table, slo_ms: the Python flavour schedules by latencies, and slo_ms is the time in ms that a "
            "request has if it names no deadline; give table=profile_latency(engine, ...) and slo_ms="
        )
    # This raises what would keep `model.py` from starting.
    Batcher(engine, policy=make_policy(policy, table, slo_ms), table=table, slo_ms=slo_ms).close()
    engine.save(version / "bundle")
    if json.loads((version / "bundle" / INDEX).read_text(encoding="utf-8"))["model"] is None:
        raise ExportError(
            "the Python flavour rebuilds the network by the name of its family, and an own network has none; "
            "choose flavour='libtorch'"
        )
    table.save(version / "table.json")
    with as_file(files("subnetact.export") / "triton_model.py") as template:
        shutil.copyfile(template, version / "model.py")
    budget = engine.stats().budget / 2**20
    return {"slo_ms": f"{slo_ms:g}", "memory_budget_mb": f"{budget:g}", "policy": policy, "learn": "true"}
