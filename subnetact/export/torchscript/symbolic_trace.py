"""Traces a supernet into one module that runs every subnet: the size row of the subnet is an argument.

The tracer makes a view whose size row contains graph nodes instead of integers, and runs the network's own
forward on it. The operators slice as always, and every size that depends on the subnet becomes an expression
of the argument `row`. Views and exported files therefore share one slicing rule, `Operator.tensors`.

A skippable layer becomes a submodule that returns its first argument if the size row skips the layer. This is
right only if the network around it does nothing else for the layer, so each trace is compared with traces in
which layers are left out, as views leave them out (`_Scope._compare_skipping`).

TorchScript needs about 1 KiB of memory per operation of every class. Layers of equal code therefore share one
class: their tensors have names relative to the layer, and positions and widths are attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from subnetact.errors import ExportError
from subnetact.export.torchscript.module import Gate, RowLayout
from subnetact.export.torchscript.recorder import Recorder, check_rank, lines
from subnetact.operators import LayerSelect, Operator, SubnetNorm
from subnetact.operators.view_module import mix_in_, view_module
from subnetact.space import SizeRow
from subnetact.supernet.trace import RecordedCall

__all__ = ["Traced", "trace_network"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_TENSOR = object()
"""Marks an argument that becomes an input of the graph."""
_RANKS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4, 4), nn.BatchNorm3d: (5, 5)}
"""Smallest and largest number of dimensions of each BatchNorm's input."""


def trace_network(
    network: nn.Module, inputs: Sequence[str], layout: RowLayout, rows: Sequence[SizeRow]
) -> Traced:
    """Trace a network into a module whose `forward(*inputs, row: List[int], statistics)` runs every subnet.

    Args:
        network: the network of a supernet. It is not changed; the result shares its tensors.
        inputs: names of the arguments of its forward that callers give; each is a tensor.
        layout: layout of the size rows. The legal sizes of the operators are added to it.
        rows: size rows of the subnets for which skipping is checked.

    Returns:
        The traced module.

    Raises:
        ExportError: the forward cannot be traced, or a skipped layer is not the identity; the message names
            the module.
    """
    registered = {id(t) for t in (*network.parameters(), *network.buffers())}
    scope = _Scope("", _Shared(layout, rows, registered))
    return scope.trace(network, (), dict.fromkeys(inputs, _TENSOR))


class Traced(nn.Module):
    """A module that runs the code of a graph, without the other contents of a `GraphModule`.

    Its attribute `paths` maps each submodule to the name of the network's module that it was made from.
    """

    @classmethod
    def of(
        cls, module: fx.GraphModule, numbers: dict[str, int], paths: dict[str, str], kinds: _Kinds
    ) -> Traced:
        """Make a module with the code, tensors and submodules of a graph module.

        Args:
            module: the graph module.
            numbers: integer attributes of the module by name.
            paths: the network's names for the submodules.
            kinds: the classes made so far, by their code; modules of equal code share a class.

        Returns:
            The module.
        """
        name = type(module).__name__
        contents = {"forward": type(module).forward, "__module__": __name__}
        # Functions of the same name may differ, for example closures that one factory made.
        called = tuple(node.target for node in module.graph.nodes if node.op == "call_function")
        kind = kinds.setdefault((name, module.code, called), type(name, (cls,), contents))
        traced: Any = kind()
        traced._modules.update(module._modules)
        traced._buffers.update(module._buffers)
        traced.__dict__.update(numbers, paths=paths)
        return traced  # type: ignore[no-any-return]


_Kinds = dict[tuple[Any, ...], type[Traced]]


@dataclass(frozen=True)
class _Shared:
    """Data that all graphs of one network share.

    Attributes:
        layout: layout of the size rows.
        rows: size rows of the subnets for which skipping is checked.
        registered: ids of the network's parameters and buffers.
        kinds: the classes made so far, by their code.
    """

    layout: RowLayout
    rows: Sequence[SizeRow]
    registered: Set[int]
    kinds: _Kinds = field(default_factory=dict)


class _Scope:
    """One graph under construction: that of the network, or that of a layer in an elastic stack.

    Args:
        path: path of the module in the network.
        shared: data that all graphs of the network share.
        gates: the gates that keep the module, from the outermost to the innermost.
    """

    def __init__(self, path: str, shared: _Shared, gates: tuple[Gate, ...] = ()) -> None:
        self.path = path
        self.shared = shared
        self.layout = shared.layout
        self.gates = gates
        self.skippable: dict[str, Gate] = {}
        self.graph = fx.Graph()
        self.tensors: dict[str, Tensor] = {}
        self.modules: dict[str, nn.Module] = {}
        self.tracer = Recorder(self.graph, self.tensors, shared.registered)
        self.paths: dict[str, str] = {}
        self.names: dict[int, str] = {}
        self.done: dict[int, nn.Module] = {}
        self.given: list[Any] = []
        self.ranked = False

    def trace(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], gate: Gate | None = None
    ) -> Traced:
        """Trace one module into a module of its own.

        Args:
            module: the module.
            args: its positional arguments. Tensors become arguments of the graph, other values are built in.
            kwargs: its keyword arguments, likewise.
            gate: the gate that keeps the module. If None, it is never skipped.

        Returns:
            The traced module.

        Raises:
            ExportError: as `trace_network`.
        """
        self.record(module, args, kwargs)
        self._compare_skipping(module, args, kwargs)
        used = {str(node.target) for node in self.graph.nodes if node.op in ("get_attr", "call_module")}
        numbers = {name: number for name, number in self.tracer.numbers.items() if name in used}
        held = {name: tensor.detach() for name, tensor in self.tensors.items() if name in used}
        if gate is not None:
            numbers["number_gate"], numbers["number_kept"] = gate
            first = next(iter(self.graph.nodes)).name
            skip = f"if row[self.number_gate] != self.number_kept:\n    return {first}\n"
            self.graph.on_generate_code(lambda _: lambda body: [skip, *body])
        traced = fx.GraphModule({**self.modules, **held, **numbers}, self.graph, type(module).__name__)
        paths = {name: path for name, path in self.paths.items() if name in used}
        return Traced.of(traced, numbers, paths, self.shared.kinds)

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the forward of a module with these arguments into the graph.

        Raises:
            ExportError: the forward cannot be traced.
        """
        given = [self._argument(a, f"x{i}") for i, a in enumerate(args)]
        named = {name: self._argument(a, name) for name, a in kwargs.items()}
        self.row: Any = fx.Proxy(self.graph.placeholder("row", type_expr=list[int]), self.tracer)
        self.statistics: Any = fx.Proxy(self.graph.placeholder("statistics"), self.tracer)
        self.tracer.begin(self.row.node, self.statistics.node)
        try:
            output = self.bind(module, self.path)(*given, **named)
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(
                f"{self._where(error.__traceback__)}: its forward cannot be traced ({error}); use "
                "subnetact.export.to_exported_programs, or put what depends on values into a function that "
                "opens as torch.nn.functional's do, with has_torch_function and handle_torch_function"
            ) from error
        self.graph.output(self.tracer.create_arg(output))
        self.tracer.drop_unused()

    def _compare_skipping(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check that skipping layers in this graph does what the identities in the places of views do.

        A loop that reads more of a layer than its output may treat the identity in the place of a skipped
        layer in another way.

        Raises:
            ExportError: the two differ; the message names a skipped layer.
        """
        rows = [row for row in self.shared.rows if all(row[dim] == value for dim, value in self.gates)]
        skips = {
            tuple(path for path, (dim, value) in self.skippable.items() if row[dim] != value) for row in rows
        }
        if not any(skips):
            return
        whole = _Outline(self, ())
        whole.record(module, args, kwargs)
        for skipped in sorted(skips - {()}, key=lambda paths: (len(paths), paths)):
            left = _Outline(self, skipped)
            left.record(module, args, kwargs)
            if whole.lines(skipped) != left.lines():
                raise ExportError(
                    f"{skipped[0]}: if a subnet skips it, the network around it does more than pass on the "
                    "layer's input; make the loop `x = layer(x)`, with additions and activations inside "
                    "the layers, or use subnetact.export.to_exported_programs"
                )

    def _argument(self, given: Any, name: str) -> Any:
        if given is _TENSOR or isinstance(given, fx.Proxy):
            return fx.Proxy(self.graph.placeholder(name), self.tracer)
        return given

    def _where(self, trace: TracebackType | None) -> str:
        found = self.path
        while trace is not None:
            found = self.names.get(id(trace.tb_frame.f_locals.get("self")), found)
            trace = trace.tb_next
        return found or "the network"

    # -- the symbolic view -------------------------------------------------------------------------

    def bind(self, module: nn.Module, path: str) -> nn.Module:
        """Return the view of a module for the symbolic size row; each module has one.

        Args:
            module: the module.
            path: its path in the network.

        Raises:
            ExportError: the module is parametrized.
        """
        if id(module) not in self.done:
            bound = self._bind(module, path)
            self.done[id(module)] = bound
            self.names[id(bound)] = path
        return self.done[id(module)]

    def _bind(self, module: nn.Module, path: str) -> nn.Module:
        if is_parametrized(module):
            raise ExportError(
                f"{path}: TorchScript does not run parametrized modules; call "
                "torch.nn.utils.parametrize.remove_parametrizations on it first"
            )
        if isinstance(module, LayerSelect):
            self._note_legal(module)
            return self._stack(module, path)
        children = {
            n: None if m is None else self.bind(m, _join(path, n)) for n, m in module._modules.items()
        }
        if isinstance(module, Operator):
            self._note_legal(module)
            operator = self._operator(module, path)
            if children:
                object.__setattr__(operator, "_modules", children)
            return operator
        if _is_leaf(module):
            name = f"module_{len(self.modules)}"
            self.modules[name], self.paths[name] = _frozen(module), path
            return _recording(module, partial(self.tracer.create_proxy, "call_module", name))
        own = self._proxies(module, path)
        return view_module(module, parameters=own[0], buffers=own[1], modules=children)

    def _stack(self, stack: LayerSelect, path: str) -> nn.Module:
        return stack.chain(
            {
                name: None if layer is None else self._layer(stack, layer, name, _join(path, name))
                for name, layer in stack._modules.items()
            }
        )

    def _operator(self, module: Operator, path: str) -> nn.Module:
        own = dict(zip(("_parameters", "_buffers"), self._proxies(module, path), strict=True))
        template = _with(module.template, **own)
        symbolic: Any = _with(module, **own, template=template, checks=False)
        if not isinstance(module, SubnetNorm):
            return symbolic.bind(self.row, trainable=True)  # type: ignore[no-any-return]
        start = self.row[self.layout.sizes + self.layout.norms.index(module.path)]
        channels = symbolic.channels(self.row)
        mean = self.statistics[start : start + channels]
        var = self.statistics[start + channels : start + channels + channels]
        bound: nn.Module = symbolic.bind_with(self.row, mean, var, trainable=True)
        object.__setattr__(bound, "_check_input_dim", partial(self._check_rank, bound))
        object.__setattr__(bound, "_check_non_zero_input_channels", lambda _: None)
        object.__setattr__(bound, "training", False)
        return bound

    def _check_rank(self, norm: Any, x: Any) -> None:
        """Check the input of the first norm of the network; checking every norm would double the code.

        The running mean passes through the check because TorchScript drops calls whose results are not used.
        """
        check = type(norm)._check_input_dim
        ranks = next((ranks for cls, ranks in _RANKS.items() if check is cls._check_input_dim), None)
        if ranks is not None and not self.gates and not self.ranked:
            self.ranked = True
            given = norm._buffers["running_mean"], x, *ranks
            checked = self.tracer.create_proxy("call_function", check_rank, given, {})
            norm.__dict__["_buffers"] = {**norm._buffers, "running_mean": checked}

    def _proxies(self, module: nn.Module, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {
                n: None if t is None else self._tensor(_join(path, n), t)
                for n, t in module._parameters.items()
            },
            {n: None if t is None else self._tensor(_join(path, n), t) for n, t in module._buffers.items()},
        )

    def _tensor(self, name: str, tensor: Tensor) -> fx.Proxy:
        # Tensors get flat names because TorchScript is slow with many modules that only hold tensors.
        flat = "tensor_" + name.removeprefix(f"{self.path}.").replace(".", "_")
        while flat in self.tensors:
            flat += "_"
        self.tensors[flat] = tensor
        return self.tracer.create_proxy("get_attr", flat, (), {})

    def _layer(self, stack: LayerSelect, layer: nn.Module, name: str, path: str) -> nn.Module:
        """Return a stand-in for a layer; a call of the stand-in traces the layer into a graph of its own."""
        gate = stack.gate(name)
        if gate is not None:
            self.skippable[path] = gate
        made: dict[tuple[str, ...], str] = {}

        def record(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, fx.Proxy)]
            if len(tensors) != sum(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                raise ExportError(f"{path}: it is called with tensors inside lists; pass them one by one")
            if not args or args[0] is not tensors[0]:
                raise ExportError(
                    f"{path}: the tensor that it replaces must be its first argument, by position"
                )
            values = [*enumerate(args), *kwargs.items()]
            call = tuple(
                f"{k}={'tensor' if isinstance(a, fx.Proxy) else tree_map_only(Tensor, id, a)}"
                for k, a in values
            )
            if call not in made:
                gates = self.gates if gate is None else (*self.gates, gate)
                made[call] = f"layer_{len(self.modules)}"
                self.paths[made[call]] = path
                self.modules[made[call]] = _Scope(path, self.shared, gates).trace(layer, args, kwargs, gate)
                self.given.append(values)  # keeps the arguments alive, so that their ids stay unique
            inputs = (*tensors, self.row, self.statistics)
            return self.tracer.create_proxy("call_module", made[call], inputs, {})

        return _recording(layer, record)

    def _note_legal(self, module: Operator) -> None:
        for part, dim in module.dims.items():
            legal = module.legal(part)
            self.layout.legal.add((dim, legal if isinstance(legal, range) else tuple(legal), self.gates))


class _Outline(_Scope):
    """A graph of the same module in which layers are calls by name, and skipped layers are identities.

    Args:
        scope: the scope of the module.
        skipped: paths of the layers to skip, as a view skips them.
    """

    def __init__(self, scope: _Scope, skipped: Sequence[str]) -> None:
        super().__init__(scope.path, scope.shared, scope.gates)
        self.skipped = skipped

    def lines(self, skipped: Sequence[str] = ()) -> list[str]:
        """Return the graph as text.

        Args:
            skipped: paths of layers that the text leaves out, as if they were the identity.
        """
        return lines(self.tracer, self.paths, self.modules, skipped)

    def _stack(self, stack: LayerSelect, path: str) -> nn.Module:
        names = [name for name in stack._modules if _join(path, name) not in self.skipped]
        layers = {name: self._named(stack._modules[name], _join(path, name)) for name in names}
        return stack.chain(layers) if len(names) == len(stack._modules) else stack.select(layers)

    def _named(self, layer: nn.Module | None, path: str) -> nn.Module | None:
        return None if layer is None else _recording(layer, partial(self._record_call, path))

    def _record_call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.paths[path] = path
        args, kwargs = tree_map(_recordable, (args, kwargs))
        return self.tracer.create_proxy("call_module", path, args, kwargs)


def _recordable(value: Any) -> Any:
    return value if isinstance(value, fx.Proxy | Tensor) else repr(value)


def _with(module: nn.Module, **attributes: Any) -> nn.Module:
    other: nn.Module = object.__new__(type(module))
    other.__dict__.update(module.__dict__, **attributes)
    return other


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_leaf(module: nn.Module) -> bool:
    """Return whether a module is PyTorch's own and contains nothing elastic."""
    library = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
    return library and not any(isinstance(inner, Operator) for inner in module.modules())


def _frozen(module: nn.Module) -> nn.Module:
    children = {n: None if m is None else _frozen(m) for n, m in module._modules.items()}
    tensors = {n: None if p is None else nn.Parameter(p, False) for n, p in module._parameters.items()}
    return view_module(module, parameters=tensors, buffers=dict(module._buffers), modules=children)


def _recording(module: nn.Module, record: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> nn.Module:
    stand_in = view_module(module)
    object.__setattr__(stand_in, "recorder", record)
    return mix_in_(stand_in, RecordedCall)
