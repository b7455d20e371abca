"""What `import subnetact` adds to transformers, which it does not import: a module gets it on import.

- The keyword `subnet` of `from_pretrained` of models, by which other libraries open a subnet of a bundle.
  Without the keyword, `from_pretrained` is what it was.
- The model type of models whose layers differ in size, which the Auto classes then open
  (`elastic/auto_classes.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any


def add_to_transformers() -> None:
    """Add both now to the modules of transformers that are imported, and to the others when they are."""
    register: Any = lambda _: import_module("subnetact.elastic.auto_classes").register()  # noqa: E731
    for name, add in (("modeling_utils", _add_keyword), ("models.auto.modeling_auto", register)):
        if module := sys.modules.get(f"transformers.{name}"):
            add(module)
        else:
            sys.meta_path.insert(0, _Finder(f"transformers.{name}", add))


class _Finder(MetaPathFinder):
    """Calls a function with a module as soon as somebody else has imported it."""

    def __init__(self, name: str, add: Callable[[Any], None]) -> None:
        self._name, self._add = name, add

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def execute(module: Any) -> None:
                run(module)
                self._add(module)

            spec.loader.exec_module = execute
        return spec


def _add_keyword(models: Any) -> None:
    plain = models.PreTrainedModel.from_pretrained.__func__

    @wraps(plain)
    def from_pretrained(cls: Any, name: Any, *args: Any, subnet: Any = None, **options: Any) -> Any:
        if subnet is None:
            return plain(cls, name, *args, **options)
        from subnetact.elastic.opened_subnet import open_subnet

        return open_subnet(cls, name, subnet, options)

    models.PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[arg-type]
