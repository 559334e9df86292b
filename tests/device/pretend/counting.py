"""Counts of kernel launches and host waits, by operation and source line of fedsim."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

import fedsim

FEDSIM = str(Path(fedsim.__file__).parent)
NOT_CALLERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))

LAUNCH, IN_GRAPH = "launch", "launch in a graph"
UPLOAD, DOWNLOAD, READ, SYNCHRONISATION = "upload", "download", "host read", "synchronisation"
WAITS = (UPLOAD, DOWNLOAD, READ, SYNCHRONISATION)


class Counts:
    """Counts of the events in a block, by (kind, operation, source line)."""

    def __init__(self) -> None:
        self.events: Counter[tuple[str, str, str]] = Counter()

    def of(self, *kinds: str) -> int:
        return sum(count for (kind, *_), count in self.events.items() if kind in kinds)

    @property
    def launches(self) -> int:
        """Number of launches by the host. A graph replay counts once."""
        return self.of(LAUNCH)

    @property
    def graph_launches(self) -> int:
        """Number of launches inside the replayed graphs."""
        return self.of(IN_GRAPH)

    @property
    def uploads(self) -> int:
        """Number of copies from host memory. Those with `non_blocking` are not waits."""
        return self.of(UPLOAD, f"{UPLOAD} without a wait")

    @property
    def waits(self) -> int:
        """Number of times that the host waited for the GPU: uploads, downloads, reads and synchronisations."""
        return self.of(*WAITS)

    def table(self, *kinds: str) -> str:
        """Return one line for each kind, operation and source line, most frequent first. `kinds`: only these kinds."""
        chosen = [(count, *event) for event, count in self.events.items() if not kinds or event[0] in kinds]
        return "\n".join(
            f"{count:6}  {kind:18} {line:48} {operation}"
            for count, kind, operation, line in sorted(chosen, key=lambda row: (-row[0], row[1:]))
        )


class Counting:
    """The stack of open blocks that count events."""

    def __init__(self) -> None:
        self._open: list[Counts] = []

    @contextlib.contextmanager
    def block(self) -> Iterator[Counts]:
        counts = Counts()
        self._open.append(counts)
        try:
            yield counts
        finally:
            self._open.remove(counts)

    def add(self, kind: str, operation: str, times: int = 1) -> None:
        if self._open:
            event = kind, operation, source_line()
            for counts in self._open:
                counts.events[event] += times


def source_line() -> str:
    """Return the innermost source line of fedsim on the stack, or else that of any other caller of PyTorch."""
    frame, caller = sys._getframe(1), ""
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(FEDSIM):
            return f"{path[len(FEDSIM) + 1 :]}:{frame.f_lineno}"
        if not caller and not path.startswith(NOT_CALLERS):
            caller = f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return caller
