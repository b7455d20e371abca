"""The network of every subnet as one torch.fx graph, in which the subnet is an argument.

A view is traced whose row holds graph nodes instead of integers: the operators slice, the network's own
forward runs, and every size that depends on the subnet becomes an expression of the argument `row`.
So there is one slicing rule, `Operator.tensors`, for views and for what is exported.

TorchScript keeps about a KiB in memory for every operation of every class. So layers of equal code share
one class: tensors are named from the layer on, and positions in the row and widths are attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from subnetact.errors import ExportError
from subnetact.export.recorder import Recorder
from subnetact.operators import LayerSelect, Operator, SubnetNorm
from subnetact.operators.view import shell
from subnetact.tracing import leaf_class

__all__ = ["Layout", "Traced", "trace_network"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_Gate = tuple[int, int]
_TENSOR = object()


@dataclass(frozen=True)
class Layout:
    """Where an exported row has what.

    A row is a subnet's sizes (`SubnetSpace.resolve`), then for each norm where its means start in the
    flat statistics; its variances follow them.

    Attributes:
        names: of the sizes, in order (`SubnetSpace.dimensions`).
        norms: the names of the norms, in order.
        legal: for each size that an operator reads, its legal values, under the gates that keep the operator.
    """

    names: tuple[str, ...]
    norms: tuple[str, ...]
    legal: set[tuple[int, Any, tuple[_Gate, ...]]] = field(default_factory=set)

    @property
    def sizes(self) -> int:
        """How many sizes a row has."""
        return len(self.names)


def trace_network(network: nn.Module, inputs: Sequence[str], layout: Layout) -> Traced:
    """Return a module of `forward(*inputs, row: List[int], statistics)` that is every subnet.

    Args:
        network: a network with operators; it is not changed, its tensors are shared.
        inputs: the names of its forward's arguments that are given, each a tensor.
        layout: of the rows; what is legal in them is added.

    Raises:
        ExportError: the forward cannot be traced; it names the module.
    """
    return _Scope("", layout, {}).trace(network, (), dict.fromkeys(inputs, _TENSOR))


class Traced(nn.Module):
    """A module that runs a graph's code, without what else a GraphModule carries.

    Its attribute `paths` has, for each submodule, the name of the network's module behind it.
    """

    @classmethod
    def of(
        cls, module: fx.GraphModule, numbers: dict[str, int], paths: dict[str, str], kinds: _Kinds
    ) -> Traced:
        """Take over a graph module's code, tensors and submodules, in the one class that has this code."""
        name = type(module).__name__
        contents = {"forward": type(module).forward, "__module__": __name__}
        # Functions of one name may differ: closures that one factory made.
        called = tuple(node.target for node in module.graph.nodes if node.op == "call_function")
        kind = kinds.setdefault((name, module.code, called), type(name, (cls,), contents))
        traced: Any = kind()
        traced._modules.update(module._modules)
        traced._buffers.update(module._buffers)
        traced.__dict__.update(numbers, paths=paths)
        return traced  # type: ignore[no-any-return]


_Kinds = dict[tuple[Any, ...], type[Traced]]


class _Scope:
    """One graph under construction: of the network, or of a layer that some subnets skip.

    Args:
        path: of the module.
        layout: of the rows.
        kinds: the classes there are, by their code.
        gates: what keeps the module, from the outermost.
    """

    def __init__(self, path: str, layout: Layout, kinds: _Kinds, gates: tuple[_Gate, ...] = ()) -> None:
        self.path = path
        self.layout = layout
        self.kinds = kinds
        self.gates = gates
        self.graph = fx.Graph()
        self.tensors: dict[str, Tensor] = {}
        self.modules: dict[str, nn.Module] = {}
        self.tracer = Recorder(self.graph, self.tensors)
        self.paths: dict[str, str] = {}
        self.names: dict[int, str] = {}
        self.done: dict[int, nn.Module] = {}

    def trace(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], gate: _Gate | None = None
    ) -> Traced:
        """Trace one module; tensors among the arguments become arguments, other values are built in."""
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
                f"{self._where(error.__traceback__)}: its forward cannot be traced ({error}); put what "
                "depends on values into a function that opens as torch.nn.functional's do: "
                "if has_torch_function(...): return handle_torch_function(...)"
            ) from error
        self.graph.output(self.tracer.create_arg(output))
        self.tracer.drop_unused()
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
        return Traced.of(traced, numbers, paths, self.kinds)

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
        """Return the view of a module on the symbolic row."""
        if id(module) not in self.done:
            bound = self._bind(module, path)
            self.done[id(module)] = bound
            self.names[id(bound)] = path
        return self.done[id(module)]

    def _bind(self, module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, LayerSelect):
            self._note_legal(module)
            layers = {
                name: None if layer is None else self._layer(module, layer, name, _join(path, name))
                for name, layer in module._modules.items()
            }
            return module.chain(layers)
        children = {
            n: None if m is None else self.bind(m, _join(path, n)) for n, m in module._modules.items()
        }
        if isinstance(module, Operator):
            self._note_legal(module)
            return self._operator(module, path)
        if _is_leaf(module):
            name = f"module_{len(self.modules)}"
            self.modules[name], self.paths[name] = _frozen(module), path
            return _recording(module, partial(self.tracer.create_proxy, "call_module", name))
        own = self._proxies(module, path)
        return shell(module, parameters=own[0], buffers=own[1], modules=children)

    def _operator(self, module: Operator, path: str) -> nn.Module:
        own = dict(zip(("_parameters", "_buffers"), self._proxies(module, path), strict=True))
        template = _with(module.template, **own)
        symbolic: Any = _with(module, **own, template=template, checks=False)
        if not isinstance(module, SubnetNorm):
            return symbolic.bind(self.row, trainable=True)  # type: ignore[no-any-return]
        start = self.row[self.layout.sizes + self.layout.norms.index(module.path)]
        channels = symbolic.size("channels", self.row)
        mean = self.statistics[start : start + channels]
        var = self.statistics[start + channels : start + channels + channels]
        bound: nn.Module = symbolic.bind_with(self.row, mean, var, trainable=True)
        for check in ("_check_input_dim", "_check_non_zero_input_channels"):
            object.__setattr__(bound, check, lambda _: None)
        object.__setattr__(bound, "training", False)
        return bound

    def _proxies(self, module: nn.Module, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {
                n: None if t is None else self._tensor(_join(path, n), t)
                for n, t in module._parameters.items()
            },
            {n: None if t is None else self._tensor(_join(path, n), t) for n, t in module._buffers.items()},
        )

    def _tensor(self, name: str, tensor: Tensor) -> fx.Proxy:
        # Flat names: TorchScript is slow with many modules that only hold tensors.
        flat = "tensor_" + name.removeprefix(f"{self.path}.").replace(".", "_")
        while flat in self.tensors:
            flat += "_"
        self.tensors[flat] = tensor
        return self.tracer.create_proxy("get_attr", flat, (), {})

    def _layer(self, stack: LayerSelect, layer: nn.Module, name: str, path: str) -> nn.Module:
        """Return a stand-in for a layer that traces it in a graph of its own when it is called."""
        gate = stack.gate(name)
        made: dict[tuple[str, ...], str] = {}

        def record(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, fx.Proxy)]
            if len(tensors) != sum(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                raise ExportError(f"{path}: it is called with tensors inside lists; pass them one by one")
            if not args or args[0] is not tensors[0]:
                raise ExportError(f"{path}: what it replaces must be its first argument, by position")
            values = [*enumerate(args), *kwargs.items()]
            call = tuple(f"{k}={'tensor' if isinstance(a, fx.Proxy) else repr(a)}" for k, a in values)
            if call not in made:
                gates = self.gates if gate is None else (*self.gates, gate)
                made[call] = f"layer_{len(self.modules)}"
                self.paths[made[call]] = path
                self.modules[made[call]] = _Scope(path, self.layout, self.kinds, gates).trace(
                    layer, args, kwargs, gate
                )
            inputs = (*tensors, self.row, self.statistics)
            return self.tracer.create_proxy("call_module", made[call], inputs, {})

        return _recording(layer, record)

    def _note_legal(self, module: Operator) -> None:
        for part, dim in module.dims.items():
            legal = module.legal(part)
            self.layout.legal.add((dim, legal if isinstance(legal, range) else tuple(legal), self.gates))


def _with(module: nn.Module, **attributes: Any) -> nn.Module:
    other: nn.Module = object.__new__(type(module))
    other.__dict__.update(module.__dict__, **attributes)
    return other


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_leaf(module: nn.Module) -> bool:
    """Tell whether a module is PyTorch's own and nothing in it is elastic."""
    library = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
    return library and not any(isinstance(inner, Operator) for inner in module.modules())


def _frozen(module: nn.Module) -> nn.Module:
    children = {n: None if m is None else _frozen(m) for n, m in module._modules.items()}
    tensors = {n: None if p is None else nn.Parameter(p, False) for n, p in module._parameters.items()}
    return shell(module, parameters=tensors, modules=children)


def _recording(module: nn.Module, record: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> nn.Module:
    stand_in = shell(module)
    object.__setattr__(stand_in, "__class__", leaf_class(type(stand_in)))  # type: ignore[arg-type]
    object.__setattr__(stand_in, "recorder", record)
    return stand_in
