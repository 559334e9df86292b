"""What the pages count and compare among the stored figures of the GPU: benchmarks/results/gpu-h200.json.

The figures themselves are compared in test_figures.py.
"""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.gpu.goals import GOALS, verdicts
from tests.commands import ROOT

STORED = json.loads((ROOT / "benchmarks" / "results" / "gpu-h200.json").read_text())
FIGURES = STORED["figures"]
PERFORMANCE, RELIABILITY = (
    (ROOT / "docs" / "explanation" / f"{name}.md").read_text() for name in ("performance", "reliability")
)
README = (ROOT / "README.md").read_text()
WORKLOADS = ("w1", "w2", "w3")


def extremes(way):
    """Return the workloads with the shortest and the longest first round."""
    first = {workload: FIGURES[f"{workload}, {way}"]["first_round_ms"] for workload in WORKLOADS}
    return min(first, key=first.get), max(first, key=first.get)


def test_the_sentences_count_and_compare_the_stored_figures():
    (gpu,) = re.findall(r"## On a GPU\n(.*?)\n## ", PERFORMANCE, re.DOTALL)
    gpu = " ".join(gpu.split())
    for way in ("jax", "batched"):
        assert "figures/({}|{}), {}/first_round_ms".format(*extremes(way), way) in gpu
    ms, byzfl_ms = (FIGURES["rules, 20 x 21840"][key] for key in ("ms", "byzfl_ms"))
    ratios = {name: ms[name] / byzfl_ms[name] for name in byzfl_ms}
    worst = max(ratios, key=ratios.get)
    assert f"{sum(ratio > 1 for ratio in ratios.values())} of {len(ratios)} rules" in gpu
    assert f"(at most {ratios[worst]:.1f} times, `{worst}`)" in gpu
    faster = [w for w in WORKLOADS if FIGURES[f"{w}, jax"]["round_ms"] < FIGURES[f"{w}, batched"]["round_ms"]]
    assert f"The JAX program is faster than fedsim on {' and '.join(faster)}." in gpu


def test_only_the_first_round_of_w3_met_its_goal():
    assert [verdict.goal[:2] for verdict in verdicts(FIGURES) if verdict.met] == [("w3, batched", "first_round_ms")]
    text = f"Of {len(GOALS)} goals (`benchmarks/gpu/goals.py`), one was met."
    assert text in " ".join(PERFORMANCE.split())
    unknown = {verdict.goal.measurement for verdict in verdicts(FIGURES) if verdict.met is None}
    assert unknown == {"char_lstm, batched", "w3, processes"}
    assert "cannot be trained in stacks" in FIGURES["char_lstm, batched"]["error"]
    assert STORED["goals"] == json.loads(json.dumps([verdict.as_json() for verdict in verdicts(FIGURES)]))


def test_the_outcomes_are_those_of_the_stored_run():
    failed, passed = map(int, re.findall(r"\d+", STORED["outcomes"]))
    assert len(STORED["failures"]) == failed
    for page in (README, RELIABILITY):
        assert f"{passed:,} of {passed + failed:,}" in page
    assert f"lists the other {failed}" in RELIABILITY


@pytest.mark.parametrize("page", [README, PERFORMANCE, RELIABILITY])
def test_figures_come_with_card_commit_and_date(page):
    commit, card = STORED["fedsim"][:8], STORED["environment"]["device"]
    assert STORED["date"] == "2026-11-26"
    words = " ".join(page.split())
    assert re.search(rf"26 November 2026,? (?:with fedsim )?at commit {commit} on one {card}", words)
