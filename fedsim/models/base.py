"""The registry of models."""

from __future__ import annotations

from fedsim.core.registry import Registry

model = Registry("model")
