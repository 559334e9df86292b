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
  again on the same memory, without the Python code of the captured step. PyTorch's own contexts for devices, streams
  and captures call these functions, so an error in a context has PyTorch's consequences.
* `streams` refuses a use of memory that CUDA may begin before an earlier use on another stream has ended: a read by
  the host or another stream, a write while another stream reads, and both for copies of pinned memory on which the
  host did not wait. Waiting for a stream or an event, on the host or in a stream, allows the use.
* `memory` counts the memory in use, and the references of captures to their memory pools, and limits the memory.

Counts: each operation except views and allocations is one launch, however many kernels CUDA would use (a sort uses
several, a `_foreach` operation on a few tensors one). A graph replay is one launch, and the launches inside the graph
are counted as `graph_launches`. A wait is a host read, a blocking copy in either direction, or a synchronisation.

* `ipc.SharedMemory` sends tensors to "other processes", which are this one, with PyTorch's counters of receivers.
* `attention` and `generators` differ from the CPU as those of CUDA do.

A copy from pageable memory is a wait if it is large, even with `non_blocking`, because CUDA stages it.

Not simulated: time, errors inside kernels, the streams of autograd, and work in other processes. A capture executes its
operations. The allocator has no cache, but a pool keeps all memory of its captures, without reuse. Memory that is freed
while another stream uses it is not noticed.
"""

from tests.device.pretend.cards import SMALL
from tests.device.pretend.counting import Counts
from tests.device.pretend.gpu import PretendGpu, pretend_gpu
from tests.device.pretend.placement import GPU, DeviceError, download, on_gpu, upload

__all__ = ["GPU", "SMALL", "Counts", "DeviceError", "PretendGpu", "download", "on_gpu", "pretend_gpu", "upload"]
