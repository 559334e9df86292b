"""OpenMP threads wait passively and freed memory is reused, unless the user has set it otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.commands import ROOT

SETTINGS = ("OMP_WAIT_POLICY", "MALLOC_", "GLIBC_")
PRINT = "import os; print(os.environ['OMP_WAIT_POLICY'])"
RUN = """
fedsim.run({"data": "tests.components:tiny", "rounds": 1, "engine": "serial", "threads_per_process": 2})
"""
# Large blocks are allocated and freed in turn, like the tensors of a training step.
FAULTS = """
import resource
from fedsim.system.c_libraries import keep_freed_memory
keep_freed_memory()
faults = []
for _ in range(40):
    blocks = [b"1" * (4 << 20) for _ in range(3)]
    del blocks
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[19])
"""


def output_of(*command, **environment):
    variables = {key: value for key, value in os.environ.items() if not key.startswith(SETTINGS)} | environment
    done = subprocess.run([sys.executable, *command], env=variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 7), done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again_without_page_faults_unless_the_user_has_set_it_otherwise():
    assert int(output_of("-c", FAULTS)) < 100
    assert int(output_of("-c", FAULTS, MALLOC_MMAP_THRESHOLD_="65536")) > 1000


def test_threads_wait_passively_unless_the_user_has_set_it_otherwise():
    late = f"import sys; sys.modules['torch'] = sys; import fedsim; {PRINT}"  # for processes that are started later
    assert output_of("-c", late) == "PASSIVE\n"
    assert output_of("-c", f"import fedsim; {PRINT}", OMP_WAIT_POLICY="ACTIVE") == "ACTIVE\n"


@pytest.mark.parametrize(
    "program",
    [["-m", "fedsim", "run"], ["run_experiment.py"], ["-c", "from fedsim.__main__ import main; main()", "run"]],
)
def test_every_entry_sets_the_policy_before_pytorch_is_imported(program, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"{PRINT}; raise SystemExit(7)")
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    assert output_of(*program, "rounds=1", PYTHONPATH=path) == "PASSIVE\n"


@pytest.mark.slow
def test_several_threads_that_spin_are_warned_of_once():
    late = output_of("-c", f"import torch, fedsim{RUN}")
    assert late.count("PyTorch was imported before fedsim") == 1
    assert "PyTorch was imported before" not in output_of("-c", f"import fedsim{RUN}")
    assert "PyTorch was imported before" not in output_of("-c", f"import torch, fedsim{RUN}", OMP_WAIT_POLICY="PASSIVE")
