"""Kvasir: durable, disaggregated LLM inference. The composition root, and the public names.

from kvasir import grade

graded = grade("submissions/", "rubric.yaml", "solution.ipynb")  # what `kvasir grade` does
graded.rows, graded.to_csv()

again = regrade("results/homework4")  # the rubric was edited; again.differences, and again.adopt() replaces the grades

from kvasir import Sampling, connect, load_settings

with connect(load_settings(), ["qwen3-coder:30b"]) as client:
    print(client.ask("qwen3-coder:30b", "Explain RoPE in one sentence.", Sampling(max_tokens=80)).text)
"""

import sys

# In the command-line program, Ctrl-C must work from the first moment.
if sys.argv[0] == "-m" or sys.argv[0].endswith("/kvasir"):
    from kvasir.early import leave_quietly

    leave_quietly()

from importlib.metadata import version

from infra.config.settings import Settings, load_settings
from kvasir.api import grade, regrade
from kvasir.class_run import Outcome
from kvasir.connect import connect
from kvasir.regrading import Regrade
from messages.errors import KvasirError
from messages.jobs import JobResult, Part, PrefillJob, Sampling, TokenEvent
from producers.client import Client

__version__ = version("kvasir-inference")

__all__ = [
    "Client",
    "JobResult",
    "KvasirError",
    "Outcome",
    "Part",
    "PrefillJob",
    "Regrade",
    "Sampling",
    "Settings",
    "TokenEvent",
    "connect",
    "grade",
    "load_settings",
    "regrade",
]
