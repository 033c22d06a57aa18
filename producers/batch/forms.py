"""The form in which prompts and their jobs' ids are made. A batch's folder keeps it: another form means other ids."""

from collections.abc import Mapping
from typing import Any

# What else makes a job's id another one: how names are taken out of the work, and what an id is made of (`job_id`).
# `batch.json` keeps it. 1, or none: whole names of five letters and more; 2: names in any spelling; 3: ids without
# defaults, of parts with roles; 4: messages of a line of `kvasir run` keep their roles; 5: the answer to a question
# names its criterion; 6: as 4, with schemas of which `strict_schema` made what is enforced. Prompts that ask for all
# criteria at once are as in 3.
PROMPT_FORM = 3
LINE_FORM = 4
QUESTION_FORM = 5
ANY_SPELLING = 2
SCHEMA_FORM = 6
NEWEST_FORM = SCHEMA_FORM


def form_of(request: Mapping[str, Any]) -> int:
    """The form in which prompts are made now for what `batch.json` keeps of a request."""
    if "prompts" in request:
        return SCHEMA_FORM if request.get("objects") else LINE_FORM
    return QUESTION_FORM if request.get("ask") == "criteria" else PROMPT_FORM
