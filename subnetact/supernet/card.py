"""Card: what is told of a supernet where it is published, beside its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from subnetact.errors import SpecError
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec


@dataclass(frozen=True)
class Card:
    """What is told of a supernet where it is published; bundles keep it.

    Attributes:
        subnets: the named subnets.
        quality: name of a subnet -> what was measured -> `{"value": number, "source": text or None}`.
        licence: the licence of the weights.
        factory: the function of a library that makes the original network.
    """

    subnets: Mapping[str, SubnetSpec] = field(default_factory=dict)
    quality: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    licence: str | None = None
    factory: Mapping[str, Any] | None = None

    def find(self, space: SubnetSpace, subnet: Any) -> SubnetSpec:
        """Return a subnet by its name, its specification, or what `space.parse` takes."""
        if isinstance(subnet, SubnetSpec):
            return space.check(subnet)
        named = self.subnets.get(subnet) if isinstance(subnet, str) else None
        if named is None and isinstance(subnet, str) and "=" not in subnet:
            raise SpecError(f"no subnet is called {subnet!r:.60}; choose from {', '.join(self.subnets):.999}")
        return space.parse(subnet) if named is None else named

    def with_names(self, kinds: Mapping[SubnetSpec, str]) -> Card:
        """Return a card in which all given subnets have names: those without get their kind and a number."""
        named, numbers = set(self.subnets.values()), {kind: count() for kind in kinds.values()}
        subnets = dict(self.subnets)
        for spec, kind in kinds.items():
            if spec not in named:
                subnets[next(n for i in numbers[kind] if (n := f"{kind}-{i}") not in self.subnets)] = spec
        return replace(self, subnets=subnets)

    def names_of(self, specs: Sequence[SubnetSpec]) -> tuple[str, ...]:
        """Return the name of each subnet; those without one are `subnet-0` and so on."""
        named = self.with_names(dict.fromkeys(specs, "subnet")).subnets
        return tuple(map({spec: name for name, spec in named.items()}.__getitem__, specs))

    def extended(
        self,
        space: SubnetSpace,
        subnets: Mapping[str, Any] | None,
        quality: Mapping[str, Mapping[str, float]] | None,
        source: str | None,
        licence: str | None,
        factory: Mapping[str, Any] | None,
    ) -> Card:
        """Return a card with what `Supernet.save_pretrained` is given; what is None stays."""
        named = self.subnets or {"smallest": space.smallest(), "largest": space.largest()}
        if subnets is not None:
            found = {n: s if isinstance(s, SubnetSpec) else space.parse(s) for n, s in subnets.items()}
            named = {name: space.check(spec) for name, spec in found.items()}
        measured = {name: dict(known) for name, known in self.quality.items() if name in named}
        for name, figures in (quality or {}).items():
            if name not in named:
                raise SpecError(f"quality: no subnet is called {name!r}; choose from {', '.join(named)}")
            stated = {what: {"value": float(value), "source": source} for what, value in figures.items()}
            measured.setdefault(name, {}).update(stated)
        return Card(named, measured, licence or self.licence, factory or self.factory)

    @classmethod
    def read(cls, document: Mapping[str, Any], read_spec: Callable[[Mapping[str, Any]], SubnetSpec]) -> Card:
        """Return the card that the index of a bundle holds; ValueError and the like if it is damaged."""
        specs, quality = {}, {}
        for name, stated in document["subnets"].items():
            specs[name] = read_spec(stated)
            quality[name] = {
                str(what): {"value": float(known["value"]), "source": known["source"]}
                for what, known in stated["quality"].items()
            }
        known = {name: figures for name, figures in quality.items() if figures}
        return cls(specs, known, document["licence"], document["model"])
