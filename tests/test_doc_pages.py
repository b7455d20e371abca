"""The commands in the documentation have the options that they name, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest

from subnetact.profile.cli import build_parser

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT / "docs")): path.read_text()
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "howto").glob("*.md")]
}


@pytest.mark.parametrize("page", PAGES)
def test_every_option_of_a_command_exists(page: str) -> None:
    shell = "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", PAGES[page], re.DOTALL)).replace("\\\n", " ")
    for module, rest in re.findall(r"python -m ((?:subnetact|ofa_adapters)[\w.]*)([^\n|&#]*)", shell):
        if module == "subnetact.profile":
            build_parser().parse_args(shlex.split(rest))
            continue
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        folders = [Path(str(spec.origin)).parent, ROOT / "subnetact" / "serve"]  # `cluster` shares them
        sources = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
        for option in re.findall(r"(?<= )--[a-z][\w-]*", rest):
            assert f'"{option}"' in sources or option == "--help", f"{module} has no {option}"


def test_every_link_of_a_page_leads_somewhere() -> None:
    """Pages of the folders below are made while Sphinx builds, of the files that are named here."""
    made = {"gallery": ROOT / "examples", "results": ROOT / "benchmarks" / "results"}
    for page, text in PAGES.items():
        folder = (ROOT / "docs" / page).parent
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            path = Path(os.path.normpath(folder / target))
            if path.parent.name in made:
                sources = made[path.parent.name].iterdir()
                assert path.stem in ("index", *(source.stem for source in sources)), f"{page}: {target}"
            elif path.parent.name == "api":
                assert importlib.util.find_spec(path.stem), f"{page}: {target}"
            else:
                assert path.exists(), f"{page}: {target}"


def test_every_public_package_has_a_page_in_the_reference() -> None:
    source = (ROOT / "docs" / "written_pages.py").read_text()
    rooms = set(re.findall(r'^    "((?:subnetact|ofa_adapters)[\w.]*)",$', source, re.MULTILINE))
    public = {
        f"subnetact.{path.parent.name}"
        for path in (ROOT / "subnetact").glob("*/__init__.py")
        if "__all__" in path.read_text()
    }
    assert public <= rooms
