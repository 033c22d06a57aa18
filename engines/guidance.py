"""How every engine passes a job's JSON schema to LLGuidance."""

import json
from typing import Any

# JSON is written with single spaces and without line breaks, because small models easily get lost in unlimited white
# space.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A grammar in LLGuidance's variant of Lark. The JSON schema is appended to it. TEXT never matches a control token.
_THOUGHTS_FIRST = """\
start: thought* <|channel|> "final" head? <|message|> answer
thought: <|channel|> /analysis|commentary/ head? <|message|> TEXT? <|end|> <|start|> "assistant" head?
head: (TEXT | <|constrain|>)+
TEXT: /(?s:.+)/
answer: %json """


def guidance_schema(schema: str) -> dict[str, Any]:
    """The schema, with the style in which the JSON is written unless the schema specifies it."""
    return {"x-guidance": _JSON_STYLE, **json.loads(schema)}


def thinking_grammar(schema: dict[str, Any]) -> str:
    """A grammar for engines that can't delay a constraint: messages in other channels come first, then JSON in the
    final channel."""
    return _THOUGHTS_FIRST + json.dumps(schema)
