"""Built-in models. An experiment refers to any other model by its import path, "package.module:factory".

A factory returns an `nn.Module` that maps a batch of inputs to logits or log-probabilities [batch, classes], or to
whatever the learning task expects. The parameters of the factory are its configuration:
`model = {name = "net", dropout = 0.0}`.
"""

from fedsim.models import from_torchvision  # noqa: F401  (registers the family torchvision:NAME)
from fedsim.models.base import model
from fedsim.models.classic import Net, cnn, cnn_dropout, linear, logistic, mlp, two_nn, two_nn_bn
from fedsim.models.resnet import resnet20, resnet32, resnet56
from fedsim.models.text import GPT, CharLSTM

__all__ = [
    "GPT",
    "CharLSTM",
    "Net",
    "cnn",
    "cnn_dropout",
    "linear",
    "logistic",
    "mlp",
    "model",
    "resnet20",
    "resnet32",
    "resnet56",
    "two_nn",
    "two_nn_bn",
]
