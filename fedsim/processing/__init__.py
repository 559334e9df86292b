"""Processors: what is done to each update before it is aggregated, such as compression, clipping and noise."""

from fedsim.processing.processors import UpdateProcessor, apply_chain, initial_residuals, processor

__all__ = ["UpdateProcessor", "apply_chain", "initial_residuals", "processor"]
