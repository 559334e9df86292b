from __future__ import annotations

import threading

import pytest
import torch

from fedsim.processes.background import SingleThreadExecutor


def test_functions_run_one_after_another_in_a_daemon_thread_and_their_errors_come_back():
    background, seen = SingleThreadExecutor(torch.device("cpu")), []
    failed = background.begin(lambda: 1 / 0)
    futures = [background.begin(lambda k=k: seen.append(k) or threading.current_thread()) for k in range(5)]
    with pytest.raises(ZeroDivisionError):
        failed.result(timeout=5)
    (thread,) = {future.result(timeout=5) for future in futures}
    assert seen == list(range(5))
    assert thread.daemon, "a daemon thread does not keep the program from ending"
    assert background.end(5.0)
