"""The OpenAPI document: what addresses do, with the pydantic models of their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

__all__ = ["UNREADY", "model_schema", "operation", "properties"]

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
    statuses = {"200": "The answer.", **responses}
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {status: {"description": text} for status, text in statuses.items()},
    }
    if contents:
        found["requestBody"] = {
            "required": True,
            "content": {kind: {"schema": schema} for kind, schema in contents.items()},
        }
    if terms:
        found["parameters"] = [
            {"name": f"x-{name.replace('_', '-')}", "in": "header", "schema": schema}
            for name, schema in properties(terms).items()
        ]
    return found


def model_schema(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a model, and put those that it refers to among the document's own."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs", {})
    return schema


def properties(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas of a model's fields; null is what is absent, and no query or header has it."""
    fields: dict[str, Any] = model.model_json_schema()["properties"]
    return {
        name: {**field["anyOf"][0], "description": field["description"]} for name, field in fields.items()
    }
