"""NormTable: the mean and variance of every BatchNorm, for every calibrated subnet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from subnetact.errors import FileFormatError, ForeignSpec, SpecError
from subnetact.files import replacing
from subnetact.spec import SubnetSpec

__all__ = ["NormRow", "NormTable"]

SCHEMA = 1


class NormRow(Mapping[str, tuple[Tensor, Tensor]]):
    """The statistics of one subnet: norm name -> (mean, var), each of shape (channels,).

    All of them are slices of one tensor, the means before the variances.

    Raises:
        SpecError: the tensor's length is not twice the sum of the channels.
    """

    __slots__ = ("channels", "flat")

    def __init__(self, channels: Mapping[str, int], flat: Tensor) -> None:
        total = sum(channels.values())
        if flat.shape != (2 * total,):
            raise SpecError(f"a row of {total} channels needs shape ({2 * total},), got {tuple(flat.shape)}")
        if any(count < 1 for count in channels.values()):
            raise SpecError("a row's channel counts must be positive")
        self.channels = dict(channels)
        self.flat = flat

    @classmethod
    def of(cls, statistics: Mapping[str, tuple[Tensor, Tensor]]) -> NormRow:
        """Copy (mean, var) pairs into one row."""
        means, variances = zip(*statistics.values(), strict=True) if statistics else ((), ())
        flat = torch.cat([*means, *variances]) if statistics else torch.empty(0)
        return cls({name: mean.numel() for name, (mean, _) in statistics.items()}, flat.detach())

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        start = 0
        for other, channels in self.channels.items():
            if other == name:
                return self._pair(start, channels)
            start += channels
        raise KeyError(name)

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return every (mean, var) pair, in one walk over the row."""
        found, start = {}, 0
        for name, channels in self.channels.items():
            found[name] = self._pair(start, channels)
            start += channels
        return found

    def _pair(self, start: int, channels: int) -> tuple[Tensor, Tensor]:
        half = self.flat.numel() // 2
        mean = self.flat[start : start + channels].data
        return mean, self.flat[half + start : half + start + channels].data

    def __iter__(self) -> Iterator[str]:
        return iter(self.channels)

    def __len__(self) -> int:
        return len(self.channels)


class NormTable:
    """Rows of statistics keyed by subnet (SubnetNorm, SuperServe section 3.1).

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
        self._rows = {**self._rows, **rows}

    def nbytes(self) -> int:
        """Return the bytes of all statistics."""
        return sum(row.flat.numel() * row.flat.element_size() for row in self._rows.values())

    def to_like(self, tensor: Tensor | None) -> NormTable:
        """Return a table of its own with the rows on a tensor's device and of its dtype."""
        table = NormTable(self.space)
        table._rows = dict(self._rows)
        table.apply(lambda flat: flat.clone() if tensor is None else flat.to(tensor, copy=True))
        return table

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Map every row's tensor, to another device for example."""
        self._rows = {spec: NormRow(row.channels, function(row.flat)) for spec, row in self._rows.items()}

    def save(self, path: str | Path) -> None:
        """Write the table as safetensors, atomically."""
        index = [
            {"spec": spec.to_json(), "channels": list(row.channels.items())}
            for spec, row in self._rows.items()
        ]
        header = {"format": "subnetact.norms", "schema": str(SCHEMA), "space": self.space}
        tensors = {str(i): row.flat.cpu().contiguous() for i, row in enumerate(self._rows.values())}
        with replacing(path) as temporary:
            save_file(tensors, temporary, {**header, "rows": json.dumps(index)})

    @classmethod
    def load(cls, path: str | Path) -> NormTable:
        """Read a table that `save` wrote.

        Raises:
            FileFormatError: the file is truncated, of another kind, or of a newer schema.
        """
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if header.get("format") != "subnetact.norms":
                    raise FileFormatError(f"{path}: not a norm table; write one with NormTable.save()")
                if not 1 <= int(header["schema"]) <= SCHEMA:
                    raise FileFormatError(
                        f"{path}: norm table of schema {header['schema']}, this version reads 1 to "
                        f"{SCHEMA}; update subnetact"
                    )
                table = cls(header["space"])
                for i, entry in enumerate(json.loads(header["rows"])):
                    channels = {name: int(count) for name, count in entry["channels"]}
                    row = NormRow(channels, file.get_tensor(str(i)))
                    if not row.flat.isfinite().all():
                        raise FileFormatError(f"{path}: row {i} is not finite; calibrate and save again")
                    table._rows[SubnetSpec.from_json(entry["spec"])] = row
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, FileFormatError):
                raise
            raise FileFormatError(
                f"{path}: not a readable norm table ({error}); save it again with NormTable.save()"
            ) from error
        return table
