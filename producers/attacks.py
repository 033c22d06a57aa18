"""Text in a submission that speaks to the grader instead of to the assignment.

The list asks a person to look; it decides nothing. Points come from criteria and from an enumeration, so the worst that
an attack can reach is a wrong number of points, and that is what the person is asked to look for. Homework may well
speak of grades, of instructions and of language models: a phrase counts where it is addressed to who grades.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from producers.prompts import has_control_tokens
from producers.submissions import Submission

MAX_FLAGS = 3

_POINTS = r"(?:points?|marks?|grades?|scores?|credits?|punkte|puntos|note)"
_RULES = r"(?:instruction|rubric|prompt|guideline|criteri(?:a|on)|rule|direction)s?"
_WHO = r"(?:grader|grading|ai|a\.i\.|assistant|(?:language|grading) model|llm|chatbot|gpt|chatgpt|marker|evaluator|bot)"
_ALL = r"(?:full|maximum|max|all|highest|perfect|top|every|100 ?%?|a\+)"

_ADDRESSED = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"\b(?:ignore|disregard|forget|override|bypass|skip)\b[^.\n]{{0,40}}"
        rf"\b(?:all|any|the|your|previous|prior|above|earlier|these|those)\b[^.\n]{{0,30}}\b{_RULES}\b",
        rf"\b(?:you are|you're|act as|pretend (?:to be|that you)|behave as|roleplay as)\b[^.\n]{{0,25}}\b{_WHO}\b",
        rf"\b(?:give|award|assign|grant|output|return|print|set (?:the|all|every|my)|enter)\b"
        rf"[^.\n]{{0,30}}\b{_ALL}\b[^.\n]{{0,20}}\b{_POINTS}\b",
        rf"\b(?:dear|hey|hello|attention|note|message|instructions?|hint|memo|p\.?s\.?)\b,?"
        rf"\s?(?:to|for)?\s?(?:the\s|my\s|any\s)?\b{_WHO}\b\s?[:,!.—-]",
        rf"\b(?:note|message|instructions?|command)\s(?:to|for)\s(?:the\s|any\s)?{_WHO}\b",
        r"\bsystem\s(?:prompt|message|override|update|notice)\b",
        r"\bdeveloper mode\b|\bjailbreak\b|\bnew instructions?\s?:",
        r"\bas an? (?:ai|language) (?:model|assistant)\b[^.\n]{0,40}\b(?:must|should|will|have to|grade|award)\b",
        rf"\b(?:this|the|my) (?:submission|answer|work|solution|homework)\b[^.\n]{{0,30}}"
        rf"\b(?:deserves?|(?:must|should) (?:get|receive|be (?:given|graded|awarded)))\b"
        rf"[^.\n]{{0,30}}\b(?:{_ALL}|{_POINTS})\b",
        r"(?:^|\n) ?(?:#{1,6} ?)?(?:end of (?:submission|homework|student)|grading (?:result|decision|complete)|"
        r"final (?:grade|score|points)|grader(?:'s)? (?:notes?|guidance)|teacher(?:'s)? note)\b[^\n]{0,40}[:=\n]",
        r"(?:^|\n) ?(?:system|assistant|developer|user|human) ?: ?\S[^\n]{0,200}"
        rf"(?:\b{_POINTS}\b|\b{_RULES}\b|\bgrad(?:e|ing)\b)",
        r"[\"']?points[\"']?\s?:\s?\d{1,5}(?:\.\d{1,3})?\s?,\s?[\"']?(?:feedback|evidence)|[\"']evidence[\"']\s?:\s?[\"']",
        r"===\s?[0-9a-f]{6,64}\s?(?:begin|end)|\bthe code is [0-9a-f]{6,64}",
        rf"\b(?:reveal|repeat|print|show|quote|output|disclose|copy)\b[^.\n]{{0,40}}\b(?:grading notes|"
        rf"reference solution|solution key|hidden|your (?:{_RULES}|prompt)|system prompt|other students?)\b",
        rf"\b(?:do not|don't|never|no need to)\b[^.\n]{{0,20}}\b(?:grade|deduct|subtract|check|read|evaluate|assess)\b"
        rf"[^.\n]{{0,40}}\b(?:{_POINTS}|submission|rest|rubric|code below|this (?:work|file|notebook))\b",
        rf"\b(?:the )?(?:professor|instructor|teacher|dean|ta)\b[^.\n]{{0,30}}"
        rf"\b(?:already|told|said|says|agreed|approved|authori[sz]ed|confirmed|promised)\b[^.\n]{{0,50}}"
        rf"\b{_ALL}\b[^.\n]{{0,15}}\b{_POINTS}\b",
        rf"\b(?:i will|i'll|we will)\b[^.\n]{{0,40}}\b(?:tip|pay|reward|sue|report|fire)\b[^.\n]{{0,40}}"
        rf"\b(?:you|{_POINTS})\b",
        r"\b(?:ignorier\w*|vergiss|ignora|olvida|ignorez|oubliez)\b[^.\n]{0,60}"
        r"\b(?:anweisung\w*|instruccion\w*|instructions?|regeln|reglas|consignes)\b",
        r"\b(?:gib|vergib|otorga|donnez|attribue\w*)\b[^.\n]{0,40}\b(?:volle\w*|alle|máxim\w*|todos|maximum|tous)\b[^.\n]{0,20}"
        r"\b(?:punkt\w*|puntos|puntuación|points|note)\b",
        r"忽略[^。\n]{0,20}(?:指示|指令|说明|规则)|(?:满分|滿分)",
        rf"\bif you(?: are| 're|'re)\b[^.\n]{{0,25}}\b{_WHO}\b",
    )
)
_SPACED = re.compile(r"\b(?:[A-Za-z][ .\-_*]){5,40}[A-Za-z]\b")
_BLANKS = re.compile(r"[^\S\n]+")
_LINES = re.compile(r" ?\n[ \n]*")
_MAX_CHARS = 200_000  # of a part, at both ends: a runaway output is no letter to anybody
_INVISIBLE = re.compile(r"[\u200b\u200e\u200f\u2060-\u2064\u202a-\u202e\u2066-\u2069\ufeff\u00ad\U000e0000-\U000e007f]")
_MANY_INVISIBLE = 8
_TAGS = re.compile(r"[\U000e0020-\U000e007e]")  # invisible twins of ASCII
_LOOKALIKES = str.maketrans("аеорсухіІАЕОРСТХ0134@$", "aeopcyxiIAEOPCTXoleaas")


@lru_cache(maxsize=1024)  # a watched batch is graded again with each result, and its submissions stay as they are
def instruction_flags(submission: Submission) -> tuple[str, ...]:
    """A sentence for each part, at most three, with a passage that reads as if it were addressed to the grader."""
    flags = []
    for part in submission.parts:
        where = part.where or part.kind
        if passage := find_passage(part.text):
            flags.append(f"reads like an instruction to the grader ({where}): “{passage}”")
        elif has_control_tokens(part.text):
            flags.append(f"holds a chat control token ({where})")
    return tuple(flags[:MAX_FLAGS])


def find_passage(text: str) -> str:
    """The first words of such a passage, short and on one line; "" if there is none."""
    for form in _readings(text):
        for pattern in _ADDRESSED:
            if match := pattern.search(form):
                return " ".join(match.group().split())[:80]
    return "invisible characters" if len(_INVISIBLE.findall(text)) >= _MANY_INVISIBLE else ""


def _readings(text: str) -> list[str]:
    """The text as written, and without the disguises that are easy to take off; runs of blanks are one."""
    if len(text) > _MAX_CHARS:
        text = f"{text[: _MAX_CHARS // 2]}\n{text[-_MAX_CHARS // 2 :]}"
    hidden = "".join(chr(ord(char) - 0xE0000) for char in _TAGS.findall(text))
    plain = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
    plain = _LINES.sub("\n", _BLANKS.sub(" ", plain))  # a pattern then never walks far through white space
    close = _SPACED.sub(lambda match: re.sub(r"[ .\-_*]", "", match.group()), plain)
    looks = plain.translate(_LOOKALIKES) if not plain.isascii() else ""
    return list(dict.fromkeys(filter(None, (plain, hidden, close, looks))))
