"""Fixtures that several test files share."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import zmq
from hypothesis import settings
from textual.app import App
from textual.pilot import Pilot

from stepscope.engine.adapters.metrics import local_servers
from stepscope.engine.client.client import ControlClient
from stepscope.recordings.file.service_levels import Levels
from stepscope.recordings.history.history import History
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.state.latency import SLO
from stepscope.tui.cli.__main__ import main
from tests.support.done import Done
from tests.support.engines.live_engine import LiveEngine, running_engine
from tests.support.engines.tiny_checkpoint import write_checkpoint
from tests.support.engines.warm_command import HttpServer
from tests.support.screens.keys import pause, press_keys
from tests.support.screens.terminal import Terminal
from tests.support.sessions.received import Received, busy_history
from tests.support.waiting import WAIT_S

# The time of an example depends on the machine, and a run is to find what the one before it found.
settings.register_profile("stepscope", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("stepscope")

# Several tests run at a time, and idle threads of torch spin: with one each, a test of the decoder
# takes half of the processor time. A test of threads sets their number itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("STEPSCOPE_SERVE_THREADS", "1")
# The engines of tests run on the CPU, even where there is a GPU.
os.environ.setdefault("STEPSCOPE_SERVE_DEVICE", "cpu")


App._press_keys = press_keys  # type: ignore[method-assign]  # what `Pilot.press` calls
Pilot.pause = pause  # type: ignore[method-assign]
# An engine on a busy machine may need longer than an operator would wait.
ControlClient.__init__.__defaults__ = (WAIT_S,)


# Files of what needs real time, kills, floods, compilers, terminals of other processes or whole
# searches: `make test-slow`. Elsewhere single tests are marked.
SLOW = {
    "attribution": ("late_seconds",),
    "commands": (
        *("cli_bench", "cli_chat", "cli_demo", "cli_engine", "cli_record", "cli_schedule"),
        *("cli_starting", "cli_waiting"),
    ),
    "comparing": ("compare_chance", "compare_screen", "fleet_live"),
    "compute": ("triton_kernels",),
    "dashboard": ("tour",),
    "history": ("one_moment", "replay_ways", "seek_laws", "splice"),
    "house": ("packaging",),
    "importing": ("bad_input", "live_logs"),
    "measuring": ("bench_gpu", "bench_scripts"),
    "models": (
        *("exactness", "graphs", "kv_cache_dtype", "overlap_models", "sampling_live"),
        "speculation_models",
    ),
    "recording": (
        *("being_written", "export_memory", "file_index", "file_rights", "plot", "repair"),
        *("rotation", "verify"),
    ),
    "scheduling": ("overlap_laws",),
    "screens": ("leaving", "terminal"),
    "serving": ("end_to_end", "http_faults", "prefill_and_decode"),
    "simulation": (
        *("autopilot", "demo_mix", "diagnose", "misses_shown", "simulate_cli", "simulated_demo"),
        *("tune", "what_if"),
    ),
    "telemetry": ("chaos",),
}


def _is_slow(path: Path) -> bool:
    return path.stem.removeprefix("test_") in SLOW.get(path.parent.name, ())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what `make test` would leave out afterwards."""
    return (config.option.markexpr == "not slow" and _is_slow(collection_path)) or None


# What imports models, and the folder of HTTP and of engine processes before all others.
FIRST = ("serving", "models", "compute")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put all workers' tests into one order, with those of models and of engine processes first.

    So one worker runs them all. It alone imports what they need, and starts the engine they share.
    """

    def place(item: pytest.Item) -> tuple[int, Path]:
        folder = item.path.parent.name
        return FIRST.index(folder) if folder in FIRST else len(FIRST), item.path

    items.sort(key=place)
    for item in items:
        if _is_slow(item.path):
            item.add_marker("slow")


gc.disable()  # it would look again and again through what is imported during collection


def pytest_collection_finish() -> None:
    """Hide what was imported from the garbage collector, which would look through it often."""
    gc.collect()
    gc.freeze()
    gc.enable()


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
    """Steps of about 5 ms, 256 blocks of 16 tokens, requests of up to 1024 tokens.

    Its parameter, if it has one, is options of `EngineCore`.
    """
    with running_engine(tmp_path, with_tokens=False, **getattr(request, "param", {})) as engine:
        yield engine


@pytest.fixture
def client(live_engine: LiveEngine) -> Iterator[ControlClient]:
    with ControlClient(live_engine.endpoint) as client:
        yield client


@pytest.fixture
def telling_engine(tmp_path: Path) -> Iterator[LiveEngine]:
    """A `live_engine` with prompts and outputs in its telemetry."""
    with running_engine(tmp_path, with_tokens=True) as engine:
        yield engine


@pytest.fixture(scope="session", autouse=True)
def _a_machine_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs, recent files and sockets of the tests, and of what they start, in folders of theirs.

    And no server is looked for at the ports where others on this machine may have one.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="step-") as runtime,
    ):
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        patch.setattr(local_servers, "listening_ports", lambda: ())
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


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like pytest's own, without the test's name: paths of sockets must be short."""
    return tmp_path_factory.mktemp("t")


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
        hidden = ("NO_COLOR", "COLUMNS", "LINES")  # a terminal reports its size
        usual = {name: value for name, value in os.environ.items() if name not in hidden}
        usual |= {**_TERMINAL, **environment}
        started.append(Terminal(list(arguments), columns, rows, usual, cwd))
        return started[-1]

    yield start
    for each in started:
        each.close()


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
            write_checkpoint(written[key], family, changes)
        return written[key]

    return make


@pytest.fixture(scope="session")
def greedy_oracle() -> Callable[[Path], Callable[[Sequence[int], int], list[int]]]:
    """What transformers' `generate` adds to a prompt in fp32: by folder, then prompt and length."""
    import torch
    from transformers import AutoModelForCausalLM

    def of(folder: Path) -> Callable[[Sequence[int], int], list[int]]:
        kind = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(folder, **kind).eval()
        options = {"do_sample": False, "suppress_tokens": None, "eos_token_id": None}

        def generate(prompt: Sequence[int], num_output: int) -> list[int]:
            ids = torch.tensor([list(prompt)])
            lengths = {"max_new_tokens": num_output, "min_new_tokens": num_output}
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **lengths, **options
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
    """Starts `stepscope serve` with these arguments; ends it after the test."""
    started: list[HttpServer] = []

    def start(*arguments: str, **environment: str) -> HttpServer:
        folder = tmp_path / f"http-{len(started)}"
        started.append(HttpServer(folder, *arguments, **environment))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def served(live_engine: LiveEngine, http_server: Callable[..., HttpServer]) -> HttpServer:
    """An HTTP server of the simulated engine: steps of 2 ms, 64 seats."""
    return http_server("serve", "--http-for", live_engine.endpoint.control)


@pytest.fixture(scope="session")
def recorded_to() -> Callable[..., AbstractContextManager[Received]]:
    """`with recorded_to(path) as source`: the file holds the messages passed to `source.take`."""

    @contextmanager
    def recorded(
        path: Path, slo: SLO | None = None, levels: Levels | None = None
    ) -> Iterator[Received]:
        source = Received(History() if slo is None else History(slo))
        recorder = Recorder(source, path, levels or {})
        yield source
        recorder.stop()
        assert recorder.error is None, recorder.error

    return recorded


@pytest.fixture
def still_source() -> Callable[..., Received]:
    """Makes sources of a busy simulated session: preemptions, prefix hits, a smaller budget."""

    return lambda num_steps=400: Received(busy_history(num_steps), "still")


@pytest.fixture
def source(still_source: Callable[..., Received]) -> Received:
    return still_source()
