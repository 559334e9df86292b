"""Byzantine attacks: what the attackers' rows are made of, and what they do to their own data."""

from fedsim.attacks import basic, crafted, optimal, poisoning  # noqa: F401  # each registers its attacks
from fedsim.attacks.stateless import attack
from fedsim.attacks.strategy import BoundAttack, Goal, Poison, attack_strategy, bind_attack

__all__ = ["BoundAttack", "Goal", "Poison", "attack", "attack_strategy", "bind_attack"]
