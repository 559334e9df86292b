"""The names that `import fedsim` offers."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedsim


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
