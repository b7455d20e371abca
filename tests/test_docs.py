"""The API reference builds from the docstrings without a warning, and holds every public name."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from subnetact import errors
from subnetact.serving import Policy

ROOMS = (
    "subnetact",
    "subnetact.space",
    "subnetact.operators",
    "subnetact.supernet",
    "subnetact.insertion",
    "subnetact.calibration",
    "subnetact.latency",
    "subnetact.engine",
    "subnetact.costs",
    "subnetact.nas",
    "subnetact.profile",
    "subnetact.serving",
    "subnetact.export",
    "subnetact.serve",
    "ofa_adapters",
)
"""What a user imports from; `subnetact.errors` is a part of the first."""
WARNING = "UncalibratedSubnetWarning"


@pytest.mark.slow
def test_the_api_reference_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdoc", "-d", "google", "-o", str(tmp_path), *ROOMS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    for room in ROOMS:
        page = (tmp_path / (room.replace(".", "/") + ".html")).read_text()
        for name in getattr(import_module(room), "__all__", ()):
            assert f'id="{name}"' in page or f"{name}.html" in page, f"{room}.{name}"


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
    """Return the names of the parameters that a caller gives."""
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "cls", "args", "kwargs")]


def test_every_error_is_a_subnetact_error_and_says_when_it_is_raised() -> None:
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, Warning if name == WARNING else errors.SubnetActError)
        assert "__doc__" in vars(error)
        assert error.__doc__.endswith(".")


CALLABLES = dict(public_callables())


@pytest.mark.parametrize("name", CALLABLES)
def test_a_public_function_says_what_it_takes_returns_and_raises(name: str) -> None:
    function, text = CALLABLES[name]
    assert inspect.getdoc(function)
    for parameter in takes(function):
        assert re.search(rf"\b{parameter}\b", text), f"{parameter} is not explained"
    returned = function.__annotations__.get("return")
    if returned not in (None, "None", type(None)):
        assert re.search(r"\b([Rr]eturns?|[Yy]ields?|Tell|Whether)\b", text), "what it returns is not said"
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            raised = getattr(node.exc.func, "id", "")
            if raised in errors.__all__:
                assert raised in text, f"{raised} is not said"
