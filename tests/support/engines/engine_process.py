"""`EngineProcess`: a simulated engine in a process of its own, with work."""

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


class EngineProcess:
    """A simulated engine, always busy, that can be stopped, killed and started again."""

    def __init__(self, address: str) -> None:
        self.endpoint = Endpoint.parse(address)
        program = Path(__file__).with_name("simulated_engine.py")
        self._program = [sys.executable, str(program), address]
        self._client: ControlClient | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._program)

    def work(self) -> None:
        wait_for(Path(self.endpoint.control.removeprefix("ipc://")).exists, "it listens")
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
