"""Processors, which change each update before it is aggregated: compression, clipping and noise."""

from fedsim.processing.processors import UpdateProcessor, apply_chain, initial_residuals, processor

__all__ = ["UpdateProcessor", "apply_chain", "initial_residuals", "processor"]
