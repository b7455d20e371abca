"""The README's first lines of Python run as they are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from subnetact.profile.cli import build_parser

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_the_examples_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    first, table, second, export, cases = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(first, "README.md", "exec"), names)
    assert re.fullmatch(r"[01] [0-9.]+ [0-9.]+ (True|False)\n", capsys.readouterr().out)
    monkeypatch.chdir(Path(__file__).parents[1])
    exec(compile(table, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("3.59")
    assert "12 of 12 cells differ by more than 5 %" in printed
    exec(compile(second, "README.md", "exec"), names)
    supernet, image = names["supernet"], torch.zeros(2, 3, 8, 8)
    for spec in supernet.space.enumerate():
        assert torch.equal(supernet(image, subnet=spec), supernet.extract(spec)(image))
    monkeypatch.chdir(tmp_path)
    exec(compile(export, "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith("2 depth=4 width=1.0 [32,")
    threads = torch.get_num_threads()
    exec(compile(cases, "README.md", "exec"), names)
    torch.set_num_threads(threads)
    assert len(torch.load("cases.pt")["outputs"]) == 2


def test_the_profile_lines_parse() -> None:
    lines = re.findall(r"^python -m subnetact\.profile (.*)", README.replace("\\\n", " "), re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        build_parser().parse_args(shlex.split(line, comments=True))


def test_each_command_section_has_one_shell_block() -> None:
    for title in ("Run it", "Test it"):
        section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
        assert section is not None
        assert section.group(1).count("```") == 2
