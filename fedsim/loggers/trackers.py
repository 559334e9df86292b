"""Loggers for experiment trackers. They write where their package does by default, which its own variables change.

No address or path is a parameter, since an experiment file may come from an unknown author.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from fedsim.loggers.logger import Log, LoggedRun, logger
from fedsim.system.packages import import_extra

ID = "fedsim_id"  # the tag under which MLflow holds the id of a run
MOST_PARAMETERS = 100  # of a call to MLflow


@logger("wandb")
@contextlib.contextmanager
def wandb(run: LoggedRun, *, project: str = "fedsim", mode: Literal["offline", "online"] = "offline") -> Iterator[Log]:
    """Weights & Biases. `wandb sync wandb/offline-run-*` uploads offline runs; WANDB_DIR is the folder around `wandb`.

    Args:
        run: the run; a resumed one continues the run of the same id.
        project: of W&B.
        mode: "online" sends each round to the server that `wandb login` or WANDB_BASE_URL names.
    """
    package = import_extra("wandb", extra="wandb", purpose='the logger "wandb"')
    logged = package.init(
        project=project,
        name=run.name,
        group=run.group,
        id=run.id,
        config=dict(run.settings),
        mode=mode,
        resume="allow",
        reinit="create_new",  # a run of the program around it goes on
        settings=package.Settings(silent=True, console="off"),
    )
    with _ended(lambda failed: logged.finish(exit_code=int(failed))):
        yield lambda round, numbers: logged.log(dict(numbers), step=round)


@logger("mlflow")
@contextlib.contextmanager
def mlflow(run: LoggedRun, *, experiment: str = "fedsim") -> Iterator[Log]:
    """MLflow. Without MLFLOW_TRACKING_URI it writes to files in the working directory: `mlflow ui` shows them.

    Args:
        run: the run; a resumed one continues the run of the same id.
        experiment: of MLflow.
    """
    package = import_extra("mlflow", extra="mlflow", purpose='the logger "mlflow"')
    client, entities = package.MlflowClient(), package.entities
    known = client.get_experiment_by_name(experiment)
    place = known.experiment_id if known else client.create_experiment(experiment)
    found = client.search_runs([place], f"tags.{ID} = '{run.id}'", max_results=1) if run.resumed else []
    if found:
        name = found[0].info.run_id
        client.update_run(name, "RUNNING")
    else:
        name = client.create_run(place, run_name=run.name, tags={ID: run.id, "group": run.group}).info.run_id
        settings = [entities.Param(key, str(value)) for key, value in run.settings.items()]
        for start in range(0, len(settings), MOST_PARAMETERS):
            client.log_batch(name, params=settings[start : start + MOST_PARAMETERS])

    def log(round: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        client.log_batch(name, [entities.Metric(tag, value, now, round) for tag, value in numbers.items()])

    with _ended(lambda failed: client.set_terminated(name, "FAILED" if failed else "FINISHED")):
        yield log


@contextlib.contextmanager
def _ended(finish: Callable[[bool], object]) -> Iterator[None]:
    """Call `finish(failed)` when the block ends."""
    try:
        yield
    except BaseException:
        finish(True)
        raise
    finish(False)
