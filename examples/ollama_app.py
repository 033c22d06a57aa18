"""An app that was written for Ollama and knows of nothing else: it grades files with one model, and sums its grades up.

    OLLAMA_HOST=http://127.0.0.1:8000 python examples/ollama_app.py MODEL FILE …

With `kvasir serve` at that address its requests are jobs in the queues; nothing in here changes for it.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ollama

GRADE = {
    "type": "object",
    "properties": {"points": {"enum": [0, 1, 2, 3, 4, 5]}, "why": {"type": "string", "maxLength": 200}},
    "required": ["points", "why"],
}
TASK = "You grade homework. Give 0 to 5 points for code that works and is easy to read, and say why in one sentence."
OPTIONS = {"temperature": 0, "num_predict": 200}


def grade(model: str, text: str) -> dict[str, Any]:
    """Points and a reason, under a schema."""
    messages = [{"role": "system", "content": TASK}, {"role": "user", "content": text}]
    answer = ollama.chat(model=model, messages=messages, format=GRADE, options=OPTIONS, keep_alive=-1)
    graded: dict[str, Any] = json.loads(answer.message.content or "")
    return graded


def main(model: str, *names: str) -> int:
    """Grade all files, four at a time; then a summary, as it is written."""
    there = [each.model for each in ollama.list().models]
    if model not in there:
        sys.exit(f"the server has no {model}; it has {', '.join(map(str, there))}")
    texts = {name: Path(name).read_text("utf-8") for name in names}
    with ThreadPoolExecutor(4) as pool:
        grades = dict(zip(texts, pool.map(lambda text: grade(model, text), texts.values()), strict=True))
    for name, graded in grades.items():
        print(f"{name}: {graded['points']} of 5, {graded['why']}")
    for piece in ollama.generate(model=model, prompt=f"Sum these grades up: {json.dumps(grades)}", stream=True):
        print(piece.response, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
