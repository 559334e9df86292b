"""Messages name keys of tables in full, such as data.target, because a short name may belong to several tables."""

from __future__ import annotations

import ast
import re

from fedsim.config.components import COMPONENTS, registry_of
from fedsim.config.experiment import Experiment
from fedsim.config.keys import key_tables
from tests.commands import ROOT

OTHER_MEANINGS = {  # file and name that is also the name of a key
    ("aggregation/resolve.py", "rule"),  # the key of a table inside aggregate.rule
    ("aggregation/rule.py", "updates"),  # an input of rules
    ("clients/schedule.py", "of"),  # a method
    ("config/experiment.py", "noise"),  # a parameter of client algorithms of one's own
    ("config/schema.py", "loss"),  # a method of loss modules
    ("config/validation.py", "lr"),  # a parameter of client algorithms and server optimizers
    ("data/brought.py", "rows"),  # an attribute of TensorData
    ("data/partitions/base.py", "ids"),  # a parameter of fedsim.partition
    ("records/history.py", "tensorboard"),  # a logger
    ("training/cuda_graphs.py", "start"),  # a method of client algorithms
}


def test_messages_name_keys_with_their_tables():
    keys = {key.path.rpartition(".")[2] for table in key_tables() for key in table.keys}
    keys |= {name for kind in COMPONENTS for registration in registry_of(kind) for name in registration.fields}
    keys -= set(Experiment.model_fields)
    assert {"target", "inputs", "delimiter", "size", "fine_tune"} <= keys
    named = set()
    for path in (ROOT / "fedsim").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        described = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in described:
                words = keys.intersection(re.findall(r"`(\w+)`", node.value))
                named |= {(path.relative_to(ROOT / "fedsim").as_posix(), word) for word in words}
    assert named == OTHER_MEANINGS
