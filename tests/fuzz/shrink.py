"""Reduce a failing experiment to the fewest settings with which it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from tests.fuzz.draw import Settings, is_valid

NEEDED = ("data.name", "model.name", "task.name", "workers", "rounds", "seed")  # defaults of these take longer
SIMPLEST: Settings = {"data.name": "tests.components:few", "model.name": "mlp"}
SIMPLEST |= {"model.inputs": 4, "model.hidden": [3], "model.classes": 3}


def shrunk(settings: Settings, fails: Callable[[Settings], bool], seconds: float) -> Settings:
    """Return the settings after all removals and simplifications that keep the failure, within some seconds."""
    deadline, progress = time.monotonic() + seconds, True
    while progress:
        progress = False
        for candidate in _simpler(settings):
            if time.monotonic() > deadline:
                return settings
            if is_valid(candidate) and fails(candidate):
                settings, progress = candidate, True
                break
    return settings


def _simpler(settings: Settings) -> Iterator[Settings]:
    """Yield simpler settings: other data, fewer groups, fewer keys, smaller numbers."""
    if settings.get("data.name") != SIMPLEST["data.name"]:
        of_data = ("data.", "task.", "model.")
        kept = {k: v for k, v in settings.items() if not k.startswith(of_data) or k.startswith("model.lora.")}
        yield kept | SIMPLEST
    prefixes = dict.fromkeys(key.partition(".")[0] for key in settings)
    for prefix in prefixes:
        group = [key for key in settings if key.partition(".")[0] == prefix and key not in NEEDED]
        if len(group) > 1:
            yield {key: value for key, value in settings.items() if key not in group}
    for key, value in settings.items():
        without = {name: item for name, item in settings.items() if name != key}
        if key not in NEEDED:
            yield without
        if isinstance(value, list) and len(value) > 1:
            yield from ({**settings, key: value[:k] + value[k + 1 :]} for k in range(len(value)))
        if isinstance(value, list) and value and isinstance(value[0], dict):
            names = [name for name in value[0] if name not in ("name", "rule")]
            yield from ({**settings, key: [{k: v for k, v in value[0].items() if k != n}, *value[1:]]} for n in names)
        if type(value) is int and key in ("rounds", "workers", "seed"):
            smaller = {"rounds": range(1, value), "workers": range(2, value), "seed": range(0, min(value, 1))}[key]
            yield from ({**settings, key: number} for number in smaller)
