"""Byzantine attacks on the rows and on the data of workers."""

from fedsim.byzantine import basic, coupled, crafted, poisoning  # noqa: F401  (registers the attacks)
from fedsim.byzantine.base import Attackers, BoundAttack, Goal, Poison, attack_strategy, bind_attack
from fedsim.byzantine.functional import attack

__all__ = ["Attackers", "BoundAttack", "Goal", "Poison", "attack", "attack_strategy", "bind_attack"]
