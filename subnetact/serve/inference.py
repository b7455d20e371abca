"""Inference over HTTP: `/infer`, and the Open Inference Protocol, version 2, of KServe and Triton.

Every row of the tensors of the protocol becomes a request of its own to the batcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import orjson
import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from subnetact.engine.inputs import DATATYPES
from subnetact.errors import InvalidRequest
from subnetact.serve.base_app import Exchange, operation, properties
from subnetact.serve.exchange import Raw, Strict, Terms, send_reply
from subnetact.serve.payloads import NUMPY_MAGIC, is_image, named_tensors, write_numpy

Asked = TypeVar("Asked")
Decoded = tuple[Asked, Sequence[Any], Terms]
"""What a request asks for, the inputs of the engine, and their time."""
HEADER_LENGTH = "inference-header-content-length"
TORCH = {name: dtype for dtype, name in DATATYPES.items()} | {"UINT16": torch.uint16, "UINT32": torch.uint32}
"""What clients may send, by its name on the wire."""


class Ask(Terms):
    """What a request of `/infer` asks for besides its input."""

    output: Literal["class", "values", "npy"] | None = Field(
        default=None,
        description="class, the index of the largest score; values, all outputs as JSON; or npy, the output "
        "as a NumPy file. If absent, class if the output is one vector, otherwise values",
    )


class PlainBody(Ask):
    """The JSON of one request: its input, nested like the engine's or flat, beside the parameters."""

    input: Any


class _Parameters(Strict):
    model_config = ConfigDict(extra="ignore")  # clients and gateways put in what they like


class TensorParameters(_Parameters):
    """Where the values of an input are, and how an output is sent; classification is refused."""

    binary_data_size: int | None = Field(default=None, ge=0, description="bytes behind the JSON")
    binary_data: bool | None = None
    classification: Any = None


class RequestTensor(Strict):
    """One tensor of a request, whose values are in `data` or behind the JSON."""

    name: str
    shape: list[int]
    datatype: str = Field(pattern=f"^({'|'.join(TORCH)})$")
    parameters: TensorParameters | None = None
    data: Any = None


class RequestedOutput(Strict):
    """One output that the client wants."""

    name: str
    parameters: TensorParameters | None = None


class RequestParameters(Terms, _Parameters):
    """What a request asks for besides its tensors."""

    binary_data_output: bool | None = None


class InferRequest(Strict):
    """The JSON of one request."""

    id: str | None = None
    model_name: str | None = None  # KServe's client repeats it in the body
    parameters: RequestParameters | None = None
    inputs: list[RequestTensor]
    outputs: list[RequestedOutput] | None = None


async def infer_plain(app: Any, exchange: Exchange) -> None:
    """Answer one request of `/infer`."""

    def decode(body: Raw) -> Decoded[Ask]:
        if body.startswith(NUMPY_MAGIC):
            ask, x = Ask(), app.signature.from_numpy(body)
        elif is_image(body):
            ask, x = Ask(), app.images.decode(body)
        else:
            ask = given = PlainBody.read(body)
            x = app.signature.from_values(given.input)
        return ask, [x], ask

    ask, [answer], facts = await app.infer(exchange, decode)
    facts = {"subnet": answer.subnet, **facts}
    output, kind, single = answer.output, ask.output, isinstance(answer.output, Tensor)
    if kind is None:
        kind = "class" if single and output.dim() == 1 and output.is_floating_point() else "values"
    if kind != "values" and not (single and output.numel()):
        raise InvalidRequest(
            f"output: {kind} is of one tensor, and this network returns several; ask for values"
        )
    if kind == "npy":
        headers = [(f"x-{name.replace('_', '-')}".encode(), orjson.dumps(one)) for name, one in facts.items()]
        return await send_reply(exchange.send, 200, write_numpy(output), headers, b"application/x-npy")
    if kind == "class":
        best, index = output.flatten().max(0)  # NaN, which is not comparable, counts as the largest
        found: dict[str, Any] = {"class": int(index) if best == best else None}
    else:
        lists = {name: tensor.tolist() for name, tensor in named_tensors(output, "output")}
        found = {"output": lists["output"] if single else lists}
    return await send_reply(exchange.send, 200, {**found, **facts})


def plain_document(app: Any) -> dict[str, Any]:
    """Describe `/infer`."""
    single, body = app.signature.single, app.model_schema(PlainBody)
    named = {part.name: part.schema() for part in app.signature.parts}
    several = {"type": "object", "required": list(named), "properties": named}
    body["properties"]["input"] = named["input"] if single else several
    kinds = ["application/x-npy"] * single + ["image/png", "image/jpeg"] * app.images.served
    files = {kind: {"type": "string", "format": "binary"} for kind in kinds}
    found = operation("Answer one input", {"application/json": body, **files}, Terms)
    asked = properties(Ask).items()
    found["parameters"] += [{"name": name, "in": "query", "schema": schema} for name, schema in asked]
    return found


def model_metadata(app: Any) -> dict[str, Any]:
    """Return the protocol's metadata of the model."""
    inputs, outputs = (
        [{"name": name, "datatype": DATATYPES.get(t, "FP32"), "shape": [-1, *s]} for name, s, t in parts]
        for parts in (app.signature.parts, app.outputs)
    )
    facts = {"name": app.name, "versions": [app.version], "platform": "subnetact"}
    return {**facts, "inputs": inputs, "outputs": outputs}


def tensor_document(app: Any) -> dict[str, Any]:
    """Describe the inference of the protocol."""
    schema = app.model_schema(InferRequest)
    shapes = [f"{part.name} of shape {['N', *part.shape]}" for part in app.signature.parts]
    schema["properties"]["inputs"]["description"] = ", ".join(shapes)
    return operation("Answer tensors (Open Inference Protocol)", {"application/json": schema}, Terms)


async def infer_tensors(app: Any, exchange: Exchange) -> None:
    """Answer one request of the protocol, row by row."""

    def decode(body: Raw) -> Decoded[tuple[InferRequest, RequestParameters]]:
        length = exchange.headers.get(HEADER_LENGTH, str(len(body)))
        if not (length.isdecimal() and len(length) < 20 and int(length) <= len(body)):
            raise InvalidRequest(f"{HEADER_LENGTH}: not the number of bytes of the JSON that begins the body")
        text, raw = body[: int(length)], body[int(length) :]
        request = InferRequest.read(text)
        if request.model_name not in (None, app.name):
            raise InvalidRequest(f"model_name: not the model of this address, {app.name}")
        if any(one.parameters and one.parameters.classification for one in request.outputs or ()):
            raise InvalidRequest("outputs: the classification extension is not served; read the scores")
        ask = request.parameters or RequestParameters()
        return (request, ask), _rows(app, request.inputs, raw), ask

    (request, ask), answers, facts = await app.infer(exchange, decode)
    outputs, raw = _outputs(request, bool(ask.binary_data_output), [one.output for one in answers])
    document = {
        "model_name": app.name,
        "model_version": app.version,
        **({} if request.id is None else {"id": request.id}),
        "parameters": {"subnet": ",".join(str(one.subnet) for one in answers), **facts},
        "outputs": outputs,
    }
    head = orjson.dumps(document)
    if not raw:
        return await send_reply(exchange.send, 200, head)
    headers = [(HEADER_LENGTH.encode(), b"%d" % len(head))]
    return await send_reply(exchange.send, 200, b"".join([head, *raw]), headers, b"application/octet-stream")


def _rows(app: Any, inputs: Sequence[RequestTensor], raw: Raw) -> list[Any]:
    """Return one input of the engine per row."""
    parts = {part.name: part for part in app.signature.parts}
    if sorted(entry.name for entry in inputs) != sorted(parts):
        raise InvalidRequest(f"inputs: give one tensor for each of {', '.join(parts)}")
    most = min(app.limits.rows, getattr(app.batcher, "max_queue", app.limits.rows))  # more could never wait
    rows = inputs[0].shape[0] if inputs[0].shape else 0
    tensors: dict[str, Tensor] = {}
    for entry in inputs:
        part, dtype = parts[entry.name], TORCH[entry.datatype]
        if entry.shape != [rows, *part.shape] or not 1 <= rows <= most:
            sizes = ", ".join(map(str, part.shape))
            raise InvalidRequest(
                f"{part.name}: shape must be [N, {sizes}], with one N from 1 to {most} for all tensors"
            )
        size = entry.parameters.binary_data_size if entry.parameters else None
        if (size is None) == (entry.data is None):
            raise InvalidRequest(f"{part.name}: give either data or binary_data_size, not both")
        if size is None:
            tensors[part.name] = part.tensor(entry.data, (rows, *part.shape), dtype)
            continue
        needed = rows * part.size * dtype.itemsize
        if not size == needed <= len(raw):
            raise InvalidRequest(f"{part.name}: send {needed} raw bytes of {entry.datatype}, little-endian")
        values = torch.frombuffer(bytearray(raw[:size]), dtype=dtype) if size else torch.empty(0, dtype=dtype)
        tensors[part.name] = part.fit(values.reshape(rows, *part.shape))
        raw = raw[size:]
    if len(raw):
        raise InvalidRequest(f"body: {len(raw)} bytes more than the tensors have; correct binary_data_size")
    join = app.signature.join
    return [join({name: tensor[row] for name, tensor in tensors.items()}) for row in range(rows)]


def _outputs(
    request: InferRequest, all_binary: bool, answers: Sequence[Any]
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return the outputs that the client wants, and the raw bytes of those that it wants as such."""
    rows = [dict(named_tensors(one, "output")) for one in answers]
    binary = dict.fromkeys(rows[0], all_binary)
    if request.outputs:
        wished = {one.name: getattr(one.parameters, "binary_data", None) for one in request.outputs}
        binary = {name: all_binary if wish is None else wish for name, wish in wished.items()}
    outputs: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for name, as_bytes in binary.items():
        if name not in rows[0]:
            raise InvalidRequest(f"outputs: there is no {name[:60]!r}; the outputs are {', '.join(rows[0])}")
        tensor = torch.stack([row[name].detach().cpu() for row in rows])
        tensor = tensor if tensor.dtype in DATATYPES else tensor.float()
        shown = {"name": name, "datatype": DATATYPES[tensor.dtype], "shape": list(tensor.shape)}
        if as_bytes:
            raw.append(tensor.flatten().view(torch.uint8).numpy().tobytes())
            shown["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            shown["data"] = tensor.flatten().tolist()
        outputs.append(shown)
    return outputs, raw
