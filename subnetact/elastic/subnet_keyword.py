"""The keyword `subnet` of `from_pretrained` of transformers, by which other libraries open a subnet.

`import subnetact` adds it to the models of transformers, which it does not import: if they are imported
later, it is added then. Without the keyword, `from_pretrained` is what it was.
"""

from __future__ import annotations

import sys
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any

MODELS = "transformers.modeling_utils"


class _Finder(MetaPathFinder):
    """Adds the keyword when somebody else imports the models of transformers."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if fullname != MODELS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _add(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def add_keyword() -> None:
    """Add the keyword now, if the models of transformers are imported, or else when they are."""
    if MODELS in sys.modules:
        _add(sys.modules[MODELS])
    else:
        sys.meta_path.insert(0, _Finder())


def _add(models: Any) -> None:
    plain = models.PreTrainedModel.from_pretrained.__func__

    @wraps(plain)
    def from_pretrained(cls: Any, name: Any, *args: Any, subnet: Any = None, **options: Any) -> Any:
        if subnet is None:
            return plain(cls, name, *args, **options)
        from subnetact.elastic.opened_subnet import open_subnet

        return open_subnet(cls, name, subnet, options)

    models.PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[arg-type]
