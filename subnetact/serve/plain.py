"""`POST /infer`: one input in, one answer out, as JSON, as a NumPy file or as an image."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from torch import Tensor

from subnetact.errors import InvalidRequest
from subnetact.serve.ask import Ask, read_ask
from subnetact.serve.exchange import Exchange, Headers, Send, read_json, send_reply, validated
from subnetact.serve.payloads import is_image, is_numpy, numpy_input, values_input, write_numpy
from subnetact.serve.service import Service, now_ms
from subnetact.serve.signature import named_tensors
from subnetact.serving import Answer

__all__ = ["PlainInference"]

NPY = b"application/x-npy"


class PlainBody(Ask):
    """The JSON of one request: its input, nested like the engine's or flat, beside the parameters."""

    input: Any


class PlainInference:
    """Answers `POST /infer` of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def infer(self, exchange: Exchange) -> None:
        """Answer one request."""
        service, query = self._service, exchange.scope["query_string"]
        (_, ask), [answer] = await service.exchange(
            exchange,
            partial(self._decode, query, exchange.headers),
            lambda asked: service.answers(*asked, exchange.arrived_ms, exchange.client),
        )
        await self._reply(exchange.send, answer, ask, exchange.arrived_ms)

    def _decode(self, query: bytes, headers: Headers, body: bytes) -> tuple[list[Any], Ask]:
        service = self._service
        ask = Ask()
        if is_numpy(body):
            x: Any = numpy_input(body, service.signature)
        elif is_image(body):
            x = service.images.decode(body)
        else:
            ask = given = validated(PlainBody.model_validate, read_json(body))
            x = values_input(given.input, service.signature)
        return [x], read_ask(ask, query, headers, service.slo_ms, service.limits.deadline_ms)

    async def _reply(self, send: Send, answer: Answer, ask: Ask, arrived_ms: float) -> None:
        latency_ms = now_ms() - arrived_ms
        output, kind = answer.output, ask.output
        single = isinstance(output, Tensor)
        if kind is None:
            kind = "class" if single and output.dim() == 1 and output.is_floating_point() else "values"
        if kind != "values" and not (single and output.numel()):
            raise InvalidRequest(
                f"output: {kind} is of one tensor, and this network returns several; ask for values"
            )
        facts = {
            "subnet": answer.subnet,
            "accuracy": round(answer.accuracy, 2),
            "latency_ms": round(latency_ms, 3),
            "met": latency_ms <= (ask.deadline_ms or 0.0),
        }
        if kind == "npy":
            headers = [
                (f"x-{name.replace('_', '-')}".encode(), orjson.dumps(value)) for name, value in facts.items()
            ]
            return await send_reply(send, 200, write_numpy(output), headers, NPY)
        if kind == "class":  # NaN is not comparable.
            found: dict[str, Any] = {"class": None if output.isnan().any() else int(output.argmax())}
        else:
            lists = {name: tensor.tolist() for name, tensor in named_tensors(output, "output")}
            found = {"output": lists["output"] if single else lists}
        return await send_reply(send, 200, {**found, **facts})
