"""Small models for MNIST: convolutional networks, perceptrons and logistic regression."""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fedsim.models.base import model

Probability = Annotated[float, Field(ge=0, lt=1)]


@model("net")
class Net(nn.Module):
    """Small convolutional network with dropout, from PyTorch's Hogwild example (21,840 parameters).

    Two 5x5 convolutions (10 and 20 channels), each with 2x2 max pooling, are followed by channel dropout and two fully
    connected layers (50 and 10 units). The output is a log-softmax.

    Args:
        dropout: dropout probability, 0 <= dropout < 1.
        channels: number of channels of the images [batch, channels, 28, 28].
        classes: number of classes.

    >>> fedsim.models.Net()(torch.zeros(3, 1, 28, 28)).shape
    torch.Size([3, 10])
    """

    def __init__(self, *, dropout: Probability = 0.5, channels: PositiveInt = 1, classes: PositiveInt = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.drop_channels = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(320, 50)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.drop_channels(self.conv2(hidden)), 2))
        hidden = self.drop(F.relu(self.fc1(hidden.flatten(1))))
        return F.log_softmax(self.fc2(hidden), dim=1)


@model("cnn")
def cnn(*, channels: PositiveInt = 1, classes: PositiveInt = 10) -> nn.Module:
    """Convolutional network of McMahan et al. 2017 (FedAvg): 1,663,370 parameters on MNIST.

    Two 5x5 convolutions ("same" padding, 32 and 64 channels), each with 2x2 max pooling, are followed by two fully
    connected layers (512 and 10 units). The output is logits.

    Args:
        channels: number of channels of the images [batch, channels, 28, 28].
        classes: number of classes.

    >>> fedsim.models.cnn()(torch.zeros(3, 1, 28, 28)).shape
    torch.Size([3, 10])
    """
    # Pooling before the ReLU gives the same values and gradients as the reverse order, with a quarter of the ReLUs.
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, kernel_size=5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(32, 64, kernel_size=5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, classes)),
    )


@model("2nn")
def two_nn(*, inputs: PositiveInt = 784, hidden: PositiveInt = 200, classes: PositiveInt = 10) -> nn.Sequential:
    """Multilayer perceptron of McMahan et al. 2017 (784-200-200-10, 199,210 parameters) that outputs logits.

    Args:
        inputs: number of values per sample. Inputs [batch, ...] are flattened.
        hidden: width of both hidden layers.
        classes: number of classes.

    >>> fedsim.models.two_nn(inputs=12)(torch.zeros(3, 12)).shape
    torch.Size([3, 10])
    """
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU()),
        *(nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, classes),
    )


@model("2nn_bn")
def two_nn_bn(*, inputs: PositiveInt = 784, hidden: PositiveInt = 200, classes: PositiveInt = 10) -> nn.Module:
    """Multilayer perceptron `2nn` with batch normalisation after each hidden layer (200,010 parameters on MNIST).

    The running statistics are buffers. A training batch must have at least two samples.

    Args:
        inputs: number of values per sample. Inputs [batch, ...] are flattened.
        hidden: width of both hidden layers.
        classes: number of classes.

    >>> fedsim.models.two_nn_bn(inputs=12)(torch.zeros(3, 12)).shape
    torch.Size([3, 10])
    """
    flatten, first, relu, second, relu_2, last = two_nn(inputs=inputs, hidden=hidden, classes=classes)
    return nn.Sequential(flatten, first, nn.BatchNorm1d(hidden), relu, second, nn.BatchNorm1d(hidden), relu_2, last)


@model("logistic")
def logistic(*, inputs: PositiveInt = 784, classes: PositiveInt = 10) -> nn.Module:
    """Multinomial logistic regression, initialised with zeros (7,850 parameters on MNIST).

    Args:
        inputs: number of values per sample. Inputs [batch, ...] are flattened.
        classes: number of classes.

    >>> fedsim.models.logistic(inputs=2, classes=3)(torch.ones(1, 2))
    tensor([[0., 0., 0.]], grad_fn=<AddmmBackward0>)
    """
    linear = nn.Linear(inputs, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)
