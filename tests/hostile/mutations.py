"""Random changes to valid trees of tables and lists and to bytes, and a check of many changed inputs."""

from __future__ import annotations

import copy
import itertools
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsim.errors import FedsimError

LONGEST = 30.0  # seconds per input; the slowest takes a few hundredths
LONGEST_LINE = 2_000  # characters of an error line

DEEP: Any = "bottom"
for _ in range(60):
    DEEP = [DEEP]

EXTREMES = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 1000, 10**6, 10**12, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400),
    *(0.0, -0.0, 0.5, 1.0, -1.5, 1e-300, 1e300, -1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "x",
        "x" * 5000,
        "\x1b[2J",
        "\x00",
        "\ud800",
        "\u202e",
        "é",
        "$\\bad$",
        "%s{0}",
        "<script>",
        "../..",
        "/",
    ),
    *("..", "/dev/zero", "/proc/self/environ", "~", "nan", "1e400", "0", "-1", "1" * 5000),
    *("os:system", "canary:boom", "builtins:eval", "subprocess:run", "canary:", ":boom", "a:b:c", "torch.hub:load"),
    *([], {}, [[]], [0], [0, 0], [None], ["mean"], ["nnm", "mean"], [{}], {"": 0}, {"a": {"b": {}}}, DEEP),
    *({"name": "net"}, {"rule": "krum"}, {"rule": "canary:boom"}, {"a" * 300: 1}, {"[": 1, ".": 2}, list(range(300))),
]

OPERATIONS = ("set", "set", "set", "remove", "double", "add", "swap")

small = st.integers(0, 10**9)


def mutations(values: list[Any], keys: list[str], most: int = 5) -> st.SearchStrategy:
    """Return a strategy for lists of (where, operation, value, key); `where` is taken modulo the number of places."""
    value = st.sampled_from(values) | st.integers() | st.floats() | st.text(max_size=20)
    key = st.sampled_from(keys) | st.text(max_size=8)
    return st.lists(st.tuples(small, st.sampled_from(OPERATIONS), value, key), min_size=1, max_size=most)


def mutated(tree: Any, changes: list) -> Any:
    """Return a changed copy of a tree of tables and lists."""
    tree = copy.deepcopy(tree)
    for where, operation, value, key in changes:
        places = list(_places(tree))
        if not places:
            return value
        parent, at = places[where % len(places)]
        value = copy.deepcopy(value)
        if operation == "set":
            parent[at] = value
        elif operation == "remove":
            del parent[at]
        elif operation == "double" and isinstance(parent, list):
            parent.insert(at, copy.deepcopy(parent[at]))
        elif operation == "add" and isinstance(parent, dict):
            parent[key] = value
        elif operation == "add":
            parent.append(value)
        elif operation == "swap":
            donor, there = places[(where // 7) % len(places)]
            parent[at] = copy.deepcopy(donor[there])
    return tree


def _places(tree: Any):
    """Yield all (table or list, key or index) of a tree."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for at, value in items:
            yield node, at
            waiting.append(value)


edits = st.lists(
    st.tuples(
        small, st.integers(0, 40), st.binary(max_size=12) | st.sampled_from([b"\n", b"\xff", b"[" * 3000, b"9" * 5000])
    ),
    max_size=4,
)  # (where, number of removed bytes, inserted bytes)


def edited(content: bytes, changes: list) -> bytes:
    """Return changed bytes."""
    for where, length, new in changes:
        at = where % (len(content) + 1)
        content = content[:at] + new + content[at + length :]
    return content


def without(tree: Any, *unfit: type) -> Any:
    """Return a copy of a tree without leaves of these types."""
    if isinstance(tree, dict):
        return {key: without(value, *unfit) for key, value in tree.items() if not isinstance(value, unfit)}
    if isinstance(tree, list):
        return [without(value, *unfit) for value in itertools.chain(tree) if not isinstance(value, unfit)]
    return tree


def fuzz(strategy: st.SearchStrategy, check: Callable[[Any], object], examples: int) -> None:
    """Check `examples` inputs, each in bounded time and memory; only FedsimError may be raised."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < 100,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def every_input(example):
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            check(example)
        except FedsimError as error:
            for line in str(error).split("\n"):
                assert len(line) < LONGEST_LINE, line[:LONGEST_LINE]
        assert time.perf_counter() - started < LONGEST
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "memory grew by 500 MB or more"
        assert "canary" not in sys.modules

    every_input()
