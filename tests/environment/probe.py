"""Run command lines in one process, one after another: `python -m tests.environment.probe JSON`.

JSON is a list: a list of words is a command line of fedsim, a string is a shell command. The outcomes of the command
lines are printed as JSON: [exit code, stdout, stderr], with a traceback in place of the exit code after an exception.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback

import torch
from typer.testing import CliRunner

from fedsim.cli.main import app


def outcome(words):
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return ["".join(traceback.format_exception(result.exception)), result.stdout, result.stderr]
    return [result.exit_code, result.stdout, result.stderr]


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = []
    for command in json.loads(sys.argv[1]):
        if isinstance(command, str):
            subprocess.run(["sh", "-ec", command], check=True)
        else:
            results.append(outcome(command))
    print(json.dumps(results))
