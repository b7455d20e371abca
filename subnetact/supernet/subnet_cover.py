"""subnet_cover: few subnets in which every choice of every slot occurs, and every pair of choices that meet.

Choices of two slots meet if one module has sizes of both, or if the forward of the module around two layers,
which may keep them in lists, sees both. Slots that never meet share a column of a covering array, so that a
network of any depth needs about a dozen subnets.
"""

from __future__ import annotations

import random
from itertools import combinations

from torch import nn

from subnetact.operators import LayerSelect
from subnetact.operators.base import template_of
from subnetact.space import SubnetSpace
from subnetact.spec import FLOAT32, PRECISION, SubnetSpec
from subnetact.supernet.bind import operators_in

FEWEST = 6
"""So many subnets are tried at least, random ones where slots do not meet."""
CANDIDATES = 50
"""Every row of a covering array is the best of so many random ones."""


def subnet_cover(network: nn.Module, space: SubnetSpace) -> list[SubnetSpec]:
    """Return the smallest subnet and others, at float32, in which all choices of slots that meet occur."""
    axes = [axis for axis in space.axes if axis.name != PRECISION]
    slots = [slot for axis in axes for slot in axis.slots]
    columns, column_of = list[set[str]](), list[int]()
    for scopes in _scopes(network, space):
        free = (i for i, taken in enumerate(columns) if taken.isdisjoint(scopes))
        column_of.append(next(free, len(columns)))
        columns += [set()] if column_of[-1] == len(columns) else []
        columns[column_of[-1]] |= scopes
    placed = list(zip(slots, column_of, strict=True))
    sizes = [max(len(slot.choices) for slot, at in placed if at == i) for i in range(len(columns))]
    rng = random.Random(0)
    choices = [(slot.choices[0], *rng.sample(slot.choices[1:], len(slot.choices) - 1)) for slot in slots]
    specs = []
    for row in _array(sizes, rng):
        values = iter([options[row[c] % len(options)] for c, options in zip(column_of, choices, strict=True)])
        specs.append(space.spec(**{axis.name: [next(values) for _ in axis.slots] for axis in axes}))
    specs += [space.at_precision(space.sample(rng), FLOAT32) for _ in range(FEWEST - len(specs))]
    return list(dict.fromkeys(specs))


def _scopes(network: nn.Module, space: SubnetSpace) -> list[set[str]]:
    """Return for every slot the names of the modules whose sizes it decides, or whose forwards see these."""
    modules = dict(network.named_modules(remove_duplicate=False))
    seen_in: dict[int, set[str]] = {}
    for operator in operators_in(network):
        for part, position in operator.dims.items():
            skips = isinstance(operator, LayerSelect)
            path = f"{operator.path}.{part}".lstrip(".") if skips else operator.path
            around = path.rpartition(".")[0]
            while around and isinstance(template_of(modules[around]), nn.ModuleList | nn.ModuleDict):
                around = around.rpartition(".")[0]
            seen_in.setdefault(position, set()).update({path, f"{around}()"})
    largest, full, scopes = space.largest(), space.resolve(space.largest()), list[set[str]]()
    for axis in space.axes:
        for i, slot in enumerate(axis.slots if axis.name != PRECISION else ()):
            when = slot.used_when if largest[axis.name][i] is None else None
            gate = [] if when is None else [(when.axis, when.slot)]
            pairs = zip(space.resolve(space.narrowed([(axis.name, i), *gate])), full, strict=True)
            changed = [at for at, sizes in enumerate(pairs) if sizes[0] != sizes[1]]
            scopes.append(set[str]().union(*(seen_in.get(at, ()) for at in changed)))
    return scopes


def _array(sizes: list[int], rng: random.Random) -> list[list[int]]:
    """Return rows with all pairs of levels of two columns of some sizes; the first has zeros only."""
    pairs = list(combinations(range(len(sizes)), 2))
    missing = {(a, i, b, j) for a, b in pairs for i in range(sizes[a]) for j in range(sizes[b])}
    rows = [[level % size for size in sizes] for level in range(max(sizes) if len(sizes) == 1 else 1)]
    while True:
        missing -= {(a, rows[-1][a], b, rows[-1][b]) for a, b in pairs}
        if not missing:
            return rows
        drawn = [[rng.randrange(size) for size in sizes] for _ in range(CANDIDATES)]
        a, i, b, j = min(missing)
        for row in drawn:
            row[a], row[b] = i, j
        rows.append(max(drawn, key=lambda row: sum(row[a] == i and row[b] == j for a, i, b, j in missing)))
