"""Create docs/picture.png, the picture of the README: python docs/hooks/picture.py [FOLDER]

Five rules, four attacks and five seeds make 100 runs, which take four minutes on two cores. If FOLDER is given, the
records are kept there, and a second call with the same FOLDER only draws the picture.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

import fedsim
from fedsim.core.plotting import encode

PICTURE = Path(__file__).parents[1] / "picture.png"
EXPERIMENT = {
    "name": "rules_under_attack",
    "workers": 11,
    "rounds": 20,
    "model": "2nn",
    "partition": {"name": "dirichlet", "alpha": 1.0},
    "local": {"steps": 20, "batch_size": 32, "lr": 0.1},
    "aggregate": {"nonfinite": "stop"},
    "attack": {"fraction": 0.3},
}
GRID = {
    "aggregate.rule": ["mean", "median", "krum", "geometric_median", ["nnm", "trimmed_mean"]],
    "attack": [
        "none",
        {"name": "sign_flipping", "scale": 3},
        {"name": "ipm", "eps": 3},
        {"name": "alie", "z": 1.5},
    ],
    "seed": [0, 1, 2, 3, 4],
}
HEIGHT, CURVES, HEAT_MAP = 2.56, 3.2, 4.0  # inches
DPI = 250


def draw(folder: Path) -> Image.Image:
    """Draw the curves under one attack, and next to them the heat map of all attacks."""
    figures = [
        fedsim.plot(folder, only={"attack": "sign_flipping"}, width=CURVES, height=HEIGHT),
        fedsim.plot(folder, kind="heatmap", width=HEAT_MAP, height=HEIGHT),
    ]
    halves = [Image.open(io.BytesIO(encode(figure, "png", DPI))).convert("RGB") for figure in figures]
    picture = Image.new("RGB", (sum(half.width for half in halves), halves[0].height))
    for place, half in zip((0, halves[0].width), halves, strict=True):
        picture.paste(half, (place, 0))
    return picture.quantize(256)


def main(folder: Path) -> None:
    fedsim.compare(EXPERIMENT, GRID, folder, progress=True)
    draw(folder).save(PICTURE, optimize=True)
    print(PICTURE)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
