"""Docstrings say what a caller needs to know; options on pages exist; links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from subnetact import errors
from subnetact.profile.cli import build_parser
from subnetact.serve.cli import options
from subnetact.serving import Policy

INSIDE = (
    "space operators supernet insertion calibration latency engine costs nas profile serving export serve"
)


ROOMS = ("subnetact", *(f"subnetact.{room}" for room in INSIDE.split()), "subnetact.serve", "ofa_adapters")


"""What a user imports from; `subnetact.errors` is a part of the first."""


def public_callables() -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield the public functions, and the public methods of the public classes, each with its text.

    A method that overrides another has the other's text as well, and a policy that of `Policy`.
    """
    seen = set()
    for room in ROOMS:
        module = import_module(room)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isfunction(value) and value not in seen:
                seen.add(value)
                yield f"{room}.{name}", (value, inspect.getdoc(value) or "")
            elif inspect.isclass(value) and value not in seen:
                seen.add(value)
                for inner, member in vars(value).items():
                    function = getattr(member, "__func__", member)
                    if inspect.isfunction(function) and not inner.startswith("_"):
                        bases = [*value.__mro__, Policy] if hasattr(value, "decide") else value.__mro__
                        texts = [getattr(base, inner).__doc__ or "" for base in bases if hasattr(base, inner)]
                        if bases[-1] is Policy:
                            texts.append(Policy.__doc__ or "")
                        yield f"{room}.{name}.{inner}", (function, "\n".join(texts))


def takes(function: Any) -> list[str]:
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "cls", "args", "kwargs")]


def test_every_error_is_a_subnetact_error_and_says_when_it_is_raised() -> None:
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, Warning if name.endswith("Warning") else errors.SubnetActError)
        assert "__doc__" in vars(error)
        assert error.__doc__.endswith(".")


def test_every_public_function_says_what_it_takes_returns_and_raises() -> None:
    silent = []
    for name, (function, text) in public_callables():
        said = [(inspect.getdoc(function), "what it does")]
        said += [(re.search(rf"\b{one}\b", text), f"the parameter {one}") for one in takes(function)]
        if function.__annotations__.get("return") not in (None, "None", type(None)):
            returns = re.search(r"\b([Rr]eturns?|[Yy]ields?|Tell|Whether)\b", text)
            said.append((returns, "what it returns"))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                raised = getattr(node.exc.func, "id", "")
                said.append((raised not in errors.__all__ or raised in text, raised))
        silent += [f"{name}: {what}" for found, what in said if not found]
    assert not silent


ROOT = Path(__file__).parents[1]


PAGES = {
    str(path.relative_to(ROOT / "docs")): path.read_text()
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "howto").glob("*.md")]
}


def test_every_option_of_a_command_exists() -> None:
    unknown = []
    for page, text in PAGES.items():
        blocks = re.findall(r"```(?:sh|console)\n(.*?)```", text, re.DOTALL)
        shell = "\n".join(blocks).replace("\\\n", " ")
        for module, rest in re.findall(r"python -m ((?:subnetact|ofa_adapters)[\w.]*)([^\n|&#]*)", shell):
            if module == "subnetact.profile":
                build_parser().parse_args(shlex.split(rest))
                continue
            spec = importlib.util.find_spec(module)
            assert spec is not None, module
            files = Path(str(spec.origin)).parent.rglob("*.py")
            unknown += unknown_options(f"{page}: {module}", rest, files)
        for program, rest in re.findall(r"python (examples/\w+\.py)([^\n|&#]*)", shell):
            unknown += unknown_options(f"{page}: {program}", rest, [ROOT / program])
    assert not unknown


def unknown_options(where: str, rest: str, files: Iterable[Path]) -> list[str]:
    sources = "".join(path.read_text() for path in files)
    options = set(re.findall(r"(?<= )--[a-z][\w-]*", rest)) - {"--help"}
    return [f"{where} has no {option}" for option in options if f'"{option}"' not in sources]


def test_every_link_of_a_page_leads_somewhere() -> None:
    """They lead to files of the repository; Sphinx leads them to the pages that it makes of these."""
    others = [ROOT / "README.md", *(ROOT / "benchmarks" / "results").glob("*.md")]
    texts = PAGES | {os.path.relpath(path, ROOT / "docs"): path.read_text() for path in others}
    for page, text in texts.items():
        folder = (ROOT / "docs" / page).parent
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            assert (folder / target).exists(), f"{page}: {target}"


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


def request_errors() -> list[type[errors.RequestError]]:
    kinds = [errors.RequestError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return kinds


def test_every_error_of_serving_is_explained_and_in_the_table_of_the_server_with_its_status() -> None:
    exchange = pytest.importorskip("subnetact.serve.exchange", reason="serving needs the extra `serve`")
    listed = {
        (int(status), name)
        for status, names, *_ in cells("howto/serve.md", "Errors")
        for name in re.findall(r"\w+", names)
    }
    raised = {(exchange.refusal_of(kind("why")).status, kind.__name__) for kind in request_errors()[1:]}
    source = "".join(path.read_text() for path in (ROOT / "subnetact" / "serve").glob("*.py"))
    raised |= {(int(status), name) for status, name in re.findall(r'(\d{3})[,:] "([A-Z]\w+)"', source)}
    assert listed == raised
    page = PAGES["howto/troubleshooting.md"]
    assert [kind for kind in request_errors()[1:] if f"| `{kind.__name__}` |" not in page] == []
