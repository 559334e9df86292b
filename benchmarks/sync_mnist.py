"""The classic experiment compared with two baselines in the same run.

(i)  The naive way: new spawned processes in every round, each with a DataLoader with per-sample transforms, then an
     average. It is timed from outside, as fedsim is, so both times include the start-up.
(ii) The floor: a bare loop over preloaded tensors that takes the same SGD steps and runs the same tests in plain
     PyTorch, in one process with one thread, with its time divided by the number of cores. It is timed with images in
     PyTorch's usual memory order, which is the stated baseline, and in channels_last order, as in fedsim.

The floor draws the same batches as fedsim, so after one round without dropout the global rows must agree up to rounding
(later rounds amplify the difference). The naive way draws its own batches and must reach about the same accuracy.

    FEDSIM_DATA=... python benchmarks/sync_mnist.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from bare_loop import bare_loop, without_dropout
from common import ROOT, median, report, run_command
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import fedsim
from benchmarks.peers.work import Result
from fedsim import Experiment
from fedsim.data.sources import MNIST_STATISTICS, default_root
from fedsim.models import Net
from fedsim.system.devices import usable_cores
from fedsim.system.packages import import_torchvision

EXPERIMENT = "experiments/mnist_sync_sgd.toml"
WORKERS, ROUNDS, BATCH, LR, MOMENTUM, SEED = 4, 3, 64, 0.01, 0.5, 0  # values of the experiment, for the naive way


class ChannelsLast(Net):
    """The network with images in channels_last order (with one channel this only changes the strides)."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.as_strided(images.shape, (784, 1, 28, 1)))


def channels_last_loop(experiment: Experiment) -> Result:
    """Run the bare loop with channels_last images."""
    return bare_loop(experiment, make_model=ChannelsLast)


def naive_run() -> dict[str, Any]:
    """Run the naive way as a whole process."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, "--naive"], check=True, stdout=subprocess.PIPE, text=True)
    return {"seconds": time.perf_counter() - started, **json.loads(done.stdout)}


def naive_main() -> None:
    """Start new processes in every round, each with its own data set, DataLoader and optimizer."""
    torch.set_num_threads(1)
    context = torch.multiprocessing.get_context("spawn")
    torch.manual_seed(SEED)
    model = Net()
    test_set = _torchvision_mnist(train=False)
    rounds = []
    for round in range(ROUNDS):
        started = time.perf_counter()
        results = context.Queue()
        state = model.state_dict()
        processes = [
            context.Process(target=_naive_worker, args=(worker, round, state, results)) for worker in range(WORKERS)
        ]
        for process in processes:
            process.start()
        states = [results.get() for _ in processes]
        for process in processes:
            process.join()
        model.load_state_dict({name: sum(torch.from_numpy(each[name]) for each in states) / WORKERS for name in state})
        model.eval()
        with torch.no_grad():
            hits = [(model(x).argmax(1) == y).sum().item() for x, y in DataLoader(test_set, batch_size=1000)]
        rounds.append(time.perf_counter() - started)
    print(json.dumps({"rounds": rounds, "accuracy": sum(hits) / len(test_set)}))


def _naive_worker(worker: int, round: int, state: dict[str, Tensor], results: Any) -> None:
    # in favour of the baseline: with PyTorch's default, the processes would compete for the cores
    torch.set_num_threads(1)
    torch.manual_seed(1000 * round + worker)
    model = Net()
    model.load_state_dict(state)
    train_set = _torchvision_mnist(train=True)
    size = len(train_set) // WORKERS
    loader = DataLoader(Subset(train_set, range(worker * size, (worker + 1) * size)), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.nll_loss(model(inputs), targets).backward()
        optimizer.step()
    results.put({name: value.numpy() for name, value in model.state_dict().items()})


def _torchvision_mnist(*, train: bool) -> Any:
    torchvision = import_torchvision()
    transforms = importlib.import_module("torchvision.transforms")
    steps = [transforms.ToTensor(), transforms.Normalize(*MNIST_STATISTICS)]
    return torchvision.datasets.MNIST(default_root(), train=train, transform=transforms.Compose(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--naive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.naive:
        naive_main()
        return
    os.environ.setdefault("FEDSIM_DATA", str(default_root()))
    experiment = fedsim.load_experiment(ROOT / EXPERIMENT)
    plain = without_dropout(fedsim.load_experiment(experiment, ["rounds=1", "engine=serial"]))
    check, first = fedsim.run(plain).model.state_dict(), channels_last_loop(plain).first
    runs = [
        (run_command(EXPERIMENT), bare_loop(experiment), channels_last_loop(experiment), naive_run())
        for _ in range(arguments.repeats)
    ]
    ours, floor, floor_last, naive = zip(*runs, strict=True)
    furthest = max(float((check[name] - value).abs().max()) for name, value in first.items())
    assert furthest < 1e-6, f"fedsim and the floor did different work: global rows differ by {furthest}"
    accuracy = {"fedsim": ours[0].accuracy, "floor": floor[0].accuracies[-1], "naive": naive[0]["accuracy"]}
    assert max(accuracy.values()) - min(accuracy.values()) < 0.03, f"accuracies differ too much: {accuracy}"
    cores = usable_cores()
    floor_round = [median(run.rounds) / cores for run in floor]
    floor_last_round = [median(run.rounds) / cores for run in floor_last]
    our_round = [median(run.rounds) for run in ours]
    naive_round = [median(run["rounds"]) for run in naive]
    report(
        "sync_mnist",
        fedsim_seconds=median([run.seconds for run in ours]),
        naive_seconds=median([run["seconds"] for run in naive]),
        fedsim_round_seconds=median(our_round),
        naive_round_seconds=median(naive_round),
        floor_round_seconds=median(floor_round),
        times_faster_than_naive=median([b["seconds"] / a.seconds for a, b in zip(ours, naive, strict=True)]),
        times_faster_than_naive_per_round=median([b / a for a, b in zip(our_round, naive_round, strict=True)]),
        round_over_floor=median([a / b for a, b in zip(our_round, floor_round, strict=True)]),
        round_over_channels_last_floor=median([a / b for a, b in zip(our_round, floor_last_round, strict=True)]),
        largest_difference_from_floor=furthest,
        accuracy=accuracy,
        repeats=arguments.repeats,
    )


if __name__ == "__main__":
    main()
