"""Makes the options of a command out of the dataclasses and functions that take their values.

Names, types, defaults and help texts are those of the parameters and of their docstrings, so that every fact
stands once.
"""

from __future__ import annotations

import argparse
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from subnetact.command import json_object

__all__ = ["OptionFormatter", "add_options", "call_with_options", "option_facts"]

Result = TypeVar("Result")


class OptionFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults unless they are empty or explained already, and keeps the lines of the epilog."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = action.default is False or action.default in (None, [], {})
        explained = "default" in (action.help or "")
        return action.help if empty or explained else super()._get_help_string(action)


def option_facts(target: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Return the arguments of `ArgumentParser.add_argument` for every parameter of plain data."""
    hints = typing.get_type_hints(target)
    text = inspect.getdoc(target) or ""
    section = re.search(r"^(?:Args|Attributes):\n((?: {4}.*\n?)+)", text, re.MULTILINE)
    entries = re.compile(r"^ {4}(\w+): (.+?)(?=\n {4}\w|\Z)", re.DOTALL | re.MULTILINE)
    documented = dict(entries.findall(section[1] if section else ""))
    found = {}
    for name, parameter in inspect.signature(target).parameters.items():
        kind = _kind(hints[name])
        if kind is not None:
            default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
            help_text = " ".join(documented.get(name, "").split()).removesuffix(".")
            found[name] = {"default": default, "help": help_text, **kind}
    return found


def _kind(hint: Any) -> dict[str, Any] | None:
    """Return how values of a type are read from the command line; None if they are not."""
    if isinstance(hint, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not types.NoneType)
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is Mapping:
        return {"type": json_object, "metavar": "JSON"}
    if typing.get_origin(hint) in (tuple, Sequence):
        return {**(_kind(typing.get_args(hint)[0]) or {}), "nargs": "+"}
    metavars = {int: "N", float: "N", str: None, Path: "FILE"}
    return {"type": hint, "metavar": metavars[hint]} if hint in metavars else None


def add_options(
    parser: argparse.ArgumentParser,
    groups: Mapping[str, Iterable[str]],
    facts: Mapping[str, Mapping[str, Any]],
) -> None:
    """Add the options of every group; `name` in a help text becomes --name if it is an option."""

    def typed(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')}" if found[1] in facts else found[1]

    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            text = re.sub(r"`([^`]*)`", typed, facts[name]["help"]).replace("%", "%%")
            group.add_argument(f"--{name.replace('_', '-')}", **{**facts[name], "help": text})


def call_with_options(target: Callable[..., Result], args: argparse.Namespace, **more: Any) -> Result:
    """Call a dataclass or a function with the options that it has parameters for, and with `more`."""
    given = {
        name: getattr(args, name) for name in inspect.signature(target).parameters if hasattr(args, name)
    }
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return target(**{**given, **lists, **more})
