"""Processors: what is done to each update before it is aggregated, such as compression, clipping and noise."""

from fedsim.processing import processors  # noqa: F401  (registers the processors)
from fedsim.processing.processor import BoundProcessor, apply_chain, bind_processor, initial_residuals, processor

__all__ = ["BoundProcessor", "apply_chain", "bind_processor", "initial_residuals", "processor"]
