"""Counts operations with a forward pass over meta tensors, and remembers the pass through every module.

Meta tensors have a shape but no data. What a module of a subnet computes follows from two things:

- Its *own sizes*: the entries of the size row that its operators and those of its submodules follow. Two
  subnets whose block 7 has the same own sizes share one view of block 7.
- The shapes of its inputs. The outputs and the counts of every call are remembered under these shapes.

A new subnet therefore runs only the outermost modules, which repeat the results of every block that was
seen before, and run the blocks that are new. A module that depends on anything else, for example on an
attribute that another module sets during the forward pass, is counted as in its first call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from subnetact.costs.layers import FEATURES, MULTIPLYING, Vector, feature, kind_of
from subnetact.errors import SpecError
from subnetact.operators.base import Operator
from subnetact.operators.precision import FLOAT_BITS
from subnetact.space import SizeRow
from subnetact.supernet.batches import as_batch, call_with, describe_input, map_tensors, tensors_of
from subnetact.supernet.bind import bind_module
from subnetact.supernet.failure import summary
from subnetact.supernet.supernet import Supernet

__all__ = ["Counts", "MetaForward"]

MOST_VIEWS = 4096
"""Views that are kept per module. When there are more, all of them are deleted and made again on demand."""

_MOVES_DATA = (
    "arange",
    "cat",
    "clone",
    "copy",
    "detach",
    "embedding",
    "empty",
    "full",
    "ones",
    "pad",
    "view",
    "zeros",
)
"""Parts of the names of operators that only move data. Operators that return views are not counted either."""

_AS = {torch.ops.aten._int_mm: torch.ops.aten.mm}
"""ATen operators that multiply as others do."""

_NAMES = {"_native_batch_norm_legit_no_training": "batch_norm"}
"""ATen operators that are reported under a shorter name."""


@dataclass
class Counts:
    """What a module and its submodules compute for one input.

    Attributes:
        vector: counts in the order of `FEATURES`.
        not_counted: ATen names of the operators whose arithmetic is in no count.
        own_macs: multiply-accumulates of operators that are not yet counted for a module.
    """

    vector: Vector = field(default_factory=lambda: np.zeros(len(FEATURES), np.int64))
    not_counted: set[str] = field(default_factory=set)
    own_macs: int = 0


Calls: TypeAlias = dict[Hashable, tuple[Any, Counts]]
"""The outputs and counts of calls, by the types and shapes of their inputs."""


@dataclass
class _View:
    """One module of a subnet.

    Attributes:
        module: the plain module on the meta device.
        held: counts that do not depend on inputs: modules, parameters and weight bytes, those of
            submodules included.
        kind: which of `KINDS` the module is in this subnet.
        calls: the calls of the module so far.
    """

    module: nn.Module
    held: Vector
    kind: str
    calls: Calls = field(default_factory=dict)


@dataclass
class _Site:
    """One module of the supernet's network.

    Attributes:
        module: the module, an operator or an ordinary one.
        own_sizes: returns the entries of a size row that this module and its submodules follow.
        children: the submodules, by name.
        counted: names of the submodules whose parameters are counted here. A module that occurs in
            several places is counted in the first one.
        kind: which of `KINDS` the module is.
        multiplies: whether its multiply-accumulates belong to its kind; otherwise they are products.
        views: the views made so far, by their own sizes.
    """

    module: nn.Module
    own_sizes: Callable[[SizeRow], Any]
    children: dict[str, _Site | None]
    counted: frozenset[str]
    kind: str
    multiplies: bool
    views: dict[Any, _View] = field(default_factory=dict)


class MetaForward:
    """Counts what subnets compute, with its own copy of the supernet on torch's meta device.

    Args:
        supernet: the supernet. It is not changed, and later changes to it are not seen.
        input_shape: shape of one input, without the batch dimension; or one input itself, a tensor, or a
            tuple or dictionary of tensors.
        dtype: type of the input, if only its shape is given. By default it is whole numbers if the network
            begins with an embedding, otherwise the type of the weights.
    """

    def __init__(
        self, supernet: Supernet, input_shape: Sequence[int] | Any, dtype: torch.dtype | None = None
    ) -> None:
        tensors = [*supernet.network.parameters(), *supernet.network.buffers()]
        network = copy.deepcopy(supernet.network, {id(t): _empty(t) for t in tensors})
        _run_chosen_experts(network)
        if dtype is None:
            leaves = (m for m in network.modules() if list(m.parameters(recurse=False)))
            first = next(leaves, None)
            floats = (t.dtype for t in tensors if t.is_floating_point())
            dtype = torch.long if isinstance(first, nn.Embedding) else next(floats, torch.float32)
        self.space = supernet.space
        given = as_batch(input_shape)
        if not any(isinstance(part, Tensor) for part in tensors_of(given)):
            try:
                given = torch.empty(tuple(input_shape), dtype=dtype, device="meta")
            except (TypeError, RuntimeError) as error:
                raise SpecError(
                    f"input_shape: {input_shape!r} is no shape and no input with a tensor; give whole "
                    "numbers such as (3, 224, 224), or one input"
                ) from error
        self.input = map_tensors(lambda t: torch.empty((1, *t.shape), dtype=t.dtype, device="meta"), given)
        self._item_bytes = next((p.element_size() for p in supernet.parameters()), 4)
        self._network = _site(network, {}, set())
        self._mode = _CountingMode()

    def run(self, row: SizeRow) -> Counts:
        """Return the counts of one subnet for one input.

        Args:
            row: the size row of the subnet (`SubnetSpace.resolve`).

        Raises:
            SpecError: the network cannot run on an input of this shape, or its forward pass needs data.
        """
        network = self._view(self._network, row)
        self._mode.under_way = [Counts(network.held.copy())]
        try:
            with torch.no_grad(), self._mode:
                call_with(network.module, self.input)
        except Exception as error:
            advice = ""
            if "meta tensor" in str(error):
                advice = (
                    "; costs follow from shapes: leave out inputs whose values a forward reads, as a mask's"
                )
            raise SpecError(
                f"{self.space.name}: the network does not run without data on {describe_input(self.input)}: "
                f"{summary(network.module, error)}{advice}"
            ) from error
        return self._mode.under_way[0]

    def _view(self, site: _Site, row: SizeRow) -> _View:
        sizes = site.own_sizes(row)
        found = site.views.get(sizes)
        if found is None:
            if len(site.views) >= MOST_VIEWS:
                site.views.clear()
            found = site.views[sizes] = self._bind(site, row)
        return found

    def _bind(self, site: _Site, row: SizeRow) -> _View:
        """Make the view of one module out of the views of its submodules."""
        views: dict[str, _View] = {}

        def child(name: str) -> nn.Module | None:
            submodule = site.children[name]
            if submodule is None:
                return None
            views[name] = self._view(submodule, row)
            return views[name].module

        bound = bind_module(site.module, row, child, lambda norm: norm.bind(row))
        held = np.zeros(len(FEATURES), np.int64)
        for name, view in views.items():
            if name in site.counted:
                held += view.held
        if any(view.module is bound for view in views.values()):
            return _View(bound, held, site.kind)  # a switch is replaced by the module that it chooses
        own = {name: t for name, t in bound._parameters.items() if t is not None}
        tensors = list(own.values())
        kind = site.kind
        if isinstance(site.module, Operator) and site.module.bits(row) != FLOAT_BITS:
            kind = site.kind if site.module.mixin() in (None, object) else "low"
        if tensors:
            held[0] += sum(t.numel() for name, t in own.items() if not name.endswith("weight_scale"))
            held[feature(kind, "modules")] += 1
            held[feature(kind, "weight_bytes")] += sum(t.numel() * t.element_size() for t in tensors)
        made = _View(bound, held, kind)
        forward = bound.forward
        object.__setattr__(bound, "forward", partial(self._call, made, site, bool(tensors), forward))
        return made

    def _call(
        self,
        view: _View,
        site: _Site,
        has_tensors: bool,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a module of a view, or repeat what it did for inputs of these shapes."""

        def run(counts: Counts) -> Any:
            outputs = forward(*args, **kwargs)
            if counts.own_macs:
                kind = view.kind if site.multiplies else "product"
                counts.vector[feature(kind, "macs")] += counts.own_macs
                counts.vector[feature("product", "modules")] += not site.multiplies
                counts.own_macs = 0
            if has_tensors:
                elements = sum(leaf.numel() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
                counts.vector[feature(view.kind, "activation_bytes")] += elements * self._item_bytes
            return outputs

        return self._mode.remembered(view.calls, (args, kwargs), run)


class _CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the multiply-accumulates of matrix products and convolutions.

    Attributes:
        under_way: the counts of the modules and operators that are running, the innermost one last.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.under_way = [Counts()]
        self._operators: Calls = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import torch's compiler, which takes seconds

    def remembered(self, calls: Calls, inputs: Hashable, run: Callable[[Counts], Any]) -> Any:
        """Return the outputs for the inputs, and add the counts to those of the caller.

        Args:
            calls: outputs and counts of calls so far.
            inputs: the inputs, of which types, shapes and plain values matter.
            run: computes the outputs, and adds to the counts that it gets.
        """
        try:
            key = _signature(inputs)
            found = calls.get(key)
        except TypeError:  # an input that is neither a tensor nor hashable
            key, found = None, None
        if found is None:
            counts = Counts()
            self.under_way.append(counts)
            outputs = run(counts)
            self.under_way.pop()
            found = outputs, counts
            if key is not None:
                calls[key] = found
        outputs, counts = found
        caller = self.under_way[-1]
        caller.vector += counts.vector
        caller.own_macs += counts.own_macs
        caller.not_counted |= counts.not_counted
        # An alias, because the caller may change the shape of its tensor in place.
        return _alias(outputs) if isinstance(outputs, Tensor) else tree_map(_alias, outputs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:  # its output is one of its inputs
            return self._run(func, args, kwargs, self.under_way[-1])
        return self.remembered(
            self._operators, (func, args, kwargs), lambda counts: self._run(func, args, kwargs, counts)
        )

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], counts: Counts) -> Any:
        counted = _AS.get(func._overloadpacket, func._overloadpacket)
        formula: Callable[..., int] | None = flop_registry.get(counted)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if formula is not None:
            counts.own_macs += formula(*args, **kwargs, out_val=out) // 2
        elif not func.is_view and func.namespace == "aten" and not any(part in name for part in _MOVES_DATA):
            counts.not_counted.add(_NAMES.get(name, name.strip("_")))
        return out


def _site(module: nn.Module, done: dict[nn.Module, _Site], counted: set[nn.Module]) -> _Site:
    if module in done:
        return done[module]
    children: dict[str, _Site | None] = {}
    first: set[str] = set()
    counted.add(module)
    for name, child in module._modules.items():
        if child is not None and child not in counted:
            first.add(name)
        children[name] = None if child is None else _site(child, done, counted)
    operators = [m for m in module.modules() if isinstance(m, Operator)]
    follows = {dim for m in operators for dim in (*m.dims.values(), m.precision_dim) if dim is not None}
    own_sizes: Callable[[SizeRow], Any] = itemgetter(*sorted(follows)) if follows else lambda _: ()
    plain = module.template if isinstance(module, Operator) else module
    done[module] = _Site(
        module, own_sizes, children, frozenset(first), kind_of(plain), isinstance(plain, MULTIPLYING)
    )
    return done[module]


def _signature(value: Any) -> Hashable:
    """Return a key of the inputs: the shapes of tensors, and all other values themselves."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return (type(value), *map(_signature, value))
    if isinstance(value, dict):
        return (type(value), *((name, _signature(item)) for name, item in value.items()))
    hash(value)
    return type(value), value


def _alias(value: Any) -> Any:
    return torch.Tensor._make_subclass(torch.Tensor, value) if isinstance(value, Tensor) else value


def _run_chosen_experts(network: nn.Module) -> None:
    """Let mixtures of experts of transformers compute with products whose shapes are known without data.

    By default, the tokens are sorted by expert, and how many tokens each expert gets depends on the data.
    """
    for module in network.modules():
        choose: Any = getattr(module, "set_experts_implementation", None)
        if callable(choose):
            choose("batched_mm")


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
