from __future__ import annotations

import threading

import pytest
import torch

from fedsim.system.background import SingleThreadExecutor

CPU = torch.device("cpu")


def test_things_are_done_one_after_another_in_another_thread():
    background, seen = SingleThreadExecutor(CPU), []
    futures = [background.begin(lambda k=k: seen.append(k) or threading.get_ident()) for k in range(5)]
    threads = {future.result(timeout=5) for future in futures}
    assert seen == list(range(5))
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_what_a_thing_raises_comes_back_and_the_next_is_done_all_the_same():
    background = SingleThreadExecutor(CPU)
    failed, done = background.begin(lambda: 1 / 0), background.begin(lambda: 7)
    with pytest.raises(ZeroDivisionError):
        failed.result(timeout=5)
    assert done.result(timeout=5) == 7


def test_it_keeps_no_program_from_ending():
    background = SingleThreadExecutor(CPU)
    background.begin(lambda: None).result(timeout=5)
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "fedsim-background"][-1]
