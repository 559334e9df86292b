"""The pages show the stored figures of the GPU: benchmarks/results/gpu-h200.json."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.gpu.goals import verdicts
from tests.commands import ROOT

STORED = json.loads((ROOT / "benchmarks" / "results" / "gpu-h200.json").read_text())
FIGURES = STORED["figures"]
PERFORMANCE, RELIABILITY = (
    (ROOT / "docs" / "explanation" / f"{name}.md").read_text() for name in ("performance", "reliability")
)
README = (ROOT / "README.md").read_text()
WORKLOADS = ("w1", "w2", "w3")
FEDSIM = {
    "`batched`": "batched",
    "`batched` without CUDA graphs": "no graphs",
    "`processes`, 4 processes": "processes",
    "`serial`": "serial",
}
PROGRAMS = {
    "a JAX program: `jit` of `vmap` of `scan`": "jax",
    "one worker after another, steps captured as a CUDA graph": "captured loop",
    "`torch.func.vmap`": "vmap",
    "BlazeFL, 4 threads": "blazefl with 4 threads",
    "pfl": "pfl",
    "bare loop: one worker after another in PyTorch": "bare loop",
}


def shown(ms):
    """Return milliseconds as the pages show them."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def row(name, cells):
    return f"| {name} | {' | '.join(cells)} |"


def expected_rows():
    def rounds(way):
        return [shown(FIGURES[f"{workload}, {way}"]["round_ms"]) for workload in WORKLOADS]

    for name, engine in FEDSIM.items():
        yield PERFORMANCE, row(name, rounds(engine))
    yield PERFORMANCE, row("lower limit", [shown(FIGURES[f"{w}, limit"]["limit_ms"]) for w in WORKLOADS])
    for name, program in PROGRAMS.items():
        yield PERFORMANCE, row(name, rounds(program))


@pytest.mark.parametrize(("page", "expected"), [pytest.param(*each, id=each[1][:40]) for each in expected_rows()])
def test_the_tables_show_the_stored_times(page, expected):
    assert expected in page.splitlines()


def test_the_sentences_state_the_stored_figures():
    (gpu,) = re.findall(r"## On a GPU\n(.*?)\n## ", PERFORMANCE, re.DOTALL)
    gpu = " ".join(gpu.split())
    for model in ("resnet20", "gpt"):
        ms, loop_ms = (shown(FIGURES[f"{model}, {way}"]["round_ms"]) for way in ("batched", "bare loop"))
        assert re.search(rf"{ms} ms with `{model}` \((?:bare loop: )?{loop_ms}\)", gpu)
    first = [FIGURES[f"{w}, batched"]["first_round_ms"] for w in WORKLOADS]
    assert f"took {shown(min(first))} to {shown(max(first))} ms" in gpu
    assert f"all 1,000 workers took {shown(FIGURES['w3-1000, batched']['round_ms'])} ms" in gpu
    assert f"(48 runs) took {FIGURES['which_rule']['seconds']} s" in gpu
    assert f"Starting 4 processes took {FIGURES['start of 4 processes']['seconds']} s" in gpu
    for shape in ("20 x 21840", "100 x 1663370"):
        ms, byzfl_ms = (FIGURES[f"rules, {shape}"][key] for key in ("ms", "byzfl_ms"))
        ratios = {name: ms[name] / byzfl_ms[name] for name in byzfl_ms}
        worst = max(ratios, key=ratios.get)
        assert f"{sum(ratio > 1 for ratio in ratios.values())} of {len(ratios)} rules" in gpu
        assert f"(at most {ratios[worst]:.1f} times, `{worst}`)" in gpu
    compiled = [FIGURES[f"{w}, jax"]["first_round_ms"] / 1e3 for w in WORKLOADS]
    assert f"{min(compiled):.0f} to {max(compiled):.0f} s" in gpu
    faster = [w for w in WORKLOADS if FIGURES[f"{w}, jax"]["round_ms"] < FIGURES[f"{w}, batched"]["round_ms"]]
    assert f"The JAX program is faster than fedsim on {' and '.join(faster)}." in gpu


def test_only_the_first_round_of_w3_met_its_goal():
    assert [verdict.goal[:2] for verdict in verdicts(FIGURES) if verdict.met] == [("w3, batched", "first_round_ms")]
    measured = sum(verdict.met is not None for verdict in verdicts(FIGURES))
    assert f"Of {measured} measured GPU goals (" in PERFORMANCE
    assert "only one was met: at most 300 ms for the first round of w3." in PERFORMANCE
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
