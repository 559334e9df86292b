"""Checks before the first round that model, data, rule and machine fit each other.

Each check raises ExperimentError with the setting to change.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedsim.clients import FeatureLoss
from fedsim.clients.schedule import Varying
from fedsim.config.experiment import Experiment
from fedsim.config.from_data import mismatches
from fedsim.config.schema import Server
from fedsim.core.learning_task import Binary, Classification, correct_of, described, predicts_classes, predicts_numbers
from fedsim.core.model_inputs import Inputs, leaves, on_each, on_image, outputs_of, shapes_of
from fedsim.core.randomness import Draws, preserve_random_state, torch_generator
from fedsim.core.recorded_features import recorded_features
from fedsim.core.registry import Imported
from fedsim.core.rows import Layout
from fedsim.core.training import check_outputs
from fedsim.data import Shards, TensorData
from fedsim.data.shapes import SampleShape, whole_classes
from fedsim.data.tensors import compact
from fedsim.engines import Engine, RunTask
from fedsim.errors import DataError, ExperimentError, FedsimError, SettingWarning, called, one_line, show, show_bytes
from fedsim.runs.memory import memory_needed
from fedsim.system.devices import free_memory
from fedsim.training.operations import reason_of
from fedsim.training.probe import Trials

PROBE_SAMPLES = 8
COPIES_OF_MODEL = 3  # minimum: the global parameters, one worker's parameters, and the module


@contextlib.contextmanager
def _errors_of_user_code(line_of: Callable[[str], str]) -> Iterator[None]:
    """Return a context manager that turns exceptions in user code into ExperimentErrors.

    `line_of` receives the message of an exception, and returns the message of the ExperimentError.
    """
    try:
        yield
    except (FedsimError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ExperimentError(line_of(one_line(error))) from error


def checked_model(task: RunTask) -> nn.Module:
    """Return a new model of the run. Raise ExperimentError if the model cannot be used.

    For example, it cannot be built, has no parameters, or does not fit into memory.
    """
    place = task.experiment.model.setting
    with _errors_of_user_code(lambda reason: f"{place}: the model cannot be created: {reason}"):
        _check_parameters(place, task)
        layout = Layout.of(module := task.new_module())
    if not layout.d:
        raise ExperimentError(f"{place}: the model has no trainable parameters; use another model")
    if task.experiment.buffers == "error" and layout.buffers:
        names = ", ".join(entry.name for entry in layout.buffers)
        raise ExperimentError(
            f'buffers = "error": {place} has buffers ({names}); set buffers to average, local or frozen'
        )
    return module


def check_privacy(task: RunTask, layout: Layout) -> None:
    """Raise ExperimentError if the model sends unprotected buffers, or if epsilon cannot be computed."""
    experiment, buffers = task.experiment, layout.buffers
    if experiment.privacy.component.active and buffers and experiment.buffers != "frozen":
        raise ExperimentError(
            f"buffers = {show(experiment.buffers)}: workers would send buffers ({buffers[0].name}, ...) without noise, "
            f"because {experiment.privacy.setting} protects only updates; use a model without "
            "buffers, such as a ResNet with model.norm=group"
        )
    if (releases := experiment.releases(holders=1)) is not None:  # the data, and so the holders, are not known yet
        releases.epsilon(experiment.rounds, experiment.privacy.delta, experiment.privacy.accountant)


def check_sample_gradients(task: RunTask, train: TensorData) -> None:
    """Raise ExperimentError if the client algorithm needs per-sample gradients, but the model cannot compute them."""
    if task.algorithm.sample_noise is None:
        return
    place = (
        f"{task.experiment.model.setting}: has no gradient for each sample, which {task.experiment.local.setting} needs"
    )
    trials = Trials(task, train.to(task.device, task.dtype))
    with preserve_random_state(task.device):
        try:
            together = trials.run(trials.samples(trials.count))
            coupled, joint = trials.is_coupled(together), trials.has_joint_loss(together)
            trials.compare_gradients(together.dropouts, merged=False)
        except ExperimentError as error:
            raise ExperimentError(f"{place}: {reason_of(error)}; use another model") from error
    if joint:
        raise ExperimentError(
            f"{task.experiment.task.setting}: the loss returns one number for a batch, but "
            f'{task.experiment.local.setting} needs the loss of each sample; use reduction="none"'
        )
    if coupled:
        raise ExperimentError(
            f"{place}: the output for a sample depends on the other samples of its batch, as with BatchNorm; use "
            "another model, for example with GroupNorm"
        )


def check_client_algorithm(task: RunTask, layout: Layout) -> None:
    """Raise ExperimentError if the client algorithm cannot be combined with another setting."""
    experiment = task.experiment
    algorithm, sampling = experiment.local.setting, experiment.sampling.component
    if "losses" in sampling.accepts and not task.algorithm.shares_model:
        raise ExperimentError(
            f"{sampling.place}: needs losses of the global model, but with {algorithm} workers use different global "
            "models; use another strategy"
        )
    if not task.algorithm.shares_model and _stops_by_global_model(experiment):
        score = "accuracy" if correct_of(experiment.task.component) else "loss"
        personal = f"worker_{score} and data.local_test_fraction=0.2"
        raise ExperimentError(
            f"stop.metric = {show(experiment.stop.metric)}: is a test result of the global model, but with {algorithm} "
            "workers use different global models; use "
            f"stop.metric={personal if task.experiment.in_rounds else 'train_loss'}"
        )
    if task.algorithm.clusters > 1:
        _check_clusters(task, layout)
    if task.algorithm.personal_columns.width == layout.d:
        aggregated = {
            "processors": experiment.processors,
            "downlink": experiment.downlink,
            "attack": task.byzantine,
            "server": experiment.server != Server(),
            "aggregate.rule": not task.experiment.rule.linear_by_weights,
        }
        for key, value in aggregated.items():
            if value:
                raise ExperimentError(f"{key}: workers send no parameters with {algorithm}; omit this setting")


def _check_clusters(task: RunTask, layout: Layout) -> None:
    """Raise ExperimentError if a setting needs a single global model, or if all global models would start equal."""
    experiment, algorithm = task.experiment, task.experiment.local.setting
    attack, rule = experiment.attack.component, experiment.rule
    chain_state = any(task.chain_states(experiment.chain, torch.zeros(layout.d, device="meta")))
    needs_one = {
        experiment.policy.setting: not experiment.in_rounds,
        experiment.privacy.setting: experiment.privacy.component.active,
        experiment.server.setting: experiment.server.component.start(torch.zeros(1)),
        f"aggregate.rule = {show(rule.name)}": any(map(rule.accepts, ("state", "last", "root"))),
        'aggregate.weights = "inverse_probability"': experiment.weight_total is not None,
        "aggregate.secure = true": experiment.aggregate.secure,
        experiment.attack.setting: task.byzantine and {"state", "last"} & attack.accepts.keys(),
        "processors with error feedback": chain_state,
        "downlink": experiment.downlink,
        "records.updates": experiment.records.updates,
        f"model.lora.rank = {experiment.model.lora.rank}": experiment.model.lora.rank,
    }
    for setting, is_set in needs_one.items():
        if is_set:
            raise ExperimentError(
                f"{setting}: needs a single global model, but {algorithm} has {task.algorithm.clusters}; change one of "
                "the two, or use local.k=1"
            )
    try:
        rule.dry_run(1, experiment.local_lr)
    except ExperimentError as error:
        raise ExperimentError(
            f"aggregate.rule = {show(rule.name)}: cannot aggregate a single update, but a model of {algorithm} may be "
            "selected by one worker; use a rule such as weighted_mean or median"
        ) from error
    first, second = (layout.read(task.new_module(cluster)) for cluster in (0, 1))
    if torch.equal(first, second):
        raise ExperimentError(
            f"{experiment.model.setting}: always starts at the same parameters, but the models of {algorithm} must "
            "start at different ones; use a model with random initial parameters, such as 2nn, and no model.weights"
        )


def _stops_by_global_model(experiment: Experiment) -> bool:
    """Whether early stopping (`stop.*`) depends on a test of the global model."""
    name = experiment.stop.metric.removeprefix("metrics.")
    of_tests = {metric.component.label for metric in experiment.metrics}
    by_global = name.startswith(("test_", "validation_", "global_worker_")) or name in of_tests
    return experiment.stop.active and by_global


class _WithoutNormalNumbers(TorchFunctionMode):
    """Context manager in which functions such as `torch.nn.init.normal_` do not change their tensor.

    On the device "meta", drawing normal numbers imports `torch._dynamo`, which takes longer than importing PyTorch.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "").endswith("normal_"):
            return (*args, *kwargs.values())[0]
        return function(*args, **kwargs)


def _check_parameters(place: str, task: RunTask) -> None:
    """Raise ExperimentError if the copies of the model that a run needs do not fit into memory.

    Args:
        place: name of the model setting, for the error message.
        task: description of the run.
    """
    if isinstance(task.experiment.model.component, Imported):
        return
    try:
        with preserve_random_state(torch.device("cpu")), torch.device("meta"), _WithoutNormalNumbers():
            count = sum(parameter.numel() for parameter in task.experiment.model.component().parameters())
    except NotImplementedError:  # a factory that reads the values of tensors, as those of RegNets do
        return
    needed, free = COPIES_OF_MODEL * count * task.dtype.itemsize, free_memory()
    if needed > free:
        raise ExperimentError(
            f"{place}: the model has {count:,} parameters; {COPIES_OF_MODEL} copies need {needed / 1e9:,.1f} GB, but "
            f"only {free / 1e9:,.1f} GB of memory are free; use a smaller model"
        )


def check_memory(engine: type[Engine], task: RunTask, processes: int, *, recorded: bool) -> None:
    """Raise ExperimentError if a run on CPUs does not fit into main memory.

    Args:
        engine: class of the engine.
        task: description of the run.
        processes: number of processes.
        recorded: whether the run writes records.
    """
    experiment = task.experiment
    if task.device.type != "cpu" or engine.traits.ranks:
        return
    layout = Layout.of(task.new_module())
    may_replace = not engine.traits.chooses and engine.traits.may_lose_processes(processes)
    copies = int(may_replace and experiment.max_restarts > 0)
    copies += 3 if recorded and experiment.checkpoint.every != 0 else 0  # a snapshot, its bytes, and the file
    copies = experiment.repetitions * (copies + (experiment.repetitions > 1))
    most = 1 if engine.traits.chooses else processes  # the engine `auto` may choose one process
    stacked = engine.traits.stacks and not engine.traits.chooses
    parts = memory_needed(task, layout, most, stacked=stacked, copies=copies)
    needed, free = sum(parts.values()), free_memory()
    if needed > free:
        listed = ", ".join(f"{purpose} {show_bytes(nbytes)}" for purpose, nbytes in parts.items())
        fewer = ", fewer processes" if processes > 1 else ""
        fewer += ", a smaller race.runs" if experiment.repetitions > 1 else ""
        raise ExperimentError(
            f"cohort = {experiment.cohort_size}: with a model of {layout.d:,} parameters this run needs about "
            f"{show_bytes(needed)} of memory ({listed}), but only {show_bytes(free)} are free; use a smaller "
            f"cohort{fewer} or a smaller model{task.remedy_for_updates}"
        )


def with_numbers(task: RunTask, *data: TensorData) -> list[TensorData]:
    """Return the data sets of a run, with targets of the type that the task needs.

    Integers become floating-point numbers if the task predicts numbers. Whole floating-point numbers become labels if
    the task is classification or binary.
    """
    if isinstance(task.learning_task, (Binary, Classification)) and all(whole_classes(part.targets) for part in data):
        note = f"targets such as {data[0].targets[0]:.1f} are class labels, because the task needs labels"
        return [replace(part, targets=part.targets.long(), assumed=(*part.assumed, note)) for part in data]
    if all(part.targets.is_floating_point() for part in data):
        return [*data]
    inputs, targets = data[0].to(task.device, task.dtype).gather(torch.arange(min(PROBE_SAMPLES, len(data[0]))))

    def outputs() -> object:
        with contextlib.suppress(Exception), torch.no_grad():  # a later check reports a model that fails
            return outputs_of(task.new_module().eval(), inputs)
        return None

    if not predicts_numbers(task.learning_task, outputs, targets):
        return [*data]
    return [replace(part, targets=part.targets.to(task.dtype)) for part in data]


def check_outputs_of_model(task: RunTask, train: TensorData, test: TensorData, dataset: str) -> None:
    """Raise ExperimentError if the model cannot be trained on the data set.

    The model is tried on a few samples.

    Args:
        task: description of the run.
        train, test: training and test samples.
        dataset: name of the data set, for error messages.
    """
    experiment, place = task.experiment, task.experiment.model.setting
    inputs, targets = train.to(task.device, task.dtype).gather(torch.arange(min(PROBE_SAMPLES, len(train))))
    shape, classes = shapes_of(inputs), max(train.classes, test.classes)
    _check_augmentations(experiment, inputs, train)
    known, own = SampleShape.of(train), experiment.model.registration.imported
    known = replace(known, classes=classes, tokens=max(known.tokens, SampleShape.of(test).tokens))
    tokens = () if train.dtype.is_floating_point else (*leaves(train.inputs), *leaves(test.inputs))
    integers = [compact(tensor).cpu().numpy() for tensor in tokens]
    if not own and (least := min((int(values.min()) for values in integers), default=0)) < 0:
        raise DataError(
            f"data.name = {show(dataset)}: integer inputs are treated as tokens, which must be at least 0, but the "
            f"data contains {least}; convert measured numbers to floating point, such as inputs.astype('float32')"
        )
    data = experiment.data.model_copy(update={"name": dataset})
    wrong = mismatches(experiment.model, data, known, experiment.task.component)
    if wrong and not (train.dtype.is_floating_point or own):
        raise ExperimentError(*wrong)  # a GPU cannot be used any more after a token that is out of range
    check_targets = getattr(experiment.task.component, "check_targets", None)
    try:
        if check_targets:
            check_targets(targets)
            _check_labels(train, test)
        with _errors_of_user_code(lambda reason: f"does not work on inputs of shape {shape}: {reason}{_remedy(known)}"):
            outputs = check_outputs(task.new_module(), inputs, targets, experiment.task.component, classes=classes)
            _check_outputs_in_training(task, inputs, outputs)
    except DataError as error:
        raise DataError(f"data.name = {show(dataset)}: {error}") from error
    except ExperimentError as error:
        line = f"{place}: {error}"
        raise ExperimentError(*(["; ".join([line, *wrong])] if own else wrong or [line])) from error
    _warn_of_classes(task, train, test, outputs, dataset)
    attack, attacked = experiment.attack.component, experiment.attack.count(experiment.workers) > 0
    if attacked and not train.has_labels and (attack.goal is not None or "classes" in attack.poison_accepts):
        raise ExperimentError(
            f"attack.name = {show(attack.name)}: needs one class label per sample, but the targets are "
            f"{described(train.targets)}; use an attack on updates, such as sign_flipping"
        )
    _check_features(task, inputs)
    for table in experiment.metrics:
        table.component(outputs, targets)
    if task.precision.autocast is not None:
        _check_autocast(task, inputs, targets)


def _check_augmentations(experiment: Experiment, inputs: Inputs, train: TensorData) -> None:
    """Raise ExperimentError if an augmentation fails on `inputs`, a few training samples [k, ...]."""
    device = leaves(inputs)[0].device
    arguments = {"draws": Draws.of("check", seed=0, device=device), "generator": torch_generator(0, "check")}
    for table in experiment.data.augment:
        place = f"data.augment = {show(table.name)}:"
        start = f"{place} does not work on inputs of shape {shapes_of(inputs)}: "
        with _errors_of_user_code(start.__add__):
            if "normalisation" in table.component.takes:
                arguments["normalisation"] = train.normalisation
            inputs = on_image(table.component.__call__, on_each(Tensor.clone, inputs), place, arguments)


def _check_labels(train: TensorData, test: TensorData) -> None:
    """Raise DataError if a class label is negative."""
    for name, data in (("training", train), ("test", test)):
        if data.has_integers and not data.has_labels:
            raise DataError(
                f"the {name} set contains the label {int(data.targets.min())}; class labels must be at least 0; "
                "renumber them from 0, or set task=regression for numbers"
            )


def _warn_of_classes(task: RunTask, train: TensorData, test: TensorData, outputs: Tensor, dataset: str) -> None:
    """Warn of outputs whose class has no samples, and of classes without training samples.

    Tokens are not checked, because a text may contain only a part of its vocabulary.
    """
    if not _has_classes(task.experiment, train):
        return
    trained, tested = (data.sample_targets.cpu().numpy() for data in (train, test))
    if (label := trained[0]) == trained.max() == trained.min():
        line = f"data.name = {show(dataset)}: all training samples have the label {label}, so no class can be learned"
        warnings.warn(line, SettingWarning, stacklevel=2)
    if outputs.ndim != 2 or outputs.shape[1] == 1:
        return
    unused = np.setdiff1d(np.arange(outputs.shape[1]), np.union1d(trained, tested))
    if len(unused):
        warnings.warn(
            f"{task.experiment.model.setting}: {len(unused)} of the model's {outputs.shape[1]} outputs, such as number "
            f"{unused[0]}, belong to classes without samples; if this is not intended, use a model with fewer outputs, "
            "renumber the classes, or set task=regression if the targets are measured numbers",
            SettingWarning,
            stacklevel=2,
        )
    _warn_if_untrained(f"data.name = {show(dataset)}", "the test set", trained, tested)


def warn_of_held_out_classes(
    experiment: Experiment, train: TensorData, validation: TensorData, shards: Shards, worker_tests: Shards | None
) -> None:
    """Warn if all samples of a class are held out for validation or for local tests.

    Args:
        experiment: experiment to run.
        train: training samples, without those that are held out for validation.
        validation: samples that are held out for validation.
        shards: training samples of each worker.
        worker_tests: local test samples of each worker, or None. Sets that are drawn on demand are not checked.
    """
    if not _has_classes(experiment, train):
        return
    labels = train.sample_targets.cpu().numpy()
    setting = f"data.validation_fraction = {experiment.data.validation_fraction}"
    _warn_if_untrained(setting, "the validation set", labels, validation.sample_targets.cpu().numpy())
    if worker_tests is not None and worker_tests.listed:
        trained, tested = (
            labels[np.concatenate([part.of(worker).numpy() for worker in range(len(part))])]
            for part in (shards, worker_tests)
        )
        setting = f"data.local_test_fraction = {experiment.data.local_test_fraction}"
        _warn_if_untrained(setting, "the local test sets", trained, tested)


def _has_classes(experiment: Experiment, train: TensorData) -> bool:
    """Whether the targets are class labels, and the inputs are not tokens."""
    return train.has_labels and train.dtype.is_floating_point and predicts_classes(experiment.task.component)


def _warn_if_untrained(setting: str, test_set: str, trained: np.ndarray, tested: np.ndarray) -> None:
    """Warn if a label in `tested` does not occur in `trained`. `setting` and `test_set` are texts for the warning."""
    if len(untrained := np.setdiff1d(tested, trained)):
        warnings.warn(
            f"{setting}: class {untrained[0]} occurs in {test_set}, but not in the training samples",
            SettingWarning,
            stacklevel=2,
        )


def _remedy(known: SampleShape) -> str:
    """Return the end of the error for a model that fails on a data set: what to change. Empty if nothing is known.

    `known`: shape of the data set's samples. There is an advice for images and for integers.
    """
    if not known.tokens:
        return "; use another model, or images of another size" if len(known.inputs) == 3 else ""
    return (
        f"; the inputs are integers from 0 to {known.tokens - 1}: convert measured numbers to floating point; for "
        f"tokens, use a model for {known.tokens} tokens, such as model.classes={known.tokens}"
    )


def _check_outputs_in_training(task: RunTask, inputs: Inputs, outputs: object) -> None:
    """Raise ExperimentError if the model returns different types in training and in tests, as GoogLeNet does."""
    try:
        with torch.no_grad(), preserve_random_state(task.device):
            in_training = outputs_of(task.new_module().train(), inputs)
    except Exception:  # later checks name the batch that the model cannot be trained on
        return
    if type(in_training) is not type(outputs):
        raise ExperimentError(
            f"the model returns a {type(in_training).__name__} in training and a {type(outputs).__name__} in tests; "
            "it must return the same type in both"
        )


def _check_features(task: RunTask, inputs: Inputs) -> None:
    """Raise ExperimentError if the client algorithm needs hidden features that the model does not have."""
    if not isinstance(task.algorithm, FeatureLoss):
        return
    module = task.new_module().eval()
    with torch.no_grad(), recorded_features(module) as recorded:
        outputs_of(module, inputs)
    features = recorded.of(len(leaves(inputs)[0]))
    if isinstance(inputs, Tensor) and torch.equal(features, inputs.flatten(1)):
        experiment = task.experiment
        raise ExperimentError(
            f"{experiment.model.setting}: has no hidden layer, but {experiment.local.setting} compares hidden "
            "features; use another model or local.algorithm"
        )


def _check_autocast(task: RunTask, inputs: Inputs, targets: Tensor) -> None:
    """Raise ExperimentError if the model cannot be computed in the reduced precision of the experiment."""
    experiment = task.experiment
    place, name = f"precision = {show(experiment.precision)}", show(experiment.model.name)
    line = f"{place}: the model {name} cannot be trained in this precision on {task.device}"
    with _errors_of_user_code(lambda reason: f"{line}: {reason}"):
        task.objective(task.new_module().train(), inputs, targets).backward()


def check_local_work(task: RunTask, sizes: Mapping[int, int]) -> None:
    """Raise ExperimentError if the numbers of steps or learning rates of the workers are impossible.

    `sizes` contains the number of training samples of each worker, by ID.
    """
    task.algorithm.check_work(task.schedule, sizes)
    _check_lr_schedules(task, sizes)
    _check_last_step(task, sizes)


def check_smallest_batch(task: RunTask, train: TensorData, sizes: Mapping[int, int]) -> None:
    """Raise ExperimentError if a worker has a batch of one sample and the model cannot be trained on one sample.

    `sizes` contains the number of training samples of each worker, by ID. The ID of the server, if it has samples of
    its own, follows the IDs of the workers.
    """
    experiment, schedule = task.experiment, task.schedule
    epoch = replace(schedule, epochs=1, steps=None)  # an epoch of fine-tuning before a test of workers
    whole = replace(epoch, drop_last=False)  # the pass over all samples for a full gradient
    always = [epoch] * bool(experiment.worker_evaluation.fine_tune) + [whole] * task.algorithm.full_gradient

    def smallest_batch(worker: int, size: int) -> int:
        batch = schedule.batch_size
        batch_sizes = batch.possible(worker)[:size] if isinstance(batch, Varying) else [batch]
        schedules = (schedule.longest(worker), *always)
        return min(
            replace(drawn, batch_size=batch).smallest_batch(size) for drawn in schedules for batch in batch_sizes
        )

    worker = next((k for k, size in sizes.items() if smallest_batch(k, size) == 1), None)
    if worker is None:
        return
    batch_size = experiment.local.batch_size
    holder = f"worker {called(worker)}" if worker < experiment.workers else "the server"
    if holder == "the server" and sizes[worker] == 1:
        subject, remedy = "aggregate.root_samples = 1: the server has", "set it to 2 or more"
    elif sizes[worker] == 1:
        subject, remedy = f"{experiment.partition.setting}: {holder} has", "give each worker two or more"
    elif batch_size == 1:
        subject, remedy = "local.batch_size = 1: each batch has", "set it to 2 or more"
    else:
        subject = f"local.batch_size = {show(batch_size)}: the last batch of {holder} ({sizes[worker]} samples) has"
        remedy = "use another local.batch_size" if task.algorithm.full_gradient else "set local.drop_last = true"

    def line(reason: str) -> str:
        return f"{subject} one sample, on which the model cannot be trained ({reason}); {remedy}"

    with _errors_of_user_code(line), preserve_random_state(task.device):
        sample = train.to(task.device, task.dtype).gather(torch.arange(1))
        task.objective(task.new_module().train(), *sample)


def _check_lr_schedules(task: RunTask, sizes: Mapping[int, int]) -> None:
    """Raise ExperimentError if a learning-rate schedule ends before the run.

    `sizes` contains the number of training samples of each worker, by ID.
    """
    tuned = task.experiment.worker_evaluation.fine_tune
    schedules = [(task.schedule.longest(worker), size) for worker, size in sizes.items()]
    steps = max(max(drawn.steps_for(size), tuned * drawn.batches_per_epoch(size)) for drawn, size in schedules)
    last = task.experiment.rounds, task.schedule.local_steps(steps) - 1
    task.algorithm_at(*last)
    schedule = task.experiment.local_schedule
    if schedule is not None and "lr" in task.varying and not schedule.is_factor(*last):
        raise ExperimentError(
            f"local.schedule.name = {show(task.experiment.local.schedule.name)}: cannot scale the workers' different "
            "values of local.lr, because a parameter (such as eta_min) is a learning rate itself; use one local.lr, or "
            "omit eta_min"
        )
    task.server_at(task.experiment.rounds)


def _check_last_step(task: RunTask, sizes: Mapping[int, int]) -> None:
    """Raise ExperimentError if the rule needs more workers than have samples left in the last step of a round.

    `sizes` contains the number of training samples of each worker, by ID.
    """
    experiment = task.experiment
    partial = len(sizes) > experiment.cohort_size or experiment.sampling.dropout_rate
    if not experiment.rounds_of_gradients or partial or "now" in experiment.sampling.component.accepts:
        return
    weights = experiment.weights if isinstance(experiment.weights, list) and experiment.rule.accepts_weights else None
    steps = {worker: task.schedule.of(worker, 1).steps_for(size) for worker, size in sizes.items()}
    last = max(count for worker, count in steps.items() if weights is None or weights[worker])
    count = sum(steps_of_worker >= last for steps_of_worker in steps.values())
    try:
        experiment.rule.dry_run(count)
    except ExperimentError as error:
        where = f"in round 1 only {count} of {len(sizes)} workers have data left for the last step"
        remedy = "or use local.steps, so that all workers have the same number of steps"
        raise ExperimentError(*(f"{where}: {line}; {remedy}" for line in error.lines)) from None
