"""NormTable: the BatchNorm means and variances of every calibrated subnet.

A `NormRow` is the statistics row of one subnet, in one tensor of its own. Subnets that begin with the same
layers have equal statistics there; the file of a table stores such equal statistics once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from os import PathLike
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from subnetact.errors import FileFormatError, ForeignSpec, SpecError
from subnetact.files.atomic import require_regular
from subnetact.files.documents import DocumentFormat, parse_json
from subnetact.files.tensors import write_tensors
from subnetact.spec import SubnetSpec

__all__ = ["NormRow", "NormTable"]

ALLOWED_BYTES, BYTES_PER_STORED_BYTE = 2**26, 256
"""The rows of a file may take this much memory: so much in any case, and so much per byte in the file."""
NORM_TABLE = DocumentFormat("a norm table", "subnetact.norms", 2, "save it again with NormTable.save()")


class NormRow(Mapping[str, tuple[Tensor, Tensor]]):
    """The statistics row of one subnet: BatchNorm name -> (mean, variance), each of shape (channels,).

    All pairs are slices of one tensor, so a change of that tensor in place changes them.

    Args:
        channels: the number of channels of every BatchNorm, by name.
        flat: all means, then all variances, in the order of `channels`; shape (2 * sum of channels,). The
            row keeps this tensor and does not copy it.

    Attributes:
        channels: as given.
        flat: as given.

    Raises:
        SpecError: `flat` has another shape, or a number of channels is not positive.
    """

    __slots__ = ("channels", "flat")

    def __init__(self, channels: Mapping[str, int], flat: Tensor) -> None:
        total = sum(channels.values())
        if flat.shape != (2 * total,):
            raise SpecError(
                f"a statistics row of {total} channels needs shape ({2 * total},), got {tuple(flat.shape)}"
            )
        if any(count < 1 for count in channels.values()):
            raise SpecError("the channel counts of a statistics row must be positive")
        self.channels = dict(channels)
        self.flat = flat

    @classmethod
    def of(cls, statistics: Mapping[str, tuple[Tensor, Tensor]]) -> NormRow:
        """Copy (mean, variance) pairs into one statistics row.

        Args:
            statistics: BatchNorm name -> (mean, variance), each of shape (channels,), of one dtype and on one
                device. `Supernet.statistics` returns such a mapping.
        """
        means, variances = zip(*statistics.values(), strict=True) if statistics else ((), ())
        flat = torch.cat([*means, *variances]) if statistics else torch.empty(0)
        return cls({name: mean.numel() for name, (mean, _) in statistics.items()}, flat.detach())

    @property
    def nbytes(self) -> int:
        """The bytes of the statistics."""
        return self.flat.numel() * self.flat.element_size()

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return every (mean, variance) pair by name, in one walk over the row."""
        if not self.channels:
            return {}
        counts = list(self.channels.values())
        means, variances = (torch.split(half, counts) for half in self.flat.detach().chunk(2))
        return dict(zip(self.channels, zip(means, variances, strict=True), strict=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> NormRow:
        """Return a statistics row whose tensor is `function(flat)`, of the same shape as `flat`."""
        return NormRow(self.channels, function(self.flat))

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        return self.pairs()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.channels)

    def __len__(self) -> int:
        return len(self.channels)


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
        self._changing = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"space": self.space, "rows": self._rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.space, self._rows, self._changing = state["space"], state["rows"], threading.Lock()

    def __contains__(self, spec: object) -> bool:
        return isinstance(spec, SubnetSpec) and spec.base in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[SubnetSpec]:
        return iter(list(self._rows))

    def get(self, spec: SubnetSpec) -> NormRow | None:
        """Return the statistics row of a subnet.

        Args:
            spec: the subnet. Its precision makes no difference.

        Returns:
            Its row, or None if the subnet was never calibrated.
        """
        return self._rows.get(spec.base)

    @property
    def rows(self) -> Mapping[SubnetSpec, NormRow]:
        """All statistics rows by subnet. After every change of the table this is another mapping."""
        return self._rows

    def update(self, rows: Mapping[SubnetSpec, NormRow]) -> None:
        """Add or replace statistics rows, all or none. Threads that do so at once lose no row.

        Args:
            rows: the rows by subnet; the table keeps them as they are, without a copy.

        Raises:
            ForeignSpec: a subnet is of another space. The table is then unchanged.
        """
        for spec in rows:
            if spec.space != self.space:
                raise ForeignSpec(f"the norm table is of space {self.space}, got a subnet of {spec.space}")
        new = {spec.base: row for spec, row in rows.items()}
        with self._changing:
            self._rows = {**self._rows, **new}

    def nbytes(self) -> int:
        """Return the bytes of all statistics in memory. The file of the table may be smaller."""
        return sum(row.nbytes for row in self._rows.values())

    def to_like(self, tensor: Tensor | None) -> NormTable:
        """Return a copy of the table.

        Args:
            tensor: the copy is made on its device and in its dtype; if None, each row keeps its own.
        """
        table = NormTable(self.space)
        table._rows = dict(self._rows)
        table.apply(lambda flat: flat.clone() if tensor is None else flat.to(tensor, copy=True))
        return table

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor of every row by what a function makes of it, a copy on a GPU for example."""
        with self._changing:
            self._rows = {spec: row.map(function) for spec, row in self._rows.items()}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the table as a safetensors file, atomically.

        Statistics of a BatchNorm that are equal bit for bit in several rows are written once.

        Args:
            path: the file; an earlier one is replaced.

        Raises:
            MissingFile: the folder of the file does not exist.
            WriteError: the file cannot be written.
        """
        names: dict[str, int] = {}
        numbers: dict[bytes, int] = {}
        blocks: list[tuple[int, int, str]] = []
        parts: dict[str, list[Tensor]] = {}
        rows = []
        for spec, row in self._rows.items():
            dtype = str(row.flat.dtype).removeprefix("torch.")
            own = []
            for name, pair in row.map(lambda flat: flat.detach().cpu()).pairs().items():
                digest = blake2b(f"{name} {dtype}".encode(), digest_size=16)
                for tensor in pair:
                    digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
                number = numbers.setdefault(digest.digest(), len(blocks))
                if number == len(blocks):
                    blocks.append((names.setdefault(name, len(names)), pair[0].numel(), dtype))
                    parts.setdefault(dtype, []).extend(pair)
                own.append(number)
            rows.append({"spec": spec.to_json(), "blocks": own})
        index = {"names": list(names), "blocks": blocks, "rows": rows}
        header = {**NORM_TABLE.metadata, "space": self.space}
        tensors = {dtype: torch.cat(tensors) for dtype, tensors in parts.items()}
        write_tensors(path, tensors, {**header, "index": json.dumps(index)})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> NormTable:
        """Read a table that `save` wrote.

        The statistics belong to the weights that they were calibrated with. To load both, call
        `supernet.load_state_dict(weights, norms=table)`.

        Args:
            path: the file.

        Returns:
            The table, on the CPU. If the supernet has its weights already, assign it to `supernet.norms`.

        Raises:
            MissingFile: there is no such file.
            FileFormatError: the file is damaged, of another kind or of another schema, or statistics in it
                are not finite, are no floating-point numbers, or have a negative variance.
        """
        require_regular(path)
        with (
            NORM_TABLE.readable(path, unreadable=(SafetensorError,)),
            NORM_TABLE.fields(path, passing=()),
            safe_open(path, framework="pt") as file,
        ):
            header = file.metadata()
            NORM_TABLE.check_metadata(header, path)
            table = cls(header["space"])
            table._rows = _rows(file, parse_json(header["index"]))
            for spec, row in table._rows.items():
                wrong = _wrong(row)
                if wrong:
                    raise FileFormatError(
                        f"{path}: the statistics of {spec} {wrong}; calibrate and save again"
                    )
        return table


def _wrong(row: NormRow) -> str | None:
    if not row.flat.is_floating_point():
        return f"are {row.flat.dtype}, not floating-point numbers"
    if not row.flat.isfinite().all():
        return "are not finite"
    if (row.flat.chunk(2)[1] < 0).any():
        return "have a negative variance"
    return None


def _rows(file: Any, index: dict[str, Any]) -> dict[SubnetSpec, NormRow]:
    stored = {dtype: file.get_tensor(dtype) for dtype in file.keys()}  # noqa: SIM118
    ends = dict.fromkeys(stored, 0)
    blocks: list[tuple[str, tuple[Tensor, Tensor]]] = []
    for number, channels, dtype in index["blocks"]:
        start, count = ends[dtype], int(channels)
        if count < 1 or start + 2 * count > stored[dtype].numel():
            raise ValueError(f"block {len(blocks)} of {count} channels is outside the statistics")
        mean, var = stored[dtype][start : start + 2 * count].chunk(2)
        blocks.append((index["names"][number], (mean, var)))
        ends[dtype] += 2 * count
    if ends != {dtype: tensor.numel() for dtype, tensor in stored.items()}:
        raise ValueError("there are more statistics than blocks")
    claimed = sum(blocks[i][1][0].nbytes for entry in index["rows"] for i in entry["blocks"])
    if claimed > ALLOWED_BYTES + BYTES_PER_STORED_BYTE * sum(tensor.nbytes for tensor in stored.values()):
        raise ValueError(f"rows of {claimed} bytes are claimed of {sum(ends.values())} stored numbers")
    rows: dict[SubnetSpec, NormRow] = {}
    for entry in index["rows"]:
        if any(not 0 <= i < len(blocks) for i in entry["blocks"]):
            raise ValueError(f"row {len(rows)} names a block that is not there")
        rows[SubnetSpec.from_json(entry["spec"])] = NormRow.of(dict(blocks[i] for i in entry["blocks"]))
    return rows
