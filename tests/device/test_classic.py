"""The classic program and its Hogwild sister on a GPU: as processes on a real one, as threads on the pretend one."""

from __future__ import annotations

import argparse
import re
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp

from experiments import classic, classic_hogwild
from tests.commands import ROOT, run_python
from tests.device.agreement import REAL
from tests.device.pretend import GPU, pretend_gpu

pytestmark = pytest.mark.gpu


def spawn_threads(function, args, nprocs, daemon):
    """Run the processes of `torch.multiprocessing.spawn` as threads, because the pretend GPU has only one process."""
    errors = []

    def call(worker):
        try:
            function(worker, *args)
        except BaseException as error:
            errors.append(error)
            args[4].abort()  # the barrier

    threads = [threading.Thread(target=call, args=(worker,), daemon=daemon) for worker in range(nprocs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setattr(mp, "spawn", spawn_threads)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # is an error in a thread
    monkeypatch.setattr(mp, "get_context", lambda method: SimpleNamespace(Barrier=threading.Barrier))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("script", [classic, classic_hogwild])
def test_the_program_runs_on_the_pretend_gpu(script, capsys):
    """The classic program agrees with the CPU. Hogwild, whose results depend on timing, learns."""
    options = {"workers": 2, "rounds": 1, "rule": "mean"}
    with pretend_gpu():
        row = script.main(argparse.Namespace(**options, device="cuda"))
        assert row.device == GPU
        row = row.cpu()
    accuracies = [float(word) for word in re.findall(r"accuracy\D* (\d\.\d+)", capsys.readouterr().out)]
    assert min(accuracies) > 0.7
    if script is classic:
        assert torch.allclose(row, script.main(argparse.Namespace(**options, device="cpu")), rtol=0, atol=1e-5)


@pytest.mark.skipif(not REAL, reason="needs a real GPU")
@pytest.mark.parametrize("name", ["classic", "classic_hogwild"])
def test_the_program_runs_on_a_real_gpu(name):
    """No process complains at its end, for example that another one still uses its tensors."""
    done = run_python(str(ROOT / "experiments" / f"{name}.py"), "--device", "cuda", "--workers", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert float(re.findall(r"accuracy\D* (\d\.\d+)", done.stdout)[-1]) > 0.85
