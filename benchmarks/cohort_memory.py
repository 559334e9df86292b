"""Memory of large cohorts: computed before a run, and the peak of one round with fewer workers on random tokens.

The settings are those of pfl-research for StackOverflow and for language models. The computed memory is that of
fedsim's check before the first round (`fedsim.runs.memory.memory_needed`), with two processes and without
checkpoints. It does not count libraries, data and activations. The peak is the proportional set size of all processes.

    python benchmarks/cohort_memory.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import CPU, report
from memory import peak_pss

from fedsim.config.load import load_experiment
from fedsim.core.randomness import torch_generator
from fedsim.core.rows import Layout
from fedsim.data import TensorData
from fedsim.runs.memory import memory_needed
from fedsim.runs.setup import task_of

SAMPLES, LENGTH = 200, 8
MODELS = {
    "StackOverflow": ("model.classes=10004", "model.width=96", "model.layers=9", "model.context=20"),
    "LLM": ("model.classes=50257", "model.width=768", "model.layers=12", "model.heads=12", "model.context=1024"),
}
COHORTS = (400, 1_000, 5_000)
TOKENS = (
    *("model.name=gpt", "task=next_token", "data.name=cohort_memory:tokens", "local.steps=1", "local.batch_size=1"),
    *("partition=virtual", "partition.samples=1"),
)
FEW = {  # settings of the measured round
    "StackOverflow": ("workers=1000", "engine=processes", "processes=2"),
    "LLM": ("workers=8", "engine=serial", "checkpoint.every=0"),
}


def tokens(root: Path) -> tuple[TensorData, TensorData]:
    """Return random tokens, and the next tokens as targets."""
    text = torch.randint(0, 10_004, (SAMPLES + 2, LENGTH + 1), generator=torch_generator(0, "tokens"))
    parts = text[:SAMPLES], text[SAMPLES:]
    train, test = (TensorData(part[:, :-1].clone(), part[:, 1:].clone(), dtype=torch.int64) for part in parts)
    return train, test


def computed(words: tuple[str, ...], cohort: int) -> tuple[int, int, int]:
    """Return the number of parameters, and the bytes that a run needs with stored updates and with their sums."""
    experiment = load_experiment(None, [*TOKENS, *words, f"workers={cohort}"])
    task = task_of(experiment, CPU)
    layout = Layout.of(task.new_module())
    assert task.streams
    stored, added = (
        sum(memory_needed(way, layout, 2, stacked=False, copies=1).values())
        for way in (replace(task, streams=False), task)
    )
    return layout.d, stored, added


def gigabytes(nbytes: float) -> float:
    return round(nbytes / 1e9, 4)


def main() -> None:
    figures: dict[str, Any] = {}
    for name, words in MODELS.items():
        cohorts = {cohort: computed(words, cohort) for cohort in COHORTS}
        few = [*TOKENS, *words, *FEW[name], "rounds=1"]
        figures[name] = {
            "parameters": cohorts[COHORTS[0]][0],
            "computed_stored_gb": {cohort: gigabytes(stored) for cohort, (_, stored, _) in cohorts.items()},
            "computed_added_up_gb": {cohort: gigabytes(added) for cohort, (_, _, added) in cohorts.items()},
            "measured": " ".join(FEW[name]),
            "peak_gb": gigabytes(1e6 * peak_pss(*few)),
        }
    report("cohort_memory", **figures)


if __name__ == "__main__":
    main()
