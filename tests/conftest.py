"""Fixtures that several test files share."""

import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyte
import pytest
import zmq
from hypothesis import settings

from stepscope.engine.control.intake import Intake
from stepscope.engine.control.server import ControlServer
from stepscope.engine.loop import dispatch
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.protocol.commands import GetAudit, Shutdown
from stepscope.engine.protocol.replies import AnyReply
from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.protocol.wire import TOPICS, Telemetry, encode
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.simulation.simulated import (
    VOCAB_SIZE,
    SimulatedWorkload,
    simulate,
    simulated_info,
)
from stepscope.engine.simulation.step_time import CostModel
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.token_publisher import TokenPublisher
from stepscope.engine.text.tokenizer import TextStream
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
from stepscope.recordings.file.service_levels import Levels
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap, SourceStatus
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.__main__ import main
from tests.support.core_ends import GivenWorkload
from tests.support.paced_runner import PacedRunner
from tests.support.pty_process import PtyProcess
from tests.support.warm_command import WarmCommand

# The time of an example depends on the machine.
settings.register_profile("stepscope", deadline=None)
settings.load_profile("stepscope")


class Rotated(pytest.Dir):
    """A folder with tests, of which each worker of a run collects another file first.

    In a fresh checkout the first worker that comes to a file compiles it for all others.
    """

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        found = list(super().collect())
        worker = getattr(self.config, "workerinput", None)
        if worker is None:
            return found
        first = len(found) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        return found[first:] + found[:first]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return Rotated.from_parent(parent, path=path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put all workers' tests into one order, with those that share engines first.

    The worker that starts with them keeps them all.
    """
    items.sort(key=lambda item: (item.get_closest_marker("shares_engines") is None, item.path))


def pytest_collection_finish() -> None:
    """Hide what was imported from the garbage collector, which would look through it often."""
    gc.collect()
    gc.freeze()


# Several tests run at a time, and idle threads of torch spin: with one each, a test of the decoder
# takes half of the processor time. A test of threads sets their number itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("STEPSCOPE_SERVE_THREADS", "1")


class Done(NamedTuple):
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str


class ByteCodec:
    """One token a byte, and no chat template."""

    def encode(self, text: str, most: int | None = None) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: object, most: int | None = None) -> list[int]:
        raise ConfigError("no_chat_template", "messages: bytes have no chat template")

    def text_stream(self) -> TextStream:
        return TextStream(
            lambda token_ids: bytes(i for i in token_ids if i < 256).decode(errors="replace")
        )


@dataclass
class LiveEngine:
    """A simulated engine behind real sockets, on a thread of the test's process."""

    endpoint: Endpoint
    core: EngineCore
    publisher: Publisher
    control: ControlServer
    workload: GivenWorkload
    changes: dict[str, Any]  # of its info, from its next publication on

    def becomes(self, **changes: Any) -> None:
        """Let an engine with another description answer at the address from now on."""
        self.changes.update(changes)
        done, core = threading.Event(), self.core

        class OnItsThread:
            def reply(self, message: AnyReply) -> None:
                core.publish_info()
                done.set()

        core.inbox.put(Call(GetAudit(), OnItsThread()))
        assert done.wait(10), "the engine does not answer"


@pytest.fixture
def stepscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Runs `stepscope ARGUMENTS` in this process, with an empty folder for its config file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["stepscope", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def live_engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LiveEngine]:
    """Steps of about 2 ms, 256 blocks of 16 tokens, requests of up to 1024 tokens.

    Its parameter, if it has one, is options of `EngineCore`.
    """
    with _live_engine(tmp_path, with_tokens=False, **getattr(request, "param", {})) as engine:
        yield engine


@pytest.fixture
def telling_engine(tmp_path: Path) -> Iterator[LiveEngine]:
    """A `live_engine` with prompts and outputs in its telemetry."""
    with _live_engine(tmp_path, with_tokens=True) as engine:
        yield engine


@contextmanager
def _live_engine(tmp_path: Path, *, with_tokens: bool, **options: Any) -> Iterator[LiveEngine]:
    endpoint = Endpoint.parse(f"{tmp_path}/engine")
    limits = Limits(max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=1024)
    cost = CostModel(floor_ms=2.0, token_us=2.0, context_ns=0.0)
    with EndpointLock(endpoint):
        publisher = Publisher(endpoint.telemetry, ring_size=4096)
        scheduler = Scheduler(KVCacheManager(256, 16), Knobs(max_num_seqs=64), limits)
        info = simulated_info(limits, 256, 16, seed=0, is_served=True)
        workload = GivenWorkload()
        changes: dict[str, Any] = {}
        core = EngineCore(
            msgspec.structs.replace(info, with_tokens=with_tokens),
            PacedRunner(cost),
            scheduler,
            limits,
            publisher,
            dispatch,
            workload=workload,
            token_publisher=TokenPublisher(ByteCodec().text_stream) if with_tokens else None,
            anchor=lambda info: msgspec.structs.replace(info, **changes),
            **options,
        )
        control = ControlServer(
            endpoint.control,
            core,
            Intake(ByteCodec(), VOCAB_SIZE, limits.max_model_len, with_tokens=with_tokens),
            None,
            publisher.replay,
        )
        control.start()
        thread = threading.Thread(target=core.run, name="engine")
        thread.start()
        yield LiveEngine(endpoint, core, publisher, control, workload, changes)
        core.inbox.put(Call(Shutdown(), SilentClient()))
        thread.join(timeout=10)
        assert not thread.is_alive(), "the engine did not stop"
        control.close()
        publisher.close()


@pytest.fixture(scope="session", autouse=True)
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep logs and the list of recent files in the tests' own folder, also in child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_ends_what_tests_start() -> Iterator[None]:
    """Ctrl-C works in child processes even if a script runs the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _end_zmq() -> Iterator[None]:
    yield
    zmq.Context.instance().destroy(linger=0)


class Terminal:
    """A program in a pseudo-terminal, and the screen it has drawn.

    Args:
        arguments: the program and its arguments.
        columns, rows: size of the terminal.
        environment, cwd: of the program.
    """

    def __init__(
        self,
        arguments: list[str],
        columns: int,
        rows: int,
        environment: dict[str, str],
        cwd: str | None,
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.process = PtyProcess(arguments, rows=rows, columns=columns, env=environment, cwd=cwd)
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Feed the screen complete frames: it claims to support synchronized output, mode 2026.

        Otherwise a test could find what it waits for in a screen that is drawn in part.
        """
        pending = b""
        while True:
            try:
                received = self.process.read()
            except EOFError:  # ended, or closed by the test
                with self._lock:
                    self._stream.feed(pending)
                return
            if b"\x1b[?2026$p" in received:
                self.process.write(b"\x1b[?2026;2$y")
            pending += received
            begun, ended = pending.rfind(b"\x1b[?2026h"), pending.rfind(b"\x1b[?2026l")
            whole = begun if begun > ended else len(pending)
            with self._lock:
                self._stream.feed(pending[:whole])
            pending = pending[whole:]

    def text(self) -> str:
        with self._lock:
            return "\n".join(self.screen.display)

    def cells(self) -> list[list[pyte.screens.Char]]:
        """Every character of the screen, row by row, with its colours."""
        with self._lock:
            screen = self.screen
            return [
                [screen.buffer[y][x] for x in range(screen.columns)] for y in range(screen.lines)
            ]

    def send(self, keys: str) -> None:
        self.process.write(keys.encode())

    def click(self, column: int, row: int, button: int = 0) -> None:
        """Press and release a mouse button at a cell, counted from 0; 64 and 65 are the wheel."""
        at = f"{button};{column + 1};{row + 1}"
        self.send(f"\x1b[<{at}M" if button >= 64 else f"\x1b[<{at}M\x1b[<{at}m")

    def row_of(self, pattern: str) -> int:
        """The first matching row of the screen, once there is one."""
        match = self.wait_for(pattern)
        return match.string.count("\n", 0, match.start())

    def resize(self, columns: int, rows: int) -> None:
        with self._lock:
            self.screen.resize(rows, columns)
        self.process.setwinsize(rows, columns)

    def scribble(self) -> None:
        """Overwrite the whole screen as if another program had, unknown to this one."""
        with self._lock:
            self.screen.reset()
            self.screen.draw("noise " * 100)

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> re.Match[str]:
        """The first match of a regular expression on the screen."""
        deadline = time.monotonic() + timeout_s
        while True:
            text = self.text()
            if match := re.search(pattern, text):
                return match
            assert time.monotonic() < deadline, f"{pattern!r} never appeared:\n{text}"
            time.sleep(0.05)

    def wait_for_exit(self, timeout_s: float = 30.0) -> int:
        """Exit status, or minus the number of the signal that ended it."""
        deadline = time.monotonic() + timeout_s
        while (exit_code := self.process.exit_code) is None:
            assert time.monotonic() < deadline, f"still running:\n{self.text()}"
            time.sleep(0.05)
        return exit_code

    def close(self) -> None:
        self.process.close()
        self._reader.join(5)


@pytest.fixture
def runtime_folder() -> Iterator[Path]:
    """A folder for sockets: a socket's path must be short, and `tmp_path` may be long."""
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        yield Path(folder)


_TERMINAL = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts programs in pseudo-terminals; ends those still running after the test."""
    started: list[Terminal] = []

    def start(
        *arguments: str,
        columns: int = 120,
        rows: int = 40,
        cwd: str | None = None,
        **environment: str,
    ) -> Terminal:
        usual = {**os.environ, **_TERMINAL}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):  # a terminal reports its size
            usual.pop(name, None)
        full = {**usual, **environment}
        started.append(Terminal(list(arguments), columns, rows, full, cwd))
        return started[-1]

    yield start
    for each in started:
        each.close()


# Two layers of width 64 with 4 query and 2 KV heads, and what distinguishes each family.
TINY_MODELS: dict[str, dict[str, object]] = {
    "llama": {"rms_norm_eps": 1e-5},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 20, "head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 24,
    },
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
    },
    "phi3": {},
    "phimoe": {"num_local_experts": 2, "num_experts_per_tok": 2},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a small random checkpoint of a model family, with a byte tokenizer.

    Called as `tiny_checkpoint(family, **changes to its config)`; the same call gives the same
    folder, which tests must leave as it is.
    """
    written: dict[str, Path] = {}

    def make(family: str, **changes: object) -> Path:
        key = f"{family} {sorted(changes.items())}"
        if key not in written:
            written[key] = tmp_path_factory.mktemp(family)
            _write_checkpoint(written[key], family, changes)
        return written[key]

    return make


def _write_checkpoint(folder: Path, family: str, changes: dict[str, object]) -> None:
    # Here, not above: most tests need no torch, and importing it takes seconds.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from stepscope.engine.models.demo import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": EOS_TOKEN_ID,
        **TINY_MODELS[family],
        **changes,
    }
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for weight in model.parameters():
            # Larger than usual, so that attention is sharp and no two logits are nearly equal.
            weight.add_(torch.randn_like(weight) * 0.15)
            weight.copy_(weight.bfloat16())  # as most checkpoints are
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


class HttpServer:
    """A `stepscope` command that serves HTTP, as a process with folders of its own.

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
        option = "--http" if arguments[0] == "serve" else "--bind"
        self.process = WarmCommand(
            *(*arguments, option, address),
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


@pytest.fixture(scope="session")
def greedy_oracle() -> Callable[[Path], Callable[[Sequence[int], int], list[int]]]:
    """What transformers' `generate` adds to a prompt in fp32: by folder, then prompt and length."""
    import torch
    from transformers import AutoModelForCausalLM

    def of(folder: Path) -> Callable[[Sequence[int], int], list[int]]:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

        def generate(prompt: Sequence[int], num_output: int) -> list[int]:
            output = model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_output,
                min_new_tokens=num_output,
                do_sample=False,
                suppress_tokens=None,
                eos_token_id=None,
                pad_token_id=0,
            )
            tokens: list[int] = output[0, len(prompt) :].tolist()
            return tokens

        return generate

    return of


@pytest.fixture(scope="session")
def served_model(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpServer]:
    """`stepscope serve --http` with a tiny Llama called `tiny`, of up to 512 tokens."""
    folder = tmp_path_factory.mktemp("served")
    server = HttpServer(
        folder,
        *("serve", "--model", str(tiny_checkpoint("llama"))),
        *("--endpoint", f"{folder}/engine", "--served-model-name", "tiny"),
        *("--threads", "1", "--kv-memory", "8MB", "--dtype", "float32"),
    )
    yield server
    server.close()


@pytest.fixture
def http_server(tmp_path: Path) -> Iterator[Callable[..., HttpServer]]:
    """Starts `stepscope http` or `serve` with these arguments; ends it after the test."""
    started: list[HttpServer] = []

    def start(*arguments: str, **environment: str) -> HttpServer:
        folder = tmp_path / f"http-{len(started)}"
        started.append(HttpServer(folder, *arguments, **environment))
        return started[-1]

    yield start
    for server in started:
        server.close()


class Received:
    """A live source whose messages the test passes in one by one."""

    is_live = True
    name = "engine"
    status: SourceStatus = "live"
    error = None

    def __init__(self, slo: SLO | None) -> None:
        self.history = History() if slo is None else History(slo)
        self.tap = FrameTap()

    def start(self) -> None:
        return

    def stop(self) -> None:
        return

    def take(self, sequence: int, message: Telemetry) -> None:
        payload = encode(message)
        self.history.append(sequence, payload)
        self.tap.send(TOPICS[type(message)], sequence, payload)


@pytest.fixture(scope="session")
def recorded_to() -> Callable[..., AbstractContextManager[Received]]:
    """`with recorded_to(path) as source`: the file holds the messages passed to `source.take`."""

    @contextmanager
    def recorded(
        path: Path, slo: SLO | None = None, levels: Levels | None = None
    ) -> Iterator[Received]:
        source = Received(slo)
        recorder = Recorder(source, path, lambda: levels or {})
        yield source
        recorder.stop()
        assert recorder.error is None, recorder.error

    return recorded


class StillSource:
    """A source that receives nothing more; implements `Source`."""

    is_live = True
    name = "still"

    def __init__(self, history: History) -> None:
        self.history = history
        self.tap = FrameTap()
        self.status: SourceStatus = "live"
        self.error: str | None = None

    def start(self) -> None:
        return

    def stop(self) -> None:
        return


@pytest.fixture
def still_source() -> Callable[..., StillSource]:
    """Makes sources of a busy simulated session: preemptions, prefix hits, a smaller budget."""

    def make(num_steps: int = 400) -> StillSource:
        history = History(SLO(ttft_ms=500.0, itl_ms=30.0))
        for sequence, message in _busy_session(num_steps):
            history.append(sequence, message)
        return StillSource(history)

    return make


@lru_cache(maxsize=4)
def _busy_session(num_steps: int) -> list[tuple[int, Telemetry]]:
    return simulate(
        seed=3,
        num_steps=num_steps,
        knobs=Knobs(max_num_batched_tokens=1024, max_num_seqs=32),
        changes={num_steps - 60: {"max_num_batched_tokens": 512}},
        workload=SimulatedWorkload(
            rate=9.0, document_share=0.12, document_tokens=2600, output_tokens=140
        ),
        cost=CostModel(floor_ms=12.0, token_us=25.0, context_ns=4.0),
        num_blocks=512,
    )
