"""Writes the example's prompts: ten sentences to translate, as OpenAI's Batch API takes them.

    python -m examples.prompts.make MODEL > prompts.jsonl

The instructions are the same in each line, so they are computed once; only the sentence differs.
"""

import json
import sys

INSTRUCTIONS = """You translate sentences from a shop's catalogue into German.
Keep names and numbers as they are. Answer with the translation alone, in one sentence.
Terms: tent = Zelt, trail = Wanderweg, stove = Kocher, sleeping bag = Schlafsack, headlamp = Stirnlampe."""
SENTENCES = (
    "This tent weighs 1.9 kg and stands in three minutes.",
    "The Larch trail is open from May to October.",
    "Boil half a litre of water with 8 g of gas on this stove.",
    "The sleeping bag keeps you warm down to -4 degrees.",
    "Charge the headlamp by its USB port for two hours.",
    "All jackets are made of recycled nylon.",
    "Members get 10% off every second Sunday.",
    "Wash it by hand, and never in a machine.",
    "The map shows every hut between Riverside and Lakes.",
    "We repair zips for free for five years.",
)


def lines(model: str) -> list[str]:
    """One JSON line a sentence."""
    return [json.dumps(_line(f"sentence-{number}", model, text)) for number, text in enumerate(SENTENCES, 1)]


def _line(custom_id: str, model: str, text: str) -> dict[str, object]:
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": 120, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


if __name__ == "__main__":
    print("\n".join(lines(sys.argv[1] if len(sys.argv) > 1 else "kvasir-demo")))
