"""Built-in models. An experiment refers to any other model by its import path, "package.module:factory".

A factory returns an `nn.Module` that maps a batch of inputs to logits or log-probabilities [batch, classes], or to
whatever the learning task expects. The parameters of the factory are its configuration:
`model = {name = "net", dropout = 0.0}`.
"""

from fedsim.models.base import model
from fedsim.models.classic import Net, cnn, logistic, two_nn, two_nn_bn

__all__ = ["Net", "cnn", "logistic", "model", "two_nn", "two_nn_bn"]
