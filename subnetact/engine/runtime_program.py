"""RuntimeProgram: one subnet in OpenVINO or ONNX Runtime, which pack and merge layers by themselves.

The subnet reaches them as an ONNX model of its own weights, which is kept in a file. OpenVINO is faster if it
knows all sizes, and then has a copy of the weights for each shape of a batch; where the memory budget has no
room for another copy, one of them runs all shapes. ONNX Runtime is not (`benchmarks/results/trials.json`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import local
from typing import Any, TypeAlias
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from subnetact.engine.finite_values import overflows
from subnetact.engine.input_axes import InputAxes
from subnetact.engine.inputs import batch_like
from subnetact.engine.onnx_graph import onnx_graph, require_onnx
from subnetact.engine.subnet_program import SubnetProgram
from subnetact.errors import EngineError, MissingExtra
from subnetact.files.fork import new_lock
from subnetact.supernet.batches import call_with, tensors_of

Session: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Gets the inputs of a model as arrays, and returns its outputs."""
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""The shape of every input of a batch; none if a session is to run all shapes."""


def onnx_session(path: str, threads: int) -> Any:
    """Return a session of onnxruntime that runs an ONNX file on the CPU."""
    runtime: Any = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _onnxruntime(path: str, threads: int, _: Shapes) -> Session:
    session = onnx_session(path, threads)
    names = [one.name for one in session.get_inputs()]
    return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))


def _openvino(path: str, threads: int, shapes: Shapes) -> Session:
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    core: Any = import_module("openvino").Core()
    model = core.read_model(path)
    if shapes:
        model.reshape({i: list(shape) for i, shape in enumerate(shapes)})
    model = core.compile_model(model, "CPU", settings)
    own = local()  # A request runs one batch at a time.

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        if not hasattr(own, "request"):
            own.request = model.create_infer_request()
        outputs = own.request.infer(list(arrays), share_inputs=True)
        return [outputs[port] for port in model.outputs]

    return run


RUNTIMES: dict[str, Callable[[str, int, Shapes], Session]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
"""The runtimes that an engine can use, by the name of their package and of the extra that installs it."""


def require_runtime(name: str, device: torch.device) -> None:
    """Refuse a runtime that is not installed, or a device on which engines do not use it."""
    if device.type != "cpu":
        raise EngineError(f"backend: {name} runs subnets on the CPU only, and this engine is on {device}")
    require_onnx()
    if find_spec(name) is None:
        raise MissingExtra(f"backend: {name} is not installed: pip install 'subnetact[{name}]'")


class RuntimeProgram:
    """One subnet in a runtime, made of a `view` of its own, for the shapes of `samples`."""

    plain = True

    def __init__(self, view: nn.Module, probe: Any, runtime: str, samples: Sequence[Any]) -> None:
        self._open, self._view = RUNTIMES[runtime], view
        self.swallows_nan = runtime == "openvino"
        if self.swallows_nan and overflows(view, probe if isinstance(probe, Tensor) else None):
            raise ValueError("its values may overflow, and OpenVINO turns NaN into numbers")
        *smaller, x = (batch_like(sample, 3, torch.device("cpu")) for sample in samples)
        axes = InputAxes(samples)
        model = onnx_graph(SubnetProgram(runtime, view, x, tuple(smaller)), axes)
        self._limits = axes.limits
        folder = mkdtemp(prefix="subnetact-")
        finalize(self, _remove, folder, os.getpid())
        self._path = Path(folder) / "subnet.onnx"
        model.save(self._path, external_data=False)
        self._weights = self._path.stat().st_size
        leaves, self._structure = tree_flatten(call_with(view, x))
        self._names = tuple(x) if isinstance(x, dict) else ()
        # What an output holds beside tensors is constant.
        self._leaves = [() if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        self._opening = new_lock()
        self._reserve: Callable[[int], bool] = lambda _: True
        self._threads, self._copies = 0, 1
        self._sessions: dict[Shapes, Session] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the copies of the weights that the runtime may have."""
        return self._weights * self._copies

    def __call__(self, x: Any) -> Any:
        """Run a batch, and return the network's output; the view runs shapes that no sample has."""
        parts = [x[name] for name in self._names] if self._names else list(tensors_of(x))
        shapes = tuple([part.shape for part in parts])
        run = self._sessions.get(shapes) if self._threads == torch.get_num_threads() else None
        if run is None:
            if not all(map(_is_within, parts, self._limits)):
                return call_with(self._view, x)
            run = self._session(shapes)
        outputs = iter(run([part.detach().contiguous().numpy() for part in parts]))
        leaves = [held[0] if held else torch.from_numpy(next(outputs)) for held in self._leaves]
        return tree_unflatten(leaves, self._structure)

    def limit(self, reserve: Callable[[int], bool]) -> None:
        """Ask `reserve` for the bytes of every further shape; what ran before is forgotten."""
        self._reserve, self._sessions, self._copies = reserve, {}, 1

    def _session(self, shapes: Shapes) -> Session:
        """Return what runs batches of these shapes with the threads that torch has here."""
        threads = torch.get_num_threads()
        with self._opening:
            if threads != self._threads:
                self._threads, self._sessions = threads, {}
            if known := self._sessions.get(shapes) or self._sessions.get(()):
                return known
            if self._open is _onnxruntime:
                shapes = ()
            elif len(self._sessions) == self._copies:
                if self._reserve(self._weights):
                    self._copies += 1
                else:
                    shapes, self._sessions = (), {}
            run = self._open(str(self._path), threads, shapes)
            self._sessions = {**self._sessions, shapes: run}
            return run


def _remove(folder: str, process: int) -> None:
    """Remove the folder of a program that is gone, unless it is of the process that this one is a copy of."""
    if os.getpid() == process:
        rmtree(folder, ignore_errors=True)


def _is_within(part: Any, limits: Sequence[tuple[str, int, int]]) -> bool:
    """Tell whether a tensor has a shape that a model takes."""
    sizes = part.shape
    return len(sizes) == len(limits) and all(
        least <= n <= most for n, (_, least, most) in zip(sizes, limits, strict=True)
    )
