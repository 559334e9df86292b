"""Processors, which change each update before it is aggregated: compression, clipping and noise."""

from fedsim.processing import compressors
from fedsim.processing.functional import compress
from fedsim.processing.processors import UpdateProcessor, apply_chain, check_order, initial_states, processor

__all__ = ["UpdateProcessor", "apply_chain", "check_order", "compress", "compressors", "initial_states", "processor"]
