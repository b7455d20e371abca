"""The README's first lines of Python run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    first, second = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(first, "README.md", "exec"), names)
    assert capsys.readouterr().out.endswith("True\n")
    exec(compile(second, "README.md", "exec"), names)
    supernet, image = names["supernet"], torch.zeros(2, 3, 8, 8)
    for spec in supernet.space.enumerate():
        assert torch.equal(supernet(image, subnet=spec), supernet.extract(spec)(image))


def test_each_command_section_has_one_shell_block() -> None:
    for title in ("Run it", "Test it"):
        section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
        assert section is not None
        assert section.group(1).count("```") == 2
