"""The names of runs that are drawn together: what distinguishes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedsim.config.source_catalog import plug_tables
from fedsim.core.input_limits import leaves_of
from fedsim.errors import cut
from fedsim.records.axes import label
from fedsim.records.combinations import SEED, canonical
from fedsim.records.reader import Run

NEUTRAL = ("name", SEED, "device", "engine", "processes", "data.root", "records")  # keys that name no line


def run_names(runs: Sequence[Run]) -> list[str]:
    """The settings in which each run differs from others, without the seed: "median", "krum, f=2, lr=0.1".

    Runs of one name are seeds of one line. If two of these have one seed, all runs are named by their folders.
    """
    tables = [{key: value for key, value in leaves_of(run.experiment) if not _is_neutral(key)} for run in runs]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    differing = [key for key in keys if len({canonical(table.get(key)) for table in tables}) > 1]
    plugs = {f"{place}.{table.named_by}" for place, table in plug_tables().items()}

    def text(key: str, value: object) -> str:
        return label(value) if key in plugs else f"{key.rpartition('.')[2]}={label(value)}"

    names = [", ".join(text(key, table[key]) for key in differing if key in table) for table in tables]
    same = Counter((name, run.seed) for name, run in zip(names, runs, strict=True))
    if max(same.values()) > 1:
        return [cut(run.folder.resolve().name) for run in runs]
    return [name or runs[0].name for name in names]


def _is_neutral(key: str) -> bool:
    return key in NEUTRAL or key.partition(".")[0] in NEUTRAL
