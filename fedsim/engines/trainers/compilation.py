"""`compile = true`: forward pass and loss by torch.compile where that works, and gives what it gives uncompiled."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedsim.core.randomness import global_states, preserve_random_state
from fedsim.errors import FedsimWarning
from fedsim.system.precision import Precision

OPTIONS = {
    "fallback_random": True,  # dropout draws what it draws uncompiled
    "compile_threads": 1,  # in this process: no helpers that might outlive a run
    "fx_graph_cache": False,  # on disk, where code for derivatives of our own was found that gave other numbers
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest value
CONTEXT, LONGEST = "Developer debug context:", 200
ROUGH = 5e-2  # of a loss, where the forward pass rounds to 16 bits, and compiled code less often

Run = Callable[[Callable[..., Any]], Sequence[Tensor]]


class CompiledFunction:
    """A function and its compiled form; calling it does the latter, or the former from where that first fails on.

    It is compiled as a whole for each shape. Callers pass only shapes that were tried before.

    Args:
        plain: the function as it is.
        compilable: another that does the same, where `plain` is not for compilers.
        tells: whether a failure is said in a warning: of several processes that fail alike, one does.
    """

    def __init__(self, plain: Callable[..., Any], compilable: Callable[..., Any] | None = None, *, warns: bool) -> None:
        self._plain, self._warns = plain, warns
        function = _with_code_of_its_own(compilable or plain)
        self._compiled = torch.compile(function, dynamic=False, fullgraph=True, backend=_inductor)
        self.refusal: str | None = None  # the reason why it is not compiled

    def dry_run(self, run: Run, device: torch.device, precision: Precision) -> None:
        """Compile, and see that results and random draws are those of the plain function.

        Once it has been refused, there is nothing more to do.

        `run` calls the function that it is given on inputs of its own, and returns what comes of it, the loss first.
        """
        if self.refusal is not None:
            return
        try:
            expected, states = _seen(run, self._plain, device)
            with _without_warnings():
                found, states_after_compiled = _seen(run, self._compiled, device)
        except Exception as error:
            return self._refuse(_short(error))
        if states_after_compiled != states:
            return self._refuse("compiled it draws other random numbers")
        compared, tolerance = len(expected), TOLERANCE[precision.rows]
        if precision.autocast is not None:
            compared, tolerance = 1, ROUGH
        for one, other in zip(found[:compared], expected[:compared], strict=True):
            if one.numel() and not (one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max())):
                return self._refuse("compiled it gives other numbers")

    def __call__(self, *arguments: Any) -> Any:
        if self.refusal is None:
            try:
                with _without_warnings():
                    return self._compiled(*arguments)
            except Exception as error:  # also of the function's own, which then comes again
                if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                    raise  # a capture that has failed cannot go on
                self._refuse(_short(error))
        return self._plain(*arguments)

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        if self._warns:
            line = f"compile = true: the model is trained uncompiled, with the same results: {reason}"
            warnings.warn(line, FedsimWarning, stacklevel=3)


def _inductor(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """PyTorch's own compiler, without its caches on disk."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return torch._inductor.compile(graph, examples, options=OPTIONS)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Of PyTorch's compiler, about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _seen(run: Run, function: Callable[..., Any], device: torch.device) -> tuple[list[Tensor], list[object]]:
    """What comes of a run, and where it leaves the random generators."""
    with preserve_random_state(device):
        return list(run(function)), global_states(device)


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler keeps what it has made by code object, and but a few for each: not enough for many tasks."""

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    call.__code__ = call.__code__.replace()
    return call


def _short(error: Exception) -> str:
    """The compiler's errors are pages of advice; their first line, and what of the context says more than that."""
    error = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    context = [line.removeprefix(CONTEXT).strip() for line in lines if line.startswith(CONTEXT)]
    text = f"{type(error).__name__}: {'; '.join([*lines[:1], *context])}"
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
