"""Load and faults: many streams, clients that vanish or do not read, processes that are killed."""

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.http.settings import HttpSettings, check_private, parse_address
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import Pause, Resume, StepOnce, Submit
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import Submitted
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Aborted, EngineStatus, StepRecord
from stepscope.tui.cli.engines import serve as http_process
from stepscope.tui.cli.engines.serve import HttpProcess
from tests.support.engines.engine_process import EngineProcess
from tests.support.waiting import wait_for

LONG = {"prompt": [5] * 20, "max_tokens": 900, "ignore_eos": True, "stream": True}


def events_of(text: str) -> list[Any]:
    """The payloads of a stream up to `[DONE]`."""
    *events, done = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def send_request(url: str, body: object, receive_buffer: int | None = None) -> socket.socket:
    """A connection on which a request was sent and nothing read."""
    where = urlsplit(url)
    payload = json.dumps(body).encode()
    connection = socket.socket()
    connection.settimeout(30)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((where.hostname, where.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(payload) + payload
    )
    return connection


def open_stream(url: str, body: object, receive_buffer: int | None = None) -> socket.socket:
    """A connection on which a request was sent and the head of its answer read."""
    connection = send_request(url, body, receive_buffer)
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(65536)
    assert head.startswith(b"HTTP/1.1 200"), head
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """All that arrives until the stream says that it is done."""
    text = b""
    while b"[DONE]" not in text[-100:]:
        received = connection.recv(65536)
        assert received, text[-300:]
        text += received
    return text


def published(live_engine: Any) -> list[Any]:
    replayed = live_engine.publisher.replay(0, 10_000)
    return [wire.decode(frame.payload) for frame in replayed.frames]


async def test_200_streams_at_once_all_get_every_token(live_engine: Any, served: Any) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=60, limits=limits) as client:

        async def stream(number: int) -> list[Any]:
            body = {**LONG, "prompt": [number] * 10, "max_tokens": 10 + number % 7}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return events_of(answer.text)

        answers = await asyncio.gather(*(stream(number) for number in range(200)))
    for number, events in enumerate(answers):
        assert len(events) == 10 + number % 7
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert live_engine.core.scheduler.requests == {}


@pytest.mark.parametrize("stream", [True, False])
def test_blocks_of_a_client_that_hangs_up_are_freed_within_two_steps(
    live_engine: Any, served: Any, stream: bool
) -> None:
    core = live_engine.core
    connection = send_request(served.url, {**LONG, "stream": stream})
    wait_for(lambda: len(core.scheduler.running) == 1, "it runs")
    # A second request keeps the steps coming.
    other = open_stream(served.url, LONG)
    wait_for(lambda: len(core.scheduler.running) == 2, "both run")
    with ControlClient(live_engine.endpoint) as client:
        client.ask(Pause())  # so that the steps after the hang-up can be counted
        (gone, stays) = sorted(core.scheduler.requests)
        connection.close()
        wait_for(
            lambda: core.inbox.qsize() > 0 or gone not in core.scheduler.requests, "the abort comes"
        )
        first_step = core.next_step
        client.ask(Resume())
        wait_for(lambda: core.next_step > first_step + 5, "some steps")
    assert set(core.scheduler.requests) <= {stays}
    for message in published(live_engine):
        if isinstance(message, StepRecord) and message.step >= first_step + 2:
            assert gone not in {row.request_id for row in message.batch or ()}
            assert gone not in {move.owner for move in message.moves}
    other.close()
    wait_for(lambda: not core.scheduler.requests, "both are gone")
    assert core.scheduler.kv.counts().used == 0


def test_a_client_that_does_not_read_delays_no_other_and_loses_no_token(
    live_engine: Any, served: Any
) -> None:
    slow = open_stream(served.url, {**LONG, "n": 3}, receive_buffer=4096)
    for number in range(3):
        body = {**LONG, "prompt": [number] * 10, "max_tokens": 30}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
        assert len(events_of(answer.text)) == 30
    wait_for(lambda: not live_engine.core.scheduler.requests, "all is generated", 60)
    metrics = httpx.get(f"{served.url}/metrics").text
    assert "stepscope_http_requests_in_flight 1.0" in metrics  # it could not be sent
    text = rest_of(slow)
    slow.close()
    assert text.count(b'"finish_reason":"length"') == 3


@pytest.mark.parametrize("live_engine", [{"max_waiting": 0}], indirect=True)
def test_a_full_queue_is_answered_with_429_and_retry_after(live_engine: Any, served: Any) -> None:
    refused = httpx.post(f"{served.url}/v1/completions", json=LONG, timeout=30)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")


def test_a_draining_engine_is_answered_with_503(live_engine: Any, served: Any) -> None:
    live_engine.core.draining = True
    refused = httpx.post(f"{served.url}/v1/completions", json=LONG, timeout=30)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


def test_requests_above_the_concurrency_limit_are_answered_with_429(
    live_engine: Any, http_server: Callable[..., Any]
) -> None:
    server = http_server(
        "serve", "--http-for", live_engine.endpoint.control, "--max-concurrent-requests", "2"
    )
    held = [open_stream(server.url, LONG) for _ in range(2)]
    refused = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "too_many_requests"
    assert httpx.get(f"{server.url}/health").status_code == 200
    for connection in held:
        connection.close()

    def is_taken() -> bool:
        short = {**LONG, "max_tokens": 1}
        return httpx.post(f"{server.url}/v1/completions", json=short).status_code == 200

    wait_for(is_taken, "a place becomes free")


def test_a_killed_http_server_ends_its_requests_and_leaves_the_engine_running(
    live_engine: Any, served: Any
) -> None:
    core = live_engine.core
    with ControlClient(live_engine.endpoint) as client:
        # One runs and one waits, and no token is on its way to either.
        client.set_knobs({"max_num_seqs": 1}, who="test")
        connections = [open_stream(served.url, LONG) for _ in range(2)]
        own = client.send(Submit(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=5)))
        client.ask(Pause())
        assert len(core.scheduler.requests) == 3
        served.process.send_signal(signal.SIGKILL)
        served.process.wait()
        wait_for(lambda: core.inbox.qsize() == 0 and len(core.scheduler.requests) == 1, "aborts")
        client.ask(Resume())
        wait_for(lambda: not core.scheduler.requests, "the other client's request finishes")
        replies = []
        while (received := client.receive(0.2)) is not None:
            replies.append(received)
    assert isinstance(replies[0][1], Submitted)
    assert {command_id for command_id, _ in replies} == {own}
    told = [m for m in published(live_engine) if isinstance(m, StepRecord | EngineStatus)]
    assert sum(isinstance(event, Aborted) for m in told for event in m.events) == 2
    for connection in connections:
        connection.close()


def test_ctrl_c_ends_open_streams_with_an_error_event_and_exits_with_0(
    live_engine: Any, served: Any
) -> None:
    with ControlClient(live_engine.endpoint) as client:
        connection = open_stream(served.url, LONG)
        client.ask(Pause())  # it cannot finish within the grace period
        served.process.send_signal(signal.SIGINT)
        assert b"shutting down" in rest_of(connection)
        assert served.process.wait(60) == 0
        assert "Traceback" not in served.stderr()
        assert "is gone" not in served.stderr()  # the engine still works
        wait_for(lambda: not live_engine.core.scheduler.requests, "the request ends")
        client.ask(Resume())


@pytest.fixture
def serve(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], http_server: Callable[..., Any]
) -> Callable[..., Any]:
    """Starts `stepscope serve --http` with a tiny model, always at the same endpoint."""

    def start(address: str = "0") -> Any:
        server = http_server(
            *("serve", "--endpoint", f"{tmp_path}/own"),
            *("--model", str(tiny_checkpoint("llama")), "--served-model-name", "tiny"),
            *("--threads", "1", "--kv-memory", "8MB", "--dtype", "float32"),
            address=address,
        )
        server.endpoint = f"{tmp_path}/own"
        return server

    return start


def http_process_of(server: Any) -> psutil.Process:
    """The HTTP process; the socket is bound and accepts connections before it exists."""
    parent = psutil.Process(server.process.pid)
    wait_for(lambda: bool(parent.children()), "it starts its HTTP process")
    (child,) = parent.children()
    return child


def status_of(url: str) -> int:
    """The status code of its health; 0 if nothing answers."""
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code
    except httpx.TransportError:
        return 0


def test_serve_restarts_its_http_process_and_ends_it_when_serve_ends(
    serve: Callable[..., Any],
) -> None:
    server = serve()
    assert status_of(server.url) == 200
    first = http_process_of(server)
    first.kill()
    # Connections wait in the listening socket meanwhile: none is refused.
    wait_for(lambda: status_of(server.url) == 200, "it serves again")
    second = http_process_of(server)
    assert second.pid != first.pid
    assert "ended by SIGKILL; starting it again" in server.stderr()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert not second.is_running()
    assert status_of(server.url) == 0


def test_sigkill_of_serve_ends_its_streams_and_http_process_and_frees_the_port(
    serve: Callable[..., Any],
) -> None:
    server = serve()
    child = http_process_of(server)
    # One client reads and one does not: neither keeps the process alive.
    body = {**LONG, "max_tokens": 480}
    with ControlClient(server.endpoint) as client:
        client.ask(Pause())
        deaf = send_request(server.url, body, receive_buffer=4096)
        connection = send_request(server.url, body)
        wait_for(lambda: len(client.snapshot().requests) == 2, "both have come")
        client.ask(StepOnce(n=400))  # neither finishes
        wait_for(lambda: client.snapshot().step >= 399, "the steps are done")
    server.process.send_signal(signal.SIGKILL)
    with connection:
        text = rest_of(connection)
    assert b'"code":"engine_unavailable"' in text[-400:]
    wait_for(lambda: not child.is_running() or child.status() == "zombie", "it ends", 5)
    deaf.close()
    assert status_of(server.url) == 0
    # Started again with the same options at the same port.
    again = serve(urlsplit(server.url).netloc)
    wait_for(lambda: status_of(again.url) == 200, "the new one serves")
    assert again.url == server.url


def test_serve_waits_for_the_port_of_a_server_killed_just_before(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_process, "_LEAVING_S", 60.0)  # the machine may be busy
    server = serve()
    child = http_process_of(server)
    child.suspend()  # so that it still has the port
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    threading.Timer(0.5, child.resume).start()
    again = HttpProcess(HttpSettings(bind=urlsplit(server.url).netloc))
    again.stop()
    assert again.address == urlsplit(server.url).netloc


def test_a_standalone_http_server_finds_the_next_engine_at_its_endpoint(
    http_server: Callable[..., Any], tmp_path: Path
) -> None:
    endpoint = f"{tmp_path}/alone"
    server = http_server("serve", "--http-for", endpoint)
    assert status_of(server.url) == 503
    for _ in range(2):
        with EngineProcess(endpoint) as engine:
            wait_for(lambda: status_of(server.url) == 200, "it finds the engine")
            with open_stream(server.url, LONG) as connection:
                engine.kill()
                assert b'"code":"engine_unavailable"' in rest_of(connection)
            wait_for(lambda: status_of(server.url) == 503, "it has lost the engine")


def test_the_api_key_is_in_no_process_list(live_engine: Any) -> None:
    process = HttpProcess(HttpSettings(bind="0", api_key="sesam"))
    process.start(live_engine.endpoint.control)
    try:
        url = f"http://{process.address}"
        wait_for(lambda: status_of(url) == 200, "it serves")
        assert httpx.get(f"{url}/v1/models").status_code == 401
        lines = [" ".join(each.cmdline()) for each in psutil.Process().children()]
        assert lines
        assert "sesam" not in "".join(lines)
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("said", "binds"),
    [
        ("can be reached from other machines", ["0.0.0.0:8000", "[::]:8000", "example.org:8000"]),
        ("is not HOST:PORT", ["localhost", "127.0.0.1:70000", "::1:8000", ""]),
    ],
)
def test_an_invalid_or_public_bind_address_is_refused(said: str, binds: list[str]) -> None:
    for bind in binds:
        with pytest.raises(ConfigError, match=said):
            check_private(parse_address(bind), "")


def test_bind_addresses_are_parsed_in_every_usual_form() -> None:
    forms = {"8000": "127.0.0.1:8000", ":0": "127.0.0.1:0"}
    for bind in ("8000", ":0", "localhost:1", "[::1]:80", "0.0.0.0:80"):
        address = parse_address(bind)
        assert address.text == forms.get(bind, bind)
        check_private(address, "a key lets any address be bound")


def test_a_port_in_use_is_reported_before_a_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:"):
            HttpProcess(HttpSettings(bind=f"127.0.0.1:{taken.getsockname()[1]}"))
