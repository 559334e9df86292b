"""Result of a run, as returned by `fedsim.run` or read from a run folder by `fedsim.load_run`."""

from __future__ import annotations

import functools
import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedsim.clients import PersonalModel
from fedsim.config.experiment import Experiment
from fedsim.config.files import read_toml
from fedsim.config.load import load_experiment
from fedsim.core.import_policy import reading_stored_run
from fedsim.core.input_limits import leaves_of
from fedsim.core.notebook import figure_html
from fedsim.core.plotting import save
from fedsim.core.rows import Layout
from fedsim.errors import ExperimentError, RecordError, plural, show
from fedsim.hints.attributes import HintingAttributes, hinting
from fedsim.models.trainable import load_weights
from fedsim.records.figures import draw_curve
from fedsim.records.formatting import score_text
from fedsim.records.history import not_a_run, with_nan_losses
from fedsim.records.numbers import round_rows, to_frame
from fedsim.records.reader import Run
from fedsim.records.record import History, RoundRecord
from fedsim.records.round_table import columns_of, table_cell
from fedsim.records.run_folder import EXPERIMENT, MODEL
from fedsim.records.worker_results import WorkerResults
from fedsim.runs.personal_models import PersonalModels
from fedsim.runs.setup import task_of
from fedsim.system.files import is_file, user_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
else:  # for typing.get_type_hints
    Figure = DataFrame = Any


@dataclass(frozen=True)
class Result(HintingAttributes):
    """Result of a run.

    Attributes:
        experiment: experiment that was run, with the values of all settings.
        history: one record per round.
        folder: run folder; None if no records were written.
        stopped: reason why the run ended before its last round (early stopping by `stop.*`, `StopRun`, or divergence);
            None if it has run all rounds.
        worker_names: name of each worker, or None for a worker without a name, followed by the names of owners who have
            only test samples. Empty if the data has no names.
        worker_results: latest test results of individual workers, with their names; None if no worker was tested.

    >>> import fedsim
    >>> result = fedsim.run(rounds=1, workers=2, model="logistic", engine="serial", local={"steps": 1})
    >>> len(result.history), result.global_row.shape
    (1, torch.Size([7850]))
    """

    experiment: Experiment
    history: list[RoundRecord]
    folder: Path | None
    stopped: str | None = None
    worker_names: tuple[str | None, ...] = ()
    worker_results: WorkerResults | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "history", History(self.history))

    @functools.cached_property
    def model(self) -> nn.Module:
        """Global model, on the CPU, in evaluation mode. A loaded result reads the file on first access."""
        return _stored_model(self.experiment, self.folder)

    @functools.cached_property
    def global_row(self) -> Tensor:
        """Parameters of the global model as one flat vector [d], on the CPU."""
        stored = _stored_model(self.experiment, self.folder)  # the user may have changed `model`
        return Layout.of(stored).read(stored)

    @property
    def test_accuracy(self) -> float | None:
        """Test accuracy of the global model after the last round; None if the task has no accuracy."""
        return self.history[-1].test_accuracy

    @property
    def worker_accuracy(self) -> float | None:
        """Mean accuracy on the local test samples of each worker, with the model that the worker would use.

        This is the worker's personal model, or the global model if the client algorithm has no personal models. None if
        the run did not test individual workers (`data.local_test_fraction`).
        """
        return self.history[-1].worker_accuracy

    @property
    def test_loss(self) -> float | None:
        """Test loss of the global model after the last round."""
        return self.history[-1].test_loss

    @hinting
    def plot(self, out: str | Path | None = None) -> Figure:
        """Draw accuracy and losses over the rounds.

        `fedsim.plot` draws other numbers, and several results in one figure.

        Args:
            out: file to write. Its name must end in .png, .svg or .pdf.

        Returns the matplotlib figure.

        >>> import fedsim
        >>> result = fedsim.run(rounds=2, workers=2, model="logistic", engine="serial", local={"steps": 1})
        >>> [axes.get_ylabel() for axes in result.plot().axes]
        ['test accuracy', 'loss']
        """
        return save(draw_curve(self.history, self.experiment.name), out)

    def personal_model(self, worker: int | str) -> nn.Module:
        """Return the personal model of a worker after the last round, on the CPU and in evaluation mode.

        A worker that has not taken part has its initial personal model. With `ifca`, the personal model is the final
        state of the global model that the worker selected last. The models of all workers may be much larger than the
        global model. Results therefore do not contain them, but read them from the checkpoint of the last round when
        this method is first called. Runs with a folder and `checkpoint.every` write this checkpoint.

        Args:
            worker: ID or name of the worker.

        Raises ExperimentError if the client algorithm has no personal models or if there is no such worker, and
        RecordError if there is no checkpoint of the last round.

        >>> import fedsim, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = fedsim.run(out=folder, rounds=1, workers=2, model="logistic", engine="serial",
        ...                         local={"algorithm": "ditto"}, checkpoint={"every": 1})
        ...     result.personal_model(1)(torch.zeros(1, 1, 28, 28)).shape
        torch.Size([1, 10])
        """
        if not isinstance(self.experiment.local.component, PersonalModel):
            raise ExperimentError(f"{self.experiment.local.setting}: workers have no personal models; use result.model")
        is_name = isinstance(worker, str) and worker in self.worker_names
        return self._personal_models.of(self.worker_names.index(worker) if is_name else worker)

    @functools.cached_property
    def _personal_models(self) -> PersonalModels:
        last = max((record.round for record in self.history if record.diverged is None), default=1)
        if self.folder is None:
            raise RecordError(
                "personal models are stored in checkpoints, but this run has no folder; run the experiment with "
                f"out=FOLDER and checkpoint.every={last}"
            )
        pairs = [pair for record in self.history for pair in zip(record.cohort, record.clusters, strict=False)]
        return PersonalModels.in_folder(self.experiment, self.folder, last, dict(pairs))

    def to_dataframe(self) -> DataFrame:
        """Return the numbers of each round as a pandas data frame with one row per round.

        The columns are `round`, `test_accuracy`, `test_loss`, `train_loss`, and all other numbers in the records, with
        the names that `stop.metric` and `--metric` use, such as `metrics.top_k`, `seconds.train` or `bytes_up`. Missing
        numbers are NaN. Raises MissingPackageError if pandas is not installed.
        """
        return to_frame(round_rows(self.history), "Result.to_dataframe")

    def __repr__(self) -> str:
        seconds = sum(record.total_seconds or 0.0 for record in self.history)
        where = f", in {self.folder}" if self.folder else ""
        return (
            f"Result({self.experiment.name}: {score_text(self.history[-1])} after "
            f"{plural(len(self.history), 'round')} in {seconds:.1f} s{where})"
        )

    def _repr_html_(self) -> str:
        """Return HTML, with which a notebook shows this result."""
        return _html(self)


def _html(result: Result) -> str:
    """Return the result of a run as HTML for a notebook: its name, settings, last round and curve."""
    last = result.history[-1]
    parts = [f"<h4>{html.escape(result.experiment.name)}: {html.escape(score_text(last))}</h4>"]
    if result.stopped:
        parts.append(f"<p>Stopped after round {last.round}: {html.escape(result.stopped)}</p>")
    defaults = dict(leaves_of(Experiment().resolved()))
    settings = leaves_of(result.experiment.resolved())
    changed = [f"{key} = {show(value)}" for key, value in settings if key != "name" and defaults.get(key) != value]
    if changed:
        items = ", ".join(f"<code>{html.escape(line)}</code>" for line in changed)
        parts.append(f"<p>Settings: {items}</p>")
    curve = figure_html(result.plot(), "curves of the run")
    return "".join([*parts, _last_round(last), curve])


def _last_round(record: RoundRecord) -> str:
    columns = [column for column in columns_of(record) if column.path[0] != "seconds"]
    heads = "".join(f"<th>{html.escape(column.column)}</th>" for column in columns)
    cells = "".join(f"<td>{html.escape(table_cell(column, record))}</td>" for column in columns)
    return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{cells}</tr></tbody></table>"


@hinting
def load_run(folder: str | Path, *, allow_imports: bool = False) -> Result:
    """Load the result of a run from its folder, as `fedsim.run` returned it.

    The result of an unfinished run contains the finished rounds. The model is loaded when it is first used. Loading
    changes nothing in the folder, and executes no code from it.

    Args:
        folder: run folder.
        allow_imports: whether the experiment may use any importable object; see `load_experiment`.

    Raises RecordError if the folder has no run, no finished round or damaged files, and ExperimentError if its
    experiment is invalid or needs an import that is not allowed. The attribute `model` raises RecordError if the run
    did not save a model.

    >>> import fedsim, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = fedsim.run(out=folder, rounds=2, workers=2, model="logistic", engine="serial")
    ...     again = fedsim.load_run(folder)
    ...     again.history == result.history, torch.equal(again.global_row, result.global_row)
    (True, True)
    """
    folder = user_path(folder)
    experiment, run = _experiment_in(folder, allow_imports), Run.read(folder)
    if not run.history:
        raise RecordError(f"{folder}: no round is finished yet")
    history, names = [with_nan_losses(record) for record in run.history], tuple(run.partition.names)
    return Result(experiment, history, folder, run.stopped, names, run.workers)


@hinting
def load_model(folder: str | Path, *, allow_imports: bool = False) -> nn.Module:
    """Load the trained model of a finished run, on the CPU and in evaluation mode.

    Args:
        folder: run folder.
        allow_imports: whether the experiment may use any importable object; see `load_experiment`.

    Raises the same errors as `load_run`, and RecordError if the run did not save a model.

    >>> import fedsim, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = fedsim.run(out=folder, rounds=1, workers=2, model="logistic", engine="serial")
    ...     fedsim.load_model(folder)(torch.zeros(1, 1, 28, 28)).shape
    torch.Size([1, 10])
    """
    folder = user_path(folder)
    return _stored_model(_experiment_in(folder, allow_imports), folder)


def _experiment_in(folder: Path, allow_imports: bool) -> Experiment:
    path = folder / EXPERIMENT
    if not is_file(path):
        raise RecordError(not_a_run(folder))
    read_toml(path, inside=folder)  # raises an error for a link that leads out of the folder
    with reading_stored_run():
        return load_experiment(path, allow_imports=allow_imports)


def _stored_model(experiment: Experiment, folder: Path | None) -> nn.Module:
    if folder is None:
        raise RecordError("this copy of a result has no model, because the run has no folder; use the original result")
    path = folder / MODEL
    if not is_file(path):
        raise RecordError(f"{path}: does not exist, because the run is not finished or records.model is false")
    module = task_of(experiment, torch.device("cpu"), weights=False).new_module()
    load_weights(module, path, str(path), RecordError)
    return module.eval()
