"""The asynchronous policies. Importing this package registers them."""

from fedsim.asynchronous.policies import buffered, decentralized, gradient_updates, model_updates, topologies
from fedsim.asynchronous.policies.policy import Policy, policy
from fedsim.asynchronous.policies.server import Arrival, AsyncServer

__all__ = [
    "Arrival",
    "AsyncServer",
    "Policy",
    "buffered",
    "decentralized",
    "gradient_updates",
    "model_updates",
    "policy",
    "topologies",
]
