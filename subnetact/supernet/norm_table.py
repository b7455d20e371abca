"""NormTable: the mean and variance of every BatchNorm, for every calibrated subnet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from subnetact.documents import DocumentFormat, parse_json, replacing
from subnetact.errors import FileFormatError, ForeignSpec
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_row import Block, NormRow

__all__ = ["NormRow", "NormTable"]

NORM_TABLE = DocumentFormat("a norm table", "subnetact.norms", 2, "save it again with NormTable.save()")


class NormTable:
    """Rows of statistics keyed by subnet (SubnetNorm, SuperServe section 3.1).

    Subnets with an equal beginning have equal statistics there: what two rows have in common, bit for
    bit, is stored once, in memory and in the file.

    Args:
        space: the id of the search space whose subnets it may hold.
    """

    def __init__(self, space: str) -> None:
        self.space = space
        self._rows: dict[SubnetSpec, NormRow] = {}

    def __contains__(self, spec: object) -> bool:
        return spec in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[SubnetSpec]:
        return iter(list(self._rows))

    def get(self, spec: SubnetSpec) -> NormRow | None:
        """Return a subnet's row, or None where it was never calibrated."""
        return self._rows.get(spec)

    def update(self, rows: Mapping[SubnetSpec, NormRow]) -> None:
        """Add or replace rows, all or none.

        Raises:
            ForeignSpec: a row is of another space.
        """
        for spec in rows:
            if spec.space != self.space:
                raise ForeignSpec(f"the norm table is of space {self.space}, got a subnet of {spec.space}")
        kept = {spec: row for spec, row in self._rows.items() if spec not in rows}
        known: dict[bytes, Block] = {}
        for row in kept.values():
            known.update(zip(row.digests(), row.blocks().values(), strict=True))
        self._rows = {**self._rows, **{spec: row.sharing(known) for spec, row in rows.items()}}

    def nbytes(self) -> int:
        """Return the bytes of all statistics, those that rows share once."""
        sources = {id(source): source for row in self._rows.values() for source in row.sources}
        return sum(source.numel() * source.element_size() for source in sources.values())

    def to_like(self, tensor: Tensor | None) -> NormTable:
        """Return a table of its own with the rows on a tensor's device and of its dtype."""
        table = NormTable(self.space)
        table._rows = dict(self._rows)
        table.apply(lambda flat: flat.clone() if tensor is None else flat.to(tensor, copy=True))
        return table

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Map every tensor of statistics, to another device for example."""
        moved: dict[int, Tensor] = {}

        def once(source: Tensor) -> Tensor:
            if id(source) not in moved:
                moved[id(source)] = function(source)
            return moved[id(source)]

        self._rows = {spec: row.map(once) for spec, row in self._rows.items()}

    def save(self, path: str | Path) -> None:
        """Write the table as safetensors, atomically."""
        names: dict[str, int] = {}
        numbers: dict[bytes, int] = {}
        blocks: list[tuple[int, int, str]] = []
        parts: dict[str, list[Tensor]] = {}
        rows = []
        for spec, row in self._rows.items():
            pairs = zip(row.digests(), row.pairs().items(), strict=True)
            for digest, (name, (mean, var)) in pairs:
                if digest not in numbers:
                    dtype = str(mean.dtype).removeprefix("torch.")
                    numbers[digest] = len(blocks)
                    blocks.append((names.setdefault(name, len(names)), mean.numel(), dtype))
                    parts.setdefault(dtype, []).extend((mean.cpu(), var.cpu()))
            rows.append({"spec": spec.to_json(), "blocks": [numbers[digest] for digest in row.digests()]})
        index = {"names": list(names), "blocks": blocks, "rows": rows}
        header = {**NORM_TABLE.metadata, "space": self.space}
        tensors = {dtype: torch.cat(tensors) for dtype, tensors in parts.items()}
        with replacing(path) as temporary:
            save_file(tensors, temporary, {**header, "index": json.dumps(index)})

    @classmethod
    def load(cls, path: str | Path) -> NormTable:
        """Read a table that `save` wrote; assign it to `supernet.norms` to use it.

        It belongs to the weights it was calibrated with: after others are loaded, calibrate again.

        Raises:
            FileFormatError: the file is truncated, of another kind, or of a newer schema.
        """
        with (
            NORM_TABLE.readable(path, unreadable=(SafetensorError,)),
            NORM_TABLE.fields(path, passing=()),
            safe_open(path, framework="pt") as file,
        ):
            header = file.metadata()
            schema = NORM_TABLE.check_metadata(header, path)
            table = cls(header["space"])
            if schema == 1:
                table.update(_rows_of_schema_1(file, parse_json(header["rows"])))
            else:
                table._rows = _rows(file, parse_json(header["index"]))
            for spec, row in table._rows.items():
                if not all(source.isfinite().all() for source in row.sources):
                    raise FileFormatError(f"{path}: {spec} is not finite; calibrate and save again")
        return table


def _rows(file: Any, index: dict[str, Any]) -> dict[SubnetSpec, NormRow]:
    stored = {dtype: file.get_tensor(dtype) for dtype in file.keys()}  # noqa: SIM118
    ends = dict.fromkeys(stored, 0)
    blocks: list[tuple[str, Block]] = []
    for number, channels, dtype in index["blocks"]:
        start, count = ends[dtype], int(channels)
        if count < 1 or start + 2 * count > stored[dtype].numel():
            raise ValueError(f"block {len(blocks)} of {count} channels is outside the statistics")
        blocks.append((index["names"][number], (stored[dtype], start, start + count, count)))
        ends[dtype] += 2 * count
    if ends != {dtype: tensor.numel() for dtype, tensor in stored.items()}:
        raise ValueError("there are more statistics than blocks")
    rows: dict[SubnetSpec, NormRow] = {}
    for entry in index["rows"]:
        if any(not 0 <= i < len(blocks) for i in entry["blocks"]):
            raise ValueError(f"row {len(rows)} names a block that is not there")
        rows[SubnetSpec.from_json(entry["spec"])] = NormRow.at(dict(blocks[i] for i in entry["blocks"]))
    return rows


def _rows_of_schema_1(file: Any, index: list[dict[str, Any]]) -> dict[SubnetSpec, NormRow]:
    """Read rows that are stored whole, one tensor each."""
    return {
        SubnetSpec.from_json(entry["spec"]): NormRow(
            {name: int(count) for name, count in entry["channels"]}, file.get_tensor(str(i))
        )
        for i, entry in enumerate(index)
    }
