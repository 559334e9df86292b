"""What each rank of a test does: many runs one after another. torchrun ... rank_program.py CASES.json OUT"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import fedsim
from fedsim.engines import DistributedEngine
from fedsim.engines.ranks import Ranks
from fedsim.loading import load_experiment
from fedsim.preparation import prepare


def main(cases: Path, out: Path) -> None:
    """Run the cases, tables by name, and leave what came of them in OUT/RANK.pt."""
    torch.set_num_threads(1)
    results = {}
    for name, tables in json.loads(cases.read_text()).items():
        with fedsim.Workshop() as workshop:
            tables = {**tables, "engine": "distributed"}
            kept = out / name.replace(" ", "-") if tables.get("records") else None
            before = dict(Ranks.joined.sent) if Ranks.joined else {}
            seen: list = []
            result = fedsim.run(tables, out=kept, workshop=workshop, on_start=seen.append)
            sent = {what: count - before.get(what, 0) for what, count in Ranks.joined.sent.items()}
            results[name] = {
                "row": result.global_row,
                "state": result.model.state_dict(),
                "history": result.history,
                "sent": sent,
                "shapes": shapes(tables, workshop),
                "how": seen[0].how,
            }
    torch.save(results, out / f"{os.environ['RANK']}.pt")


def shapes(tables: dict, workshop: fedsim.Workshop) -> dict[str, list[int]]:
    """Of what a rank keeps, for a run of this kind."""
    experiment = load_experiment(tables)
    with DistributedEngine.among_peers(experiment.resolved()), prepare(experiment, workshop) as (_, engine):
        states = engine.memory.states.values()
        return {
            "rows": list(engine.memory.rows.shape),
            "states": [len(tensor) for state in states for tensor in state.values()],
        }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
