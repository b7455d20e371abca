"""ElasticAttribute: own parameters of a module, and plain numbers, that follow the subnet."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

from subnetact.operators.base import Operator
from subnetact.operators.vocabulary import ROUTED


class ElasticAttribute(Operator):
    """Gives a module whole numbers and parameters that depend on the subnet, each by its name.

    A part is the name of an attribute that the forward of the module reads. If the attribute is a whole
    number, such as a number of attention heads, the subnet's module has the size instead; the template has
    the largest value. If it is a parameter or a buffer of the module itself, such as a class token, the first
    entries of its last axis, or of each of its `Segments`, are kept; `"gamma.0"` names axis 0 instead. An
    object that the module holds may state the number, as in `"config.num_attention_heads"`; the subnet's
    module has a copy of that object.

    Example:
        >>> ElasticAttribute.on(num_heads="block0.heads", gamma="block0.width")
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        whole = (part for part in self.dims if part.rpartition(".")[0] not in self.segments)
        self.parts = (*self.segments, *whole)
        self.shapes |= {name: tuple(b.shape) for name, b in self._buffers.items() if b is not None}

    def check(self) -> None:
        """Refuse attributes that are missing, or neither whole numbers nor parameters with such an axis."""
        wrong = [part for part in self.parts if not (self._is_number(part) or self._is_axis(part))]
        if wrong or not self.dims:
            numbers = [n for n in self.template.__dict__ if not n.startswith("_") and self._is_number(n)]
            raise self.refuse(
                f"it sets whole numbers and slices parameters of the module itself, not {wrong}; the module "
                f"has {', '.join([*numbers, *self._parameters]) or 'neither'}"
            )

    def _is_number(self, part: str) -> bool:
        name, _, inner = part.partition(".")
        value = self.template.__dict__.get(name)
        return type(getattr(value, inner, None) if inner else value) is int

    def _is_axis(self, part: str) -> bool:
        name, _, axis = part.partition(".")
        return (axis.isdigit() or axis == "") and len(self.shapes.get(name, ())) > int(axis or 0)

    def _axis(self, part: str) -> tuple[str, int]:
        name, _, axis = part.partition(".")
        return name, int(axis) if axis else len(self.shapes[name]) - 1

    def full(self, part: str) -> int:
        """Return the number, or the length of the parameter's axis, in the full network."""
        if self._is_number(part):
            return int(attrgetter(part)(self.template))
        name, axis = self._axis(part)
        return self.shapes[name][axis]

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the described part of every axis of the parameter of a `name`; "" if there is none."""
        own = {self._axis(part): part for part in self.parts if not self._is_number(part)}
        return tuple(own.get((name, i), "") for i in range(len(self.shapes.get(name, ()))))

    def resized_in_reference(self, part: str) -> bool:
        """Tell whether a part is a number that a router chooses by, for which zeros do not stand."""
        return part.rpartition(".")[2] in ROUTED

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the numbers of the subnet's module, and the objects that state numbers."""
        found: dict[str, Any] = {}
        for part, size in zip(self.parts, self.totals(sizes), strict=True):
            if self._is_number(part):
                name, _, inner = part.partition(".")
                if inner:
                    found.setdefault(name, copy.copy(self.template.__dict__[name]))
                    setattr(found[name], inner, size)
                else:
                    found[name] = size
        return found
