"""profile_steps: measures how long steps of generation take on this machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from subnetact.device import machine
from subnetact.errors import TableError
from subnetact.generation.step_table import StepTable
from subnetact.insertion.key_value_cache import cache_relation
from subnetact.latency.table import LatencyTable
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

if TYPE_CHECKING:
    from subnetact.generation.step_loop import Step

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
        self._subnet, self._measured_ms, self._number = 0, 0.0, 0
        self._group = group
        self._loop = StepLoop(
            decoder,
            choose=self._choose,
            observe=self._observe,
            deliver=_raise,
            due=lambda _: 0.0,
            sequences=sequences,
            cache_tokens=max(2 * sequences * context, 2 * prompt + 64),
            step_tokens=max(sequences * context, prompt),
        )
        self._loop.set_up()

    def decode(self, sequences: int, context: int) -> list[tuple[int, list[float]]]:
        """Return per subnet the times of steps of that many sequences with about that many tokens."""
        names = [
            self._add([1 + (i + j) % 7 for j in range(max(context - 2, 1))], 1000) for i in range(sequences)
        ]
        self._step(0)
        for _ in range(WARM_UP):
            self._step(0)
        found = [(i, [self._step(subnet) for _ in range(3)]) for subnet, i in enumerate(self._group)]
        self._remove(names)
        return found

    def prefill(self, tokens: int) -> list[tuple[int, list[float]]]:
        """Return per subnet the times of steps that compute a prompt of that many tokens."""
        found = []
        for subnet, i in enumerate(self._group):
            times = []
            for _ in range(3):
                names = [self._add([1 + j % 7 for j in range(tokens)], 2)]
                times.append(self._step(subnet))
                self._remove(names)
            found.append((i, times))
        return found

    def close(self) -> None:
        self._loop.tear_down()

    def _add(self, prompt: list[int], tokens: int) -> str:
        self._number += 1
        name = f"measured {self._number}"
        self._loop.add(name, prompt, tokens, set(), None)
        return name

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self._loop.cancel_request(name)
        self._loop.step()

    def _step(self, subnet: int) -> float:
        self._subnet = subnet
        if not self._loop.step():
            raise TableError("steps: there was nothing to compute; the cache is too small for this context")
        return self._measured_ms

    def _choose(self, step: Step) -> None:
        step.subnet = self._subnet

    def _observe(self, step: Step, measured_ms: float) -> None:  # noqa: ARG002
        self._measured_ms = measured_ms


def _raise(output: Any) -> None:
    """Let an error of a step end the measurement; tokens are of no interest."""
    if output.error is not None:
        raise TableError(f"a step raised {type(output.error).__name__}: {output.error}") from output.error
