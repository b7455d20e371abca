"""`to_triton`: writes a model for NVIDIA Triton Inference Server."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
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
from subnetact.profile.source import build_model
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.policies.registry import make_policy

TRITON_KIND = "subnetact.triton"
FLAVOURS = ("libtorch", "python")
WARM_UPS = 3
"""How often Triton repeats a warm-up: TorchScript optimises again in the second run."""
QUEUE = (
    "dynamic_batching { priority_levels: 3 default_priority_level: 2 "
    "default_queue_policy { timeout_action: REJECT allow_timeout_override: true } }"
)
"""Triton's own queue in front of `model.py`: it honours Triton's `priority` and `timeout`."""
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
    model: str | None = None,
    constructor: Mapping[str, Any] | None = None,
) -> Path:
    """Write one model, the directory `<repository>/<name>`, with its `config.pbtxt` and version 1.

    In the flavour "libtorch" the model is one TorchScript file, and the client chooses the subnet. INPUT__0
    is the batch (B, ...). INPUT__1 names the subnet by its shape (B, id + 1); its values are booleans and do
    not matter. Triton never batches inputs of different shapes, so its dynamic batching never mixes subnets.
    It warms up every subnet at batch sizes 1 and `max_batch_size` before it serves.
    Ids are positions among the subnets that the engine serves. With `external_scheduler` Triton does not
    batch (`max_batch_size: 0`): clients send whole batches, and INPUT__1 is the id, int64 of shape (1,).

    In the flavour "python" the model is an ensemble of one step, `<repository>/<name>_batcher`, which is a
    bundle and a short `model.py` around the `Batcher`. Clients ask the ensemble, because Triton counts the
    refusals of a model that answers later than it is asked as successes, and those of an ensemble as
    failures. The policy chooses the subnet of each batch by the request parameters `deadline_ms`,
    `min_accuracy` and `importance`, and by Triton's `timeout`. The outputs are OUTPUT__0, the SUBNET (int32),
    and MET, whether the deadline was met, each with one entry per sample. Triton's Python needs subnetact.

    Args:
        engine: the engine with the subnets, the example input and the device.
        repository: the model repository; other models in it are not changed.
        flavour: "libtorch" or "python".
        name: name of the model.
        table: latencies of the engine's subnets; for "python", which needs it. A table whose stamp names
            other weights is refused.
        slo_ms: time in ms that a request has if it names no deadline; for "python", which needs it.
        max_batch_size: largest batch of Triton's batcher. If None, the largest in the table, or 16 without a
            table.
        external_scheduler: whether clients send whole batches; for "libtorch" only.
        queue_delay_us: time in microseconds that Triton's batcher waits for a batch to fill; for "libtorch"
            only.
        policy: name of the policy, as `subnetact.serving.make_policy` takes it; for "python" only.
        model: `PKG.MOD:FACTORY`, which builds an own network that the bundle alone cannot; for "python" only.
            Triton's Python must be able to import it.
        constructor: arguments of that function, as JSON has them.

    Returns:
        The directory of the model that clients ask.

    Raises:
        ExportError: the flavour cannot take an argument, or the network.
        ProfileMismatch: the table belongs to other subnets or other weights.
        PolicyError: no subnet meets `slo_ms`, or the policy is not known.
        SpecError: `model` cannot be imported, or raises.
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
    if libtorch and (policy != "hullfit" or any(x is not None for x in (table, slo_ms, model, constructor))):
        raise ExportError(
            "table, slo_ms, policy, model, constructor: in the flavour 'libtorch' the client chooses, "
            "and the file holds the network; leave them out, or choose flavour='python'"
        )
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
    batched = not external_scheduler
    inputs = [_tensor("INPUT__0", [x], batched)]
    outputs = [_tensor("OUTPUT__0", made, batched)]
    kind = "KIND_GPU" if engine.device.type == "cuda" else "KIND_CPU"
    instances = f"instance_group [ {{ count: 1 kind: {kind} }} ]"
    if libtorch:
        with writing_folder(engine, chosen, target, TRITON_KIND, {"flavour": flavour}) as folder:
            path = folder / "1" / "model.pt"
            path.parent.mkdir()
            with quiet():
                scripted = to_torchscript(engine, path)
                if batched:
                    torch.jit.save(torch.jit.script(ShapeCoded(scripted).eval()), path)
            code = "TYPE_BOOL dims: [ -1 ]" if batched else "TYPE_INT64 dims: [ 1 ]"
            inputs.append(f'name: "INPUT__1" data_type: {code}')
            lines = ['platform: "pytorch_libtorch"', instances]
            if batched:
                lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {queue_delay_us} }}")
                lines += [_warm_up(x, i, count) for i in range(len(chosen)) for count in sorted({1, size})]
            _write_config(folder, name, size if batched else 0, lines, inputs, outputs)
        return target
    outputs.append('name: "SUBNET" data_type: TYPE_INT32 dims: [ 1 ]')
    outputs.append('name: "MET" data_type: TYPE_BOOL dims: [ 1 ]')
    inner = target.with_name(f"{name}_batcher")
    with writing_folder(engine, chosen, target, TRITON_KIND, {"flavour": flavour}) as folder:
        (folder / "1").mkdir()  # Triton wants a version, which is empty for an ensemble.
        _write_config(folder, name, size, [_step(inner.name, inputs, outputs)], inputs, outputs)
        with writing_folder(engine, chosen, inner, TRITON_KIND, {"flavour": flavour}) as folder:
            parameters = _write_python(engine, folder, table, slo_ms, policy, model, constructor)
            lines = ['backend: "python"', instances, QUEUE]
            lines += [_warm_up(x, None, count) for count in sorted({1, size})]
            for key, text in parameters.items():
                quoted = json.dumps(text, ensure_ascii=False)
                lines.append(f'parameters {{ key: "{key}" value: {{ string_value: {quoted} }} }}')
            _write_config(folder, inner.name, size, lines, inputs, outputs)
    return target


def _write_config(
    folder: Path, name: str, size: int, lines: list[str], inputs: list[str], outputs: list[str]
) -> None:
    head = [f'name: "{name}"', f"max_batch_size: {size}"]
    tensors = [
        f"{what} [ {{ {text} }} ]" for what, all in (("input", inputs), ("output", outputs)) for text in all
    ]
    text = "\n".join([*head, *tensors, *lines]) + "\n"
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")


def _step(model: str, inputs: list[str], outputs: list[str]) -> str:
    """Return the ensemble's only step, which runs the newest version of `model` on all tensors."""
    maps = " ".join(
        f"{what}_map {{ key: {name} value: {name} }}"
        for what, texts in (("input", inputs), ("output", outputs))
        for name in (text.split()[1] for text in texts)
    )
    step = f'model_name: "{model}" model_version: -1 {maps}'
    return f'platform: "ensemble"\nensemble_scheduling {{ step [ {{ {step} }} ] }}'


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


def _warm_up(x: Tensor, subnet: int | None, size: int) -> str:
    """Return a batch of zeros of a `size` for a subnet, or for any, which Triton runs before it serves."""
    seen = {"INPUT__0": (TYPES[x.dtype], list(x.shape[1:]))}
    if subnet is not None:
        seen["INPUT__1"] = ("BOOL", [subnet + 1])
    inputs = " ".join(
        f'inputs {{ key: "{name}" value: {{ data_type: TYPE_{kind} dims: {dims} zero_data: true }} }}'
        for name, (kind, dims) in seen.items()
    )
    label = f"batch {size}" if subnet is None else f"subnet {subnet}, batch {size}"
    return f'model_warmup [ {{ name: "{label}" batch_size: {size} count: {WARM_UPS} {inputs} }} ]'


def _write_python(
    engine: Engine,
    folder: Path,
    table: LatencyTable | None,
    slo_ms: float | None,
    policy: str,
    model: str | None,
    constructor: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Write bundle, table and `model.py`, and return the parameters that `model.py` reads."""
    if table is None or slo_ms is None:
        raise ExportError(
            "table, slo_ms: the Python flavour schedules by latencies, and slo_ms is the time in ms that a "
            "request has if it names no deadline; give table=profile_latency(engine, ...) and slo_ms="
        )
    # This raises what would keep `model.py` from starting.
    Batcher(engine, policy=make_policy(policy, table, slo_ms), table=table, slo_ms=slo_ms).close()
    bundle = folder / "1" / "bundle"
    bundle.parent.mkdir()
    engine.save(bundle)
    own = {"model": model or "", "constructor": json.dumps(dict(constructor or {}))}
    if model is not None:
        Engine.load(bundle, supernet=build_model(model, constructor, bundled=True), device="cpu")
    elif json.loads((bundle / INDEX).read_text(encoding="utf-8"))["model"] is None:
        raise ExportError(
            "the Python flavour rebuilds the network by the name of its family, and an own network has none; "
            "give model='PKG.MOD:FACTORY', the function that builds it, or choose flavour='libtorch'"
        )
    table.save(folder / "1" / "table.json")
    with as_file(files("subnetact.export") / "triton_model.py") as template:
        shutil.copyfile(template, folder / "1" / "model.py")
    budget = f"{engine.stats().budget / 2**20:g}"
    return {"slo_ms": f"{slo_ms:g}", "memory_budget_mb": budget, "policy": policy, "learn": "true", **own}
