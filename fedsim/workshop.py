"""What runs that follow one another share, so that only the first of them has to start from nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fedsim.data import TensorData, load_dataset
from fedsim.engines import Engine
from fedsim.engines import engine as engines
from fedsim.errors import FedsimError

MOST_DATA_SETS = 4  # kept at a time; of more, those used longest ago are loaded anew


class Workshop:
    """An engine with its processes, and data sets, kept from run to run; a context manager that ends them.

        with Workshop() as workshop:
            for seed in range(30):
                fedsim.run({"seed": seed}, workshop=workshop)

    The engine is kept as long as runs ask for the same one and it has not failed. Data sets are kept where they lie:
    on the device, or in the shared memory that an engine has moved them to.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._engine_key: tuple[Any, ...] = ()
        self._data: dict[str, tuple[TensorData, TensorData]] = {}

    @contextlib.contextmanager
    def engine(self, name: str, processes: int, threads: int, timeout: float, device: torch.device) -> Iterator[Engine]:
        """An engine for one run, which leaves its task when the `with` block ends."""
        key = (name, processes, threads, timeout, device)
        if self._engine is None or key != self._engine_key:
            self._close_engine()
            self._engine, self._engine_key = engines.get(name).target(processes, threads, timeout), key
        engine = self._engine
        try:
            yield engine
            engine.leave()
        except FedsimError:
            if engine.at_work:  # what went wrong was not its doing
                engine.leave()
            else:
                self._close_engine()
            raise
        except BaseException:
            self._close_engine()
            raise

    def data(
        self, name: str, root: str | None, params: Mapping[str, Any], device: torch.device
    ) -> tuple[TensorData, TensorData]:
        """The training and test samples of a data set, on the device; see `load_dataset`."""
        key = repr((name, root, sorted(params.items()), device))
        if key not in self._data:
            while len(self._data) >= MOST_DATA_SETS:
                del self._data[next(iter(self._data))]
            train, test = load_dataset(name, root, **params)
            self._data[key] = train.to(device, train.dtype), test.to(device, test.dtype)
        self._data[key] = self._data.pop(key)  # the one used last stands last
        return self._data[key]

    def close(self) -> None:
        """End the engine's processes, and let go of the data."""
        self._data.clear()
        self._close_engine()

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
