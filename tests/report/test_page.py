from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import sys
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from fedsim.cli.main import app
from fedsim.errors import MissingPackageError
from fedsim.records.worker_results import WorkerResults, workers_csv
from fedsim.report import write_report
from fedsim.report.page import to_script_json
from tests.report.folders import add_to_rounds, invent_run, race_of, write_points

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'`${alert(3)}<!--"


class Elements(HTMLParser):
    """The parts of a page: (tag, attributes) of every element, all texts and all scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.scripts: dict[str, list[str]] = {}
        self._script: str | None = None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag == "script":
            self._script = dict(attributes).get("type", "script")
            self.scripts.setdefault(self._script, []).append("")

    def handle_endtag(self, tag):
        if tag == "script":
            self._script = None

    def handle_data(self, data):
        if self._script:
            self.scripts[self._script][-1] += data
        else:
            self.texts.append(data)

    def count(self, tag):
        return sum(name == tag for name, _ in self.found)


def page_of(folder):
    return Elements(write_report(folder).read_text(encoding="utf-8"))


def test_the_page_of_a_run_shows_its_settings_and_results(run_folder, tmp_path):
    path = write_report(run_folder, tmp_path / "page.html")
    assert path == tmp_path / "page.html"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    elements = Elements(path.read_text())
    text = " ".join(elements.texts)
    last = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    for expected in ("tried", "logistic", "mnist5k", f"{last['test_accuracy']:.4f}", "local.lr", "torch"):
        assert expected in text
    assert elements.count("tr") == 1 + 4
    charts = json.loads(elements.scripts["application/json"][0])["charts"]
    assert set(charts) == {"curves-chart", "time-chart", "weights-chart", "partition-chart"}
    links = [value for _, a in elements.found for key, value in a.items() if key in ("src", "href")]
    assert all(link.startswith(("#", "data:")) for link in links)


def test_the_page_of_a_comparison_opens_with_the_best_of_each_group(tmp_path):
    """The sentence uses the page's labels and names. The first rule leads by 0.1 in both seeds."""

    def make(path, point):
        invent_run(path, [0.7 - 0.1 * (point["aggregate"] == "mean") + 0.1 * point["seed"]])

    axes = {"aggregate": [["nnm", "median"], "mean"], "attack.name": ["none", "ipm"], "seed": [0, 1]}
    page = html.unescape(write_report(write_points(tmp_path, axes, make)).read_text())
    assert "<p>Best rule by test accuracy, for each attack:</p>" in page
    line = "nnm + median 0.7500 (0.7000, 0.8000); the next, mean, is 0.1000 (0.1000, 0.1000) lower"
    assert [f"<li>{attack}: {line}</li>" in page for attack in axes["attack.name"]] == [True, True]
    assert Elements(page).count("tr") == 1 + 4
    assert page.count('<span class="mark">★</span>') == 2


def test_the_page_is_written_into_the_folder_by_default_and_replaces_an_older_one(fresh_run):
    (fresh_run / "report.html").write_text("old")
    before = {path.name for path in fresh_run.iterdir()}
    assert write_report(str(fresh_run)) == fresh_run / "report.html"
    assert (fresh_run / "report.html").stat().st_size > 1_000_000
    assert {path.name for path in fresh_run.iterdir()} == before


def evil_run(folder):
    invent_run(folder, [0.1, 0.2], name=EVIL, device=EVIL)
    (folder / "environment.json").write_text(json.dumps({"device": EVIL, EVIL: {EVIL: [EVIL]}}))
    add_to_rounds(folder, lambda record: {"seconds": {EVIL: 1.0, "__proto__": 2.0}, "weights": [0, 1]})
    return folder


def evil_comparison(folder):
    axes = {EVIL: [EVIL, {EVIL: EVIL}, 1], "__proto__": ["__proto__", EVIL], "seed": [0, 1]}
    return write_points(folder, axes, lambda path, point: evil_run(path), name=EVIL)


@pytest.mark.parametrize("make", [evil_run, evil_comparison])
def test_markup_in_a_file_becomes_text(tmp_path, fresh_run, make):
    elements = page_of(make(tmp_path / "evil"))
    harmless = page_of(fresh_run)
    assert elements.count("script") == harmless.count("script")
    assert elements.count("img") == 0
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    assert elements.scripts["script"] == harmless.scripts["script"]
    assert EVIL in " ".join(elements.texts)
    charts = json.loads(elements.scripts["application/json"][0])["charts"]
    assert any(EVIL in html.unescape(str(value)) for value in strings_in(charts))


def strings_in(value):
    if isinstance(value, dict):
        return [text for item in value.items() for text in strings_in(list(item))]
    if isinstance(value, list):
        return [text for item in value for text in strings_in(item)]
    return [value]


def test_json_in_a_script_holds_no_markup():
    data = {"a": "</script><!--<script>&\u2028", "b": [1.5, None]}
    text = to_script_json(data)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == data
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_script_json(float("nan"))


def test_the_content_security_policy_allows_only_the_scripts_of_the_page(fresh_run):
    elements = page_of(fresh_run)
    (policy,) = [a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    hashes = re.findall(r"'sha256-([^']+)'", policy)
    scripts = elements.scripts["script"]
    assert hashes == [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]


def test_text_that_utf8_cannot_encode_is_replaced(fresh_run):
    (fresh_run / "environment.json").write_text('{"device": "\\ud800"}')
    assert "?" in " ".join(page_of(fresh_run).texts)


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_a_missing_package_raises_an_error_with_the_command_to_install_it(fresh_run, monkeypatch, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError) as caught:
        write_report(fresh_run)
    assert str(caught.value) == (
        f"a report needs the package {package}, which is not installed: pip install plotly jinja2"
    )
    assert not (fresh_run / "report.html").exists()


def test_the_command_prints_the_path_of_the_page_or_an_error(fresh_run, tmp_path):
    done = CliRunner().invoke(app, ["report", str(fresh_run), "--out", str(tmp_path / "x.html")])
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'x.html'}\n")
    assert (tmp_path / "x.html").is_file()
    unnamed = CliRunner().invoke(app, ["report", str(fresh_run), "--out", ""])
    assert (unnamed.exit_code, unnamed.stderr) == (2, "error: .: is a folder; give the path of a file\n")
    failed = CliRunner().invoke(app, ["report", str(fresh_run), "--out", str(tmp_path / "nowhere" / "x.html")])
    assert failed.exit_code == 2
    assert failed.stderr == f"error: {tmp_path}/nowhere/x.html: cannot be written: No such file or directory\n"


def test_the_page_of_a_run_says_that_attackers_are_drawn_in_each_round_and_that_it_diverged(tmp_path):
    folder = invent_run(tmp_path / "run", [0.5], rounds=3)
    with (folder / "experiment.toml").open("a") as file:
        file.write("\n[attack]\nresample = true\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 2, "test_accuracy": 0.5, "diverged": "an update holds NaN"}) + "\n")
    page = write_report(folder).read_text()
    assert "The Byzantine workers change from round to round" in page
    assert "Stopped after round 2 of 3: diverged in round 2: an update holds NaN" in page


def test_the_page_of_a_race_says_what_is_a_mean_and_what_a_sum_over_its_repetitions(tmp_path):
    folder = invent_run(tmp_path / "run", [0.5, 0.6], mode="race", policy="hogwild")
    add_to_rounds(folder, race_of(2, updates=40, lost=10.0))
    text = " ".join(page_of(folder).texts)
    assert "A race is not repeatable: numbers are means over 2 repetitions, and the model is that of the first" in text
    assert "(0.5900, 0.6100), 2 repetitions" in text
    assert "per round, all repetitions" in text
    assert "the numbers of lost updates are estimates, summed over 2 repetitions" in text
    assert "25 %" in text
    assert "rule" not in text


def test_the_page_of_a_comparison_of_races_has_the_lost_updates(tmp_path):
    def make(path, point):
        invent_run(path, [0.5, 0.6], mode="race", policy=point["policy"])
        add_to_rounds(path, race_of(1, updates=40, lost=10.0 * (point["policy"] == "hogwild")))

    folder = write_points(tmp_path / "races", {"policy": ["hogwild", "locked"], "seed": [0, 1]}, make)
    text = " ".join(page_of(folder).texts)
    assert text.count("A race is not repeatable: another run with the same seed has different results.") == 1
    assert re.search(r"updates lost.*25 %.*0 %", text, re.DOTALL)
    assert "Weight of each worker" not in text


def test_the_page_of_a_regression_does_not_speak_of_accuracy(tmp_path):
    folder = invent_run(tmp_path / "run", [0.5, 0.7], task="regression")
    add_to_rounds(folder, lambda record: {"test_accuracy": None, "metrics": {"r2": 0.5}})
    (folder / "partition.json").write_text(json.dumps({"counts": [[4], [8]]}))
    results = WorkerResults.of(2, {0: 4, 1: 8}, {0: {"global": (0.9, None)}, 1: {"global": (0.3, None)}})
    (folder / "workers-00002.csv").write_text(workers_csv(results))
    text = " ".join(page_of(folder).texts)
    assert "accuracy" not in text.lower()
    assert {"final loss", "best loss", "worker loss"} <= set(re.findall(r"(?:final|best|worker) loss", text))
    assert "The loss of each model on the test samples of single workers" in text
