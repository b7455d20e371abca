"""Arrival processes: synthetic traces, and traces made from recorded counts or time stamps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import SubnetActError, TraceError
from subnetact.latency.arrays import Floats

MOST_ARRIVALS = 5e7


@contextmanager
def numeric_arguments() -> Iterator[None]:
    """Raise TraceError for errors of arguments that are no numbers, or are too large; also a decorator."""
    try:
        yield
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, SubnetActError):
            raise
        raise TraceError(f"an argument is of the wrong kind, or out of range ({error!s:.200})") from error


def checked_arrivals(arrivals_ms: npt.ArrayLike) -> Floats:
    """Return arrival times as a float64 array; TraceError if they are none, or do not ascend."""
    try:
        arrivals = np.asarray(arrivals_ms, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"arrivals_ms: not numbers ({error})") from error
    if arrivals.ndim != 1:
        raise TraceError(f"arrivals_ms: shape {arrivals.shape}; give one dimension")
    if not len(arrivals):
        raise TraceError("arrivals_ms: empty; give at least one arrival")
    if not np.isfinite(arrivals).all():
        at = int(np.argmin(np.isfinite(arrivals)))
        raise TraceError(f"arrivals_ms[{at}]: {arrivals[at]} is not finite")
    falling = arrivals[1:] < arrivals[:-1]
    if falling.any():
        at = int(np.argmax(falling)) + 1
        raise TraceError(f"arrivals_ms[{at}]: {arrivals[at]} is before {arrivals[at - 1]}; sort the arrivals")
    return arrivals


@numeric_arguments()
def bursty(base_qps: float, variant_qps: float, cv2: float, duration_s: float, seed: int = 0) -> Floats:
    """Return arrivals of a steady base merged with a bursty variant.

    Args:
        base_qps: arrivals per second with constant gaps; 0 for none.
        variant_qps: mean arrivals per second with gamma-distributed gaps; 0 for none.
        cv2: squared coefficient of variation of the gaps of the variant; 0 makes them constant.
        duration_s: length of the trace, s.
        seed: seed of the gaps.

    Returns:
        Arrival times, ms, ascending, shape (n,), as all functions here do.

    Raises:
        TraceError: an argument is out of range.

    Source:
        SuperServe (NSDI'25, section 6.1).
    """
    check(zero=True, base_qps=base_qps, variant_qps=variant_qps, cv2=cv2)
    check(duration_s=duration_s)
    _bounded("duration_s", (base_qps + variant_qps) * duration_s)
    streams: list[npt.NDArray[Any]] = [np.empty(0)]
    if base_qps:
        streams.append(np.arange(math.ceil(base_qps * duration_s)) * (1000.0 / base_qps))
    if variant_qps:
        units = _unit_renewals(variant_qps * duration_s, cv2, np.random.default_rng(seed))
        streams.append(units * (1000.0 / variant_qps))
    merged: Floats = np.sort(np.concatenate(streams), kind="stable")
    return merged[merged < duration_s * 1000.0]


@numeric_arguments()
def time_varying(
    start_qps: float,
    end_qps: float,
    acceleration: float,
    cv2: float = 8.0,
    lead_s: float = 5.0,
    tail_s: float = 10.0,
    seed: int = 0,
) -> Floats:
    """Return arrivals whose mean rate ramps from one value to another.

    Gamma-distributed gaps of mean 1 are mapped through the inverse of the cumulative mean rate.

    Args:
        start_qps: mean rate before the ramp, arrivals per second.
        end_qps: mean rate after the ramp, arrivals per second.
        acceleration: change of the mean rate during the ramp, arrivals per second squared.
        cv2: squared coefficient of variation of the gaps.
        lead_s: time before the ramp, s.
        tail_s: time after the ramp, s.
        seed: seed of the gaps.

    Raises:
        TraceError: an argument is out of range.

    Source:
        SuperServe (NSDI'25, section 6.1).
    """
    check(start_qps=start_qps, end_qps=end_qps, acceleration=acceleration)
    check(zero=True, cv2=cv2, lead_s=lead_s, tail_s=tail_s)
    ramp_s = abs(end_qps - start_qps) / acceleration
    times_s = np.linspace(0.0, ramp_s, 4097)
    ramp = start_qps * times_s + math.copysign(acceleration, end_qps - start_qps) * times_s**2 / 2
    knots_s = np.concatenate([[0.0], lead_s + times_s, [lead_s + ramp_s + tail_s]])
    lead = start_qps * lead_s
    cumulative = np.concatenate([[0.0], lead + ramp, [lead + ramp[-1] + end_qps * tail_s]])
    _bounded("qps", float(cumulative[-1]))
    units = _unit_renewals(float(cumulative[-1]), cv2, np.random.default_rng(seed))
    return np.interp(units, cumulative, knots_s * 1000.0)


@numeric_arguments()
def from_counts(
    counts: npt.ArrayLike,
    duration_s: float,
    mean_qps: float | None = None,
    peak_qps: float | None = None,
    seed: int = 0,
) -> Floats:
    """Return arrivals from recorded counts per time bin, compressed into `duration_s`.

    The arrivals inside a bin are a Poisson process with the rate of the bin.

    Args:
        counts: number of requests in each bin, shape (bins,); all bins have the same length.
        duration_s: length of the resulting trace, s.
        mean_qps: the counts are scaled to this mean rate, arrivals per second, before clipping. If None, they
            are not scaled.
        peak_qps: the rate of every bin is clipped at this, arrivals per second. If None, it is not clipped.
        seed: seed of the arrivals.

    Raises:
        TraceError: the counts are not finite numbers >= 0, all are 0, or an argument is out of range.
    """
    bins = np.asarray(counts, dtype=np.float64)
    if bins.ndim != 1 or not len(bins) or not np.isfinite(bins).all() or bins.min() < 0 or not bins.sum():
        raise TraceError("counts: give one dimension of finite counts >= 0, not all zero")
    check(duration_s=duration_s)
    width_ms = duration_s * 1000.0 / len(bins)
    expected = bins
    if mean_qps is not None:
        check(mean_qps=mean_qps)
        expected = bins / bins.mean() * mean_qps * width_ms / 1000.0
    if peak_qps is not None:
        check(peak_qps=peak_qps)
        expected = np.minimum(expected, peak_qps * width_ms / 1000.0)
    _bounded("counts", float(expected.sum()))
    rng = np.random.default_rng(seed)
    numbers = rng.poisson(expected)
    starts = np.repeat(np.arange(len(bins)) * width_ms, numbers)
    return np.sort(starts + rng.random(int(numbers.sum())) * width_ms)


@numeric_arguments()
def from_timestamps(timestamps: npt.ArrayLike, mean_qps: float | None = None) -> Floats:
    """Return arrivals from recorded time stamps; the first is shifted to 0.

    Args:
        timestamps: recorded times, ms, shape (n,), in any order.
        mean_qps: time is stretched or compressed to this mean rate, arrivals per second. If None, it is not.

    Raises:
        TraceError: the time stamps are empty or not finite, or an argument is out of range.
    """
    arrivals = checked_arrivals(np.sort(np.asarray(timestamps, dtype=np.float64).ravel()))
    arrivals -= arrivals[0]
    if mean_qps is not None:
        check(mean_qps=mean_qps)
        if arrivals[-1] <= 0:
            raise TraceError("mean_qps: every arrival has the same time; there is no rate to scale")
        arrivals *= (len(arrivals) - 1) / arrivals[-1] * 1000.0 / mean_qps
    return arrivals


def poisson(qps: float, duration_s: float, seed: int = 0) -> Floats:
    """Return a Poisson process of `qps` mean arrivals per second, over `duration_s`, with random `seed`.

    Raises:
        TraceError: an argument is out of range.
    """
    return bursty(0.0, qps, 1.0, duration_s, seed)


def _unit_renewals(length: float, cv2: float, rng: np.random.Generator) -> Floats:
    """Return renewal times within [0, length), with gamma-distributed gaps of mean 1."""
    if cv2 == 0:
        return np.arange(1, math.ceil(length), dtype=np.float64)
    blocks: list[npt.NDArray[Any]] = [np.zeros(1)]
    while (left := length - blocks[-1][-1]) > 0:
        size = int(left + 6 * math.sqrt(left * cv2) + 16)
        blocks.append(blocks[-1][-1] + np.cumsum(rng.gamma(1.0 / cv2, cv2, size)))
    joined: Floats = np.concatenate(blocks[1:])
    return joined[joined < length]


def _bounded(name: str, arrivals: float) -> None:
    if arrivals > MOST_ARRIVALS:
        raise TraceError(f"{name}: about {arrivals:.3g} arrivals; at most {MOST_ARRIVALS:.3g} fit in a trace")


def check(zero: bool = False, **values: float) -> None:
    """Refuse arguments that are not finite and > 0, or, with `zero`, not >= 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
            raise TraceError(f"{name}: {value} must be finite and {'>=' if zero else '>'} 0")
