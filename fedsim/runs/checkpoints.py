"""Checkpoints: what a run depends on between two rounds, in files that are whole and say so.

checkpoints/round-00010.safetensors  the tensors
checkpoints/round-00010.json         all else, with checksums of both; it is written last, and without it there is none

Nothing in them is executed when they are read: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedsim.errors import RecordError
from fedsim.snapshot import Snapshot
from fedsim.system.devices import free_memory
from fedsim.system.files import cannot_write, leads_out, read_bounded, write_whole
from fedsim.version import __version__

FOLDER, FORMAT = "checkpoints", 1
NAME = re.compile(r"round-(\d{5,18})\.json")
SHARE = 0.01  # of a run's time, at most, that its checkpoints take, unless it is said how often they are written
FIRST_COST = 0.05  # seconds that the first is taken to cost, until it has been written


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: of the run; None where nothing is to be kept.
        every: after how many rounds one is written, and after the last; 0: never; None: as often as takes no more than
            one percent of the time.
        keep: how many of them stay, the newest.
    """

    def __init__(self, folder: Path | None, every: int | None, keep: int) -> None:
        self._folder = folder / FOLDER if folder else None
        self._every, self._keep = every, keep
        self._cost, self._since = FIRST_COST, time.perf_counter()

    def due(self, round: int, rounds: int) -> bool:
        """Whether one is to be written after this round, of so many."""
        if self._folder is None or self._every == 0:
            return False
        if self._every is not None:
            return round % self._every == 0 or round == rounds
        return time.perf_counter() - self._since >= self._cost / SHARE

    def write(self, round: int, take: Callable[[], Snapshot], **facts: Any) -> None:
        """Write what `take` gives, with further facts, and remove those that are too many.

        Without a folder it is asked for all the same, since all ranks of several have a part in giving it.
        Raises RecordError where it cannot be written.
        """
        began = time.perf_counter()
        state = take()
        state.facts.update(facts)
        if self._folder is not None:
            self._write(round, state)
            for old in self.rounds()[self._keep :]:
                self._remove(old)
        self._since = time.perf_counter()
        self._cost = self._since - began

    def rounds(self) -> list[int]:
        """The rounds after which one was written, the newest first."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return sorted(int(found[1]) for path in self._folder.iterdir() if (found := NAME.fullmatch(path.name)))[::-1]

    def read(self, round: int) -> Snapshot:
        """The state after a round. Raises RecordError where the checkpoint is damaged."""
        head, tensors = self._paths(round)
        try:
            most = int(free_memory() / 2)
            said = json.loads(read_bounded(head, most, self._folder))
            if said["format"] != FORMAT:
                raise RecordError(f"{head}: has format {said['format']}, and this fedsim reads {FORMAT}")
            checksum = said.pop("checksum")
            content = read_bounded(tensors, most, self._folder)
            if checksum != _checksum_of(said) or said["round"] != round or said["sha256"] != _sha256(content):
                raise RecordError(f"{head}: is damaged: its checksum is another")
            if not isinstance(said["facts"], dict):
                raise RecordError(f"{head}: is damaged: its facts are none")
            return Snapshot(load(content), said["facts"])
        except OSError as error:
            raise RecordError(f"{head}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise RecordError(f"{head}: is damaged: {error!r:.200}") from None

    def forget_after(self, round: int) -> None:
        """Remove those of later rounds, which a run that begins anew from here will come to again."""
        for later in self.rounds():
            if later > round:
                self._remove(later)

    def _write(self, round: int, state: Snapshot) -> None:
        assert self._folder is not None
        head, tensors = self._paths(round)
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        if leads_out(self._folder, self._folder.parent):
            raise RecordError(f"{self._folder}: leads out of the run's folder")
        content = save({name: tensor.cpu() for name, tensor in state.tensors.items()})
        said = {"format": FORMAT, "fedsim": __version__, "round": round, "sha256": _sha256(content)}
        said["facts"] = state.facts
        write_whole(tensors, content)
        write_whole(head, json.dumps({**said, "checksum": _checksum_of(said)}).encode())

    def _remove(self, round: int) -> None:
        for path in self._paths(round):  # the one without which there is no checkpoint first
            with contextlib.suppress(OSError):
                path.unlink()

    def _paths(self, round: int) -> tuple[Path, Path]:
        assert self._folder is not None
        name = f"round-{round:05d}"
        return self._folder / f"{name}.json", self._folder / f"{name}.safetensors"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _checksum_of(said: dict[str, Any]) -> str:
    return _sha256(json.dumps(said, sort_keys=True).encode())
