"""How every engine gives a job's JSON schema to LLGuidance."""

import json
from typing import Any

# One space and no line breaks: white space without bound is where small models lose themselves.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# In LLGuidance's form of Lark, up to the schema. A text holds no control token.
_THOUGHTS_FIRST = """\
start: thought* <|channel|> "final" head? <|message|> answer
thought: <|channel|> /analysis|commentary/ head? <|message|> TEXT? <|end|> <|start|> "assistant" head?
head: (TEXT | <|constrain|>)+
TEXT: /(?s:.+)/
answer: %json """


def guidance_schema(schema: str) -> dict[str, Any]:
    """The schema, and how the JSON is written unless it says that itself."""
    return {"x-guidance": _JSON_STYLE, **json.loads(schema)}


def thinking_grammar(schema: dict[str, Any]) -> str:
    """A grammar for who can't be told to wait: messages in other channels, then JSON in the final one."""
    return _THOUGHTS_FIRST + json.dumps(schema)
