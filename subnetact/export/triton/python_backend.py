"""Triton Python backend: one supernet, and a subnet for every batch by the deadlines of its requests.

`subnetact.export.to_triton` copies this file into the model repository; Triton's Python environment
needs subnetact (and ofa_adapters, which come with it). A request holds one or more rows of INPUT__0 and,
as request parameters, `deadline_ms` (from now, default: the configuration's slo_ms) and `min_accuracy`
(percent). All requests share one Batcher, whichever of Triton's batches they came in.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb  # type: ignore[import-not-found]

import subnetact
from subnetact.errors import InvalidRequest, RequestError


class TritonPythonModel:
    """What Triton's Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle beside this file, and start the batcher."""
        here = Path(__file__).parent
        parameters = {k: v["string_value"] for k, v in json.loads(args["model_config"])["parameters"].items()}
        gpu = args["model_instance_kind"] == "GPU"
        self.slo_ms = float(parameters["slo_ms"])
        engine = subnetact.Engine.load(
            here / "bundle",
            device=f"cuda:{args['model_instance_device_id']}" if gpu else "cpu",
            memory_budget_mb=float(parameters["memory_budget_mb"]),
        )
        table = subnetact.LatencyTable.load(here / "table.json")
        engine.prepare(table.batch_sizes)
        learn = parameters["learn"] == "true"
        self.batcher = subnetact.Batcher(engine, table=table, slo_ms=self.slo_ms, learn=learn)

    def execute(self, requests: list[Any]) -> None:
        """Queue every request and return; each is answered when its rows are."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                _Waiting(self._submit(request), sender)
            except Exception as error:
                _send(sender, error=error)

    def _submit(self, request: Any) -> list[Future[Any]]:
        asked = json.loads(request.parameters() or "{}")
        rows = torch.from_numpy(pb.get_input_tensor_by_name(request, "INPUT__0").as_numpy().copy())
        if not len(rows):
            raise InvalidRequest("INPUT__0: expected at least one row")
        deadline_ms = asked.get("deadline_ms", self.slo_ms)
        queued: list[Future[Any]] = []
        try:
            for row in rows:
                queued.append(self.batcher.submit(row, deadline_ms, asked.get("min_accuracy")))
        except Exception:
            for earlier in queued:
                earlier.cancel()
            raise
        return queued

    def finalize(self) -> None:
        """Answer what is queued, and stop."""
        self.batcher.close()


class _Waiting:
    """A request some of whose rows are not answered yet."""

    def __init__(self, rows: list[Future[Any]], sender: Any) -> None:
        self._rows, self._sender = rows, sender
        self._left, self._lock = len(rows), threading.Lock()
        for row in rows:
            row.add_done_callback(self._one_done)

    def _one_done(self, _: Future[Any]) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        try:
            answers = [row.result() for row in self._rows]
            outputs = [
                pb.Tensor("OUTPUT__0", torch.stack([a.output for a in answers]).numpy()),
                pb.Tensor("SUBNET", np.array([[a.subnet] for a in answers], dtype=np.int32)),
                pb.Tensor("MET", np.array([[a.met] for a in answers], dtype=np.bool_)),
            ]
        except Exception as error:
            _send(self._sender, error=error)
        else:
            _send(self._sender, outputs)


def _send(sender: Any, outputs: list[Any] | None = None, error: Exception | None = None) -> None:
    if error is None:
        response = pb.InferenceResponse(outputs)
    else:
        invalid, expected = isinstance(error, InvalidRequest), isinstance(error, RequestError)
        code = pb.TritonError.INVALID_ARG if invalid else pb.TritonError.UNAVAILABLE
        if not expected:
            code = pb.TritonError.INTERNAL
        response = pb.InferenceResponse(error=pb.TritonError(f"{type(error).__name__}: {error}", code))
    sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
