"""progress_bar: a bar on a terminal, and lines from time to time elsewhere, as in a log."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

LINES: dict[str, Any] = {
    "bar_format": "distill_: {l_bar}{r_bar}\n",
    "mininterval": 20.0,
    "miniters": 1,
    "leave": True,
}
"""How tqdm prints lines: at the beginning, at the end, and every 20 seconds."""


def progress_bar(title: str, progress: bool, **options: Any) -> Any:
    """Return a bar of tqdm, which prints lines if standard error is no terminal."""
    if not getattr(sys.stderr, "isatty", bool)():
        options |= LINES
    return tqdm(desc=title, disable=not progress, **options)
