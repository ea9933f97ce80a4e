"""The contenders of bench_throughput.py, each a process of its own, stopped out of its turn."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import common  # noqa: F401 - the repository is on the path
from peers import Done, Work

from tests.attached.run_vllm import environment

PEERS = Path(__file__).with_name("peers.py")
VLLM = "0.32.0"
LOAD_TIMEOUT_S = 600.0


# What each computes in, where the CPU has instructions for bf16.
CONTENDERS = {
    "stepscope": "bfloat16",
    "generate": "bfloat16",
    "generate_batch": "float32",
    "vllm": "bfloat16",
}


class ContenderError(Exception):
    """A contender failed to do its work."""


class Running:
    """The process of a contender, stopped (SIGSTOP) except while it loads and while it works.

    Raises ContenderError if its model cannot be loaded.
    """

    def __init__(
        self, contender: str, dtype: str, model: Path, cores: list[int], log: IO[str]
    ) -> None:
        self.contender = contender
        python = environment(VLLM) if contender == "vllm" else Path(sys.executable)
        settings = {"model": str(model), "cores": cores, "contender": contender, "dtype": dtype}
        self._process = subprocess.Popen(
            [python, PEERS, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            self.how = self._answer(LOAD_TIMEOUT_S)["how"]
        except ContenderError:
            self.close()
            raise

    def ask(self, work: Work, timeout_s: float) -> Done:
        """Run a piece of work. Raises ContenderError on failure, timeout or too few tokens."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work._asdict()) + "\n")
        self._process.stdin.flush()
        done = Done(**self._answer(timeout_s))
        lengths = [len(each) for each in done.outputs]
        if lengths != [work.num_output_tokens] * work.num_requests:
            raise ContenderError(f"{self.contender} made {lengths} tokens for {work}")
        return done

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=10)  # it ends with its input
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.communicate()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)  # it leads a group of its own

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """The answer that it owes; it is stopped then."""
        stream = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], timeout_s)[0]:
            raise ContenderError(f"{self.contender}: no answer in {timeout_s:.0f} s")
        line = stream.readline()
        if not line:
            raise ContenderError(f"{self.contender} has ended; see its output")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def running(
    contenders: Mapping[str, str], model: Path, cores: list[int]
) -> Iterator[list[Running]]:
    """All of them, loaded one after another. What they print is shown if one of them fails."""
    with tempfile.TemporaryFile("w+") as log, contextlib.ExitStack() as stack:
        started: list[Running] = []
        try:
            for name, dtype in contenders.items():
                started.append(Running(name, dtype, model, cores, log))
                stack.callback(started[-1].close)
            yield started
        except ContenderError:
            log.seek(0)
            sys.stderr.write("".join(log.readlines()[-30:]))
            raise
