"""Settings of `profile_latency` for tests that need a table and no precise times."""

from __future__ import annotations

from typing import Any

__all__ = ["SHORT"]

SHORT: dict[str, Any] = {"warmup_ms": 0, "min_time_ms": 1, "windows": 1, "max_windows": 1}
