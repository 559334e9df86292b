"""Baselines: programs that a user of PyTorch or JAX could write for one experiment instead of using fedsim.

Each baseline does the work of fedsim's rounds: from the same initial model, it trains the same cohorts on the same
batches with plain SGD in the same precision, averages the models, and tests the average. Only dropout is drawn
differently. The time of a baseline excludes drawing the batches. A further baseline is the bare loop (bare_loop.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from benchmarks.peers.export import work_of
from benchmarks.peers.work import TEST_BATCH, Log, Result, State, Work, copied
from fedsim import Experiment
from fedsim.system.devices import synchronize
from fedsim.system.precision import PRECISIONS

WARM_UPS = 2  # executions before a capture


class Baseline:
    """A program that trains a cohort of workers with equally many samples. The model has no buffers.

    Args:
        experiment: experiment whose rounds are run.
        work: its work.
        cohort: number of workers in a round.
        samples: number of training samples of each worker.
    """

    def __init__(self, experiment: Experiment, work: Work, cohort: int, samples: int) -> None:
        sgd, device = dict(work.sgd), work.inputs.device
        self.lr, self.momentum, self.batch_size = sgd.pop("lr"), sgd.pop("momentum", 0.0), work.batch_size
        self.experiment, self.work, self.model = experiment, work, work.model()
        if any(sgd.values()) or len(work.orders[0][0]) != 1 or any(True for _ in self.model.buffers()):
            raise ValueError("baselines need one epoch of SGD with at most momentum, and a model without buffers")
        self.names = [name for name, _ in self.model.named_parameters()]
        self.parameters = [parameter.detach() for parameter in self.model.parameters()]  # share the model's memory
        self.orders = torch.zeros(cohort, samples, dtype=torch.int64, device=device)
        self.right = torch.zeros((), dtype=torch.int64, device=device)  # number of right answers in the test

    def round(self, orders: Tensor) -> float:
        """Run a round, and return the test accuracy.

        `orders` are the numbers of each worker's samples in the order of training, int64 [cohort, samples].
        """
        self.orders.copy_(orders)
        self.train()
        self.test()
        return self.right.item() / self.work.test_targets.numel()

    def train(self) -> object:
        """Train each worker on its samples in `self.orders`, and set the model to the average."""
        raise NotImplementedError

    def test(self) -> object:
        return self.right.copy_(self.work.right_answers(self.model))

    def state(self) -> State:
        """Return a copy of the global model on the CPU."""
        return copied(dict(zip(self.names, self.parameters, strict=True)))

    def step(self, rows: list[Tensor], gradients: Sequence[Tensor], momenta: list[Tensor]) -> None:
        """Update `rows` by a step of SGD."""
        if self.momentum:
            torch._foreach_mul_(momenta, self.momentum)
            torch._foreach_add_(momenta, gradients)
            gradients = momenta
        torch._foreach_add_(rows, gradients, alpha=-self.lr)

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """Return the replay of a CUDA graph of `work`. The capture does not change the model."""
        before = [parameter.clone() for parameter in self.parameters]
        replay = captured(work, self.orders.device)
        torch._foreach_copy_(self.parameters, before)
        return replay


class CapturedLoop(Baseline):
    """One worker after another. The training of a worker is one CUDA graph, and the test is another."""

    def __init__(self, experiment: Experiment, work: Work, cohort: int, samples: int) -> None:
        super().__init__(experiment, work, cohort, samples)
        self.order = self.orders[0].clone()
        self.start, self.total, self.momenta = ([torch.zeros_like(p) for p in self.parameters] for _ in range(3))
        self.train_worker, self.test = self.captured(self.train_worker), self.captured(self.test)

    def train(self) -> None:
        torch._foreach_copy_(self.start, self.parameters)
        torch._foreach_zero_(self.total)
        for order in self.orders:
            self.order.copy_(order)
            self.train_worker()
        torch._foreach_copy_(self.parameters, torch._foreach_div(self.total, len(self.orders)))

    def train_worker(self) -> object:
        """Train a worker from the model at the start of the round, and add its model to the total."""
        work, parameters = self.work, list(self.model.parameters())
        torch._foreach_copy_(self.parameters, self.start)
        torch._foreach_zero_(self.momenta)
        self.model.train()
        for batch in self.order.split(self.batch_size):
            loss = work.loss(self.model(work.inputs[batch]), work.targets[batch])
            self.step(self.parameters, torch.autograd.grad(loss, parameters), self.momenta)
        torch._foreach_add_(self.total, self.parameters)


class Vmap(Baseline):
    """All workers at once: the forward pass with torch.func.vmap, then one loss.

    Args:
        graph: whether the training of a round is one CUDA graph, and the test is another.
    """

    def __init__(self, experiment: Experiment, work: Work, cohort: int, samples: int, *, graph: bool = False) -> None:
        super().__init__(experiment, work, cohort, samples)
        self.leaves = [torch.stack([p] * cohort).requires_grad_() for p in self.parameters]
        self.rows, self.momenta = [leaf.detach() for leaf in self.leaves], [torch.zeros_like(r) for r in self.leaves]
        self.forward = vmap(self.outputs_of_row, randomness="different")
        if graph:
            self.train, self.test = self.captured(self.train), self.captured(self.test)

    def outputs_of_row(self, row: list[Tensor], inputs: Tensor) -> Tensor:
        return functional_call(self.model, dict(zip(self.names, row, strict=True)), (inputs,))

    def train(self) -> object:
        for rows, parameter in zip(self.rows, self.parameters, strict=True):
            rows.copy_(parameter)
        torch._foreach_zero_(self.momenta)
        self.model.train()
        for batches in self.orders.split(self.batch_size, dim=1):
            outputs = self.forward(self.leaves, self.work.inputs[batches])
            loss = self.work.loss(outputs.flatten(0, 1), self.work.targets[batches].flatten(0, 1))
            gradients = torch.autograd.grad(loss * len(batches), self.leaves)  # of the sum of the workers' losses
            self.step(self.rows, gradients, self.momenta)
        torch._foreach_copy_(self.parameters, [rows.mean(0) for rows in self.rows])


class Jax(Baseline):
    """All workers at once in JAX: `jit` of `vmap` of `lax.scan` over the steps.

    Short batches are padded and masked. With `precision = "tf32"`, JAX uses its default precision, which is TF32 for
    matrix products and convolutions on recent GPUs.
    """

    def __init__(self, experiment: Experiment, work: Work, cohort: int, samples: int) -> None:
        super().__init__(experiment, work, cohort, samples)
        jax = jax_of(experiment.precision)
        jnp, dropout = jax.numpy, experiment.model.params.get("dropout", 0.0)
        forward = partial(FORWARDS[experiment.model.name], jax)
        self.padding = -samples % self.batch_size
        mask = (jnp.arange(samples + self.padding) < samples).reshape(-1, self.batch_size)

        def kept(key: Any, like: Any, shape: tuple[int, ...]) -> Any:
            """Return factors of dropout: 0 with probability `dropout`, otherwise 1 / (1 - dropout)."""
            if not dropout:
                return 1
            key = jax.random.fold_in(key, len(shape))  # the dropouts of a model have shapes of different lengths
            return jax.random.bernoulli(key, 1 - dropout, shape).astype(like.dtype) / (1 - dropout)

        def loss(values: Any, inputs: Any, targets: Any, mask: Any, key: Any) -> Any:
            logs = jax.nn.log_softmax(forward(values, inputs, lambda *shape: kept(key, inputs, shape)))
            return -(jnp.take_along_axis(logs, targets[:, None], 1)[:, 0] * mask).sum() / mask.sum()

        def trained(values: Any, order: Any, key: Any, inputs: Any, targets: Any) -> Any:
            def step(carry: Any, batch: Any) -> Any:
                (values, momenta), (samples, mask, number) = carry, batch
                key_of_step = jax.random.fold_in(key, number)
                gradients = jax.grad(loss)(values, inputs[samples], targets[samples], mask, key_of_step)
                momenta = [self.momentum * m + g for m, g in zip(momenta, gradients, strict=True)]
                return ([v - self.lr * m for v, m in zip(values, momenta, strict=True)], momenta), None

            batches = order.reshape(mask.shape), mask, jnp.arange(len(mask))
            return jax.lax.scan(step, (values, [jnp.zeros_like(v) for v in values]), batches)[0][0]

        @jax.jit
        def train(values: Any, orders: Any, round: Any, inputs: Any, targets: Any) -> Any:
            keys = jax.random.split(jax.random.key(round), cohort)
            rows = jax.vmap(trained, in_axes=(None, 0, 0, None, None))(values, orders, keys, inputs, targets)
            return [each.mean(0) for each in rows]

        @jax.jit
        def accuracy(values: Any, inputs: Any, targets: Any) -> Any:
            def right(sample: Any) -> Any:
                return forward(values, sample[0][None], lambda *shape: 1)[0].argmax() == sample[1]

            return jax.lax.map(right, (inputs, targets), batch_size=TEST_BATCH).mean()

        def on_device(inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
            images = inputs.movedim(1, -1)  # the channels last
            return jnp.asarray(images.cpu().numpy()), jnp.asarray(targets.cpu().numpy())

        self.values = [jnp.asarray(p.cpu().numpy()) for p in self.parameters]
        self.data = on_device(work.inputs, work.targets)
        self.test_data = on_device(work.test_inputs, work.test_targets)
        self.rounds, self.jitted_train, self.jitted_accuracy = 0, train, accuracy

    def round(self, orders: Tensor) -> float:
        self.rounds += 1
        padded = torch.nn.functional.pad(orders, (0, self.padding)).numpy()
        self.values = self.jitted_train(self.values, padded, self.rounds, *self.data)
        return float(self.jitted_accuracy(self.values, *self.test_data))

    def state(self) -> State:
        return {name: torch.tensor(value.__array__()) for name, value in zip(self.names, self.values, strict=True)}


def jax_of(precision: str) -> Any:
    """Return the package jax, set up for this precision."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to PyTorch
    import jax

    jax.config.update("jax_enable_x64", precision == "float64")
    jax.config.update("jax_default_matmul_precision", None if precision == "tf32" else "highest")
    return jax


def _convolution(jax: Any, inputs: Any, weight: Any, bias: Any, padding: str) -> Any:
    order = ("NHWC", "OIHW", "NHWC")
    return jax.lax.conv_general_dilated(inputs, weight, (1, 1), padding, dimension_numbers=order) + bias


def _pooled(jax: Any, inputs: Any) -> Any:
    return jax.lax.reduce_window(inputs, -jax.numpy.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _flat(inputs: Any) -> Any:
    """Flatten images [batch, height, width, channels] in PyTorch's order."""
    return inputs.transpose(0, 3, 1, 2).reshape(len(inputs), -1)


def _net(jax: Any, p: Any, x: Any, kept: Callable[..., Any]) -> Any:
    x = jax.nn.relu(_pooled(jax, _convolution(jax, x, p[0], p[1], "VALID")))
    x = _convolution(jax, x, p[2], p[3], "VALID")
    x = _flat(jax.nn.relu(_pooled(jax, x * kept(len(x), 1, 1, x.shape[3]))))
    x = jax.nn.relu(x @ p[4].T + p[5])
    return (x * kept(*x.shape)) @ p[6].T + p[7]


def _cnn(jax: Any, p: Any, x: Any, kept: Callable[..., Any]) -> Any:
    for weight, bias in (p[:2], p[2:4]):
        x = jax.nn.relu(_pooled(jax, _convolution(jax, x, weight, bias, "SAME")))
    return jax.nn.relu(_flat(x) @ p[4].T + p[5]) @ p[6].T + p[7]


def _2nn(jax: Any, p: Any, x: Any, kept: Callable[..., Any]) -> Any:
    x = x.reshape(len(x), -1)
    for weight, bias in (p[:2], p[2:4]):
        x = jax.nn.relu(x @ weight.T + bias)
    return x @ p[4].T + p[5]


FORWARDS = {"net": _net, "cnn": _cnn, "2nn": _2nn}  # forward passes in JAX, with the parameters of the models
PROGRAMS: dict[str, Callable[[Experiment, Work, int, int], Baseline]] = {
    **{"captured loop": CapturedLoop, "vmap": Vmap, "captured vmap": partial(Vmap, graph=True), "jax": Jax}
}


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the replay of a CUDA graph of `work`, or on the CPU `work` itself."""
    if device.type == "cpu":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def run_baseline(name: str, experiment: Experiment, device: torch.device) -> Result:
    """Run the rounds of an experiment with a baseline. The first round includes captures and compilations."""
    torch.set_num_threads(1)
    work, baseline, seconds = work_of(experiment, device), None, 0.0
    log = Log(lambda: seconds)
    with PRECISIONS[experiment.precision].training(device):
        for cohort in work.orders:
            orders = torch.stack([torch.from_numpy(epochs[0]) for epochs in cohort])
            synchronize(device)
            started = time.perf_counter()
            baseline = baseline or PROGRAMS[name](experiment, work, *orders.shape)
            accuracy = baseline.round(orders)
            seconds += time.perf_counter() - started
            log.end_round(accuracy, baseline.state())
            log.trained([batch for order in orders for batch in order.split(work.batch_size)])
    return log.result(baseline.state())
