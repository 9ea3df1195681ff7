"""OpenAPI descriptions of request bodies, from the types that decode them."""

from __future__ import annotations

import msgspec

__all__ = ["body_schema"]


def body_schema(body_type: type) -> dict[str, object]:
    """The `requestBody` of an operation, with every definition inside."""
    (schema,), components = msgspec.json.schema_components(
        [body_type], schema_hook=_any_value, ref_template="#/{name}"
    )
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _resolved(schema, components)}},
        }
    }


def _any_value(value_type: type) -> dict[str, object]:
    if value_type is object:
        return {"description": "any value"}
    raise NotImplementedError


def _resolved(schema: object, components: dict[str, dict[str, object]]) -> object:
    if isinstance(schema, list):
        return [_resolved(each, components) for each in schema]
    if not isinstance(schema, dict):
        return schema
    ref = schema.get("$ref")
    if isinstance(ref, str):
        return _resolved(components[ref.removeprefix("#/")], components)
    return {name: _resolved(value, components) for name, value in schema.items()}
