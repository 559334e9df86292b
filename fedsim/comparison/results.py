"""Results of a comparison: its runs and the statistics over seeds."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedsim.comparison.axes import label
from fedsim.comparison.compared_runs import ComparedRuns
from fedsim.comparison.labels import renamed
from fedsim.comparison.on_paper import draw_curves, draw_heatmap
from fedsim.comparison.rows import SEED, canonical
from fedsim.comparison.stored import COMPARISON, positions_in, read_comparison_file
from fedsim.comparison.tables import answer_text, comparison_text
from fedsim.comparison.typeset import TABLES
from fedsim.config.experiment import Experiment
from fedsim.config.tables import component_tables
from fedsim.core.input_limits import leaves_of
from fedsim.core.notebook import PLAIN, figure_html
from fedsim.core.plotting import save
from fedsim.errors import ExperimentError, RecordError, cut, plural, show
from fedsim.hints.attributes import hinting
from fedsim.records.history import METRICS
from fedsim.records.numbers import round_rows, to_frame
from fedsim.records.reader import Run
from fedsim.system.files import is_file, is_outside, user_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
else:  # for typing.get_type_hints
    Figure = DataFrame = Any

REPAIR = "restore the file, or repeat the comparison in another folder"
RUN = "run"  # name of the axis of single runs that are drawn together
NEUTRAL = ("name", SEED, "device", "engine", "processes", "data.root", "records")  # keys that do not label a line


@dataclass(frozen=True, repr=False)
class Comparison(ComparedRuns):
    """Results of a comparison.

    Attributes:
        name: name of the experiment.
        axes: the compared settings: a list of values for each key.
        runs: the result of each run (see `Run`).
        settings: settings of the comparison itself, such as the metric.
        folder: folder of the records, or None if the records are not kept.
        left_out: one line of text for each reason why combinations were left out.
        whole: values of the whole comparison for each key, if only some of them are drawn.
        warnings: one line of text for each setting without effect, or with an effect that users rarely intend.
    """

    @classmethod
    def read(cls, folder: str | Path) -> Comparison:
        """Read the results of a comparison from its folder. No code from the folder is executed.

        Raises RecordError if the folder is damaged or does not contain a comparison.
        """
        folder = user_path(folder)
        path, runs, points, folders = folder / COMPARISON, list[Run](), set[str](), set[Path]()
        file = read_comparison_file(path)
        known = positions_in(file.axes)
        for index, entry in enumerate(file.runs):
            where, run_folder = f"{path}: runs.{index}", folder / entry.folder
            for axis, positions in known.items():
                if axis not in entry.point:
                    raise RecordError(
                        f"{where}.point: is damaged: it has no value for the compared setting {show(axis)}; {REPAIR}"
                    )
                if canonical(entry.point[axis]) not in positions:
                    problem = f"{show(entry.point[axis])} is not among the values of {show(axis)}"
                    raise RecordError(f"{where}.point: is damaged: {problem}; {REPAIR}")
            position = {axis: positions[canonical(entry.point[axis])] for axis, positions in known.items()}
            if canonical(position) in points:
                raise RecordError(
                    f"{where}.point: another run has the same compared values; remove one of the two runs"
                )
            if is_outside(run_folder, folder):
                raise RecordError(f"{where}.folder = {show(entry.folder)}: must be inside the comparison's folder")
            if run_folder.resolve() in folders:
                raise RecordError(f"{where}.folder = {show(entry.folder)}: is also the folder of another run")
            points.add(canonical(position))
            folders.add(run_folder.resolve())
            target = file.settings.target
            runs.append(Run.read(run_folder, id=entry.id, point=entry.point, position=position, target=target))
        if not any(run.history for run in runs):
            raise RecordError(f"{folder}: none of its {len(runs)} runs has finished a round yet")
        settings = file.settings.known_on(file.axes)
        return cls(file.name, file.axes, runs, settings, folder, warnings=file.warnings)

    @property
    def answer(self) -> str:
        """Text that says which value of the first compared setting is best. Empty if nothing is compared."""
        return answer_text(self)

    @property
    def table(self) -> str:
        """The results as text, as `fedsim compare` prints them."""
        return comparison_text(self)

    def to_markdown(self) -> str:
        """Return the table of results in Markdown. The best results are bold, ties with them in italics."""
        return TABLES["markdown"](self)

    def to_latex(self) -> str:
        """Return the table of results in LaTeX (package booktabs). The best results are bold, ties underlined."""
        return TABLES["latex"](self)

    def renamed(self, labels: Mapping[str, str]) -> Comparison:
        """Return the comparison with other names of compared keys and values, for tables and figures.

            comparison.renamed({"aggregate.rule": "Rule", "weighted_mean": "FedAvg"}).to_latex()

        Args:
            labels: the new name of each key or value to rename, by the name that `table` shows.

        Raises ExperimentError if a name is not in the comparison, or two names would be equal.
        """
        return renamed(self, labels)

    @hinting
    def plot(self, out: str | Path | None = None) -> Figure:
        """Draw the results, as a notebook shows them: a heat map for several compared settings, otherwise curves.

        `fedsim.plot(comparison)` has more options.

        Args:
            out: file to write. Its name must end in .png, .svg or .pdf.

        Returns the matplotlib figure. Raises RecordError if no run is finished.
        """
        if (figure := draw_heatmap(self) or draw_curves(self)) is None:
            raise RecordError(f"{self.folder or self.name}: no run is finished")
        return save(figure, out)

    def to_dataframe(self, per: Literal["round", "run"] = "round") -> DataFrame:
        """Return the results as a pandas DataFrame.

        The first columns are `id` and the compared settings.

        Args:
            per: "round" returns one line per run and round. "run" returns one line per run, with the results of its
                last round, and an error message if the run failed.

        Raises MissingPackageError if pandas is not installed.
        """
        if per not in ("round", "run"):
            raise ExperimentError(f'per = {show(per)}: must be "round" or "run"')
        rows = []
        for run in self.runs:
            names = {axis: label(value) for axis, value in run.point.items() if isinstance(value, (list, dict))}
            numbers = round_rows(run.history) if per == "round" else [{**run.metrics, "error": run.error}]
            rows += [{"id": run.id, **run.point, **names, **row} for row in numbers]
        return to_frame(rows, "Comparison.to_dataframe")

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        where = f", in {self.folder}" if self.folder else ""
        count = plural(len(self.runs), "run")
        return f"Comparison({self.name}: {count} ({self.shape}){failed}{where}; see .table)"

    def _repr_html_(self) -> str:
        lines = [html.escape(line) for line in self.table.splitlines()]
        table = "\n".join(f"<b>{line}</b>" if "  *  " in line else line for line in lines)
        finished = any(run.finished for run in self.runs)
        shown = figure_html(self.plot(), f"comparison {self.name}") if finished else ""
        return f'<h4>{html.escape(self.name)}</h4><pre style="{PLAIN}">{table}</pre>{shown}'


def read_records(folder: Path) -> Run | Comparison:
    """Return the run or the comparison that is stored in a folder.

    Raises RecordError if the folder contains neither, is damaged, or has no finished round.
    """
    if not folder.is_dir():
        hint = f", {folder.parent}" if is_file(folder) and is_file(folder.parent / METRICS) else ""
        hint = ", and separate several folders by spaces" if "," in str(folder) else hint
        problem = "is a file" if is_file(folder) else "no such folder"
        raise RecordError(f"{folder}: {problem}; name the folder of a run or of a comparison{hint}")
    if (folder / COMPARISON).is_file():
        return Comparison.read(folder)
    if not is_file(folder / METRICS):
        raise RecordError(f"{folder}: is neither a run (no {METRICS}) nor a comparison (no {COMPARISON})")
    run = Run.read(folder)
    if not run.history:
        raise RecordError(f"{folder / METRICS}: no round is finished yet")
    return run


def comparison_of(runs: Sequence[Run]) -> Comparison:
    """Combine single runs into a comparison, so that they can be drawn in one figure.

    Each run is named by the settings in which the runs differ, such as "median" or "krum, f=2, lr=0.1". Runs that
    differ only in their seed have the same name.
    """
    names, seeds = _names_of(runs), [run.seed for run in runs]
    axes: dict[str, list[Any]] = {RUN: list(dict.fromkeys(names)), SEED: list(dict.fromkeys(seeds))}
    if len(axes[RUN]) == 1:
        del axes[RUN]
    drawn = []
    for run, name, seed in zip(runs, names, seeds, strict=True):
        point = {key: value for key, value in ((RUN, name), (SEED, seed)) if key in axes}
        position = {key: axes[key].index(value) for key, value in point.items()}
        drawn.append(Run(run.folder, run.experiment, run.history, id=name, point=point, position=position, counts=True))
    return Comparison(" and ".join(dict.fromkeys(run.name for run in runs)), axes, drawn, folder=runs[0].folder)


def _names_of(runs: Sequence[Run]) -> list[str]:
    leaves = [dict(leaves_of(run.experiment)) for run in runs]
    keys = [key for key in dict.fromkeys(key for table in leaves for key in table) if not _is_neutral(key)]
    differing = [key for key in keys if len({canonical(table.get(key)) for table in leaves}) > 1]
    components = {f"{place}.{table.named_by}" for place, table in component_tables(Experiment).items()}

    def text(key: str, value: object) -> str:
        return label(value) if key in components else f"{key.rpartition('.')[2]}={label(value)}"

    names = [", ".join(text(key, table[key]) for key in differing if key in table) for table in leaves]
    same = Counter((name, run.seed) for name, run in zip(names, runs, strict=True))
    if max(same.values()) > 1:
        return [cut(run.folder.resolve().name) if run.folder else f"run {n}" for n, run in enumerate(runs, start=1)]
    return [name or runs[0].name for name in names]


def _is_neutral(key: str) -> bool:
    return key in NEUTRAL or key.partition(".")[0] in NEUTRAL
