"""A round of resnet20, char_lstm and gpt against the floor: a bare loop, its time divided by the number of cores.

Images (uint8, 32x32) and characters are random, made here. fedsim trains a cohort of 8 workers on all cores with each
engine. The bare loop (`bare_loop.py`) draws the same batches, takes the same steps and tests on the same samples, with
torch.nn.LSTM's own kernel for char_lstm. In float64 the global models must agree after one round. resnet20 has two
floors: images in PyTorch's usual order, and in channels_last order, as fedsim has them. On a busy machine only the
figures that begin with `cpu_` mean something: they count the CPU seconds of one process on both sides.

    python benchmarks/models.py [--repeats 3] [--models resnet20 ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import torch
from bare_loop import bare_loop
from common import median, report
from torch import nn

import fedsim
from fedsim import Experiment, TensorData
from fedsim.core.randomness import torch_generator
from fedsim.system.devices import usable_cores

CHARACTERS, LENGTH = 90, 80
COHORT, ROUNDS = 8, 3
ENGINES = "auto", "batched"  # timed by the clock, on all cores
CPU_ENGINES = "serial", "batched"  # timed in CPU seconds of one process
TOLERANCE = 1e-9  # between global models of float64 after one round


def images(root: Any, *, train: int, test: int) -> tuple[TensorData, TensorData]:
    """Random images in colour, with random labels."""
    generator = torch_generator(0, "images")
    pixels = torch.randint(0, 256, (train + test, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (train + test,), generator=generator)
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    first, last = (
        TensorData.of_images(pixels[part], labels[part], mean, std) for part in (slice(train), slice(train, None))
    )
    return first, last


def text(root: Any, *, train: int, test: int) -> tuple[TensorData, TensorData]:
    """Random characters; the targets are the next ones."""
    characters = torch.randint(0, CHARACTERS, (train + test, LENGTH + 1), generator=torch_generator(0, "text"))
    inputs, targets = characters[:, :-1].clone(), characters[:, 1:].clone()
    first, last = (
        TensorData(inputs[part], targets[part], dtype=torch.int64) for part in (slice(train), slice(train, None))
    )
    return first, last


def task_of_text(train: int) -> dict[str, Any]:
    return {"data": {"name": "models:text", "train": train, "test": 32}, "task": "next_token"}


TASKS: dict[str, tuple[dict[str, Any], int]] = {  # tables and batch size
    "resnet20": ({"data": {"name": "models:images", "train": 256, "test": 64}}, 32),
    "char_lstm": (task_of_text(240), 10),
    "gpt": ({**task_of_text(240), "model": {"name": "gpt", "layers": 4, "width": 128}}, 10),
}


def experiment_of(name: str, **changes: Any) -> Experiment:
    tables, batch = TASKS[name]
    local = {"batch_size": batch, "lr": 0.01}
    how = {"workers": COHORT, "rounds": ROUNDS, "partition": "iid", "local": local}
    return Experiment(**{"model": name, **tables, **how, **changes})


def in_channels_last(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model, which brings its images into channels_last order."""

    def made() -> nn.Module:
        module = make()
        module.register_forward_pre_hook(lambda _, images: images[0].contiguous(memory_format=torch.channels_last))
        return module

    return made


class CpuTimes(fedsim.Callback):
    """The CPU time of this process at the end of each round."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_round(self, record: Any) -> None:
        self.ends.append(time.process_time())


def check(name: str) -> float:
    """The largest difference between global models of float64 after one round on a few samples."""
    data = {**TASKS[name][0]["data"], "train": 6 * COHORT, "test": 10}
    changes = {"data": data, "rounds": 1, "precision": "float64"}
    first = bare_loop(experiment_of(name, **changes, engine="serial")).first
    differences = []
    for engine in ENGINES:
        state = fedsim.run(experiment_of(name, **changes, engine=engine)).model.state_dict()
        differences += [float((state[key] - value).abs().max()) for key, value in first.items()]
    assert max(differences) < TOLERANCE, f"{name}: fedsim and the floor did different work: they differ: {differences}"
    return max(differences)


def figures_of(name: str, repeats: int) -> dict[str, Any]:
    difference = check(name)
    plain = experiment_of(name)
    floors: dict[str, Callable[[], nn.Module]] = {"floor": plain.model.component}
    if name.startswith("resnet"):
        floors["channels_last_floor"] = in_channels_last(plain.model.component)
    rounds: dict[str, list[float]] = {}
    how: dict[str, Any] = {}
    for _ in range(repeats):  # all in turn, so that a slow minute does not fall on one of them
        for engine in ENGINES:
            settings: list[Any] = []
            result = fedsim.run(experiment_of(name, engine=engine), on_start=settings.append)
            how[engine] = {key: settings[0].how.get(key) for key in ("engine", "processes", "reason")}
            seconds = [sum(record["seconds"].values()) for record in result.history]
            rounds.setdefault(engine, []).append(median(seconds))
        for engine in CPU_ENGINES:
            times = CpuTimes()
            fedsim.run(experiment_of(name, engine=engine, processes=1), callbacks=[times])
            rounds.setdefault(f"cpu_{engine}", []).append(median([b - a for a, b in pairwise(times.ends)]))
        for floor, make in floors.items():
            seconds = bare_loop(plain, make_model=make).rounds
            rounds.setdefault(floor, []).append(median(seconds) / usable_cores())
            seconds = bare_loop(plain, make_model=make, clock=time.process_time).rounds
            rounds.setdefault(f"cpu_{floor}", []).append(median(seconds))
    figures: dict[str, Any] = {f"{key}_round_seconds": median(values) for key, values in rounds.items()}
    for prefix, engines in (("", ENGINES), ("cpu_", CPU_ENGINES)):
        for engine, floor in product(engines, floors):
            pairs = zip(rounds[prefix + engine], rounds[prefix + floor], strict=True)
            figures[f"{prefix}{engine}_over_{floor}"] = median([ours / bare for ours, bare in pairs])
    return {**figures, "auto": how["auto"], "largest_difference_from_floor": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(TASKS), choices=list(TASKS))
    arguments = parser.parse_args()
    figures = {name: figures_of(name, arguments.repeats) for name in arguments.models}
    report("models", **figures, repeats=arguments.repeats, keep=arguments.models == list(TASKS))


if __name__ == "__main__":
    main()
