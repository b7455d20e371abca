"""NormRow: the mean and variance of every BatchNorm of one subnet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subnetact.errors import SpecError
from subnetact.operators.tensor_version import tensor_version

__all__ = ["Block", "NormRow"]

Block: TypeAlias = tuple[Tensor, int, int, int]
"""Where the statistics of one norm are: a tensor, where in it the mean and the variance begin, and the
number of channels of each."""

_DIGEST = 16


class NormRow(Mapping[str, tuple[Tensor, Tensor]]):
    """The statistics of one subnet: norm name -> (mean, var), each of shape (channels,).

    They are slices of one tensor, the means before the variances, except for those which a
    `NormTable` found to be equal to another row's: these are slices of the other row's tensor.

    Raises:
        SpecError: the tensor's length is not twice the sum of the channels.
    """

    __slots__ = ("_digests", "_places", "_versions", "names", "sources")

    def __init__(self, channels: Mapping[str, int], flat: Tensor) -> None:
        total = sum(channels.values())
        if flat.shape != (2 * total,):
            raise SpecError(f"a row of {total} channels needs shape ({2 * total},), got {tuple(flat.shape)}")
        if any(count < 1 for count in channels.values()):
            raise SpecError("a row's channel counts must be positive")
        counts = np.fromiter(channels.values(), np.int64, len(channels))
        starts = np.cumsum(counts) - counts
        places = np.stack([np.zeros_like(counts), starts, total + starts, counts], axis=1)
        self._set(tuple(channels), (flat,), places)

    def _set(self, names: tuple[str, ...], sources: tuple[Tensor, ...], places: NDArray[np.int64]) -> None:
        self.names = names
        self.sources = sources
        """The tensors it reads; other rows may read them too."""
        self._places = places
        self._digests = b""
        self._versions: list[int] = []

    @classmethod
    def of(cls, statistics: Mapping[str, tuple[Tensor, Tensor]]) -> NormRow:
        """Copy (mean, var) pairs into one row."""
        means, variances = zip(*statistics.values(), strict=True) if statistics else ((), ())
        flat = torch.cat([*means, *variances]) if statistics else torch.empty(0)
        return cls({name: mean.numel() for name, (mean, _) in statistics.items()}, flat.detach())

    @classmethod
    def at(cls, blocks: Mapping[str, Block]) -> NormRow:
        """Make a row of statistics where they are; nothing is copied."""
        sources = {id(source): source for source, *_ in blocks.values()}
        numbers = {key: i for i, key in enumerate(sources)}
        places = [(numbers[id(source)], *rest) for source, *rest in blocks.values()]
        row = object.__new__(cls)
        row._set(tuple(blocks), tuple(sources.values()), np.array(places, np.int64).reshape(-1, 4))
        return row

    @property
    def channels(self) -> dict[str, int]:
        """The channels of every norm."""
        return dict(zip(self.names, self._places[:, 3].tolist(), strict=True))

    @property
    def flat(self) -> Tensor:
        """All means, then all variances: a copy where the row shares some, else its own tensor.

        Other rows may share parts of that tensor, and change with it.
        """
        if len(self.sources) == 1 and self.sources[0].numel() == 2 * int(self._places[:, 3].sum()):
            return self.sources[0]
        pairs = self.pairs().values()
        return torch.cat([*(mean for mean, _ in pairs), *(var for _, var in pairs)])

    @property
    def nbytes(self) -> int:
        """The bytes of its statistics, as if it shared none."""
        return sum(2 * count * source.element_size() for source, _, _, count in self.blocks().values())

    def blocks(self) -> dict[str, Block]:
        """Return where the statistics of every norm are."""
        return {
            name: (self.sources[number], mean, var, count)
            for name, (number, mean, var, count) in zip(self.names, self._places.tolist(), strict=True)
        }

    def digests(self) -> list[bytes]:
        """Return a hash of every norm's name and statistics, and of where they are and in which dtype."""
        versions = [tensor_version(source) for source in self.sources]
        if not self._digests or versions != self._versions:
            raw = [source.detach().cpu().contiguous().view(torch.uint8).numpy() for source in self.sources]
            found = []
            for name, (number, mean, var, count) in zip(self.names, self._places.tolist(), strict=True):
                source = self.sources[number]
                size, data = source.element_size(), raw[number]
                digest = blake2b(f"{name} {source.dtype} {source.device}".encode(), digest_size=_DIGEST)
                for start in (mean, var):
                    digest.update(data[start * size : (start + count) * size])
                found.append(digest.digest())
            self._digests, self._versions = b"".join(found), versions
        return [self._digests[i : i + _DIGEST] for i in range(0, len(self._digests), _DIGEST)]

    def sharing(self, known: dict[bytes, Block]) -> NormRow:
        """Return a row that keeps what is not known, and reads the rest where it is; it becomes known."""
        digests, blocks = self.digests(), self.blocks()
        new = dict.fromkeys(digest for digest in digests if digest not in known)
        if len(new) < len(digests):
            pairs = zip(digests, self.pairs().values(), strict=True)
            fresh = {digest: pair for digest, pair in pairs if digest in new}
            own = NormRow.of({str(i): pair for i, pair in enumerate(fresh.values())})
            known.update(zip(fresh, own.blocks().values(), strict=True))
            return NormRow.at({name: known[d] for name, d in zip(self.names, digests, strict=True)})
        known.update(zip(digests, blocks.values(), strict=True))
        return self

    def map(self, function: Callable[[Tensor], Tensor]) -> NormRow:
        """Return a row on other tensors of the same lengths."""
        row = object.__new__(NormRow)
        row._set(self.names, tuple(map(function, self.sources)), self._places)
        return row

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        if name not in self.names:
            raise KeyError(name)
        return self._pair(*self.blocks()[name])

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return every (mean, var) pair, in one walk over the row."""
        return {name: self._pair(*block) for name, block in self.blocks().items()}

    @staticmethod
    def _pair(source: Tensor, mean: int, var: int, count: int) -> tuple[Tensor, Tensor]:
        return source[mean : mean + count].data, source[var : var + count].data

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
