"""A pretend GPU: tests run the CUDA code of fedsim on the CPU, under CUDA's device rules.

    with pretend_gpu() as gpu:
        result = fedsim.run({..., "device": "cuda"})

    with pretend_gpu() as gpu, gpu.counting() as counts:
        fedsim.aggregate(upload(rows), "median")
    assert counts.launches <= 7
    print(counts.table())  # every launch, upload, download and host read, by operation and source line

    with pretend_gpu(SMALL) as gpu:  # a card of 8 GB that emulates bfloat16 (`cards`)
        ...

The pytest fixture `gpu` (tests/device/conftest.py) provides this block for a test.

Tensors are ordinary CPU tensors with real numbers. A mark on their storage means GPU memory (`placement`). Views,
autograd, vmap and `parameter.data = ...` preserve the mark.

* `rules.DeviceRules`, a TorchDispatchMode, intercepts every operation that PyTorch executes. It refuses what CUDA
  refuses: operands on two devices, a CPU generator for a GPU tensor, and a host read or a copy to or from the host
  during a graph capture. It counts kernel launches and host waits.
* `python_api.PythonApi`, a TorchFunctionMode, answers the Python calls that name a device: factories with `device=`,
  `.to`, `.cpu`, `.numpy()` and `.tolist()`.
* `cuda_api.cuda_api` replaces functions of `torch.cuda` and `torch.accelerator`: streams, synchronisation, generators,
  memory figures and CUDA graphs. A graph is a list of operations (`recording`). A replay executes these operations
  again on the same memory, without the Python code of the captured step.

Counts: each operation except views and allocations is one launch, however many kernels CUDA would use (a sort uses
several, a `_foreach` operation on a few tensors one). A graph replay is one launch, and the launches inside the graph
are counted as `graph_launches`. A wait is a host read, a blocking copy in either direction, or a synchronisation.

* `ipc.SharedMemory` sends tensors to "other processes", which are this one, with PyTorch's counters of receivers.
* `attention` and `generators` differ from the CPU as those of CUDA do.

Not simulated: time, memory use, streams, errors inside kernels, and work in other processes.
"""

from tests.device.pretend.cards import SMALL
from tests.device.pretend.counting import Counts
from tests.device.pretend.gpu import PretendGpu, pretend_gpu
from tests.device.pretend.placement import GPU, DeviceError, download, on_gpu, upload

__all__ = ["GPU", "SMALL", "Counts", "DeviceError", "PretendGpu", "download", "on_gpu", "pretend_gpu", "upload"]
