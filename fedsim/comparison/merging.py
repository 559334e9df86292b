"""Merge the folders of comparisons of one grid, such as the shards of one comparison."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedsim.comparison.folder import (
    ERROR,
    SHARDS,
    GridFolder,
    differences_of_grids,
    inner_folder,
    result_in,
)
from fedsim.comparison.grid import PlannedRun, plan_grid
from fedsim.comparison.results import Comparison
from fedsim.comparison.runner import summarised
from fedsim.errors import RecordError, one_line
from fedsim.records.reader import GRID, GridFile, read_grid_file
from fedsim.records.rows import NO_SETTINGS, ComparisonSettings, canonical


def merge(
    folders: Sequence[Path],
    out: Path,
    settings: ComparisonSettings = NO_SETTINGS,
    *,
    allow_imports: bool = False,
) -> Comparison:
    """Copy the runs of several folders of one grid into the folder `out`, and compare them; nothing is run.

    Args:
        folders: of comparisons, whose shards count too; `out` itself may be one of them.
        out: the folder of the merged comparison.
        settings: as of `plan_grid`; those that are not set are those of the first folder.
        allow_imports: whether the folders may name any import path, as of `plan_grid`.

    Raises RecordError if a folder holds no comparison, or the folders hold different grids.
    """
    sources = [source for folder in folders for source in _sources(folder)]
    grids = {source: read_grid_file(source / GRID) for source in sources}
    first = grids[sources[0]]
    for source, other in grids.items():
        if lines := differences_of_grids(first, other):
            raise RecordError(f"{source}: holds another grid than {sources[0]}\n" + "\n".join(lines))
    settings = ComparisonSettings(**first.settings.given | settings.given)
    file = sources[0] / GRID
    grid = plan_grid(first.base, first.axes, (), settings, file=file, allow_imports=allow_imports)
    with GridFolder(out, grid) as folder:
        for run in folder.grid.runs:
            if not folder.is_finished(run) and (found := _find(run, grids, folder.run_folder(run))):
                folder.clear(run)
                _copy(found, folder.run_folder(run))
        return summarised(folder)


def _sources(folder: Path) -> list[Path]:
    """Return the folders with a grid.json: this one, and its shards."""
    found = [path for path in (folder, *sorted((folder / SHARDS).glob("*"))) if (path / GRID).is_file()]
    if not found:
        raise RecordError(f"{folder}: is not the folder of a comparison (no {GRID}, and no shards in {SHARDS}/)")
    return found


def _find(run: PlannedRun, grids: dict[Path, GridFile], besides: Path) -> Path | None:
    """Return the folder where a run is finished; else one where it failed."""
    point = canonical(run.point)
    stored = [(source, each) for source, grid in grids.items() for each in grid.runs if canonical(each.point) == point]
    folders = [inner_folder(source, each.id) for source, each in stored]
    folders = [folder for folder in folders if folder.is_dir() and folder != besides]
    complete = (folder for folder in folders if result_in(folder, run).finished)
    failed = (folder for folder in folders if (folder / ERROR).is_file())
    return next(itertools.chain(complete, failed), None)


def _copy(source: Path, to: Path) -> None:
    """Copy a run folder. Raises RecordError if it holds anything but files and folders, such as links."""
    try:
        for path in (source, *source.rglob("*")):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise RecordError(f"{path}: is neither a file nor a folder, and is not copied")
        shutil.copytree(source, to)
    except (OSError, shutil.Error) as error:
        raise RecordError(f"{source}: cannot be copied: {one_line(error)}") from None
