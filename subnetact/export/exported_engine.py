"""`ExportedEngine`: runs what `to_pt2` and `to_onnx` wrote, like an `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from tqdm import tqdm

from subnetact.device import find_device
from subnetact.engine.config import EngineConfig
from subnetact.engine.input_axes import InputAxes
from subnetact.engine.inputs import Stager, first_of, shapes, unstack
from subnetact.engine.ready_subnet import ReadySubnet, ReadySubnets
from subnetact.engine.runtime_program import onnx_session
from subnetact.engine.subnet_program import quiet
from subnetact.errors import (
    DeviceError,
    ExportError,
    FileFormatError,
    MissingExtra,
    PrecisionError,
    SpecError,
)
from subnetact.export.pt2 import FACTS, PT2, archive_tools, capability
from subnetact.export.subnet_program import export_format, subnet_name
from subnetact.files.atomic import require_regular
from subnetact.files.documents import StrPath
from subnetact.operators.kernel_table import require_precision
from subnetact.supernet.batches import as_batch, call_with, map_tensors

Program: TypeAlias = Callable[..., Any]
_PASSING = DeviceError, ExportError, MissingExtra, PrecisionError
_DAMAGED = OSError, RuntimeError, SpecError, StopIteration, BadZipFile
"""What reading a file raises that is said, and what it raises because the file is damaged."""


class ExportedEngine(ReadySubnets):
    """Exported subnets that run from one copy of the weights; `load_exported` makes it.

    A `Batcher` takes it in the place of an `Engine`. It may be used from several threads. A compiled program
    runs one call at a time.

    Attributes:
        fingerprint: hash of the supernet's weights.
        device: the device on which it runs.
        space: the identity of the supernet's space.
        program: the kind of program that runs, as in the stamps of latency tables: `aotinductor` or `onnx`.
        samples: one input without batch axis per shape of the engine's examples, the largest last; only their
            shapes and dtypes matter.
    """

    def __init__(self, programs: Sequence[Program], facts: dict[str, Any], device: torch.device) -> None:
        config = EngineConfig.from_json(facts)
        for precision in sorted({spec.precision for spec in config.specs}):
            require_precision(precision, device)
        self._programs = tuple(programs)
        pairs = enumerate(zip(config.specs, config.accuracy or (), strict=True))
        self._subnets = tuple(ReadySubnet(i, spec, self, percent) for i, (spec, percent) in pairs)
        self._served = dict(enumerate(self._subnets))
        self.fingerprint: str = facts["fingerprint"]
        self.space: str = facts["space"]
        self.program: str = facts["program"]
        self.device = device
        self.samples = config.sample if isinstance(config.sample, list) else [config.sample]
        self._axes = InputAxes(self.samples)
        self._stager = Stager(device)

    def __repr__(self) -> str:
        return f"ExportedEngine({len(self)} subnets, on {self.device})"

    def __call__(self, x: Any, subnet: int) -> Any:
        """Run a batch through a subnet.

        Args:
            x: the batch, a tensor (N, ...) on the device, or a tuple or mapping of such tensors.
            subnet: id of the subnet.

        Returns:
            The network's output.

        Raises:
            SpecError: there is no such id.
            InvalidRequest: the shape, dtype or device of the batch is not what the programs were exported
                for.
        """
        program, x = self._programs[self.ready(subnet).id], as_batch(x)
        self.check(first_of(x, "input"))
        with torch.inference_mode():
            return call_with(program, x)

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:  # noqa: ARG002
        """Run single inputs, which the `Batcher` has collected: as one batch if they can be one.

        Args:
            subnet: id of the subnet.
            inputs: inputs without a batch dimension.
            batch_size: the profiled batch size, which exported programs do not need.

        Returns:
            One output per input, on the CPU.

        Raises:
            SpecError: there is no such id.
        """
        alike = len({str(shapes(x)) for x in inputs}) == 1
        groups = [inputs] if alike else [[one] for one in inputs]
        outputs: list[Any] = []
        for group in groups:
            size = len(group)
            outputs += unstack(self(self._stager.stack(group, size), subnet), size, size)
        return outputs

    def check(self, x: Any, finite: bool = False) -> None:
        """Check that an input has the dtype of the examples, and their shape or one between theirs.

        Args:
            x: one input without a batch dimension.
            finite: whether to check also that all values are finite.

        Raises:
            InvalidRequest: the input does not pass a check; the message says which one.
        """
        self._axes.check(x, self.device, finite)


def load_exported(
    path: StrPath,
    *,
    device: str | torch.device | None = None,
    trusted: bool = False,
    progress: bool = True,
) -> ExportedEngine:
    """Read what `to_pt2` or `to_onnx` wrote.

    A .pt2 contains native code, which loading runs with all rights of this process. Load only what you or
    somebody you trust made. ONNX files run in onnxruntime, on the CPU, with as many threads as torch has now.

    Args:
        path: the .pt2, or the directory of the export.
        trusted: whether you trust who made the files. Nothing is read unless this is true.
        device: the device to run on. It must be of the kind (CPU or GPU) that the programs were exported for.
            If None, a device of that kind.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The exported subnets.

    Raises:
        ExportError: `trusted` is False, or torch is too old for a .pt2.
        FileFormatError: a file is missing, truncated, changed or of a newer schema, or programs were
            compiled by another torch or for another kind of machine.
        MissingExtra: the package `onnxruntime` is not installed.
        PrecisionError: a subnet computes at a precision that this machine does not run, as in an `Engine`.
        DeviceError: there is no such device.
    """
    if not trusted:
        raise ExportError(
            f"{path}: loading it runs code from its files with all rights of this process, as a .pt2 "
            "contains native code; if you trust who made it, load_exported(..., trusted=True)"
        )
    if Path(path).is_dir() or Path(path).suffix != ".pt2":
        read = partial(_read_folder, device=device, progress=progress)
        return export_format().read_version(path, read)
    require_regular(path)
    with PT2.fields(path, _PASSING, _DAMAGED):
        with ZipFile(path) as file:
            if damaged := file.testzip():
                raise FileFormatError(f"{path}: {damaged} is damaged; restore the file, or export again")
            record = next(name for name in file.namelist() if name.endswith(f"/extra/{FACTS}"))
            facts = PT2.parsed(path, file.read(record))
        home = _home(path, facts, device)
        made, here = (facts["torch"], facts["capability"]), (torch.__version__, capability(home))
        if made != here:
            raise FileFormatError(
                f"{path}: compiled by torch {made[0]} for {made[1]}, this is torch {here[0]} on {here[1]}; "
                "export again on this kind of machine, or with to_onnx"
            )
        index: int | None = home.index
        place = {"device_index": -1 if index is None else index, "load_weights_from_disk": True}
        with quiet():
            runners = archive_tools().load_pt2(str(path), **place).aoti_runners
        programs = [_checked(runners[subnet_name(i)]) for i in range(len(facts["subnets"]))]
        return ExportedEngine(programs, facts, home)


def _read_folder(
    folder: Path, facts: dict[str, Any], *, device: str | torch.device | None, progress: bool
) -> ExportedEngine:
    with export_format().fields(folder, _PASSING, _DAMAGED):
        home = _home(folder, facts, device)
        paths = [folder / f"{subnet_name(i)}.onnx" for i in range(len(facts["subnets"]))]
        programs = [_session(path) for path in tqdm(paths, "loading subnets", disable=not progress or None)]
        return ExportedEngine(programs, facts, home)


def _home(path: StrPath, facts: Mapping[str, Any], asked: str | torch.device | None) -> torch.device:
    """Return where to run what was exported."""
    home = find_device(facts["device"] if asked is None else asked)
    if facts["device"] != home.type:
        raise FileFormatError(
            f"{path}: exported for {facts['device']}, asked to run on {home}; export from an Engine there"
        )
    return home


def _checked(program: Program) -> Program:
    """Return a compiled program that makes its inputs contiguous, because its code does not check strides."""
    return lambda *args, **kwargs: program(
        *map(Tensor.contiguous, args), **map_tensors(Tensor.contiguous, kwargs)
    )


def _session(path: Path) -> Program:
    """Return a function that runs an ONNX file; several outputs come as a tuple, or by their names."""
    if find_spec("onnxruntime") is None:
        raise MissingExtra(f"{path}: it runs in onnxruntime; pip install onnxruntime")
    path.stat()  # onnxruntime's own error of a missing file is no OSError.
    session = onnx_session(str(path), torch.get_num_threads())
    inputs, names = ([part.name for part in parts] for parts in (session.get_inputs(), session.get_outputs()))

    def run(*args: Tensor, **kwargs: Tensor) -> Any:
        given = dict(zip(inputs, args, strict=False)) | kwargs
        arrays = session.run(None, {name: part.numpy() for name, part in given.items()})
        outputs = map(torch.from_numpy, arrays)
        if names[0] == "output":
            return next(outputs)
        return tuple(outputs) if names[0] == "output_0" else dict(zip(names, outputs, strict=True))

    return run
