from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.commands import ROOT

# Large blocks that are allocated and freed by turns, as the tensors of a training step are.
FAULTS = """
import resource
import torch
{before}
faults = []
for _ in range(40):
    blocks = [torch.ones(1 << 20) for _ in range(3)]
    del blocks
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[19])
"""
KEEP = "from fedsim.system.allocator import keep_freed_memory; assert keep_freed_memory()"
REFUSED = "from fedsim.system.allocator import keep_freed_memory; assert not keep_freed_memory()"


def faults_of(before, **environment):
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(before=before)],
        env=variables | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again_without_page_faults_unless_the_user_has_set_it_otherwise():
    assert faults_of(KEEP) < 100
    assert faults_of(REFUSED, MALLOC_MMAP_THRESHOLD_="65536") > 1000
