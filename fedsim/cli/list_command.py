"""`fedsim list`."""

from __future__ import annotations

from typing import Annotated

import typer

from fedsim.cli.program import errors_as_lines
from fedsim.config.catalog import list_experiments
from fedsim.config.plugs import PLUGS, describe_plug, list_plugs
from fedsim.core.text_wrapping import terminal_columns

EXPERIMENTS = "experiments"
KINDS = (*PLUGS, EXPERIMENTS)


def list_command(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND|NAME|MODULE:NAME",
            help=f"A kind ({', '.join(KINDS)}), or a plug to describe, such as krum or my_rules:clipped_mean.",
            show_default="all",
        ),
    ] = None,
) -> None:
    """List all plugs with their parameters and defaults, and the built-in experiments."""
    with errors_as_lines():
        if what is not None and what not in KINDS:
            print(describe_plug(what, KINDS))
            return
        plugs = [each for each in PLUGS if what in (None, each)]
        blocks = [list_plugs(plugs, terminal_columns())] if plugs else []
        if what in (None, EXPERIMENTS):
            blocks.append(list_experiments(terminal_columns()))
        print("\n\n".join(blocks))
