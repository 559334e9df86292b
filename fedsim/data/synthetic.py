"""The data set Synthetic(alpha, beta) of FedProx."""

from __future__ import annotations

import numpy as np
import torch

from fedsim.core.numbers import NonNegativeFloat, PositiveInt
from fedsim.data.sources import dataset
from fedsim.data.tensors import TensorData
from fedsim.system.devices import require_memory

FEATURES, CLASSES = 60, 10
BYTES_PER_USER = 453 * FEATURES * 20  # 453 samples on average, twice in float64 and once in float32


@dataset("synthetic")
def synthetic(
    *,
    alpha: NonNegativeFloat = 1.0,
    beta: NonNegativeFloat = 1.0,
    users: PositiveInt = 30,
    iid: bool = False,
    seed: int = 0,
) -> tuple[TensorData, TensorData]:
    """Synthetic(alpha, beta): logistic models of 60 features and 10 classes that differ between users. Li et al. 2020.

    The distributions are those in the code of FedProx. User k has n_k = 50 + floor(L_k) samples, where
    L_k ~ lognormal(4, 2). The user's model is W_k [60, 10], b_k [10] with entries ~ N(u_k, 1), u_k ~ N(0, alpha). The
    user's inputs are x ~ N(v_k, Sigma) with v_k ~ N(B_k, 1) per feature, B_k ~ N(0, beta), and the diagonal
    Sigma_jj = j^-1.2. The label is argmax(x W_k + b_k). As in that code, the second argument of N is a standard
    deviation for u_k and B_k. With `iid`, all users share one W, b ~ N(0, 1) and v = 0.

    A random 90 percent of each user's samples are training samples. The other samples are the test set.

    Args:
        alpha: standard deviation of u_k, >= 0. It changes no sample, because u_k shifts all logits of a sample equally.
            The same holds for the code of FedProx.
        beta: how much the inputs of users differ, >= 0.
        users: number of users.
        iid: whether all users have the same distribution.
        seed: seed for generating the data set, independent of the experiment's seed.

    Returns inputs float32 [n, 60] and labels [n], with the user of each sample in the column `user`, for the partition
    `natural`.

    >>> train, test = fedsim.load_dataset("synthetic", alpha=0.5, beta=0.5)
    >>> train.inputs.shape[1], len(np.unique(train.ids["user"]))
    (60, 30)
    """
    require_memory(users * BYTES_PER_USER, f"data.users = {users}", "fewer users")
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(4, 2, users).astype(int) + 50
    model_means, input_means = rng.normal(0, alpha, users), rng.normal(0, beta, users)
    deviations = np.arange(1, FEATURES + 1) ** -0.6  # the square root of the variances j^-1.2
    common = rng.normal(0, 1, (FEATURES, CLASSES)), rng.normal(0, 1, CLASSES)
    parts: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[], []]
    for user, size in enumerate(sizes):
        weights = rng.normal(model_means[user], 1, (FEATURES, CLASSES))
        bias = rng.normal(model_means[user], 1, CLASSES)
        center = rng.normal(input_means[user], 1, FEATURES)
        if iid:
            (weights, bias), center = common, np.zeros(FEATURES)
        inputs = center + deviations * rng.normal(size=(size, FEATURES))
        labels = np.argmax(inputs @ weights + bias, axis=1)
        n_train = int(0.9 * size)
        for part, span in zip(parts, (slice(n_train), slice(n_train, None)), strict=True):
            part.append((inputs[span], labels[span], np.full(len(labels[span]), user)))
    train, test = (_samples(part) for part in parts)
    return train, test


def _samples(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> TensorData:
    inputs, labels, users = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return TensorData(torch.from_numpy(inputs).float(), torch.from_numpy(labels), ids={"user": users})
