"""The bare loop as a process of its own, given what `run_experiment.py` is given.

python benchmarks/bare_process.py RESULT.pt DEVICE CONFIG.toml [KEY=VALUE ...]
"""

from __future__ import annotations

import sys
import time

import torch


def main() -> None:
    result, device, *words = sys.argv[1:]
    started = time.perf_counter()
    from bare_loop import bare_loop  # and with it fedsim, which a bare loop would not need but for the same draws

    from fedsim import load_experiment

    imports = time.perf_counter() - started
    experiment = load_experiment(words[0], words[1:])
    torch.save({**bare_loop(experiment, torch.device(device))._asdict(), "imports": imports}, result)


if __name__ == "__main__":
    main()
