"""Attacks of Byzantine workers, which change the updates that they send or the data that they train on."""

from fedsim.byzantine import basic, coupled, crafted, poisoning  # noqa: F401  (registers the attacks)
from fedsim.byzantine.base import Attackers, AttackStrategy, Goal, Poison, attack_strategy
from fedsim.byzantine.functional import attack

__all__ = ["AttackStrategy", "Attackers", "Goal", "Poison", "attack", "attack_strategy"]
