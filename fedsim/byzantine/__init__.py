"""Byzantine attacks: what the attackers' rows are made of, and what they do to their own data."""

from fedsim.byzantine import basic, crafted, optimal, poisoning  # noqa: F401  # each registers its attacks
from fedsim.byzantine.stateless import attack
from fedsim.byzantine.strategy import BoundAttack, Goal, Poison, attack_strategy, bind_attack

__all__ = ["BoundAttack", "Goal", "Poison", "attack", "attack_strategy", "bind_attack"]
