"""What every engine tells LLGuidance of a job's JSON schema."""

from __future__ import annotations

import json
from typing import Any

# One space and no line breaks: white space without bound is where small models lose themselves.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def guidance_schema(schema: str) -> dict[str, Any]:
    """The schema, and how the JSON is written unless it says that itself."""
    return {"x-guidance": _JSON_STYLE, **json.loads(schema)}
