"""The page in a real browser: it draws, it fetches nothing, nothing goes wrong in it, and its controls work."""

from __future__ import annotations

import json
import shutil

import pytest

from fedsim.intervals import estimate
from fedsim.report import write_report
from fedsim.report.comparison import combinations, compare
from fedsim.report.reading import read_records
from tests.report.folders import add_to_rounds, invent_run, on_the_clock, write_points
from tests.report.test_figures import timed_grid
from tests.report.test_page import evil_grid, evil_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs a browser, and finds none of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page about a folder; at the end of the test, nothing may have gone wrong in any that was opened."""
    opened = []

    def open_page(folder, width=1200, scheme="light"):
        path = write_report(folder, tmp_path / "page.html")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(60_000)  # a machine may be busy
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


def plotted(page, chart="curves-chart"):
    """The traces that a chart shows, as (name, y)."""
    traces = page.evaluate(
        """(id) => document.getElementById(id).data.map((trace) => [trace.name ?? "", Array.from(trace.y)])""", chart
    )
    return [(name, values) for name, values in traces]


def named(page):
    return {name: values for name, values in plotted(page) if name}


def smoothed(values, weight):
    """The mean of the values so far, each counting `weight` times the one after it."""
    return [
        sum(weight ** (last - k) * values[k] for k in range(last + 1)) / sum(weight**k for k in range(last + 1))
        for last in range(len(values))
    ]


def set_slider(page, value):
    page.locator("#curves-smoothing").fill(str(value))


def records_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_of_a_virtual_population_the_page_says_whom_it_shows(show, tmp_path):
    folder = invent_run(tmp_path / "run", [0.5, 0.6])
    sample = {"population": 10**6, "workers": [70, 9000], "counts": [[1, 2], [3, 4]], "byzantine": [9000]}
    (folder / "partition.json").write_text(json.dumps(sample))
    page = show(folder)
    assert page.evaluate("document.getElementById('partition-chart').data[0].x") == ["70", "9000 (B)"]
    assert page.locator("#partition-sample").inner_text() == "These are 2 of the 1,000,000 workers, drawn at random."


def test_the_page_of_a_run_draws_every_chart(show, run_folder):
    page = show(run_folder)
    for chart in ("curves-chart", "weights-chart", "partition-chart", "time-chart"):
        assert page.locator(f"#{chart} .main-svg").count() > 0, chart
    weights = page.evaluate("document.getElementById('weights-chart').data[0].z")
    assert weights[1] == [0] * 4  # the Byzantine worker's
    assert weights[0] == pytest.approx([0.25] * 4)
    assert page.evaluate("document.getElementById('weights-chart').data[1].z[1]") == [1] * 4  # screened out
    assert page.evaluate("document.getElementById('weights-chart').data[0].y")[:2] == ["0", "1 (B)"]
    buttons = "[...document.querySelectorAll('#curves-chart .modebar-btn')].map((button) => button.dataset.title)"
    titles = [title.lower() for title in page.evaluate(buttons)]
    assert titles == ["download plot", "zoom", "pan", "reset axes"]  # none sends anything
    with page.expect_download() as download:
        page.locator("#curves-chart .modebar-btn").first.click()
    assert download.value.suggested_filename == "curves-chart.svg"
    records = records_of(run_folder)
    times = plotted(page, "time-chart")
    assert [name for name, _ in times] == ["pull down", "train", "aggregate", "test"]
    assert times[1][1] == pytest.approx([record["seconds"]["train"] for record in records], rel=1e-5)


def test_the_controls_of_a_run_change_what_is_plotted(show, run_folder):
    page = show(run_folder)
    records = records_of(run_folder)
    accuracies = [record["test_accuracy"] for record in records]
    assert named(page) == {"test accuracy": accuracies}

    set_slider(page, 0.6)
    assert named(page)["test accuracy"] == pytest.approx(smoothed(accuracies, 0.6))
    assert ("", accuracies) in plotted(page)  # the values themselves stay to be seen behind
    assert page.locator("#curves-smoothing-value").text_content() == "0.6"
    set_slider(page, 0)

    page.get_by_label("Metric").select_option(label="Test and train loss")
    assert set(named(page)) == {"test loss", "train loss"}
    assert named(page)["train loss"] == pytest.approx([record["train_loss"] for record in records], rel=1e-5)

    page.get_by_label("Log scale").check()
    assert page.evaluate("document.getElementById('curves-chart').layout.yaxis.type") == "log"
    page.get_by_label("Log scale").uncheck()

    page.get_by_label("test loss", exact=True).uncheck()
    assert set(named(page)) == {"train loss"}
    page.get_by_role("button", name="None").click()
    assert plotted(page) == []
    page.get_by_role("button", name="All").click()
    assert set(named(page)) == {"test loss", "train loss"}

    for metric in ("Test loss", "Train loss", "Attack success", "Seconds", "Bytes"):
        page.get_by_label("Metric").select_option(label=metric)
        assert metric.lower() in named(page)


def test_every_control_can_be_reached_and_used_by_keyboard(show, run_folder):
    page = show(run_folder)
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.closest('[id]')?.id"))
    assert {"curves-metric", "curves-smoothing", "curves-log", "curves-all", "curves-none", "curves-legend"} <= reached
    before = named(page)
    page.locator("#curves-smoothing").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert named(page) != before
    page.locator("#curves-legend input").first.focus()
    page.keyboard.press("Space")
    assert plotted(page) == []
    page.keyboard.press("Space")  # the box keeps the focus while the chart is drawn anew
    assert len(plotted(page)) == 2
    unlabelled = "[...document.querySelectorAll('input, select')].filter((control) => !control.labels.length).length"
    assert page.evaluate(unlabelled) == 0


def test_the_controls_of_a_grid_change_what_is_plotted(show, grid_folder):
    page = show(grid_folder)
    lines = compare(combinations(read_records(grid_folder)))
    final = {line.combination.place: line.accuracy for line in lines}
    assert set(named(page)) == {"mean", "weighted_mean"}
    assert named(page)["mean"][-1] == pytest.approx(final[0, 0].mean, rel=1e-5)

    page.locator("#curves [data-axis='1']").select_option(label="0.1")
    assert named(page)["weighted_mean"][-1] == pytest.approx(final[1, 1].mean, rel=1e-5)
    seeds = [values for name, values in plotted(page) if not name]
    assert len(seeds) == 2 * 3, "a thin line for each of three seeds"
    assert sum(values[-1] for values in seeds[:3]) / 3 == pytest.approx(final[0, 1].mean, rel=1e-5)
    page.get_by_label("Spread").uncheck()
    assert len(plotted(page)) == 2

    page.locator("#curves [data-axis='1']").select_option(label="all")
    assert set(named(page)) == {f"{rule} · {lr}" for rule in ("mean", "weighted_mean") for lr in ("0.01", "0.1")}
    page.get_by_label("Colour by").select_option(label="learning rate")
    assert set(named(page)) == {"0.01", "0.1"}
    page.locator("#curves [data-axis='0']").select_option(label="weighted_mean")
    assert named(page)["0.1"][-1] == pytest.approx(final[1, 1].mean, rel=1e-5)

    before = named(page)
    set_slider(page, 0.5)
    assert named(page)["0.1"] == pytest.approx(smoothed(before["0.1"], 0.5))
    page.get_by_label("Metric").select_option(label="Train loss")
    assert named(page)["0.1"] != before["0.1"]
    page.get_by_label("Log scale").check()
    assert page.evaluate("document.getElementById('curves-chart').layout.yaxis.type") == "log"
    page.get_by_role("button", name="None").click()
    assert plotted(page) == []
    page.get_by_label("0.01", exact=True).check()
    assert set(named(page)) == {"0.01"}
    page.get_by_role("button", name="All").click()
    assert set(named(page)) == {"0.01", "0.1"}


def test_the_pictures_of_a_grid_and_the_order_of_its_table(show, grid_folder):
    page = show(grid_folder)
    lines = compare(combinations(read_records(grid_folder)))
    final = {line.combination.place: line.accuracy.mean for line in lines}
    cells = page.evaluate("document.getElementById('heat-map-chart').data[0].z")
    assert cells == [[pytest.approx(final[row, column], rel=1e-5) for column in (0, 1)] for row in (0, 1)]
    page.get_by_label("Value").select_option(label="Final test loss")
    assert page.evaluate("document.getElementById('heat-map-chart').data[0].z") != cells
    assert page.evaluate("document.getElementById('time-chart').data[1].x.length") == 4

    assert page.evaluate("document.getElementById('weights-chart').data[0].y")[0] == "0 (B)"
    page.locator("#run-choice").select_option(label="weighted_mean · 0.1 · seed 2")
    assert page.evaluate("document.getElementById('weights-chart').data[0].y")[0] == "0"

    column = "[...document.querySelectorAll('#summary tbody tr')].map((row) => Number(row.cells[2].dataset.sort))"
    page.get_by_role("button", name="accuracy", exact=True).click()
    falling = page.evaluate(column)
    assert falling == sorted(falling, reverse=True)
    page.get_by_role("button", name="accuracy", exact=True).click()
    assert page.evaluate(column) == falling[::-1]


@pytest.mark.parametrize("kind", ["run", "grid"])
def test_nothing_sticks_out_of_a_narrow_screen_and_colours_follow_the_scheme(show, run_folder, grid_folder, kind):
    page = show(run_folder if kind == "run" else grid_folder, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    colour = "document.getElementById('curves-chart').layout.font.color"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    for _ in range(50):  # wait_for_function would need eval, which the page's policy forbids
        if page.evaluate(colour) != light:
            break
        page.wait_for_timeout(50)
    assert page.evaluate(colour) != light


@pytest.mark.parametrize("make", [evil_run, evil_grid])
def test_a_strangers_names_are_shown_and_do_nothing(show, tmp_path, make):
    page = show(make(tmp_path / "evil"))
    assert "</script><script>alert(1)" in page.locator("header").text_content()
    assert page.locator("img").count() == 0
    drawn = page.locator("#time-chart .legendtext").first.text_content()
    assert drawn.startswith("</script><script>alert(1)")
    page.locator("#curves-chart .drag").first.hover()  # the hover text has the names, too
    page.get_by_label("Log scale").check()


def test_little_data_is_drawn_as_well(show, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"round": 7}\n')
    show(bare)
    show(write_points(tmp_path / "seeds", {"seed": [0, 1]}, lambda path, _: invent_run(path, [0.5])))

    def unlike(path, point):
        if point["x"] != "missing":
            invent_run(path, [0.5] * point["y"], rounds=2)

    page = show(write_points(tmp_path / "gaps", {"x": ["there", "missing"], "y": [1, 2], "z": ["u"]}, unlike))
    assert set(named(page)) == {"there", "missing"}


def points(page):
    """The lines of the curves, as {name: [(x, y), ...]}."""
    read = """() => document.getElementById("curves-chart").data
        .filter((trace) => trace.name).map((trace) => [trace.name, Array.from(trace.x), Array.from(trace.y)])"""
    return {name: list(zip(x, y, strict=True)) for name, x, y in page.evaluate(read)}


def test_curves_are_drawn_against_virtual_seconds_and_updates(show, tmp_path):
    folder = invent_run(tmp_path / "run", [0.5, 0.7, 0.6], mode="clock", policy="asgd")
    add_to_rounds(folder, on_the_clock(2.5))
    page = show(folder)
    title = "document.getElementById('curves-chart').layout.xaxis.title.text"
    assert page.evaluate(title) == "virtual seconds"
    assert points(page)["test accuracy"] == [(2.5, 0.5), (5, 0.7), (7.5, 0.6)]
    page.get_by_label("Against").select_option(label="rounds")
    assert (page.evaluate(title), points(page)["test accuracy"][0]) == ("round", (1, 0.5))
    page.get_by_label("Against").select_option(label="updates")
    page.get_by_label("Metric").select_option(label="Mean staleness")
    assert points(page)["mean staleness"] == [(2, 1.5), (4, 1.5), (6, 1.5)]


def test_a_comparison_on_the_clock_opens_with_virtual_seconds_and_interpolates(show, tmp_path):
    page = show(timed_grid(tmp_path / "grid"))
    assert page.evaluate("document.getElementById('curves-chart').layout.xaxis.title.text") == "virtual seconds"
    found = points(page)
    assert found["sync"] == [(10, 0.2), (20, 0.9), (30, 0.95)]
    # seed 0 has 0.3, 0.5, 0.6 at 1, 2, 3 s, seed 1 has 0.3, 0.5, 0.9 at 2, 4, 6 s; both are known from 2 to 3 s
    assert found["asgd"] == [(2, pytest.approx((0.5 + 0.3) / 2)), (3, pytest.approx((0.6 + 0.4) / 2))]
    row = page.locator("#summary tbody tr").nth(1).inner_text().split("\t")
    assert row[3:5] == ["4.50 (3.00, 6.00)", "6.00 (1 of 2)"]
    assert page.evaluate("document.getElementById('curves-chart').layout.xaxis.type") == "linear"
    assert page.locator("#summary").inner_text().count("not reached") == 0


def made_up_grid(folder, axes, final):
    """A grid whose runs of two rounds end with the accuracy `final(point)`."""
    return write_points(folder, axes, lambda path, point: invent_run(path, [0.1, final(point)]))


def test_four_seeds_have_a_band_within_what_an_accuracy_can_be(show, tmp_path):
    finals = [0.2, 0.9, 0.95, 1.0]
    page = show(made_up_grid(tmp_path / "grid", {"seed": [0, 1, 2, 3]}, lambda point: finals[point["seed"]]))
    (band,) = [values for name, values in plotted(page) if not name]
    interval = estimate(finals)
    assert band == pytest.approx([0.1, 1.0, interval.mean - interval.half_width, 0.1])


def test_the_spread_of_many_lines_is_hidden_until_asked_for(show, tmp_path):
    axes = {"aggregate.rule": ["mean", "median", "krum"], "attack.name": ["none", "alie"], "seed": [0, 1]}
    page = show(made_up_grid(tmp_path / "grid", axes, lambda point: 0.5 + 0.1 * point["seed"]))
    assert len(plotted(page)) == 3 * (1 + 2)
    page.locator("#curves [data-axis='1']").select_option(label="all")
    assert len(plotted(page)) == 6
    assert not page.get_by_label("Spread").is_checked()
    page.get_by_label("Spread").check()
    assert len(plotted(page)) == 6 * (1 + 2)


def test_both_losses_of_a_comparison_are_in_one_chart(show, tmp_path):
    axes = {"aggregate.rule": ["mean", "median"], "seed": [0, 1]}
    page = show(made_up_grid(tmp_path / "grid", axes, lambda point: 0.5))
    page.get_by_label("Metric").select_option(label="Test and train loss")
    lines = named(page)
    assert set(lines) == {f"{rule} · {part}" for rule in ("mean", "median") for part in ("test", "train")}
    assert (lines["mean · test"], lines["mean · train"]) == ([0.9, 0.5], [1.9, 1.5])


def test_a_number_is_the_same_in_the_table_the_heat_map_and_the_hover_text(show, tmp_path):
    axes = {"aggregate.rule": ["mean", "median"], "attack.name": ["none", "alie"], "seed": [0, 1]}
    page = show(made_up_grid(tmp_path / "grid", axes, lambda point: 0.8239 if point["seed"] else 0.8230))
    text = "0.8235 (0.8230, 0.8239)"
    assert text in page.locator("#summary").inner_text()
    cell = page.evaluate("document.getElementById('heat-map-chart').data[0].text[1][1]")
    assert cell.replace("<br>", " ") == text
    hovered = page.evaluate("document.getElementById('curves-chart').data.at(-1).text.at(-1)")
    assert hovered == text


def test_headings_are_plain_english(show, tmp_path):
    axes = {"aggregate.rule": ["mean", "median"], "attack.name": ["none", "alie"], "local.batch_size": [8]}
    page = show(made_up_grid(tmp_path / "grid", axes, lambda point: 0.5))
    assert page.locator("h1").inner_text() == "Test accuracy by rule, attack and local batch size"
    assert page.locator("#heat-map-title").inner_text() == "Final test accuracy by rule and attack"
    assert "aggregate.rule" not in page.locator("main").inner_text()


def test_lines_of_very_different_length_have_a_logarithmic_scale(show, tmp_path):
    def make(path, point):
        invent_run(path, [0.2, 0.5], mode="clock")
        add_to_rounds(path, on_the_clock(1.0, updates=1 if point["policy"] == "fedbuff" else 100))

    page = show(write_points(tmp_path / "grid", {"policy": ["fedbuff", "asgd"]}, make))
    kind = "document.getElementById('curves-chart').layout.xaxis.type"
    for across, expected in {"virtual seconds": "linear", "updates": "log"}.items():
        page.get_by_label("Against").select_option(label=across)
        assert page.evaluate(kind) == expected
