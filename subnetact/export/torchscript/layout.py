"""What the graphs of one network share, and the module that runs one of them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from subnetact.space import Row

__all__ = ["Gate", "Layout", "Shared", "Traced"]

Gate = tuple[int, int]
"""A position in a row, and the value there with which something is kept."""


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
    legal: set[tuple[int, Any, tuple[Gate, ...]]] = field(default_factory=set)

    @property
    def sizes(self) -> int:
        """How many sizes a row has."""
        return len(self.names)


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


@dataclass(frozen=True)
class Shared:
    """What the graphs of one network have in common.

    Attributes:
        layout: of the rows.
        rows: sizes of subnets.
        registered: ids of the network's parameters and buffers.
        kinds: the classes there are, by their code.
    """

    layout: Layout
    rows: Sequence[Row]
    registered: Set[int]
    kinds: _Kinds = field(default_factory=dict)
