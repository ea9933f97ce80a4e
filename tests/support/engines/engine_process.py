"""`EngineProcess`: a simulated engine in a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.transport.endpoints import Endpoint
from tests.support.waiting import wait_for

PROGRAM = Path(__file__).with_name("simulated_engine.py")


class EngineProcess:
    """A simulated engine that can be stopped, killed and started again; a context manager.

    `options`: further arguments of `simulated_engine.py`.
    """

    def __init__(self, address: str, *options: str) -> None:
        self.endpoint = Endpoint.parse(address)
        self._program = [sys.executable, str(PROGRAM), address, *options]
        self._client: ControlClient | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._program)

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait(self) -> None:
        wait_for(Path(self.endpoint.control.removeprefix("ipc://")).exists, "it listens")

    def work(self) -> None:
        """Give it more requests than there are seats or KV blocks for."""
        self.wait()
        self._client = ControlClient(self.endpoint)
        sampling = SamplingParams(max_tokens=700, ignore_eos=True)
        for number in range(60):
            prompt = [number] * 300
            self._client.ask(Submit(prompt_token_ids=prompt, sampling=sampling, stream=False))

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self._client is not None:
            self._client.close()
            self._client = None
