"""`fedsim tune`."""

from __future__ import annotations

import typer

from fedsim.cli.program import errors_as_lines
from fedsim.cli.words import AllowImports, Words, source_and_overrides
from fedsim.errors import plural


def tune(context: typer.Context, words: Words = None, allow_imports: AllowImports = False) -> None:
    """Measure which engine is fastest for an experiment here, and print the lines to put into its file."""
    with errors_as_lines():
        from fedsim.config.load import load_experiment
        from fedsim.runs.tuning import Candidate, lines_for_file
        from fedsim.runs.tuning import tune as measure

        source, overrides = source_and_overrides(words or [], context)
        experiment = load_experiment(source, overrides, allow_imports=allow_imports)

        def show_candidate(candidate: Candidate) -> None:
            total = f"{candidate.seconds(experiment.rounds):.1f} s"
            figures = f"{candidate.round_seconds:8.3f} s {candidate.start_seconds:6.1f} s {total:>12}"
            print(f"{candidate.label:<32}{candidate.refusal or figures}", flush=True)

        print("measuring rounds of a few steps, scaled to whole rounds; nothing else should run meanwhile", flush=True)
        print(f"{'':<32}{'a round':>10} {'start':>8} {plural(experiment.rounds, 'round'):>12}", flush=True)
        best = measure(experiment, show_candidate)
        print(f"\n{lines_for_file(best)}")
