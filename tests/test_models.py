from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim.core.rows import Layout
from fedsim.models import Net, cnn, logistic, model, two_nn, two_nn_bn


@pytest.mark.parametrize(
    ("factory", "parameters"),
    [(Net, 21_840), (cnn, 1_663_370), (two_nn, 199_210), (two_nn_bn, 200_010), (logistic, 7_850)],
)
def test_the_published_number_of_parameters(factory, parameters):
    assert Layout.of(factory()).d == parameters


@pytest.mark.parametrize("registration", list(model), ids=lambda registration: registration.name)
def test_every_model_maps_images_to_ten_classes(registration):
    assert registration.bind(registration.check({}))()(torch.randn(3, 1, 28, 28)).shape == (3, 10)


def test_net_is_the_hogwild_example():
    """The outputs equal those of the forward pass in PyTorch's Hogwild example."""
    torch.manual_seed(0)
    net = Net().eval()
    x = torch.randn(5, 1, 28, 28)
    hidden = F.relu(F.max_pool2d(F.conv2d(x, net.conv1.weight, net.conv1.bias), 2))
    hidden = F.relu(F.max_pool2d(F.conv2d(hidden, net.conv2.weight, net.conv2.bias), 2)).view(-1, 320)
    hidden = F.relu(F.linear(hidden, net.fc1.weight, net.fc1.bias))
    expected = F.log_softmax(F.linear(hidden, net.fc2.weight, net.fc2.bias), dim=1)
    assert torch.equal(net(x), expected)


def test_cnn_pools_before_the_relu_with_the_same_values_and_gradients():
    torch.manual_seed(0)
    ours = cnn()
    reverse = nn.Sequential(*(ours[i] for i in (0, 2, 1, 3, 5, 4, 6, 7, 8, 9)))
    x = torch.randn(2, 1, 28, 28)
    for network in (ours, reverse):
        network.zero_grad()
        out = network(x)
        out.square().sum().backward()
        gradient = torch.cat([p.grad.flatten().clone() for p in ours.parameters()])
        if network is ours:
            expected = out.detach(), gradient
    assert torch.equal(out, expected[0])
    assert torch.allclose(gradient, expected[1], atol=1e-6)
