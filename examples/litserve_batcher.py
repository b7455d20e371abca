"""LitServe with our batch formation: the subnet of every batch follows from the deadlines of its requests.

    pip install 'subnetact[serve]' litserve
    python examples/litserve_batcher.py --bundle bundle/
    curl -H 'content-type: application/json' -d '{"input": [...], "deadline_ms": 50}' http://127.0.0.1:8000/infer

LitServe hands requests to one process, one by one; the `Batcher` in that process forms the batches.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

import torch

from subnetact.errors import RequestError
from subnetact.serve.exchange import refusal_of
from subnetact.serve.source import Source
from subnetact.serving import Answer

litserve: Any = import_module("litserve")
HTTPException: Any = import_module("fastapi").HTTPException  # LitServe brings FastAPI


class ElasticAPI(litserve.LitAPI):  # type: ignore[misc]
    """Answers `{"input": ..., "deadline_ms": ..., "min_accuracy": ...}` with a class and the subnet."""

    def __init__(self, source: Source) -> None:
        super().__init__(api_path="/infer", enable_async=True)
        self._source = source

    def setup(self, device: str) -> None:  # noqa: ARG002
        """Load the bundle and open the batcher, in the worker process."""
        self._engine = self._source.engine(mapped=True)
        self._batcher = self._source.batcher(self._engine, self._source.latency_table(self._engine))

    # LitServe reads the annotations of decode_request and encode_response: without any, both are plain JSON.

    async def decode_request(self, request):  # type: ignore[no-untyped-def]
        """Return the input of a request, its deadline and its minimum accuracy."""
        x = torch.tensor(request["input"]).reshape(self._engine.sample.shape)
        return x, request.get("deadline_ms", self._source.slo_ms), request.get("min_accuracy")

    async def predict(self, asked: tuple[Any, float, float | None]) -> Answer:
        """Wait for the answer; requests that wait at the same time share batches."""
        try:
            x, deadline_ms, floor = asked
            return await self._batcher.infer(x, deadline_ms, min_accuracy=floor)
        except RequestError as error:
            refusal = refusal_of(error)
            raise HTTPException(refusal.status, str(refusal), refusal.headers or None) from None

    async def encode_response(self, output):  # type: ignore[no-untyped-def]
        """Return the answer as JSON."""
        return {"class": int(output.output.argmax()), "subnet": output.subnet, "accuracy": output.accuracy}


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", required=True, help="folder of a saved engine")
    parser.add_argument("--slo-ms", type=float, default=36.0, help="deadline of requests that name none")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    api = ElasticAPI(Source(bundle=args.bundle, slo_ms=args.slo_ms))
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=args.port, num_api_servers=1, generate_client_file=False)


if __name__ == "__main__":
    main()
