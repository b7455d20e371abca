"""covering: few subnets in which every choice of every slot occurs, and every pair of choices that meet.

Choices of two slots meet if one module has sizes of both, or if one forward sees both. An `nn.Sequential`
only passes on what its modules return, so sizes that stay inside of it are not seen around it. Slots that
never meet share a column of a covering array, so that a network of any depth needs about a dozen subnets.
"""

from __future__ import annotations

import random
from itertools import combinations

from torch import nn

from subnetact.operators import LayerSelect
from subnetact.operators.base import template_of
from subnetact.space import SubnetSpace
from subnetact.spec import PRECISION, SubnetSpec
from subnetact.supernet.bind import operators_in

__all__ = ["covering"]

ATTEMPTS, MOST_COLUMNS = 10, 16
"""So many covering arrays of at most so many columns are made, of which the shortest is taken."""


def covering(network: nn.Module, space: SubnetSpace) -> list[SubnetSpec]:
    """Return the smallest subnet and others, at float32, in which all choices of slots that meet occur."""
    axes = [axis for axis in space.axes if axis.name != PRECISION]
    slots = [slot for axis in axes for slot in axis.slots]
    columns: list[set[str]] = []
    column_of: list[int] = []
    for scopes in _scopes(network, space):
        free = (i for i, taken in enumerate(columns) if taken.isdisjoint(scopes))
        column_of.append(next(free, len(columns)))
        if column_of[-1] == len(columns):
            columns.append(set())
        columns[column_of[-1]] |= scopes
    levels = [1] * len(columns)
    for column, slot in zip(column_of, slots, strict=True):
        levels[column] = max(levels[column], len(slot.choices))
    attempts = range(ATTEMPTS if len(levels) <= MOST_COLUMNS else 1)
    rows = min((_array(levels, random.Random(seed)) for seed in attempts), key=len)
    rng = random.Random(0)
    choices = [(slot.choices[0], *rng.sample(slot.choices[1:], len(slot.choices) - 1)) for slot in slots]
    specs = []
    for row in rows:
        values = iter([own[row[c] % len(own)] for c, own in zip(column_of, choices, strict=True)])
        specs.append(space.spec(**{axis.name: [next(values) for _ in axis.slots] for axis in axes}))
    return list(dict.fromkeys(specs))


def _scopes(network: nn.Module, space: SubnetSpace) -> list[set[str]]:
    """Return for every slot the names of the modules whose sizes it decides, or whose forwards see these."""
    modules = dict(network.named_modules(remove_duplicate=False))
    places: dict[int, set[str]] = {}
    skippable: set[str] = set()
    for operator in operators_in(network):
        for part, position in operator.dims.items():
            layer = f"{operator.path}.{part}".lstrip(".")
            if isinstance(operator, LayerSelect) and layer in modules:
                skippable.add(layer)
                places.setdefault(position, set()).add(layer)
            else:
                places.setdefault(position, set()).add(operator.path)
    largest = space.values(space.largest())
    full, scopes = space.resolve(space.largest()), []
    for axis in space.axes:
        for i, slot in enumerate(axis.slots if axis.name != PRECISION else ()):
            values = list(largest[axis.name])
            values[i] = slot.choices[0]
            row = space.resolve(space.spec(**{**largest, axis.name: values}))
            changed = (p for p, (size, whole) in enumerate(zip(row, full, strict=True)) if size != whole)
            paths = {path for position in changed for path in places.get(position, ())}
            scopes.append(paths | _seen_around(paths, modules) | _prefixes(paths, skippable))
    return scopes


def _prefixes(paths: set[str], blocks: set[str]) -> set[str]:
    return {block for block in blocks if any(path.startswith(f"{block}.") for path in paths)}


def _seen_around(paths: set[str], modules: dict[str, nn.Module]) -> set[str]:
    """Return the modules whose forwards see the sizes of some modules inside of them."""
    inside: dict[str, set[str]] = {}
    for path in paths:
        child = around = path
        direct = True
        while around:
            around = around.rpartition(".")[0]
            container = template_of(modules[around])
            if isinstance(container, nn.Sequential):
                child, direct = around, False
            elif not isinstance(container, nn.ModuleList | nn.ModuleDict):
                inside.setdefault(around, set()).update({child, ""} if direct else {child})
                break
    return {around for around, children in inside.items() if len(children) > 1}


def _array(levels: list[int], rng: random.Random) -> list[list[int]]:
    """Return rows of levels in which all pairs of levels of two columns occur; the first has zeros only."""
    levels = [*levels, 1] if len(levels) == 1 else levels
    missing = {
        (a, i, b, j)
        for a, b in combinations(range(len(levels)), 2)
        for i in range(levels[a])
        for j in range(levels[b])
    }
    rows: list[list[int]] = []
    row = dict.fromkeys(range(len(levels)), 0)
    while True:
        rows.append([row[column] for column in range(len(levels))])
        missing -= {(a, row[a], b, row[b]) for a, b in combinations(range(len(levels)), 2)}
        if not missing:
            return rows
        a, i, b, j = min(missing)
        row = {a: i, b: j}
        for column in rng.sample(range(len(levels)), len(levels)):
            if column not in row:
                gains = [_gain(column, level, row, missing) for level in range(levels[column])]
                row[column] = max(range(len(gains)), key=lambda n: (gains[n], rng.random()))


def _gain(column: int, level: int, row: dict[int, int], missing: set[tuple[int, int, int, int]]) -> int:
    """Return how many missing pairs a level of a column adds to an unfinished row."""
    pairs = ((*sorted([(column, level), other]),) for other in row.items())
    return sum((*first, *second) in missing for first, second in pairs)
