"""Ends the engine processes of vLLM in order, on the side of the parent that ends them.

When vLLM is told to end, its parent sends SIGTERM to its engine processes and, without a
`shutdown_timeout`, kills them in the same instant. Then nobody would learn that the engine has
stopped, and its files would stay. So the parent waits for stepscope in them, for a second at most.
"""

import contextlib
import fcntl
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from stepscope.engine.transport.endpoints import (
    LOCK_SUFFIX,
    Endpoint,
    holder,
    lock_path,
    same_file,
    sockets,
)

_MOST_S, _LOOK_S = 1.0, 0.01
_SEND_S = 0.05  # the files go last, when the last message is on its way


def end(
    endpoint: str,
    processes: Sequence[BaseProcess],
    shutdown: Callable[[], Any],
    *,
    at_once: bool,
) -> Any:
    """Call `shutdown`, which ends the processes, after stepscope in them has heard of it.

    Files of a process that had ended before are left: that was no orderly end.

    Args:
        endpoint: as in STEPSCOPE_ENDPOINT.
        at_once: whether `shutdown` kills them without waiting.
    """
    folder = lock_path(Endpoint.parse(endpoint)).parent
    ours = [each for each in processes if each.is_alive() and _locks_of(folder, each.pid)]
    if at_once:
        for process in ours:
            process.terminate()
        until = time.monotonic() + _MOST_S
        while any(_locks_of(folder, each.pid) for each in ours) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if ours:
            time.sleep(_SEND_S)
    try:
        return shutdown()
    finally:
        for process in ours:
            for path in _locks_of(folder, process.pid):
                process.join(_MOST_S)
                with contextlib.suppress(OSError):  # it still runs, or the files are gone
                    _remove(path)


def _locks_of(folder: Path, pid: int | None) -> list[Path]:
    """Return the lock files that a process has written."""
    found = []
    for path in folder.glob("*" + LOCK_SUFFIX):
        with contextlib.suppress(OSError), path.open() as file:
            if holder(file.fileno()).get("pid") == pid:
                found.append(path)
    return found


def _remove(lock: Path) -> None:
    """Remove the files of an engine that is gone. Raises OSError if it is not."""
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        endpoint = Endpoint(str(holder(file.fileno()).get("control", "")))
        if not same_file(file.fileno(), lock):
            return
        for each in sockets(endpoint):
            each.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
