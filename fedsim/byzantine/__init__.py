"""Byzantine attacks on the rows and on the data of workers."""

from fedsim.byzantine import (
    basic,  # noqa: F401  # each registers its attacks
    crafted,  # noqa: F401  # each registers its attacks
    optimal,  # noqa: F401  # each registers its attacks
    poisoning,  # noqa: F401  # each registers its attacks
)
from fedsim.byzantine.base import BoundAttack, Goal, Poison, attack_strategy, bind_attack
from fedsim.byzantine.functional import attack

__all__ = ["BoundAttack", "Goal", "Poison", "attack", "attack_strategy", "bind_attack"]
