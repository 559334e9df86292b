"""Participants of an experiment: samples of workers and server, and attackers."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np

from fedsim.byzantine import Attackers
from fedsim.config.experiment import Experiment
from fedsim.config.schema import OWN
from fedsim.core.learning_task import described
from fedsim.core.randomness import numpy_generator, sample_workers
from fedsim.data import ListedShards, Shards, TensorData, hold_out, partition_shards
from fedsim.data.encoding import NOBODY, WORKER
from fedsim.data.partitions.allocation import Strata, group
from fedsim.data.partitions.ids import joined, owners_of
from fedsim.errors import DataError, ExperimentError, FedsimWarning, plural, show
from fedsim.privacy import Releases

USE_OWN = "data.local_test_fraction = {} holds out training samples instead; set it to own to use these"
MOST_SAMPLED = 1_000  # maximum number of workers whose shards are drawn to describe a virtual population


def server_samples(experiment: Experiment, train: TensorData, worker_tests: Shards | None) -> np.ndarray:
    """Draw the server's own training samples, and return their indices in `train`, ascending.

    The local test samples of workers are not drawn. Raises ExperimentError if there are not enough samples.
    """
    size, samples = experiment.aggregate.root_samples, np.arange(len(train))
    if worker_tests is not None and worker_tests.listed:
        samples = np.setdiff1d(samples, np.concatenate([worker_tests.of(k).numpy() for k in range(len(worker_tests))]))
    if size > len(samples):
        raise ExperimentError(
            f"aggregate.root_samples = {size}: must be at most {len(samples)}, the number of available training samples"
        )
    return np.sort(samples[numpy_generator(experiment.seed, "root").choice(len(samples), size, replace=False)])


def shards_of(
    experiment: Experiment, train: TensorData, index_of: np.ndarray | None, strata: Strata
) -> tuple[Shards, Shards | None]:
    """Return a pair: the training samples and the local test samples of each worker.

    The local test samples are None if the experiment does not hold out samples of the workers for tests.

    Args:
        experiment: experiment to run.
        train: training samples, without the samples held out for validation.
        index_of: index in `train` of each training sample of the data set, [n], -1 for samples that are held out. None:
            no sample is held out.
        strata: classes and owners of the samples in `train` that the draw of local test samples observes.
    """
    chosen, labels = experiment.partition, train.sample_targets.cpu()
    shards = partition_shards(
        labels, chosen.name, experiment.workers, seed=experiment.seed, ids=train.ids, index_of=index_of, **chosen.params
    )
    fraction = experiment.data.local_test_fraction
    if not fraction or fraction == OWN:
        return shards, None
    parts = hold_out(shards, fraction, strata, seed=experiment.seed)
    if strata.owner is not None and shards.listed:
        trained, tested = (
            np.unique(strata.owner[np.concatenate([part.of(k).numpy() for k in range(len(part))])]) for part in parts
        )
        if divided := len(np.intersect1d(trained, tested)):
            warnings.warn(
                f"data.local_test_fraction = {fraction}: samples of {plural(divided, 'owner')} are both local tests "
                "of a worker and training samples of another; to keep owners together, use partition=natural",
                FedsimWarning,
                stacklevel=2,
            )
    return parts


def tests_of_owners(
    experiment: Experiment, train: TensorData, test: TensorData, shards: Shards
) -> tuple[Shards, str] | None:
    """Return (test samples of each worker's owner, description). None if the test part has no owners.

    The workers are followed by the owners who have no training samples, in sorted order, which are never trained.

    Args:
        experiment: experiment to run.
        train, test: training samples (without the samples held out for validation), and test samples.
        shards: training samples of each worker.

    Raises DataError if the test part has no owners, but the experiment needs them.
    """
    column_of, setting = getattr(experiment.partition.component, "column", None), experiment.data.local_test_fraction
    column = column_of(train.ids) if column_of else ""
    if setting == OWN and column not in test.ids:
        raise DataError(
            f"data.local_test_fraction = {show(OWN)}: the test part does not say who owns each sample; set "
            "data.local_test_fraction=0.2 to hold out training samples instead"
        )
    if column not in test.ids or not setting or (setting != OWN and train.drawn_by is not None):
        return None
    owners = _owners_in(column, train, test)
    samples, unseen = group(np.arange(len(test)), owners.tested, len(owners.names)), owners.unseen
    chosen = [samples[owner] for owner in owners.of_shards(shards)]
    found = f"{plural(sum(map(bool, map(len, chosen))), 'client')} with their own test samples"
    found += f", {len(unseen)} of them only for tests" * bool(len(unseen))
    whole = "all" if (of_all := len(global_tests(test))) == len(test) else f"{of_all:,} other"
    found += f"; {f'the global test set has {whole} test samples' if setting == OWN else USE_OWN.format(setting)}"
    return ListedShards.of_arrays(chosen), found


def names_of_workers(experiment: Experiment, train: TensorData, test: TensorData, shards: Shards) -> tuple[str, ...]:
    """Return the name of each worker, followed by the names of the owners who have only test samples.

    A worker of a partition by owners has the name of its owner. The result is empty if the names would only repeat the
    worker IDs. The arguments are those of `tests_of_owners`.
    """
    partition = experiment.partition.component
    names = getattr(partition, "worker_names", ())
    if column_of := getattr(partition, "column", None):
        owners = _owners_in(column := column_of(train.ids), train, test)
        names = owners.names[owners.of_shards(shards)].tolist()
        names = [train.worker_names[owner] for owner in names] if column == WORKER and train.worker_names else names
    names = tuple(map(str, names))
    return () if names == tuple(map(str, range(len(names)))) else names


class _Owners(NamedTuple):
    """Owner of each sample, from a column of the data set.

    Attributes:
        names: all owners, sorted.
        trained, tested: index of the owner of each training sample and of each test sample.
        unseen: indices in `names` of the owners who have only test samples.
    """

    names: np.ndarray
    trained: np.ndarray
    tested: np.ndarray
    unseen: np.ndarray

    def of_shards(self, shards: Shards) -> np.ndarray:
        """Return the index in `names` of each worker's owner, followed by `unseen`."""
        positions, begins = shards.together(np.arange(len(shards)))
        return np.concatenate([self.trained[positions[begins].numpy()], self.unseen])


def _owners_in(column: str, train: TensorData, test: TensorData) -> _Owners:
    owners = train.ids[column]
    both = joined([owners, test.ids.get(column, owners[:0])], f"data.ids = {show(column)}")
    names, owner_of = owners_of({column: both}, column)
    trained, tested = owner_of[: len(train)], owner_of[len(train) :]
    unseen = np.setdiff1d(tested, trained)
    return _Owners(names, trained, tested, unseen[names[unseen] != NOBODY] if column == WORKER else unseen)


def global_tests(test: TensorData) -> TensorData:
    """Return the global test set: the test samples that belong to no worker, or all test samples if there are none."""
    of_nobody = np.flatnonzero(test.ids.get(WORKER, ()) == NOBODY)
    return test.take(of_nobody) if len(of_nobody) else test


def attackers_of(experiment: Experiment, train: TensorData, shards: Shards) -> Attackers:
    """Return the `Attackers` of a run, which contain the Byzantine workers of each round.

    Raises ExperimentError if the settings of the attack do not fit the data.
    """
    attack, workers = experiment.attack, experiment.workers
    count, fixed = attack.count(workers), experiment.byzantine
    drawn = (experiment.seed, workers, count) if attack.resample and count else None
    if attack.by_class is not None and count:
        place, labels = f"attack.by_class = {attack.by_class}", train.sample_targets.cpu().numpy()
        if not train.has_labels:
            raise ExperimentError(
                f"{place}: needs one class label per sample, but the targets are {described(train.targets)}; "
                "choose the attackers by attack.f or attack.workers instead"
            )
        if not (labels == attack.by_class).any():
            raise ExperimentError(f"{place}: must be the label of a training sample, from 0 to {labels.max()}")
        if workers_to_describe(shards, experiment.seed) is not None:
            raise ExperimentError(
                f"{place}: supports at most {MOST_SAMPLED} workers with a virtual partition; omit it, or use "
                "attack.workers"
            )
        counts = np.array([(labels[shards.of(worker).numpy()] == attack.by_class).sum() for worker in range(workers)])
        fixed = np.argsort(-counts, kind="stable")[:count].tolist()
    return Attackers(frozenset(fixed), drawn, attack.start_round)


def workers_to_describe(shards: Shards, seed: int) -> list[int] | None:
    """Return the workers whose samples are used for a summary of the data; None for all workers.

    If the population is very large, the result is a random sample of it.
    """
    if shards.listed or len(shards) <= MOST_SAMPLED:
        return None
    return sample_workers(numpy_generator(seed, "look"), len(shards), MOST_SAMPLED).tolist()


def releases_of(experiment: Experiment, shards: Shards, root: np.ndarray) -> Releases | None:
    """Return the noisy sums of each round, for privacy accounting, or None without differential privacy.

    If samples are protected and shards overlap, a sample contributes to the sums of every worker that holds it.

    Args:
        experiment: experiment.
        shards: training samples of each worker.
        root: indices of the server's own training samples, on which the server trains like a worker.

    Raises ExperimentError if it is unknown in how many sums a sample is included.
    """
    if experiment.protects != "sample":
        return experiment.releases(holders=1)
    place, algorithm = f"partition.name = {show(experiment.partition.name)}", experiment.local.setting
    if workers_to_describe(shards, experiment.seed) is not None:
        raise ExperimentError(
            f"{place}: shards may overlap, and {algorithm} can count the overlaps of at most {MOST_SAMPLED:,} workers; "
            "use fewer workers, or another partition, such as iid"
        )
    samples = [shards.of(worker).numpy() for worker in range(len(shards))]
    if not shards.listed and any(len(np.unique(of_worker)) < len(of_worker) for of_worker in samples):
        raise ExperimentError(
            f"{place}: a worker holds the same sample twice, which {algorithm} does not protect; use another "
            "partition, such as iid"
        )
    holders = np.bincount(np.concatenate([*samples, root]))  # the server counts like one more worker of each round
    return experiment.releases(holders=min(int(holders.max()), experiment.largest_cohort + bool(len(root))))
