"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fedsim.errors import RecordError


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises RecordError where it cannot be written."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from error
