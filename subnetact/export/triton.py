"""`to_triton`: writes a model for NVIDIA Triton Inference Server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subnetact.elastic.folder import INDEX
from subnetact.engine.engine import Engine
from subnetact.engine.inputs import DATATYPES, batch_like
from subnetact.errors import ExportError
from subnetact.export.subnet_program import chosen_specs, described, export_format
from subnetact.export.torchscript import to_torchscript
from subnetact.files.documents import StrPath
from subnetact.latency.table import LatencyTable
from subnetact.profile.source import build_model
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.policies.registry import make_policy

TRITON_KIND = "subnetact.triton"
TYPES = {dtype: name for dtype, name in DATATYPES.items() if dtype != torch.bfloat16}
"""Those of the types that Triton's interface of NumPy has."""
STEP = "input_map { key: 'INPUT__0' value: 'INPUT__0' } " + " ".join(
    f"output_map {{ key: '{name}' value: '{name}' }}" for name in ("OUTPUT__0", "SUBNET", "MET")
)
"""What the ensemble's only step takes and gives: the ensemble's own tensors."""


def to_triton(
    engine: Engine,
    repository: StrPath,
    flavour: str = "libtorch",
    *,
    name: str = "subnetact",
    table: LatencyTable | None = None,
    slo_ms: float | None = None,
    max_batch_size: int | None = None,
    queue_delay_us: int = 0,
    policy: str = "hullfit",
    model: str | None = None,
) -> Path:
    """Write one model, the directory `<repository>/<name>`, with its `config.pbtxt` and version 1.

    In the flavour "libtorch" the model is one TorchScript file, and the client chooses the subnet. INPUT__0
    is the batch (B, ...). INPUT__1 names the subnet by its shape (B, id + 1); its values are booleans and do
    not matter. Triton never batches inputs of different shapes, so its dynamic batching never mixes subnets.
    It warms up every subnet at batch sizes 1 and `max_batch_size` before it serves. Ids are positions among
    the subnets that the engine serves.

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
        queue_delay_us: time in microseconds that Triton's batcher waits for a batch to fill; for "libtorch"
            only.
        policy: name of the policy, as `subnetact.serving.make_policy` takes it; for "python" only.
        model: `PKG.MOD:FACTORY`, a function without arguments, which builds an own network that the bundle
            alone cannot; for "python" only. Triton's Python must be able to import it.

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
    if flavour not in ("libtorch", "python"):
        raise ExportError(f"flavour: {flavour!r} is not known; choose from libtorch, python")
    given: Any = name
    if not isinstance(given, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", given):
        raise ExportError(f"name: {name!r} is not a model name; use letters, digits, _, - and .")
    libtorch = flavour == "libtorch"
    options = {"slo_ms": slo_ms, "policy": policy, "model": model}
    unfit = (table, *options.values()) != (None, None, "hullfit", None) if libtorch else queue_delay_us
    if unfit:
        raise ExportError(
            "table, slo_ms, policy and model belong to the flavour 'python', queue_delay_us to 'libtorch', "
            f"where the client chooses; leave out what does not belong to {flavour!r}, or take the other one"
        )
    usual = 16 if table is None else table.batch_sizes[-1]
    size = usual if max_batch_size is None else max_batch_size
    for option, count, least in (("max_batch_size", size, 1), ("queue_delay_us", queue_delay_us, 0)):
        if type(count) is not int or count < least:
            raise ExportError(f"{option}: {count!r} must be a whole number of at least {least}")
    chosen, target = chosen_specs(engine, None), Path(repository) / name
    batches = [batch_like(sample, 1, engine.device) for sample in engine.samples]
    made, x = [engine(batch, i) for batch in batches for i in engine.ids], batches[-1]
    if not all(isinstance(one, Tensor) for one in (x, *made)):
        raise ExportError(
            "to_triton takes networks with one input and one output tensor; describe to_torchscript's or "
            "to_onnx's file to Triton yourself, or serve the engine: python -m subnetact.serve"
        )
    tensors = [_tensor("input", "INPUT__0", batches), _tensor("output", "OUTPUT__0", made)]
    config = [f"max_batch_size: {size}", *tensors]
    kind = "KIND_GPU" if engine.device.type == "cuda" else "KIND_CPU"
    work = [f"instance_group [ {{ count: 1 kind: {kind} }} ]"]
    work += [f"dynamic_batching {{ max_queue_delay_microseconds: {queue_delay_us} }}"]
    inner = target.with_name(f"{name}_batcher")
    facts = described(engine, chosen, {"flavour": flavour})
    with export_format(TRITON_KIND).writing(target, facts) as folder:
        (folder / "1").mkdir()  # Triton wants a version, which is empty for an ensemble.
        if libtorch:
            to_torchscript(engine, folder / "1" / "model.pt")
            config += ['input [ { name: "INPUT__1" data_type: TYPE_BOOL dims: [ -1 ] } ]']
            config += ['platform: "pytorch_libtorch"', *work]
            config += [_warm_up(x, i, count) for i in range(len(chosen)) for count in sorted({1, size})]
        else:
            config += ['output [ { name: "SUBNET" data_type: TYPE_INT32 dims: [ 1 ] } ]']
            config += ['output [ { name: "MET" data_type: TYPE_BOOL dims: [ 1 ] } ]']
            with export_format(TRITON_KIND).writing(inner, facts) as inner_folder:
                line = _write_python(engine, inner_folder / "1", table, options)
                text = "\n".join([*config, 'backend: "python"', *work, line, ""])
                (inner_folder / "config.pbtxt").write_text(text, encoding="utf-8")
            step = f"model_name: '{inner.name}' model_version: -1 {STEP}"
            config += ['platform: "ensemble"', f"ensemble_scheduling {{ step [ {{ {step} }} ] }}"]
        (folder / "config.pbtxt").write_text("\n".join([*config, ""]), encoding="utf-8")
    return target


def _tensor(role: str, name: str, seen: Sequence[Tensor]) -> str:
    """Return Triton's description of a tensor; sizes that differ are variable (-1)."""
    kind, shapes = TYPES.get(seen[0].dtype), {x.shape[1:] for x in seen}
    if kind is None or not all(shapes) or len({len(shape) for shape in shapes}) > 1:
        raise ExportError(
            f"{name}: {seen[0].dtype} of {' or '.join(str(tuple(x.shape)) for x in seen)}; Triton takes "
            f"{', '.join(TYPES.values())}, and dimensions beside the batch, as many for all subnets"
        )
    dims = [sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True)]
    return f'{role} [ {{ name: "{name}" data_type: TYPE_{kind} dims: {dims} }} ]'


def _warm_up(x: Tensor, subnet: int, size: int) -> str:
    """Return a batch of zeros of a `size` for a subnet, which Triton runs before it serves.

    It runs three times, because TorchScript optimises again in the second run.
    """
    kind, dims, code = TYPES[x.dtype], list(x.shape[1:]), [subnet + 1]
    return (
        f'model_warmup [ {{ name: "subnet {subnet}, batch {size}" batch_size: {size} count: 3 '
        f'inputs {{ key: "INPUT__0" value: {{ data_type: TYPE_{kind} dims: {dims} zero_data: true }} }} '
        f'inputs {{ key: "INPUT__1" value: {{ data_type: TYPE_BOOL dims: {code} zero_data: true }} }} }} ]'
    )


def _write_python(engine: Engine, version: Path, table: LatencyTable | None, options: dict[str, Any]) -> str:
    """Write bundle, table and `model.py`, and return the line of options that `model.py` reads."""
    slo_ms, model = options["slo_ms"], options["model"]
    if table is None or slo_ms is None:
        raise ExportError(
            "table, slo_ms: the Python flavour schedules by latencies, and slo_ms is the time in ms that a "
            "request has if it names no deadline; give table=profile_latency(engine, ...) and slo_ms="
        )
    # This raises what would keep `model.py` from starting.
    Batcher(engine, policy=make_policy(options["policy"], table, slo_ms), table=table, slo_ms=slo_ms).close()
    version.mkdir()
    engine.save(version / "bundle")
    if model is not None:
        Engine.load(version / "bundle", supernet=build_model(model, None, bundled=True), device="cpu")
    elif json.loads((version / "bundle" / INDEX).read_text(encoding="utf-8"))["model"] is None:
        raise ExportError(
            "the Python flavour rebuilds the network by the name of its family, and an own network has none; "
            "give model='PKG.MOD:FACTORY', the function that builds it, or choose flavour='libtorch'"
        )
    table.save(version / "table.json")
    shutil.copyfile(Path(__file__).with_name("triton_model.py"), version / "model.py")
    options |= {"learn": True, "memory_budget_mb": engine.stats().budget / 2**20}
    return f"parameters {{ key: 'options' value: {{ string_value: '{json.dumps(options)}' }} }}"
