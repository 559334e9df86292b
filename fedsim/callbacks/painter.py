"""Draw the figures of a run or comparison in a process that imports matplotlib while the runs continue."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, ClassVar

from fedsim.core.plotting import encode
from fedsim.data.sources import forget_loaded_data
from fedsim.errors import FedsimError
from fedsim.processes.child_process import Child, forks, init_child_process, signals_deferred, start_process
from fedsim.processes.messages import Channel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawings = Mapping[str, Callable[[], "Figure | None"]]
PATIENCE = 1.0  # seconds to wait for the drawing process before telling the user
TIMEOUT = 20.0  # seconds to wait after that, before drawing in this process


class Painter:
    """Context manager that draws figures, if possible in a separate process, so that users need not wait.

    Args:
        formats: file formats of the figures, such as "png". Without formats, nothing is drawn and no process starts.
        on_wait: function that is called if drawing takes longer than a second.
    """

    came_before: ClassVar[bool] = False

    def __init__(self, formats: Sequence[str], on_wait: Callable[[], object] = lambda: None) -> None:
        self._formats, self._on_wait = formats, on_wait
        self._child: Child | None = None

    def files(self, drawings: Drawings) -> dict[str, bytes]:
        """Draw figures, and return the content of each file by file name, such as "curve.png".

        `drawings` has, for each figure, a function that returns the figure, or None for no figure.
        """
        if not (drawings and self._formats):
            return {}
        if self._child is not None:
            process, pipe = self._child
            with contextlib.suppress(Exception):  # the process died, or a drawing cannot be pickled
                pipe.send((drawings, self._formats))
                sources: list[Any] = [pipe, process.sentinel]
                if not (ready := wait(sources, PATIENCE)):
                    self._on_wait()
                    ready = wait(sources, TIMEOUT)
                if ready and (answer := pipe.receive()):
                    return answer.load()
        return _files(drawings, self._formats)

    def __enter__(self) -> Painter:
        if self._formats and forks("auto", 1) and not Painter.came_before and "matplotlib.figure" not in sys.modules:
            Painter.came_before = True
            with signals_deferred():
                self._child = start_process(_serve, name="fedsim-figures", daemon=True, fork=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            with signals_deferred():
                process, pipe = self._child
                process.kill()
                process.join()
                process.close()
                pipe.close()


def _files(drawings: Drawings, formats: Sequence[str]) -> dict[str, bytes]:
    figures = {name: draw() for name, draw in drawings.items()}
    return {
        f"{name}.{format}": encode(figure, format) for name, figure in figures.items() if figure for format in formats
    }


def _serve(pipe: Connection) -> None:
    init_child_process()
    forget_loaded_data()  # the run moves it to shared memory, so this process alone would keep the original
    channel = Channel(pipe)
    # an invalid setting of matplotlib, which the parent reports when it draws, or the end of the run
    with contextlib.suppress(FedsimError, EOFError, OSError):
        from fedsim.core.figure import Figure

        figure = Figure(layout="constrained")
        figure.subplots().plot([0, 1], label="0123456789")
        encode(figure, "png")  # loads fonts
        if (message := channel.receive()) is not None:
            channel.send(_files(*message.load()))
