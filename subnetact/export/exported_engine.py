"""`ExportedEngine`: runs what `to_exported_programs` wrote, and is called like an `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from tqdm import tqdm

from subnetact.device import find_device
from subnetact.engine.config import EngineConfig
from subnetact.engine.inputs import Stager, check_input, first_of
from subnetact.engine.outputs import unstack
from subnetact.errors import (
    DeviceError,
    ExportError,
    FileFormatError,
    InvalidRequest,
    PrecisionError,
    SpecError,
)
from subnetact.export.programs import PROGRAM_WEIGHTS, PROGRAMS_KIND, capability, program_name
from subnetact.export.subnet_program import export_format, quiet
from subnetact.files.documents import StrPath
from subnetact.operators.kernel_table import require_precision
from subnetact.supernet.batches import as_batch, call_with, map_tensors, tensors_of

Program: TypeAlias = Callable[..., Any]


class ExportedEngine:
    """Exported subnets that run from one copy of the weights; `load_exported` makes it.

    A `Batcher` takes it in the place of an `Engine`. It may be used from several threads. An AOTInductor
    package runs one call at a time.

    Attributes:
        specs: the subnets, in the order of their ids.
        keys: readable key of every subnet.
        ids: the ids 0 .. n-1 of the subnets.
        accuracy: accuracy of every subnet in percent, or None if it was unknown.
        fingerprint: hash of the supernet's weights.
        device: the device on which it runs.
        sample: one input without batch axis, on the CPU; only its shape and dtype matter.
        dynamic_batch: whether batches of any size run. If false, batches of one run.
    """

    def __init__(
        self, programs: Sequence[Program], config: EngineConfig, facts: dict[str, Any], device: torch.device
    ) -> None:
        self._programs = tuple(programs)
        self.specs = tuple(config.specs)
        self.keys = tuple(spec.key for spec in self.specs)
        self.ids = tuple(range(len(programs)))
        self.accuracy = tuple(config.accuracy or ())
        self.fingerprint: str = facts["fingerprint"]
        self.dynamic_batch: bool = facts["dynamic_batch"]
        self.device = device
        self.sample = config.sample
        self._stager = Stager(device)

    def __len__(self) -> int:
        return len(self._programs)

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
        if isinstance(subnet, (bool, float)) or subnet not in self.ids:
            raise SpecError(f"no subnet {subnet!r}; this export has 0..{len(self) - 1}")
        x = as_batch(x)
        self.check(first_of(x, "input"))
        size = len(next(iter(tensors_of(x))))
        if not self.dynamic_batch and size != 1:
            raise InvalidRequest(
                f"input: a batch of {size}, these programs take batches of 1; export with dynamic_batch=True"
            )
        with torch.inference_mode():
            return call_with(self._programs[subnet], x)

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:  # noqa: ARG002
        """Run single inputs, which the `Batcher` has collected, as one batch if batches are dynamic.

        Args:
            subnet: id of the subnet.
            inputs: inputs without a batch dimension.
            batch_size: the profiled batch size, which exported programs do not need.

        Returns:
            One output per input, on the CPU.

        Raises:
            SpecError: there is no such id.
        """
        groups = [inputs] if self.dynamic_batch else [[one] for one in inputs]
        outputs: list[Any] = []
        for group in groups:
            size = len(group)
            outputs += unstack(self(self._stager.stack(group, size), subnet), size, size)
        return outputs

    def check(self, x: Any, finite: bool = False) -> None:
        """Check that an input has the shape and dtype of the example.

        Args:
            x: one input without a batch dimension.
            finite: whether to check also that all values are finite.

        Raises:
            InvalidRequest: the input does not pass a check; the message says which one.
        """
        check_input(x, self.sample, self.device, finite)


def load_exported(
    directory: StrPath,
    *,
    device: str | torch.device | None = None,
    trusted: bool = False,
    progress: bool = True,
) -> ExportedEngine:
    """Read what `to_exported_programs` wrote.

    Loading runs code from the files with all rights of this process. `torch.export.load` evaluates strings
    and unpickles records of a graph (`compile="none"`), and an AOTInductor package (`compile="aoti"`) is
    native code. Load only what you or somebody you trust made.

    Args:
        directory: the directory of the export.
        trusted: whether you trust who made the files. Nothing is read unless this is true.
        device: the device to run on. It must be of the kind (CPU or GPU) that the programs were exported for.
            If None, a device of that kind.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The exported subnets.

    Raises:
        ExportError: `trusted` is False.
        FileFormatError: a file is missing, truncated, changed or of a newer schema, or the packages were
            compiled by another torch or for another kind of machine.
        PrecisionError: a subnet computes at a precision that this machine does not run, as in an `Engine`.
        DeviceError: there is no such device.
    """
    if not trusted:
        raise ExportError(
            f"{directory}: loading it runs code from its files with all rights of this process: torch.export "
            "evaluates strings and unpickles records of a graph, and an AOTInductor package is native code; "
            "if you trust who made it, load_exported(..., trusted=True)"
        )
    read = partial(_read, device=device, progress=progress)
    return export_format(PROGRAMS_KIND).read_version(directory, read)


def _read(
    folder: Path, facts: dict[str, Any], *, device: str | torch.device | None, progress: bool
) -> ExportedEngine:
    passing = DeviceError, PrecisionError
    with export_format(PROGRAMS_KIND).fields(folder, passing, damaged=(RuntimeError, SpecError)):
        home = find_device(facts["device"] if device is None else device)
        _refuse_foreign(folder, facts, home)
        config = EngineConfig.from_json(facts)
        for precision in sorted({spec.precision for spec in config.specs}):
            require_precision(precision, home)
        names = [program_name(i) for i in range(len(config.specs))]
        missing = sorted({PROGRAM_WEIGHTS, *names} - set(facts["files"]))
        if missing:
            raise FileFormatError(f"{folder}: `files` does not list {missing}")
        tensors = torch.load(folder / PROGRAM_WEIGHTS, map_location=home, weights_only=True)
        load = _load_graph if facts["compile"] == "none" else partial(_load_package, device=home)
        bar = tqdm(names, desc="loading subnets", disable=not progress or None)
        programs = [load(folder / name, own) for name, own in zip(bar, tensors, strict=True)]
        return ExportedEngine(programs, config, facts, home)


def _refuse_foreign(folder: Path, facts: Mapping[str, Any], device: torch.device) -> None:
    if facts["device"] != device.type:
        raise FileFormatError(
            f"{folder}: exported for {facts['device']}, asked to run on {device}; export from an Engine there"
        )
    made, here = (facts["torch"], facts["capability"]), (torch.__version__, capability(device))
    if facts["compile"] != "none" and made != here:
        raise FileFormatError(
            f"{folder}: compiled by torch {made[0]} for {made[1]}, this is torch {here[0]} on {here[1]}; "
            "export again on this kind of machine, or with compile='none'"
        )


def _load_graph(path: Path, tensors: Mapping[str, Tensor]) -> Program:
    with quiet():
        program = torch.export.load(path)
    for owner in (program.state_dict, program.constants):
        for name, empty in owner.items():
            own = tensors[name]
            owner[name] = nn.Parameter(own, False) if isinstance(empty, nn.Parameter) else own
    return program.module()


def _load_package(path: Path, tensors: Mapping[str, Tensor], device: torch.device) -> Program:
    with quiet():
        index: int | None = device.index
        package = torch._inductor.aoti_load_package(str(path), device_index=-1 if index is None else index)
    package.load_constants(dict(tensors), check_full_update=True, user_managed=True)

    def run(*args: Tensor, **kwargs: Tensor) -> Any:  # compiled code does not check strides
        return package(*map(Tensor.contiguous, args), **map_tensors(Tensor.contiguous, kwargs))

    return run
