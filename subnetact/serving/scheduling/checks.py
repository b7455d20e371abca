"""Validation of the settings of policies, simulations and batchers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_CEILING, Context
from numbers import Integral, Real
from typing import Any

from subnetact.errors import InvalidRequest, PolicyError, ProfileMismatch, SubnetActError, TableError
from subnetact.latency.origin import AGAIN, ELSEWHERE, elsewhere
from subnetact.latency.table import LatencyTable

EXPIRED_RULES = ("serve", "drop", "defer")
LONGEST_MS = 1e12
"""A longer deadline, more than 31 years, counts as this one, so that sums of times stay finite."""


def expired_rule(expired: str, rules: Sequence[str] = EXPIRED_RULES) -> str:
    """Return the rule for expired requests, one of `rules`."""
    if expired not in rules:
        raise PolicyError(f"expired: {expired!r} is not a rule; choose from {', '.join(rules)}")
    return expired


def by_name(given: Iterable[Any], kind: Any, subject: str, error: type[SubnetActError]) -> dict[str, Any]:
    """Return stages, tenants and the like by their names; refuse other objects, and two of one name."""
    named: dict[str, Any] = {}
    for one in given:
        if not isinstance(one, kind):
            raise error(f"{subject}: expected {kind.__name__}(...), got {type(one).__name__}")
        if one.name in named:
            raise error(f"{subject}: two are called {one.name!r}; give each a name of its own")
        named[one.name] = one
    if not named:
        raise error(f"{subject}: none given; give at least one {kind.__name__}(...)")
    return named


def too_short(slo_ms: float, table: LatencyTable, others: str = "") -> str:
    """Return the message for an SLO, ms, below a table's fastest latency; `others` is its `elsewhere`."""
    origin = others and f", which was {ELSEWHERE}: {others}; {AGAIN}, or"
    least = Context(prec=6, rounding=ROUND_CEILING).create_decimal(table.fastest_ms)
    lowest = f"slo_ms: {slo_ms} ms is below the lowest latency of the table"
    return f"{lowest}{origin or ';'} give slo_ms of at least {least:f}"


def check_count(value: object, name: str, least: int = 1) -> int:
    """Return `value` as an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PolicyError(f"{name}: {value!r} must be a whole number of at least {least}")
    return value


def check_accuracy(table: LatencyTable) -> LatencyTable:
    """Return the table, if the accuracy of every subnet is known."""
    if not isinstance(table, LatencyTable):
        raise TableError(
            f"table: expected a LatencyTable, got {type(table).__name__}; LatencyTable.load(path) reads one"
        )
    table.known_accuracy()
    return table


def check_policy(policy: Any, *tables: LatencyTable) -> None:
    """Refuse an object that is not a policy, or one of other subnets or batch sizes than the tables."""
    way = 'make one from a table, for example HullFit(table, slo_ms) or make_policy("hullfit", table, slo_ms)'
    if isinstance(policy, str | type):
        raise PolicyError(f"policy: {policy!r} is no policy object; {way}")
    if not callable(getattr(policy, "decide", None)):
        raise PolicyError(f"policy: {policy!r} has no method decide(context); {way}")
    if not isinstance(getattr(policy, "table", None), LatencyTable):
        raise PolicyError(
            f"policy: {type(policy).__name__} has no attribute 'table'; set self.table to the LatencyTable "
            "that it decides by"
        )
    for table in tables:
        check_accuracy(table)
        if (policy.table.subnets, policy.table.batch_sizes) != (table.subnets, table.batch_sizes):
            raise ProfileMismatch("policy: made for other subnets or batch sizes; make it from this table")


def check_slo(slo_ms: float, table: LatencyTable) -> float:
    """Return `slo_ms` as a float."""
    check_accuracy(table)
    slo_ms = check_time(slo_ms, "slo_ms")
    if slo_ms < table.fastest_ms:
        raise PolicyError(too_short(slo_ms, table, elsewhere(table)))
    return slo_ms


def check_time(value: object, name: str) -> float:
    """Return a finite number above 0, such as a time in ms, as a float."""
    return _number(value, name, "finite and > 0", lambda number: 0.0 < number < math.inf)


def check_positive(value: object, name: str) -> float:
    """Return a number above 0, which may be infinite, as a float."""
    return _number(value, name, "> 0", lambda number: number > 0.0)


def check_margin(margin: object, name: str) -> float:
    """Return a finite number of at least 0 as a float."""
    return _number(margin, name, "finite and >= 0", lambda number: 0.0 <= number < math.inf)


def check_deadline(value: object, name: str = "deadline_ms") -> float:
    """Return the time that a request is given from now, in ms, as a float of at most 1e12.

    Every kind of server refuses the same deadlines; one that is over already is no different from another
    number that is not above 0.
    """
    time_ms = check_request_number(value, name, "give milliseconds from now")
    if not 0.0 < time_ms < math.inf:
        raise InvalidRequest(f"{name}: {value} must be finite and > 0, in milliseconds from now")
    return min(time_ms, LONGEST_MS)


def check_within(value: Any, name: str, low: float, high: float = math.inf, whole: bool = True) -> Any:
    """Return a number that a client gave, or raise InvalidRequest if it is not in its range."""
    kind: Any = Integral if whole else Real
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        limit = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name}: {value!r:.40} must be a {'whole ' * whole}number {limit}")
    return int(value) if whole else float(value)


def check_request_number(value: object, name: str, hint: str) -> float:
    """Return a number that a client gave as a float, NaN and infinity too."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequest(f"{name}: {value!r} is not a number; {hint}")
    try:
        return float(value)
    except OverflowError as error:
        kind = type(value).__name__
        raise InvalidRequest(f"{name}: an {kind} beyond every float; give a smaller one") from error


def _number(value: Any, name: str, rule: str, meets: Callable[[float], bool]) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not meets(number):
        raise PolicyError(f"{name}: {value!r} must be a number that is {rule}")
    return number
