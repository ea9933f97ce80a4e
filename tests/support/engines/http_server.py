"""`HttpServer`: a `stepscope` command that serves HTTP."""

import re
import time
from pathlib import Path

from tests.support.engines.warm_command import WarmCommand


class HttpServer:
    """A process with folders of its own; it listens once it is made.

    Args:
        folder: for its sockets, its config file and what it says.
        arguments: of the command, without the address.
        address: to listen on; by default any free port.
        environment: variables besides those of the test.
    """

    def __init__(
        self, folder: Path, *arguments: str, address: str = "0", **environment: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._said = folder / "stdout"
        self._stderr = folder / "stderr"
        self.process = WarmCommand(
            *(*arguments, "--http", address),
            environment={"XDG_CONFIG_HOME": str(folder), **environment},
            stdout=self._said,
            stderr=self._stderr,
        )
        self.url = self._said_url()

    def _said_url(self) -> str:
        while True:
            has_ended = self.process.poll() is not None
            said = self._said.read_text() if self._said.exists() else ""
            if match := re.search(r"OpenAI API on (http://[^/]+)/v1", said):
                return match[1]
            assert not has_ended, f"it never served: {self.stderr()}"
            time.sleep(0.02)

    def stderr(self) -> str:
        """All that it has written to stderr so far."""
        return self._stderr.read_text()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
