"""`GraphProgram`: runs the graph in a `.pt2` file of `torch.export` without torch's own loader.

Torch's loader evaluates strings in the file as Python, imports what they name, and unpickles records. This
reader takes one record, the graph as JSON, and nothing else in the file. Of the graph it takes the calls of
ATen operators and arithmetic on whole numbers; it evaluates no string. A program can compute what its author
wants and use memory for it, but it can run no other code and open no file.
"""

from __future__ import annotations

import json
import math
import operator
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subnetact.errors import FileFormatError, InvalidRequest
from subnetact.files.atomic import require_regular
from subnetact.files.documents import parse_json

__all__ = ["GraphProgram"]

RECORD = "/models/model.json"
SCHEMA = 8
"""The major version of the format that torch writes."""
LARGEST = 2**63
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in ("add", "sub", "neg", "mod", "floordiv")},
    **{f"_operator.{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"_operator.{name}": getattr(operator, name) for name in ("mul", "truediv", "and_", "or_", "not_")},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
    **{f"torch.{name}": getattr(torch, name) for name in ("sym_max", "sym_min", "sym_not", "sym_int")},
    "torch.sym_float": torch.sym_float,
}
_REFUSED_WORDS = ("empty", "sparse", "unsafe", "resize", "set_", "from_file", "_test", "print", "storage")
"""Operators with these words in their names read files, return memory that was never written, or trust their
arguments."""
_KEPT = ("_unsafe_view",)
_REFUSED_TYPES = ("Storage", "Stream", "Generator", "Dict", "__torch__", "Any", "Future", "RRef")
_DTYPES = {
    **{1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16},
    **{7: torch.float32, 8: torch.float64, 12: torch.bool, 13: torch.bfloat16},
}
_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
_FORMATS |= {4: torch.preserve_format}
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"builtins.tuple": tuple, "builtins.list": list}
_MAPPINGS: dict[str, Callable[..., Any]] = {"builtins.dict": dict, "collections.OrderedDict": OrderedDict}


@dataclass(frozen=True)
class _Ref:
    """The place of a value that an earlier step computed."""

    slot: int


@dataclass
class _Step:
    """One call: its arguments are constants, `_Ref`s, or lists with `_Ref`s."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Any]
    bounded: bool
    dead: list[int] = field(default_factory=list)


class GraphProgram:
    """The graph of a network, with its tensors; it is called with a batch, like the network.

    Args:
        path: a `.pt2` file that `torch.export.save` wrote.
        tensors: the parameters, buffers and constants by name.
        device: the device of the tensors.

    Attributes:
        tensors: as given.

    Raises:
        FileFormatError: the file is damaged, or its graph has a step that is not allowed.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.tensors = dict(tensors)
        document = _document(path)
        try:
            major = document["schema_version"]["major"]
            if major != SCHEMA:
                raise ValueError(f"its format has version {major}, this version reads {SCHEMA}; export again")
            module = document["graph_module"]
            self._graph = _Graph(module["graph"], device)
            self._env, self._inputs = self._bound(module["signature"]["input_specs"])
            self._outputs = [_user_output(spec) for spec in module["signature"]["output_specs"]]
            returned = [_name_of(output) for output in module["graph"]["outputs"]]
            if self._outputs != returned:
                raise ValueError("its outputs are not those of its signature")
            self._structure = _structure(module["module_call_graph"])
            if _leaves(self._structure) != len(returned):
                raise ValueError("its outputs do not fit their structure")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise FileFormatError(f"{path}: not a program of this library: {error!r}") from error
        except (RecursionError, RuntimeError, StopIteration) as error:
            raise FileFormatError(f"{path}: not a program of this library: {error!r}") from error

    def _bound(self, specs: Sequence[Mapping[str, Any]]) -> tuple[list[Any], dict[str, int]]:
        env: list[Any] = [None] * self._graph.size
        inputs: dict[str, int] = {}
        for spec, slot in zip(specs, self._graph.inputs, strict=True):
            ((kind, facts),) = spec.items()
            if kind == "user_input":
                inputs[_name_of(facts["arg"])] = slot
            elif kind in ("parameter", "buffer", "tensor_constant"):
                env[slot] = self.tensors[facts[f"{kind}_name"]]
            else:
                raise ValueError(f"an input of kind {kind!r}")
        if not inputs:
            raise ValueError("it has no input")
        return env, inputs

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run the network.

        Args:
            args: the batch: tensors (N, ...) on the device of the program's tensors.
            kwargs: the tensors that are given by name.

        Returns:
            What the network returns: a tensor, or tuples, lists and dictionaries of tensors.

        Raises:
            InvalidRequest: there are more, fewer or other inputs than the network has.
        """
        rest = [name for name in self._inputs if name not in kwargs]
        if len(rest) != len(args) or len(rest) + len(kwargs) != len(self._inputs):
            raise InvalidRequest(
                f"input: this program takes {', '.join(self._inputs)}, got {len(args)} tensors"
                + (f" and {', '.join(kwargs)}" if kwargs else "")
            )
        env = list(self._env)
        for name, x in (*zip(rest, args, strict=True), *kwargs.items()):
            env[self._inputs[name]] = x
        leaves = iter(self._graph.run(env))
        return _built(self._structure, leaves)


class _Graph:
    """A list of steps over numbered slots."""

    def __init__(self, graph: Mapping[str, Any], device: torch.device) -> None:
        self._slots: dict[str, int] = {}
        self._device = device
        self.inputs = [self._new(_name_of(argument)) for argument in graph["inputs"]]
        self._steps = [self._step(node) for node in graph["nodes"]]
        self._results = [self._argument(output) for output in graph["outputs"]]
        self.size = len(self._slots)
        self._free_early()

    def run(self, env: list[Any]) -> list[Any]:
        """Return the outputs. `env` holds the inputs, and is used up."""
        for step in self._steps:
            args = [_value(argument, env) for argument in step.args]
            result = step.function(*args, **{name: _value(v, env) for name, v in step.kwargs.items()})
            if step.bounded and isinstance(result, int) and not -LARGEST <= result < LARGEST:
                raise InvalidRequest("the program computes a whole number of more than 64 bits")
            results = [result] if len(step.outputs) == 1 else (result or ())
            for output, one in zip(step.outputs, results, strict=True):
                if isinstance(output, list):
                    for slot, part in zip(output, one, strict=True):
                        env[slot] = part
                elif output is not None:
                    env[output] = one
            for slot in step.dead:
                env[slot] = None
        return [_value(result, env) for result in self._results]

    def _free_early(self) -> None:
        """Let go of every value after the last step that reads it, so that memory is used again."""
        kept = {ref.slot for ref in self._results if isinstance(ref, _Ref)} | set(self.inputs)
        for step in reversed(self._steps):
            used = {slot for argument in (*step.args, *step.kwargs.values()) for slot in _slots_of(argument)}
            for output in step.outputs:
                used |= set(output) if isinstance(output, list) else {output} - {None}
            step.dead = sorted(used - kept)
            kept |= used

    def _new(self, name: str) -> int:
        if name in self._slots:
            raise ValueError(f"{name!r} is computed twice")
        self._slots[name] = len(self._slots)
        return self._slots[name]

    def _step(self, node: Mapping[str, Any]) -> _Step:
        target = node["target"]
        graphs = [given["arg"]["as_graph"]["graph"] for given in node["inputs"] if "as_graph" in given["arg"]]
        if target == "torch.ops.higher_order.wrap_with_set_grad_enabled" and len(graphs) == 1:
            inner = _Graph(graphs[0], self._device)
            given = [self._argument(one["arg"]) for one in node["inputs"][2:]]
            if len(given) != len(inner.inputs):
                raise ValueError(f"{target} has other inputs than its graph")
            outputs = self._outputs_of(node)
            return _Step(_Nested(inner, len(outputs) == 1), given, {}, outputs, False)
        function, keyword_only = _function(target)
        args, kwargs = [], {}
        for given in node["inputs"]:
            if given.get("kind") == 2 or given["name"] in keyword_only:
                kwargs[str(given["name"])] = self._argument(given["arg"])
            elif kwargs:
                raise ValueError(f"{target}: a positional argument after one by name")
            else:
                args.append(self._argument(given["arg"]))
        return _Step(function, args, kwargs, self._outputs_of(node), target in _ARITHMETIC)

    def _outputs_of(self, node: Mapping[str, Any]) -> list[Any]:
        found: list[Any] = []
        for output in node["outputs"]:
            ((kind, value),) = output.items()
            if kind == "as_tensors":
                found.append([self._new(part["name"]) for part in value])
            elif kind == "as_none":
                found.append(None)
            else:
                found.append(self._new(_name_of(output)))
        return found

    def _ref(self, name: str) -> _Ref:
        return _Ref(self._slots[name])

    def _argument(self, argument: Mapping[str, Any]) -> Any:
        ((kind, value),) = argument.items()
        if kind == "as_none":
            return None
        if kind in ("as_tensor", "as_optional_tensor"):
            return self._ref(value["name"]) if kind == "as_tensor" else self._argument(value)
        if kind == "as_tensors":
            return [self._ref(part["name"]) for part in value]
        if kind in ("as_optional_tensors", "as_sym_ints", "as_sym_floats", "as_sym_bools"):
            return [self._argument(part) for part in value]
        if kind == "as_name":
            return self._ref(value)
        if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
            return self._argument(value)
        if kind in ("as_ints", "as_floats", "as_bools"):
            return [_constant(kind.removesuffix("s"), part) for part in value]
        if kind == "as_device":
            if value["type"] not in ("cpu", self._device.type):
                raise ValueError(f"a device of type {value['type']!r}")
            return torch.device("cpu") if value["type"] == "cpu" else self._device
        return _constant(kind, value)


class _Nested:
    """A graph inside a step."""

    def __init__(self, graph: _Graph, single: bool) -> None:
        self._graph = graph
        self._single = single

    def __call__(self, *inputs: Any) -> Any:
        env: list[Any] = [None] * self._graph.size
        for slot, value in zip(self._graph.inputs, inputs, strict=True):
            env[slot] = value
        results = self._graph.run(env)
        return results[0] if self._single else results


def _document(path: Path) -> Any:
    require_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            (record,) = (info for info in archive.infolist() if info.filename.endswith(RECORD))
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{record.filename} is compressed")
            return parse_json(archive.read(record))
    except (OSError, ValueError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise FileFormatError(f"{path}: not a program of torch.export ({error}); export again") from error


def _constant(kind: str, value: Any) -> Any:
    """Return a constant argument, checked."""
    if kind == "as_float" and isinstance(value, str):
        return _FLOATS[value]
    expected = {"as_int": (int,), "as_float": (int, float), "as_bool": (bool,), "as_string": (str,)}.get(kind)
    if expected is not None:
        if type(value) not in expected or (kind == "as_int" and not -LARGEST <= value < LARGEST):
            raise ValueError(f"an argument {kind} of another type")
        return float(value) if kind == "as_float" else value
    if kind == "as_scalar_type":
        return _DTYPES[value]
    if kind == "as_memory_format":
        return _FORMATS[value]
    if kind == "as_layout" and value == 7:
        return torch.strided
    raise ValueError(f"an argument of kind {kind!r}")


def _function(target: str) -> tuple[Callable[..., Any], frozenset[str]]:
    """Return the function that a step calls, and the names of its arguments that are given by name only."""
    if target in _ARITHMETIC:
        return _ARITHMETIC[target], frozenset()
    space, _, rest = target.rpartition("torch.ops.aten.")
    name, _, overload = rest.partition(".")
    if space or not target.startswith("torch.ops.aten.") or not name.isidentifier():
        raise ValueError(f"the step {target!r:.80} is no operator of ATen")
    if name not in _KEPT and any(word in name for word in _REFUSED_WORDS):
        raise ValueError(f"the operator {target!r:.80} is not allowed in a file")
    dispatched = "" if overload == "default" else overload
    torch._C._dispatch_find_schema_or_throw(f"aten::{name}", dispatched)
    function = getattr(getattr(torch.ops.aten, name), overload)
    arguments = function._schema.arguments
    if any(word in str(argument.type) for argument in arguments for word in _REFUSED_TYPES):
        raise ValueError(f"the operator {target!r:.80} is not allowed in a file")
    return function, frozenset(argument.name for argument in arguments if argument.kwarg_only)


def _name_of(argument: Mapping[str, Any]) -> str:
    """Return the name of a value that a step computes or the graph takes."""
    ((kind, value),) = argument.items()
    name = value["name"] if kind == "as_tensor" else value["as_name"]
    if not isinstance(name, str):
        raise TypeError(f"a name of type {type(name).__name__}")
    return name


def _user_output(spec: Mapping[str, Any]) -> str:
    ((kind, facts),) = spec.items()
    if kind != "user_output":
        raise ValueError(f"an output of kind {kind!r}: the network changes a tensor of its own")
    return _name_of(facts["arg"])


def _value(argument: Any, env: Sequence[Any]) -> Any:
    if type(argument) is _Ref:
        return env[argument.slot]
    if type(argument) is list:
        return [_value(part, env) for part in argument]
    return argument


def _slots_of(argument: Any) -> list[int]:
    if isinstance(argument, _Ref):
        return [argument.slot]
    return [slot for part in argument for slot in _slots_of(part)] if isinstance(argument, list) else []


def _structure(calls: Sequence[Mapping[str, Any]]) -> Any:
    """Return the structure of the network's output, as nested (builder, keys, parts); None is a leaf."""
    whole = next(call for call in calls if call["fqn"] == "")
    _, spec = json.loads(whole["signature"]["out_spec"])
    return _part(spec)


def _part(spec: Mapping[str, Any]) -> Any:
    kind, parts = spec["type"], [_part(child) for child in spec["children_spec"]]
    if kind is None:
        return None
    if kind in _SEQUENCES:
        return _SEQUENCES[kind], None, parts
    if kind in _MAPPINGS:
        keys = json.loads(spec["context"])
        if len(keys) != len(parts) or not all(isinstance(key, (str, int)) for key in keys):
            raise ValueError("a dictionary whose keys do not fit its values")
        return _MAPPINGS[kind], keys, parts
    raise ValueError(f"an output of type {kind!r}; return tensors, tuples, lists or dictionaries")


def _leaves(structure: Any) -> int:
    return 1 if structure is None else sum(_leaves(part) for part in structure[2])


def _built(structure: Any, leaves: Any) -> Any:
    if structure is None:
        return next(leaves)
    build, keys, parts = structure
    values = [_built(part, leaves) for part in parts]
    return build(values if keys is None else zip(keys, values, strict=True))
