"""The page in a real browser: the charts are drawn, the controls work, and nothing is fetched."""

from __future__ import annotations

import shutil

import pytest

from fedsim.comparison.results import read_records
from fedsim.records.rows import rows_of
from fedsim.report import write_report
from tests.report.folders import invent_run, timed_grid, write_points
from tests.report.test_page import evil_grid, evil_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser found: {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """A function that opens the page about a folder. At the end of the test, no page may have logged or fetched."""
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
    """The visible traces of a chart, or those that its legend names, as (name, y)."""
    read = """([id, named]) => document.getElementById(id)._fullData
        .filter((t) => t.visible === true && (t.showlegend || !named)).map((t) => [t.name, Array.from(t._input.y)])"""
    return [tuple(trace) for trace in page.evaluate(read, [chart, named])]


def lines(page):
    """The lines that the legend of the curves names."""
    return dict(plotted(page, named=True))


def layout(page, path, chart="curves-chart"):
    return page.evaluate(f"document.getElementById('{chart}')._fullLayout.{path}")


def wait_until(page, condition):
    """Wait for a condition, without the eval of `page.wait_for_function`, which the page's policy forbids."""
    for _ in range(200):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("the condition did not become true")


def test_the_controls_of_a_run_change_its_curves(show, run_folder):
    page = show(run_folder)
    for chart in ("curves-chart", "weights-chart", "partition-chart", "time-chart"):
        assert page.locator(f"#{chart} .main-svg").count() > 0, chart
    accuracies = [record.test_accuracy for record in read_records(run_folder).history]
    assert lines(page) == {"test accuracy": accuracies}

    page.get_by_label("Smoothing").fill("0.5")
    weights = [0.125, 0.25, 0.5, 1]
    expected = sum(weight * value for weight, value in zip(weights, accuracies, strict=True)) / sum(weights)
    assert lines(page)["test accuracy"][-1] == pytest.approx(expected)
    assert len(plotted(page)) == 2  # the recorded values stay visible
    page.get_by_label("Smoothing").fill("0")

    page.get_by_label("Metric").select_option(label="Test and train loss")
    assert set(lines(page)) == {"test loss", "train loss"}
    page.get_by_label("Values").select_option(label="logarithmic")
    assert layout(page, "yaxis.type") == "log"
    page.locator("#curves-chart .legendtoggle").first.click()
    wait_until(page, lambda: set(lines(page)) == {"train loss"})
    page.get_by_label("Values").select_option(label="linear")
    assert set(lines(page)) == {"train loss"}  # a hidden line stays hidden

    buttons = "[...document.querySelectorAll('#curves-chart .modebar-btn')].map((button) => button.dataset.title)"
    titles = [title.lower() for title in page.evaluate(buttons)]
    assert titles == ["download plot", "zoom", "pan", "reset axes"]  # none sends data


def test_the_controls_of_a_grid_choose_lines_cells_and_runs(show, grid_folder):
    page = show(grid_folder)
    combined = rows_of(read_records(grid_folder).runs, ["aggregate.rule", "local.lr"])
    final = {each.place: each.score.mean for each in combined}
    assert {name: values[-1] for name, values in lines(page).items()} == {
        "mean · 0.01": pytest.approx(final[0, 0], abs=6e-5),
        "weighted_mean · 0.01": pytest.approx(final[1, 0], abs=6e-5),
    }
    assert len(plotted(page)) == 2 * (1 + 3)  # a thin line for each of three seeds
    page.get_by_label("Spread").select_option(label="hidden")
    assert len(plotted(page)) == 2
    curves = page.locator("#curves")
    curves.get_by_label("learning rate").select_option(label="all")
    assert len(lines(page)) == 4
    curves.get_by_label("rule").select_option(label="weighted_mean")
    assert set(lines(page)) == {"weighted_mean · 0.01", "weighted_mean · 0.1"}

    cells = "document.getElementById('heat-map-chart').data[0].z"
    assert page.evaluate(cells) == [[pytest.approx(final[row, column]) for column in (0, 1)] for row in (0, 1)]
    page.locator("#heat-map select").select_option(label="Final test loss")
    assert layout(page, "coloraxis.colorbar.title.text", "heat-map-chart") == "final test loss"

    workers = "document.getElementById('weights-chart').data[0].y"
    assert page.evaluate(workers)[0] == "0 (B)"
    page.locator("#run select").select_option(label="weighted_mean · 0.1 · seed 2")
    assert page.evaluate(workers)[0] == "0"

    column = "[...document.querySelectorAll('#summary tbody tr')].map((row) => Number(row.cells[2].dataset.sort))"
    page.get_by_role("button", name="test accuracy", exact=True).click()
    falling = page.evaluate(column)
    assert falling == sorted(falling, reverse=True)
    page.get_by_role("button", name="test accuracy", exact=True).click()
    assert page.evaluate(column) == falling[::-1]


def test_menus_choose_the_lines_over_the_values_of_a_setting(show, tmp_path):
    axes = {"aggregate.rule": ["mean", "krum"], "attack.scale": [1, 2, 5], "workers": [2, 4, 8], "seed": [0, 1]}
    page = show(write_points(tmp_path / "grid", axes, lambda path, point: invent_run(path, [1 / point["workers"]])))
    values = page.locator("#values")
    drawn = [("mean · 2", [0.5] * 3), ("krum · 2", [0.5] * 3)]
    assert [trace for trace in plotted(page, "values-chart") if trace[0] in dict(drawn)] == drawn
    assert len(plotted(page, "values-chart")) == 2 * (1 + 2)  # a thin line for each of two seeds
    values.get_by_label("Spread").select_option(label="hidden")
    values.locator(".legendtoggle").first.click()
    wait_until(page, lambda: plotted(page, "values-chart") == drawn[1:])
    values.get_by_label("Against").select_option(label="workers")
    assert plotted(page, "values-chart")[0] == ("mean · 1", [0.5, 0.25, 0.125])
    values.locator("[name=axis1]").select_option(label="5")
    assert [name for name, _ in plotted(page, "values-chart")] == ["mean · 5", "krum · 5"]


@pytest.mark.parametrize("kind", ["run", "grid"])
def test_the_page_fits_a_narrow_screen_and_its_controls_have_labels(show, run_folder, grid_folder, kind):
    page = show(run_folder if kind == "run" else grid_folder, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.name"))
    assert {"metric", "smoothing", "values"} <= reached
    controls = "[...document.querySelectorAll('select, input:not([type=hidden])')]"
    assert page.evaluate(f"{controls}.filter((control) => !control.labels.length).length") == 0


def test_a_comparison_on_the_clock_opens_with_virtual_seconds_and_follows_the_colour_scheme(show, tmp_path):
    page = show(timed_grid(tmp_path / "grid"))
    light = layout(page, "font.color")
    page.emulate_media(color_scheme="dark")
    wait_until(page, lambda: layout(page, "font.color") != light)
    assert layout(page, "xaxis.title.text") == "virtual seconds"
    page.get_by_label("Against").select_option(label="rounds")
    assert layout(page, "xaxis.title.text") == "round"
    assert lines(page)["sync"] == [0.2, 0.9, 0.95]


@pytest.mark.parametrize("make", [pytest.param(evil_run, marks=pytest.mark.slow), evil_grid])
def test_names_with_markup_are_shown_as_text(show, tmp_path, make):
    page = show(make(tmp_path / "evil"))
    assert page.locator("img").count() == 0
    for place in ("header", "#time-chart .legendtext"):
        assert "</script><script>alert(1)" in page.locator(place).first.text_content()
    page.locator("#curves-chart .drag").first.hover()  # the hover text has the names, too


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
