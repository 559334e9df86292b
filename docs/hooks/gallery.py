"""The gallery: stored results of the files in experiments/, and the pages that show them.

    python docs/hooks/gallery.py add NAME FOLDER [WORDS...]    store the results in the folder of a comparison
    python docs/hooks/gallery.py write [PAGE...]               write figures and tables into the pages (default: all)

WORDS are those of the command `fedsim compare NAME WORDS` that created the folder. docs/gallery/results/NAME/ contains

    about.json      the words, the machine and the time, and (to be edited) the arguments of `fedsim.plot` for each
                    figure and, for a table of other metrics than the compared one, the metric names by heading,
                    and for reproduced results "published" (see `Published`)
    records.tar.xz  the comparison without models: comparison.json, and experiment.toml and metrics.jsonl of each run

In a page, `write` replaces what stands between `<!-- results: NAME -->` and `<!-- end -->`, with `all` for the table of
all experiments but those in experiments/reproduced/, and `reproduced` for the table of these. Results that do not
belong to the file in experiments/ are an error.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blocks import store

if TYPE_CHECKING:
    from fedsim.comparison import Comparison
    from fedsim.comparison.rows import Row
    from fedsim.core.figure import Figure

ROOT = Path(__file__).parents[2]
RESULTS = re.compile(r"<!-- results: ([\w/]+) -->\n.*?<!-- end -->", re.DOTALL)
GALLERY = ROOT / "docs" / "gallery"
EXPERIMENTS = ROOT / "experiments"
REPRODUCED = "reproduced"  # folder of experiments/ with an experiment per published result
MOST_BYTES = 300_000  # maximum size of the stored records of an experiment
# keys that change no result, or belong to a machine
NOT_COMPARED = ("data.root", "model.weights", "records.", "device", "engine", "processes", "distributed.")
NOT_KEPT = ("weights", "seconds", "timeline")  # large entries that no figure shows
CORES = 2  # to which the minutes of reproduced results refer
DIGITS = 6  # significant digits of the stored numbers
MOST_WIDE = 3  # maximum number of columns with intervals that fit on a page
TABLE_COLUMNS = ("score", "difference", "bytes", "to_target", "bytes_to_target")
CLOCK_COLUMNS = ("updates_to_target", "arrivals_to_target")  # for runs on the virtual clock
OVER_GAPS = {"x": "spectral_gap"}  # arguments of a figure that `fedsim.plot` does not draw
EXPLANATIONS = {  # below a table that contains the text
    " updates ": (
        "`updates` of the global model and `arrivals` from workers are counted until the first test that reaches the "
        "target."
    ),
    "±": "± is the 95 percent confidence interval over the seeds.",
    " of 3)": "`(2 of 3)` means that two of three seeds reached the target, with the values in parentheses.",
    "**": "The best results are bold.",
}


class StaleResultError(Exception):
    """The stored results do not belong to the present file in experiments/."""


class Published(NamedTuple):
    """A published result beside that of a stored comparison: one line of the table of reproduced results.

    Attributes:
        source: paper with its table or figure, and where the numbers were read if it was not there.
        setting: what was measured, and how.
        numbers: what was published for each part of the result, and where the stored result is.
        agreement: whether both agree, or the reason of the difference.
    """

    source: str
    setting: str
    numbers: list[dict[str, Any]]  # arguments of `Number`
    agreement: str


class Number(NamedTuple):
    """A published number.

    Attributes:
        of: name of the number, such as "IID". May be empty.
        published: the number as text.
        at: labels of the compared values of the table row that shows the result here.
        column: name of the column of the comparison's table, or of a metric.
        target: target of the number of rounds, if it is not that of the file.
        here: the result here as text, if no column shows it.
    """

    of: str
    published: str
    at: Sequence[str] = ()
    column: str = "score"
    target: float | None = None
    here: str = ""


def names() -> list[str]:
    return sorted(path.relative_to(EXPERIMENTS).with_suffix("").as_posix() for path in EXPERIMENTS.rglob("*.toml"))


def reproduced() -> list[str]:
    return [name for name in names() if name.startswith(f"{REPRODUCED}/")]


def results(name: str) -> Path | None:
    """Return the folder of the stored results, or None if there are none."""
    folder = GALLERY / "results" / name
    return folder if (folder / "about.json").is_file() else None


def about(name: str) -> dict[str, Any]:
    return json.loads((GALLERY / "results" / name / "about.json").read_text())


# -- Storing


def add(name: str, folder: Path, words: list[str]) -> None:
    """Store the results of a comparison. Raises StaleResultError if they do not belong to the experiment."""
    from fedsim.comparison import Comparison

    comparison, now = Comparison.read(folder), planned(name, words)
    then = {canonical_point(run.point): flat(run.experiment) for run in comparison.runs}
    for line in differences(name, words, then, {point: settings(each) for point, each in now.items()}):
        raise StaleResultError(line)
    target = GALLERY / "results" / name
    target.mkdir(parents=True, exist_ok=True)
    environment = comparison.runs[0].environment
    metadata = {
        "words": words,
        "runs": len(comparison.runs),
        "core_hours": round(sum(each.total_seconds or 0 for run in comparison.runs for each in run.history) / 3600, 3),
        "processor": environment.get("processor"),
        "torch": environment.get("packages", {}).get("torch"),
        "date": environment.get("date", "")[:10],
        "figures": [{"kind": "heatmap"}] if len(comparison.compared) > 1 else [{}],
    }
    if results(name):
        metadata |= {key: value for key, value in about(name).items() if key in ("figures", "table", "published")}
    (target / "records.tar.xz").write_bytes(packed(folder, now))
    (target / "about.json").write_text(json.dumps(metadata, indent=2) + "\n")
    check(name)
    size = sum(path.stat().st_size for path in target.iterdir())
    if size > MOST_BYTES:
        raise ValueError(f"{name}: the results take {size:,} bytes; at most {MOST_BYTES:,} are allowed")
    print(f"{target}: {size:,} bytes")


def packed(folder: Path, experiments: dict[str, Any]) -> bytes:
    """Return the records of a comparison as an archive, with the current experiments of its runs, by point."""
    from fedsim.config.files import to_toml

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        comparison = json.loads((folder / "comparison.json").read_text())
        comparison.get("base", {}).get("data", {}).pop("root", None)
        _put(archive, "comparison.json", json.dumps(comparison))
        for run in comparison["runs"]:
            path, inside = folder / run["folder"], run["folder"]
            _put(archive, f"{inside}/experiment.toml", to_toml(experiments[canonical_point(run["point"])]))
            if (path / "metrics.jsonl").is_file():  # missing if a run failed in its first round
                lines = (path / "metrics.jsonl").read_text().splitlines()
                _put(archive, f"{inside}/metrics.jsonl", "".join(map(_kept, lines)))
            if (path / "error.txt").is_file():
                _put(archive, f"{inside}/error.txt", (path / "error.txt").read_text())
    return buffer.getvalue()


def _put(archive: tarfile.TarFile, name: str, text: str) -> None:
    """Add a file without a date, so that equal records give equal archives."""
    entry = tarfile.TarInfo(name)
    entry.size = len(content := text.encode())
    archive.addfile(entry, io.BytesIO(content))


def _kept(line: str) -> str:
    record = {key: _rounded(value) for key, value in json.loads(line).items() if key not in NOT_KEPT}
    return json.dumps({key: value for key, value in record.items() if value not in (None, [], {})}) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


# -- Checking


def check(name: str) -> None:
    """Raise StaleResultError if the stored runs differ from those that `fedsim compare NAME WORDS` would do now."""
    from fedsim.config.files import read_toml

    words = about(name)["words"]
    now = {point: settings(each) for point, each in planned(name, words).items()}
    with unpacked(name) as folder:
        runs = json.loads((folder / "comparison.json").read_text())["runs"]
        then = {
            canonical_point(run["point"]): flat(read_toml(folder / run["folder"] / "experiment.toml")) for run in runs
        }
    for line in differences(name, words, then, now):
        raise StaleResultError(line)


def planned(name: str, words: list[str]) -> dict[str, Any]:
    """Return the experiments that `fedsim compare NAME WORDS` runs, by point."""
    from fedsim.comparison.plan import plan_comparison
    from fedsim.config.files import read_toml

    tables = read_toml(EXPERIMENTS / f"{name}.toml")
    if isinstance(tables.get("model"), dict):
        tables["model"].pop("weights", None)  # a file that another run writes
    runs = plan_comparison(tables, None, words).runs
    return {canonical_point(run.point): run.experiment for run in runs}


def canonical_point(point: dict[str, Any]) -> str:
    return json.dumps(point, sort_keys=True)


def settings(experiment: Any) -> dict[str, Any]:
    """Return the settings of an experiment that change results, by dotted key."""
    return flat(experiment.resolved())


def flat(tables: dict[str, Any]) -> dict[str, Any]:
    from fedsim.core.input_limits import leaves_of

    return {key: value for key, value in leaves_of(tables) if not key.startswith(NOT_COMPARED)}


def differences(
    name: str, words: list[str], then: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """Return one line per difference. A key on only one side comes from another version and is ignored."""
    remedy = f"run it again and store its folder with `gallery.py add`, or remove docs/gallery/results/{name}"
    if then.keys() != now.keys():
        yield f"{name}: the stored runs are not those of fedsim compare {name} {' '.join(words)}; {remedy}"
        return
    for point in then:
        common = then[point].keys() & now[point].keys()
        if different := sorted(key for key in common if then[point][key] != now[point][key]):
            yield f"{name}: the stored run {point} has another {', '.join(different)}; {remedy}"


@contextlib.contextmanager
def unpacked(name: str) -> Iterator[Path]:
    """Yield a temporary comparison folder with the stored records."""
    with (
        tempfile.TemporaryDirectory() as folder,
        tarfile.open(GALLERY / "results" / name / "records.tar.xz") as archive,
    ):
        archive.extractall(folder, filter="data")
        yield Path(folder)


# -- Pages


def pages() -> dict[str, Path]:
    """Return the page of each experiment that a page names, and of "all"."""
    paths = sorted(GALLERY.glob("*.md"))
    found = {match[1]: path for path in paths for match in RESULTS.finditer(path.read_text())}
    return {name: found[REPRODUCED] for name in reproduced() if REPRODUCED in found} | found


def write(path: Path) -> None:
    """Write the results into a page, and its figures beside it."""
    pictures: dict[str, bytes] = {}
    path.write_text(filled(path.read_text(), pictures))
    for name, content in pictures.items():
        store(io.BytesIO(content), path.parent / name)


def filled(page: str, pictures: dict[str, bytes]) -> str:
    """Return a page with the present results, and put its figures into `pictures`. Raises StaleResultError."""

    def results_of(match: re.Match[str]) -> str:
        tables = {"all": overview, REPRODUCED: reproduction}
        text = tables[match[1]]() if match[1] in tables else section(match[1], pictures)
        return f"<!-- results: {match[1]} -->\n\n{text}\n\n<!-- end -->"

    return RESULTS.sub(results_of, page)


def question(name: str) -> tuple[str, str]:
    """Return the first comment line of an experiment's file, and the other comment lines with commands as code.

    The command that the page shows anyway is omitted.
    """
    lines = itertools.takewhile(
        lambda line: line.startswith("#"), (EXPERIMENTS / f"{name}.toml").read_text().splitlines()
    )
    first, *others = (line.removeprefix("#").removeprefix(" ") for line in lines)
    text = re.sub(rf"\s*Run it\s+with\n +{command(name)}$", "", "\n".join(others), flags=re.MULTILINE)
    return first, re.sub(r"\n +(.*)", r"\n\n```text\n\1\n```\n", text)


def command(name: str, words: Iterable[str] = ()) -> str:
    """Return the shell command that runs the experiment."""
    is_comparison_file = "\n[comparison]" in (EXPERIMENTS / f"{name}.toml").read_text()
    return shlex.join(["fedsim", "compare" if is_comparison_file or words else "run", name, *words])


def figures(name: str) -> Iterator[tuple[bytes, str]]:
    """Yield each figure as PNG with its caption."""
    import fedsim
    from fedsim.core.plotting import PAPER, encode

    with unpacked(name) as folder:
        for arguments in about(name)["figures"]:
            figure = over_spectral_gaps(folder) if arguments == OVER_GAPS else fedsim.plot(folder, **arguments)
            with PAPER.applied():
                caption, _, _ = figure.get_label().partition("; between two tests")  # which the first page says
                yield encode(figure, "png", 160), caption.rstrip(".") + "."


def over_spectral_gaps(folder: Path) -> Figure:
    """Draw the compared metric of each run over the spectral gap of its topology, with a colour for each policy."""
    from fedsim.comparison import Comparison
    from fedsim.comparison.axes import label
    from fedsim.config.load import load_experiment
    from fedsim.core.figure import Figure
    from fedsim.core.plotting import PAPER, line_style

    comparison, points = Comparison.read(folder), dict[str, dict[str, list[tuple[float, float]]]]()
    for run in comparison.runs:
        gap = load_experiment(run.experiment).topology_metadata["spectral_gap"]
        topology = label(run.point["policy.topology"]).partition(",")[0]
        of_policy = points.setdefault(run.point["policy.name"], {})
        of_policy.setdefault(topology, []).append((gap, comparison.metric.read(run.history[-1])))
    with PAPER.applied():
        figure = Figure(figsize=(6.9, 3.4), layout="constrained")
        axes = figure.subplots()
        for index, (policy, by_topology) in enumerate(points.items()):
            style = line_style(index) | {"linestyle": "", "label": policy}
            axes.plot(*zip(*itertools.chain(*by_topology.values()), strict=True), **style)
        for index, topology in enumerate(by_topology):  # names alternate below the lowest and above the highest point
            pairs = [pair for of_policy in points.values() for pair in of_policy[topology]]
            gap, values = sum(pair[0] for pair in pairs) / len(pairs), [pair[1] for pair in pairs]
            at, shift, side = (max(values), 6, "bottom") if index % 2 else (min(values), -6, "top")
            axes.annotate(topology, (gap, at), (0, shift), textcoords="offset points", ha="center", va=side)
        axes.set(xscale="log", xlabel="spectral gap", ylabel=comparison.metric.label.replace("_", " "))
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.set_label("Consensus distance after the last round over the spectral gap. One point per seed.")
    return figure


def section(name: str, pictures: dict[str, bytes]) -> str:
    """Return what a page shows of an experiment: question, command, figures and table."""
    first, rest = question(name)
    known = about(name) if results(name) else {"words": []}
    parts = [f"**{first}** {rest}", f'```bash run="no: takes long"\n{command(name, known["words"])}\n```']
    if results(name):
        check(name)
        for number, (picture, caption) in enumerate(figures(name)):
            file = f"{Path(name).name}-{number}.png" if number else f"{Path(name).name}.png"
            pictures[file] = picture
            below = f"*{caption}*"
            if below == parts[-1]:  # once, below the last of several figures
                parts.pop()
            parts += [f"![{caption.partition('. ')[0]}]({file})", below]
        parts.append(results_table(name, known.get("table")))
        processor = known["processor"].replace("(R)", "").removesuffix(" Processor")
        parts.append(
            f"{known['runs']} runs of `experiments/{name}.toml`, {_hours(known['core_hours'])} of one core "
            f"({processor}, PyTorch {known['torch']}, {known['date']})."
        )
    return "\n\n".join(parts)


def results_table(name: str, metrics: dict[str, str] | None) -> str:
    """Return the stored results as a Markdown table with explanations.

    Args:
        metrics: names of metrics by heading. Shown are the means over the seeds after the last round. None: the
            compared metric, with one column for each value of the last axis if there are several axes.
    """
    from fedsim.comparison import Comparison

    with unpacked(name) as folder:
        comparison = Comparison.read(folder)
    if metrics:
        return _table_of_metrics(comparison, metrics)
    table = _table_across(comparison) if len(comparison.compared) > 1 else _table_of_rows(comparison)
    return f"{table}\n\n" + " ".join(text for mark, text in EXPLANATIONS.items() if mark in table)


def _table_of_metrics(comparison: Comparison, metrics: dict[str, str]) -> str:
    columns = [
        replace(comparison.settings, metric=metric).combined(comparison.runs, list(comparison.axes))
        for metric in metrics.values()
    ]
    lines = []
    for cells in zip(*columns, strict=True):
        means = ["" if cell.score is None else f"{cell.score.mean:.4f}" for cell in cells]
        lines.append([*_labels(comparison, cells[0], comparison.compared), *means])
    return _markdown_table([*comparison.compared, *metrics], lines)


def _table_across(comparison: Comparison) -> str:
    """Return the table with one line per combination of the first axes and one column per value of the last axis."""
    from fedsim.comparison.axes import label

    *down, across = comparison.compared
    headings = [label(value) for value in comparison.axes[across]]
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in comparison.summary:
        (column,) = _labels(comparison, row, [across])
        lines.setdefault(tuple(_labels(comparison, row, down)), {})[column] = _score(row, len(headings) <= MOST_WIDE)
    cells = [[*names, *(scores.get(heading, "") for heading in headings)] for names, scores in lines.items()]
    metric = comparison.metric.label.lower()
    narrow = [re.sub(r",(?! )", "<br>", heading) for heading in headings]
    return f"The means of the {metric}:\n\n{_markdown_table([*down, *narrow], cells)}"


def _table_of_rows(comparison: Comparison) -> str:
    from fedsim.comparison.tables import columns, filled

    available = columns(comparison)
    names = TABLE_COLUMNS + CLOCK_COLUMNS * bool(filled(available, ["virtual_seconds"], comparison.rows))
    cells = filled(available, names, comparison.rows)
    headings = [*comparison.compared, *(available[column].heading for column in cells)]
    texts = [[str(cell) for cell in column] for column in cells.values()]
    if len(comparison.rows) == 1:
        return " ".join(f"{heading.capitalize()}: {text}." for heading, (text,) in zip(headings, texts, strict=True))
    labels = [_labels(comparison, row, comparison.compared) for row in comparison.rows]
    return _markdown_table(headings, [[*first, *line] for first, *line in zip(labels, *texts, strict=True)])


def _labels(comparison: Comparison, row: Row, axes: list[str]) -> list[str]:
    from fedsim.comparison.axes import label

    return [label(row.runs[0].point[axis]) for axis in axes]


def _score(row: Row, with_spread: bool) -> str:
    from fedsim.comparison.tables import estimate_cell

    if row.score is None:
        return ""
    text = str(estimate_cell(row.score, row.metric.decimals_for)) if with_spread else f"{row.score.mean:.3f}"
    return f"**{text}**" if row.group and row is row.group.best else text


def _markdown_table(headings: list[str], lines: list[list[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _hours(hours: float) -> str:
    return (
        f"{hours:.1f} hours" if hours >= 2 else f"{60 * hours:.0f} minutes" if hours > 0.05 else f"{3600 * hours:.0f} s"
    )


def overview() -> str:
    """Return the table of all experiments with thumbnails, for the first page of the gallery."""
    rows, places = ["| | question | command | stored results |", "|---|---|---|---|"], pages()
    for name in filter(lambda name: name not in reproduced(), names()):
        known, page = about(name) if results(name) else None, places[name].name
        time = f"{known['runs']} runs, {_hours(known['core_hours'])}" if known else "none stored"
        picture = f'[<img src="{name}.png" width="160" alt="">]({page})' if known else ""
        rows.append(f"| {picture} | [{question(name)[0]}]({page}) | `{command(name)}` | {time} |")
    return "\n".join(rows)


def reproduction() -> str:
    """Return the table of the reproduced results, in the order of their sources. Raises StaleResultError."""
    headings = ["published result", "published", "here", "agreement", "minutes"]
    lines = dict[str, list[str]]()
    for name in reproduced():
        check(name)
        known, numbers = about(name), []
        published = Published(**known["published"])
        for number in (Number(**each) for each in published.numbers):
            before = f"{number.of}: " if number.of else ""
            numbers.append((f"{before}{number.published}", f"{before}{number.here or _stored(name, number)}"))
        cells = [
            f"{published.source}: {published.setting}<br>`{command(name, known['words'])}`",
            *("<br>".join(column) for column in zip(*numbers, strict=True)),
            published.agreement,
            f"{60 * known['core_hours'] / CORES:.0f}",
        ]
        lines[f"{published.source} {name}"] = cells
    return _markdown_table(headings, [lines[key] for key in sorted(lines)])


def _stored(name: str, number: Number) -> str:
    """Return the stored result that belongs to a published number, as text."""
    from fedsim.comparison import Comparison
    from fedsim.comparison.tables import columns, estimate_cell

    with unpacked(name) as folder:
        path = folder / "comparison.json"
        if number.target is not None:
            path.write_text(json.dumps(json.loads(path.read_text()) | {"target": number.target}))
        comparison = Comparison.read(folder)
    (row,) = (row for row in comparison.rows if _labels(comparison, row, comparison.compared) == [*number.at])
    if column := columns(comparison).get(number.column):
        return str(column.cell_of(row))
    return str(estimate_cell(row.metrics[number.column]))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["add", name, folder, *words]:
            add(name, Path(folder), words)
        case ["write", *chosen]:
            for path in map(Path, chosen) if chosen else set(pages().values()):
                write(path)
        case _:
            sys.exit(__doc__)
