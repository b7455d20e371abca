"""The state of a search: the evaluated subnets, the population, and the file to resume from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from subnetact.errors import FileFormatError, ResumeMismatch
from subnetact.files.documents import DocumentFormat
from subnetact.latency.pareto import Costs
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec

__all__ = ["Objectives", "SearchState"]

STATE = DocumentFormat(
    "the state of a search", "subnetact.search", 1, "remove it to begin anew, or name another file"
)

Objectives: TypeAlias = tuple[float, ...]
"""The accuracy in percent, which is maximised, then the latencies in ms, which are minimised."""


class SearchState:
    """The state of a search between two generations.

    Args:
        space: the search space.
        settings: arguments of the search. A search resumes only with the same settings.
        seed: seed of the random number generator; it becomes one of the settings.

    Attributes:
        found: the objectives of every evaluated subnet, in the order of evaluation.
        population: positions in `found` of the parents of the next generation.
        generation: number of completed generations.
        remeasured: for chosen subnets, the latencies of the second measurement, in ms.
        rng: the random number generator of the search.
    """

    def __init__(self, space: SubnetSpace, settings: Mapping[str, Any], seed: int) -> None:
        self.space = space
        self.settings = {**settings, "seed": seed}
        self.found: dict[SubnetSpec, Objectives] = {}
        self.population: list[int] = []
        self.generation = 0
        self.remeasured: dict[SubnetSpec, Objectives] = {}
        self.rng = np.random.default_rng(seed)

    def costs(self) -> Costs:
        """Return the objectives of all evaluated subnets, all to be minimised.

        Returns:
            Array of shape (subnets, objectives): the negated accuracy, then the latencies.
        """
        points = np.array(list(self.found.values()), dtype=np.float64)
        points[:, 0] *= -1
        return points

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as JSON, atomically.

        Args:
            path: the file; an earlier state is replaced.

        Raises:
            MissingFile: the folder of the file does not exist.
        """
        index = {spec: i for i, spec in enumerate(self.found)}
        data = {
            "space": self.space.id,
            "settings": self.settings,
            "generation": self.generation,
            "rng": self.rng.bit_generator.state,
            "axes": [axis.name for axis in self.space.axes],
            "evaluated": [
                [[list(values) for values in self.space.values(spec).values()], list(objectives)]
                for spec, objectives in self.found.items()
            ],
            "population": self.population,
            "remeasured": [[index[spec], list(ms)] for spec, ms in self.remeasured.items()],
        }
        STATE.write(path, data)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a file that `save` wrote.

        Args:
            path: the file.

        Raises:
            MissingFile: there is no such file.
            FileFormatError: the file is not the state of a search, is damaged, or has a newer schema.
            ResumeMismatch: the state belongs to another space, or to a search with other settings.
        """
        data = STATE.read(path)
        here = {"space": self.space.id, "axes": [axis.name for axis in self.space.axes]}
        there = {name: data.get(name) for name in here}
        if there != here:
            raise ResumeMismatch(
                f"{path}: a search in {there}, this one is in {here}; resume with the same supernet, or name "
                "a new file"
            )
        before: Any = data.get("settings")
        if not isinstance(before, Mapping):
            raise FileFormatError(f"{path}: damaged: it has no settings; {STATE.next_step}")
        if before != self.settings:
            differing = [
                f"{name} was {before.get(name)!r}, is {self.settings.get(name)!r}"
                for name in {**self.settings, **before}
                if before.get(name) != self.settings.get(name)
            ]
            raise ResumeMismatch(
                f"{path}: a search with other settings ({'; '.join(differing)}); use the same ones, or name "
                "a new file"
            )
        with STATE.fields(path, passing=()):
            self._fill(data)

    def _fill(self, data: Mapping[str, Any]) -> None:
        found = {}
        for values, objectives in data["evaluated"]:
            pairs = zip(data["axes"], (tuple(v) for v in values), strict=True)
            found[self.space.spec(**dict(pairs))] = tuple(float(value) for value in objectives)
        specs = list(found)
        population = [int(i) for i in data["population"]]
        if population and not 0 <= min(population) <= max(population) < len(specs):
            raise IndexError("the population is not among the evaluated")
        remeasured = {specs[i]: tuple(float(v) for v in ms) for i, ms in data["remeasured"]}
        rng = np.random.default_rng(0)
        rng.bit_generator.state = data["rng"]
        self.found, self.population, self.remeasured, self.rng = found, population, remeasured, rng
        self.generation = int(data["generation"])
