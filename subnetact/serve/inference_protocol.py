"""The Open Inference Protocol, version 2: what KServe's and Triton's HTTP clients speak.

A request holds tensors with a batch dimension; every row becomes a request of its own to the batcher, which
forms its batches from the rows of all clients. `parameters` may hold `deadline_ms`, `min_accuracy` and
`priority`. The answer's parameters are the subnet and the least accuracy of the rows, with the latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from subnetact.errors import InvalidRequest
from subnetact.serve.ask import Strict, Terms
from subnetact.serve.exchange import Exchange, Headers, Raw, read_json, send_reply, validated
from subnetact.serve.payloads import fitted, tensor_of
from subnetact.serve.service import Decoded, Service
from subnetact.serve.signature import DATATYPES, InputPart, named_tensors
from subnetact.serving import Answer

__all__ = ["InferRequest", "InferenceProtocol"]

HEADER_LENGTH = b"inference-header-content-length"
TORCH = {name: dtype for dtype, name in DATATYPES.items()} | {"UINT16": torch.uint16, "UINT32": torch.uint32}
"""What clients may send, by its name on the wire."""


class _Parameters(Strict):
    model_config = ConfigDict(extra="ignore")  # clients and gateways put in what they like


class TensorParameters(_Parameters):
    """Where the values of a tensor are."""

    binary_data_size: int | None = Field(default=None, ge=0, description="bytes behind the JSON")


class RequestTensor(Strict):
    """One tensor of a request, whose values are in `data` or behind the JSON."""

    name: str
    shape: list[int]
    datatype: str = Field(pattern=f"^({'|'.join(TORCH)})$")
    parameters: TensorParameters | None = None
    data: Any = None


class OutputParameters(_Parameters):
    """How an output is sent; classification is an extension that is refused."""

    binary_data: bool | None = None
    classification: Any = None


class RequestedOutput(Strict):
    """One output that the client wants."""

    name: str
    parameters: OutputParameters | None = None


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


class InferenceProtocol:
    """Answers the addresses below `/v2` of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def model(self) -> dict[str, Any]:
        """Return the metadata of the model."""
        return {
            "name": self._service.name,
            "versions": [self._service.version],
            "platform": "subnetact",
            "inputs": [
                {"name": part.name, "datatype": DATATYPES[part.dtype], "shape": [-1, *part.shape]}
                for part in self._service.signature.parts
            ],
            "outputs": [
                {"name": name, "datatype": DATATYPES.get(dtype, "FP32"), "shape": [-1, *shape]}
                for name, shape, dtype in self._service.outputs
            ],
        }

    async def infer(self, exchange: Exchange) -> None:
        """Answer one request, row by row."""
        (request, ask), answers = await self._service.infer(exchange, self._decode)
        head, raw = self._reply(request, ask, answers, self._service.facts(answers, ask, exchange))
        if not raw:
            await send_reply(exchange.send, 200, head)
            return
        lengths = [(HEADER_LENGTH, b"%d" % len(head))]
        await send_reply(exchange.send, 200, b"".join([head, *raw]), lengths, b"application/octet-stream")

    def _decode(self, headers: Headers, body: Raw) -> Decoded[tuple[InferRequest, RequestParameters]]:
        service = self._service
        text, raw = _split(body, headers.get(HEADER_LENGTH))
        request = validated(InferRequest.model_validate, read_json(text))
        if request.model_name not in (None, service.name):
            raise InvalidRequest(f"model_name: not the model of this address, {service.name}")
        if any(one.parameters and one.parameters.classification for one in request.outputs or ()):
            raise InvalidRequest("outputs: the classification extension is not served; read the scores")
        ask = request.parameters or RequestParameters()
        return (request, ask), self._rows(request.inputs, raw), ask

    def _rows(self, inputs: Sequence[RequestTensor], raw: Raw) -> list[Any]:
        """Return one input of the engine per row."""
        parts = {part.name: part for part in self._service.signature.parts}
        if sorted(entry.name for entry in inputs) != sorted(parts):
            raise InvalidRequest(f"inputs: give one tensor for each of {', '.join(parts)}")
        most, rows = self._service.limits.rows, inputs[0].shape[0] if inputs[0].shape else 0
        tensors: dict[str, Tensor] = {}
        for entry in inputs:
            part = parts[entry.name]
            if entry.shape != [rows, *part.shape] or not 1 <= rows <= most:
                sizes = ", ".join(map(str, part.shape))
                raise InvalidRequest(
                    f"{part.name}: shape must be [N, {sizes}], with one N from 1 to {most} for all tensors"
                )
            size = entry.parameters.binary_data_size if entry.parameters else None
            if (size is None) == (entry.data is None) or (size or 0) > len(raw):
                raise InvalidRequest(
                    f"{part.name}: give either data or binary_data_size and that many raw bytes, not both"
                )
            if size is None:
                shape, declared = (rows, *part.shape), TORCH[entry.datatype]
                tensors[part.name] = tensor_of(entry.data, part, shape, declared)
            else:
                tensors[part.name] = _raw_tensor(raw[:size], entry.datatype, part, rows)
                raw = raw[size:]
        if len(raw):
            raise InvalidRequest(
                f"body: {len(raw)} bytes more than the tensors have; correct binary_data_size"
            )
        join = self._service.signature.join
        return [join({name: tensor[row] for name, tensor in tensors.items()}) for row in range(rows)]

    def _reply(
        self, request: InferRequest, ask: RequestParameters, answers: Sequence[Answer], facts: dict[str, Any]
    ) -> tuple[bytes, list[bytes]]:
        """Return the JSON and the raw tensors of the answer."""
        rows = [dict(named_tensors(one.output, "output")) for one in answers]
        all_binary = bool(ask.binary_data_output)
        binary = dict.fromkeys(rows[0], all_binary)
        if request.outputs:
            wished = {one.name: getattr(one.parameters, "binary_data", None) for one in request.outputs}
            binary = {name: all_binary if wish is None else wish for name, wish in wished.items()}
        outputs: list[dict[str, Any]] = []
        raw: list[bytes] = []
        for name, as_bytes in binary.items():
            if name not in rows[0]:
                raise InvalidRequest(
                    f"outputs: there is no {name[:60]!r}; the outputs are {', '.join(rows[0])}"
                )
            tensor = torch.stack([row[name].detach().cpu() for row in rows])
            datatype = DATATYPES.get(tensor.dtype, "FP32")
            found: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(tensor.shape)}
            if as_bytes:
                known = tensor if tensor.dtype in DATATYPES else tensor.float()
                raw.append(known.flatten().view(torch.uint8).numpy().tobytes())
                found["parameters"] = {"binary_data_size": len(raw[-1])}
            else:
                found["data"] = tensor.flatten().tolist()
            outputs.append(found)
        document: dict[str, Any] = {
            "model_name": self._service.name,
            "model_version": self._service.version,
            **({} if request.id is None else {"id": request.id}),
            "parameters": {"subnet": ",".join(str(one.subnet) for one in answers), **facts},
            "outputs": outputs,
        }
        return orjson.dumps(document), raw


def _split(body: Raw, length: str | None) -> tuple[Raw, Raw]:
    """Return the JSON and the raw tensors of a body."""
    if length is None:
        return body, b""
    if not (length.isdecimal() and len(length) < 20 and int(length) <= len(body)):
        raise InvalidRequest(
            f"{HEADER_LENGTH.decode()}: not the number of bytes of the JSON at the start of the body"
        )
    return body[: int(length)], body[int(length) :]


def _raw_tensor(raw: Raw, datatype: str, part: InputPart, rows: int) -> Tensor:
    """Return raw numbers, which are of this machine's byte order: little-endian ones first."""
    dtype, count = TORCH[datatype], rows * part.size
    if len(raw) != count * dtype.itemsize:
        needed = count * dtype.itemsize
        raise InvalidRequest(f"{part.name}: {len(raw)} bytes of {datatype}; send {needed}")
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    return fitted(tensor.reshape(rows, *part.shape), part)
