"""The page that shows both APIs. FastAPI's own page loads its script from another server, and is empty without it."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Kvasir's APIs</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
h3 { font-family: ui-monospace, monospace; margin: 1.5em 0 0 } td { padding: 0 1.5em 0 0; vertical-align: top }
</style>"""


def page(api: Mapping[str, Any]) -> str:
    """Return an OpenAPI description as HTML: routes with their parameters, then the bodies with their fields."""
    return "\n".join([_HEAD, f"<h1>{escape(api['info']['description'])}</h1>", *_routes(api), *_bodies(api)])


def _routes(api: Mapping[str, Any]) -> Iterator[str]:
    yield "<p>For programs: <a href='openapi.json'>openapi.json</a></p>"
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            yield f"<h3>{escape(f'{method.upper()} {path}')}</h3><div>{escape(route.get('description', ''))}</div>"
            if body := route.get("requestBody"):
                yield f"<div>Body: {_kind(body['content']['application/json']['schema'])}</div>"
            yield from _table((parameter["name"], parameter["schema"]) for parameter in route.get("parameters", ()))


def _bodies(api: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in api["components"]["schemas"].items():
        yield f"<h3 id='{escape(name)}'>{_short(name)}</h3><div>{escape(schema.get('description', ''))}</div>"
        required_fields = schema.get("required", ())
        fields = schema.get("properties", {}).items()
        yield from _table((f"{field}{' (required)' * (field in required_fields)}", kind) for field, kind in fields)


def _table(rows: Any) -> Iterator[str]:
    yield "<table>"
    yield from (
        f"<tr><td>{escape(name)}<td>{_kind(schema)}<td>{escape(schema.get('description', ''))}" for name, schema in rows
    )
    yield "</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a field's type as HTML. An object of this API becomes a link to its description."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"<a href='#{escape(name)}'>{_short(name)}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(variant) for variant in schema["anyOf"])
    if "items" in schema:
        return f"list of {_kind(schema['items'])}"
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else ())
    return escape(", ".join(map(repr, values)) or str(schema.get("type", "anything")))


def _short(name: str) -> str:
    """Return a body's short name: FastAPI prefixes the module if two bodies have the same name."""
    return escape(name.rpartition("__")[2])
