"""Session: an engine and datasets that consecutive runs share, so that only the first run starts processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fedsim.core.objects import ObjectName
from fedsim.data import TensorData
from fedsim.data.brought import holds_columns
from fedsim.data.sources import load_dataset_once
from fedsim.engines import Engine
from fedsim.engines import engine as engines
from fedsim.errors import ExperimentError, FedsimError

MOST_DATA_SETS = 4  # maximum number of datasets in memory; the least recently used ones are dropped


class Session:
    """Keeps processes and data sets between several runs, which then start faster. Use it in a `with` block.

    The end of the block stops the processes. Files, functions and data sets of single samples are read once, so later
    changes of them have no effect in the session. Arrays, tensors and data frames are read in each run.

    >>> import fedsim
    >>> with fedsim.Session() as session:
    ...     results = [fedsim.run(seed=seed, rounds=1, model="logistic", session=session) for seed in range(2)]
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._engine_key: tuple[Any, ...] = ()
        self._in_use = False  # whether a run uses the engine
        self._data: dict[str, tuple[TensorData, TensorData]] = {}

    @contextlib.contextmanager
    def engine(self, name: str, device: torch.device, *arguments: Any) -> Iterator[Engine]:
        """Return a context manager that yields an engine for one run, and frees the run's memory at the end.

        Args:
            name: name of the engine.
            device: device of the run.
            arguments: arguments of the engine's constructor.

        Raises ExperimentError if another run uses this session.
        """
        if self._in_use:
            raise ExperimentError(
                "session: is in use by a run that has not ended; for a run inside a callback, omit `session` or pass "
                "another Session"
            )
        key = (name, device, *arguments)
        if self._engine is None or key != self._engine_key:
            self._close_engine()
            self._engine, self._engine_key = engines.get(name).target(*arguments), key
        engine, self._in_use = self._engine, True
        try:
            yield engine
            engine.leave()
        except FedsimError:
            if engine.at_work:  # the run has failed, but the engine can be reused
                engine.leave()
            else:
                self._close_engine()
            raise
        except BaseException:
            self._close_engine()
            raise
        finally:
            self._in_use = False

    def data(
        self, name: str, root: str | None, params: Mapping[str, Any], device: torch.device
    ) -> tuple[TensorData, TensorData]:
        """Load a data set to `device`. Returns (training samples, test samples).

        Args:
            name: name of the data set.
            root: folder for downloaded files; None for the default folder.
            params: parameters of the data set.
            device: device of the tensors.
        """
        if isinstance(name, ObjectName) and holds_columns(name.target):  # the user may change them between runs
            return self._loaded(name, root, params, device)
        key = repr((name, root, sorted(params.items()), device))
        if key not in self._data:
            while len(self._data) >= MOST_DATA_SETS:
                del self._data[next(iter(self._data))]
            self._data[key] = self._loaded(name, root, params, device)
        self._data[key] = self._data.pop(key)  # the most recently used one is last
        return self._data[key]

    @staticmethod
    def _loaded(
        name: str, root: str | None, params: Mapping[str, Any], device: torch.device
    ) -> tuple[TensorData, TensorData]:
        train, test = load_dataset_once(name, root, params, take=True)
        return train.to(device, train.dtype), test.to(device, test.dtype)

    def close(self) -> None:
        """Stop the engine's processes, and free the data."""
        self._data.clear()
        self._close_engine()

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
