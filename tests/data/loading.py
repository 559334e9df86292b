"""Functions for tests of data sets: load a data set with exactly the expected warnings, or check that it is refused."""

from __future__ import annotations

import warnings

import pytest

import fedsim
from fedsim.errors import DataError, FedsimWarning


def load(name, *expected, **params):
    """Load a data set whose warnings are exactly those that contain `expected`, one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FedsimWarning)
        data = fedsim.load_dataset(name, **params)
    lines = [str(warning.message) for warning in caught if issubclass(warning.category, FedsimWarning)]
    assert len(lines) == len(expected), lines
    for line, part in zip(lines, expected, strict=True):
        assert part in line
        assert "\n" not in line
    return data


def refused(name, match, *args, error=DataError, **params):
    """Check that a data set cannot be loaded, for a reason of one line."""
    with pytest.raises(error, match=match) as caught:
        fedsim.load_dataset(name, *args, **params)
    assert "\n" not in str(caught.value)
