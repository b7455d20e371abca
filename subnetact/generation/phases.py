"""Phase: a stretch of an answer that some of the subnets generate, and what it means for the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from subnetact.errors import InvalidRequest
from subnetact.serving.scheduling.checks import check_within
from subnetact.spec import SubnetSpec, brief


class Phase(NamedTuple):
    """A stretch of an answer; the last one goes to the end of the answer, every other one has an end.

    Attributes:
        end: the token that ends it; the next token belongs to the next phase.
        subnets: the subnet that generates it, as a specification, its key or its index in the table, or a
            list of such, among which the policy chooses for every step. None: it chooses among all of them.
            Subnets of one phase must be able to continue on each other's caches.
        tokens: its largest number of tokens; with `end`, whichever comes first.
        recompute: whether its first step computes the keys and values of all tokens again. None: if its
            subnets cannot continue on those of the phase before. True: also if that would be approximate.
            False: never.

    Example:
        >>> think = Phase(end=tokenizer.convert_tokens_to_ids("</think>"), subnets=small, tokens=512)
        >>> completion = generator.submit(prompt, phases=[think, Phase(subnets=large)], max_new_tokens=600)
    """

    end: int | None = None
    subnets: SubnetSpec | str | int | Sequence[SubnetSpec | str | int] | None = None
    tokens: int | None = None
    recompute: bool | None = None


class PlannedPhase(NamedTuple):
    """A checked phase: the ids of its subnets, and whether it begins by computing the cache again."""

    among: frozenset[int]
    end: int | None = None
    tokens: float = math.inf
    recomputes: bool = False


class CacheKinds(NamedTuple):
    """Which subnets continue on each other's caches: those of one number, per subnet."""

    shared: Sequence[int]  # as the generator permits
    exact: Sequence[int]  # as if they had written the cache themselves


def checked_phases(given: Any, vocabulary: float) -> tuple[Phase, ...]:
    """Return the phases that a client gave, or raise InvalidRequest if they have no meaning for any model."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise InvalidRequest(f"phases: expected a list of at least one Phase, got {given!r:.60}")
    found = []
    for i, one in enumerate(given):
        if not isinstance(one, tuple) or len(one) > len(Phase._fields):
            raise InvalidRequest(f"phases[{i}]: expected a Phase, got {one!r:.60}; give Phase(end, subnets)")
        phase, last = Phase(*one), i == len(given) - 1
        for name, least, most in (("end", 0, vocabulary - 1), ("tokens", 1, math.inf)):
            if (value := getattr(phase, name)) is not None:
                check_within(value, f"phases[{i}].{name}", least, most)
        if phase.recompute not in (None, True, False):
            raise InvalidRequest(f"phases[{i}].recompute: {phase.recompute!r:.40} is not True, False or None")
        ends = phase.end is not None or phase.tokens is not None
        if ends is last:
            raise InvalidRequest(
                f"phases[{i}]: the last phase goes to the end of the answer; leave out end and tokens, and "
                "give the request stop or max_new_tokens"
                if last
                else f"phases[{i}]: nothing ends it, and other phases follow; give it end or tokens"
            )
        found.append(phase)
    return tuple(found)


def rows_of(accuracy: Sequence[float], least: float) -> set[int]:
    """Return the ids of the subnets of at least an accuracy, percent, or raise InvalidRequest."""
    rows = {row for row, percent in enumerate(accuracy) if percent >= least}
    if not rows:
        raise InvalidRequest(f"min_accuracy: no subnet reaches {least} %; the best has {max(accuracy)} %")
    return rows


def planned_phases(
    phases: Sequence[Phase], names: Sequence[str], kinds: CacheKinds, usual: frozenset[int], allowed: set[int]
) -> list[PlannedPhase]:
    """Return phases with the ids of their subnets, or raise InvalidRequest if these cannot generate them.

    `usual` are the subnets of a phase without `subnets`, `allowed` those that the request accepts.
    """
    found: list[PlannedPhase] = []
    for i, phase in enumerate(phases):
        where, among = f"phases[{i}]", _rows(phase.subnets, names, usual, f"phases[{i}].subnets")
        if len({kinds.shared[row] for row in among}) > 1:
            raise InvalidRequest(
                f"{where}.subnets: they cannot continue on each other's caches; give each a phase of its own"
            )
        if not (among := frozenset(among & allowed)):
            raise InvalidRequest(f"{where}: none of its subnets has the minimum accuracy; lower min_accuracy")
        recomputes = False
        if found:
            both = among | found[-1].among
            recomputes = len({kinds.shared[row] for row in both}) > 1
            if recomputes and phase.recompute is False:
                raise InvalidRequest(
                    f"{where}: its subnets cannot continue on the cache of the phase before; leave out "
                    "recompute=False, or take subnets with the same keys and values"
                )
            recomputes |= bool(phase.recompute) and len({kinds.exact[row] for row in both}) > 1
        found.append(PlannedPhase(among, phase.end, phase.tokens or math.inf, recomputes))
    return found


def _rows(given: Any, names: Sequence[str], usual: frozenset[int], where: str) -> frozenset[int]:
    """Return the ids of the subnets of a phase."""
    if given is None:
        return usual
    listed = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    rows = set[int]()
    for one in listed:
        if isinstance(one, int) and not isinstance(one, bool) and 0 <= one < len(names):
            rows.add(one)
        elif isinstance(one, SubnetSpec | str) and (text := brief(str(one))) in map(brief, names):
            rows.add([*map(brief, names)].index(text))
        else:
            raise InvalidRequest(
                f"{where}: {one!s:.80} is no subnet of this generator; give an index from 0 to "
                f"{len(names) - 1} or one of {', '.join(names):.300}"
            )
    if not rows:
        raise InvalidRequest(f"{where}: the list is empty; name a subnet, or give None for all")
    return frozenset(rows)
