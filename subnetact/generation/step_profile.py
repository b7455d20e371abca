"""profile_steps: measures how long steps of generation take on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from subnetact.device import machine
from subnetact.errors import TableError
from subnetact.generation.completion import TokenDeadlines
from subnetact.generation.step_request import StepRequest, TokenAsk
from subnetact.generation.step_scheduler import Step
from subnetact.generation.step_table import StepTable
from subnetact.latency.arrays import ascending_sizes
from subnetact.latency.table import LatencyTable
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

WARM_UP, TIMED = 2, 3  # steps of every visit of a cell that are not timed, and those that are


def profile_steps(
    supernet: Supernet,
    subnets: Sequence[SubnetSpec],
    *,
    sequences: Sequence[int] = (1, 2, 4, 8, 16),
    contexts: Sequence[int] = (64, 256),
    prompt_tokens: Sequence[int] = (16, 64, 256),
    accuracy: Sequence[float] | None = None,
    rounds: int = 5,
    progress: bool = True,
) -> StepTable:
    """Measure the steps of a `Generator`: batching, the subnet, and the choice of tokens.

    Every cell is visited in several rounds, so that a slow phase of the machine does not fall on one cell
    alone. The table has the medians.

    Args:
        supernet: a supernet of a language model of transformers, in evaluation mode.
        subnets: the subnets to measure.
        sequences: numbers of active sequences, ascending.
        contexts: numbers of tokens that these sequences have so far, ascending.
        prompt_tokens: numbers of tokens of a prompt, ascending.
        accuracy: percent per subnet, for example of predicted next tokens. If None, they are NaN, and a
            `Generator` refuses the table until `table.with_accuracy([...])`.
        rounds: how often every cell is visited. A visit times three steps.
        progress: if True, show a progress bar when standard error is a terminal.

    Raises:
        TableError: an argument is no ascending list of numbers, or a context is longer than the model's.
        InsertError: the network is no language model of transformers.
        MissingExtra: transformers is not installed.

    Example:
        >>> table = profile_steps(supernet, [small, large], accuracy=[41.0, 47.5])
        >>> engine.tables.update(table.to_tables())  # kept with the weights
    """
    specs = supernet.space.distinct(subnets, "a step table")
    lists: Any = {"sequences": sequences, "contexts": contexts, "prompt_tokens": prompt_tokens}
    for name, values in (lists | {"rounds": (rounds,)}).items():
        ascending_sizes(values, name)
    cells = [(n, context) for context in contexts for n in sequences] + [(0, n) for n in prompt_tokens]
    found: dict[tuple[int, tuple[int, int]], list[float]] = defaultdict(list)
    bench = _Bench(supernet, specs, max(sequences), max(contexts), max(prompt_tokens))
    try:
        for cell in tqdm(cells * rounds, desc="steps", disable=not progress or None):
            for subnet, times in enumerate(bench.visit(*cell)):
                found[subnet, cell] += times
    finally:
        bench.loop.tear_down()
    keys = [spec.key for spec in specs]
    given = [math.nan] * len(keys) if accuracy is None else list(accuracy)
    stamp = {"machine": machine(supernet.device), "rounds": rounds, "statistic": "p50"}

    def table(cells: dict[int, tuple[int, int]], **facts: Any) -> LatencyTable:
        rows = [[statistics.median(found[i, cell]) for cell in cells.values()] for i in range(len(keys))]
        return LatencyTable(keys, given, list(cells), rows, stamp={**stamp, **facts})

    decode = {c: table({n: (n, c) for n in sequences}, context=c) for c in contexts}
    return StepTable(decode, table({n: (0, n) for n in prompt_tokens}, prompt=True))


class _Bench:
    """Runs steps of a chosen kind, one after the other on the calling thread, with some subnets."""

    def __init__(
        self, supernet: Supernet, specs: Sequence[SubnetSpec], sequences: int, context: int, prompt: int
    ) -> None:
        from subnetact.generation.step_loop import ElasticDecoder, StepLoop

        decoder = ElasticDecoder(supernet, specs, allow_approximate=True, allow_recompute=True)
        if max(context + 1, prompt) > (limit := decoder.longest):
            raise TableError(f"contexts, prompt_tokens: the model takes {limit} tokens; give smaller numbers")
        self._subnets, self._step = range(len(specs)), Step(())
        room = context + 64
        self.loop = StepLoop(
            decoder,
            pushed_out=lambda _: None,
            sequences=sequences,
            cache_tokens=max(2 * sequences * room, 2 * prompt + 64),
            step_tokens=max(sequences * room, prompt),
        )

    def visit(self, sequences: int, tokens: int) -> list[list[float]]:
        """Return per subnet the times of steps: of sequences with so many tokens, or, if 0, of a prompt."""
        if not sequences:
            return [[self._time(i, self._begun(1, tokens)) for _ in range(TIMED)] for i in self._subnets]
        requests = self._begun(sequences, max(tokens - 2, 1))
        for _ in range(1 + WARM_UP):
            self._time(0, requests)
        return [[self._time(i, requests) for _ in range(TIMED)] for i in self._subnets]

    def _begun(self, number: int, tokens: int) -> list[StepRequest]:
        """Return new requests in the place of those of the last step."""
        for request, _ in self._step.parts:
            request.outcome = request.generated(0.0, "length")
        ask = TokenAsk([1 + j % 7 for j in range(tokens)], 1, TokenDeadlines(1.0, 1.0))
        among = frozenset(self._subnets)
        return [StepRequest(ask, left=tokens, among=among) for _ in range(number)]

    def _time(self, subnet: int, requests: Sequence[StepRequest]) -> float:
        """Return how long a step takes that computes all there is of these requests, in ms."""
        self._step = step = Step(requests, among=frozenset(self._subnets), subnet=subnet)
        begun = time.perf_counter()
        try:
            self.loop.refresh()
            self.loop.reserve(step)
            step.measure()
            if len(step.parts) == len(requests):
                self.loop.compute(step)
        except Exception as error:
            raise TableError(f"a step raised {type(error).__name__}: {error}") from error
        taken_ms = 1e3 * (time.perf_counter() - begun)
        if len(step.parts) < len(requests):
            raise TableError("steps: there was nothing to compute; the cache is too small for this context")
        for request in requests:
            request.left = 0
        return taken_ms
