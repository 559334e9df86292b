"""Where Python has no POSIX functions, an experiment runs serially with the same bits, and the rest is refused."""

from __future__ import annotations

import torch

import fedsim
from tests.commands import run_python

RUN = {
    "model": "logistic",
    "data": "tests.components:tiny",
    "workers": 3,
    "rounds": 2,
    "engine": "serial",
    "local": {"lr": 0.05, "momentum": 0.5, "keep_optimizer_state": True},
}
PROGRAM = f"""
import tests.elsewhere
import sys
from fedsim.cli.main import main
import fedsim
from fedsim.asynchronous.race.state import Locks
from fedsim.processes.messages import shared_file

for refused in (Locks, lambda: shared_file(0)):
    try:
        refused()
    except fedsim.ExperimentError as error:
        print(error)
torch = sys.modules["torch"]
torch.save(fedsim.run({RUN}, "run").global_row, "row.pt")
sys.argv = ["fedsim", "list", "keys"]
main()
"""


def test_without_posix_modules_a_serial_run_has_the_same_bits(tmp_path):
    done = run_python("-c", PROGRAM, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    locks, files, *keys = done.stdout.splitlines()
    assert locks.endswith('needs byte-range locks (fcntl), which this system does not support; use mode = "clock"')
    assert files.endswith("Windows cannot share their files with processes; use engine=serial")
    assert any(line.startswith("workers") for line in keys)
    assert torch.equal(torch.load(tmp_path / "row.pt"), fedsim.run(RUN).global_row)
