"""profile_steps: measures how long steps of generation take on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from subnetact.device import machine
from subnetact.errors import TableError
from subnetact.generation.completion import TokenDeadlines
from subnetact.generation.step_scheduler import Fits, Step, StepRequest
from subnetact.generation.step_table import StepTable
from subnetact.insertion.key_value_cache import cache_relation
from subnetact.latency.table import LatencyTable
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["profile_steps"]

WARM_UP = 2
"""Steps of every cell that are not timed."""


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

    Every cell is measured in several rounds, and between two of them all other cells are visited, so that a
    slow phase of the machine does not fall on one cell alone. The table has the medians.

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

    Returns:
        The table.

    Raises:
        TableError: an argument is no ascending list of numbers, or a context is longer than the model's.
        InsertError: the network is no language model of transformers.
        MissingExtra: transformers is not installed.

    Example:
        >>> table = profile_steps(supernet, [small, large], accuracy=[41.0, 47.5])
        >>> table.save("steps.json")
    """
    specs = supernet.distinct(subnets, "a step table")
    lists: dict[str, Sequence[Any]] = {
        "sequences": sequences,
        "contexts": contexts,
        "prompt_tokens": prompt_tokens,
        "rounds": (rounds,),
    }
    for name, values in lists.items():
        whole = all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values)
        if not values or not whole or list(values) != sorted(set(values)):
            raise TableError(f"{name}: {values!r} must be ascending whole numbers above 0")
    decode: dict[tuple[int, int, int], list[float]] = {}
    prefill: dict[tuple[int, int], list[float]] = {}
    cells = rounds * (len(contexts) * len(sequences) + len(prompt_tokens)) * len(specs)
    with ExitStack() as stack, tqdm(total=cells, desc="steps", disable=not progress or None) as bar:
        benches = []
        for group in _sharing_pages(supernet, specs):
            benches.append(
                _Bench(supernet, specs, group, max(sequences), max(contexts) + 64, max(prompt_tokens))
            )
            stack.callback(benches[-1].close)
        for _ in range(rounds):
            for context in contexts:
                for count in sequences:
                    for bench in benches:
                        for subnet, times in bench.decode(count, context):
                            decode.setdefault((context, subnet, count), []).extend(times)
                            bar.update()
            for tokens in prompt_tokens:
                for bench in benches:
                    for subnet, times in bench.prefill(tokens):
                        prefill.setdefault((subnet, tokens), []).extend(times)
                        bar.update()
    keys = [str(spec) for spec in specs]
    given = [math.nan] * len(keys) if accuracy is None else list(accuracy)
    stamp: dict[str, Any] = {
        "machine": machine(supernet.device),
        "rounds": rounds,
        "statistic": "p50",
    }
    ids = range(len(keys))

    def table(sizes: Sequence[int], cell: Any, facts: dict[str, Any]) -> LatencyTable:
        rows = [[statistics.median(cell(subnet, size)) for size in sizes] for subnet in ids]
        return LatencyTable(keys, given, list(sizes), rows, stamp={**stamp, **facts})

    return StepTable(
        {c: table(sequences, lambda i, n, c=c: decode[c, i, n], {"context": c}) for c in contexts},
        table(prompt_tokens, lambda i, n: prefill[i, n], {"prompt": True}),
    )


def _sharing_pages(supernet: Supernet, specs: Sequence[SubnetSpec]) -> list[list[int]]:
    """Return the positions of the subnets, in groups that can write into the same pages of a cache."""
    groups: list[list[int]] = []
    for i, spec in enumerate(specs):
        for group in groups:
            if cache_relation(supernet, specs[group[0]], spec) != "incompatible":
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


class _Bench:
    """Runs steps of a chosen kind, one after the other on the calling thread, with a group of subnets."""

    def __init__(
        self,
        supernet: Supernet,
        specs: Sequence[SubnetSpec],
        group: Sequence[int],
        sequences: int,
        context: int,
        prompt: int,
    ) -> None:
        from subnetact.generation.step_loop import ElasticDecoder, StepLoop

        decoder = ElasticDecoder(supernet, [specs[i] for i in group], allow_approximate=True)
        limit = getattr(decoder.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and max(context - 63, prompt) > limit:
            raise TableError(f"contexts, prompt_tokens: the model takes {limit} tokens; give smaller numbers")
        self._group = group
        self._step = Step()
        self._loop = StepLoop(
            decoder,
            plan=self._plan,
            pushed_out=lambda _: None,
            sequences=sequences,
            cache_tokens=max(2 * sequences * context, 2 * prompt + 64),
            step_tokens=max(sequences * context, prompt),
        )

    def decode(self, sequences: int, context: int) -> list[tuple[int, list[float]]]:
        """Return per subnet the times of steps of that many sequences with about that many tokens."""
        requests = [_request(max(context - 2, 1)) for _ in range(sequences)]
        for _ in range(1 + WARM_UP):
            self._time(0, requests)
        found = [(i, [self._time(at, requests) for _ in range(3)]) for at, i in enumerate(self._group)]
        _end(requests)
        return found

    def prefill(self, tokens: int) -> list[tuple[int, list[float]]]:
        """Return per subnet the times of steps that compute a prompt of that many tokens."""
        found = []
        for at, i in enumerate(self._group):
            times = []
            for _ in range(3):
                requests = [_request(tokens)]
                times.append(self._time(at, requests))
                _end(requests)
            found.append((i, times))
        return found

    def close(self) -> None:
        self._loop.tear_down()

    def _time(self, subnet: int, requests: Sequence[StepRequest]) -> float:
        """Return how long a step takes that computes all there is of these requests, in ms."""
        self._step = Step(subnet=subnet)
        for request in requests:
            self._step.add(request, request.left or 1)
        begun = time.perf_counter()
        try:
            made = self._loop.step()
        except Exception as error:
            raise TableError(f"a step raised {type(error).__name__}: {error}") from error
        if made is None:
            raise TableError("steps: there was nothing to compute; the cache is too small for this context")
        for request in requests:
            request.left = 0
        return 1e3 * (time.perf_counter() - begun)

    def _plan(self, fits: Fits) -> Step | None:
        return self._step if all(fits(request, tokens) for request, tokens in self._step.parts) else None


def _request(tokens: int) -> StepRequest:
    prompt = [1 + j % 7 for j in range(tokens)]
    return StepRequest(prompt, 1, TokenDeadlines(1.0, 1.0), left=tokens)


def _end(requests: Sequence[StepRequest]) -> None:
    for request in requests:
        request.ended = True
