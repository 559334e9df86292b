"""Draw experiments at random, and check the properties that every experiment has.

    python -m tests.fuzz --minutes 60                  # failures as commands to paste, then a table
    python -m tests.fuzz --seed 3 --only 17 --pair stop,groups  # repeat draw 17 of seed 3
    python -m tests.fuzz --check "hash seed" workers=2 model=2nn model.lora.rank=4

Draw i depends only on (seed, i) and on the pair of top-level keys that had been run least often. A last table shows
which pairs were run. A failure is reduced to the fewest settings. The exit code is 1 if a property is
violated, or if an experiment ends with anything but an error of one line. Each draw checks one property in turn, or all
of them with --all.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shlex
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence

import torch

from fedsim.config.overrides import parse_word
from tests.fuzz.crossings import PROPERTIES  # all properties, because the module adds its own
from tests.fuzz.draw import ASYNCHRONOUS, Settings, draw
from tests.fuzz.pairs import Pairs
from tests.fuzz.properties import NotApplicable
from tests.fuzz.runs import COMPLETED, REFUSALS, Lab
from tests.fuzz.shrink import shrunk
from tests.time_limit import time_limit

SHRINKING = 60.0  # seconds
LONGEST = 60  # seconds for the check of one property
OK, REFUSED, SKIPPED, TOO_LONG = "ok", "refused", "does not apply", "takes too long"
KINDS = (OK, SKIPPED, TOO_LONG)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this time (default: 10)")
    parser.add_argument("--draws", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    parser.add_argument("--only", type=int, help="one draw, by its number, with all properties")
    parser.add_argument("--pair", help="with these two top-level keys, as KEY,KEY, in each draw")
    parser.add_argument("--all", action="store_true", help="check all properties of each draw")
    parser.add_argument("--property", action="append", choices=PROPERTIES, help="check only this property")
    parser.add_argument(
        "--check", choices=PROPERTIES, help="check a property of the experiment given as key=value words"
    )
    parser.add_argument("settings", nargs="*", help="settings of --check")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with Lab() as lab:
        if options.check:
            settings = settings_in(options.settings)
            answer = verdict(lab, options.check, settings)
            print(answer)
            return int(is_failure(answer))
        return _fuzz(lab, options)


def _fuzz(lab: Lab, options: argparse.Namespace) -> int:
    drawn, verdicts, deadline = Counter(), Counter(), time.monotonic() + 60 * options.minutes
    names, pairs = options.property or list(PROPERTIES), Pairs(options.seed)
    everything = options.all or options.only is not None
    for number in [options.only] if options.only is not None else range(options.draws):
        if time.monotonic() > deadline:
            break
        order, pair = in_turn(names, number), options.pair.split(",") if options.pair else pairs.rarest()
        label = f"{options.seed} {number}"
        settings, refused = drawn_for(label, order[0], pair)
        pairs.refused.update({tuple(pair): refused} if refused else {})
        drawn.update(components(settings))
        for name, answer in checked(lab, settings, names if everything else order, everything):
            kind = answer if answer in KINDS else "failed" if is_failure(answer) else REFUSED
            verdicts[name, kind] += 1
            if kind == "failed":
                _report(lab, f"{label} --pair {','.join(pair)}", name, settings, answer)
        pairs.count(COMPLETED)
    _print_tables(drawn, verdicts)
    print("\n".join(["", *pairs.lines()]))
    return int(any(kind == "failed" for _, kind in verdicts))


def drawn_for(label: str, name: str, pair: Sequence[str] = ()) -> tuple[Settings, str | None]:
    """Return a draw for a property, with a pair of keys and often with what the property is about (see `draw`).

    Every third draw has an asynchronous policy with a rule and an attack instead of the pair.
    """
    rng, wants = random.Random(label), PROPERTIES[name].wants
    wanted = [rng.choice(wants)] if wants and rng.random() < 0.7 else []
    if rng.random() < 1 / 3:
        return draw(rng, [*rng.choice(ASYNCHRONOUS), *wanted])[0], None
    return draw(rng, [*pair, *wanted])


def in_turn(names: list[str], number: int) -> list[str]:
    """Return the properties, beginning with that of a draw: every second draw with one that is checked often."""
    often = [name for name in names if PROPERTIES[name].often] or names
    start = names.index(often[number // 2 % len(often)]) if number % 2 else number // 2 % len(names)
    return names[start:] + names[:start]


def checked(lab: Lab, settings: Settings, names: list[str], everything: bool = False) -> list[tuple[str, str]]:
    """Return the verdicts on the properties `names`, in order. By default, only up to the first that applies."""
    lab.forget()
    verdicts = []
    for name in names:
        verdicts.append((name, verdict(lab, name, settings)))
        if not everything and verdicts[-1][1] != SKIPPED:
            return verdicts[-1:]
    return verdicts


def verdict(lab: Lab, name: str, settings: Settings) -> str:
    """Return OK, SKIPPED, TOO_LONG, "refused: reason", or what violates the property."""
    try:
        if settings.get("mode") == "race" and not PROPERTIES[name].of_races:
            raise NotApplicable
        with time_limit(LONGEST, TooLong()):
            return PROPERTIES[name].check(lab, settings) or OK
    except NotApplicable:
        return SKIPPED
    except TooLong:
        lab.end_children()
        return TOO_LONG
    except REFUSALS as error:
        return f"{REFUSED}: {str(error).splitlines()[0]}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {last.name}: {str(error).splitlines()[0] if str(error) else ''}"


class TooLong(BaseException):
    """The check of a property takes too long. No handler of errors in fedsim catches this."""


def is_failure(answer: str) -> bool:
    return answer not in KINDS and not answer.startswith(REFUSED)


def _report(lab: Lab, number: str, name: str, settings: Settings, answer: str) -> None:
    print(f"draw {number}: {name}: {answer}", flush=True)

    def fails(candidate: Settings) -> bool:
        lab.forget()
        found = verdict(lab, name, candidate)
        return is_failure(found) and found.split(":")[0] == answer.split(":")[0]

    print(f"  {command(name, shrunk(settings, fails, SHRINKING))}", flush=True)


def command(name: str, settings: Settings) -> str:
    words = [f"{key}={_toml(value)}" for key, value in settings.items()]
    return f"python -m tests.fuzz --check {shlex.quote(name)} {shlex.join(words)}"


def settings_in(words: list[str]) -> Settings:
    """Return the settings in words such as `local.lr=0.1`."""
    return {".".join(path): value for path, value in map(parse_word, words)}


def _toml(value: object, *, quoted: bool = False) -> str:
    """Return a value as TOML. Text is quoted only within a list or table."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item, quoted=True)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item, quoted=True) for item in value) + "]"
    return value if isinstance(value, str) and not quoted else json.dumps(value)


def components(settings: Settings) -> list[str]:
    """Return what was drawn, as "table: component"."""
    drawn = []
    for key, value in settings.items():
        if isinstance(value, str) and key.rpartition(".")[2] in ("name", "rule", "algorithm", "mechanism"):
            drawn.append(f"{key}: {value}")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            drawn += [f"{key}: {item.get('name', item.get('rule'))}" for item in value]
        elif key in ("sync", "buffers", "mode", "precision"):
            drawn.append(f"{key}: {value}")
    return drawn + ["model.lora"] * bool(settings.get("model.lora.rank"))


def _print_tables(drawn: Counter[str], verdicts: Counter[tuple[str, str]]) -> None:
    groups: dict[str, list[str]] = {}
    for item, count in sorted(drawn.items()):
        key, _, name = item.partition(": ")
        groups.setdefault(key, []).append(f"{name} {count}".strip())
    print("\ndrawn")
    for key, counts in groups.items():
        print(f"  {key:22} {', '.join(counts)}")
    kinds = (OK, "failed", REFUSED, SKIPPED, TOO_LONG)
    print(f"\n{'property':16}" + "".join(f"{kind:>16}" for kind in kinds))
    for name in PROPERTIES:
        print(f"{name:16}" + "".join(f"{verdicts[name, kind]:>16}" for kind in kinds))
    total = sum(count for (_, kind), count in verdicts.items() if kind != SKIPPED)
    shares = {kind: sum(verdicts[name, kind] for name in PROPERTIES) for kind in kinds}
    print(f"{total} checks: {shares['failed']} failed, {shares[REFUSED]} refused")


if __name__ == "__main__":
    sys.exit(main())
