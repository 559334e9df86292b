"""Stratified random draw of test samples, and warnings about classes without outputs or training samples."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import fedsim
from fedsim.data.drawn_tests import split_test
from fedsim.errors import DataError, SettingWarning


def data_of(targets):
    return fedsim.TensorData(torch.arange(len(targets)).float().unsqueeze(1), torch.as_tensor(targets))


def labels_of_sizes(*sizes):
    """Labels in a random order, sizes[c] of class c."""
    return np.random.default_rng(len(sizes)).permutation(np.repeat(np.arange(len(sizes)), sizes))


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("sizes", [(50, 50), (199, 1), (3, 90, 7, 1), (10,) * 10, (1, 1, 1, 60), (2, 2, 40)])
def test_each_class_has_its_share_of_the_test_samples(sizes, fraction):
    """By definition: round(fraction n) in all, and per class fraction n_c up to rounding, but never all n_c samples."""
    labels = labels_of_sizes(*sizes)
    train, test = split_test(data_of(labels), fraction, "data", are_classes=True)
    n = sum(sizes)
    assert len(test) == round(fraction * n)
    tested = np.bincount(test.targets, minlength=len(sizes))
    quotas = np.array(sizes) * len(test) / n
    full = np.array(sizes) - 1
    assert (tested <= full).all()
    assert (tested >= np.minimum(np.floor(quotas), full)).all()
    if (np.ceil(quotas) <= full).all():
        assert (tested <= np.ceil(quotas)).all()
    positions = torch.cat([train.inputs, test.inputs]).flatten().sort().values
    assert torch.equal(positions, torch.arange(n).float())
    for part in (train, test):
        assert (part.inputs.flatten().diff() > 0).all()  # in the order of the data set
        assert (part.targets.numpy() == labels[part.inputs.flatten().long().numpy()]).all()


def test_samples_of_a_class_are_drawn_at_random():
    _, test = split_test(data_of(labels_of_sizes(100, 100)), 0.5, "data", are_classes=True)
    drawn = test.inputs.flatten().numpy()
    assert 80 < drawn.mean() < 120
    assert 30 < np.sum(drawn < 100) < 70


def test_targets_that_are_not_classes_are_drawn_without_strata():
    """Measured values, and integers of more values than test samples, are drawn by one permutation of all samples."""
    for targets in (torch.arange(40.0), torch.arange(40)):
        order = fedsim.core.randomness.numpy_generator(0, "test_split").permutation(40)
        _, test = split_test(data_of(targets), 0.2, "data")
        assert test.inputs.flatten().tolist() == sorted(order[:8].tolist())


def test_a_draw_that_leaves_a_class_without_training_samples_is_an_error(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "t.csv").write_text("x,y\n0.5,a\n1,b\n2,c\n3,d\n4,a\n")
    assert len(fedsim.load_dataset("csv", path=str(tmp_path / "t.csv"))[1]) == 1
    remedy = "use a smaller data.test_fraction, or give a separate test part$"
    with pytest.raises(DataError, match=f"t.csv: 2 of 5 samples would be drawn for tests, .*; {remedy}") as caught:
        fedsim.load_dataset("csv", path=str(tmp_path / "t.csv"), test_fraction=0.4)
    assert "\n" not in str(caught.value)


TINY_RUN = {"workers": 2, "rounds": 1, "engine": "serial", "model": {"name": "logistic", "inputs": 1, "classes": 10}}


def test_outputs_that_no_class_uses_are_named_in_one_line():
    data = data_of(np.arange(15) % 3)
    with pytest.warns(SettingWarning) as caught:
        fedsim.run(data=(data, data), **TINY_RUN)
    [line] = [str(warning.message) for warning in caught]
    assert "7 of the model's 10 outputs, such as number 3, belong to classes without samples" in line
    assert "\n" not in line
    with pytest.warns(SettingWarning, match="1 of the model's 3 outputs, such as number 1,"):
        fedsim.run(data=(data_of([0, 2] * 5),) * 2, **{**TINY_RUN, "model": {**TINY_RUN["model"], "classes": 3}})


def test_test_classes_without_training_samples_are_named_in_one_line():
    train, test = data_of([0, 1] * 5), data_of([0, 1, 2])
    with pytest.warns(SettingWarning, match="the test set has samples of class 2, of which there are no training"):
        fedsim.run(data=(train, test), **{**TINY_RUN, "model": {**TINY_RUN["model"], "classes": 3}})


def test_classes_that_are_held_out_entirely_are_named_in_one_line():
    """One sample has class 2. It is held out for validation, or as a local test, for some seeds."""
    data, tables = data_of([0, 1] * 8 + [2]), {**TINY_RUN, "model": {**TINY_RUN["model"], "classes": 3}}
    for setting, test_set in (("validation_fraction", "the validation set"), ("local_test_fraction", "the local test")):
        held_out = []
        for seed in range(8):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", SettingWarning)
                result = fedsim.run(data={"name": (data, data), setting: 0.3}, seed=seed, **tables)
            lines = [str(warning.message) for warning in caught if issubclass(warning.category, SettingWarning)]
            assert result.history
            assert len(lines) <= 1
            held_out += lines
        assert 0 < len(held_out) < 8
        assert all(f"data.{setting} = 0.3: {test_set}" in line and "samples of class 2" in line for line in held_out)
