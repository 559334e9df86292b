"""The page in a real browser: charts are drawn, controls work, and nothing is fetched."""

from __future__ import annotations

import json

import pytest

from fedsim.comparison.results import read_records
from fedsim.report import write_report
from tests.report.folders import add_to_rounds, invent_run, on_the_clock, write_points
from tests.report.test_page import evil_comparison, evil_run


@pytest.fixture
def show(browser, tmp_path):
    """Yield a function that opens the page of a folder. Afterwards, check that no page logged or fetched anything."""
    opened = []

    def open_page(folder, width=1200):
        path = write_report(folder, tmp_path / "page.html")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="light")
        context.set_default_timeout(60_000)  # for slow machines
        page = context.new_page()
        events = {"console": [], "errors": [], "requests": [], "dialogs": []}
        page.on("console", lambda message: events["console"].append(message.text))
        page.on("pageerror", lambda error: events["errors"].append(str(error)))
        page.on("request", lambda request: events["requests"].append(request.url))
        page.on("dialog", lambda dialog: (events["dialogs"].append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        opened.append((context, path, events))
        return page

    yield open_page
    for context, path, events in opened:
        context.close()
        assert [url for url in events.pop("requests") if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
        assert events == {"console": [], "errors": [], "dialogs": []}


def plotted(page, chart="curves-chart", named=False):
    """Return the visible traces of a chart, or only those in its legend, as (name, y)."""
    read = """([id, named]) => document.getElementById(id)._fullData
        .filter((t) => t.visible === true && (t.showlegend || !named)).map((t) => [t.name, Array.from(t._input.y)])"""
    return [tuple(trace) for trace in page.evaluate(read, [chart, named])]


def lines(page):
    """Return the names of the lines in the legend of the curves."""
    return dict(plotted(page, named=True))


def styles(page):
    """Return the name, colour and dashes of each line in the legend of the curves."""
    read = "document.getElementById('curves-chart')._fullData.filter((t) => t.visible === true && t.showlegend)"
    return page.evaluate(f"{read}.map(({{ name, line }}) => [name, line.color, line.dash])")


def layout(page, path, chart="curves-chart"):
    return page.evaluate(f"document.getElementById('{chart}')._fullLayout.{path}")


def wait_until(page, condition):
    """Wait for a condition without `page.wait_for_function`, whose eval the page's policy forbids."""
    for _ in range(200):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("the condition did not become true")


def test_the_controls_of_a_comparison_choose_what_is_drawn(show, tmp_path):
    """A comparison on the virtual clock whose accuracy is 1 / workers in round 2 and 0.5 before."""

    def make(path, point):
        invent_run(path, [0.5, 1 / point["workers"]], mode="clock")
        add_to_rounds(path, on_the_clock(10.0))
        add_to_rounds(path, lambda record: {"weights": [0.25, 0.75]})
        (path / "partition.json").write_text(json.dumps({"byzantine": [0] if point["seed"] else []}))

    axes = {"aggregate.rule": ["mean", "krum"], "attack.scale": [1, 2, 5], "workers": [2, 4, 8], "seed": [0, 1]}
    page = show(write_points(tmp_path / "comparison", axes, make))
    light = layout(page, "font.color")
    page.emulate_media(color_scheme="dark")
    wait_until(page, lambda: layout(page, "font.color") != light)

    curves = page.locator("#curves")
    assert layout(page, "xaxis.title.text") == "virtual seconds"
    curves.get_by_label("Against").select_option(label="rounds")
    assert layout(page, "xaxis.title.text") == "round"
    assert lines(page) == {"mean · 1 · 2": [0.5, 0.5], "krum · 1 · 2": [0.5, 0.5]}
    assert len(plotted(page)) == 2 * (1 + 2)  # a thin line for each of the two seeds
    curves.get_by_label("Spread").select_option(label="hidden")
    assert len(plotted(page)) == 2
    mean, krum = (color for _, color, _ in styles(page))
    assert mean != krum
    curves.get_by_label("workers").select_option(label="all")
    assert len(lines(page)) == 6
    assert len({(color, dash) for _, color, dash in styles(page)}) == 6
    curves.get_by_label("rule").select_option(label="krum")
    curves.get_by_label("workers").select_option(label="8")
    assert lines(page) == {"krum · 1 · 8": [0.5, 0.125]}
    assert styles(page) == [["krum · 1 · 8", krum, "solid"]]  # the colour that krum has beside mean
    curves.get_by_label("Smoothing").fill("0.5")
    assert lines(page)["krum · 1 · 8"][-1] == pytest.approx((0.5 * 0.5 + 0.125) / 1.5)
    assert len(plotted(page)) == 2  # the recorded values stay visible
    curves.get_by_label("Smoothing").fill("0")

    curves.get_by_label("Metric").select_option(label="Test and train loss")
    assert set(lines(page)) == {"krum · 1 · 8 · test", "krum · 1 · 8 · train"}
    curves.get_by_label("Values").select_option(label="logarithmic")
    assert layout(page, "yaxis.type") == "log"
    curves.locator(".legendtoggle").first.click()
    wait_until(page, lambda: set(lines(page)) == {"krum · 1 · 8 · train"})
    curves.get_by_label("Values").select_option(label="linear")
    assert set(lines(page)) == {"krum · 1 · 8 · train"}  # a hidden line stays hidden

    values = page.locator("#values")
    assert plotted(page, "values-chart", named=True) == [("mean · 2", [0.5] * 3), ("krum · 2", [0.5] * 3)]
    values.get_by_label("Spread").select_option(label="hidden")
    values.get_by_label("Against").select_option(label="workers")
    assert plotted(page, "values-chart")[0] == ("mean · 1", [0.5, 0.25, 0.125])
    values.locator("[name=axis1]").select_option(label="5")
    assert [name for name, _ in plotted(page, "values-chart")] == ["mean · 5", "krum · 5"]

    cells, heat_map = "document.getElementById('heat-map-chart').data[0].z", page.locator("#heat-map")
    heat_map.get_by_label("workers").select_option(label="4")
    assert page.evaluate(cells) == [[0.25] * 3] * 2
    heat_map.locator("[name=value]").select_option(label="Final test loss")
    assert layout(page, "coloraxis.colorbar.title.text", "heat-map-chart") == "final test loss"

    workers = "document.getElementById('weights-chart').data[0].y"
    assert page.evaluate(workers)[0] == "0"
    page.locator("#run select").select_option(label="krum · 5 · 8 · seed 1")
    assert page.evaluate(workers)[0] == "0 (B)"

    column = "[...document.querySelectorAll('#summary tbody tr')].map((row) => Number(row.cells[3].dataset.sort))"
    page.get_by_role("button", name="test accuracy", exact=True).click()
    falling = [0.5] * 6 + [0.25] * 6 + [0.125] * 6
    assert page.evaluate(column) == falling
    page.get_by_role("button", name="test accuracy", exact=True).click()
    assert page.evaluate(column) == falling[::-1]


@pytest.mark.slow
def test_all_charts_of_a_run_are_drawn_and_no_button_sends_data(show, run_folder):
    page = show(run_folder)
    for chart in ("curves-chart", "weights-chart", "partition-chart", "time-chart"):
        assert page.locator(f"#{chart} .main-svg").count() > 0, chart
    assert lines(page) == {"test accuracy": [record.test_accuracy for record in read_records(run_folder).history]}
    buttons = "[...document.querySelectorAll('#curves-chart .modebar-btn')].map((button) => button.dataset.title)"
    titles = [title.lower() for title in page.evaluate(buttons)]
    assert titles == ["download plot", "zoom", "pan", "reset axes"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "comparison"])
def test_the_page_fits_a_narrow_screen_and_its_controls_have_labels(show, run_folder, comparison_folder, kind):
    page = show(run_folder if kind == "run" else comparison_folder, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.name"))
    assert {"metric", "smoothing", "values"} <= reached
    controls = "[...document.querySelectorAll('select, input:not([type=hidden])')]"
    assert page.evaluate(f"{controls}.filter((control) => !control.labels.length).length") == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", [evil_run, evil_comparison])
def test_names_with_markup_are_shown_as_text(show, tmp_path, make):
    page = show(make(tmp_path / "evil"))
    assert page.locator("img").count() == 0
    for place in ("header", "#time-chart .legendtext"):
        assert "</script><script>alert(1)" in page.locator(place).first.text_content()
    page.locator("#curves-chart .drag").first.hover()  # the hover text contains the names


@pytest.mark.slow
def test_a_page_with_little_data_is_drawn(show, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"round": 7}\n')
    show(bare)

    def make(path, point):
        if point["x"] != "missing":
            invent_run(path, [0.5] * point["y"], rounds=2)

    page = show(write_points(tmp_path / "gaps", {"x": ["there", "missing"], "y": [1, 2], "z": ["u"]}, make))
    assert set(lines(page)) == {"there · 1 · u"}
