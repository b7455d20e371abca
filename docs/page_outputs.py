"""Runs the blocks of Python of every page while it is read, and shows below each what it printed and drew."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from sphinx.util import logging

DOCS = Path(__file__).parent
PAGES = re.compile(r"howto/\w+|[a-z]+")
NEEDS_A_SERVER = "howto/openai"
"""The page whose blocks `tests/serve/test_text_command.py` runs."""
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What torchrun tells its only process."""
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
LONGEST = 24
"""Lines of output that are shown."""


def measured_shortly(profile_latency: Any) -> Any:
    """Return `profile_latency` with little time for each cell: no page needs precise times."""
    short = {"warmup_ms": 0.0, "min_time_ms": 5.0, "windows": 2, "max_windows": 2}
    return lambda *given, **named: profile_latency(*given, **{**named, **short})


def insert(app: Any, page: str, source: list[str]) -> None:
    """Put the outputs of its blocks into the text of a page; a block that fails is a warning of the build."""
    del app
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")  # `tests/test_readme.py` runs its blocks
    blocks = [code for code in BLOCK.findall(source[0]) if code not in readme]
    if not PAGES.fullmatch(page) or page == NEEDS_A_SERVER or not blocks:
        return
    text, names = "", {"__name__": "page"}
    pieces = BLOCK.split(source[0])
    with _quietly():
        for number, (before, code) in enumerate(zip(pieces[::2], pieces[1::2], strict=False)):
            text += f"{before}```python\n{code}```\n"
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    exec(compile(code, f"docs/{page}, block {number}", "exec"), names)
            except Exception as error:
                why = f"block {number} of the page fails: {type(error).__name__}: {error}"
                logging.getLogger(__name__).warning(why, location=page, type="page_outputs")
                return
            text += _shown(printed.getvalue()) + _drawn(page, number)
    source[0] = text + pieces[-1]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Run in a folder of its own, with short measurements, one thread and no bars of progress."""
    import torch
    from matplotlib import pyplot

    import subnetact
    from subnetact.serve import digits_engine

    if not hasattr(digits_engine.digits_engine, "cache_info"):  # three pages make it, in 3 s each
        vars(digits_engine)["digits_engine"] = cache(digits_engine.digits_engine)
    measure, here = subnetact.profile_latency, Path.cwd()
    measuring = [vars(module) for module in (subnetact, digits_engine)]
    os.environ |= {"TQDM_DISABLE": "1", **TORCHRUN}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pyplot.close("all")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", subnetact.errors.UncalibratedSubnetWarning)
        (Path(folder) / "profiling").symlink_to(DOCS.parent / "profiling")
        for names in measuring:
            names["profile_latency"] = measured_shortly(measure)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)
            for names in measuring:
                names["profile_latency"] = measure


def _shown(printed: str) -> str:
    """Return the output of a block as one that cannot be mistaken for code."""
    lines = printed.rstrip().splitlines()
    if not lines:
        return ""
    if len(lines) > LONGEST:
        lines = [*lines[:LONGEST], f"... ({len(lines) - LONGEST} more lines)"]
    return "\n".join(["", "```{code-block} text", ":caption: It prints, for example:", "", *lines, "```", ""])


def _drawn(page: str, number: int) -> str:
    """Keep the figures that a block has left in its folder, and return what shows them."""
    shown = ""
    for figure in sorted(Path.cwd().glob("*.png")):
        target = DOCS / "outputs" / f"{page.replace('/', '_')}_{number}_{figure.name}"
        target.parent.mkdir(exist_ok=True)
        shutil.move(figure, target)
        shown += f"\n![What the code above draws](/outputs/{target.name})\n"
    return shown
