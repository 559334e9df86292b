"""Mistakes in Python are answered in one line with the remedy."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedsim

UPDATES = torch.arange(12.0).view(6, 2)
DATA = TensorDataset(torch.zeros(4, 2), torch.arange(4))
TABLES = {"rounds": 1, "workers": 2, "model": "logistic", "data": "tests.components:tiny", "engine": "serial"}


@pytest.fixture(scope="module")
def result():
    return fedsim.run(TABLES)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("agregate", 'did you mean "aggregate"?'),
        ("Partition", 'did you mean "partition"'),
        ("list_attacks", 'write fedsim.components("attacks")'),
        ("start_simulation", 'did you mean "run"?'),
        ("load_result", 'did you mean "load_run"?'),
        ("Krum", "in the settings of fedsim.run, write aggregate.rule=krum"),
        ("FedAvg", "in the settings of fedsim.run, write aggregate.rule=weighted_mean "),
        ("Anything", "allowed: Callback, Comparison, "),
    ],
)
def test_a_name_that_fedsim_lacks_leads_to_another(name, hint):
    with pytest.raises(AttributeError) as caught:
        getattr(fedsim, name)
    assert str(caught.value).startswith(f"module 'fedsim' has no attribute '{name}'; {hint}")


def test_tab_completion_shows_the_public_names():
    assert dir(fedsim) == sorted(fedsim.__all__)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *[("to_pandas", "to_dataframe"), ("state_dict", "model"), ("config", "experiment")],
        *((name, "test_accuracy") for name in ("test_acc", "accuracy", "acc")),
    ],
)
def test_an_attribute_that_a_result_lacks_leads_to_another(name, meant, result):
    with pytest.raises(AttributeError, match=f"^'Result' object has no attribute '{name}'; did you mean .*\"{meant}\""):
        getattr(result, name)
    assert not hasattr(result, "_ipython_display_")


def test_records_and_settings_answer_as_well(result):
    with pytest.raises(
        AttributeError, match="^'RoundRecord' object has no attribute .*; did you mean \"test_accuracy\""
    ):
        _ = result.history[0].test_acc
    with pytest.raises(KeyError, match="test_accuracy"):
        result.history[0]["test_acc"]
    with pytest.raises(KeyError, match="history is a list with one record per round, .*; did you mean .*test_accuracy"):
        result.history["accuracy"]
    with pytest.raises(AttributeError, match='did you mean "local.lr" or "server.lr"'):
        _ = result.experiment.lr
    with pytest.raises(AttributeError, match="^'Local' object has no attribute .*; did you mean \"batch_size\""):
        _ = result.experiment.local.batchsize


def test_results_can_be_copied_and_name_the_errors_of_their_properties(result):
    assert pickle.loads(pickle.dumps(result)).test_loss == copy.deepcopy(result).test_loss == result.test_loss

    class Broken(fedsim.Result):
        @property
        def model(self):
            return self.experiment.missing

    with pytest.raises(AttributeError, match="'Experiment' object has no attribute 'missing'"):
        _ = Broken(result.experiment, result.history, None).model


def doubled(updates):
    updates *= 2
    return updates.mean(0)


def undefined(updates):
    return updates.mean(0) * float("nan")


LABELS_OF_9 = np.arange(9) % 3
LABELS = r"labels: must be one label per sample, \[n\], not TensorDataset; for a data set, use fedsim.dataset_split\("
MISTAKES = {
    "constraint": (
        lambda: fedsim.aggregate(UPDATES, "krum", f=2),
        r"krum: needs n >= 2f \+ 3; here f = 2, n = 6; use a smaller f or a larger n \(number of updates\)",
    ),
    "rule in place": (
        lambda: fedsim.aggregate(UPDATES.clone(), doubled),
        "tests.hints.test_python:doubled: changes `updates` in place, .*; compute a new tensor",
    ),
    "rule in place in a run": (
        lambda: fedsim.run(TABLES, aggregate=doubled),
        "tests.hints.test_python:doubled: changes `updates` in place",
    ),
    "NaN": (
        lambda: fedsim.aggregate(UPDATES, undefined),
        "tests.hints.test_python:undefined: returned NaN .*; correct the rule",
    ),
    "NaN in a run": (
        lambda: fedsim.run(TABLES, aggregate=undefined),
        "round 1: tests.hints.test_python:undefined: returned NaN .*; correct the rule",
    ),
    "partition": (lambda: fedsim.partition(DATA, "contiguous", 2), LABELS),
    "label_counts": (lambda: fedsim.label_counts(DATA, [np.arange(4)]), LABELS),
    "a function as callbacks": (
        lambda: fedsim.run(TABLES, callbacks=print),
        "callbacks = .*: must be a list; pass a function as on_round",
    ),
    "no function": (lambda: fedsim.run(TABLES, on_round=5), "on_round = 5: must be a function"),
    "modules": (
        lambda: fedsim.pull_down(nn.Linear(1, 1), nn.Linear(1, 1)),
        r"global_row: must be a tensor \[d\] of parameters, not Linear; to copy .* use target.load_state_dict",
    ),
    "a state_dict": (
        lambda: fedsim.Layout.of(nn.Linear(1, 1).state_dict()),
        r"module: must be a torch.nn.Module, not OrderedDict",
    ),
    "samples as batches": (
        lambda: fedsim.test(nn.Linear(2, 4), DATA),
        r"batches: is a data set without batches; pass torch.utils.data.DataLoader\(data, 32\)",
    ),
    "a tensor as batches": (
        lambda: fedsim.test(nn.Linear(2, 4), UPDATES),
        r"batches: must be a list of \(inputs, targets\) pairs, not a tensor; pass \[\(inputs, targets\)\]",
    ),
    "settings as the folder": (
        lambda: fedsim.run(TABLES, {"seed": 1}),
        r"out = \{seed = 1\}: must be the path of a folder; pass settings as one dict",
    ),
    "several words of the command line": (
        lambda: fedsim.run("rounds=1 model=logistic"),
        "rounds=1 model=logistic: is not a file; pass the settings as a dict",
    ),
    "the number of attackers of a rule": (
        lambda: fedsim.aggregate(UPDATES, "krum", num_byzantine=1),
        r"num_byzantine = 1: unknown key \(the aggregation rule is krum\); write f=1$",
    ),
    **{
        f"the name as {word}": (
            partial(call, **{word: name}),
            f'{word} = "{name}": no such argument; write name="{name}"$',
        )
        for call, word, name in (
            (partial(fedsim.aggregate, UPDATES, f=1), "rule", "krum"),
            (partial(fedsim.aggregate, UPDATES), "aggregator", "median"),
            (partial(fedsim.pre_aggregate, UPDATES, f=1), "rule", "nnm"),
            (partial(fedsim.partition, LABELS_OF_9, n_workers=3, alpha=0.1), "strategy", "dirichlet"),
            (partial(fedsim.attack, UPDATES, n_byzantine=1), "attack", "alie"),
            (partial(fedsim.compress, UPDATES, k=1), "compressor", "top_k"),
            (partial(fedsim.ServerOptimizer, lr=1.0), "optimizer", "adam"),
        )
    },
    "weights in place of the name": (
        lambda: fedsim.aggregate(UPDATES, [1.0] * 6),
        r"name\[0\] = 1.0: must be a name, .*; the arguments of aggregate are updates, name, weights, ",
    ),
    "the number of workers in place of the name": (
        lambda: fedsim.partition(LABELS_OF_9, 3, "dirichlet"),
        "name = 3: must be the name of .*; the arguments of partition are labels, name, n_workers, ",
    ),
    "no number of workers": (lambda: fedsim.partition(LABELS_OF_9, "iid"), "n_workers = None: must be a whole number$"),
    "another word for n_workers": (
        lambda: fedsim.partition(LABELS_OF_9, "iid", num_clients=3),
        r"num_clients = 3: unknown key \(.*\); write n_workers=3$",
    ),
    "another word for n_byzantine": (
        lambda: fedsim.attack(UPDATES, "ipm", f=2),
        "f = 2: no such argument; write n_byzantine=2$",
    ),
    "a parameter of another strategy": (
        lambda: fedsim.partition(LABELS_OF_9, "iid", 3, alpha=0.1),
        r'alpha = 0.1: unknown key \(.*\); write name="dirichlet", alpha=0.1$',
    ),
    "a name of another library": (
        lambda: fedsim.attack(UPDATES, "SignFlipping"),
        'name = "SignFlipping": no such attack; did you mean "sign_flipping"',
    ),
    "another word for a parameter": (
        lambda: fedsim.compress(UPDATES, "top_k", fraction=0.1),
        r'fraction = 0.1: unknown key \(.*\); did you mean "ratio"\?$',
    ),
    "a seed that is not a whole number": (
        lambda: fedsim.partition(LABELS_OF_9, "dirichlet", 3, seed=0.1),
        "seed = 0.1: must be a whole number$",
    ),
    "draws without a seed": (lambda: fedsim.Draws.of(0, "batches", 1), "Draws.of: seed: must be passed by its name$"),
    "draws with the arguments of older versions": (
        lambda: fedsim.Draws.of(0, "batches", 1, seed=0),
        'purpose = 0: must be a text, such as "batches"; pass the seed by its name$',
    ),
    "draws with a misspelled argument": (
        lambda: fedsim.Draws.of("batches", sede=0),
        'of: sede = 0: no such argument; did you mean "seed"\\?$',
    ),
    "a seed without its name": (
        lambda: fedsim.partition(LABELS_OF_9, "iid", 3, 7),
        "partition: argument 4 = 7: must be passed by its name, such as seed=7$",
    ),
    "owners as groups": (
        lambda: fedsim.partition([0, 1], "natural", 2, groups=[0, 1]),
        r'groups = \[0, 1\]: unknown key \(.*\); write ids=\[0,1\], name="natural" for one worker per owner$',
    ),
    "a number as shards": (
        lambda: fedsim.label_counts(LABELS_OF_9, 3),
        "shards = 3: must be a list of index arrays, as fedsim.partition returns$",
    ),
    "a device as the loss": (
        lambda: fedsim.test(nn.Linear(2, 4), [(UPDATES, LABELS_OF_9)], "cuda"),
        r'loss = "cuda": must be a function of \(outputs, targets\)$',
    ),
    "sizes in place of a name": (
        lambda: fedsim.dataset_split(DATA, [0.8, 0.2]),
        r"name = \[0.8, 0.2\]: must be the name of .*; the arguments of dataset_split are dataset, name, ",
    ),
    "a setting": (
        lambda: fedsim.compress(UPDATES, "top_k", rounds=3),
        r"rounds = 3: unknown key \(.*\); rounds is a setting of fedsim.run$",
    ),
    "FedAvg as a rule": (
        lambda: fedsim.aggregate(UPDATES, "fedavg"),
        'name = "fedavg": no such aggregation rule; did you mean "weighted_mean"',
    ),
    "a word of the command line": (
        lambda: fedsim.run("local.lr=0.1"),
        r'local.lr=0.1: is not a file; pass settings as a dict: \{"local.lr": 0.1\}',
    ),
    "several seeds": (
        lambda: fedsim.run(TABLES, seed=[0, 1]),
        r"seed = \[0, 1\]: must be a valid integer; for several values use fedsim compare",
    ),
    "rules": (
        lambda: fedsim.compare(TABLES, rules=["mean", "median"]),
        r'nothing to compare: .* in Python plan=\{"aggregate.rule": \["mean", "median"\]\}',
    ),
    "axes": (
        lambda: fedsim.compare(TABLES, axes={"seed": [0, 1]}),
        r'nothing to compare: .* in Python plan=\{"seed": \[0, 1\]\}',
    ),
    "seeds": (
        lambda: fedsim.compare(TABLES, seeds=[0, 1]),
        r'nothing to compare: .* write seed=0,1, or in Python plan=\{"seed": \[0, 1\]\}',
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_its_remedy(name):
    action, line = MISTAKES[name]
    with pytest.raises(fedsim.FedsimError, match=f"^{line}") as caught:
        action()
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_a_run_is_answered_with_what_it_is(tmp_path):
    comparison = fedsim.compare(TABLES, {"seed": [0, 1]}, tmp_path / "c", jobs=1)
    with pytest.raises(fedsim.RecordError, match="c: is a comparison .see fedsim.load_comparison.; its runs are in"):
        fedsim.load_run(comparison.folder)
    run = next((tmp_path / "c" / "runs").iterdir())
    with pytest.raises(fedsim.RecordError, match=f"; name the folder, {run}$"):
        fedsim.load_run(run / "experiment.toml")


def test_poisoned_data_needs_trained_updates():
    line = "label_flipping: poisons data, not updates; train with"
    with pytest.warns(fedsim.errors.SettingWarning, match=line) as shown:
        assert torch.equal(fedsim.attack(UPDATES, "label_flipping", 1), UPDATES[:1])
    assert shown[0].filename == __file__


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_run_trains_where_gradients_are_off(mode, result):
    with mode():
        assert torch.equal(fedsim.run(TABLES).global_row, result.global_row)


def _in_a_pool(pipe):
    try:
        fedsim.run(TABLES, engine="processes", processes=2)
    except fedsim.WorkerError as error:
        pipe.send(str(error))


def test_a_daemonic_process_is_told_how_to_run_processes():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_in_a_pool, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(60)
    line = ours.recv()
    process.join()
    assert line.startswith("this program runs in a daemonic process, such as a worker of multiprocessing.Pool")
    assert line.endswith("ProcessPoolExecutor instead of the pool, or use engine=serial, which starts no processes")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fedsim.plot("run", metrics="test_loss"),
            'plot: metrics = "test_loss": no such argument; did you mean "metric"?',
        ),
        (
            lambda: fedsim.load_run("run", allow_import=True),
            'load_run: allow_import = true: no such argument; did you mean "allow',
        ),
        (
            lambda: fedsim.load_comparison("run", x=1),
            "load_comparison: x = 1: no such argument; allowed: folder, allow_imports",
        ),
        *(
            (partial(load, nn.Flatten()), "Flatten(start_dim=1, end_dim=-1): must be a path, such as the")
            for load in (fedsim.load_run, fedsim.load_model, fedsim.load_comparison)
        ),
    ],
)
def test_an_unknown_argument_leads_to_another(call, message):
    with pytest.raises(fedsim.ExperimentError) as caught:
        call()
    assert caught.value.lines[0].startswith(message)


def test_plots_of_results_name_their_arguments(result):
    with pytest.raises(fedsim.ExperimentError, match="^plot: metric = .*: no such argument; allowed: out$"):
        result.plot(metric="test_loss")
