"""A stand-in for `ProcessPool` that executes calls in the test's own process."""

from __future__ import annotations

from fedsim.errors import FedsimError, WorkerError
from fedsim.processes.process_context import ProcessContext
from fedsim.system.limits import format_failure


class InProcessPool:
    """A pool of one process, regardless of the requested number.

    Attributes:
        called: the called functions, in order.
    """

    count = 1
    start_method = "fork"

    def __init__(self, count, threads=1, timeout=300.0, start_method="fork"):
        self.called, self.at_work, self.process = [], True, ProcessContext.alone()

    def call(self, function, *arguments):
        self.called.append(function)
        try:
            return [function(self.process, *arguments)]
        except FedsimError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise WorkerError(f"process 0 failed: {format_failure(error)}") from None

    def prepare(self, function, *arguments):
        self.called.append(function)
        function(ProcessContext.alone(), *arguments)

    def forget(self):
        self.called.append("forget")

    def close(self):
        self.at_work = False
