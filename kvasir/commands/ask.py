"""`kvasir ask`: one prompt, ahead of the bulk."""

from collections.abc import Iterable

import click

from kvasir.connect import connect
from kvasir.options import Globals, Number
from kvasir.terminal import say_json, stderr
from messages import codec
from messages.jobs import JobResult, Sampling, TokenEvent


@click.command()
@click.argument("prompt")
@click.option("--model", metavar="M", required=True, help="Ask this model.")
@click.option("--stream", is_flag=True, help="Print the answer as it is generated.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--temperature", type=Number(0), default=0.2, show_default=True)
@click.option("--answers", type=click.IntRange(1), default=1, help="Generate this many answers from one prefill.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole result as JSON.")
@click.pass_obj
def ask(
    global_options: Globals,
    prompt: str,
    model: str,
    stream: bool,
    max_tokens: int,
    temperature: float,
    answers: int,
    as_json: bool,
) -> int:
    """Send one PROMPT, ahead of the bulk, and print the answer."""
    settings = global_options.settings()
    settings.model(model)
    # If the locale is not UTF-8, the argument's bytes arrive as surrogates, which a message can't hold.
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    with connect(settings, [model], global_options.observer(), "ask") as client:
        for name in client.unserved([model]):
            stderr.print(f"nobody serves {name} now; waiting for a worker")
        events = client.stream(model, prompt, Sampling(max_tokens, temperature, answers=answers))
        return print_answer(events, stream, as_json)


def print_answer(events: Iterable[TokenEvent | JobResult], stream: bool, as_json: bool) -> int:
    """Print pieces as they come, then the rest of the answer, and return the exit code.

    If the decode begins again, the new text starts on a new line. Pieces may be lost or come late, but the result is
    never lost: whatever the pieces left out is printed from it.
    """
    delivery, printed_text = "", ""  # the text printed so far for this delivery
    result: JobResult | None = None
    for event in events:  # all events are read, because leaving the loop early cancels the job
        if isinstance(event, JobResult):
            result = event
        elif stream and not as_json:
            if delivery not in ("", event.delivery):
                click.echo("\n[the answer began again on another worker]")
                printed_text = ""
            delivery = event.delivery
            printed_text += event.text
            click.echo(event.text, nl=False)
    return _print_result(result, printed_text, as_json) if result else 1


def _print_result(result: JobResult, printed_text: str, as_json: bool) -> int:
    if as_json:
        say_json(codec.to_dict(result))
    elif result.error:
        click.echo(f"kvasir: {result.error.message}", err=True)
    else:
        is_gapless = result.text.startswith(printed_text)
        gap = "\n[pieces of the answer were lost; here it is whole]\n"
        click.echo(result.text.removeprefix(printed_text) if is_gapless else gap + result.text)
        for number, text in enumerate(result.more_texts, 2):
            click.echo(f"\n[answer {number}]\n{text}")
    return 0 if result.state == "succeeded" else 1
