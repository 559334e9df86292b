"""Write and read checkpoints, which store the state of a run between two rounds in two files:

checkpoints/round-00010.safetensors  the tensors
checkpoints/round-00010.json         all other state, with checksums of both files; written last

Reading verifies the checksums and executes no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedsim.core.snapshot import Snapshot
from fedsim.errors import RecordError, show
from fedsim.system.devices import free_memory
from fedsim.system.files import is_outside, os_errors_as_record_errors, read_bounded, write_atomically
from fedsim.version import __version__

FOLDER, FORMAT = "checkpoints", 3
NAME = re.compile(r"round-(\d{5,18})\.json")
SHARE = 0.01  # maximum share of the run time for checkpoints if `checkpoint.every` is not set
FIRST_COST = 0.05  # assumed duration of the first checkpoint in seconds


def rounding_of(how: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `how` (how a run is computed) that affect the rounding of sums, such as `ranks`."""
    return {key: how[key] for key, least in (("width", 1), ("ranks", 2)) if how.get(key, 0) >= least}


class CheckpointFolder:
    """The checkpoints in the folder of a run.

    Args:
        folder: folder of the run, or None to write no checkpoints.
        every: number of rounds between two checkpoints, with another checkpoint after the last round; 0: no
            checkpoints; None: chosen so that checkpoints take at most 1 % of the run time.
        keep: number of checkpoints to keep. Older ones are removed.
    """

    def __init__(self, folder: Path | None, every: int | None, keep: int) -> None:
        self._folder = folder / FOLDER if folder else None
        self._every, self._keep = every, keep
        self._cost, self._since = FIRST_COST, time.perf_counter()

    def due(self, round: int, rounds: int, *, paused: bool = False) -> bool:
        """Whether to write a checkpoint after round number `round` of `rounds`.

        `paused`: whether a user-defined callback ends the run after this round.
        """
        if self._folder is None or self._every == 0:
            return False
        if self._every is not None:
            return round % self._every == 0 or round == rounds
        return paused or time.perf_counter() - self._since >= self._cost / SHARE

    def write(self, round: int, take: Callable[[], Snapshot], **metadata: Any) -> None:
        """Write a checkpoint with the state that `take()` returns and additional `metadata`. Remove old checkpoints.

        Raises RecordError if the checkpoint cannot be written.
        """
        began = time.perf_counter()
        state = take()
        state.metadata.update(metadata)
        if self._folder is not None:
            self._write(round, state)
            for old in self.rounds()[self._keep :]:
                self._remove(old)
        self._since = time.perf_counter()
        self._cost = self._since - began

    def rounds(self) -> list[int]:
        """Return the round numbers of the stored checkpoints, newest first."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return sorted(int(match[1]) for path in self._folder.iterdir() if (match := NAME.fullmatch(path.name)))[::-1]

    def read(self, round: int) -> Snapshot:
        """Return the state that was stored after a round. Raises RecordError if the checkpoint is damaged."""
        head, tensors = self._paths(round)
        try:
            most = int(free_memory() / 2)
            head_data = json.loads(read_bounded(head, most, self._folder))
            if head_data["format"] != FORMAT:
                raise RecordError(
                    f"{head}: has format {show(head_data['format'])}, but this version of fedsim reads only format "
                    f"{FORMAT}"
                )
            checksum = head_data.pop("checksum")
            content = read_bounded(tensors, most, self._folder)
            intact = checksum == _checksum_of(head_data) and head_data["sha256"] == _sha256(content)
            if not intact or head_data["round"] != round:
                raise RecordError(f"{head}: is damaged: its checksum does not match")
            if not isinstance(head_data["metadata"], dict):
                raise RecordError(f'{head}: is damaged: "metadata" is not a JSON object')
            return Snapshot(load(content), head_data["metadata"])
        except OSError as error:
            raise RecordError(f"{head}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise RecordError(f"{head}: is damaged: {error!r:.200}") from None

    def forget_after(self, round: int) -> None:
        """Remove the checkpoints of all rounds after `round`, because the run is continued from `round`."""
        for later in self.rounds():
            if later > round:
                self._remove(later)

    def _write(self, round: int, state: Snapshot) -> None:
        assert self._folder is not None
        head, tensors = self._paths(round)
        with os_errors_as_record_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
        if is_outside(self._folder, self._folder.parent):
            raise RecordError(f"{self._folder}: is a link that leads out of the run folder; remove the link")
        content = save({name: tensor.cpu() for name, tensor in state.tensors.items()})
        head_data = {"format": FORMAT, "fedsim": __version__, "round": round, "sha256": _sha256(content)}
        head_data["metadata"] = state.metadata
        write_atomically(tensors, content)
        write_atomically(head, json.dumps({**head_data, "checksum": _checksum_of(head_data)}).encode())

    def _remove(self, round: int) -> None:
        for path in self._paths(round):  # the JSON file first, because a checkpoint counts only with this file
            with contextlib.suppress(OSError):
                path.unlink()

    def _paths(self, round: int) -> tuple[Path, Path]:
        assert self._folder is not None
        name = f"round-{round:05d}"
        return self._folder / f"{name}.json", self._folder / f"{name}.safetensors"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _checksum_of(head_data: dict[str, Any]) -> str:
    return _sha256(json.dumps(head_data, sort_keys=True).encode())
