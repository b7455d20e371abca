"""Names of modules that differ in numbers only, as those of the members of a list of modules do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from typing import Any

__all__ = ["collapsed", "without_numbers"]


def without_numbers(name: str) -> str:
    """Return what the names of the members of a list of modules have in common."""
    return re.sub(r"\d+", "#", name)


def collapsed(names: Iterable[str], ordered: bool = False) -> dict[str, list[str]]:
    """Return names by the text that stands for them: `layers.{0..29}.mlp` for those of 30 layers.

    Names that differ in one number have one text. Its numbers ascend, unless the names are `ordered`.
    """
    rows: dict[tuple[str, ...], list[str]] = {tuple(re.split(r"(\d+)", name)): [name] for name in names}
    for at in range(max(map(len, rows), default=0) - 2, 0, -2):
        alike: dict[Any, dict[tuple[str, ...], list[str]]] = {}
        for row, own in rows.items():
            alike.setdefault((row[:at], row[at + 1 :]), {})[row[at : at + 1]] = own
        rows = {
            (*before, *_listed([int(n) for part in numbered for n in part], ordered), *after): [*chain(*owns)]
            for (before, after), numbered in alike.items()
            for owns in [numbered.values()]
        }
    return {"".join(row): own for row, own in rows.items()}


def _listed(numbers: list[int], ordered: bool) -> Iterator[str]:
    """Yield a text for numbers, in which those that follow one another are a range: {0..3,7}."""
    steps = groupby(enumerate(numbers if ordered else sorted(numbers)), lambda item: item[1] - item[0])
    runs = [[str(number) for _, number in step] for _, step in steps]
    text = ",".join(run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    yield from [f"{{{text}}}" if len(numbers) > 1 else text] * bool(numbers)
