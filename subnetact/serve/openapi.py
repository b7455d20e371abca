"""The inferences in the OpenAPI document; FastAPI describes the other addresses itself."""

from __future__ import annotations

import math
from typing import Any

from subnetact.serve.ask import OUTPUTS
from subnetact.serve.inference_protocol import NUMPY
from subnetact.serve.service import Service

__all__ = ["paths"]

MOST_LISTED = 4096
"""Inputs of more values have no length in the document, so that programs that make examples stay quick."""
BINARY = {"schema": {"type": "string", "format": "binary"}}
ERRORS = {
    "400": "The request is malformed.",
    "401": "The token is missing or unknown.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is compressed, or an image that this server cannot decode.",
    "429": "The queue is full; retry after the time in Retry-After.",
    "503": "The server is closing or overloaded.",
    "504": "The deadline passed.",
}


def paths(service: Service) -> dict[str, Any]:
    """Return the addresses of the inferences.

    Args:
        service: the service.
    """
    asked = _parameters(service)
    parts = service.signature.parts
    values = _values(parts[0].shape)
    if not service.signature.single():
        values = {
            "type": "object",
            "required": [part.name for part in parts],
            "properties": {part.name: _values(part.shape) for part in parts},
            "additionalProperties": False,
        }
    body = {
        "type": "object",
        "required": ["input"],
        "additionalProperties": False,
        "properties": {"input": values, **{p["name"]: p["schema"] for p in asked if p["in"] == "query"}},
    }
    contents: dict[str, Any] = {"application/json": {"schema": body}}
    if service.signature.single():
        contents["application/x-npy"] = BINARY
    if service.images.served:
        contents |= {"image/png": BINARY, "image/jpeg": BINARY}
    plain = _operation("Answer one input", asked, contents, {"type": "object"})
    protocol = _operation(
        "Answer tensors (Open Inference Protocol)",
        asked,
        {"application/json": {"schema": _tensors(service)}},
        {"type": "object"},
    )
    return {"/infer": {"post": plain}, f"/v2/models/{service.name}/infer": {"post": protocol}}


def _operation(
    summary: str, parameters: list[dict[str, Any]], contents: dict[str, Any], answer: dict[str, Any]
) -> dict[str, Any]:
    responses: dict[str, Any] = {
        status: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
        for status, text in ERRORS.items()
    }
    responses["200"] = {
        "description": "The answer.",
        "content": {
            "application/json": {"schema": answer},
            "application/x-npy": BINARY,
            "application/octet-stream": BINARY,
        },
    }
    return {
        "summary": summary,
        "parameters": parameters,
        "requestBody": {"required": True, "content": contents},
        "responses": responses,
    }


def _parameters(service: Service) -> list[dict[str, Any]]:
    longest = service.limits.deadline_ms
    schemas: dict[str, dict[str, Any]] = {
        "deadline_ms": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": longest,
            "description": f"time from the arrival to the answer, in ms; {service.slo_ms:g} if absent",
        },
        "min_accuracy": {
            "type": "number",
            "minimum": 0,
            "maximum": 100,
            "description": "minimum accuracy of the answering subnet, percent",
        },
        "priority": {
            "type": "integer",
            "minimum": -(2**31) + 1,
            "maximum": 2**31 - 1,
            "description": "requests of lower priority expire first",
        },
        "output": {"type": "string", "enum": list(OUTPUTS), "description": "what of the output to return"},
    }
    query = [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]
    headers = [
        {"name": f"x-{name.replace('_', '-')}", "in": "header", "schema": schemas[name]}
        for name in ("deadline_ms", "min_accuracy", "priority")
    ]
    return query + headers


def _values(shape: tuple[int, ...]) -> dict[str, Any]:
    """Describe numbers of a shape: nested, or all in a row."""
    number: dict[str, Any] = {"type": "number", "minimum": -1e6, "maximum": 1e6}
    if not shape:
        return number
    count = math.prod(shape)
    flat: dict[str, Any] = {"type": "array", "items": number}
    if count <= MOST_LISTED:
        flat |= {"minItems": count, "maxItems": count}
    nested = number
    for size in reversed(shape):
        nested = {"type": "array", "items": nested, "minItems": size, "maxItems": size}
    return {"description": "nested like the input, or all values in a row", "anyOf": [flat, nested]}


def _tensors(service: Service) -> dict[str, Any]:
    """Describe a request with one row."""
    parameters = {"type": "object"}
    tensors = [
        {
            "type": "object",
            "required": ["name", "shape", "datatype"],
            "properties": {
                "name": {"const": part.name},
                "shape": {
                    "type": "array",
                    "prefixItems": [{"type": "integer", "minimum": 1}, *({"const": n} for n in part.shape)],
                    "minItems": 1 + len(part.shape),
                    "maxItems": 1 + len(part.shape),
                },
                "datatype": {"enum": list(NUMPY)},
                "parameters": parameters,
                "data": _values((1, *part.shape)),
            },
        }
        for part in service.signature.parts
    ]
    output = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    return {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {
            "id": {"type": "string"},
            "model_name": {"const": service.name},
            "parameters": parameters,
            "inputs": {
                "type": "array",
                "prefixItems": tensors,
                "minItems": len(tensors),
                "maxItems": len(tensors),
            },
            "outputs": {"type": "array", "items": output},
        },
    }
