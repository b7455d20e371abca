"""The embedded digits supernet as an engine that is ready to serve, and digits to ask it about."""

from __future__ import annotations

import torch

from subnetact import profile_latency
from subnetact.calibration.calibrate import calibrate
from subnetact.digits import (
    Digits,
    distort,
    load_digits_supernet,
    read_digits,
)
from subnetact.engine.engine import Engine
from subnetact.latency.table import LatencyTable

__all__ = ["BATCH_SIZES", "digits_engine", "profiled", "unseen_digits"]

BATCH_SIZES = (1, 2, 4, 8, 16)
#: (depth, expand) of the three stages and the width of all; `python -m subnetact.demo` finds such a set
SUBNETS = (
    ((1, 1, 1), (0.5, 0.25, 0.5), 0.25),
    ((1, 1, 2), (0.5, 0.5, 0.25), 0.25),
    ((1, 1, 2), (0.5, 0.25, 0.25), 0.5),
    ((2, 3, 2), (0.25, 0.25, 0.5), 0.5),
    ((1, 2, 2), (0.5, 0.5, 0.25), 1.0),
    ((3, 2, 3), (0.5, 0.25, 0.25), 1.0),
)
PROGRAMS_MB = 64.0


def digits_engine(seed: int = 0) -> Engine:
    """Six calibrated subnets with fused programs; accuracy is measured on one half of the held-out digits."""
    supernet = load_digits_supernet()
    specs = [
        supernet.space.parse({"depth": list(depth), "expand": list(expand), "width": [width]})
        for depth, expand, width in SUBNETS
    ]
    training, held_out = read_digits()
    generator = torch.Generator().manual_seed(seed)
    calibrate(supernet, specs, [distort(training.images[:200], generator)])
    validation = _views(held_out, 0, 3, generator)
    engine = Engine(supernet, specs, example=validation.images[0], memory_budget_mb=PROGRAMS_MB)
    for i, spec in enumerate(specs):
        right = engine(validation.images, subnet=i).argmax(1) == validation.labels
        engine.register(spec, 100 * float(right.float().mean()))
        engine.pin(i)
    return engine


def profiled(engine: Engine, min_time_ms: float = 60.0, statistic: str = "p90") -> LatencyTable:
    """The engine's latency table on this machine, with its accuracies."""
    accuracy = [float("nan") if known is None else known for known in engine.accuracy]
    engine.prepare(BATCH_SIZES)
    return profile_latency(
        engine, BATCH_SIZES, accuracy, statistic=statistic, warmup_ms=5, min_time_ms=min_time_ms
    )


def unseen_digits(copies: int = 3, seed: int = 1) -> Digits:
    """Distorted views of the half of the held-out digits that no accuracy was measured on."""
    _, held_out = read_digits()
    return _views(held_out, 1, copies, torch.Generator().manual_seed(seed))


def _views(data: Digits, start: int, copies: int, generator: torch.Generator) -> Digits:
    images, labels = data.images[start::2], data.labels[start::2]
    return Digits(torch.cat([distort(images, generator) for _ in range(copies)]), labels.repeat(copies))
