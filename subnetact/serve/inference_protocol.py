"""The Open Inference Protocol, version 2: what KServe's and Triton's HTTP clients speak.

A request holds tensors with a batch dimension; every row becomes a request of its own to the batcher, which
forms its batches from the rows of all clients. `parameters` may hold `deadline_ms`, `min_accuracy` and
`priority`. The answer's parameters are the subnet and the least accuracy of the rows, with the latency.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subnetact.errors import InvalidRequest
from subnetact.serve.ask import Ask, read_ask
from subnetact.serve.exchange import Exchange, Headers, read_json, send_reply
from subnetact.serve.payloads import array_tensor, tensor_json, tensor_of
from subnetact.serve.service import Service, now_ms
from subnetact.serve.signature import DATATYPES, InputPart, Signature, named_tensors
from subnetact.serving.live.batcher import Answer

__all__ = ["InferenceProtocol"]

HEADER_LENGTH = "inference-header-content-length"
NUMPY = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "BF16": "<i2",
    "FP32": "<f4",
    "FP64": "<f8",
}
"""The dtype of raw tensors by datatype; bfloat16 travels as the bits of 16-bit numbers."""
NUMPY_VALUES = {"BF16": "<f4"}
"""The dtype of the same numbers in JSON, where it is another one."""
REQUEST_FIELDS = {"id", "parameters", "inputs", "outputs", "model_name"}
"""KServe's client repeats the name of the model in the body."""


class InferenceProtocol:
    """Answers the addresses below `/v2`.

    Args:
        service: the service.
        library_version: the version to show as that of the server.
    """

    def __init__(self, service: Service, library_version: str) -> None:
        self._service = service
        self._library_version = library_version

    def server(self) -> dict[str, Any]:
        """Return the metadata of the server."""
        return {
            "name": "subnetact",
            "version": self._library_version,
            "extensions": ["binary_tensor_data"],
        }

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
        """Answer one request, as `PlainInference.infer` does.

        Args:
            exchange: the request.
        """
        service, headers = self._service, exchange.headers
        request, answers = await service.exchange(
            exchange.receive,
            headers,
            partial(self._decode, exchange.scope["query_string"], headers),
            lambda request: service.answers(
                request.inputs(service.signature), request.ask, exchange.arrived_ms, exchange.client
            ),
        )
        head, raw = request.reply(service, answers, now_ms() - exchange.arrived_ms)
        if not raw:
            await send_reply(exchange.send, 200, head)
            return
        lengths = [(HEADER_LENGTH.encode(), b"%d" % len(head))]
        await send_reply(exchange.send, 200, b"".join([head, *raw]), lengths, b"application/octet-stream")

    def _decode(self, query: bytes, headers: Headers, body: bytes) -> _Request:
        service = self._service
        text, raw = _split(body, headers.get(HEADER_LENGTH.encode()))
        value = read_json(text)
        if not isinstance(value, dict) or "inputs" not in value or not value.keys() <= REQUEST_FIELDS:
            raise InvalidRequest(
                "body: give a JSON object with inputs, and no more than id, model_name, outputs, parameters"
            )
        if value.get("model_name", service.name) != service.name:
            raise InvalidRequest(f"model_name: not the model of this address, {service.name}")
        parameters = _parameters(value, "request")
        fields = {k: v for k, v in parameters.items() if k in ("deadline_ms", "min_accuracy", "priority")}
        ask = read_ask(fields, query, headers, service.slo_ms, service.limits.deadline_ms)
        tensors, rows = self._tensors(value["inputs"], raw)
        return _Request(value, parameters, tensors, rows, ask)

    def _tensors(self, inputs: Any, raw: memoryview) -> tuple[dict[str, Tensor], int]:
        """Return the tensors by name, each of shape (rows, ...), and the number of rows."""
        parts = {part.name: part for part in self._service.signature.parts}
        entries = inputs if _is_list(inputs) and all(isinstance(entry, dict) for entry in inputs) else []
        names = [entry.get("name") for entry in entries]
        if not all(isinstance(name, str) for name in names) or sorted(names) != sorted(parts):
            raise InvalidRequest(f"inputs: give one tensor for each of {', '.join(parts)}")
        tensors: dict[str, Tensor] = {}
        rows = 0
        for entry in inputs:
            part = parts[entry["name"]]
            count = self._rows(entry, part)
            if tensors and count != rows:
                raise InvalidRequest(f"inputs: {part.name} has {count} rows, the first tensor {rows}")
            rows = count
            size = _parameters(entry, part.name).get("binary_data_size")
            if size is None:
                if "data" not in entry:
                    raise InvalidRequest(
                        f"{part.name}: no data; give data, or binary_data_size and raw bytes"
                    )
                dtype = NUMPY_VALUES.get(entry["datatype"], NUMPY[entry["datatype"]])
                tensors[part.name] = tensor_of(entry["data"], part, (rows, *part.shape), np.dtype(dtype))
            else:
                if "data" in entry:
                    raise InvalidRequest(f"{part.name}: both data and raw bytes; send one of them")
                if type(size) is not int or not 0 <= size <= len(raw):
                    raise InvalidRequest(
                        f"{part.name}: binary_data_size is more than the bytes that were sent"
                    )
                tensors[part.name] = _raw_tensor(raw[:size], entry["datatype"], part, rows)
                raw = raw[size:]
        if len(raw):
            raise InvalidRequest(
                f"body: {len(raw)} bytes more than the tensors have; correct binary_data_size"
            )
        return tensors, rows

    def _rows(self, entry: Mapping[str, Any], part: InputPart) -> int:
        shape: Any = entry.get("shape")
        served = DATATYPES[part.dtype]
        if not _is_list(shape) or not all(type(n) is int for n in shape) or tuple(shape[1:]) != part.shape:
            raise InvalidRequest(f"{part.name}: shape must be [N, {', '.join(map(str, part.shape))}], N >= 1")
        rows, most = int(shape[0]), self._service.limits.rows
        if not 1 <= rows <= most:
            raise InvalidRequest(
                f"{part.name}: the first dimension must be from 1 to {most}; send several requests"
            )
        datatype = entry.get("datatype")
        if not isinstance(datatype, str) or datatype not in NUMPY:
            raise InvalidRequest(
                f"{part.name}: datatype must be one of {', '.join(NUMPY)}; served is {served}"
            )
        return rows


class _Request:
    """One request: its rows, and what its answer has to look like."""

    def __init__(
        self,
        value: Mapping[str, Any],
        parameters: Mapping[str, Any],
        tensors: dict[str, Tensor],
        rows: int,
        ask: Ask,
    ) -> None:
        self._tensors = tensors
        self._rows = rows
        self.ask = ask
        self.id = value.get("id")
        if self.id is not None and not isinstance(self.id, str):
            raise InvalidRequest("id: give a text")
        binary = _flag(parameters, "binary_data_output", False)
        self._binary: dict[str, bool] | None = None
        self._all_binary = binary
        outputs = value.get("outputs")
        if outputs is not None:
            if not _is_list(outputs) or not all(isinstance(entry, dict) for entry in outputs):
                raise InvalidRequest("outputs: give a list of objects with a name each")
            self._binary = {}  # and if it stays so, all outputs are sent
            for entry in outputs:
                options = _parameters(entry, "outputs")
                if options.get("classification"):
                    raise InvalidRequest(
                        "outputs: the classification extension is not served; read the scores"
                    )
                self._binary[str(entry.get("name"))] = _flag(options, "binary_data", binary)

    def inputs(self, signature: Signature) -> list[Any]:
        """Return one input of the engine per row."""
        return [
            signature.join({name: tensor[row] for name, tensor in self._tensors.items()})
            for row in range(self._rows)
        ]

    def reply(
        self, service: Service, answers: Sequence[Answer], latency_ms: float
    ) -> tuple[bytes, list[bytes]]:
        """Return the JSON and the raw tensors of the answer."""
        rows = [dict(named_tensors(answer.output, "output")) for answer in answers]
        binary = self._binary or dict.fromkeys(rows[0], self._all_binary)
        unknown = sorted(set(binary) - set(rows[0]))
        if unknown:
            raise InvalidRequest(
                f"outputs: there is no {unknown[0][:60]!r}; the outputs are {', '.join(rows[0])}"
            )
        outputs: list[str] = []
        raw: list[bytes] = []
        for name, as_bytes in binary.items():
            tensor = torch.stack([row[name].detach().cpu() for row in rows])
            facts = (
                f'"name":{json.dumps(name)},"datatype":"{DATATYPES.get(tensor.dtype, "FP32")}",'
                f'"shape":{list(tensor.shape)}'
            )
            if as_bytes:
                raw.append(_raw_bytes(tensor))
                outputs.append(f'{{{facts},"parameters":{{"binary_data_size":{len(raw[-1])}}}}}')
            else:
                outputs.append(f'{{{facts},"data":{tensor_json(tensor.flatten())}}}')
        parameters = {
            "subnet": ",".join(str(answer.subnet) for answer in answers),
            "accuracy": round(min(answer.accuracy for answer in answers), 2),
            "latency_ms": round(latency_ms, 3),
            "met": latency_ms <= self.ask.deadline_ms,
        }
        head: dict[str, Any] = {"model_name": service.name, "model_version": service.version}
        if self.id is not None:
            head["id"] = self.id
        text = json.dumps({**head, "parameters": parameters})[:-1]
        return f'{text}, "outputs": [{", ".join(outputs)}]}}'.encode(), raw


def _split(body: bytes, length: str | None) -> tuple[bytes, memoryview]:
    """Return the JSON and the raw tensors of a body."""
    if length is None:
        return body, memoryview(b"")
    if not (length.isdecimal() and len(length) < 20 and int(length) <= len(body)):
        raise InvalidRequest(f"{HEADER_LENGTH}: not the number of bytes of the JSON at the start of the body")
    return body[: int(length)], memoryview(body)[int(length) :]


def _parameters(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = entry.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidRequest(f"{name}: parameters must be an object")
    return found


def _flag(parameters: Mapping[str, Any], name: str, usual: bool) -> bool:
    found = parameters.get(name)
    if found is not None and not isinstance(found, bool):
        raise InvalidRequest(f"{name}: give true or false")
    return usual if found is None else found


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _raw_tensor(raw: memoryview, datatype: str, part: InputPart, rows: int) -> Tensor:
    dtype = np.dtype(NUMPY[datatype])
    if len(raw) != rows * part.size * dtype.itemsize:
        raise InvalidRequest(
            f"{part.name}: {len(raw)} bytes for {rows * part.size} values of {datatype}; send "
            f"{rows * part.size * dtype.itemsize}"
        )
    array = np.frombuffer(raw, dtype).reshape(rows, *part.shape)
    if datatype == "BF16":
        bits = torch.from_numpy(array.astype(np.int16)).view(torch.bfloat16)
        if not part.dtype.is_floating_point:
            raise InvalidRequest(f"{part.name}: got BF16, this engine serves {part.dtype}")
        return bits.to(part.dtype)
    return array_tensor(array, part)


def _raw_bytes(tensor: Tensor) -> bytes:
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    elif tensor.dtype not in DATATYPES:
        tensor = tensor.float()
    array = tensor.numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
