"""All policies; importing this registers them."""

from fedsim.asynchronous.policies import fastest, gradients, models, peers, rounds
from fedsim.asynchronous.policy import Arrival, Policy, policy

__all__ = ["Arrival", "Policy", "fastest", "gradients", "models", "peers", "policy", "rounds"]
