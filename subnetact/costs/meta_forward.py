"""What the forward pass of a subnet computes, from a pass over tensors that hold no data."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from subnetact.errors import SpecError
from subnetact.operators import LayerSelect, ModuleSwitch
from subnetact.space import Row
from subnetact.supernet.bind import bind
from subnetact.supernet.supernet import Supernet

__all__ = ["Pass", "ShapeTracer"]

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
"""Parts of the names of operators that compute nothing, beside those that return views."""

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default


@dataclass(frozen=True)
class Pass:
    """One forward pass of one input, by the modules' names in the supernet's network.

    Attributes:
        elements: how many numbers a module's outputs hold, over all its calls.
        macs: multiply-accumulates of a module's own forward, without its submodules'.
        not_counted: the other operators that computed something.
    """

    elements: dict[str, int]
    macs: dict[str, int]
    not_counted: frozenset[str]


class ShapeTracer:
    """Runs subnets of a supernet on torch's meta device, with its own copy of the modules.

    Args:
        supernet: the supernet; it is not changed, and later changes to it are not seen.
        input_shape: of one input, without the batch.
        dtype: of the input; default: whole numbers where the network begins with an embedding, else the
            type of its weights.
    """

    def __init__(
        self, supernet: Supernet, input_shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> None:
        tensors = [*supernet.network.parameters(), *supernet.network.buffers()]
        self.network: nn.Module = copy.deepcopy(supernet.network, {id(t): _empty(t) for t in tensors})
        self.space = supernet.space
        if dtype is None:
            leaves = (m for m in self.network.modules() if list(m.parameters(recurse=False)))
            first = next(leaves, None)
            floats = (t.dtype for t in tensors if t.is_floating_point())
            dtype = torch.long if isinstance(first, nn.Embedding) else next(floats, torch.float32)
        self.input = torch.empty((1, *input_shape), dtype=dtype, device="meta")

    def run(self, row: Row) -> Pass:
        """Return what the forward pass of a subnet computes, by its sizes.

        Raises:
            SpecError: the network cannot run on an input of this shape, or not without data.
        """
        view = bind(self.network, row, lambda norm: norm.bind(row))
        counting = _Counting()
        elements: defaultdict[str, int] = defaultdict(int)
        for module, path in _named(self.network, view, row, "", {}).items():
            module.register_forward_pre_hook(partial(_enter, counting, path))
            module.register_forward_hook(partial(_leave, counting, path, elements))
        try:
            with torch.no_grad(), counting:
                view(self.input)
        except Exception as error:
            raise SpecError(
                f"{self.space.name}: the network does not run without data on an input of shape "
                f"{tuple(self.input.shape)} and type {self.input.dtype}: {error}"
            ) from error
        return Pass(dict(elements), dict(counting.macs), frozenset(counting.others))


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the multiply-accumulates of matrix products and convolutions, for the module under way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.under_way = [""]
        self.macs: Counter[str] = Counter()
        self.others: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import torch's compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if func is _BATCH_NORM:  # torch takes a millisecond to find out that the shape stays
            out = torch.empty_like(args[0]), args[0].new_empty(0), args[0].new_empty(0)
            self.others.add("batch_norm")
            return out
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if formula is not None:
            self.macs[self.under_way[-1]] += formula(*args, **kwargs, out_val=out) // 2
        elif not func.is_view and func.namespace == "aten" and not any(part in name for part in _MOVES_DATA):
            self.others.add(name.strip("_"))
        return out


def _enter(counting: _Counting, path: str, *_: Any) -> None:
    counting.under_way.append(path)


def _leave(counting: _Counting, path: str, elements: dict[str, int], *call: Any) -> None:
    counting.under_way.pop()
    elements[path] += sum(leaf.numel() for leaf in tree_leaves(call[-1]) if isinstance(leaf, Tensor))


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _named(
    module: nn.Module, view: nn.Module, row: Row, path: str, names: dict[nn.Module, str]
) -> dict[nn.Module, str]:
    """Return every module of a view with the name that what it is a view of has in the network."""
    if isinstance(module, ModuleSwitch):
        (name,) = module.kept(row)
        return _named(module.get_submodule(name), view, row, f"{path}.{name}", names)
    if view not in names:
        names[view] = path
        for name, child, part in _children(module, view, row):
            _named(child, part, row, f"{path}.{name}" if path else name, names)
    return names


def _children(module: nn.Module, view: nn.Module, row: Row) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    kept = module.kept(row) if isinstance(module, LayerSelect) else list(module._modules)
    for name, part in zip(kept, view._modules.values(), strict=True):
        child = module._modules[name]
        if child is not None and part is not None:
            yield name, child, part
