"""The model.py of Triton's Python backend: it runs every batch on a subnet that meets its deadlines.

`subnetact.export.to_triton` copies this file into the model repository. Triton's Python environment needs
subnetact, which includes ofa_adapters. A request has one or more samples in INPUT__0 and three optional
parameters: `deadline_ms`, the time from now in ms (default: `slo_ms` of the configuration), `min_accuracy` in
percent, and `importance`, the priority of `Batcher.submit`; others are refused. Triton's own `timeout` is a
deadline, too. All requests share one `Batcher`, whichever of Triton's batches they arrived in. A request that
its client cancelled is withdrawn within about 40 ms. The batcher's metrics are among Triton's.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import CancelledError, Future
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
TICK_S, TICKS_PER_REPORT = 0.02, 25
NUMBERS = {"Counter": ["_total"], "Gauge": [""], "Summary": ["_count", "_sum"]}
"""The metrics that a kind of metric becomes: Triton has counters and gauges only."""


class TritonPythonModel:
    """The model; Triton's Python backend calls its methods."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle beside this file and start the batcher."""
        here, config = Path(__file__).parent, json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        gpu = args["model_instance_kind"] == "GPU"
        self.slo_ms = float(parameters["slo_ms"])
        model, arguments = parameters["model"], json.loads(parameters["constructor"])
        engine = subnetact.Engine.load(
            here / "bundle",
            supernet=build_model(model, arguments, bundled=True) if model else None,
            device=f"cuda:{args['model_instance_device_id']}" if gpu else "cpu",
            memory_budget_mb=float(parameters["memory_budget_mb"]),
        )
        table = subnetact.LatencyTable.load(here / "table.json")
        engine.prepare(table.batch_sizes)
        learn = parameters["learn"] == "true"
        policy = make_policy(parameters["policy"], table, self.slo_ms)
        self.batcher = subnetact.Batcher(engine, policy=policy, table=table, slo_ms=self.slo_ms, learn=learn)
        # Triton sends these first, one request per sample; a refused one would end the server.
        warm_ups = config.get("model_warmup", [])
        self.warm_ups = sum(one["batch_size"] * (one.get("count") or 1) for one in warm_ups)
        self.labels = {"model": args["model_name"], "instance": args["model_instance_name"]}
        self.families: dict[str, Any] = {}
        self.metrics: dict[tuple[str, ...], tuple[Any, float]] = {}
        self.waiting: dict[Reply, list[Future[Any]]] = {}
        self.closed = threading.Event()
        self.attendant = threading.Thread(target=self._attend, name="subnetact-triton", daemon=True)
        self.attendant.start()

    def execute(self, requests: list[Any]) -> None:
        """Queue every request and return; a request is answered when all of its samples are."""
        for request in requests:
            reply = Reply(request.get_response_sender())
            try:
                samples = self.waiting[reply] = self._submit(request)
                reply.follow(samples)
            except Exception as error:
                reply.send(error=error)

    def _submit(self, request: Any) -> list[Future[Any]]:
        asked = json.loads(request.parameters() or "{}")
        unknown = [name for name in asked if name not in PARAMETERS and not name.startswith("triton_")]
        if unknown:
            raise InvalidRequest(
                f"parameter {unknown[0]!r} is not known; choose from {', '.join(PARAMETERS)}"
            )
        samples = torch.from_numpy(pb.get_input_tensor_by_name(request, "INPUT__0").as_numpy().copy())
        if not len(samples):
            raise InvalidRequest("INPUT__0: expected at least one sample")
        deadline_ms, timeout_ms = asked.get("deadline_ms", self.slo_ms), request.timeout() / 1e3
        if timeout_ms and isinstance(deadline_ms, int | float):
            deadline_ms = min(timeout_ms, asked.get("deadline_ms", timeout_ms))
        if self.warm_ups:
            self.warm_ups, deadline_ms = self.warm_ups - 1, 1e12
        terms = {"min_accuracy": asked.get("min_accuracy"), "priority": asked.get("importance")}
        queued: list[Future[Any]] = []
        try:
            for sample in samples:
                queued.append(self.batcher.submit(sample, deadline_ms, **terms))
        except Exception:
            for earlier in queued:
                earlier.cancel()
            raise
        return queued

    def _attend(self) -> None:
        """Withdraw what clients cancelled, and report the batcher's metrics to Triton."""
        tick, reporting = 0, True
        while not self.closed.wait(TICK_S):
            for reply, samples in list(self.waiting.items()):
                if reply.sent:
                    del self.waiting[reply]
                elif reply.ticks and reply.cancelled():  # Asking takes time, and most are answered by then.
                    for sample in samples:
                        sample.cancel()
                reply.ticks += 1
            tick += 1
            if reporting and tick % TICKS_PER_REPORT == 0:
                try:
                    self._report()
                except pb.TritonModelException as error:
                    reporting = False  # The server was started without metrics.
                    pb.Logger.log_warn(f"the batcher's metrics are not reported: {error}")

    def _report(self) -> None:
        for kind, metric, text, labels, samples in metrics_of(self.batcher, self.batcher.stats()):
            for values, *numbers in samples if kind in NUMBERS else ():
                names = dict(zip(labels, map(str, values), strict=True))
                for suffix, number in zip(NUMBERS[kind], numbers, strict=True):
                    self._set(f"subnetact_{metric}{suffix}", text, names, float(number), kind == "Gauge")

    def _set(self, name: str, text: str, labels: dict[str, str], number: float, gauge: bool) -> None:
        key = (name, *labels.values())
        if key not in self.metrics:
            if name not in self.families:
                kind = pb.MetricFamily.GAUGE if gauge else pb.MetricFamily.COUNTER
                self.families[name] = pb.MetricFamily(name=name, description=text, kind=kind)
            self.metrics[key] = self.families[name].Metric(labels=self.labels | labels), 0.0
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
        self.sent, self.ticks = False, 0
        self._sender, self._lock = sender, threading.Lock()

    def cancelled(self) -> bool:
        """Return whether the client gave up; a sender that has sent must not be asked."""
        with self._lock:
            return not self.sent and bool(self._sender.is_cancelled())

    def follow(self, samples: list[Future[Any]]) -> None:
        """Answer when all samples are."""
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
            except (Exception, CancelledError) as error:
                self.send(error=error)
            else:
                self.send(outputs)

        look()

    def send(self, outputs: list[Any] | None = None, error: Exception | None = None) -> None:
        """Send the outputs, or the error by its kind."""
        if error is None:
            response = pb.InferenceResponse(outputs)
        else:
            code = pb.TritonError.UNAVAILABLE if isinstance(error, RequestError) else pb.TritonError.INTERNAL
            if isinstance(error, InvalidRequest):
                code = pb.TritonError.INVALID_ARG
            if isinstance(error, CancelledError):
                code = pb.TritonError.CANCELLED
            response = pb.InferenceResponse(error=pb.TritonError(f"{type(error).__name__}: {error}", code))
        with self._lock:
            self.sent = True
            self._sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
