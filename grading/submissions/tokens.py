"""Estimates tokens without a tokenizer: on the safe side, and the same on every machine.

What is cut from a submission decides its prompt and so its job id. This must not depend on which machine has the
model's tokenizer. So cuts are measured with this estimate, and exact counts are only shown to people.
"""

import math
import re

_PIECES = re.compile(r"[^\W\d_]+|\d|[^\w\s]|_|\n+|[ \t]{2,}")

# With byte-pair vocabularies, a token has 4 to 5 letters of English, or 3 to 4 letters of code. The value 3 leaves a
# margin.
LETTERS_PER_TOKEN = 3.0


def estimate_tokens(text: str, letters_per_token: float = LETTERS_PER_TOKEN) -> int:
    """Estimate how many tokens a text has.

    Letters count in runs, digits and signs count one token each, and other scripts count by their bytes.
    """
    total = 0
    for match in _PIECES.finditer(text):
        piece = match.group()
        is_word = piece[0].isalpha()
        total += math.ceil(len(piece.encode("utf-8", "replace")) / letters_per_token) if is_word else 1
    return total
