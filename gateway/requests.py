"""What requests of both APIs have in common: nothing in them is ignored unless it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from gateway.refusal import ApiError


class Strict(BaseModel):
    """A part of a request: a field that it doesn't have is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


def meaningful_fields(
    fields: Mapping[str, Any], not_served: Mapping[str, tuple[Any, ...]], prefix: str = ""
) -> dict[str, Any]:
    """The fields that say something. Raises ApiError for what we don't serve, by name.

    `not_served` has for each such field the values by which clients say that they don't want it; null always does.
    """
    meaningful = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name not in not_served:
            meaningful[name] = value
        elif not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in not_served[name]
        ):
            raise ApiError(400, f"{prefix + name!r} is not served", f"{prefix}{name}", "unsupported_parameter")
    return meaningful
