"""Convolutional networks, perceptrons and linear models."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.core.numbers import FractionBelowOne, PositiveInt
from fedsim.errors import ExperimentError
from fedsim.models.base import model


@model("net", stacked="merged")
class Net(nn.Module):
    """Small convolutional network with dropout, from PyTorch's Hogwild example (21,840 parameters).

    Two 5x5 convolutions (10 and 20 channels), each with 2x2 max pooling, are followed by channel dropout and two fully
    connected layers (50 and 10 units). The output is a log-softmax.

    Args:
        dropout: dropout probability, 0 <= dropout < 1.
        channels: number of channels of the images [batch, channels, size, size].
        classes: number of classes.
        size: height and width of the images, at least 16.

    >>> fedsim.models.Net()(torch.zeros(3, 1, 28, 28)).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        *,
        dropout: FractionBelowOne = 0.5,
        channels: PositiveInt = 1,
        classes: PositiveInt = 10,
        size: PositiveInt = 28,
    ) -> None:
        if size < 16:
            raise ExperimentError(f"model.size = {size}: net needs images of at least 16 x 16 pixels; use model=mlp")
        super().__init__()
        pooled = ((size - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.drop_channels = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(20 * pooled**2, 50)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.drop_channels(self.conv2(hidden)), 2))
        hidden = self.drop(F.relu(self.fc1(hidden.flatten(1))))
        return F.log_softmax(self.fc2(hidden), dim=1)


@model("cnn", stacked="merged")
def cnn(
    *,
    channels: PositiveInt = 1,
    classes: PositiveInt = 10,
    size: PositiveInt = 28,
    widths: tuple[PositiveInt, ...] = (32, 64),
    hidden: PositiveInt = 512,
) -> nn.Module:
    """Convolutional network of McMahan et al. 2017 (FedAvg): 1,663,370 parameters on MNIST.

    5x5 convolutions ("same" padding), each with 2x2 max pooling, are followed by two fully connected layers. The output
    is logits.

    Args:
        channels: number of channels of the images [batch, channels, size, size].
        classes: number of classes.
        size: height and width of the images. Each pooling halves them.
        widths: number of channels after each convolution.
        hidden: width of the hidden fully connected layer.

    >>> fedsim.models.cnn()(torch.zeros(3, 1, 28, 28)).shape
    torch.Size([3, 10])
    >>> fedsim.models.cnn(channels=3, size=32, widths=(8, 16, 32), hidden=64)(torch.zeros(3, 3, 32, 32)).shape
    torch.Size([3, 10])
    """
    pooled = size >> len(widths)
    if not pooled:
        raise ExperimentError(
            f"model.widths: {len(widths)} convolutions are too many for images of {size} x {size} pixels; use fewer"
        )
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((channels, *widths)):
        # Pooling before the ReLU gives the same values and gradients as the reverse order, with a quarter of the ReLUs.
        layers += [nn.Conv2d(inputs, outputs, kernel_size=5, padding=2), nn.MaxPool2d(2), nn.ReLU()]
    features = (channels, *widths)[-1] * pooled**2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


@model("cnn_dropout", stacked="merged")
def cnn_dropout(
    *, channels: PositiveInt = 1, classes: PositiveInt = 10, size: PositiveInt = 28, dropout: FractionBelowOne = 0.5
) -> nn.Module:
    """Convolutional network with dropout of TensorFlow Federated and pfl: 1,199,882 parameters on MNIST.

    Two 3x3 convolutions without padding (32 and 64 channels) are followed by 2x2 max pooling and two fully connected
    layers (128 units). The output is logits. This is `create_conv_dropout_model` of TensorFlow Federated, which Reddi
    et al. 2021 train on EMNIST, and `simple_cnn` of pfl (Granqvist et al. 2024), which they train on CIFAR-10
    (1,626,442 parameters).

    Args:
        channels: number of channels of the images [batch, channels, size, size].
        classes: number of classes.
        size: height and width of the images, at least 6.
        dropout: dropout probability before the last layer, 0 <= dropout < 1; half of it after the pooling.

    >>> fedsim.models.cnn_dropout()(torch.zeros(3, 1, 28, 28)).shape
    torch.Size([3, 10])
    """
    if size < 6:
        raise ExperimentError(f"model.size = {size}: cnn_dropout needs images of at least 6 x 6 pixels; use model=mlp")
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Dropout(dropout / 2), nn.Flatten()),
        *(nn.Linear(64 * ((size - 4) // 2) ** 2, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, classes)),
    )


@model("mlp", stacked="merged")
def mlp(
    *, inputs: PositiveInt = 784, hidden: tuple[PositiveInt, ...] = (200, 200), classes: PositiveInt = 10
) -> nn.Sequential:
    """Multilayer perceptron with ReLU that outputs logits (Goodfellow et al. 2016, chapter 6).

    Args:
        inputs: number of values per sample. Inputs [batch, ...] are flattened.
        hidden: width of each hidden layer. An empty list gives a linear model.
        classes: number of classes.

    >>> fedsim.models.mlp(inputs=12, hidden=(32, 16))(torch.zeros(3, 12)).shape
    torch.Size([3, 10])
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise((inputs, *hidden)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear((inputs, *hidden)[-1], classes))


@model("2nn", stacked="merged")
def two_nn(*, inputs: PositiveInt = 784, hidden: PositiveInt = 200, classes: PositiveInt = 10) -> nn.Sequential:
    """Multilayer perceptron of McMahan et al. 2017 (784-200-200-10, 199,210 parameters) that outputs logits.

    Args:
        inputs: number of values per sample. Inputs [batch, ...] are flattened.
        hidden: width of both hidden layers.
        classes: number of classes.

    >>> fedsim.models.two_nn(inputs=12)(torch.zeros(3, 12)).shape
    torch.Size([3, 10])
    """
    return mlp(inputs=inputs, hidden=(hidden, hidden), classes=classes)


@model("2nn_bn", stacked="vmap")
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


@model("logistic", stacked="merged")
def logistic(*, inputs: PositiveInt = 784, classes: PositiveInt = 10) -> nn.Module:
    """Multinomial logistic regression, initialised with zeros (7,850 parameters on MNIST).

    Args:
        inputs: number of values per sample. Inputs [batch, ...] are flattened.
        classes: number of classes.

    >>> fedsim.models.logistic(inputs=2, classes=3)(torch.ones(1, 2))
    tensor([[0., 0., 0.]], grad_fn=<AddmmBackward0>)
    """
    return linear(inputs=inputs, outputs=classes)


@model("linear", stacked="merged")
def linear(*, inputs: PositiveInt = 784, outputs: PositiveInt = 1) -> nn.Module:
    """Linear regression, initialised with zeros (Goodfellow et al. 2016, section 5.1.4).

    Args:
        inputs: number of values per sample. Inputs [batch, ...] are flattened.
        outputs: number of targets per sample.

    >>> fedsim.models.linear(inputs=2)(torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)
