from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.commands import ROOT

PRINT = "import os; print(os.environ['OMP_WAIT_POLICY'])"
RUN = """
fedsim.run({"data": "tests.plugs:tiny", "rounds": 1, "engine": "serial", "threads_per_process": 2})
"""


def output_of(*command, **environment):
    variables = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | environment
    done = subprocess.run([sys.executable, *command], env=variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_threads_wait_passively_wherever_fedsim_is_imported_first():
    assert output_of("-c", f"import fedsim; {PRINT}") == "PASSIVE\n"
    assert output_of("-c", f"import torch, fedsim; {PRINT}") == "PASSIVE\n"  # for processes that are started later
    assert output_of("-c", f"import fedsim; {PRINT}", OMP_WAIT_POLICY="ACTIVE") == "ACTIVE\n"


@pytest.mark.parametrize(
    "program", [["-m", "fedsim"], ["run_experiment.py"], ["-c", "import fedsim_main as m; m.main()"]]
)
def test_every_entry_sets_the_policy_before_pytorch_is_imported(program, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"{PRINT}; raise SystemExit(7)")
    command = [*program, *([] if "run_experiment.py" in program else ["run"]), "rounds=1"]
    variables = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    path = os.pathsep.join([str(tmp_path), str(ROOT), variables.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command], env=variables | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "PASSIVE\n", done.stderr


@pytest.mark.slow
def test_several_threads_that_spin_are_warned_of_once():
    late = output_of("-c", f"import torch, fedsim{RUN}")
    assert late.count("PyTorch was imported before fedsim") == 1
    assert "PyTorch was imported before" not in output_of("-c", f"import fedsim{RUN}")
    assert "PyTorch was imported before" not in output_of("-c", f"import torch, fedsim{RUN}", OMP_WAIT_POLICY="PASSIVE")
