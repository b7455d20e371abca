"""Serves a bundle over HTTP: `python -m subnetact.serve --bundle DIR`, or `build_app` in a program of yours.

* `POST /infer` takes JSON, a NumPy file or an image; `/v2` is the Open Inference Protocol.
* `build_text_app` puts the addresses of OpenAI's interface in front of a `Generator`.
* `/` shows what the server does now; `/metrics`, `/livez`, `/readyz` and `/openapi.json` are for programs.

`Limits` says what the server accepts. Tokens, deadlines and the end of the server are explained by
`python -m subnetact.serve --help`.
"""

from __future__ import annotations

from typing import Any

from subnetact.errors import MissingExtra
from subnetact.serve.limits import Limits

__all__ = ["Limits", "ServeApp", "TextApp", "build_app", "build_text_app", "read_tokens", "run"]

try:
    from subnetact.serve.access import read_tokens
    from subnetact.serve.app import ServeApp, build_app
    from subnetact.serve.server import run
    from subnetact.serve.text_app import TextApp, build_text_app
except ImportError as error:
    _missing = str(error)

    def __getattr__(name: str) -> Any:
        if name in __all__:
            raise MissingExtra(
                f"serving needs Starlette, orjson and uvicorn ({_missing}); pip install 'subnetact[serve]'"
            )
        raise AttributeError(f"module 'subnetact.serve' has no attribute {name!r}")
