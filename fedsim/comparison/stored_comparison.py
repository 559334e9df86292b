"""Reading the folder of a comparison as the `Comparison` that `fedsim.compare` returned."""

from __future__ import annotations

from pathlib import Path

from fedsim.comparison.folder import SHARDS, GridRecords
from fedsim.comparison.grid import plan_grid
from fedsim.comparison.runner import Comparison, comparison_in
from fedsim.errors import RecordError
from fedsim.records.reader import GRID, read_grid_file
from fedsim.system.files import is_file


def load_comparison(folder: str | Path, *, allow_imports: bool = False) -> Comparison:
    """The results of a comparison from its folder, as `fedsim.compare` returned them.

    Runs that are not finished count as failed. Nothing in the folder is changed, and no code of it is executed.

    Args:
        folder: of the comparison.
        allow_imports: whether its experiments may name anything that can be imported; see `load_experiment`.

    Raises RecordError if the folder holds no comparison or damaged files, and ExperimentError if an experiment is
    invalid or names what may not be imported.

    >>> import fedsim, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     axes = {"aggregate.rule": ["mean", "median"]}
    ...     comparison = fedsim.compare({"rounds": 1, "model": "logistic"}, axes, folder, jobs=1)
    ...     fedsim.load_comparison(folder).table == comparison.table
    True
    """
    folder = Path(folder)
    path = folder / GRID
    if not is_file(path):
        shards = f"; its shards are not combined yet: fedsim compare {folder}" if (folder / SHARDS).is_dir() else ""
        raise RecordError(f"{folder}: is not the folder of a comparison (no {GRID}){shards}")
    stored = read_grid_file(path)
    settings = stored.settings
    grid = plan_grid(stored.base, stored.axes, (), settings, file=path, allow_imports=allow_imports)
    records = GridRecords(folder, grid)
    records.take_ids(stored)
    return comparison_in(records)
