from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fedsim
from fedsim.engines import AutoEngine, auto, base
from fedsim.engines.auto import FlopCount
from fedsim.errors import FedsimWarning
from fedsim.models import CharLSTM
from fedsim.runs.setup import begun
from fedsim.training.probe import StackingProbe
from fedsim.training.stacked import StackTrainer
from tests.engines.in_process import InProcessPool
from tests.engines.zoo import experiment
from tests.matrix import needs_bf16_lstm


@pytest.fixture
def tables(tiny_experiment):
    """Return an experiment for one process with one thread, with enough workers for two stacks."""
    return {**tiny_experiment, "workers": 8, "engine": "auto", "processes": 1}


def how_it_was_done(tables, session=None):
    settings = []
    fedsim.run(tables, on_start=settings.append, session=session)
    return settings[0].how


def stacks(tables, **changes):
    return how_it_was_done({**tables, **changes})["engine"] == "batched"


def test_the_choice_and_its_reason_are_in_the_run_folder(tables, tmp_path):
    fedsim.run(tables, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (record["engine"], record["processes"], record["threads"], record["width"]) == ("batched", 1, 1, 4)
    assert record["reason"].startswith("workers are trained in stacks; one process")
    assert fedsim.load_experiment(tmp_path / "run" / "experiment.toml", allow_imports=True).engine == "auto"


def test_small_batches_of_several_rows_are_stacked_and_others_are_not(tables):
    assert stacks(tables)
    assert not stacks(tables, workers=7)
    assert not stacks(tables, local={"batch_size": auto.LARGEST_BATCH + 1})
    assert not stacks(tables, batched={"stack_size": 2})


def test_workers_that_would_wait_for_one_with_many_steps_are_trained_one_by_one(tables):
    few_long = {"name": "quantity", "distribution": "lognormal", "sigma": 2.0}
    assert not stacks(tables, partition=few_long, local={"batch_size": 2})
    assert stacks(tables, partition=few_long, local={"batch_size": 2, "steps": 3})
    assert stacks(tables, partition=few_long, local={"batch_size": 2}, sync="gradients")


@pytest.mark.parametrize("cohort", [10, 16])
def test_the_share_of_steps_is_about_that_of_drawn_cohorts(prepared, cohort):
    batches, generator = {"local": {"batch_size": 1}}, np.random.default_rng(0)
    task, shared = prepared("einsum", workers=16, cohort=cohort, partition="quantity", **batches)
    sizes = [shared.data.shards.size(worker) for worker in range(16)]
    drawn = sizes if cohort == 16 else generator.choice(sizes, (20_000, cohort))
    longest = np.max(drawn, axis=-1).mean()
    expected = 2 * np.mean(sizes) / (longest + np.median(sizes))
    assert auto.share_of_steps(task, shared) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("model", "batch_size", "stacked"),
    [
        ("logistic", 10, True),
        ("2nn", 10, True),
        ("2nn", 64, True),
        ("net", 10, True),
        ("net", 64, False),
        ("cnn", 10, True),
        ("cnn", 32, True),
        ("cnn", 64, False),
    ],
)
def test_the_choice_for_the_models_here_is_what_was_measured_to_be_faster(model, batch_size, stacked):
    """Ten rows in one process, as in benchmarks/results/plans-cpu.json."""
    local = {"batch_size": batch_size, "steps": 1}
    wanted = fedsim.Experiment(
        model=model, workers=10, rounds=1, local=local, data="tests.components:tiny", engine="serial"
    )
    with fedsim.Session() as session, begun(wanted, session) as (task, engine):
        assert AutoEngine(1, 1, 60.0, "spawn").choose(task, engine.shared).stacked == stacked


@pytest.mark.parametrize(("sync", "share"), [("parameters", 1.3), ("gradients", 0)])
def test_activations_may_be_larger_where_a_stack_writes_no_gradients_of_linear_layers(
    sync, share, prepared, monkeypatch
):
    task, shared = prepared("convolution", workers=4, sync=sync, local={"batch_size": 4})
    shared = replace(shared, cohort=replace(shared.cohort, size=8))
    matrices = [layer.weight for layer in task.new_module().modules() if isinstance(layer, torch.nn.Linear)]
    values = sum(matrix.numel() for matrix in matrices)
    assert 0 < values < len(shared.server.row) - 50  # the other parameters are biases and kernels of convolutions
    assert StackingProbe.of(task, shared).matrix_bytes == 8 * values
    fitting = int(7.5e5 + share * 8 * values) // 4  # bytes per sample, in batches of 4
    for sample_bytes in (fitting, fitting + 1):
        probe = StackingProbe((), coupled=False, merged=True, sample_bytes=sample_bytes, matrix_bytes=8 * values)
        monkeypatch.setattr(StackingProbe, "of", lambda *_, probe=probe: probe)
        assert AutoEngine(1, 1, 60.0, "spawn").choose(task, shared).stacked == (sample_bytes == fitting)


@pytest.mark.parametrize(
    ("kind", "precision", "values"),
    [
        ("LSTM", "float64", 3 * 8),  # the last layer; not the embedding [20, 8] and the weights of the LSTM
        pytest.param("LSTM", "bf16", 0, marks=needs_bf16_lstm),
        ("tied", "float64", 3 * 20),  # not the matrix that is both an embedding and a linear layer
        ("buffers", "float64", 0),  # by torch.func.vmap, which computes all gradients
    ],
)
def test_only_gradients_that_a_stack_leaves_count_as_spared(kind, precision, values):
    wanted = fedsim.Experiment(**{**experiment(kind), "precision": precision, "engine": "batched", "processes": 1})
    with fedsim.Session() as session, begun(wanted, session) as (task, engine):
        assert StackingProbe.of(task, engine.shared).matrix_bytes == values * task.dtype.itemsize


class OneCalledSeveral(InProcessPool):
    def __init__(self, count, *settings):
        super().__init__(count, *settings)
        self.count = count


def test_a_long_run_is_done_by_processes_and_a_short_one_is_not(tables, monkeypatch):
    monkeypatch.setattr(base, "ProcessPool", OneCalledSeveral)
    assert how_it_was_done({**tables, "processes": 2})["processes"] == 1
    monkeypatch.setattr(auto, "STEP_SECONDS", 10.0)
    how = how_it_was_done({**tables, "workers": 7, "processes": 2})
    assert (how["engine"], how["processes"], how["start_method"]) == ("processes", 2, "fork")
    how = how_it_was_done({**tables, "processes": 2})
    assert (how["engine"], how["processes"], how["width"]) == ("batched", 2, 4)


@pytest.mark.parametrize(("workers", "stacks"), [(8, 2), (15, 2), (16, 4), (31, 4), (32, 8), (100, 8), (300, 10)])
def test_processes_help_only_as_far_as_there_are_stacks_for_them(workers, stacks, prepared, monkeypatch):
    spec, shared = prepared("convolution", workers=4)
    shared = replace(shared, cohort=replace(shared.cohort, size=workers))
    asked = []
    monkeypatch.setattr(auto, "seconds_saved", lambda task, shared, processes, stacked: asked.append(processes) or 0)
    for cores in (2, 64):
        AutoEngine(cores, 1, 60.0, "spawn").choose(spec, shared)
    assert asked == [2, stacks]


@pytest.mark.parametrize(
    ("workers", "saves"),
    [(8, 0.0), *((workers, 1e9) for workers in (4, 8, 17))],
    ids=["a short run of 8", *(f"a long run of {workers}" for workers in (4, 8, 17))],
)
def test_cores_and_processes_decide_where_workers_are_trained_but_change_no_bit(workers, saves, tables, monkeypatch):
    """Whatever `auto` chooses. The shards have different sizes, so the workers finish after different steps."""
    del tables["processes"]
    monkeypatch.setattr(auto, "seconds_saved", lambda *_, **__: saves)
    tables = {**tables, "workers": workers, "partition": {"name": "dirichlet", "alpha": 0.5}, "precision": "float32"}
    results, ways = [], []
    for cores, changes in ((1, {}), (2, {}), (3, {}), (1, {"processes": 2}), (3, {"processes": 1})):
        monkeypatch.setattr("fedsim.system.devices.usable_cores", lambda cores=cores: cores)
        results.append(fedsim.run({**tables, **changes}, on_start=lambda metadata: ways.append(metadata.how)))
    assert len({how["processes"] for how in ways}) == (3 if saves else 1)
    assert len({how.get("width") for how in ways}) == 1
    for result in results[1:]:
        assert torch.equal(result.global_row, results[0].global_row)
        assert [record.test_loss for record in result.history] == [record.test_loss for record in results[0].history]


def test_tensors_are_shared_before_processes_are_forked_which_would_keep_the_memory_they_leave(prepared, monkeypatch):
    spec, shared = prepared("convolution", workers=5)
    monkeypatch.setattr(auto, "seconds_saved", lambda *_, **__: 1e9)
    are_shared = []

    def new_pool(processes, *arguments):
        tensors = shared.data.train.inputs, shared.cohort.rows, shared.cohort.rows._base
        are_shared.append([tensor.is_shared() for tensor in tensors])
        return InProcessPool(processes)

    monkeypatch.setattr(base, "ProcessPool", new_pool)
    AutoEngine(2, 1, 60.0, "fork").begin(spec, shared)
    assert are_shared == [[True, True, True]]


def test_a_model_that_cannot_be_stacked_runs_all_the_same_and_the_reason_is_noted(tables):
    tables = {**tables, "model": "tests.models:Stateful"}
    result_of = [fedsim.run({**tables, "engine": name}) for name in ("serial", "auto")]
    assert torch.equal(result_of[0].global_row, result_of[1].global_row)
    how = how_it_was_done(tables)
    assert how["engine"] == "serial"
    assert "the model cannot be trained in stacks of workers: a forward pass changes attributes" in how["reason"]


FAILED = fedsim.WorkerError("process 1 failed: RuntimeError: CUDA error: invalid device context\nTraceback")
FULL = torch.OutOfMemoryError("cuda:0 has no memory left")


def fail_with(error):
    def fail(self, *_, **__):
        raise error

    return fail


@pytest.fixture
def in_this_process(monkeypatch):
    """Let processes always appear worthwhile, and execute their calls in this process."""
    monkeypatch.setattr(auto, "STEP_SECONDS", 10.0)
    monkeypatch.setattr(base, "ProcessPool", InProcessPool)


def test_if_processes_fail_one_process_trains_the_same_stacks_and_one_line_says_so(
    tables, in_this_process, monkeypatch
):
    monkeypatch.setattr(base.Engine, "_begin_in_pool", fail_with(FAILED))
    settings = []
    with pytest.warns(FedsimWarning) as told:
        result = fedsim.run({**tables, "processes": 2}, on_start=settings.append)
    (line,) = (str(warning.message) for warning in told)
    assert line == f"one process trains all workers: {str(FAILED).splitlines()[0]}"
    assert (settings[0].how["engine"], settings[0].how["processes"]) == ("batched", 1)
    assert torch.equal(result.global_row, fedsim.run({**tables, "engine": "batched"}).global_row)


@pytest.mark.parametrize("processes", [1, 2])
def test_stacks_that_do_not_fit_into_memory_are_an_error_because_single_workers_round_differently(
    processes, tables, in_this_process, monkeypatch
):
    monkeypatch.setattr(StackTrainer, "__init__", fail_with(FULL))
    with pytest.raises(fedsim.ExperimentError, match=r"reduce one of: .*local\.batch_size"):
        fedsim.run({**tables, "processes": processes})


def test_too_little_main_memory_for_stacks_is_an_error_that_names_the_settings(tables, monkeypatch):
    monkeypatch.setattr("fedsim.system.devices.free_memory", lambda: 6e5)
    with pytest.raises(
        fedsim.ExperimentError,
        match=r"^memory: training 4 workers at once \(batched.stack_size = 4, processes = 1\) takes .* only 600 kB",
    ):
        fedsim.run(tables)


def test_what_fails_in_every_way_ends_the_run_as_it_does_with_one_process(tables, monkeypatch):
    monkeypatch.setattr(base.Engine, "begin", fail_with(FULL))
    with pytest.raises(fedsim.ExperimentError, match="^device = "):
        fedsim.run(tables)


def test_runs_that_differ_in_nothing_that_a_plan_depends_on_share_it(tables, monkeypatch):
    tried, of = [], StackingProbe.of
    monkeypatch.setattr(StackingProbe, "of", lambda task, shared: tried.append(task) or of(task, shared))
    with fedsim.Session() as session:
        for change in ({}, {"seed": 1}, {"aggregate": "median"}, {"server": {"name": "momentum"}}):
            how_it_was_done({**tables, **change}, session)
        assert len(tried) == 1
        sized = "tests.models:sized"  # distinguished by its content, not by its memory address
        changes = {"rounds": 3}, {"workers": 9}, {"local": {"batch_size": 8}}, {"batched": {"stack_size": 5}}
        changes = (*changes, {"model": {"name": sized, "hidden": [8, 8]}}, {"model": {"name": sized, "hidden": [9, 9]}})
        for count, change in enumerate(changes, start=2):
            for _ in range(2):
                how_it_was_done({**tables, **change}, session)
                assert len(tried) == count, change


@pytest.fixture
def task(prepared):
    return prepared("convolution", rounds=10, workers=5, local={"batch_size": 4})


def test_the_estimate_is_the_sum_of_its_parts(task, monkeypatch):
    spec, shared = task
    monkeypatch.setattr(auto, "flops_of_a_sample", lambda *_: 2e6)
    steps, samples = 1 + 2 + 2 + 5 + 5, 51  # for shards of 1, 5, 8, 17 and 20 samples
    moved = steps * 6 * len(shared.server.row) * 8 / auto.BYTES_PER_SECOND
    arithmetic = (samples + len(shared.data.test) / 3) * 2e6 * 2 / auto.FLOPS_PER_SECOND  # float64 takes twice as long
    seconds = steps * auto.STEP_SECONDS + moved + arithmetic
    for stacked, speedup in ((False, 1), (True, auto.STACKED_SPEEDUP)):
        saved = auto.seconds_saved(spec, shared, 4, stacked=stacked)
        assert saved == pytest.approx(10 * (seconds / speedup * 3 / 4 - auto.BARRIER_SECONDS))
    assert auto.seconds_saved(spec, shared, 8, stacked=False) > auto.seconds_saved(spec, shared, 2, stacked=False)


def test_on_a_gpu_one_process_trains_whatever_it_costs(task, monkeypatch):
    spec, shared = task
    monkeypatch.setattr(auto, "STEP_SECONDS", 10.0)
    monkeypatch.setattr(auto, "probe_if_stacks_pay", lambda *_: (None, "it has state"))
    assert AutoEngine(4, 1, 60.0, "spawn").choose(spec, shared).processes == 4
    assert AutoEngine(1, 1, 60.0, "spawn").choose(spec, shared).processes == 1
    plan = AutoEngine(4, 1, 60.0, "spawn").choose(replace(spec, device=torch.device("cuda", 0)), shared)
    assert (plan.processes, plan.stacked) == (1, False)
    assert "cuda:0" in plan.reason


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)), (3, 2, 4, 4)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 5, 8)),
    ],
    ids=["convolution", "attention"],
)
def test_operations_are_counted_as_pytorch_counts_them(module, inputs):
    totals = []
    for counter in (FlopCount(), FlopCounterMode(display=False)):
        with counter:
            module(torch.randn(inputs)).square().sum().backward()
        totals.append(counter.total if isinstance(counter, FlopCount) else counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_operations_of_an_lstm_are_counted_in_float32_as_in_float64():
    """oneDNN computes a layer in one operation, and otherwise each step is a product of matrices."""
    totals = []
    for dtype in (torch.float32, torch.float64):
        network = CharLSTM(classes=11, hidden=16).to(dtype)
        with FlopCount() as counter:
            network(torch.zeros(3, 7, dtype=torch.long)).sum().backward()
        totals.append(counter.total)
    assert totals[0] == pytest.approx(totals[1], rel=0.1)
