"""The docstrings of public names, of which the API reference is built, say what a caller needs to know."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
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
        assert issubclass(error, Warning if name.endswith("Warning") else errors.SubnetActError)
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
