"""NormTable: the BatchNorm means and variances of every calibrated subnet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.errors import FileFormatError, ForeignSpec, SpecError, SubnetActError
from subnetact.files.documents import DocumentFormat, StrPath
from subnetact.files.fork import new_lock
from subnetact.files.tensors import documented_tensors, write_tensors
from subnetact.operators import SubnetNorm
from subnetact.operators.correction import Correction, correct_
from subnetact.spec import SubnetSpec

_CHANGING = new_lock()
"""Held while the rows of a table are exchanged."""

NORM_TABLE = DocumentFormat("a norm table", "subnetact.norms", 1, "save it again with NormTable.save()")


class NormRow:
    """The statistics row of one subnet: (mean, variance) per BatchNorm, and corrections, in one tensor.

    Args:
        channels: the number of channels of every BatchNorm, by name.
        flat: all means, then all variances, in the order of `channels`, then every correction (down, up,
            bias); its shape is (their numbers,). The row keeps this tensor and does not copy it.
        corrected: name of a layer with a correction -> (rank, inputs, outputs).

    Attributes:
        channels: as given.
        flat: as given.
        corrected: as given.

    Raises:
        SpecError: `flat` has another shape, or a number of channels is not positive.
    """

    __slots__ = ("channels", "corrected", "flat")

    def __init__(
        self,
        channels: Mapping[str, int],
        flat: Tensor,
        corrected: Mapping[str, tuple[int, int, int]] | None = None,
    ) -> None:
        total, shapes = sum(channels.values()), dict(corrected or {})
        numbers = 2 * total + sum(r * i + o * r + o for r, i, o in shapes.values())
        if flat.shape != (numbers,):
            raise SpecError(
                f"a statistics row of {total} channels and {len(shapes)} corrections needs shape "
                f"({numbers},), got {tuple(flat.shape)}"
            )
        if any(count < 1 for count in (*channels.values(), *chain(*shapes.values()))):
            raise SpecError("the channel counts of a statistics row must be positive")
        self.channels = dict(channels)
        self.flat = flat
        self.corrected = shapes

    @classmethod
    def of(
        cls,
        statistics: Mapping[str, tuple[Tensor, Tensor]],
        corrections: Mapping[str, Correction] | None = None,
    ) -> NormRow:
        """Return a row with copies of (mean, variance) pairs by name, as `statistics_of` returns them.

        Args:
            statistics: the pairs, each of shape (channels,), of one dtype and on one device.
            corrections: name of a layer -> its correction.
        """
        means, variances = zip(*statistics.values(), strict=True) if statistics else ((), ())
        further = [t.flatten() for one in (corrections or {}).values() for t in one]
        flat = torch.cat([*means, *variances, *further]) if statistics or further else torch.empty(0)
        shapes = {n: (*one.down.shape, len(one.bias)) for n, one in (corrections or {}).items()}
        return cls({name: mean.numel() for name, (mean, _) in statistics.items()}, flat.detach(), shapes)

    @property
    def nbytes(self) -> int:
        """The bytes of the statistics."""
        return self.flat.numel() * self.flat.element_size()

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return every (mean, variance) pair by the name of its BatchNorm."""
        if not self.channels:
            return {}
        counts = list(self.channels.values())
        statistics = self.flat.detach()[: 2 * sum(counts)]
        means, variances = (torch.split(half, counts) for half in statistics.chunk(2))
        return dict(zip(self.channels, zip(means, variances, strict=True), strict=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> NormRow:
        """Return a statistics row whose tensor is `function(flat)`, of the same shape as `flat`."""
        return NormRow(self.channels, function(self.flat), self.corrected)

    def corrections(self) -> dict[str, Correction]:
        """Return every correction by the name of its layer; they are slices of `flat`."""
        sizes = [n for r, i, o in self.corrected.values() for n in (r * i, o * r, o)]
        parts = iter(torch.split(self.flat.detach()[2 * sum(self.channels.values()) :], sizes))
        return {
            name: Correction(next(parts).view(rank, inputs), next(parts).view(outputs, rank), next(parts))
            for name, (rank, inputs, outputs) in self.corrected.items()
        }

    def correct_(self, module: nn.Module, name: str) -> nn.Module:
        """Return a `module` of the subnet, the layer `name`, with its correction, if it has one, in place."""
        return correct_(module, self.corrections()[name]) if name in self.corrected else module


class NormTable:
    """Statistics rows by subnet.

    `supernet.norms` is the table that a supernet uses; `subnetact.calibrate` fills it.

    Args:
        space: the id of the search space whose subnets the table may hold (`SubnetSpace.id`). Subnets that
            differ in their precision only share one row.

    Source:
        SubnetNorm in SuperServe, section 3.1.

    Example:
        >>> supernet.norms.save("norms.safetensors")
        >>> supernet.norms = NormTable.load("norms.safetensors")
    """

    def __init__(self, space: str) -> None:
        self.space = space
        self._rows: dict[SubnetSpec, NormRow] = {}
        self._home: nn.Module | None = None

    def __contains__(self, spec: object) -> bool:
        return isinstance(spec, SubnetSpec) and spec.base in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[SubnetSpec]:
        return iter(list(self._rows))

    def get(self, spec: SubnetSpec) -> NormRow | None:
        """Return the statistics row of the subnet `spec`, or None if it was never calibrated."""
        return self._rows.get(spec.base)

    @property
    def rows(self) -> Mapping[SubnetSpec, NormRow]:
        """All statistics rows by subnet. After every change of the table this is another mapping."""
        return self._rows

    def update(self, rows: Mapping[SubnetSpec, NormRow]) -> None:
        """Add or replace statistics rows, all or none.

        Args:
            rows: the rows by subnet. The table keeps them without a copy, unless it is that of a supernet
                on another device, or they have other digits than float32, or float64 if its BatchNorms do.

        Raises:
            ForeignSpec: a subnet is of another space. The table is then unchanged.
        """
        self._own(rows)
        new = {spec.base: self._at_home(row) for spec, row in rows.items()}
        with _CHANGING:
            self._rows = {**self._rows, **new}

    def nbytes(self) -> int:
        """Return the bytes of all statistics."""
        return sum(row.nbytes for row in self._rows.values())

    def to_like(self, norms: Iterable[SubnetNorm] = ()) -> NormTable:
        """Return a copy whose rows are, now and later, where the first of the BatchNorms `norms` is, if any.

        They have its dtype, but at least the digits of float32: its statistics are measurements, and what is
        rounded or overflows at half precision never comes back.
        """
        table = NormTable(self.space)
        table._home = next(iter(norms), None)
        table._rows = {spec: table._at_home(row.map(torch.clone)) for spec, row in self._rows.items()}
        return table

    def _at_home(self, row: NormRow) -> NormRow:
        if self._home is None:
            return row
        home = next(filter(torch.is_floating_point, self._home.buffers()))
        flat = row.flat.to(home.device, torch.promote_types(home.dtype, torch.float32))
        return row if flat is row.flat else NormRow(row.channels, flat, row.corrected)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor of every row by what `function` makes of it, a copy on a GPU for example.

        A function that rounds to less than float32 moves rows and leaves their values alone.
        """
        with _CHANGING:
            self._rows = {spec: row.map(lambda t: _moved(t, function(t))) for spec, row in self._rows.items()}

    def drop(self, specs: Iterable[SubnetSpec]) -> None:
        """Remove the statistics rows of subnets, those that have one; engines then refuse these subnets.

        Args:
            specs: the subnets. A subnet at a lower precision has the row of the same subnet at float32.

        Raises:
            ForeignSpec: a subnet is of another space. The table is then unchanged.
            SpecError: `specs` is no list of specifications.

        Example:
            >>> supernet.norms.drop([spec for spec in supernet.norms if spec not in served])
        """
        gone = self._own(specs)
        with _CHANGING:
            self._rows = {spec: row for spec, row in self._rows.items() if spec not in gone}

    def keep(self, specs: Iterable[SubnetSpec]) -> None:
        """Remove the statistics rows of all subnets but these, as `drop` does.

        Args:
            specs: the subnets.

        Raises:
            ForeignSpec: a subnet is of another space. The table is then unchanged.
            SpecError: `specs` is no list of specifications.
        """
        self.drop(self._rows.keys() - self._own(specs))

    def _own(self, specs: Iterable[SubnetSpec]) -> set[SubnetSpec]:
        """Return the subnets that rows of `specs` have, which are of the space of the table."""
        given: Any = specs
        subnets = list(given) if isinstance(given, Iterable) else [given]
        for spec in subnets:
            if not isinstance(given, Iterable) or not isinstance(spec, SubnetSpec):
                raise SpecError(f"norms: expected a list of specifications, got {given!r}; write [spec]")
            if spec.space != self.space:
                raise ForeignSpec(f"the norm table is of space {self.space}, got a subnet of {spec.space}")
        return {spec.base for spec in subnets}

    def save(self, path: StrPath) -> None:
        """Write the table as a safetensors file with one tensor per row, atomically.

        Args:
            path: the file; an earlier one is replaced.

        Raises:
            MissingFile: the folder of the file does not exist.
            SpecError: `load` would refuse a row: it has statistics that are not finite, for example.
            WriteError: the file cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        rows = []
        for i, (spec, row) in enumerate(self._rows.items()):
            _require_sound(path, spec, row, SpecError)
            tensors[str(i)] = row.flat.detach().cpu().clone()
            rows.append({"spec": spec.to_json(), "channels": row.channels, "corrected": row.corrected})
        document = {**NORM_TABLE.header, "space": self.space, "rows": rows}
        write_tensors(path, tensors, {"document": json.dumps(document)})

    @classmethod
    def load(cls, path: StrPath) -> NormTable:
        """Read a table that `save` wrote.

        Args:
            path: the file.

        Returns:
            The table, on the CPU. `supernet.load_state_dict(weights, norms=table)` loads it together with the
            weights that it was calibrated with; if they are there already, assign it to `supernet.norms`.

        Raises:
            MissingFile: there is no such file.
            FileFormatError: the file is damaged, of another kind or of another schema, or statistics in it
                are not finite, are no floating-point numbers, or have a negative variance.
        """
        with documented_tensors(path, NORM_TABLE, passing=()) as (document, stored):
            table = cls(document["space"])
            for i, entry in enumerate(document["rows"]):
                spec = SubnetSpec.from_json(entry["spec"])
                corrected = {n: (int(a), int(b), int(c)) for n, (a, b, c) in entry["corrected"].items()}
                channels = {name: index(count) for name, count in entry["channels"].items()}
                row = table._rows[spec] = NormRow(channels, stored[str(i)], corrected)
                _require_sound(path, spec, row, FileFormatError)
        return table


def required_table(table: Any, space: str) -> NormTable:
    """Return a table if it is one of a space; otherwise raise SpecError or ForeignSpec."""
    if not isinstance(table, NormTable):
        raise SpecError(f"norms: expected a NormTable, got {type(table).__name__}; NormTable.load(path)")
    if table.space != space:
        raise ForeignSpec(f"the norm table must be of space {space}, got {table.space}")
    return table


def _moved(flat: Tensor, result: Tensor) -> Tensor:
    """Return the `result` of moving statistics, with at least the digits of float32."""
    if result.dtype is flat.dtype:
        return result
    return flat.to(result.device, torch.promote_types(result.dtype, torch.float32))


def _require_sound(path: Any, spec: SubnetSpec, row: NormRow, error: type[SubnetActError]) -> None:
    """Refuse a statistics row that no file may hold with an `error`."""
    wrong = ""
    if not row.flat.is_floating_point():
        wrong = f"are {row.flat.dtype}, not floating-point numbers"
    elif not row.flat.isfinite().all():
        wrong = "are not finite"
    elif any((variance < 0).any() for _, variance in row.pairs().values()):
        wrong = "have a negative variance"
    if wrong:
        raise error(f"{path}: the statistics of {spec} {wrong}; calibrate and save again")
