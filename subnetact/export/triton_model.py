"""The model.py of Triton's Python backend: it runs every batch on a subnet that meets its deadlines.

`subnetact.export.to_triton` copies this file into the model repository. Triton's Python environment needs
subnetact, which includes ofa_adapters. A request has one or more samples in INPUT__0 and two optional request
parameters: `deadline_ms`, the time from now in ms (default: `slo_ms` of the configuration), and
`min_accuracy` in percent. All requests share one `Batcher`, whichever of Triton's batches they arrived in.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb  # type: ignore[import-not-found]

import subnetact
from subnetact.errors import InvalidRequest, RequestError
from subnetact.serving import make_policy


class TritonPythonModel:
    """The model; Triton's Python backend calls its methods."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle beside this file and start the batcher."""
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
        policy = make_policy(parameters["policy"], table, self.slo_ms)
        self.batcher = subnetact.Batcher(engine, policy=policy, table=table, slo_ms=self.slo_ms, learn=learn)

    def execute(self, requests: list[Any]) -> None:
        """Queue every request and return; a request is answered when all of its samples are."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                _answer_when_done(self._submit(request), sender)
            except Exception as error:
                _send(sender, error=error)

    def _submit(self, request: Any) -> list[Future[Any]]:
        asked = json.loads(request.parameters() or "{}")
        samples = torch.from_numpy(pb.get_input_tensor_by_name(request, "INPUT__0").as_numpy().copy())
        if not len(samples):
            raise InvalidRequest("INPUT__0: expected at least one sample")
        deadline_ms, floor = asked.get("deadline_ms", self.slo_ms), asked.get("min_accuracy")
        queued: list[Future[Any]] = []
        try:
            for sample in samples:
                queued.append(self.batcher.submit(sample, deadline_ms, min_accuracy=floor))
        except Exception:
            for earlier in queued:
                earlier.cancel()
            raise
        return queued

    def finalize(self) -> None:
        """Answer all queued requests and stop the batcher."""
        self.batcher.close()


def _answer_when_done(samples: list[Future[Any]], sender: Any) -> None:
    """Answer a request when all of its samples are."""
    others = iter(samples)

    def look(_: Any = None) -> None:
        for sample in others:
            if not sample.done():
                sample.add_done_callback(look)  # It goes on behind this sample.
                return
        try:
            answers = [sample.result() for sample in samples]
            outputs = [
                pb.Tensor("OUTPUT__0", torch.stack([a.output for a in answers]).numpy()),
                pb.Tensor("SUBNET", np.array([[a.subnet] for a in answers], dtype=np.int32)),
                pb.Tensor("MET", np.array([[a.met] for a in answers], dtype=np.bool_)),
            ]
        except Exception as error:
            _send(sender, error=error)
        else:
            _send(sender, outputs)

    look()


def _send(sender: Any, outputs: list[Any] | None = None, error: Exception | None = None) -> None:
    if error is None:
        response = pb.InferenceResponse(outputs)
    else:
        code = pb.TritonError.UNAVAILABLE if isinstance(error, RequestError) else pb.TritonError.INTERNAL
        if isinstance(error, InvalidRequest):
            code = pb.TritonError.INVALID_ARG
        response = pb.InferenceResponse(error=pb.TritonError(f"{type(error).__name__}: {error}", code))
    sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
