"""The bare loop (or pfl) in a separate process, with the arguments of `run_experiment.py`.

python benchmarks/bare_process.py bare|pfl RESULT.pt DEVICE CONFIG.toml [KEY=VALUE ...]
"""

from __future__ import annotations

import sys
import time

import torch


def main() -> None:
    loop, result, device, *words = sys.argv[1:]
    started = time.perf_counter()
    # These modules also import fedsim, which the loops only need to draw the same numbers.
    if loop == "pfl":
        from pfl_loop import pfl_loop as run
    else:
        from bare_loop import bare_loop as run

    from fedsim import load_experiment

    imports = time.perf_counter() - started
    experiment = load_experiment(words[0], words[1:])
    torch.save({**run(experiment, torch.device(device))._asdict(), "imports": imports}, result)


if __name__ == "__main__":
    main()
