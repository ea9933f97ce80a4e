"""`stepscope set`, `snapshot` and `load` against a running engine."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient, EngineUnreachable
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import Pause, Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.local_engines import is_refused
from stepscope.engine.workload.load import LoadGenerator, LoadReport
from tests.support.engines.engine_process import EngineProcess
from tests.support.waiting import wait_for


def test_set_prints_old_and_new_value_and_the_effective_step(
    live_engine: Any, stepscope: Callable[..., Any]
) -> None:
    endpoint = live_engine.endpoint.control
    done = stepscope("set", endpoint, "max_num_batched_tokens=512", "order=arrival")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "max_num_batched_tokens: 2048 -> 512",
        "order: decode_first -> arrival",
        "holds from step 0 (knobs version 1)",
    ]
    again = stepscope("set", endpoint, "max-num-batched-tokens=512")
    assert "nothing to change" in again.stdout
    tried = stepscope("set", endpoint, "watermark=0.2", "--dry-run")
    assert "nothing was changed" in tried.stdout
    assert live_engine.core.scheduler.knobs.watermark == 0.0


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("budget=5", "no knob is called 'budget'; there are: max_num_batched_tokens, "),
        ("max_num_seqs=65", "between 1 and 64, not 65"),
        ("max_num_seqs=lots", "takes a whole number, not 'lots'"),
        ("order=random", "one of decode_first, arrival, not 'random'"),
        ("enable_prefix_caching=maybe", "takes true or false"),
    ],
)
def test_set_with_an_invalid_value_changes_nothing(
    live_engine: Any, stepscope: Callable[..., Any], assignment: str, said: str
) -> None:
    endpoint = live_engine.endpoint.control
    before = live_engine.core.scheduler.knobs
    done = stepscope("set", endpoint, "watermark=0.2", assignment)
    assert done.exit_code == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert live_engine.core.scheduler.knobs == before


def test_the_snapshot_command_prints_one_json_document_or_a_summary(
    live_engine: Any, stepscope: Callable[..., Any]
) -> None:
    endpoint = live_engine.endpoint.control
    document = json.loads(stepscope("snapshot", endpoint, "--json").stdout)
    assert document["info"]["engine_id"] == live_engine.core.info.engine_id
    assert document["knobs"]["max_num_batched_tokens"] == 2048
    assert document["kv"]["empty"] == 256
    summary = stepscope("snapshot", endpoint)
    assert summary.exit_code == 0
    for said in ("state      idle, step -1", "256 empty", "device     ", "chunked_prefill=true"):
        assert said in summary.stdout


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_cannot_be_written_gives_a_one_line_error(
    live_engine: Any, options: list[str]
) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "stepscope.tui.cli", "snapshot", *options]
        command.append(live_engine.endpoint.control)
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    said = "stepscope: error: standard output cannot be written: No space left on device\n"
    assert done.stderr == said


def kv_counts(live_engine: Any) -> list[wire.KVCounts]:
    messages = [wire.decode(f.payload) for f in live_engine.publisher.replay(0, 4000).frames]
    return [m.kv for m in messages if isinstance(m, wire.StepRecord) and m.kv is not None]


def test_load_replays_a_trace_cuts_long_requests_and_hits_shared_prefixes(
    live_engine: Any, stepscope: Callable[..., Any], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 500 * i, "input_length": 900 + i, "output_length": 4, "hash_ids": [7, i]}
        for i in range(6)
    ]
    rows.append({"timestamp": 0, "input_length": 90_000, "output_length": 7, "hash_ids": []})
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--trace", str(trace), "--time-scale", "0.01"]
    done = stepscope("load", live_engine.endpoint.control, *arguments)
    assert done.exit_code == 0, done.stderr
    assert "7 requests of a trace; 1 are cut to max_model_len=1024" in done.stdout
    assert "7 sent, 7 finished" in done.stdout
    assert "cut       1 of 7" in done.stdout
    # Five of the six find the 512-token block of the first, give or take its edges.
    assert sum(each.hit_tokens for each in kv_counts(live_engine)) >= 5 * 480
    fewer = stepscope("load", live_engine.endpoint.control, *arguments, "--limit", "2")
    assert "2 sent, 2 finished" in fewer.stdout


def test_load_keeps_max_concurrency_and_ends_after_the_given_seconds(
    live_engine: Any, stepscope: Callable[..., Any]
) -> None:
    most = 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.001):
            most = max(most, len(live_engine.core.scheduler.requests))

    watcher = threading.Thread(target=watch)
    watcher.start()
    limits = ["--rate", "1000", "--max-concurrency", "3", "--seconds", "0.5"]
    done = stepscope("load", live_engine.endpoint.control, *limits, "--document-share", "0")
    stop.set()
    watcher.join()
    assert done.exit_code == 0, done.stderr
    assert 1 <= most <= 3
    assert live_engine.core.scheduler.requests == {}


def test_load_fails_when_the_engine_refuses_requests(
    live_engine: Any, stepscope: Callable[..., Any]
) -> None:
    live_engine.core.draining = True
    done = stepscope("load", live_engine.endpoint.control, "--num-requests", "3", "--rate", "1000")
    assert done.exit_code == 1
    assert "refused   3: the engine takes no new requests" in done.stdout
    assert "refused 3 requests" in done.stderr


@pytest.fixture
def keyless(tmp_path: Path) -> Iterator[EngineProcess]:
    """A simulated engine that already answers."""
    with EngineProcess(f"{tmp_path}/keyless") as engine:
        engine.wait()
        yield engine


@pytest.mark.parametrize(
    ("number", "patience_s", "said"),
    [
        (signal.SIGSTOP, 30.0, None),
        (signal.SIGSTOP, 3.0, "has answered nothing for .* s; 2 requests are lost"),
        (signal.SIGKILL, 30.0, "is gone: killed or crashed"),
    ],
)
def test_load_waits_a_while_for_a_stopped_engine_and_not_for_a_killed_one(
    keyless: EngineProcess,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    patience_s: float,
    said: str | None,
) -> None:
    monkeypatch.setattr("stepscope.engine.workload.load.PATIENCE_S", patience_s)
    submit = Submit(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=900))
    arrival = SimpleNamespace(offset_s=0.0, is_cut=False, submit=lambda: submit)
    resume = threading.Timer(5.0, keyless.send, (signal.SIGCONT,))

    def stop_once_sent(report: LoadReport) -> None:
        if report.num_sent == 2 and resume.ident is None:
            keyless.send(number)
            resume.start()

    with ControlClient(keyless.endpoint, timeout_s=600) as client:  # longer than any test may take
        generator = LoadGenerator(client, iter([arrival, arrival]), on_progress=stop_once_sent)
        if said is None:
            assert generator.run().num_finished == 2
        else:
            with pytest.raises(EngineUnreachable, match=said):
                generator.run()
            assert (generator.report.num_sent, generator.report.num_open) == (2, 2)
    resume.cancel()


def test_connections_to_a_killed_engine_are_refused_but_not_to_a_stopped_one(
    keyless: EngineProcess, tmp_path: Path
) -> None:
    assert not is_refused(keyless.endpoint)
    keyless.send(signal.SIGSTOP)
    assert not is_refused(keyless.endpoint)
    keyless.kill()
    assert is_refused(keyless.endpoint)
    assert is_refused(Endpoint.parse(f"ipc://{tmp_path}/nobody"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = Endpoint.parse(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        assert is_refused(address)  # bound, but nobody listens
        taken.listen()
        assert not is_refused(address)


def test_ctrl_c_ends_load_aborts_its_requests_and_still_prints_the_summary(
    live_engine: Any, tmp_path: Path
) -> None:
    with ControlClient(live_engine.endpoint) as client:
        client.ask(Pause())  # so that requests are surely running
    command = ["load", live_engine.endpoint.control, "--rate", "200", "--num-requests", "20"]
    program, pipe = [sys.executable, "-m", "stepscope.tui.cli", *command], subprocess.PIPE
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    process = subprocess.Popen(program, stdout=pipe, stderr=pipe, text=True, env=env)
    try:
        wait_for(lambda: len(live_engine.core.scheduler.requests) >= 20)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "20 sent, 0 finished, 20 aborted" in stdout
    assert "interrupted; 20 unfinished requests were aborted" in stderr
    assert "Traceback" not in stderr
    assert live_engine.core.scheduler.requests == {}


def test_load_resets_the_prefix_cache_so_that_equal_loads_are_equal_work(
    live_engine: Any, stepscope: Callable[..., Any]
) -> None:
    endpoint = live_engine.endpoint.control
    same = ["--num-requests", "6", "--rate", "1000", "--seed", "3", "--output-tokens", "4"]

    def hits() -> int:
        return sum(each.hit_tokens for each in kv_counts(live_engine))

    first = stepscope("load", endpoint, *same)
    assert first.exit_code == 0, first.stderr
    own = hits()
    again = stepscope("load", endpoint, *same, "--reset-prefix-cache")
    assert again.stdout.splitlines()[0].startswith("the prefix cache is reset: ")
    assert hits() - own <= own  # without the reset, all of it would have been hits
    warm = hits()
    assert stepscope("load", endpoint, *same).exit_code == 0
    assert hits() - warm > own
    assert "reset the prefix cache" in stepscope("snapshot", "--audit", endpoint).stdout
