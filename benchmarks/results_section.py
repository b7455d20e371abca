"""write_section: puts the figures of a benchmark into its page in results/."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["write_section"]

RESULTS = Path(__file__).with_name("results")


def write_section(name: str, lines: Iterable[str]) -> None:
    """Replace the lines between the two comments of a page.

    Args:
        name: the name of the page, `results/NAME.md`, and in the comments.
        lines: the new lines, without line breaks.

    Raises:
        ValueError: the page has no such comments.
    """
    page = RESULTS / f"{name}.md"
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = page.read_text(encoding="utf-8").split(begin)
    _, tail = rest.split(end)
    page.write_text(f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{tail}", encoding="utf-8")
