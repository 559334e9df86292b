"""What each rank of a test does: runs that are gone on with, and the same without a break. torchrun ... FOLDER"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import fedsim
from fedsim.engines.distributed.process_group import RankGroup
from fedsim.runs.checkpoints import _checksum_of, _sha256

TABLES = {
    "engine": "distributed",
    "sync": "gradients",
    "workers": 4,
    "model": "logistic",
    "data": "tests.plugs:tiny",
    "local": {"batch_size": 16, "momentum": 0.5},
    "checkpoint": {"every": 1, "keep": 9},
    "records": {"curve": False},
}
HOOK = {"name": "powersgd", "start_powerSGD_iter": 3}


def run(out: Path, rounds: int, resume: bool = False, hook: dict | None = None, **changes: object) -> None:
    tables = {**TABLES, "rounds": rounds, "distributed": {"hook": {**HOOK, **(hook or {})}}, **changes}
    fedsim.run(tables, out=out, resume=resume)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if os.environ["WORLD_SIZE"] == "3":
        run(folder / "three", 2)
        return
    for name, hook in {"warm": {}, "cold": {"warm_start": False}, "late": {"start_powerSGD_iter": 15}}.items():
        run(folder / name, 3, hook=hook)
        run(folder / name, 5, hook=hook, resume=True)
        run(folder / f"{name}-whole", 5, hook=hook)
    post_local = {"sync": "post_local", "gradient_rounds": 2}
    run(folder / "post_local", 3, **post_local)
    run(folder / "post_local", 4, **post_local, resume=True)
    run(folder / "post_local-whole", 4, **post_local)
    run(folder / "three", 3, resume=True)
    shrunk = {"hook": {"name": "tests.plugs:Shrunk", "factor": 0.5}}
    run(folder / "shrunk", 1, distributed=shrunk)
    run(folder / "shrunk", 2, distributed=shrunk, resume=True)
    run(folder / "refused", 4)
    if RankGroup.joined.first:
        spoil(folder / "refused" / "checkpoints" / "round-00004", {"hook.rank1.errors.0": "hook.rank1.error.0"})
        spoil(folder / "refused" / "checkpoints" / "round-00003", {"hook.rank2.error.0": "hook.rank1.error.0"})
    run(folder / "refused", 5, resume=True)


def spoil(checkpoint: Path, names: dict[str, str]) -> None:
    """Give tensors other names, with checksums that are right."""
    tensors, head = checkpoint.with_suffix(".safetensors"), checkpoint.with_suffix(".json")
    kept = load_file(tensors)
    for name, before in names.items():
        kept[name] = kept.pop(before)
    save_file(kept, tensors)
    said = {**json.loads(head.read_text()), "sha256": _sha256(tensors.read_bytes())}
    del said["checksum"]
    head.write_text(json.dumps({**said, "checksum": _checksum_of(said)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
