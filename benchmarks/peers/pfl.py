"""pfl with one process per core, which share the users of a cohort and the samples of a test (torch.distributed)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.peers.work import CORES, TEST_BATCH, Log, Result, load, main


def start_others() -> list[subprocess.Popen[bytes]]:
    """Start one process per further core with the command line of this one, which becomes rank 0."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{port + rank}" for rank in range(CORES))
    os.environ["PFL_WORKER_RANK"] = "0"
    command = [sys.executable, "-m", "benchmarks.peers.pfl", *sys.argv[1:]]
    return [subprocess.Popen(command, env=os.environ | {"PFL_WORKER_RANK": str(rank)}) for rank in range(1, CORES)]


def program(path: str) -> Result | None:
    others = [] if "PFL_WORKER_RANK" in os.environ else start_others()
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops.selector import get_default_framework_module
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    work = load(path, shared=True)
    model = work.model()
    sgd = {key: value for key, value in work.sgd.items() if key != "lr"}

    class User(Dataset):
        """A user's samples in batches, for one pass over all epochs. The length is the user's weight."""

        def __init__(self, round: int, slot: int) -> None:
            self.batches, self.weight = work.batches(round, slot), work.weights[work.cohorts[round][slot]]
            super().__init__([torch.cat(self.batches)])

        def __len__(self) -> int:
            return self.weight

        def iter(self, batch_size: int) -> Iterator[list[torch.Tensor]]:
            return ([tensor.index_select(0, batch) for tensor in (work.inputs, work.targets)] for batch in self.batches)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log.trained([targets])
        return work.loss(model.train()(inputs), targets)

    @torch.no_grad()
    def metrics(inputs: torch.Tensor, targets: torch.Tensor, central: bool = False) -> dict[str, Any]:
        if not central:  # of a user, which pfl also computes in the first round
            return {}
        right = (model.eval()(inputs).argmax(-1) == targets).sum()
        return {"accuracy": Weighted(int(right), targets.numel())}

    class Test(CentralEvaluationCallback):
        def on_train_begin(self, **kwargs: Any) -> Metrics:
            return Metrics()  # no test before the first round

        def after_central_iteration(self, *args: Any, **kwargs: Any) -> tuple[bool, Metrics]:
            tested = self._eval(args[1])[1]
            log.end_round(dict(tested.to_simple_dict())["Central val | accuracy"], model.state_dict())
            return False, Metrics()

    users = iter((round, slot) for round, cohort in enumerate(work.cohorts) for slot in range(len(cohort)))
    model.loss, model.metrics = loss, metrics
    central = torch.optim.SGD(model.parameters(), 1.0)
    pfl_model = PyTorchModel(model, partial(torch.optim.SGD, **sgd), central)
    dataset = FederatedDataset(lambda user: User(*user), lambda: next(users))
    tests = Dataset([work.test_inputs, work.test_targets], eval_kwargs={"central": True})
    backend = SimulatedBackend(dataset, dataset, [WeightByDatapoints()] if len(set(work.weights)) > 1 else [])
    evaluation = NNEvalHyperParams(local_batch_size=TEST_BATCH)
    cohort, rounds = len(work.cohorts[0]), len(work.cohorts)
    log = Log()
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, sys.maxsize, cohort, None),
        backend,
        pfl_model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.sgd["lr"], local_batch_size=work.batch_size),
        evaluation,
        [Test(tests, evaluation)],
    )
    counts = torch.tensor([log.samples, log.steps], dtype=torch.double)
    log.samples, log.steps = get_default_framework_module().distributed.all_reduce([counts])[0].long().tolist()
    for process in others:
        process.wait()
    return log.result(model.state_dict()) if os.environ["PFL_WORKER_RANK"] == "0" else None


if __name__ == "__main__":
    main(program)
