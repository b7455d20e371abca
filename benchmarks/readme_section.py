"""write_section: puts figures into the section of README.md that a benchmark owns."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["write_section"]

README = Path(__file__).with_name("README.md")


def write_section(name: str, lines: Iterable[str]) -> None:
    """Replace the lines between the two comments of a section of README.md.

    Args:
        name: the name in the comments.
        lines: the new lines, without line breaks.

    Raises:
        ValueError: README.md has no such comments.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = README.read_text(encoding="utf-8").split(begin)
    _, tail = rest.split(end)
    README.write_text(f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{tail}", encoding="utf-8")
