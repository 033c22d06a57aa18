"""The form in which prompts and job ids are made. A batch's folder records it, because another form means other ids."""

from collections.abc import Mapping
from typing import Any

# `batch.json` records in which form its prompts are made. The form decides how names are removed from the work, and
# what a job's id is made of (`job_id`):
#
# 1 (also if there is no entry): only whole names of five or more letters are removed.
# 2: names in any spelling are removed.
# 3: a job's id is made from prompt parts with roles, and without default values. Prompts that ask for all criteria at
#    once still have this form.
# 4: the messages in a line of `kvasir run` keep their roles.
# 5: the answer to a question names the criterion.
# 6: like 4, but `strict_schema` makes the schemas strict.
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
