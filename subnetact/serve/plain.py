"""`POST /infer`: one input in, one answer out, as JSON, as a NumPy file or as an image."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from torch import Tensor

from subnetact.errors import InvalidRequest
from subnetact.serve.ask import Ask
from subnetact.serve.exchange import Exchange, Headers, Raw, read_json, send_reply, validated
from subnetact.serve.payloads import is_image, is_numpy, numpy_input, values_input, write_numpy
from subnetact.serve.service import Decoded, Service
from subnetact.serve.signature import named_tensors

__all__ = ["infer"]


class PlainBody(Ask):
    """The JSON of one request: its input, nested like the engine's or flat, beside the parameters."""

    input: Any


async def infer(service: Service, exchange: Exchange) -> None:
    """Answer one request."""
    ask, [answer] = await service.infer(exchange, partial(_decode, service))
    facts = {"subnet": answer.subnet, **service.facts([answer], ask, exchange)}
    await _reply(exchange.send, answer.output, ask.output, facts)


def _decode(service: Service, _: Headers, body: Raw) -> Decoded[Ask]:
    if is_numpy(body):
        ask, x = Ask(), numpy_input(body, service.signature)
    elif is_image(body):
        ask, x = Ask(), service.images.decode(body)
    else:
        ask = given = validated(PlainBody.model_validate, read_json(body))
        x = values_input(given.input, service.signature)
    return ask, [x], ask


async def _reply(send: Any, output: Any, kind: str | None, facts: dict[str, Any]) -> None:
    single = isinstance(output, Tensor)
    if kind is None:
        kind = "class" if single and output.dim() == 1 and output.is_floating_point() else "values"
    if kind != "values" and not (single and output.numel()):
        raise InvalidRequest(
            f"output: {kind} is of one tensor, and this network returns several; ask for values"
        )
    if kind == "npy":
        headers = [
            (f"x-{name.replace('_', '-')}".encode(), orjson.dumps(value)) for name, value in facts.items()
        ]
        return await send_reply(send, 200, write_numpy(output), headers, b"application/x-npy")
    if kind == "class":  # NaN is not comparable.
        found: dict[str, Any] = {"class": None if output.isnan().any() else int(output.argmax())}
    else:
        lists = {name: tensor.tolist() for name, tensor in named_tensors(output, "output")}
        found = {"output": lists["output"] if single else lists}
    return await send_reply(send, 200, {**found, **facts})
