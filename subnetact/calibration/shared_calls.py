"""SharedCalls: what modules returned in one subnet, for others in which they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from subnetact.calibration.calibration_norm import CalibrationNorm
from subnetact.operators import LayerSelect, ModuleSwitch, SubnetNorm
from subnetact.operators.base import Operator, template_of
from subnetact.operators.tensor_version import tensor_version
from subnetact.space import SizeRow
from subnetact.spec import grouped

Norms: TypeAlias = Mapping[str, CalibrationNorm]
"""The BatchNorms of a subnet that average, by their names."""


class _Call(NamedTuple):
    """One call: the sizes that the module followed, what it got and returned, averages before and after."""

    sizes: list[int]
    given: list[Any]
    structure: Any
    output: list[Any]
    returned: Any
    versions: list[int]  # of what it got, before the call, and of what it returned
    layers: int
    before: dict[str, Any]
    averages: dict[str, Any]

    def answers(self, sizes: list[int], given: list[Any], structure: Any, norms: Norms) -> bool:
        """Tell whether a call is the same, and nothing of this one was overwritten since."""
        same = (sizes, structure) == (self.sizes, self.structure)
        unchanged = same and self.versions == _versions((*self.given, *self.output))
        return (
            unchanged
            and all(map(_is_same, given, self.given))
            # A branch on values may have let earlier batches differ.
            and all(map(_is_same, *map(tree_leaves, ([norms[n].average for n in self.before], self.before))))
        )


class SharedCalls:
    """Calls of modules in the forward passes of subnets on one batch; equal ones are made once.

    Two calls are equal if the module follows the same sizes and gets equal inputs. BatchNorms follow the
    dimensions `norms_follow`, too: all, where every subnet has statistics of its own.

    Attributes:
        follows: the dimensions that a module and what is inside follow, by its name.
        order: all dimensions, in the order in which modules follow them.
        layers: the number of calls of modules without submodules, shared ones included.
        shared: the number of those that were not made again.
        peak: the most bytes that were kept between two subnets.
    """

    def __init__(self, network: nn.Module, norms_follow: Sequence[int] = ()) -> None:
        self.layers = self.shared = self.peak = self._changes = 0
        self._calls = dict[str, _Call]()
        self.follows, self.order = dict[str, list[int]](), list[int]()
        inside, gates, switches = list[tuple[str, str]](), dict[str, int](), list[str]()
        for path, module in network.named_modules():
            own = [gates[path]] if path in gates else []
            if isinstance(module, LayerSelect) and not isinstance(module, ModuleSwitch):
                gates |= {module.path_of(name): dim for name, dim in module.dims.items()}
            elif isinstance(module, Operator):
                own += [dim for dim in (*module.dims.values(), module.precision_dim) if dim is not None]
                own += norms_follow if isinstance(module, SubnetNorm) else ()
            callers = [p for p in ("", *accumulate(path.split("."), "{}.{}".format)) if p in self.follows]
            called = type(template_of(module)).forward is not nn.Module.forward
            if called and not path.startswith(tuple(switches)):
                inside += [(caller, path) for caller in callers[-1:]]
                self.follows[path], callers = [], [*callers, path]
            if isinstance(module, ModuleSwitch):  # Views have the module that it chooses under its name.
                switches.append(f"{path}.")
            for caller in callers:
                self.follows[caller] += own
            self.order += own
        self._inside = grouped(inside)

    def worth_noting(self, rows: Sequence[SizeRow]) -> list[set[str]]:
        """Return, for every row, the modules whose calls later ones share, if those run in this order."""
        noted, other = [set[str]() for _ in rows], dict[str, int]()
        for i in reversed(range(len(rows) - 1)):
            other |= {path: i + 1 for path in self.follows if not self._same(path, rows[i], rows[i + 1])}
            noted[i].update(self._parts("", i, rows, other), [""] if other.get("") != i + 1 else ())
        return noted

    def _parts(self, path: str, i: int, rows: Sequence[SizeRow], other: Mapping[str, int]) -> Iterator[str]:
        """Yield what is equal inside of a module, in the order of its parts, where it is not as a whole."""
        if path not in other:
            return
        for part in self._inside.get(path, ()):
            same = self._same(part, rows[i], rows[other[path]])
            yield from (part,) if same else ()
            yield from self._parts(part, i, rows, other)
            if not same:
                return  # What follows gets other inputs.

    def _same(self, path: str, row: SizeRow, other: SizeRow) -> bool:
        return all(row[i] == other[i] for i in self.follows[path])

    def share(
        self, view: nn.Module, row: SizeRow, noted: Collection[str] | None, norms: Norms | None = None
    ) -> None:
        """Let a view share calls with those that ran before, and note those of some of its modules.

        What it does not note it forgets, unless `noted` is None: then others share calls with those before.
        """
        for path, module in view.named_modules():
            if path in self.follows:
                if getattr(module, "inplace", False):
                    object.__setattr__(module, "inplace", False)  # It would overwrite what others read.
                forward = self._sharing(path, module, row, noted, norms or {})
                object.__setattr__(module, "forward", forward)

    def _sharing(
        self, path: str, module: nn.Module, row: SizeRow, noted: Collection[str] | None, norms: Norms
    ) -> Callable[..., Any]:
        forward, sizes = module.forward, [row[i] for i in self.follows[path]]
        notes = noted is not None and path in noted

        @wraps(forward)
        def shared(*args: Any, **kwargs: Any) -> Any:
            given, structure = tree_flatten((args, kwargs))
            call = self._calls.get(path) if notes or noted is None else self._calls.pop(path, None)
            if call is not None and call.answers(sizes, given, structure, norms):
                self.layers, self.shared = self.layers + call.layers, self.shared + call.layers
                for name, average in call.averages.items():
                    norms[name].average = average
                return tree_unflatten(call.output, call.returned)
            layers, changes = self.layers, self._changes
            before, versions = dict(vars(module)), _versions(given)
            averages = {name: norm.average for name, norm in norms.items()} if notes else {}
            result = forward(*args, **kwargs)
            self.layers += not module._modules
            # What a forward leaves in an attribute, others may read.
            self._changes += any(v is not before.get(n) for n, v in vars(module).items() if n != "_buffers")
            if notes and changes == self._changes:
                output, returned = tree_flatten(result)
                versions += _versions(output)
                now = {n: norm.average for n, norm in norms.items() if norm.average is not averages[n]}
                count, past = self.layers - layers, {name: averages[name] for name in now}
                self._calls[path] = _Call(
                    sizes, given, structure, output, returned, versions, count, past, now
                )
            return result

        return shared

    def keep(self, memory: float) -> None:
        """Forget the first calls, until the others fit into so many bytes."""
        while (held := self._held()) > memory:
            del self._calls[next(iter(self._calls))]
        self.peak = max(self.peak, held)

    def _held(self) -> int:
        values = {id(value): value for call in self._calls.values() for value in (*call.given, *call.output)}
        return sum(value.nbytes for value in values.values() if isinstance(value, Tensor))


def _versions(values: Iterable[Any]) -> list[int]:
    return [tensor_version(value) if isinstance(value, Tensor) else 0 for value in values]


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor) and value is not other:
        alike = (value.shape, value.dtype, value.stride()) == (other.shape, other.dtype, other.stride())
        return alike and torch.equal(value, other)
    return value is other or (isinstance(value, int | float | str | bool) and value == other)
