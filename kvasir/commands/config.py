"""`kvasir config`: shows the settings, and where each value came from."""

import json

import click

from infra.config.settings import describe
from kvasir.options import Globals, json_option
from kvasir.terminal import print_table


@click.command()
@json_option
@click.pass_obj
def config(global_options: Globals, as_json: bool) -> int:
    """Show every setting and where its value came from. Passwords are masked."""
    rows = describe(global_options.settings())
    if as_json:
        click.echo(json.dumps([{"name": name, "value": value, "from": origin} for name, value, origin in rows]))
    else:
        print_table(("setting", "value", "from"), rows)
    return 0
