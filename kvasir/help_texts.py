"""Additions to `--help`: an example for every command, and summaries that are not cut off."""

import click

COMPLETION = 'eval "$(_KVASIR_COMPLETE=bash_source kvasir)"'

EXAMPLES = {
    "demo": ["kvasir demo"],
    "grade": [
        "kvasir grade submissions.zip --rubric rubric.yaml --dry-run",
        "kvasir grade submissions/ --rubric rubric.yaml --solution solution.ipynb --out results/homework4",
    ],
    "submit": ["kvasir submit submissions/ --rubric rubric.yaml --out results/homework4 --deadline 07:30"],
    "watch": ["kvasir watch results/homework4"],
    "results": ["kvasir results results/homework4"],
    "retry": ["kvasir retry results/homework4", "kvasir retry results/homework4 --only 48101,oakhollowozzie"],
    "regrade": ["kvasir regrade results/homework4", "kvasir regrade results/homework4 --criterion joins"],
    "assign": ["kvasir assign results/homework4", "kvasir assign results/homework4 notes.R 'Aldertree, Ada'"],
    "requests": [
        "kvasir requests results/homework4 --from asked.csv",
        "kvasir requests results/homework4 --answer 3f0c91d2aa07 --reply 'You did label the axes; sorry.'",
    ],
    "bound": ["kvasir bound results/homework4 --draw 30", "kvasir bound results/homework4"],
    "evaluate": [
        "kvasir evaluate results/homework4 --grades hand.csv",
        "kvasir evaluate submissions/ --rubric rubric.yaml --grades hand.csv --model A --model B",
    ],
    "cancel": ["kvasir cancel results/homework4"],
    "run": ["kvasir run prompts.jsonl --model qwen3-coder:30b --max-tokens 400"],
    "migrate": ["kvasir migrate results/homework4"],
    "serve": ["kvasir serve", "kvasir serve --host 0.0.0.0 --port 8080"],
    "keys": ["kvasir keys add ada --model qwen3-coder:30b", "kvasir keys list"],
    "keys add": ["kvasir keys add ada --model qwen3-coder:30b"],
    "keys list": ["kvasir keys list"],
    "keys revoke": ["kvasir keys revoke ada"],
    "ask": ['kvasir ask "Explain RoPE in one sentence." --model qwen3-coder:30b --stream'],
    "job": ["kvasir job 3f2a", "kvasir job 3f2a91d2aa07 --batch results/homework4"],
    "status": ["kvasir status"],
    "config": ["kvasir --config kvasir.toml config"],
    "engines": ["kvasir engines", "kvasir engines install vllm"],
    "engines connector": ["kvasir engines connector ~/kvasir-connector"],
    "engines install": ["kvasir engines install vllm"],
    "doctor": ["kvasir doctor", "kvasir doctor --try qwen3-coder:30b"],
    "plan": ["kvasir plan --submissions 300", "kvasir plan submissions/ --rubric rubric.yaml"],
    "measure": ["kvasir measure --model qwen3-coder:30b --slots 16", "kvasir measure --links"],
    "export": [
        "kvasir export results/homework4 --format canvas --gradebook gradebook.csv --assignment 1234",
        "kvasir export results/homework4 --format feedback --as html",
    ],
    "rubric": ["kvasir rubric from homework.ipynb > rubric.yaml"],
    "rubric from": ["kvasir rubric from homework.ipynb > rubric.yaml"],
    "forget": ["kvasir forget results/homework4"],
    "dead": ["kvasir dead list", "kvasir dead replay 3f2a"],
    "dead list": ["kvasir dead list --model qwen3-coder:30b"],
    "dead show": ["kvasir dead show 3f2a"],
    "dead replay": ["kvasir dead replay --batch batch-20261101-5a60e1a6"],
    "dead drop": ["kvasir dead drop 3f2a"],
    "deploy": ["kvasir deploy --dry-run", "kvasir deploy upgrade --machine mac2"],
    "logs": ["kvasir logs mac2"],
    "worker": ["kvasir worker --model gpt-oss:120b --engine llamacpp --slots 16"],
    "prefill-worker": [
        "kvasir prefill-worker --model qwen3-coder:30b --engine llamacpp --weights qwen3-coder-30b.gguf",
    ],
    "decode-worker": ["kvasir decode-worker --model qwen3-coder:30b --slots 4 --metrics-port 9100"],
    "pause": ["kvasir pause mac2"],
    "resume": ["kvasir resume mac2"],
    "drain": ["kvasir drain mac2 --timeout 600"],
    "top": ["kvasir top", "kvasir top results/homework4 --every 5"],
    "ui": ["kvasir ui", "kvasir ui results/homework4 --port 8600"],
}


def complete(command: click.Command, prefix: str = "") -> click.Command:
    """Give a command, and those in its group, their examples and their full summaries. Returns the command."""
    name = f"{prefix}{command.name}"
    lines = EXAMPLES.get(name, ())
    command.epilog = "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)
    command.short_help = command.get_short_help_str(limit=500)
    for member in command.commands.values() if isinstance(command, click.Group) else ():
        complete(member, f"{name} ")
    return command
