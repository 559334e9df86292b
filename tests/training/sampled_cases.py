"""Experiments with a cohort strategy, for the engine tests."""

SAMPLED = {
    "workers with the highest losses": {
        **{"workers": 7, "cohort": 3, "rounds": 3, "partition": "tests.components:uneven"},
        "sampling": {"name": "power_of_choice", "candidates": 5},
    },
    "unbiased weights, and workers that do not report": {
        **{
            "workers": 6,
            "cohort": 4,
            "rounds": 3,
            "partition": "tests.components:uneven",
            "sampling.dropout_rate": 0.3,
        },
        **{"sampling": "by_size", "aggregate": {"weights": "inverse_probability"}},
    },
}
