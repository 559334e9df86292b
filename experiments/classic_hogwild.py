"""Hogwild: each worker is a process, and all processes train one shared model without waiting or locks."""

import argparse
import signal

import torch
import torch.multiprocessing as mp

import fedsim


def work(worker, rows, train, shards, test, barrier, options):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that `spawn` notices if Ctrl-C ends this process
    torch.set_num_threads(1)  # the processes share the cores
    shard = fedsim.CustomSubset(train, shards[worker])
    model = fedsim.models.two_nn().to(rows.device)
    fedsim.bind(model, rows[0])  # a training step changes the shared row in place
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    barrier.wait()  # every worker has started
    for round in range(1, options.rounds + 1):
        order = fedsim.Draws.of("batches", round, worker, seed=0).permutation(len(shard))
        loss = fedsim.train_epoch(model, shard.batches(10, order), optimizer).loss  # waits for the GPU
        if worker == 0:
            accuracy = fedsim.test(model, [test]).accuracy  # waits for the GPU
            print(f"round {round}: test accuracy {accuracy:.4f}, train loss of worker 0 {loss:.4f}", flush=True)


def main(options):
    train, test = (data.to(torch.device(options.device), torch.float32) for data in fedsim.load_dataset("mnist5k"))
    test = test.gather(torch.arange(len(test)))  # all test images as one batch
    shards = fedsim.partition(train.targets, "iid", options.workers, seed=0)
    torch.manual_seed(fedsim.Draws.of("model", seed=0).key)
    model = fedsim.models.two_nn()
    layout = fedsim.Layout.of(model)
    rows = fedsim.new_rows(1, layout.d, torch.float32, options.device).share_memory_()
    fedsim.pull_down(layout.read(model), rows)  # every row becomes the initial model
    barrier = mp.get_context("spawn").Barrier(options.workers)
    mp.spawn(work, (rows, train, shards, test, barrier, options), options.workers, daemon=True)
    fedsim.bind(model, rows[0])
    print(f"test accuracy when all workers have finished: {fedsim.test(model, [test]).accuracy:.4f}")
    return rows[0]


if __name__ == "__main__":  # the processes import this file
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    main(parser.parse_args())
