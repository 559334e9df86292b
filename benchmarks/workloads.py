"""The experiments that benchmarks measure, as words of `fedsim run`.

w1: the classic experiment, 4 workers with 15,000 MNIST images each, `net`, batch size 64.
w2: 100 clients with 600 images each, 10 per round, `cnn`, batch size 10.
w3: 1,000 clients with 60 images each, 100 per round, `2nn`, batch size 10.
w4: the benchmark of pfl (image_classification.py): 1,000 clients with 50 images of 3 x 32 x 32 each, 50 per round, a
    user's own network with two convolutions and dropout, batch size 10.
"""

from __future__ import annotations

WORKLOADS = {
    "w1": ("experiments/mnist_sync_sgd.toml",),
    "w2": ("experiments/fedavg_cnn.toml", "rounds=5", "local.epochs=1"),
    "w3": ("experiments/fedavg_2nn.toml", "rounds=20", "workers=1000", "cohort=100"),
    "w4": (
        *("experiments/fedavg_2nn.toml", "rounds=10", "workers=1000", "cohort=50"),
        *("model=benchmarks.peers.networks:ImageNet", "data.name=benchmarks.image_classification:images"),
    ),
}
