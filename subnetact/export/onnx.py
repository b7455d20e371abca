"""`to_onnx`: writes one ONNX file per subnet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from subnetact.device import machine
from subnetact.engine.engine import Engine
from subnetact.engine.onnx_graph import onnx_graph, require_onnx
from subnetact.engine.subnet_program import quiet
from subnetact.export.subnet_program import bar, export_format, subnet_name, subnet_programs
from subnetact.files.documents import StrPath
from subnetact.spec import SubnetSpec

ABOUT_ALL = "fingerprint", "inputs", "torch", "machine"
"""The facts of an export that every file has, too."""


def to_onnx(
    engine: Engine, directory: StrPath, *, subnets: Sequence[SubnetSpec] | None = None, progress: bool = True
) -> Path:
    """Write one ONNX file per subnet, each with its own weights, for batches of any size.

    The files are `subnet-0.onnx`, `subnet-1.onnx`, ... ONNX tensors are contiguous, so the files cannot
    share slices of one copy of the weights, and one file cannot contain several subnets. Every file has the
    input `input` (N, ...) and the output `output`. Several inputs are called as in the example of the
    engine, a dictionary, or `input_0`, `input_1`, ... for a tuple. Several outputs have the keys of the
    network's dictionary of tensors as names, or `output_0`, `output_1`, ... The exporter folds BatchNorm
    into convolutions, so outputs equal the supernet's up to rounding. The layers of int8 subnets have
    int8 weights and quantise their inputs in the file, as the subnet does (`MatMulInteger`). Axes on
    which the examples of the engine differ take all sizes from the smallest to the largest, all others but
    the first have those of the example; nothing is padded. The first axis is called `batch`, the other free
    axes `axis_a`, `axis_b`, ..., of which equal names are equally long.

    The metadata of every file (`metadata_props`) say what it is, in JSON: `subnetact.subnet`, the
    specification; `subnetact.accuracy`, in percent or null; `subnetact.fingerprint` of the supernet's
    weights; `subnetact.inputs`, per input its name, dtype, and per axis a size or `name:least:most`, of the
    batch, too; `subnetact.torch`, the version that wrote it; and `subnetact.machine`.

    Args:
        engine: the engine with the subnets and the example input.
        directory: a new or empty directory, or an earlier export, which is replaced as a whole.
        subnets: specifications of the subnets to export; file i has subnet `subnets[i]`. If None, those that
            the engine serves.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The directory. Its `export.json` lists the subnet of every file.

    Raises:
        MissingExtra: the packages `onnx` and `onnxscript` are not installed.
        ExportError: a module cannot be exported to ONNX; the message names it.
        FileFormatError: the directory contains something else.
        NotCalibrated: a subnet has no BatchNorm statistics of its own.
        SpecError: there is no subnet, one is repeated, or one belongs to another space.
        StaleWeights: another thread changed weights in place while they were copied.

    Example:
        >>> to_onnx(engine, "onnx")
        >>> session = onnxruntime.InferenceSession("onnx/subnet-0.onnx")
        >>> logits = session.run(["output"], {"input": images.numpy()})[0]
        >>> session.get_modelmeta().custom_metadata_map["subnetact.accuracy"]
        '97.5'
    """
    require_onnx()
    here = machine(engine.device)
    facts, axes, programs, _ = subnet_programs(engine, subnets, "onnx", device="cpu", machine=here)
    with export_format().writing(directory, facts) as folder:
        for i, subnet in enumerate(bar(programs, progress)):
            made = onnx_graph(subnet, axes)
            about = {"subnet": facts["subnets"][i], "accuracy": facts["accuracy"][i]}
            about |= {key: facts[key] for key in ABOUT_ALL}
            made.model.metadata_props.update(
                {f"subnetact.{key}": json.dumps(fact) for key, fact in about.items()}
            )
            with quiet():
                made.save(folder / f"{subnet_name(i)}.onnx")
    return Path(directory)
