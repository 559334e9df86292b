"""Differential privacy: mechanisms that clip updates and add noise, and the privacy budget that they spend."""

from fedsim.privacy.accounting import ACCOUNTANTS, Releases, UnsupportedSamplingError
from fedsim.privacy.mechanisms import Mechanism, clip_factors, clip_update, privacy_mechanism, row_norms

__all__ = [
    "ACCOUNTANTS",
    "Mechanism",
    "Releases",
    "UnsupportedSamplingError",
    "clip_factors",
    "clip_update",
    "privacy_mechanism",
    "row_norms",
]
