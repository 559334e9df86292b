"""The networks of the workloads in plain PyTorch, with the parameter names of fedsim's models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """The network of PyTorch's Hogwild example, which outputs log-probabilities (21,840 parameters)."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.drop_channels, self.drop = nn.Dropout2d(dropout), nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.drop_channels(self.conv2(hidden)), 2))
        hidden = self.drop(F.relu(self.fc1(hidden.flatten(1))))
        return F.log_softmax(self.fc2(hidden), dim=1)


def cnn() -> nn.Sequential:
    """The convolutional network of McMahan et al. 2017 (1,663,370 parameters)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def two_nn() -> nn.Sequential:
    """The perceptron of McMahan et al. 2017 (199,210 parameters)."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    )


class ImageNet(nn.Module):
    """The network of pfl's benchmark `image_classification` (1,626,442 parameters).

    Args:
        dropout: dropout probability before the last layer; half of it before the first linear layer.
    """

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Dropout(dropout / 2), nn.Flatten()),
        )
        self.classifier = nn.Sequential(nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.convolutions(images))


class SigmoidRegression(nn.Module):
    """The model LR of FLUTE and FedML: a linear layer whose outputs pass a sigmoid before the cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(28 * 28, 10)

    def forward(self, images: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(images.flatten(1)))


class SmallCNN(nn.Module):
    """The model CNN of BlazeFL's benchmark (62,006 parameters), from PyTorch's tutorial on CIFAR-10."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        )
        self.classifier = nn.Sequential(
            *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.convolutions(images))


class CharacterLSTM(nn.Module):
    """The network of FLUTE's task on Shakespeare's plays (822,570 parameters): logits after each character."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(90, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 90)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.lstm(self.embeddings(characters))[0])


NETWORKS = {"net": Net, "cnn": cnn, "2nn": two_nn}  # by the name of fedsim's model; others by import path
