from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.config.components import list_components
from fedsim.config.listing import describe_component
from fedsim.core.rows import Layout
from fedsim.models import (
    GPT,
    CharLSTM,
    Net,
    cnn,
    cnn_dropout,
    linear,
    logistic,
    mlp,
    model,
    resnet20,
    resnet32,
    resnet56,
    two_nn,
    two_nn_bn,
)
from fedsim.runs.checks import checked_model
from fedsim.runs.setup import begun


@pytest.mark.parametrize(
    ("factory", "parameters"),
    [
        *[(Net, 21_840), (cnn, 1_663_370), (cnn_dropout, 1_199_882), (two_nn, 199_210)],
        *[(mlp, 199_210), (two_nn_bn, 200_010), (logistic, 7_850)],
        *[(linear, 785), (CharLSTM, 820_522), (resnet20, 269_722), (resnet32, 464_154), (resnet56, 853_018)],
    ],
)
def test_the_published_number_of_parameters(factory, parameters):
    """Of char_lstm: Reddi et al. 2021; of the ResNets: 0.27, 0.46 and 0.85 million in He et al. 2016."""
    assert Layout.of(factory()).d == parameters


def test_gpt_with_the_sizes_of_gpt_2_has_its_number_of_parameters():
    """124 million: 12 layers, 12 heads, width 768, a context of 1,024 and 50,257 tokens."""
    with torch.device("meta"):
        gpt = GPT(layers=12, heads=12, width=768, context=1_024, classes=50_257)
    assert sum(parameter.numel() for parameter in gpt.parameters()) == 124_439_808


def test_char_lstm_has_the_parameters_of_leaf_with_80_characters():
    embedding, first, second, last = 80 * 8, 1_024 * (8 + 256 + 1), 1_024 * (256 + 256 + 1), 80 * (256 + 1)
    assert Layout.of(CharLSTM(vocabulary=80, classes=80)).d == embedding + first + second + last == 817_872


OTHER_INPUTS = {
    **dict.fromkeys(("resnet20", "resnet32", "resnet56"), torch.randn(3, 3, 32, 32)),
    **dict.fromkeys(("char_lstm", "gpt"), torch.arange(15).view(3, 5)),
}
OTHER_OUTPUTS = {"linear": (3, 1), "char_lstm": (3, 5, 90), "gpt": (3, 5, 90)}


@pytest.mark.parametrize("registration", list(model), ids=lambda registration: registration.name)
def test_every_model_maps_its_inputs_to_ten_classes_to_characters_or_to_a_number(registration):
    inputs = OTHER_INPUTS.get(registration.name, torch.randn(3, 1, 28, 28))
    assert registration.bind(registration.check({}))()(inputs).shape == OTHER_OUTPUTS.get(registration.name, (3, 10))


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


def test_cnn_and_mlp_take_any_widths():
    assert cnn(channels=3, size=33, widths=(4, 6, 8), hidden=5)(torch.randn(2, 3, 33, 33)).shape == (2, 10)
    assert mlp(inputs=6, hidden=(), classes=3)(torch.randn(2, 6)).shape == (2, 3)
    with pytest.raises(
        fedsim.ExperimentError, match="^model.widths: 3 convolutions are too many for images of 7 x 7 pix"
    ):
        cnn(size=7, widths=(1, 1, 1))


def test_char_lstm_computes_what_torch_nn_lstm_computes():
    """Outputs and gradients, with the same weights and no second bias."""
    ours = CharLSTM(classes=11, hidden=16).double()
    theirs = nn.LSTM(8, 16, 2, batch_first=True).double()
    own = dict(ours.lstm.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(own[name.replace("bias_ih", "bias")]) if "bias_hh" not in name else parameter.zero_()
    characters = torch.randint(0, 11, (3, 7))
    logits, hidden = ours(characters), theirs(ours.embedding(characters).detach())[0]
    assert torch.equal(logits, ours.head(hidden))
    logits.square().sum().backward()
    ours.head(hidden).square().sum().backward()
    for layer in range(2):
        for name in ("weight_ih", "weight_hh", "bias"):
            expected = getattr(theirs, f"{name.replace('bias', 'bias_ih')}_l{layer}").grad
            assert torch.allclose(own[f"{name}_l{layer}"].grad, expected, atol=1e-12)


def test_char_lstm_returns_the_last_position_for_classification():
    network = CharLSTM(classes=11, hidden=16)
    network.last_only = True
    last = network(torch.arange(10).view(2, 5))
    network.last_only = False
    assert torch.allclose(last, network(torch.arange(10).view(2, 5))[:, -1])


def test_gpt_sees_no_later_token_and_every_earlier_one():
    network = GPT(layers=2, width=16, classes=11, context=6).eval()
    nn.init.normal_(network.positions.weight)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    before = network(tokens)
    tokens[0, 2] = 9
    changed = (network(tokens) != before).any(2)
    assert changed.tolist() == [[False, False, True, True, True]]


def test_gpt_refuses_samples_longer_than_its_context_and_heads_that_do_not_divide_its_width():
    with pytest.raises(fedsim.ExperimentError, match="^model.context = 4: must be at least 5, the length of a sample$"):
        GPT(context=4)(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(fedsim.ExperimentError, match="^model.heads = 3: must divide model.width = 128$"):
        GPT(heads=3)


@pytest.mark.parametrize("name", ["resnet20", "torchvision:resnet18"])
def test_norm_chooses_the_normalisation_layers(name):
    registration = model.get(name)

    def layers(norm, kind):
        network = registration.bind(registration.check({"norm": norm, "classes": 5}))()
        assert network.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 5)
        return [layer for layer in network.modules() if isinstance(layer, kind)]

    normalised = layers("batch", nn.BatchNorm2d)
    groups = layers("group", nn.GroupNorm)
    assert [layer.num_channels for layer in groups] == [layer.num_features for layer in normalised]
    assert {layer.num_channels // layer.num_groups for layer in groups} == {16}
    assert not layers("group", nn.BatchNorm2d)
    assert not layers("none", (nn.BatchNorm2d, nn.GroupNorm))


def test_models_that_fedsim_cannot_use_as_asked_get_one_line():
    squeezenet = model.get("torchvision:squeezenet1_1")
    with pytest.raises(
        fedsim.ExperimentError, match='model.norm = "group": torchvision:squeezenet1_1 has no BatchNorm2d'
    ):
        squeezenet.bind(squeezenet.check({"norm": "group"}))()
    tables = {
        "data": {"name": "tests.real_models:noise", "shape": [3, 32, 32], "classes": 3},
        **{"workers": 2, "rounds": 1, "engine": "serial"},
        "model": {"name": "torchvision:googlenet", "classes": 3, "init_weights": False},
    }
    with pytest.raises(fedsim.ExperimentError, match="returns a GoogLeNetOutputs in training and a Tensor in tests"):
        fedsim.run(tables)


def test_a_model_of_torchvision_that_does_not_exist_gets_a_hint():
    with pytest.raises(fedsim.ExperimentError, match='has no such classification model; did you mean "resnet18"'):
        model.get("torchvision:resnet81")
    with pytest.raises(fedsim.ExperimentError, match="^model.*has no such classification model"):
        model.get("torchvision:fasterrcnn_resnet50_fpn")


def test_a_model_of_torchvision_runs_with_further_arguments_of_its_function():
    tables = {
        "data": {"name": "tests.real_models:noise", "shape": [3, 32, 32], "classes": 3},
        **{"workers": 2, "rounds": 1, "local": {"batch_size": 8}, "engine": "processes", "processes": 2},
    }
    made = {"name": "torchvision:squeezenet1_1", "classes": 3, "dropout": 0.0}
    assert fedsim.run({**tables, "model": made}).history[-1]["test_loss"] > 0
    with pytest.raises(fedsim.ExperimentError, match="cannot be created: TypeError.*unexpected keyword argument"):
        fedsim.run({**tables, "model": {**made, "depth": 3}})


@pytest.mark.slow
def test_a_model_whose_function_reads_values_of_tensors_passes_the_check_of_its_size():
    tables = {"data": {"name": "tests.real_models:noise", "shape": [3, 32, 32]}, "model": "torchvision:regnet_x_400mf"}
    with fedsim.Session() as session, begun(fedsim.Experiment(**tables, workers=2), session) as (task, _):
        checked_model(task)


def test_lists_say_whether_the_engine_batched_stacks_a_model():
    listed = list_components(["models"])
    assert listed.count("engine batched: ") == len(list(model))
    refused = model.get("torchvision:swin_t")
    assert f"engine batched: cannot train stacks of workers: {refused.target.stacked}" in describe_component(
        "torchvision:swin_t"
    )
    assert "engine batched: trains worker stacks with torch.func.vmap" in describe_component("resnet20")
