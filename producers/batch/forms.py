"""The form in which prompts and job ids are made. A batch's folder records it, because another form means other ids."""

from collections.abc import Mapping
from typing import Any

# `batch.json` records this number, because a change in how prompts or ids are made changes job ids. 1 (or no number):
# only whole names of five letters and more are removed from the work. 2: names in any spelling are. 3: ids leave out
# defaults, and are made of parts with roles. 4: messages in a line of `kvasir run` keep their roles. 5: the answer to a
# question names its criterion. 6: as 4, with schemas that `strict_schema` has made strict. Prompts that ask for all
# criteria at once are as in 3.
PROMPT_FORM = 3
LINE_FORM = 4
QUESTION_FORM = 5
ANY_SPELLING = 2
SCHEMA_FORM = 6
NEWEST_FORM = SCHEMA_FORM


def form_of(request: Mapping[str, Any]) -> int:
    """The form in which prompts are made now for a request that `batch.json` describes."""
    if "prompts" in request:
        return SCHEMA_FORM if request.get("objects") else LINE_FORM
    return QUESTION_FORM if request.get("ask") == "criteria" else PROMPT_FORM
