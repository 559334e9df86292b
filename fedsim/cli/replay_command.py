"""`fedsim replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.program import errors_as_lines
from fedsim.cli.words import AllowImports
from fedsim.core.text_wrapping import terminal_columns


def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    rules: Annotated[
        str | None,
        typer.Option(
            help='Rules, separated by commas: median,krum,["nnm","trimmed_mean"],{rule="multi_krum",m=3}.',
            show_default="all rules that apply",
        ),
    ] = None,
    round: Annotated[
        int | None, typer.Option(help="A round whose updates were recorded.", show_default="the last")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    allow_imports: AllowImports = False,
) -> None:
    """Apply other rules to a recorded round of a run (records.updates=[1,5]), and compare their results."""
    with errors_as_lines():
        from fedsim.comparison.axes import split_at_commas
        from fedsim.config.toml import parse_value
        from fedsim.runs.rule_replay import applicable_rules, load_round, replay_json, replay_table
        from fedsim.runs.rule_replay import replay as replay_rules

        stored = load_round(folder, round, allow_imports=allow_imports)
        chosen = (
            [parse_value(text.strip(), "--rules") for text in split_at_commas(rules)]
            if rules
            else applicable_rules(stored)
        )
        results = replay_rules(stored, chosen)
        print(replay_json(stored, results) if json else replay_table(stored, results, terminal_columns()))
