"""Step tables for the tests of generation, which need no model."""

from __future__ import annotations

from subnetact.generation import StepTable
from subnetact.latency.table import LatencyTable

KEYS = ["small", "middle", "large"]
ACCURACY = (40.0, 45.0, 50.0)


def step_table(
    keys: list[str] = KEYS, accuracy: tuple[float, ...] = ACCURACY, scale: float = 1.0
) -> StepTable:
    """Return latencies that grow with the subnet, the sequences, the context and the prompt."""
    sizes, tokens = [1, 4, 16], [8, 64]
    rows = [[scale * (1 + 0.3 * i) * (1 + 0.1 * n) for n in sizes] for i in range(len(keys))]
    prompts = [[scale * (1 + 0.3 * i) * (1 + 0.05 * n) for n in tokens] for i in range(len(keys))]
    decode = LatencyTable(keys, accuracy, sizes, rows)
    prefill = LatencyTable(keys, accuracy, tokens, prompts)
    return StepTable({32: decode, 128: decode.scaled(1.5)}, prefill)
