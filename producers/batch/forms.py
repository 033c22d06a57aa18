"""The form in which prompts and job ids are made. A batch's folder records it, because another form means other ids."""

from collections.abc import Mapping
from typing import Any

# The form covers how names are taken out of the work, and what a job's id is made of (`job_id`). `batch.json` records
# it. 1, or no entry: only whole names of five letters and more are taken out. 2: names in any spelling. 3: ids without
# default values, made from parts with roles. 4: messages of a line of `kvasir run` keep their roles. 5: the answer to a
# question names its criterion. 6: as 4, but `strict_schema` makes the schemas strict. Prompts that ask for all criteria
# at once have the form 3.
PROMPT_FORM = 3
LINE_FORM = 4
QUESTION_FORM = 5
ANY_SPELLING = 2
SCHEMA_FORM = 6
NEWEST_FORM = SCHEMA_FORM


def form_of(request: Mapping[str, Any]) -> int:
    """Return the form in which prompts are made now for a request that is kept in `batch.json`."""
    if "prompts" in request:
        return SCHEMA_FORM if request.get("objects") else LINE_FORM
    return QUESTION_FORM if request.get("ask") == "criteria" else PROMPT_FORM
