"""The OpenAPI document: the operations of the addresses, with the pydantic models of their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from subnetact.serve.ask import Ask, Terms
from subnetact.serve.inference_protocol import InferRequest
from subnetact.serve.service import Service
from subnetact.serve.signature import InputPart

__all__ = ["UNREADY", "inference", "model_schema", "operation", "tensors"]

MOST_LISTED = 4096
"""Inputs of more values have no length in the document, so that programs that make examples stay quick."""
BINARY = {"schema": {"type": "string", "format": "binary"}}
UNREADY = {"503": "The server is closing, or it computes nothing."}
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


def operation(
    summary: str,
    contents: Mapping[str, Any] | None = None,
    terms: type[BaseModel] | None = None,
    responses: Mapping[str, str] = ERRORS,
) -> dict[str, Any]:
    """Describe an address: the types of its body, the model of its headers, and what statuses mean."""
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {
            status: {"description": text} for status, text in {"200": "The answer.", **responses}.items()
        },
    }
    if contents:
        found["requestBody"] = {"required": True, "content": dict(contents)}
    if terms:
        found["parameters"] = [
            {"name": f"x-{name.replace('_', '-')}", "in": "header", "schema": schema}
            for name, schema in _properties(terms).items()
        ]
    return found


def model_schema(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a model, and put those that it refers to among the document's own."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs", {})
    return schema


def inference(service: Service) -> dict[str, Any]:
    """Describe `/infer`."""
    parts, single = service.signature.parts, service.signature.single()
    named = {part.name: _values(part) for part in parts}
    several = {"type": "object", "required": list(named), "properties": named}
    asked = _properties(Ask)
    body = {
        "type": "object",
        "required": ["input"],
        "additionalProperties": False,
        "properties": {"input": _values(parts[0]) if single else several, **asked},
    }
    contents: dict[str, Any] = {"application/json": {"schema": body}}
    kinds = ["application/x-npy"] * single + ["image/png", "image/jpeg"] * service.images.served
    found = operation("Answer one input", contents | dict.fromkeys(kinds, BINARY), Terms)
    found["parameters"] += [{"name": name, "in": "query", "schema": schema} for name, schema in asked.items()]
    return found


def tensors(service: Service, schemas: dict[str, Any]) -> dict[str, Any]:
    """Describe the inference of the Open Inference Protocol."""
    schema = model_schema(InferRequest, schemas)
    shapes = [f"{part.name} of shape {['N', *part.shape]}" for part in service.signature.parts]
    schema["properties"]["inputs"]["description"] = ", ".join(shapes)
    contents = {"application/json": {"schema": schema}}
    return operation("Answer tensors (Open Inference Protocol)", contents, Terms)


def _properties(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas of a model's fields; null is what is absent, and no query or header has it."""
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    return {
        name: {**field["anyOf"][0], "description": field["description"]} for name, field in properties.items()
    }


def _values(part: InputPart) -> dict[str, Any]:
    """Describe numbers of a shape: nested, or all in a row."""
    number: dict[str, Any] = {"type": "number", "minimum": -1e6, "maximum": 1e6}
    if not part.shape:
        return number
    length = {"minItems": part.size, "maxItems": part.size} if part.size <= MOST_LISTED else {}
    nested = number
    for size in reversed(part.shape):
        nested = {"type": "array", "items": nested, "minItems": size, "maxItems": size}
    return {"anyOf": [{"type": "array", "items": number, **length}, nested]}
