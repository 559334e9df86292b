"""A pretend GPU: the tests run the CUDA paths of fedsim on the CPU, under the device rules of CUDA.

    with pretend_gpu() as gpu:
        result = fedsim.run({..., "device": "cuda"})

    with pretend_gpu() as gpu, gpu.counting() as counts:
        fedsim.aggregate(upload(rows), rule="median")
    assert counts.launches <= 7
    print(counts.table())  # every launch, upload, download and host read, by operation and source line

The pytest fixture `gpu` (tests/device/conftest.py) is such a block around a test.

Tensors stay ordinary CPU tensors with real numbers. Their storage carries a mark that says that it is GPU memory
(`placement`), which views, autograd, vmap and `parameter.data = ...` keep.

* `rules.DeviceRules`, a TorchDispatchMode, sees every operation that PyTorch executes. It refuses the operations that
  CUDA refuses: operands on two devices, a CPU generator for a GPU tensor, a host read or a copy to or from the host
  while a graph is captured. It counts kernel launches and host waits.
* `python_api.PythonApi`, a TorchFunctionMode, answers the calls of Python that name a device: factories with
  `device=`, `.to`, `.cpu`, `.numpy()`, `.tolist()`.
* `cuda_api.cuda_api` replaces the functions of `torch.cuda` and `torch.accelerator`: streams, synchronisation,
  generators, memory figures and CUDA graphs. A graph is a list of operations (`recording`); a replay executes these
  operations again on the same memory, without running any Python of the captured step.

What it counts: each operation that is neither a view nor an allocation is one launch, whatever CUDA makes of it
(a sort is several kernels, a `_foreach` operation of few tensors is one). A replay of a graph is one launch; the
launches inside of the graph are counted as `graph_launches`. A wait is a host read, a blocking copy in either
direction, or a synchronisation.

What it cannot show: time, memory use, streams, kernels' own faults, other processes.
"""

from tests.device.pretend.counting import Counts
from tests.device.pretend.gpu import PretendGpu, pretend_gpu
from tests.device.pretend.placement import GPU, DeviceError, download, on_gpu, upload

__all__ = ["GPU", "Counts", "DeviceError", "PretendGpu", "download", "on_gpu", "pretend_gpu", "upload"]
