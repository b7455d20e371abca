"""What subnets cost, computed from their sizes: parameters, multiply-accumulates, bytes.

They are counted by a forward pass over meta tensors, which have a shape but no data. What a module of a
subnet computes follows from its *own sizes*, which are the entries of the size row that its operators and
those of its submodules follow, and the shapes of its inputs. Outputs and counts of every call are remembered
by both, so that a new subnet runs only the blocks that no earlier subnet had. A module that depends on
anything else, such as an attribute that another module sets, is counted as in its first call.

A `FlopCounterMode` around one forward pass per subnet counts 12 subnets of OFA-ResNet50 per second, and not
a thousand (`benchmarks/search.py --only costs`).
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from subnetact.device import raise_if_explained
from subnetact.errors import SpecError
from subnetact.operators.base import Operator, template_of
from subnetact.operators.layer_traits import traits_of
from subnetact.operators.lowered_weight import Low
from subnetact.operators.operation_traits import OPERATIONS
from subnetact.operators.tensor_version import storage_id, tensor_place
from subnetact.space import SizeRow
from subnetact.spec import SubnetSpec, shown
from subnetact.supernet.batches import as_batch, call_with, describe_input, map_tensors, tensors_of
from subnetact.supernet.bind import bind_module
from subnetact.supernet.failure import summary
from subnetact.supernet.supernet import Supernet

__all__ = ["FEATURES", "Cost", "CostModel", "Vector"]

Vector: TypeAlias = npt.NDArray[np.int64]
"""One count per entry of `FEATURES`."""

KINDS = ("convolution", "pointwise", "depthwise", "linear", "low", "norm", "product", "other")
"""What a module computes. `product` is a matrix product outside any layer, as in attention; `low` is a linear
layer or convolution at a lower precision."""
COUNTS = ("modules", "macs", "activation_bytes", "weight_bytes")
FEATURES = ("parameters", *(f"{kind}.{count}" for kind in KINDS for count in COUNTS))

MOST_VIEWS = 4096
"""Views that are kept per module. When there are more, all of them are deleted and made again on demand."""

MOST_FOLLOWED = 2**16
"""Whole numbers of tensors of at most so many elements are computed where they are known."""

_MOVES_DATA = [name for names, traits in OPERATIONS.items() if traits.moves for name in names.split()]
"""Parts of the names of operators that only move data. Operators that return views are not counted either."""

WITHOUT_VALUES = "; costs follow from shapes: leave out inputs whose values a forward reads, as a mask's"
"""What an error advises if a forward reads values."""

_AS = {torch.ops.aten._int_mm: torch.ops.aten.mm}
"""ATen operators that multiply as others do."""


@dataclass
class _Counts:
    """What a module and its submodules compute for one input; `own_macs` belong to no module yet."""

    vector: Vector = field(default_factory=lambda: np.zeros(len(FEATURES), np.int64))
    not_counted: set[str] = field(default_factory=set)
    own_macs: int = 0


_Calls: TypeAlias = dict[Hashable, tuple[Any, _Counts]]
"""The outputs and counts of calls, by the types and shapes of their inputs."""


@dataclass(frozen=True)
class Cost:
    """What one forward pass of one subnet costs.

    Attributes:
        parameters: number of parameters of the extracted network.
        macs: multiply-accumulates of convolutions, linear layers and matrix products, for the batch.
        activation_bytes: bytes that modules with parameters write, for the batch. Position embeddings
            count once per input.
        weight_bytes: bytes of the parameters, each counted once.
        not_counted: ATen names of the operators whose arithmetic is not in `macs`: activations, norms,
            softmax, additions and pooling.
        product_macs: the part of `macs` that is matrix products outside any layer, as in attention.
    """

    parameters: int
    macs: int
    activation_bytes: int
    weight_bytes: int
    not_counted: tuple[str, ...]
    product_macs: int = 0


class CostModel:
    """Computes the cost of any subnet of a supernet, more than a thousand subnets per second.

    Every module runs once per combination of its sizes and the shapes of its inputs, on a copy of the
    supernet without data; a subnet with known modules is put together from these results. The counts are
    exact if what a module computes follows from these two. Only one thread at a time may use a model.

    Args:
        supernet: the supernet. It is not changed.
        example: a batch for the network, (N, C, H, W) for images, or a tuple or dictionary of its arguments.
            Only the shapes behind the batch axis and the dtypes count.

    Raises:
        SpecError: the network does not run on the example, or its forward pass needs data.

    Example:
        >>> model = CostModel(supernet, torch.empty(1, 3, 224, 224))
        >>> model(supernet.space.largest()).macs
    """

    def __init__(self, supernet: Supernet, example: Any) -> None:
        tensors = [*supernet.network.parameters(), *supernet.network.buffers()]
        self._network = copy.deepcopy(supernet.network, {id(t): _empty(t) for t in tensors})
        modules = list(self._network.modules())
        for module in modules:  # Let products in mixtures of experts have shapes that no data decides.
            choose: Any = getattr(module, "set_experts_implementation", None)
            if callable(choose):
                choose("batched_mm")
        held = Counter(storage_id(p) for m in modules for p in m._parameters.values() if p is not None)
        self._tied = {storage for storage, count in held.items() if count > 1}
        self.space = supernet.space
        given = as_batch(example)
        if not any(isinstance(part, Tensor) for part in tensors_of(given)):
            raise SpecError(
                f"example: {shown(example)} is no batch with a tensor; give one: torch.empty(1, 3, 224, 224)"
            )
        self._mode = _CountingMode()
        self._input = map_tensors(self._empty_input, given)
        self._item_bytes = next((p.element_size() for p in supernet.parameters()), 4)
        self._own_sizes = {module: _own_sizes(module) for module in modules}
        # The parent and name under which a module is counted that occurs in several places.
        self._first: dict[nn.Module | None, tuple[nn.Module, str]] = {}
        for parent in modules:
            for name, child in parent.named_children():
                self._first.setdefault(child, (parent, name))
        self._views: dict[nn.Module, dict[Any, _CountedModule]] = defaultdict(dict)
        for spec in (self.space.largest(), self.space.smallest()):
            self._run(spec)

    def __call__(self, spec: SubnetSpec, batch_size: int = 1) -> Cost:
        """Return the cost of one forward pass of a subnet over a whole batch.

        Raises:
            SpecError: the specification is malformed or of another space, or the batch size is below 1.
        """
        if batch_size < 1:
            raise SpecError(f"batch_size: {batch_size} is not at least 1")
        counts = self._run(spec)
        vector = counts.vector
        macs, activation, weights = (int(vector[2 + i :: len(COUNTS)].sum()) for i in range(3))
        return Cost(
            parameters=int(vector[0]),
            macs=macs * batch_size,
            activation_bytes=activation * batch_size,
            weight_bytes=weights,
            not_counted=tuple(sorted(counts.not_counted)),
            product_macs=int(vector[feature("product", "macs")]) * batch_size,
        )

    def vector(self, spec: SubnetSpec) -> Vector:
        """Return the costs of the subnet `spec` for one input, in the order of `subnetact.costs.FEATURES`.

        These are the number of parameters, and per kind of layer the number of modules, multiply-accumulates,
        bytes written and bytes of weights.
        """
        return self._run(spec).vector

    def _empty_input(self, given: Tensor) -> Tensor:
        """Return an input without data; of whole numbers, as in a mask, the values of the first are known."""
        empty = given.new_empty((1, *given.shape[1:]), device="meta")
        if not given.is_floating_point() and len(given) and empty.numel() <= MOST_FOLLOWED:
            self._mode.values[empty] = given[:1].cpu()
        return empty

    def _run(self, spec: SubnetSpec) -> _Counts:
        """Return the counts of a subnet for one input."""
        network = self._view(self._network, self.space.resolve(spec))
        counts = self._mode.counts = _Counts(network.held.copy())
        try:
            with torch.no_grad(), self._mode:
                call_with(network.module, self._input)
        except Exception as error:
            raise_if_explained(error)
            advice = WITHOUT_VALUES if "meta tensor" in str(error) else ""
            raise SpecError(
                f"{self.space.name}: the network does not run without data on {describe_input(self._input)}: "
                f"{summary(network.module, error)}{advice}"
            ) from error
        return counts

    def _view(self, module: nn.Module, row: SizeRow) -> _CountedModule:
        sizes, views = self._own_sizes[module](row), self._views[module]
        found = views.get(sizes)
        if found is None:
            if len(views) >= MOST_VIEWS:
                views.clear()
            found = views[sizes] = self._bind(module, row)
        return found

    def _bind(self, module: nn.Module, row: SizeRow) -> _CountedModule:
        """Make the view of one module out of the views of its submodules."""
        views: dict[str, _CountedModule] = {}

        def child(name: str, submodule: nn.Module) -> nn.Module:
            views[name] = self._view(submodule, row)
            return views[name].module

        bound = bind_module(module, row, child, lambda norm: norm.bind(row))
        for view in views.values():
            if view.module is bound:
                return view  # a switch is replaced by the module that it chooses
        made = _CountedModule(bound, kind_of(template_of(module)), self._mode, self._item_bytes, self._tied)
        for name, view in views.items():
            if self._first[module._modules[name]] == (module, name):
                made.hold(view)
        return made


class _CountedModule:
    """One module of a subnet. Its forward runs once for inputs of the same shapes, and is repeated later.

    Attributes:
        held: what does not depend on inputs: modules, parameters and bytes of weights.
        tied: the part of it that is tied parameters, each by its place in memory.
    """

    def __init__(
        self, module: nn.Module, kind: str, mode: _CountingMode, item_bytes: int, tied: Container[int]
    ) -> None:
        self.module, self.forward = module, module.forward
        self.multiplies = kind not in ("norm", "other")
        self.kind = kind = "low" if self.multiplies and isinstance(module, Low) else kind
        self.mode, self.item_bytes = mode, item_bytes
        self.calls: _Calls = {}
        own = {name: t for name, t in module._parameters.items() if t is not None}
        self.has_tensors = bool(own)
        self.held = np.zeros(len(FEATURES), np.int64)
        self.tied: dict[Hashable, Vector] = {}
        if own:
            scale = module.lowered.scale if isinstance(module, Low) else None
            self.held[0] = 0 if scale is None else -scale.numel()
            self.held[feature(kind, "modules")] = 1
        for place, t in {tensor_place(t): t for t in own.values()}.items():
            one = np.zeros(len(FEATURES), np.int64)
            one[0], one[feature(kind, "weight_bytes")] = t.numel(), t.nbytes
            self.held += one
            if storage_id(t) in tied:
                self.tied[place] = one
        object.__setattr__(module, "forward", self)

    def hold(self, submodule: _CountedModule) -> None:
        """Count what a submodule holds, apart from tied parameters that count already."""
        self.held += submodule.held
        for place in submodule.tied.keys() & self.tied.keys():
            self.held -= submodule.tied[place]
        self.tied = self.tied | submodule.tied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def run(counts: _Counts) -> Any:
            outputs = self.forward(*args, **kwargs)
            if counts.own_macs:
                kind = self.kind if self.multiplies else "product"
                counts.vector[feature(kind, "macs")] += counts.own_macs
                counts.vector[feature("product", "modules")] += not self.multiplies
                counts.own_macs = 0
            if self.has_tensors:
                elements = sum(leaf.numel() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
                counts.vector[feature(self.kind, "activation_bytes")] += elements * self.item_bytes
            return outputs

        return self.mode.remembered(self.calls, (args, kwargs) if kwargs else args, run)


class _CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the multiply-accumulates of matrix products and convolutions to the innermost `counts`.

    `values` are those of the whole numbers of the example, and of those that follow: forwards branch on
    masks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = _Counts()
        self._operators: _Calls = {}
        self.values: Any = WeakTensorKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import torch's compiler, which takes seconds

    def remembered(self, calls: _Calls, inputs: Hashable, run: Callable[[_Counts], Any]) -> Any:
        """Return the outputs of a call, and count it; `run` is called once for inputs of the same shapes."""
        try:
            key = _signature(inputs)
            found = calls.get(key)
        except TypeError:  # an input that is neither a tensor nor hashable
            key, found = None, None
        caller = self.counts
        if found is None:
            self.counts = _Counts()
            found = run(self.counts), self.counts
            self.counts = caller
            if key is not None:
                calls[key] = found
        outputs, counts = found
        caller.vector += counts.vector
        caller.own_macs += counts.own_macs
        caller.not_counted |= counts.not_counted
        # An alias, because the caller may change the shape of its tensor in place.
        return _alias(outputs) if isinstance(outputs, Tensor) else tree_map_only(Tensor, _alias, outputs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0] in self.values:
            return self.values[args[0]].item()
        out = self._counted(func, args, kwargs)
        if isinstance(out, Tensor) and not out.is_floating_point() and out.numel() <= MOST_FOLLOWED:
            with suppress(KeyError):  # Something is not known.
                known, named = tree_map_only(Tensor, self.values.__getitem__, (args, kwargs))
                self.values[out] = func(
                    *known, **{**named, **dict.fromkeys({"device"} & named.keys(), "cpu")}
                )
        return out

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.is_mutable:  # its output is one of its inputs
            return self._run(func, args, kwargs, self.counts)
        inputs = (func, args, kwargs) if kwargs else (func, *args)
        return self.remembered(self._operators, inputs, lambda counts: self._run(func, args, kwargs, counts))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], counts: _Counts) -> Any:
        packet = func._overloadpacket
        formula: Callable[..., int] | None = flop_registry.get(_AS.get(packet, packet))
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        name = packet.__name__
        if formula is not None:
            counts.own_macs += formula(*args, **kwargs, out_val=out) // 2
        elif not func.is_view and func.namespace == "aten" and not any(part in name for part in _MOVES_DATA):
            counts.not_counted.add(name.strip("_").removeprefix("native_").split("_legit")[0])
        return out


def _own_sizes(module: nn.Module) -> Callable[[SizeRow], Any]:
    """Return a function that returns the entries of a size row that a module and its submodules follow."""
    operators = [m for m in module.modules() if isinstance(m, Operator)]
    follows = {dim for m in operators for dim in (*m.dims.values(), m.precision_dim) if dim is not None}
    return itemgetter(*sorted(follows)) if follows else lambda _: ()


def _signature(value: Any) -> Hashable:
    """Return a key of inputs: the shapes of tensors, and all other values themselves."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    kind = type(value)
    if kind in (int, str, bool, float):
        return kind, value
    if isinstance(value, list | tuple):
        return (kind, *[_signature(item) for item in value])
    if isinstance(value, dict):
        return (kind, *[(name, _signature(item)) for name, item in value.items()])
    hash(value)
    return kind, value


def _alias(tensor: Tensor) -> Tensor:
    return torch.Tensor._make_subclass(torch.Tensor, tensor)


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def kind_of(layer: nn.Module) -> str:
    """Return which of `KINDS` an ordinary module is; of an operator, pass the template."""
    kind = traits_of(layer).kind
    if kind.endswith("convolution"):
        convolution: Any = layer
        if convolution.groups > 1:
            return "depthwise"
        return "pointwise" if set(convolution.kernel_size) == {1} else "convolution"
    return "linear" if kind == "linear" else "norm" if kind.endswith("norm") else "other"


def feature(kind: str, count: str) -> int:
    """Return the position in `FEATURES` of one of `COUNTS` of one of `KINDS`."""
    return FEATURES.index(f"{kind}.{count}")
