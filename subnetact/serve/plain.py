"""`POST /infer`: one input in, one answer out, as JSON, as a NumPy file or as an image."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from subnetact.errors import InvalidRequest
from subnetact.serve.ask import NAMES, Ask, read_ask
from subnetact.serve.exchange import Exchange, Headers, Send, read_json, send_reply
from subnetact.serve.payloads import (
    is_image,
    is_numpy,
    numpy_input,
    tensor_json,
    values_input,
    write_numpy,
)
from subnetact.serve.service import Service, now_ms
from subnetact.serve.signature import named_tensors
from subnetact.serving.live.batcher import Answer

__all__ = ["PlainInference"]

FIELDS = {"input", *NAMES}
NPY = b"application/x-npy"


class PlainInference:
    """Answers `POST /infer`.

    Args:
        service: the service.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def infer(self, exchange: Exchange) -> None:
        """Answer one request.

        Args:
            exchange: the request.
        """
        service, headers = self._service, exchange.headers
        (_, ask), [answer] = await service.exchange(
            exchange.receive,
            headers,
            partial(self._decode, exchange.scope["query_string"], headers),
            lambda asked: service.answers(*asked, exchange.arrived_ms, exchange.client),
        )
        await self._reply(exchange.send, answer, ask, exchange.arrived_ms)

    def _decode(self, query: bytes, headers: Headers, body: bytes) -> tuple[list[Any], Ask]:
        service = self._service
        fields: Mapping[str, Any] = {}
        if is_numpy(body):
            x: Any = numpy_input(body, service.signature)
        elif is_image(body):
            x = service.images.decode(body)
        else:
            fields = _fields(read_json(body))
            x = values_input(fields["input"], service.signature)
        return [x], read_ask(fields, query, headers, service.slo_ms, service.limits.deadline_ms)

    async def _reply(self, send: Send, answer: Answer, ask: Ask, arrived_ms: float) -> None:
        latency_ms = now_ms() - arrived_ms
        output, kind = answer.output, ask.output
        single = isinstance(output, Tensor)
        if kind is None:
            kind = "class" if single and output.dim() == 1 and output.is_floating_point() else "values"
        met = "true" if latency_ms <= ask.deadline_ms else "false"
        facts = (
            f'"subnet":{answer.subnet},"accuracy":{answer.accuracy:.2f},'
            f'"latency_ms":{latency_ms:.3f},"met":{met}'
        )
        if kind == "npy":
            if not single:
                raise InvalidRequest(
                    "output: npy holds one tensor, and this network returns several; ask for values"
                )
            headers = [
                (b"x-subnet", b"%d" % answer.subnet),
                (b"x-accuracy", b"%.2f" % answer.accuracy),
                (b"x-latency-ms", b"%.3f" % latency_ms),
                (b"x-met", met.encode()),
            ]
            await send_reply(send, 200, write_numpy(output), headers, NPY)
            return
        if kind == "class":
            if not single or not output.numel():
                raise InvalidRequest("output: this network returns several tensors; ask for values")
            found = "null" if output.isnan().any() else int(output.argmax())  # NaN is not comparable.
            text = f'{{"class":{found},{facts}}}'
        else:
            text = f'{{"output":{_json(output)},{facts}}}'
        await send_reply(send, 200, text.encode())


def _fields(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or "input" not in value or not value.keys() <= FIELDS:
        raise InvalidRequest(
            f"body: give a JSON object with input, and no more than {', '.join(sorted(FIELDS))}; or a NumPy "
            "file or an image"
        )
    return value


def _json(output: Any) -> str:
    if isinstance(output, Tensor):
        return tensor_json(output)
    named = named_tensors(output, "output")
    return "{" + ",".join(f"{json.dumps(name)}:{tensor_json(tensor)}" for name, tensor in named) + "}"
