"""What each worker does in a round on the virtual clock: its records, its figure, its table and its report."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import fedsim
from fedsim.asynchronous.policies import policy
from fedsim.callbacks.display import Display
from fedsim.comparison.figures import DROPPED, TRAINS, UNFINISHED, WAITS
from fedsim.comparison.figures import timeline as timeline_of
from fedsim.errors import ExperimentError, RecordError
from fedsim.records.reader import Run
from fedsim.records.record import RaceRecord, RoundRecord, TimelineRecord
from fedsim.report.page import render
from fedsim.rounds.round_clock import RoundClock
from tests.asynchronous.simulated import delays_of, policy_of, simulate
from tests.device.agreement import settings_of


def timeline(run, round):
    """Simulate the next round, and return its record."""
    run.clock.dispatcher.start_round(round)
    run.clock.run_round(round)
    return run.clock.timeline


def test_cancelled_work_and_a_departure_by_hand():
    """Each update uses the first 2 of 3 gradients. Worker 2 (4 s a step) is cancelled until worker 0 leaves at 12.5 s.

    Round 1 ends with the 9th result at 9 s, and round 2 with the 18th at 24 s.
    """
    run = simulate(policy_of("k_sync", k=2), delays_of([1, 2, 4]), departures={0: 12.5})
    common = {"workers": [0, 1, 2], "staleness": [0] * 3}
    first = {"training": [5, 9, 9], "waiting": [4, 0, 0], "used": [5, 4, 0], "dropped": [0, 0, 4]}
    second = {"training": [1.5, 9, 15], "waiting": [2, 6, 0], "used": [1, 5, 3], "dropped": [1, 0, 2]}
    assert [timeline(run, round) for round in (1, 2)] == [common | first, common | second]
    assert timeline(run, 3).workers == [1, 2]


def test_work_counts_in_every_round_in_which_it_lasts():
    """Rounds of workers 0 and 1 take 3 s and 6 s. That of worker 2 takes 24 s, and ends in the fourth round."""
    run = simulate(policy_of("fedasync"), delays_of([1, 2, 8]))
    records = [timeline(run, round) for round in range(1, 5)]
    assert [record.training for record in records] == [[6, 6, 6]] * 4
    assert [record.used for record in records] == [[2, 1, 0]] * 3 + [[2, 1, 1]]
    assert records[-1].staleness == [0, 2, 12]
    assert [record.workers for record in records] == [[0, 1, 2]] * 4


@pytest.mark.parametrize("name", [registration.name for registration in policy if registration.name != "sync"])
def test_training_and_waiting_make_up_the_round(name):
    run = simulate(policy_of(**settings_of(policy.get(name))), delays_of([1.0, 1.3, 1.9, 3.2, 6.1], "lognormal"))
    begun = 0.0
    for round in range(1, 7):
        record = timeline(run, round)
        for training, waiting in zip(record.training, record.waiting, strict=True):
            assert training + waiting == pytest.approx(run.clock.now - begun, abs=1e-9)
        begun, stats = run.clock.now, run.clock.dispatcher.stats
        assert record.workers == [0, 1, 2, 3, 4]
        assert (sum(record.used), sum(record.dropped)) == (stats.staleness.total(), stats.cancelled.total())
        stale = sum(used * mean for used, mean in zip(record.used, record.staleness, strict=True))
        assert stale == pytest.approx(sum(tau * count for tau, count in stats.staleness.items()))


def test_synchronous_rounds_by_hand():
    """Worker 0 (1 s a step) takes three steps, and worker 1 (2 s) two, after each of which all wait for each other."""
    clock = RoundClock(delays_of([1.0, 2.0]))
    clock.pass_steps({0: [0, 0, 0], 1: [0, 0]})
    common = {"workers": [0, 1], "staleness": [0, 0]}
    assert clock.timeline([0, 1], [1]) == {
        **common,
        **{"training": [3, 4], "waiting": [2, 1], "used": [3, 1], "dropped": [0, 1]},
    }
    clock.pass_round({0: 3, 1: 1}, {0: [0], 1: [0]})
    assert clock.timeline([1, 0], []) == {
        **common,
        **{"training": [3, 2], "waiting": [0, 1], "used": [1, 1], "dropped": [0, 0]},
    }


# The figure


def made_up(rounds, **more):
    """Return a run whose rounds end at these times, and whose timelines have these columns by worker."""
    names = ("training", "waiting", "used", "dropped", "staleness")
    history = [
        RoundRecord(
            round=number,
            virtual_seconds=end,
            timeline=TimelineRecord(list(workers), *map(list, zip(*workers.values(), strict=True))),
        )
        for number, (end, workers) in enumerate(rounds, start=1)
    ]
    assert [*TimelineRecord.__dataclass_fields__][1:] == list(names)
    return Run(None, {"name": "made-up", **more}, history)


def test_each_cell_is_divided_by_what_the_time_led_to():
    """Worker 1's first result has a staleness of 6 and arrives in round 2. Its last work has no result."""
    shown = timeline_of(
        made_up(
            [
                (10.0, {0: (8, 2, 3, 1, 2), 1: (10, 0, 0, 0, 0)}),
                (14.0, {0: (4, 0, 1, 0, 0), 1: (4, 0, 1, 0, 6)}),
                (15.0, {1: (1, 0, 0, 0, 0)}),
            ]
        )
    )
    spells = sorted((spell.row, spell.start, spell.does, spell.length, spell.staleness) for spell in shown.spells)
    assert spells == [
        *[(0, 0, TRAINS, 6, 2), (0, 6, DROPPED, 2, 0), (0, 8, WAITS, 2, 0), (0, 10, TRAINS, 4, 0)],
        *[(1, 0, TRAINS, 10, 6), (1, 10, TRAINS, 4, 6), (1, 14, UNFINISHED, 1, 0)],
    ]
    assert shown.table == [["0", "80 %", "13.3 %", "4", "1", "1.5"], ["1", "100 %", "0 %", "1", "0", "6"]]


@pytest.mark.parametrize(("workers", "attackers"), [(41, 4), (100, 0), (1000, 100)])
def test_more_workers_share_at_most_40_rows_by_speed(workers, attackers, monkeypatch):
    """Worker i takes 1 + i seconds per result."""
    byzantine = frozenset(range(0, 10 * attackers, 10))
    monkeypatch.setattr(Run, "byzantine", byzantine)
    spent = {worker: (1.0 + worker, workers - 1.0 - worker, 1, 0, 0) for worker in range(workers)}
    shown = timeline_of(made_up([(float(workers), spent)] * 100))
    assert 20 <= len(shown.table) <= 40
    assert len({(spell.row, spell.text) for spell in shown.spells if spell.does == TRAINS}) <= 40 * 48
    assert sum(int(row[3].replace(",", "")) for row in shown.table) == 100 * workers
    speeds = [float(row[0].split()[0]) for row in shown.table]
    assert speeds == sorted(speeds)
    assert sum(row[0].endswith(" (B)") for row in shown.table) == -(-len(byzantine) // -(-workers // 39))


CLOCK = {
    "model": "tests.models:Normalised",
    "data": {"name": "tests.components:tiny", "train": 200},
    "engine": "serial",
}
CLOCK |= {"engine": "serial", "mode": "clock", "rounds": 2, "local": {"batch_size": 4, "steps": 2}}
CLOCK |= {"clock": {"slowdown": {"name": "linear", "ratio": 4}, "noise": "lognormal"}}
KINDS = {
    "dropped": ({"policy": {"name": "k_sync", "k": 2}, "workers": 4}, [TRAINS, DROPPED, WAITS], 4),
    "stale": ({"policy": "fedasync", "workers": 4}, [TRAINS, UNFINISHED], 4),
    "synchronous": ({"workers": 4, "policy": "sync"}, [TRAINS, WAITS], 4),
    "drawn workers": ({"policy": {"name": "fedbuff", "k": 2}, "workers": 50, "cohort": 3}, [TRAINS, UNFINISHED], None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_figure_the_table_and_the_report_of_a_run(kind, cli, tmp_path):
    tables, shown, rows = KINDS[kind]
    result = fedsim.run({**CLOCK, **tables}, tmp_path / "run", allow_imports=True)
    figure = fedsim.plot(result, kind="timeline", style="screen")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == shown
    done = cli("plot", tmp_path / "run", "--kind", "timeline", "--out", tmp_path / "figure.svg")
    assert done.exit_code == 0, done.stderr
    head, *lines, caption, _ = done.stdout.splitlines()
    assert head.split() == ["workers", "trains", "waits", "used", "dropped", "staleness"]
    assert len(lines) == len(figure.axes[0].get_yticks())
    assert rows in (None, len(lines))
    assert caption.startswith("Workers over virtual time. ")
    html = render(tmp_path / "run")
    data = json.loads(html.partition('id="data">')[2].partition("</script>")[0])
    (chart,) = data["charts"]["timeline-chart"]
    assert [trace["name"] for trace in chart["data"] if trace["type"] == "bar"] == shown
    assert '<h2 id="timeline-title">Workers over virtual time</h2>' in html


def test_the_lost_updates_of_a_race(tmp_path, capsys):
    races = [RaceRecord(updates=100, updates_lost=float(lost)) for lost in range(60)]
    run = Run(None, {"name": "race"}, [RoundRecord(round=k, race=race) for k, race in enumerate(races, start=1)])
    figure = fedsim.plot(run, kind="timeline", out=tmp_path / "race.png")
    assert figure.get_label() == "Lost updates of a race. race: the numbers of lost updates are estimates."
    shown = timeline_of(run)
    assert len(shown.table) == 30
    assert shown.table[1] == ["rounds 3 to 4", "200", "5", "2.5 %"]
    Display(fedsim.Experiment(), None, quiet=False).on_end(SimpleNamespace(history=run.history, stopped=None))
    assert capsys.readouterr().out == "1,770 of 6,000 updates were lost (estimated), 29.50 %\n"


def test_runs_without_a_timeline_are_refused(tiny_experiment, tmp_path):
    results = [fedsim.run({**tiny_experiment, "seed": seed}, tmp_path / str(seed)) for seed in (0, 1)]
    with pytest.raises(ExperimentError, match="0 has neither a virtual clock nor lost updates; run it with mode=clock"):
        fedsim.plot(results[0], kind="timeline")
    with pytest.raises(ExperimentError, match="shows a single run, not 2; name the folder of one run"):
        fedsim.plot(results, kind="timeline")
    metrics = tmp_path / "0" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"timeline": null', '"timeline": {"workers": [1]}', 1))
    with pytest.raises(RecordError, match="line 1: is damaged: timeline: the lists of the timeline differ in length"):
        Run.read(tmp_path / "0")
