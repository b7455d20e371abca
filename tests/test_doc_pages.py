"""The commands in the documentation have the options that they name, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest

from subnetact import errors
from subnetact.profile.cli import build_parser
from subnetact.serve.cli import options

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
        sources = "".join(path.read_text() for path in Path(str(spec.origin)).parent.rglob("*.py"))
        for option in re.findall(r"(?<= )--[a-z][\w-]*", rest):
            assert f'"{option}"' in sources or option == "--help", f"{module} has no {option}"
    for program, rest in re.findall(r"python (examples/\w+\.py)([^\n|&#]*)", shell):
        for option in re.findall(r"(?<= )--[a-z][\w-]*", rest):
            source = (ROOT / program).read_text()
            assert f'"{option}"' in source or option == "--help", f"{program} has no {option}"


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


def cells(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the table below a heading of a page."""
    section = PAGES[page].split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)[2:]
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def test_the_table_of_the_server_has_every_option_and_its_default() -> None:
    listed = {row[0].strip("`"): row[1] for row in cells("howto/serve.md", "Options")}
    actions = {one.option_strings[0]: one.default for one in options()._actions if one.dest != "help"}
    assert listed.keys() == actions.keys()
    for name, default in actions.items():
        values = default if isinstance(default, list) else [default]
        shown = [f"{one:g}" if isinstance(one, float) else str(one) for one in values]
        nothing = default is None or default is False or default == {}
        assert listed[name].split() == ([] if nothing else shown), name


def test_the_table_of_the_server_has_every_error_with_its_status() -> None:
    exchange = pytest.importorskip("subnetact.serve.exchange", reason="serving needs the extra `serve`")
    listed = {
        (int(status), name)
        for status, names, *_ in cells("howto/serve.md", "Errors")
        for name in re.findall(r"\w+", names)
    }
    kinds = [errors.RequestError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    raised = {(exchange.refusal_of(kind("why")).status, kind.__name__) for kind in kinds} - {
        (500, "RequestError")
    }
    source = "".join(path.read_text() for path in (ROOT / "subnetact" / "serve").glob("*.py"))
    raised |= {(int(status), name) for status, name in re.findall(r'(\d{3}), "([A-Z]\w+)"', source)}
    raised |= {(int(status), name) for status, name in re.findall(r'(\d{3}): "([A-Z]\w+)"', source)}
    assert listed == raised


def test_every_error_of_serving_is_explained() -> None:
    page = PAGES["howto/troubleshooting.md"]
    kinds = [errors.RequestError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert kind is errors.RequestError or f"| `{kind.__name__}` |" in page, kind
