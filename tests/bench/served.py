"""`serving`: a `stepscope serve` in a process of its own, for the benches that are its clients."""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import psutil


class Served(NamedTuple):
    endpoint: str
    url: str  # of its HTTP server, "" without `--http`
    process: "subprocess.Popen[str]"

    @property
    def http_process(self) -> psutil.Process:
        """The engine's only child."""
        return next(each for each in psutil.process_iter() if each.ppid() == self.process.pid)


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Served]:
    """Yield once it answers; terminate it at the end."""
    last_line = r"on (http://[^/]+)/v1" if "--http" in options else " serves ()"
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        endpoint = f"ipc://{folder}/engine"
        command = [sys.executable, "-m", "stepscope.tui.cli", "serve", "--endpoint", endpoint]
        process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            found = next((m for line in process.stdout if (m := re.search(last_line, line))), None)
            if found is None:
                raise SystemExit(f"the engine ended with {process.wait()}")
            while found[1] and not answers(found[1]):
                time.sleep(0.1)
            yield Served(endpoint, found[1], process)
        finally:
            process.terminate()
            process.wait()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health").is_success
    return False
