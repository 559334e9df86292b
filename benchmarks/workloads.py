"""The experiments that benchmarks measure, as words of `fedsim run`.

w1: the classic experiment, 4 workers with 15,000 MNIST images each, `net`, batch size 64.
w2: 100 clients with 600 images each, 10 per round, `cnn`, batch size 10.
w3: 1,000 clients with 60 images each, 100 per round, `2nn`, batch size 10.
w4: the benchmark of pfl (image_classification.py): 1,000 clients with 50 images of 3 x 32 x 32 each, 50 per round, a
    user's own network with two convolutions and dropout, batch size 10.
flute_lr: the benchmark LR_MNIST of FLUTE (https://github.com/microsoft/msrflute: README.md, experiments/cv_lr_mnist),
    published for CPUs with 0:03:20 for FLUTE and 0:30:14 for Flower 1.0.0: 10 of 1,000 clients per round, two classes
    per client in numbers by a power law, a linear layer with a sigmoid before the cross-entropy. FLUTE tests all images
    in every 20th round.
flute_lstm: the benchmark RNN_FEDSHAKESPEARE of FLUTE (experiments/nlp_rnn_fedshakespeare), published for 1,200 rounds
    on GPUs: 10 of 715 clients per round. There a client has single speeches, padded to windows of 81 characters. Here
    the clients are the 715 roles of the plays that speak most, and windows go through all that a role says.
blazefl: the benchmark of BlazeFL (https://github.com/blazefl/benchmarks: blazefl-case/config.py): 100 clients with
    500 images of 3 x 32 x 32 of two shards each, a small network with two convolutions, five epochs. There all clients
    take part in each of 5 rounds.
"""

from __future__ import annotations

WORKLOADS = {
    "w1": ("experiments/mnist_sync_sgd.toml",),
    "w2": ("experiments/fedavg_cnn.toml", "rounds=2", "local.epochs=1"),
    "w3": ("experiments/fedavg_2nn.toml", "rounds=10", "workers=1000", "cohort=100"),
    "w4": (
        *("experiments/fedavg_2nn.toml", "rounds=4", "workers=1000", "cohort=50"),
        *("model=benchmarks.peers.networks:ImageNet", "data.name=benchmarks.image_classification:images"),
    ),
}
PUBLISHED = {  # benchmarks of other simulators, which only benchmarks/peers runs
    "flute_lr": (
        *("experiments/fedavg_2nn.toml", "rounds=100", "workers=1000", "cohort=10", "local.lr=0.03"),
        *("model=benchmarks.peers.networks:SigmoidRegression", "data.name=benchmarks.peers.published:mnist"),
        "partition.name=benchmarks.peers.published:power_law",
    ),
    "flute_lstm": (
        *("experiments/fedavg_2nn.toml", "rounds=3", "workers=715", "cohort=10", "local.batch_size=4", "local.lr=0.8"),
        *("model=benchmarks.peers.networks:CharacterLSTM", "task=next_token", "partition.name=natural"),
        *("data.name=shakespeare", "data.min_characters=706", "data.test_windows=100", "data.local_test_fraction=0"),
    ),
    "blazefl": (
        *("experiments/fedavg_2nn.toml", "rounds=3", "workers=100", "cohort=10", "local.epochs=5"),
        *("local.batch_size=50", "model=benchmarks.peers.networks:SmallCNN", "partition.name=shards"),
        *("data.name=benchmarks.image_classification:images", "data.test=10000"),
    ),
}
