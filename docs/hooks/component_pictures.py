"""Small pictures of what components do, drawn when the site is built."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

import fedsim
from fedsim.clients.lr_schedules import LRSchedule
from fedsim.core.numbers import Example
from fedsim.core.registry import Registration

# colours of Okabe and Ito, distinguishable in black and white
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#808080"
STYLE = {
    "svg.hashsalt": "fedsim",
    "font.size": 8,
    "axes.linewidth": 0.6,
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    **dict.fromkeys(["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], GREY),
}
EXAMPLES = {"f": 3, "c": 1.0, "tau": 1.0, "s": 2, "z": 1.5, "values": list(np.linspace(1, 8, 20))}
HONEST, BYZANTINE, WORKERS, ROUNDS = 16, 3, 10, 50


def draw(kind: str, registration: Registration) -> bytes | None:
    """Return the picture of a component as SVG, or None if there is no picture for its kind or for itself."""
    function = DRAWN.get(kind)
    if function is None:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.3, 1.9), layout="constrained")
        if function(registration, figure.subplots(), _parameters(registration)) is False:
            return None
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def _parameters(registration: Registration) -> dict[str, Any]:
    """Return parameters that show what a component does: all without a default, and a few others."""
    fields = registration.parameters.model_fields
    examples = {name: EXAMPLES[name] for name in fields if name in EXAMPLES}
    marks = ((name, mark) for name, field in fields.items() for mark in field.metadata if isinstance(mark, Example))
    return {name: mark.value for name, mark in marks} | examples


def _cloud() -> torch.Tensor:
    """Return honest rows [n, 2] around (1, 0.5)."""
    return fedsim.Draws.of("honest", seed=0).normal(HONEST, 2).double() * 0.35 + torch.tensor([1.0, 0.5])


def _scatter(axes: Any, honest: torch.Tensor, byzantine: torch.Tensor) -> None:
    axes.scatter(*honest.T, s=10, color=BLUE, label="honest", linewidths=0)
    axes.scatter(*byzantine.T, s=14, color=ORANGE, marker="X", label="Byzantine", linewidths=0)
    axes.set_aspect("equal", "datalim")


def _rule(registration: Registration, axes: Any, parameters: dict[str, Any]) -> bool:
    if "models" in registration.takes:  # compares updates of different times
        return False
    honest = _cloud()
    byzantine = torch.tensor([[-2.0, 1.6], [-1.8, 1.9], [-2.2, 1.8]], dtype=torch.double)
    rows = torch.cat([honest, byzantine])
    inputs = {"root": honest.mean(0) + 0.1} if "root" in registration.takes else {}
    inputs |= {"losses": torch.ones(len(rows))} if "losses" in registration.takes else {}
    inputs |= {"own": 0} if "own" in registration.takes else {}
    aggregate = fedsim.pre_aggregate if registration.kind == "pre-aggregator" else fedsim.aggregate
    result = aggregate(rows, registration.name, **inputs, **parameters).reshape(-1, 2)
    _scatter(axes, honest, byzantine)
    axes.scatter(*result.T, s=70 if len(result) == 1 else 14, color=GREEN, marker="*", label="result", linewidths=0)
    axes.legend(frameon=False, fontsize=6, loc="lower left", handletextpad=0, borderaxespad=0)
    return True


def _attack(registration: Registration, axes: Any, parameters: dict[str, Any]) -> bool:
    honest = _cloud()
    inputs = {"aggregate": fedsim.aggregate} if "aggregate" in registration.takes else {}
    if not {"honest"} & set(registration.takes):
        return False
    byzantine = fedsim.attack(honest, registration.name, BYZANTINE, **inputs, **parameters)
    if not byzantine.isfinite().all():
        return False
    _scatter(axes, honest, byzantine)
    axes.legend(frameon=False, fontsize=6, loc="lower left", handletextpad=0, borderaxespad=0)
    return True


def _partition(registration: Registration, axes: Any, parameters: dict[str, Any]) -> bool:
    if "path" in registration.parameters.model_fields:  # the shards are in a file
        return False
    labels = np.asarray(fedsim.load_dataset("mnist5k")[0].targets)
    ids = {"ids": np.arange(len(labels)) // 150} if "ids" in registration.takes else {}
    shards = fedsim.partition(labels, registration.name, WORKERS, seed=1, **ids)
    image = axes.imshow([np.bincount(labels[shard], minlength=10) for shard in shards], cmap="cividis", vmin=0)
    axes.set(xlabel="class", ylabel="worker", xticks=range(0, 10, 3), yticks=range(0, 10, 3))
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    return True


def _schedule(registration: Registration, axes: Any, parameters: dict[str, Any]) -> None:
    settings = {"length": ROUNDS, "warmup": 0, "per": "round", "place": "local.schedule"}
    schedule = LRSchedule.of(registration, registration.check(parameters), **settings)
    rounds = range(1, ROUNDS + 1)
    axes.plot(rounds, [schedule.rate(0.1, round) for round in rounds], color=BLUE)
    axes.set(xlabel="round", ylabel="lr", ylim=(0, None))


def _slowdown(registration: Registration, axes: Any, parameters: dict[str, Any]) -> None:
    rng = {"rng": np.random.default_rng(0)} if "rng" in registration.takes else {}
    axes.bar(range(20), registration.target(n_workers=20, **rng, **parameters), color=BLUE)
    axes.set(xlabel="worker", ylabel="time of a step")


def _noise(registration: Registration, axes: Any, parameters: dict[str, Any]) -> bool:
    inputs = {"rng": np.random.default_rng(0), "size": 60, "worker": 0, "start": 0, "n_workers": 4}
    if "path" in registration.parameters.model_fields:  # its factors are read from a file
        return False
    axes.plot(
        registration.target(**registration.select_inputs(**inputs), **parameters),
        ".-",
        color=BLUE,
        linewidth=0.5,
        markersize=3,
    )
    axes.set(xlabel="step", ylabel="factor of its time", ylim=(0, None))
    return True


DRAWN = {
    "rules": _rule,
    "pre-aggregators": _rule,
    "attacks": _attack,
    "partitions": _partition,
    "schedules": _schedule,
    "slowdowns": _slowdown,
    "noises": _noise,
}
