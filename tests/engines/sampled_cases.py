"""Experiments that choose cohorts by a strategy, for the tests of engines."""

SAMPLED = {
    "workers with the highest losses": {
        **{"workers": 7, "cohort": 3, "rounds": 3, "partition": "tests.plugs:uneven"},
        "sampling": {"strategy": "power_of_choice", "candidates": 5},
    },
    "unbiased weights, and workers that do not report": {
        **{"workers": 6, "cohort": 4, "rounds": 3, "partition": "tests.plugs:uneven", "worker_dropout": 0.3},
        **{"sampling": "by_size", "aggregate": {"weights": "inverse_probability"}},
    },
}
