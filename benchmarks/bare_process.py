"""The bare loop in a separate process, with the arguments of `run_experiment.py`.

python benchmarks/bare_process.py RESULT.pt DEVICE CONFIG.toml [KEY=VALUE ...]
"""

from __future__ import annotations

import sys
import time

import torch


def main() -> None:
    result, device, *words = sys.argv[1:]
    started = time.perf_counter()
    from bare_loop import bare_loop  # also imports fedsim, which the loop only needs to draw the same numbers

    from fedsim import load_experiment

    imports = time.perf_counter() - started
    experiment = load_experiment(words[0], words[1:])
    torch.save({**bare_loop(experiment, torch.device(device))._asdict(), "imports": imports}, result)


if __name__ == "__main__":
    main()
