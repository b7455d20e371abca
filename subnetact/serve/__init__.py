"""Serves a bundle over HTTP: `python -m subnetact.serve --bundle DIR`, or `build_app` in a program of yours.

* `POST /infer` takes JSON, a NumPy file or an image; `/v2` is the Open Inference Protocol.
* `/` shows what the server does now; `/metrics`, `/healthz`, `/readyz` and `/openapi.json` are for programs.

`Limits` says what the server accepts. Tokens, deadlines and the end of the server are explained by
`python -m subnetact.serve --help`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from subnetact.errors import MissingExtra
from subnetact.serve.access import read_tokens
from subnetact.serve.limits import Limits

if TYPE_CHECKING:
    from subnetact.serve.app import ServeApp, build_app
    from subnetact.serve.server import run

__all__ = ["Limits", "ServeApp", "build_app", "read_tokens", "run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'subnetact.serve' has no attribute {name!r}")
    try:
        if name == "run":
            return import_module("subnetact.serve.server").run
        return getattr(import_module("subnetact.serve.app"), name)
    except ImportError as error:
        raise MissingExtra(
            f"serving needs FastAPI and uvicorn ({error}); pip install 'subnetact[serve]'"
        ) from error
