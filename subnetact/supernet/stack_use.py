"""Stack use: whether a network only calls a stack of layers, so that it cannot see positions of layers."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

__all__ = ["only_called"]

_CHILDREN = frozenset({"_modules", "children", "named_children", "get_submodule"})


def only_called(network: nn.Module, path: str) -> bool:
    """Tell whether a network uses an `nn.Sequential` in no other way than by calling it.

    If so, a stack without its skipped layers computes what the stack with identities in their places does.
    The code of all classes in the network decides; code that cannot be read is taken to do more than calling.

    Args:
        network: the network.
        path: the name of the stack in the network.
    """
    stacks, names = [network], path.split(".")
    for name in names:
        stacks.append(stacks[-1].get_submodule(name))
    while len(names) > 1 and isinstance(stacks[-2], nn.Sequential):
        if not _plain(stacks.pop()):
            return False
        names.pop()
    if len(stacks) == 2 and isinstance(network, nn.Sequential):
        return _plain(stacks[-1]) and _plain(network)
    if isinstance(stacks[-2], nn.ModuleList | nn.ModuleDict):
        return False
    return _plain(stacks[-1]) and not any(
        uses is None or names[-1] in uses or uses & _CHILDREN
        for uses in map(_uses, set(map(type, network.modules())))
    )


def _plain(stack: nn.Module) -> bool:
    return isinstance(stack, nn.Sequential) and type(stack).forward is nn.Sequential.forward


@lru_cache(maxsize=1024)
def _uses(cls: Any) -> frozenset[str] | None:
    """Return the attributes that methods of a class read without calling them; None if it has no source."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base in (object, nn.Module):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            return None
        found.update(_read(tree))
    return frozenset(found)


def _read(tree: ast.AST) -> Iterator[str]:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if id(node) not in called or node.attr in _CHILDREN:
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            if len(node.args) < 2 or not isinstance(node.args[1], ast.Constant):
                yield "_modules"  # Which attribute this reads is not known.
            else:
                yield str(node.args[1].value)
