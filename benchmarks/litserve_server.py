"""Serves one fixed subnet of a bundle with LitServe; takes the JSON requests of `/infer`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subnetact import Engine

litserve: Any = import_module("litserve")


class FixedSubnet(litserve.LitAPI):  # type: ignore[misc]
    """Loads the bundle in the worker process, pins one subnet and runs every batch on it."""

    def __init__(self, bundle: str, subnet: int, **batching: Any) -> None:
        super().__init__(**batching)
        self._bundle = bundle
        self._subnet = subnet

    def setup(self, device: str) -> None:  # noqa: ARG002
        """Load the engine, pin the subnet, and run every batch size once."""
        torch.set_num_threads(1)
        self._engine = Engine.load(self._bundle)
        self._engine.pin(self._subnet)
        self._engine.prepare((1, 8, 16), [self._subnet])

    # LitServe reads the annotations of decode_request and encode_response: without any, both are plain JSON.

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        """Return the input of a request."""
        return torch.tensor(request["input"]).reshape(self._engine.sample.shape)

    def batch(self, inputs: list[Tensor]) -> Tensor:
        """Stack the inputs."""
        return torch.stack(list(inputs))

    def predict(self, x: Tensor) -> list[int]:
        """Return the classes."""
        return self._engine(x, self._subnet).argmax(1).tolist()  # type: ignore[no-any-return]

    def unbatch(self, output: list[int]) -> list[int]:
        """Return one class per input."""
        return output

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        """Return the answer in the form of our server."""
        return {"class": output, "subnet": self._subnet, "accuracy": self._engine.accuracy[self._subnet]}


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--subnet", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--batch-timeout-ms", type=float, default=2.0)
    args = parser.parse_args()
    sys.setswitchinterval(1e-4)
    api = FixedSubnet(
        str(args.bundle),
        args.subnet,
        api_path="/infer",
        max_batch_size=args.max_batch,
        batch_timeout=args.batch_timeout_ms / 1e3,
    )
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1)
    server.run(
        host="127.0.0.1",
        port=args.port,
        num_api_servers=1,
        log_level="error",
        generate_client_file=False,
        access_log=False,
    )


if __name__ == "__main__":
    main()
