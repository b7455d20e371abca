"""The README's first lines of Python run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.slow
def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    exec(compile(block.group(1), "README.md", "exec"), {})
    assert "Answer(" in capsys.readouterr().out


def test_each_command_section_has_one_shell_block() -> None:
    for title in ("Run it", "Test it"):
        section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
        assert section is not None
        assert section.group(1).count("```") == 2
