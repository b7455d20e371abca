"""StepTable: how long a step of generation takes, per subnet, sequences, context and prompt tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from subnetact.errors import TableError
from subnetact.latency.arrays import ascending_sizes
from subnetact.latency.table import LatencyTable

DECODE, PREFILL = "decode-", "prefill"
"""The names in a bundle of the tables of a step table; a context follows on the first."""


class StepTable:
    """Latency of one step of generation.

    A step computes one token of every active sequence, and the prompts of sequences that join. Its latency is
    that of the sequences at their mean context, plus what the tokens of prompts add. What does not depend on
    their number, such as reading the weights, is read off the two smallest numbers of prompt tokens, and
    counted once in a step with both. This is no upper bound: with the embedded language model on one CPU
    thread, such steps took 1.07 to 1.27 times the estimate. The margin and the slowdown of `StepPolicy` make
    up for the difference.

    Args:
        decode: context in tokens, ascending -> the table of steps in which every sequence has at most this
            context. The batch sizes of the table are numbers of active sequences.
        prefill: the table of steps that only compute prompts. Its batch sizes are numbers of prompt tokens.

    Attributes:
        decode, prefill: as given.
        subnets, accuracy: the key of every subnet, in the order of their ids, and its percentage.
        sequences: the measured numbers of active sequences, ascending.

    Raises:
        TableError: there is no table, the tables are of different subnets or numbers of sequences, or a cell
            was not measured.
    """

    def __init__(self, decode: Mapping[int, LatencyTable], prefill: LatencyTable) -> None:
        given: Any = decode
        if not isinstance(given, Mapping):
            raise TableError(
                f"decode: expected a mapping from contexts to tables, got {type(given).__name__}"
            )
        self._contexts = ascending_sizes([*given], "decode")
        tables = [*decode.values(), prefill]
        for table in tables:
            if not isinstance(table, LatencyTable):
                raise TableError(f"decode, prefill: expected LatencyTables, got {type(table).__name__}")
            if np.isnan(table.latency_ms).any():
                raise TableError("decode, prefill: a cell was not measured; select cells without NaN")
        self.decode, self.prefill = dict(zip(self._contexts, decode.values(), strict=True)), prefill
        first = self.decode[self._contexts[0]]
        self.subnets, self.accuracy, self.sequences = first.subnets, first.accuracy, first.batch_sizes
        if any(table.subnets != self.subnets for table in tables):
            raise TableError("decode, prefill: the tables are of different subnets")
        if any(table.batch_sizes != self.sequences for table in self.decode.values()):
            raise TableError("decode: the tables are of different numbers of sequences")
        self._decode_ms = [table.monotone().latency_ms.T.tolist() for table in self.decode.values()]
        self._prefill_ms = columns = prefill.monotone().latency_ms.T.tolist()
        self._fixed_ms = [0.0] * len(self.subnets)  # of steps with prompts of no tokens
        if len(columns) > 1:
            low, high = prefill.batch_sizes[:2]
            pairs = zip(columns[0], columns[1], strict=True)
            self._fixed_ms = [max(0.0, ms - low / (high - low) * (more - ms)) for ms, more in pairs]

    def latencies_ms(self, sequences: int, context: float = 1.0, prompt_tokens: int = 0) -> list[float]:
        """Return the expected latency of a step with every subnet, in ms.

        Numbers of sequences between measured ones are rounded up; beyond the largest the latency grows in
        proportion. Prompt tokens are interpolated.

        Args:
            sequences: how many sequences get a token, without those whose prompts are computed.
            context: their mean number of tokens. Above the largest measured one, that one's latency is used.
            prompt_tokens: how many tokens of prompts are computed.
        """
        prompts = self._prompts_ms(prompt_tokens)
        if not sequences:
            return prompts
        sizes = self.sequences
        column = min(bisect_left(sizes, sequences), len(sizes) - 1)
        bucket = min(bisect_left(self._contexts, context), len(self._contexts) - 1)
        found: list[float] = self._decode_ms[bucket][column]
        found = [max(sequences / sizes[-1], 1.0) * ms for ms in found]
        if not prompt_tokens:
            return found
        parts = zip(found, prompts, self._fixed_ms, strict=True)
        return [ms + more - min(ms, both) for ms, more, both in parts]

    def _prompts_ms(self, tokens: int) -> list[float]:
        if not tokens:
            return [0.0] * len(self.subnets)
        sizes = self.prefill.batch_sizes
        high = min(bisect_left(sizes, tokens), len(sizes) - 1)
        low, longer = max(high - 1, 0), max(tokens / sizes[-1], 1.0)
        share = min(max(tokens - sizes[low], 0) / max(sizes[high] - sizes[low], 1), 1.0)
        pairs = zip(self._prefill_ms[low], self._prefill_ms[high], strict=True)
        return [longer * ((1 - share) * less + share * more) for less, more in pairs]

    def _each(self, change: Callable[[LatencyTable], LatencyTable]) -> StepTable:
        return StepTable({n: change(table) for n, table in self.decode.items()}, change(self.prefill))

    def select(self, indices: Sequence[int]) -> StepTable:
        """Return the table of some of the subnets, by index and in this order; TableError if one is none."""
        return self._each(lambda table: table.select(indices))

    def with_accuracy(self, accuracy: Sequence[float]) -> StepTable:
        """Return the same latencies with these accuracies, one percentage per subnet, or raise TableError."""
        return self._each(lambda table: table.with_accuracy(accuracy))

    def known_accuracy(self) -> tuple[float, ...]:
        """Return the accuracy of every subnet; TableError if one is not known."""
        return self.decode[self._contexts[0]].known_accuracy()

    def to_tables(self) -> dict[str, LatencyTable]:
        """Return its tables by names; `engine.tables.update(...)` puts them in the bundle of an engine."""
        decode = {f"{DECODE}{context}": table for context, table in self.decode.items()}
        return {**decode, PREFILL: self.prefill}

    @classmethod
    def from_tables(cls, tables: Mapping[str, LatencyTable]) -> StepTable:
        """Return the step table whose `to_tables` are among the tables of an engine, or raise TableError."""
        contexts = {name.removeprefix(DECODE): tables[name] for name in tables if name.startswith(DECODE)}
        decode = {
            int(context): contexts[context] for context in sorted(filter(str.isdecimal, contexts), key=int)
        }
        if not decode or PREFILL not in tables:
            raise TableError(
                f"tables: {', '.join(tables) or 'none'} are no step table; measure one and keep it in the "
                "bundle: engine.tables.update(profile_steps(...).to_tables())"
            )
        return cls(decode, tables[PREFILL])

    def __repr__(self) -> str:
        return (
            f"StepTable({len(self.subnets)} subnets, sequences {list(self.sequences)}, "
            f"contexts {self._contexts}, prompt tokens {list(self.prefill.batch_sizes)})"
        )
