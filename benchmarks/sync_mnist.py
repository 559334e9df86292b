"""The classic experiment against two baselines in the same run.

(i)  The naive way: fresh spawn processes every round, a DataLoader with per-sample transforms in each, then an
     average. Timed from outside, as fedsim is, so both include their start-up.
(ii) The floor: a bare loop over preloaded tensors that does the same SGD steps and the same tests with plain
     PyTorch in one process with one thread, its time divided by the number of cores. Once with images in PyTorch's
     usual order, which is the stated baseline, and once in channels_last order, as fedsim has them.

The floor draws the same batches and the same dropout as fedsim, so after a round the global rows must agree up to
rounding (later rounds amplify it); the naive way draws its own, and must reach about the same accuracy.

    FEDSIM_DATA=... python benchmarks/sync_mnist.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import median, report
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import fedsim
from fedsim.data import TensorData, load_dataset
from fedsim.data.sources import MNIST_MEAN, MNIST_STD, default_root
from fedsim.devices import usable_cores
from fedsim.models import Net
from fedsim.randomness import numpy_generator, seed_everything
from fedsim.vision import import_torchvision

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = ROOT / "experiments" / "mnist_sync_sgd.toml"
WORKERS, ROUNDS, BATCH, LR, MOMENTUM, SEED = 4, 3, 64, 0.01, 0.5, 0


def fedsim_run() -> dict[str, Any]:
    """The command a user types, as a whole process."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        started = time.perf_counter()
        command = [sys.executable, str(ROOT / "run_experiment.py"), str(EXPERIMENT), "--quiet", "--out", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": seconds,
        "rounds": [sum(record["seconds"].values()) for record in records],
        "accuracy": records[-1]["test_accuracy"],
    }


class Plain(Net):
    """The network as it is, trained with the loss that fits its log-probabilities."""

    loss = staticmethod(F.nll_loss)


class ChannelsLast(Net):
    """The same network, which sees its images in channels_last order (for one channel that is a matter of strides)."""

    loss = staticmethod(F.cross_entropy)  # fedsim's: the same as NLL on log-probabilities, but for rounding

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.as_strided(images.shape, (784, 1, 28, 1)))


def floor_run(network: type[Plain] | type[ChannelsLast]) -> dict[str, Any]:
    """The same steps in a bare loop, in this process."""
    torch.set_num_threads(1)
    (inputs, targets), (test_inputs, test_targets) = map(_preloaded, load_dataset("mnist"))
    seed_everything(torch.device("cpu"), SEED, "model")
    model = network()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    size = len(inputs) // WORKERS
    rounds, states_by_round = [], []
    for round in range(1, ROUNDS + 1):
        started = time.perf_counter()
        states = []
        for worker in range(WORKERS):
            order = torch.from_numpy(numpy_generator(SEED, "batches", round, worker).permutation(size)) + worker * size
            seed_everything(torch.device("cpu"), SEED, "layers", round, worker)
            states.append(_train(model, state, inputs, targets, order))
        state = {name: torch.stack([each[name] for each in states]).mean(0) for name in state}
        model.load_state_dict(state)
        accuracy = _test(model, test_inputs.split(1000), test_targets.split(1000))
        rounds.append(time.perf_counter() - started)
        states_by_round.append(state)
    return {"rounds": rounds, "accuracy": accuracy, "states": states_by_round}


def _preloaded(data: TensorData) -> tuple[Tensor, Tensor]:
    inputs, targets = data.gather(torch.arange(len(data)))
    return inputs.clone(memory_format=torch.contiguous_format), targets


def _train(
    model: nn.Module, state: dict[str, Tensor], inputs: Tensor, targets: Tensor, order: Tensor
) -> dict[str, Tensor]:
    model.load_state_dict(state)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for batch in order.split(BATCH):
        optimizer.zero_grad()
        model.loss(model(inputs.index_select(0, batch)), targets.index_select(0, batch)).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def _test(model: nn.Module, inputs: Any, targets: Any) -> float:
    model.eval()
    hits = [(model(x).argmax(1) == y).sum().item() for x, y in zip(inputs, targets, strict=True)]
    return sum(hits) / sum(len(y) for y in targets)


def naive_run() -> dict[str, Any]:
    """The naive way, as a whole process."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, "--naive"], check=True, stdout=subprocess.PIPE, text=True)
    return {"seconds": time.perf_counter() - started, **json.loads(done.stdout)}


def naive_main() -> None:
    """Fresh processes every round; each makes its own data set, DataLoader and optimizer."""
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
    torch.set_num_threads(1)  # the kind version: with PyTorch's default the processes would fight for the cores
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
    steps = [transforms.ToTensor(), transforms.Normalize(MNIST_MEAN, MNIST_STD)]
    return torchvision.datasets.MNIST(default_root(), train=train, transform=transforms.Compose(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--naive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.naive:
        naive_main()
        return
    os.environ.setdefault("FEDSIM_DATA", str(default_root()))
    check = fedsim.run(fedsim.load_experiment(EXPERIMENT, ["rounds=1", "engine=serial"])).model.state_dict()
    runs = [(fedsim_run(), floor_run(Plain), floor_run(ChannelsLast), naive_run()) for _ in range(arguments.repeats)]
    ours, floor, floor_last, naive = zip(*runs, strict=True)
    furthest = max(float((check[name] - value).abs().max()) for name, value in floor_last[0]["states"][0].items())
    assert furthest < 1e-6, f"fedsim and the floor did different work: global rows differ by {furthest}"
    accuracy = {"fedsim": ours[0]["accuracy"], "floor": floor[0]["accuracy"], "naive": naive[0]["accuracy"]}
    assert max(accuracy.values()) - min(accuracy.values()) < 0.03, f"they did different work: {accuracy}"
    cores = usable_cores()
    floor_round = [median(run["rounds"]) / cores for run in floor]
    floor_last_round = [median(run["rounds"]) / cores for run in floor_last]
    our_round = [median(run["rounds"]) for run in ours]
    naive_round = [median(run["rounds"]) for run in naive]
    report(
        "sync_mnist",
        fedsim_seconds=median([run["seconds"] for run in ours]),
        naive_seconds=median([run["seconds"] for run in naive]),
        fedsim_round_seconds=median(our_round),
        naive_round_seconds=median(naive_round),
        floor_round_seconds=median(floor_round),
        times_faster_than_naive=median([b["seconds"] / a["seconds"] for a, b in zip(ours, naive, strict=True)]),
        times_faster_than_naive_per_round=median([b / a for a, b in zip(our_round, naive_round, strict=True)]),
        round_over_floor=median([a / b for a, b in zip(our_round, floor_round, strict=True)]),
        round_over_channels_last_floor=median([a / b for a, b in zip(our_round, floor_last_round, strict=True)]),
        largest_difference_from_floor=furthest,
        accuracy=accuracy,
        repeats=arguments.repeats,
    )


if __name__ == "__main__":
    main()
