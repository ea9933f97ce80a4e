"""What `stepscope serve` prints once its engine answers, and what it refuses before."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.process import serve as engine_serve
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import ConfigError, Knobs, Limits
from stepscope.engine.protocol.wire import StepCosts
from stepscope.engine.telemetry.sender import is_compiled
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.keys import KeyFolder
from stepscope.tui.cli.engines import serve as serve_command
from stepscope.tui.cli.shared.connect import choose
from stepscope.tui.cli.shared.process import expected
from stepscope.tui.settings.cli_errors import WRONG_USAGE, WrongUsage
from tests.support.engines.simulated_run import simulated_info
from tests.support.waiting import wait_for


@pytest.fixture(autouse=True)
def own_folder(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    monkeypatch.setattr(serve_command, "prepare_process", lambda: None)


@pytest.mark.parametrize("endpoint", ["e1", "/run/x1", "/run/e1", "tcp://127.0.0.1:5791"])
def test_serve_prints_an_address_to_watch_that_reaches_the_engine(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    control = Endpoint.parse(endpoint).control
    limits = Limits(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)
    info = simulated_info(limits, 8, 16, seed=1)
    costs = StepCosts(num_streams=8, decode_ms=2.5, num_prefill_tokens=400, prefill_ms=1234.0)
    info = msgspec.structs.replace(info, name="e1", control_endpoint=control, step_costs=costs)

    def started(*arguments: Any, ready: Callable[..., None], **options: Any) -> None:
        ready(info)

    monkeypatch.setattr(engine_serve, "serve", started)
    serve_command.serve(flags={})
    out = capsys.readouterr().out
    assert "decode of 8 streams 2.5 ms a step, prefill of 400 tokens 1,234 ms" in out.splitlines()
    said = out.partition("stepscope top ")[2].split()[0]
    assert choose(said, "{}").control == control
    assert (said == "e1") == (endpoint == "e1")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"kv_memory": "12QB"}, "kv_memory is auto, a size (512MB, 1.5GiB) or a share (20%), not"),
        ({"kv_memory": "150%"}, "kv_memory must be above 0% and at most 100%, not 150%"),
        ({"replay_memory": "20%"}, "replay_memory is a size (256MB), not '20%'"),
        ({"device": "tpu"}, "device is auto, cpu, cuda or cuda:N, not 'tpu'"),
        ({"max_num_seqs": "999"}, "max_num_seqs=999 is above seq_capacity=256: raise"),
        ({"token_capacity": "16"}, "max_num_batched_tokens=2048 is above token_capacity=16: raise"),
        ({"enable_chunked_prefill": False, "max_model_len": "4096"}, "of at least max_model"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(
    flags: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "stepscope.engine.execution.loading", None)  # with torch
    with pytest.raises(ConfigError) as failed:
        serve_command.serve(flags=flags)
    exit_code, message = expected(failed.value) or (0, "")
    assert exit_code == WRONG_USAGE
    assert said in message


def test_serve_takes_the_model_as_an_argument_too() -> None:
    with pytest.raises(ConfigError, match="device is auto"):
        serve_command.serve("demo", flags={"model": "demo", "device": "tpu"})
    with pytest.raises(WrongUsage, match="MODEL demo and --model smollm2: give one of them"):
        serve_command.serve("demo", flags={"model": "smollm2"})


def test_a_budget_too_small_for_the_model_is_refused_before_its_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stepscope.engine.models import loader

    monkeypatch.setattr(loader, "load_model", lambda *_: pytest.fail("the weights are read"))
    config, knobs = EngineConfig(device="cpu"), Knobs(enable_chunked_prefill=False)
    opened = engine_serve.open_engine(config, knobs, progress=lambda what, share: None)
    with pytest.raises(ConfigError, match="at least max_model_len=8192, not 2048"), opened:
        pass


@pytest.mark.slow
def test_a_replay_ring_too_large_for_memory_is_refused_in_one_line() -> None:
    config = EngineConfig(
        model="random:llama-tiny", device="cpu", max_model_len=64, kv_memory="4MB",
        replay_steps=10**15,
    )  # fmt: skip
    opened = engine_serve.open_engine(config, Knobs(), progress=lambda what, share: None)
    with pytest.raises(ConfigError, match=r"no memory for replay_steps=10{15}, .*256MB"), opened:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at in /proc")
def test_an_engine_that_cannot_bind_its_address_leaves_no_thread_behind(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KeyFolder(runtime_folder / "keys")
    keys.path.mkdir(mode=0o700)

    def refuse(*arguments: Any, **options: Any) -> None:
        while is_compiled() and "telemetry" not in thread_names():
            time.sleep(0.01)  # it takes its name when it gets to run
        raise ConfigError("bad_endpoint", "cannot listen")

    monkeypatch.setattr(engine_serve, "ControlServer", refuse)
    config = EngineConfig(
        model="random:llama-tiny", device="cpu", max_model_len=64, kv_memory="4MB",
        keys=str(keys.path),
    )  # fmt: skip
    opened = engine_serve.open_engine(config, Knobs(), progress=lambda what, share: None)
    # The error holds on to all that was being made.
    with pytest.raises(ConfigError, match="cannot listen"), opened:
        pass
    # The system may list a thread for a moment after it was joined.
    wait_for(lambda: "telemetry" not in thread_names(), "the thread that sends ends")


def thread_names() -> set[str]:
    names = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended while they were listed
            names.add((task / "comm").read_text().strip())
    return names
