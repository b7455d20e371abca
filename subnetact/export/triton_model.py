"""The model.py of Triton's Python backend: it runs every batch on a subnet that meets its deadlines.

`subnetact.export.to_triton` copies this file into the model repository. Triton's Python environment needs
subnetact, which includes ofa_adapters. A request has one or more samples in INPUT__0 and three optional
parameters: `deadline_ms`, the time from now in ms (default: `slo_ms` of the options), `min_accuracy` in
percent, and `importance`, the priority of `Batcher.submit`; others are refused. Triton's own `timeout` is a
deadline, too. All requests share one `Batcher`, whichever of Triton's batches they arrived in. A request that
its client cancelled is withdrawn within about 100 ms, unless it came through the ensemble, whose steps Triton
does not cancel. The batcher's metrics are among Triton's.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb  # type: ignore[import-not-found]

import subnetact
from subnetact.errors import InvalidRequest, RequestError
from subnetact.profile.source import build_model
from subnetact.serving import make_policy
from subnetact.serving.live.prometheus import metrics_of

PARAMETERS = ("deadline_ms", "min_accuracy", "importance")
TICK_S = 0.1
SUFFIXES = {"Counter": ["_total"], "Gauge": [""], "Summary": ["_count", "_sum"]}
"""The counters or gauge that a metric becomes; Triton's Python models have no histograms."""
CODES: dict[type[Exception], str] = {
    InvalidRequest: "INVALID_ARG",
    RequestError: "UNAVAILABLE",
    CancelledError: "CANCELLED",
    Exception: "INTERNAL",
}


class TritonPythonModel:
    """The model; Triton's Python backend calls its methods."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle beside this file and start the batcher."""
        here = Path(__file__).parent
        options = json.loads(json.loads(args["model_config"])["parameters"]["options"]["string_value"])
        gpu, self.slo_ms = args["model_instance_kind"] == "GPU", options["slo_ms"]
        engine = subnetact.Engine.load(
            here / "bundle",
            supernet=build_model(options["model"], None, bundled=True) if options["model"] else None,
            device=f"cuda:{args['model_instance_device_id']}" if gpu else "cpu",
            memory_budget_mb=options["memory_budget_mb"],
        )
        table = subnetact.LatencyTable.load(here / "table.json")
        engine.prepare(table.batch_sizes)
        policy, learn = make_policy(options["policy"], table, self.slo_ms), options["learn"]
        self.batcher = subnetact.Batcher(engine, policy=policy, table=table, slo_ms=self.slo_ms, learn=learn)
        self.labels = {"model": args["model_name"], "instance": args["model_instance_name"]}
        self.families: dict[str, Any] = {}
        self.metrics: dict[tuple[str, ...], tuple[Any, float]] = {}
        self.waiting: set[Reply] = set()
        self.closed = threading.Event()
        self.attendant = threading.Thread(target=self._attend, name="subnetact-triton", daemon=True)
        self.attendant.start()

    def execute(self, requests: list[Any]) -> None:
        """Queue every request and return; a request is answered when all of its samples are."""
        for request in requests:
            reply = Reply(request.get_response_sender())
            try:
                self._submit(request, reply.samples)
                self.waiting.add(reply)
                for sample in reply.samples:
                    sample.add_done_callback(reply.look)
            except Exception as error:
                reply.refuse(error)

    def _submit(self, request: Any, queued: list[Future[Any]]) -> None:
        asked = json.loads(request.parameters() or "{}")
        for name in asked:
            if name not in PARAMETERS and not name.startswith("triton_"):
                raise InvalidRequest(f"parameter {name!r} is not known; choose from {', '.join(PARAMETERS)}")
        samples = torch.from_numpy(pb.get_input_tensor_by_name(request, "INPUT__0").as_numpy().copy())
        if not len(samples):
            raise InvalidRequest("INPUT__0: expected at least one sample")
        timeout_ms = request.timeout() / 1e3
        deadline_ms = asked.get("deadline_ms", timeout_ms or self.slo_ms)
        if timeout_ms and isinstance(deadline_ms, int | float):
            deadline_ms = min(deadline_ms, timeout_ms)
        if type(importance := asked.get("importance", 0)) is not int:
            raise InvalidRequest(f"importance: {importance!r} is not an int; the higher, the more important")
        terms = {"min_accuracy": asked.get("min_accuracy"), "priority": importance}
        for sample in samples:
            queued.append(self.batcher.submit(sample, deadline_ms, **terms))

    def _attend(self) -> None:
        """Withdraw what clients cancelled, and report the batcher's metrics to Triton."""
        while not self.closed.wait(TICK_S):
            for reply in list(self.waiting):
                if reply.cancelled():
                    reply.refuse(CancelledError("the client gave up"))
                if reply.sent:
                    self.waiting.discard(reply)
            with suppress(pb.TritonModelException):  # The server may have been started without metrics.
                self._report()

    def _report(self) -> None:
        for kind, metric, text, labels, samples in metrics_of(self.batcher, self.batcher.stats()):
            for values, *numbers in samples:
                named = self.labels | dict(zip(labels, map(str, values), strict=True))
                for suffix, number in zip(SUFFIXES.get(kind, ()), numbers, strict=False):
                    self._set(kind == "Gauge", f"subnetact_{metric}{suffix}", text, named, float(number))

    def _set(self, gauge: bool, name: str, text: str, named: dict[str, str], number: float) -> None:
        key = (name, *named.values())
        if key not in self.metrics:
            if name not in self.families:
                kind = pb.MetricFamily.GAUGE if gauge else pb.MetricFamily.COUNTER
                self.families[name] = pb.MetricFamily(name=name, description=text, kind=kind)
            self.metrics[key] = self.families[name].Metric(labels=named), 0.0
        metric, former = self.metrics[key]
        if number != former:
            (metric.set if gauge else metric.increment)(number if gauge else number - former)
            self.metrics[key] = metric, number

    def finalize(self) -> None:
        """Answer all queued requests and stop the batcher."""
        self.batcher.close()
        self.closed.set()
        self.attendant.join()


class Reply:
    """The answer to one request, which is sent once."""

    def __init__(self, sender: Any) -> None:
        self.samples: list[Future[Any]] = []
        self.sent = False
        self._sender, self._lock = sender, threading.Lock()

    def cancelled(self) -> bool:
        """Return whether the client gave up; a sender that has sent must not be asked."""
        with self._lock:
            return not self.sent and bool(self._sender.is_cancelled())

    def look(self, _: Any) -> None:
        """Answer if all samples are."""
        if not all(sample.done() for sample in self.samples):
            return
        try:
            answers = [sample.result() for sample in self.samples]
            outputs = [
                pb.Tensor("OUTPUT__0", torch.stack([answer.output for answer in answers]).numpy()),
                pb.Tensor("SUBNET", np.array([[answer.subnet] for answer in answers], dtype=np.int32)),
                pb.Tensor("MET", np.array([[answer.met] for answer in answers], dtype=np.bool_)),
            ]
            self._send(pb.InferenceResponse(outputs))
        except Exception as error:
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Answer with the error, by its kind, and withdraw the samples that wait."""
        code = getattr(pb.TritonError, next(CODES[kind] for kind in CODES if isinstance(error, kind)))
        self._send(pb.InferenceResponse(error=pb.TritonError(f"{type(error).__name__}: {error}", code)))
        for sample in self.samples:
            sample.cancel()

    def _send(self, response: Any) -> None:
        with self._lock:
            if not self.sent:
                self.sent = True
                self._sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
