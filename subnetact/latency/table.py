"""LatencyTable: the latency of every subnet at every batch size on one device, and its accuracy."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError
from subnetact.files.documents import DocumentFormat, StrPath
from subnetact.latency import arrays
from subnetact.latency.arrays import Floats
from subnetact.latency.compare import Comparison
from subnetact.latency.pareto import pareto_front
from subnetact.spec import SubnetSpec

LATENCY_TABLE = DocumentFormat(
    "a latency table", "subnetact.latency_table", 1, "give a file that LatencyTable.save() wrote"
)
AS_SERVED = "as served"
"""The mode of a table of subnets as an engine runs them, some as fused programs and others not."""
NOT_IN_MS = ("stable", "windows", "runs", "busy", "fused")
"""Statistics of a profile that are not latencies; those of further modes begin with these names, too."""


@dataclass(frozen=True, eq=False, repr=False, init=False)
class LatencyTable:
    """Latency of every (subnet, batch size) on one device, with the accuracy of every subnet.

    Schedulers choose from it, the simulator and the planner compute with it, and `profile_latency` measures
    it. A table is immutable: it copies what it is made of, and operations return new tables. A latency of NaN
    marks a cell that was not measured or cannot run, for example because memory ran out; schedulers never
    choose such a cell.

    Attributes:
        subnets: the readable key of each subnet, in the order of their ids.
        accuracy: the accuracy of each subnet, percent; NaN, or None when a table is made, if it is not known.
        batch_sizes: the measured batch sizes, ascending.
        latency_ms: read-only float64 array of shape (subnets, batch sizes), ms.
        statistics: further read-only arrays of that shape, by name: "std", "p50" or "p99", in ms. A profile
            also has "stable" (1 or 0), "windows" and "runs" (counts), "busy" (the share of the time for which
            the process waited for a CPU) and, where an engine serves fused programs beside other subnets,
            "fused" (1 or 0). A statistic of extracted networks has a name such as "p99_of_extract".
        stamp: facts about the device and the measurement, of values that JSON can hold.
        pad_index: entry k is the column of the smallest batch size >= k, for k from 0 to the largest batch
            size.

    Raises:
        TableError: the numbers make no table; the message names the first wrong value and its place.

    Example:
        >>> table = LatencyTable(["small", "large"], [70.0, 75.0], [1, 8], [[1, 5], [2, 9]])
        >>> table.latency_at("small", 4)
        2.7142857142857144
    """

    subnets: tuple[str, ...]
    accuracy: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    latency_ms: Floats
    statistics: Mapping[str, Floats]
    stamp: Mapping[str, Any]
    pad_index: tuple[int, ...] = field(init=False)

    def __init__(
        self,
        subnets: Sequence[str],
        accuracy: Sequence[float | None],
        batch_sizes: Sequence[int],
        latency_ms: npt.ArrayLike,
        statistics: Mapping[str, npt.ArrayLike] | None = None,
        stamp: Mapping[str, Any] | None = None,
    ) -> None:
        keys = tuple(map(str, subnets))
        if not keys:
            raise TableError("subnets: the table is empty; give at least one subnet")
        repeated = sorted(key for key, count in Counter(keys).items() if count > 1)
        if repeated:
            raise TableError(f"subnets: {repeated[0]!r} appears more than once; keys must be unique")
        sizes = arrays.ascending_sizes(batch_sizes)
        checked = partial(arrays.checked_cells, keys=keys, sizes=sizes)
        cells = checked("latency_ms", latency_ms, positive=True)
        if np.isnan(cells).all():
            raise TableError("latency_ms: every cell is NaN; no subnet can run at any batch size")
        further = {str(n): checked(f"statistics[{n!r}]", a) for n, a in (statistics or {}).items()}
        vars(self).update(  # The class is frozen.
            subnets=keys,
            accuracy=arrays.percentages(tuple(accuracy), keys),
            batch_sizes=sizes,
            latency_ms=cells,
            statistics=MappingProxyType(further),
            stamp=MappingProxyType(arrays.json_copy(stamp or {})),
            pad_index=tuple(bisect_left(sizes, k) for k in range(sizes[-1] + 1)),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LatencyTable) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.subnets, self.batch_sizes))

    def __reduce__(self) -> tuple[Any, ...]:
        return LatencyTable.from_json, (self.to_json(),)

    @property
    def modes(self) -> tuple[str, ...]:
        """How each subnet ran while it was measured, "fused" for example; () if the table does not say."""
        stamp, fused = self.stamp, self.statistics.get("fused")
        mode, backend = stamp.get("mode"), str(stamp.get("backend", "fused"))
        if mode == AS_SERVED and fused is not None:
            unfused = str(stamp.get("unfused", "zero-copy"))
            return tuple(backend if (row == 1).any() else unfused for row in fused)
        program = stamp.get("program", "engine")
        return tuple(str(mode if program == "engine" else program) for _ in self.subnets if mode)

    @property
    def conditions(self) -> str:
        """What latencies are of, in one line: mode, batch sizes, threads and processor, as far as known."""
        stamp, modes = self.stamp, " and ".join(sorted(set(self.modes)))
        sizes = f"batch size{'s' * (len(self.batch_sizes) > 1)} {', '.join(map(str, self.batch_sizes))}"
        facts = [modes, sizes, stamp.get("device_name") or stamp.get("device")]
        if stamp.get("device") != "cuda" and (threads := stamp.get("threads")):
            facts[2:] = [f"{threads} thread{'s' * (threads != 1)}", facts[2], stamp.get("processor")]
        return ", ".join(str(fact) for fact in facts if fact)

    def front(self, batch_size: float) -> list[int]:
        """Return the rows of the subnets that no other one dominates at a batch size, fastest first.

        Args:
            batch_size: as in `latency_at`. Subnets that cannot run are left out.

        Raises:
            TableError: the table mixes modes, an accuracy is not known, or the batch size is outside of it.

        Example:
            >>> LatencyTable(["a", "b", "c"], [70.0, 69.0, 75.0], [1], [[1], [2], [3]]).front(1)
            [0, 2]
        """
        if len(set(self.modes)) > 1 or AS_SERVED in self.modes:
            raise TableError(
                f"the table mixes modes ({self.conditions}), and its front would be that of the mixture; "
                "measure all subnets in one mode: profile_latency(engine)"
            )
        accuracy = self.known_accuracy()
        ms = [self.latency_at(i, batch_size) for i in range(len(self.subnets))]
        ran = (i for i, time_ms in enumerate(ms) if not math.isnan(time_ms))
        return pareto_front(ran, cost=ms.__getitem__, gain=accuracy.__getitem__)

    @property
    def fastest_ms(self) -> float:
        """The lowest latency of any cell, ms."""
        return float(np.nanmin(self.latency_ms))

    def padded(self, k: int) -> int:
        """Return the smallest measured batch size that holds `k` requests; TableError if none does."""
        if not 1 <= k <= self.batch_sizes[-1]:
            raise TableError(f"batch of {k}: not profiled; the table covers 1 to {self.batch_sizes[-1]}")
        return self.batch_sizes[self.pad_index[k]]

    def known_accuracy(self) -> tuple[float, ...]:
        """Return `accuracy`, percent, none of it NaN; TableError names a subnet without."""
        for key, percent in zip(self.subnets, self.accuracy, strict=True):
            if math.isnan(percent):
                raise TableError(f"accuracy of {key!r} is not known; give it with table.with_accuracy([...])")
        return self.accuracy

    def with_accuracy(self, accuracy: Sequence[float]) -> LatencyTable:
        """Return the same latencies with other accuracies; warn if they look like fractions of 1.

        Args:
            accuracy: percent per subnet, from 0 to 100; NaN if it is not known.

        Raises:
            TableError: there is not one value per subnet, or a value is not a percentage.
        """
        arrays.warn_of_fractions(accuracy)
        return replace(self, accuracy=tuple(accuracy))

    def monotone(self) -> LatencyTable:
        """Return the same table with latencies that never fall as the batch grows.

        Each cell becomes the highest latency of its subnet at any batch size up to the cell's. Thus no cell
        promises less time than was measured. NaN stays NaN.
        """
        missing = np.isnan(self.latency_ms)
        rising = np.maximum.accumulate(np.where(missing, -np.inf, self.latency_ms), axis=-1)
        return replace(self, latency_ms=np.where(missing, np.nan, rising))

    def select(
        self, indices: Iterable[int] | None = None, *, batch_sizes: Sequence[int] | None = None
    ) -> LatencyTable:
        """Return a table with some of the subnets and batch sizes.

        Args:
            indices: the subnets to keep, by index and in this order; if None, all.
            batch_sizes: the batch sizes to keep, ascending; if None, all.

        Raises:
            TableError: the table has no such subnet or batch size.
        """
        chosen = list(range(len(self.subnets))) if indices is None else [int(i) for i in indices]
        for i in chosen:
            if not 0 <= i < len(self.subnets):
                raise TableError(f"subnet {i}: not in the table; choose from 0 to {len(self.subnets) - 1}")
        sizes = self.batch_sizes if batch_sizes is None else tuple(batch_sizes)
        for size in sizes:
            if size not in self.batch_sizes:
                raise TableError(f"batch size {size}: not profiled; choose from {list(self.batch_sizes)}")
        columns = [self.batch_sizes.index(size) for size in sizes]
        cells = np.ix_(chosen, columns)
        return replace(
            self,
            subnets=tuple(self.subnets[i] for i in chosen),
            accuracy=tuple(self.accuracy[i] for i in chosen),
            batch_sizes=tuple(self.batch_sizes[j] for j in columns),
            latency_ms=self.latency_ms[cells],
            statistics={name: values[cells] for name, values in self.statistics.items()},
        )

    def scaled(self, factor: float) -> LatencyTable:
        """Return the table of a device that is slower or faster by a constant factor.

        Args:
            factor: every latency, and every statistic in ms, is multiplied by this; > 0.

        Raises:
            TableError: the factor is not finite and > 0.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise TableError(f"factor: {factor} must be finite and > 0")
        further = {n: a if n.startswith(NOT_IN_MS) else a * factor for n, a in self.statistics.items()}
        return replace(self, latency_ms=self.latency_ms * factor, statistics=further)

    def latency_at(self, subnet: int | str, batch_size: float) -> float:
        """Return the latency of one subnet at any batch size, linear between measured ones.

        Args:
            subnet: its index or key.
            batch_size: from the smallest to the largest measured batch size; nothing is extrapolated.

        Returns:
            The latency, ms; NaN if the next smaller or next larger measured batch size cannot run.

        Raises:
            TableError: the table has no such subnet, or the batch size is outside of the table.
        """
        at = self.subnets.index(subnet) if isinstance(subnet, str) and subnet in self.subnets else subnet
        if isinstance(at, bool) or not isinstance(at, Integral) or not 0 <= at < len(self.subnets):
            known = f"0 to {len(self.subnets) - 1}; a LatencyPredictor fitted to these predicts others"
            raise TableError(f"subnet {subnet!r}: not in the table; choose from {known}")
        sizes = self.batch_sizes
        if not sizes[0] <= batch_size <= sizes[-1]:
            raise TableError(
                f"batch size {batch_size}: measured were {sizes[0]} to {sizes[-1]}; "
                "nothing is extrapolated, profile more batch sizes"
            )
        return float(np.interp(batch_size, sizes, self.latency_ms[at]))

    def latency_of(self, batch_size: float) -> Callable[[SubnetSpec], float]:
        """Return the measured latencies as a function of a subnet, for `search`.

        The function knows the subnets of this table alone, and raises TableError for others: no latency is
        guessed. A search over a whole space needs a table of all its subnets, or a `LatencyPredictor` that is
        fitted to those of the table.

        Args:
            batch_size: from the smallest to the largest measured batch size, linear between them.

        Returns:
            A function from a subnet to its latency in ms.

        Raises:
            TableError: the batch size is outside of the table.

        Example:
            >>> search(supernet, accuracy, [table.latency_of(1), table.latency_of(8)])
        """
        self.latency_at(0, batch_size)
        return lambda spec: self.latency_at(spec.key, batch_size)

    def compare(self, other: LatencyTable, statistic: str | None = None) -> Comparison:
        """Compare another profile of some of the same subnets with this one.

        Args:
            other: the other profile.
            statistic: a name in `statistics`, "p50" for example; if None, `latency_ms` is compared.

        Returns:
            The ratios of the other table's latencies to this table's, over the cells that both have.

        Raises:
            TableError: they have no cell in common, or one lacks the statistic.
        """
        keys = [key for key in self.subnets if key in set(other.subnets)]
        sizes = [size for size in self.batch_sizes if size in set(other.batch_sizes)]
        compared, common = [], []
        for table in (self, other):
            if statistic not in (None, *table.statistics):
                known = ", ".join(table.statistics) or "none"
                raise TableError(f"statistic: a table has no {statistic!r}; it has {known}")
            compared.append(table.latency_ms if statistic is None else table.statistics[statistic])
            rows, columns = map(table.subnets.index, keys), map(table.batch_sizes.index, sizes)
            common.append(compared[-1][np.ix_(list(rows), list(columns))])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = common[1] / common[0]
        ratios[~(np.isfinite(ratios) & (ratios > 0))] = np.nan
        both = np.isfinite(ratios).sum()
        if not both:
            raise TableError(
                "the tables have no measured cell in common; compare tables of the same subnets and batch "
                f"sizes ({self!r} and {other!r})"
            )
        first, second = (int(np.isfinite(cells).sum() - both) for cells in compared)
        names = {**self.stamp, **other.stamp}.keys() - {"measured", "command", "clock_mhz"}
        facts = {name: (self.stamp.get(name), other.stamp.get(name)) for name in sorted(names)}
        differing = {name: pair for name, pair in facts.items() if pair[0] != pair[1]}
        return Comparison(tuple(keys), tuple(sizes), ratios, statistic or "latency", first, second, differing)

    def to_json(self) -> dict[str, Any]:
        """Return the table as dictionaries, lists, strings and numbers, for `from_json`."""
        return {
            "subnets": list(self.subnets),
            "accuracy": _with_nulls(np.array(self.accuracy)),
            "batch_sizes": list(self.batch_sizes),
            "latency_ms": _with_nulls(self.latency_ms),
            "statistics": {name: _with_nulls(values) for name, values in self.statistics.items()},
            "stamp": dict(self.stamp),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> LatencyTable:
        """Return the table that `to_json` described.

        Args:
            document: what `to_json` returned; further fields are ignored.

        Raises:
            KeyError: a field is missing.
            TableError: the numbers make no table.
        """
        names = ("subnets", "accuracy", "batch_sizes", "latency_ms", "statistics", "stamp")
        return cls(**{name: document[name] for name in names})

    def save(self, path: StrPath) -> None:
        """Write the table as JSON, atomically: an interrupted write leaves an earlier file intact.

        Args:
            path: the file; its folder must exist.

        Raises:
            MissingFile: the folder does not exist.
        """
        LATENCY_TABLE.write(path, self.to_json(), indent=1)

    @classmethod
    def load(cls, path: StrPath) -> LatencyTable:
        """Return the table that `save` wrote to a file.

        Args:
            path: the file.

        Raises:
            MissingFile: there is no such file.
            FileFormatError: the file is truncated, of another kind, or of another schema.
            TableError: the file is well-formed, but its numbers make no table.
        """
        document = LATENCY_TABLE.read(path)
        with LATENCY_TABLE.fields(path):
            return cls.from_json(document)

    def __repr__(self) -> str:
        known = [percent for percent in self.accuracy if not math.isnan(percent)]
        span = f"{min(known):g}-{max(known):g} %" if known else "accuracy not known"
        return (
            f"LatencyTable({len(self.subnets)} subnets, {span}, "
            f"fastest {self.fastest_ms:.3g} ms; {self.conditions})"
        )


def _with_nulls(values: Floats) -> Any:
    """Return numbers in lists, with None in the place of NaN."""
    found = values.astype(object)
    found[np.isnan(values)] = None
    return found.tolist()
