"""Inference over HTTP: `/infer`, and the Open Inference Protocol, version 2, of KServe and Triton.

Every row of the tensors of the protocol becomes a request of its own to the batcher.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import orjson
import torch
from pydantic import ConfigDict, Field
from starlette.responses import Response
from torch import Tensor

from subnetact.engine.inputs import DATATYPES
from subnetact.errors import InvalidRequest
from subnetact.serve.base_app import BaseApp, taking
from subnetact.serve.exchange import JSON, Raw, Strict, Terms, reply
from subnetact.serve.payloads import NUMPY_MAGIC, Signature, named_tensors, write_numpy
from subnetact.serving import Answer

FILE = {"type": "string", "format": "binary"}
NUMPY, BINARY = "application/x-npy", "application/octet-stream"
HEADER_LENGTH = "inference-header-content-length"
TORCH = {name: dtype for dtype, name in DATATYPES.items()} | {"UINT16": torch.uint16, "UINT32": torch.uint32}
"""What clients may send, by its name on the wire."""


class Model(NamedTuple):
    """A network as clients see it, of whose inputs one request may have up to `rows`."""

    name: str
    version: str
    signature: Signature
    outputs: Sequence[tuple[str, list[int], torch.dtype]]
    rows: int

    def metadata(self) -> dict[str, Any]:
        """Return what the protocol tells of the model."""
        inputs, outputs = (
            [{"name": name, "datatype": DATATYPES.get(t, "FP32"), "shape": [-1, *s]} for name, s, t in parts]
            for parts in (self.signature.parts, self.outputs)
        )
        facts = {"name": self.name, "versions": [self.version], "platform": "subnetact"}
        return {**facts, "inputs": inputs, "outputs": outputs}


class PlainTerms(Terms):
    """What a request of `/infer` asks for besides its input."""

    output: Literal["class", "values", "npy"] | None = Field(
        default=None,
        description="class, the index of the largest score; values, all outputs as JSON; or npy, the output "
        "as a NumPy file. If absent, class if the output is one vector, otherwise values",
    )


class PlainBody(PlainTerms):
    """The JSON of one request: its input, nested like the engine's or flat, beside the parameters."""

    input: Any


class _Parameters(Strict):
    model_config = ConfigDict(extra="ignore")  # clients and gateways put in what they like


class TensorParameters(_Parameters):
    """Where the values of an input are, and how an output is sent; classification is refused."""

    binary_data_size: int | None = Field(default=None, ge=0, description="bytes behind the JSON")
    binary_data: bool | None = None
    classification: Any = None


class NamedTensor(Strict):
    """One tensor by its name; among outputs, one that the client wants."""

    name: str
    parameters: TensorParameters | None = None


class RequestTensor(NamedTensor):
    """One tensor of a request, whose values are in `data` or behind the JSON."""

    shape: list[int]
    datatype: str = Field(pattern=f"^({'|'.join(TORCH)})$")
    data: Any = None


class RequestParameters(Terms, _Parameters):
    """What a request asks for besides its tensors."""

    binary_data_output: bool | None = None


class InferRequest(Strict):
    """The JSON of one request."""

    id: str | None = None
    model_name: str | None = None  # KServe's client repeats it in the body
    parameters: RequestParameters | None = None
    inputs: list[RequestTensor]
    outputs: list[NamedTensor] | None = None


def read_plain(model: Model, raw: Raw) -> tuple[PlainTerms, Any]:
    """Return what a body of `/infer` asks for, and its input."""
    if raw.startswith(NUMPY_MAGIC):
        return PlainTerms(), model.signature.from_numpy(raw)
    body = PlainBody.read(raw)
    return body, model.signature.from_values(body.input)


def plain_reply(kind: str | None, answer: Answer, facts: Mapping[str, Any]) -> Response:
    """Return the answer of `/infer` as the client wants it."""
    facts = {"subnet": answer.subnet, **facts}
    output, single = answer.output, isinstance(answer.output, Tensor)
    if kind is None:
        kind = "class" if single and output.dim() == 1 and output.is_floating_point() else "values"
    if kind != "values" and not (single and output.numel()):
        raise InvalidRequest(
            f"output: {kind} is of one tensor, and this network returns several; ask for values"
        )
    if kind == "npy":
        headers = {f"x-{name.replace('_', '-')}": orjson.dumps(one).decode() for name, one in facts.items()}
        return Response(write_numpy(output), 200, headers, NUMPY)
    if kind == "class":
        best, index = output.flatten().max(0)  # NaN, which is not comparable, counts as the largest
        return reply({"class": None if math.isnan(best) else int(index), **facts})
    lists = {name: tensor.tolist() for name, tensor in named_tensors(output, "output")}
    return reply({"output": lists["output"] if single else lists, **facts})


def plain_taken(app: BaseApp, model: Model) -> dict[str, Any]:
    """Describe what `/infer` takes."""
    single, body = model.signature.single, app.model_schema(PlainBody)
    named = {part.name: part.schema() for part in model.signature.parts}
    several = {"type": "object", "required": list(named), "properties": named}
    body["properties"]["input"] = named["input"] if single else several
    return taking({JSON: body, **({NUMPY: FILE} if single else {})}, Terms, PlainTerms)


def tensors_taken(app: BaseApp, model: Model) -> dict[str, Any]:
    """Describe what the inference of the protocol takes."""
    schema = app.model_schema(InferRequest)
    shapes = [f"{part.name} of shape {['N', *part.shape]}" for part in model.signature.parts]
    schema["properties"]["inputs"]["description"] = ", ".join(shapes)
    return taking({JSON: schema, BINARY: FILE}, Terms)


def read_tensors(
    model: Model, headers: Mapping[str, str], raw: Raw
) -> tuple[InferRequest, RequestParameters, list[Any]]:
    """Return a request of the protocol, what it asks for, and one input of the engine per row."""
    length = headers.get(HEADER_LENGTH, str(len(raw)))
    if not (length.isdecimal() and len(length) < 20 and int(length) <= len(raw)):
        raise InvalidRequest(f"{HEADER_LENGTH}: not the number of bytes of the JSON that begins the body")
    whole = memoryview(raw)
    request = InferRequest.read(whole[: int(length)])
    if request.model_name not in (None, model.name):
        raise InvalidRequest(f"model_name: not the model of this address, {model.name}")
    if any(one.parameters and one.parameters.classification for one in request.outputs or ()):
        raise InvalidRequest("outputs: the classification extension is not served; read the scores")
    rows = _rows(model, request.inputs, whole[int(length) :])
    return request, request.parameters or RequestParameters(), rows


def tensor_reply(
    model: Model, request: InferRequest, all_binary: bool, answers: Sequence[Answer], facts: Mapping[str, Any]
) -> Response:
    """Return the answer of the protocol, the raw bytes of outputs behind its JSON."""
    rows = [dict(named_tensors(one.output, "output")) for one in answers]
    wished = {one.name: getattr(one.parameters, "binary_data", None) for one in request.outputs or ()}
    outputs: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for name, as_bytes in (wished or dict.fromkeys(rows[0])).items():
        if name not in rows[0]:
            raise InvalidRequest(f"outputs: there is no {name[:60]!r}; the outputs are {', '.join(rows[0])}")
        tensor = torch.stack([row[name].detach().cpu() for row in rows])
        tensor = tensor if tensor.dtype in DATATYPES else tensor.float()
        shown = {"name": name, "datatype": DATATYPES[tensor.dtype], "shape": list(tensor.shape)}
        if all_binary if as_bytes is None else as_bytes:
            raw.append(tensor.flatten().view(torch.uint8).numpy().tobytes())
            shown["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            shown["data"] = tensor.flatten().tolist()
        outputs.append(shown)
    document: dict[str, Any] = {
        "model_name": model.name,
        "model_version": model.version,
        **({} if request.id is None else {"id": request.id}),
        "parameters": {"subnet": ",".join(str(one.subnet) for one in answers), **facts},
        "outputs": outputs,
    }
    if not raw:
        return reply(document)
    head = orjson.dumps(document)
    return Response(b"".join([head, *raw]), 200, {HEADER_LENGTH: str(len(head))}, BINARY)


def _rows(model: Model, inputs: Sequence[RequestTensor], raw: memoryview) -> list[Any]:
    """Return one input of the engine per row."""
    parts = {part.name: part for part in model.signature.parts}
    if sorted(entry.name for entry in inputs) != sorted(parts):
        raise InvalidRequest(f"inputs: give one tensor for each of {', '.join(parts)}")
    rows = inputs[0].shape[0] if inputs[0].shape else 0
    tensors: dict[str, Tensor] = {}
    for entry in inputs:
        part, dtype = parts[entry.name], TORCH[entry.datatype]
        if entry.shape != [rows, *part.shape] or not 1 <= rows <= model.rows:
            sizes = ", ".join(map(str, part.shape))
            raise InvalidRequest(
                f"{part.name}: shape must be [N, {sizes}], with one N from 1 to {model.rows} for all tensors"
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
    join = model.signature.join
    return [join({name: tensor[row] for name, tensor in tensors.items()}) for row in range(rows)]
