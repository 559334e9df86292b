from __future__ import annotations

import compileall
import contextlib
import gc
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedsim
from fedsim.callbacks import painter
from fedsim.cli.main import app
from fedsim.core.plotting import encode
from fedsim.runs.setup import begun
from tests.commands import latest
from tests.components import TINY_TEST, TINY_TRAIN
from tests.engines.zoo import experiment
from tests.leftovers import left_behind, segments

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT, the tests must not
# With PYTHONDONTWRITEBYTECODE, each of the hundreds of test processes would compile every module again.
sys.dont_write_bytecode = False
for folder in (Path(fedsim.__file__).parent, Path(__file__).parent):
    compileall.compile_dir(folder, quiet=2, rx=re.compile(r"/test_\w+\.py$"))
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):  # with these, typer and rich write colour codes into pipes
    os.environ.pop(name, None)
if sys.platform == "linux":
    from tests.forking import fork_workers

    fork_workers()
os.fsync = lambda file: None  # fsync takes milliseconds, thousands of times, and no test cuts the power
painter.encode = lambda figure, format: b""  # drawing a picture takes 0.1 s; see the fixture `pictures`
torch.set_num_threads(1)  # several test processes share the cores


def pytest_collection_finish():
    """Exclude the million objects of the imported modules from garbage collection, and collect garbage more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def seeded():
    """Give every test the same state of the global random number generators."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed also formats a traceback for each kind of accelerator
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def nothing_stays_behind(request):
    """Check that a test leaves no processes and no shared-memory segments behind.

    A fixture whose name begins with `session` keeps its processes from test to test, and ends them itself.
    """
    before, children = segments(), set(multiprocessing.active_children())
    yield
    if not any(name.startswith("session") for name in request.fixturenames):
        assert set(multiprocessing.active_children()) <= children
    assert left_behind(before) == set()


@pytest.fixture(scope="module")
def session():
    """Yield a session that keeps its engine and data for all runs of a test module."""
    with fedsim.Session() as shared:
        yield shared


@pytest.fixture
def pictures(monkeypatch):
    """Let runs and comparisons draw their pictures, which are empty files in other tests of this process."""
    monkeypatch.setattr(painter, "encode", encode)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser found: {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=BROWSER_OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def tiny_experiment():
    """Return a quick experiment on a few real images, as nested tables."""
    assert (TINY_TRAIN, TINY_TEST) == (203, 90)
    return {
        "rounds": 2,
        "workers": 3,
        "engine": "serial",
        "model": {"name": "2nn", "hidden": 20},
        "data": "tests.components:tiny",
        "local": {"batch_size": 16, "lr": 0.05, "momentum": 0.5},
        "records": {"curve": False},  # the picture takes 0.1 s
    }


@pytest.fixture
def data_root(tmp_path, monkeypatch):
    """Return a folder for downloads that does not exist yet, and unset $FEDSIM_DATA."""
    monkeypatch.delenv("FEDSIM_DATA", raising=False)
    return tmp_path / "data"


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """Return a function that calls `fedsim` with command-line words, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def invoke(*words):
        return CliRunner().invoke(app, [str(word) for word in latest(words)])

    return invoke


@pytest.fixture
def prepared():
    """Return a function that prepares task and memory of a small experiment (by default a convolution on images)."""
    with contextlib.ExitStack() as stack:

        def prepare_one(kind="convolution", **changes):
            wanted = fedsim.Experiment(**{**experiment(kind), "engine": "serial", **changes})
            session = stack.enter_context(fedsim.Session())
            task, engine = stack.enter_context(begun(wanted, session))
            return task, engine.shared

        yield prepare_one
