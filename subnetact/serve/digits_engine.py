"""The embedded digits supernet as an engine that is ready to serve."""

from __future__ import annotations

from subnetact.calibration.calibrate import calibrate
from subnetact.digits import load_digits_supernet, read_digits, validation_and_test
from subnetact.engine.engine import Engine
from subnetact.latency.table import LatencyTable
from subnetact.profile.sweep import BATCH_SIZES, profile_latency

#: depths and expand ratios of the three stages, and the width; `examples/demo.py` searches such a set
SUBNETS = (
    ((1, 1, 1), (0.5, 0.25, 0.5), 0.25),
    ((1, 1, 2), (0.5, 0.5, 0.25), 0.25),
    ((1, 1, 2), (0.5, 0.25, 0.25), 0.5),
    ((2, 3, 2), (0.25, 0.25, 0.5), 0.5),
    ((1, 2, 2), (0.5, 0.5, 0.25), 1.0),
    ((3, 2, 3), (0.5, 0.25, 0.25), 1.0),
)
FUSED_MB = 64.0


def digits_engine(seed: int = 0) -> Engine:
    """Make an engine of six calibrated subnets; their accuracy is of half of the held-out digits."""
    supernet = load_digits_supernet()
    configs = ({"depth": list(d), "expand": list(e), "width": [w]} for d, e, w in SUBNETS)
    specs = list(map(supernet.space.parse, configs))
    training, _ = read_digits(seed)
    calibrate(supernet, specs, [training.images[:200]])
    validation, _ = validation_and_test(3, seed)
    engine = Engine(supernet, specs, example=validation.images[:1], memory_budget_mb=FUSED_MB)
    for i, spec in enumerate(specs):
        right = engine(validation.images, subnet=i).argmax(1) == validation.labels
        engine.register(spec, 100 * float(right.float().mean()))
        engine.pin(i)
    return engine


def profiled(engine: Engine) -> LatencyTable:
    """Measure the latency table of an engine on this machine."""
    engine.prepare(BATCH_SIZES)
    return profile_latency(engine, statistic="p90", warmup_ms=5.0, min_time_ms=60.0, mode="as served")
