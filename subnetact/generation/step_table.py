"""StepTable: how long a step of generation takes, per subnet, sequences, context and prompt tokens."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from subnetact.errors import TableError
from subnetact.files.documents import DocumentFormat
from subnetact.latency.table import LatencyTable

__all__ = ["StepTable"]

STEP_TABLE = DocumentFormat(
    "a step table", "subnetact.step_table", 1, "give a file that StepTable.save() wrote"
)


@dataclass(frozen=True, eq=False)
class StepTable:
    """Latency of one step of generation.

    A step computes one token of every active sequence, and the prompts of sequences that join. Its latency is
    the latency of the sequences at their mean context, plus what the tokens of prompts add. A step that only
    computes prompts has a share that does not depend on their tokens: it reads all weights. A step with both
    reads them once, so this share is counted once. It is read off the two smallest numbers of prompt tokens.
    The estimate of such a step is not an upper bound: attention between sequences that share a batch is not
    counted. With the embedded language model on one CPU thread, these steps took 1.07 to 1.27 times the
    estimate; the sum of both tables is 1.08 to 1.69 times the measured time. The margin and the learned
    slowdown of `StepPolicy` make up for the difference.

    Args:
        decode: context in tokens -> the table of steps in which every sequence has at most this context. The
            batch sizes of the table are numbers of active sequences.
        prefill: the table of steps that only compute prompts. Its batch sizes are numbers of prompt tokens.

    Attributes:
        decode: as given, ascending.
        prefill: as given.

    Raises:
        TableError: there is no table, the tables are of different subnets or numbers of sequences, or a cell
            was not measured.
    """

    decode: Mapping[int, LatencyTable]
    prefill: LatencyTable

    def __post_init__(self) -> None:
        decode: Any = self.decode
        if not isinstance(decode, Mapping) or not decode:
            raise TableError("decode: expected a mapping from a context to its LatencyTable, got no table")
        found: list[tuple[Any, Any]] = [*decode.items(), (1, self.prefill)]
        for context, table in found:
            if isinstance(context, bool) or not isinstance(context, int) or context < 1:
                raise TableError(f"decode: {context!r} is no context; give a number of tokens, at least 1")
            if not isinstance(table, LatencyTable):
                raise TableError(f"decode, prefill: expected LatencyTables, got {type(table).__name__}")
            if np.isnan(table.latency_ms).any():
                raise TableError(
                    "decode, prefill: a cell was not measured; select subnets and sizes without NaN"
                )
        object.__setattr__(self, "decode", dict(sorted(self.decode.items())))
        first = next(iter(self.decode.values()))
        for table in (*self.decode.values(), self.prefill):
            if table.subnets != first.subnets:
                raise TableError("decode, prefill: the tables are of different subnets")
            if table is not self.prefill and table.batch_sizes != first.batch_sizes:
                raise TableError("decode: the tables are of different numbers of sequences")
        object.__setattr__(self, "_contexts", tuple(self.decode))
        columns = [t.monotone().latency_ms.T.tolist() for t in (*self.decode.values(), self.prefill)]
        object.__setattr__(self, "_decode_ms", columns[:-1])
        object.__setattr__(self, "_prefill_ms", columns[-1])
        object.__setattr__(self, "_fixed_ms", _without_tokens(columns[-1], self.prefill.batch_sizes))

    @property
    def subnets(self) -> tuple[str, ...]:
        """The key of every subnet, in the order of the subnet ids."""
        return self.prefill.subnets

    @property
    def accuracy(self) -> tuple[float, ...]:
        """The accuracy of every subnet, in percent."""
        return next(iter(self.decode.values())).accuracy

    @property
    def sequences(self) -> tuple[int, ...]:
        """The measured numbers of active sequences, ascending."""
        return next(iter(self.decode.values())).batch_sizes

    def bucket(self, context: float) -> int:
        """Return the position of the smallest measured context that is at least `context`, or the last."""
        contexts: tuple[int, ...] = self._contexts  # type: ignore[attr-defined]
        return min(bisect_left(contexts, context), len(contexts) - 1)

    def latency_ms(self, subnet: int, sequences: int, context: float = 1.0, prompt_tokens: int = 0) -> float:
        """Return the expected latency of a step.

        Args:
            subnet: id of the subnet.
            sequences: how many sequences get a token, without those whose prompts are computed.
            context: their mean number of tokens. Above the largest measured one, that one's latency is used.
            prompt_tokens: how many tokens of prompts are computed.

        Returns:
            The latency in ms. Numbers of sequences between measured ones are rounded up, beyond the largest
            the latency grows in proportion. Prompt tokens are interpolated.
        """
        return self.latencies_ms(sequences, context, prompt_tokens)[subnet]

    def latencies_ms(self, sequences: int, context: float = 1.0, prompt_tokens: int = 0) -> list[float]:
        """Return the expected latency of a step with every subnet, in ms.

        Args:
            sequences: as for `latency_ms`.
            context: as for `latency_ms`.
            prompt_tokens: as for `latency_ms`.
        """
        prompts = self._prompts_ms(prompt_tokens)
        if sequences:
            sizes = self.sequences
            column = min(bisect_left(sizes, sequences), len(sizes) - 1)
            found = list(self._decode_ms[self.bucket(context)][column])  # type: ignore[attr-defined]
            if sequences > sizes[-1]:
                found = [sequences / sizes[-1] * ms for ms in found]
            if not prompt_tokens:
                return found
            fixed: list[float] = self._fixed_ms  # type: ignore[attr-defined]
            return [ms + more - min(ms, both) for ms, more, both in zip(found, prompts, fixed, strict=True)]
        return prompts

    def _prompts_ms(self, tokens: int) -> list[float]:
        if not tokens:
            return [0.0] * len(self.subnets)
        columns, sizes = self._prefill_ms, self.prefill.batch_sizes  # type: ignore[attr-defined]
        above = bisect_left(sizes, tokens)
        if above == 0:
            return list(columns[0])
        if above == len(sizes):
            return [tokens / sizes[-1] * ms for ms in columns[-1]]
        low, high = sizes[above - 1], sizes[above]
        share = (tokens - low) / (high - low)
        pairs = zip(columns[above - 1], columns[above], strict=True)
        return [(1 - share) * less + share * more for less, more in pairs]

    def select(self, indices: Sequence[int]) -> StepTable:
        """Return the table of some of the subnets.

        Args:
            indices: the subnets to keep, by index and in this order.

        Raises:
            TableError: the table has no such subnet.
        """
        decode = {context: table.select(indices) for context, table in self.decode.items()}
        return StepTable(decode, self.prefill.select(indices))

    def with_accuracy(self, accuracy: Sequence[float]) -> StepTable:
        """Return the same latencies with other accuracies.

        Args:
            accuracy: the accuracy of every subnet in percent, for example of its predicted next tokens.

        Raises:
            TableError: there is not one percentage per subnet.
        """
        decode = {context: table.with_accuracy(accuracy) for context, table in self.decode.items()}
        return StepTable(decode, self.prefill.with_accuracy(accuracy))

    def known_accuracy(self) -> tuple[float, ...]:
        """Return the accuracy of every subnet.

        Raises:
            TableError: the accuracy of a subnet is not known.
        """
        return next(iter(self.decode.values())).known_accuracy()

    def scaled(self, factor: float) -> StepTable:
        """Return the table of a device that is slower or faster by a constant factor.

        Args:
            factor: every latency is multiplied by this; above 0.

        Raises:
            TableError: the factor is not finite and above 0.
        """
        decode = {context: table.scaled(factor) for context, table in self.decode.items()}
        return StepTable(decode, self.prefill.scaled(factor))

    def to_json(self) -> dict[str, Any]:
        """Return the table as dictionaries, lists, strings and numbers."""
        return {
            "decode": {str(context): table.to_json() for context, table in self.decode.items()},
            "prefill": self.prefill.to_json(),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as a JSON file, which replaces an existing one as a whole.

        Args:
            path: the file.

        Raises:
            WriteError: the file cannot be written.
        """
        STEP_TABLE.write(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepTable:
        """Read a file that `save` wrote.

        Args:
            path: the file.

        Raises:
            FileFormatError: the file is no step table, or damaged.
            MissingFile: there is no such file.
        """
        document = STEP_TABLE.read(path)
        with STEP_TABLE.fields(path):
            decode = {int(context): LatencyTable.from_json(t) for context, t in document["decode"].items()}
            return cls(decode, LatencyTable.from_json(document["prefill"]))

    def __repr__(self) -> str:
        contexts: Any = self._contexts  # type: ignore[attr-defined]
        return (
            f"StepTable({len(self.subnets)} subnets, sequences {list(self.sequences)}, "
            f"contexts {list(contexts)}, prompt tokens {list(self.prefill.batch_sizes)})"
        )


def _without_tokens(columns: list[list[float]], sizes: Sequence[int]) -> list[float]:
    """Return per subnet the latency of a step with prompts of no tokens, on the line through two sizes."""
    if len(sizes) < 2:
        return [0.0] * len(columns[0])
    share = sizes[0] / (sizes[1] - sizes[0])
    return [max(0.0, less - share * (more - less)) for less, more in zip(columns[0], columns[1], strict=True)]
