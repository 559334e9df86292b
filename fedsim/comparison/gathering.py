"""A comparison cut into parts, each of which some job of a queue does by itself; and the parts put together again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.comparison.axes import canonical
from fedsim.comparison.comparing import Comparison, compared
from fedsim.comparison.folder import ERROR, GRID_FILE, PARTS, GridFolder, differences_of_grids, inner_folder, read_grid
from fedsim.comparison.grid import Grid, PlannedRun, load_grid
from fedsim.errors import ExperimentError, RecordError, one_line, show


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` of a grid: run k, from 0 in the grid's order, belongs to part k mod count."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`2/8`. Raises ExperimentError where it is no such thing."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if not found or not int(found[1]) < int(found[2]):
            raise ExperimentError(f"--shard {show(text)}: must be i/n, from 0/n to n-1/n")
        return cls(int(found[1]), int(found[2]))

    def of(self, grid: Grid) -> list[PlannedRun]:
        """The runs that belong to it."""
        return grid.runs[self.index :: self.count]

    def folder(self, whole: Path) -> Path:
        """Where it lies in the folder of the whole."""
        return whole / PARTS / f"{self.index}-of-{self.count}"


def gather(
    folders: Sequence[Path], out: Path, target: float | None = None, *, allow_imports: bool = False
) -> Comparison:
    """Put the runs of several comparisons' folders, or of their parts, together in the folder `out`, and compare.

    Nothing is run: what is finished, or has failed, in any of the folders is copied. Folders may be `out` itself;
    `target` is a test accuracy, and `allow_imports` for what the folders name, both as of `load_grid`.

    Raises RecordError where a folder holds no comparison, or they hold different grids.
    """
    sources = [source for folder in folders for source in _sources(folder)]
    held = [read_grid(source / GRID_FILE, source) for source in sources]
    for source, other in zip(sources[1:], held[1:], strict=True):
        lines = differences_of_grids(held[0], other)
        if lines:
            raise RecordError(f"{source}: holds another grid than {sources[0]}\n" + "\n".join(lines))
    grid = load_grid(
        held[0]["base"],
        held[0]["axes"],
        target=held[0].get("target") if target is None else target,
        file=sources[0] / GRID_FILE,
        allow_imports=allow_imports,
    )
    with GridFolder(out, grid) as folder:
        for run in grid.runs:
            if not folder.is_finished(run) and (found := _best(run, sources, held, folder)):
                folder.clear(run)
                _copy(found, folder.run_folder(run))
        return compared(grid, folder)


def _sources(folder: Path) -> list[Path]:
    """The folders with a grid.json: this one, and its parts."""
    found = [path for path in (folder, *sorted((folder / PARTS).glob("*"))) if (path / GRID_FILE).is_file()]
    if not found:
        raise RecordError(f"{folder}: is no folder of a comparison (it has no {GRID_FILE}, nor parts in {PARTS}/)")
    return found


def _best(run: PlannedRun, sources: Sequence[Path], held: Sequence[dict[str, Any]], folder: GridFolder) -> Path | None:
    """Where a run is finished; else where it has failed."""
    there = []
    for source, described in zip(sources, held, strict=True):
        paths = [
            inner_folder(source, each["id"])  # what it says of the folder itself may lead anywhere
            for each in described["runs"]
            if canonical(each["point"]) == canonical(run.point)
        ]
        there += [path for path in paths if path.is_dir() and path != folder.run_folder(run)]
    finished = [path for path in there if folder.is_complete(path, run)]
    failed = [path for path in there if (path / ERROR).is_file()]
    return next(iter([*finished, *failed]), None)


def _copy(found: Path, to: Path) -> None:
    """Copy a run folder of files and folders. Raises RecordError where it holds anything else, as links elsewhere."""
    try:
        for path in (found, *found.rglob("*")):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise RecordError(f"{path}: is neither a file nor a folder, and is not copied")
        shutil.copytree(found, to)
    except (OSError, shutil.Error) as error:
        raise RecordError(f"{found}: cannot be copied: {one_line(error)}") from None
