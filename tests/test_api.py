"""The names that `import fedsim` offers."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import fedsim
from fedsim.config.components import COMPONENTS, registry_of
from fedsim.errors import MissingPackageError
from tests.commands import ROOT


def test_every_public_name_is_there_and_listed():
    for name in fedsim.__all__:
        assert getattr(fedsim, name) is not None
    assert set(fedsim.__all__) <= set(dir(fedsim))


def test_modules_of_the_package_are_attributes_and_nothing_else_is():
    assert fedsim.models.model.get("net")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fedsim.nothing  # noqa: B018


@pytest.mark.parametrize(
    "call",
    [
        lambda: fedsim.run(rounds=-1),
        lambda: fedsim.run(model="absent"),
        lambda: fedsim.run(workers=5000, engine="serial"),
        lambda: fedsim.load_experiment({"roundz": 1}),
        lambda: fedsim.load_experiment("mnist_sync_sgd", ["roundz=1"]),
        lambda: fedsim.Experiment(rounds=-1),
        lambda: fedsim.compare({"rounds": -1}, {"seed": [0, 1]}),
    ],
)
def test_a_wrong_setting_has_one_frame_of_fedsim_in_its_traceback(call):
    with pytest.raises(fedsim.ExperimentError) as caught:
        call()
    package = str(Path(fedsim.__file__).parent)
    frames = [entry.path for entry in caught.traceback]
    assert sum(str(path).startswith(package) for path in frames) == 1
    assert str(frames[-1]).startswith(package)
    assert caught.value.__cause__ is None


def public_functions():
    """Yield (name, function) for all public functions, constructors and methods."""
    for package in ("fedsim", *(each.name for each in pkgutil.walk_packages(fedsim.__path__, "fedsim."))):
        if not (
            package.startswith("fedsim.integrations.") or (ROOT / package.replace(".", "/") / "__init__.py").exists()
        ):
            continue
        try:
            module = importlib.import_module(package)
        except MissingPackageError:
            continue
        for name in getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]:
            target = getattr(module, name)
            if callable(target):
                yield f"{package}.{name}", target
            if isinstance(target, type):
                methods = [member for member in vars(target) if not member.startswith("_")]
                yield from ((f"{package}.{name}.{member}", getattr(target, member)) for member in methods)


def test_a_seed_is_passed_by_its_name():
    by_position = []
    for path, target in public_functions():
        with contextlib.suppress(TypeError, ValueError):  # no function, or one without a signature
            seed = inspect.signature(target).parameters.get("seed")
            by_position += [path] if seed and seed.kind is not seed.KEYWORD_ONLY else []
    assert by_position == []
    for kind in COMPONENTS:  # the simulator passes inputs
        for registration in registry_of(kind):
            seed = inspect.signature(registration.target).parameters.get("seed")
            assert not seed or "seed" in registration.takes or seed.kind is seed.KEYWORD_ONLY, registration.name
