"""vLLM by itself, for `benchmarks.decode` and `benchmarks.overlap`: its own offline class, no connector, no Kvasir.

Run by the Python of vLLM's environment, with that class's arguments as JSON; imports nothing of ours. It says a line
of JSON when the model is loaded, and then answers each line of its input, a JSON object with `prompts` (lists of ids),
`max_tokens` and `ends` (ids that end an answer): `seconds` that all prompts together took, `answers` (lists of ids).
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load, and answer until the input ends."""
    from vllm import LLM, SamplingParams

    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints, and so do its processes
    engine: Any = LLM(**json.loads(sys.argv[1]))
    print("{}", file=said, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        parameters = SamplingParams(
            temperature=0, max_tokens=asked["max_tokens"], stop_token_ids=asked["ends"], detokenize=False
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in asked["prompts"]]
        started = time.perf_counter()
        done = engine.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - started
        answers = [list(one.outputs[0].token_ids) for one in done]
        print(json.dumps({"seconds": seconds, "answers": answers}), file=said, flush=True)


if __name__ == "__main__":
    main()
