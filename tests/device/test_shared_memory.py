"""CUDA memory that processes share: who keeps it, and when it is released."""

from __future__ import annotations

import gc
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fedsim
from fedsim.engines import base
from fedsim.processes import process_pool
from fedsim.processes.messages import NO_COUNTER, Channel, Message
from fedsim.processes.process_context import ProcessContext
from tests.device.pretend import GPU, download, upload
from tests.engines.in_process import InProcessPool


@pytest.fixture
def channels():
    """Return the two ends of three pipes: those of the sender, and those of three receivers."""
    pipes = [Pipe() for _ in range(3)]
    ends = [[Channel(end) for end in ends] for ends in zip(*pipes, strict=True)]
    yield ends
    for channel in (*ends[0], *ends[1]):
        channel.close()


def sent(content, senders, receivers):
    """Send one message to all receivers, and return what they have received."""
    message = Message(content)
    for sender in senders:
        sender.send(message)
    return [receiver.receive().load() for receiver in receivers]


def test_pytorch_keeps_memory_that_two_receivers_of_one_message_have_released(gpu):
    """The reason for the reducer of `Message`."""
    rows = upload(torch.ones(3))
    data = ForkingPickler.dumps(rows)
    for _ in range(2):
        ForkingPickler.loads(data)
    del rows
    gc.collect()
    assert gpu.shared_memory.kept_for_ever == 1


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_memory_is_released_however_many_processes_receive_it_and_however_they_end(lost, gpu, channels):
    senders, receivers = channels
    rows = upload(torch.arange(12.0).view(3, 4))
    content = {"rows": rows, "row": rows[1], "model": torch.nn.Linear(2, 2).to(GPU), "nothing": rows.new_empty(0)}
    memory = StorageWeakRef(rows.untyped_storage())
    received = sent(content, senders, receivers[lost:])  # `lost` processes ended before they received the message
    for each in received:
        assert each["row"].device == GPU
        assert torch.equal(download(each["row"]), torch.arange(4.0, 8.0))
        assert each["row"].untyped_storage().data_ptr() == each["rows"].untyped_storage().data_ptr()
    del rows, content, received
    gc.collect()
    assert not memory.expired()
    for sender in senders:
        sender.forget()
    assert memory.expired()
    assert gpu.shared_memory.kept_for_ever == 0


def test_memory_outlives_its_tensors_in_the_sender_until_the_channels_are_closed(gpu, channels):
    """For example, tensors that exist only while an object is pickled."""
    senders, receivers = channels
    message = Message(upload(torch.ones(3)))
    for sender in senders:
        sender.send(message)
    del message
    received = receivers[0].receive().load()
    assert torch.equal(download(received), torch.ones(3))
    del received
    for sender in senders:
        sender.close()
    with pytest.raises(fedsim.ExperimentError, match="freed by its sender"):
        receivers[1].receive().load()
    assert gpu.shared_memory.kept_for_ever == 0


def test_host_tensors_are_sent_as_before(channels):
    rows = torch.ones(3)
    for received in sent(rows, *channels):
        received[0] = 2
    assert rows.tolist() == [2, 1, 1]


def test_a_receiver_looks_for_a_counter_that_does_not_exist(gpu):
    assert NO_COUNTER in Message(upload(torch.ones(3))).data


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("pidfd_getfd: Operation not permitted", "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF or use engine="),
        ("CUDA error: invalid resource handle", "use engine=serial"),
    ],
)
def test_a_process_that_cannot_receive_memory_refuses_the_run_in_one_line(reason, remedy, gpu, channels, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError(reason)

    senders, receivers = channels
    senders[0].send((True, print, (upload(torch.ones(3)),)))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(refuse))
    kind, error = process_pool._answer(ProcessContext.alone(), receivers[0].receive())
    assert kind == "refused"
    line = f'device = "cuda:0": processes cannot share memory of this device (RuntimeError: {reason}); {remedy}'
    assert str(error).startswith(line)


def test_a_process_without_memory_for_a_context_does_not_blame_sharing(gpu, channels, monkeypatch):
    def refuse(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    senders, receivers = channels
    senders[0].send((True, print, (upload(torch.ones(3)),)))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(refuse))
    with pytest.raises(torch.OutOfMemoryError):
        receivers[0].receive().load()


@pytest.mark.parametrize("failing", [False, True])
def test_processes_release_the_memory_of_a_run_before_their_parent(failing, tiny_experiment, monkeypatch):
    pools, leave = [], base.Engine.leave

    def noted(self):
        pools.append(self._pool)
        leave(self)

    def on_round(record):
        if failing:
            raise fedsim.FedsimError("stop")

    monkeypatch.setattr(base, "ProcessPool", InProcessPool)
    monkeypatch.setattr(base.Engine, "leave", noted)
    try:
        fedsim.run({**tiny_experiment, "engine": "processes", "processes": 2}, on_round=on_round)
    except fedsim.FedsimError:
        assert failing
    called = pools[-1].called
    assert called[called.index("forget") - 1] is base._drop_executor
