"""What vLLM's API servers tell of requests, from HTTP to the chunk that went out."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from time import monotonic_ns
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from stepscope.engine.adapters.attached.reports import FrontReport, ProcessReports
from stepscope.engine.adapters.attached.step_recorder import StepRecorder
from stepscope.engine.adapters.vllm import front_end, plugin
from stepscope.engine.adapters.vllm.front_end import FrontEndWatch
from stepscope.engine.protocol.wire import Aborted, Finished, FrontEnd, TakenRow
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.front import FrontSums, served_life, shares_of
from stepscope.recordings.state.session import SessionState
from tests.adapters import vllm_front_end
from tests.adapters.conftest import Attach, published
from tests.adapters.played_vllm import PlayedScheduler
from tests.adapters.vllm_front_end import AT_ONCE, STREAMED, Processor, output, request
from tests.attached.published import Published


@pytest.fixture
def queue_class() -> type[Any]:
    queue = type("Queue", (vllm_front_end.Queue,), {})
    front_end._hook_queues(queue)
    return queue


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[socket.socket]:
    """The engine's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "front"))
        listening.setblocking(False)
        yield listening


def reports(heard: socket.socket) -> list[FrontReport]:
    found = []
    with suppress(BlockingIOError):
        while True:
            found.append(msgspec.msgpack.decode(heard.recv(1 << 20), type=FrontReport))
    return found


Watched = tuple[FrontEndWatch, Processor]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """The watch of API server 1, and what it watches. On a slow machine, too, a test flushes it."""
    monkeypatch.setattr(front_end, "_FLUSH_S", 3600.0)
    watch, processor = FrontEndWatch(1, [tmp_path / "front"]), Processor()
    watch.hook(processor)
    return watch, processor


@pytest.mark.parametrize("kind", [STREAMED, AT_ONCE])
async def test_a_chunk_came_with_its_batch_and_went_out_when_http_had_written_it(
    queue_class: type[Any], watched: Watched, heard: socket.socket, kind: object
) -> None:
    watch, processor = watched
    reasons = (None, None, "length") if kind is STREAMED else ("length",)
    written: list[int] = []
    queue, before_ns = queue_class(), monotonic_ns()
    front_end._http_ns.set(before_ns)
    processor.add_request(request("a", kind), None, None, 0, queue)
    streamed = vllm_front_end.stream(queue, lambda _: written.append(monotonic_ns()))
    task = asyncio.create_task(streamed)
    for reason in reasons:
        processor.process_outputs([output("a", reason)], 0.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await task
    watch._flush()
    [told] = reports(heard)
    assert (told.front.number, told.names) == (1, ["a"])
    [row] = told.front.taken
    assert row.http_ns == before_ns <= row.sent_ns
    assert row.is_streamed is (kind is STREAMED)
    chunks = list(told.front.chunks())
    assert len(chunks) == len(written) == len(reasons)
    for (number, came_ns, out_ns), written_ns in zip(chunks, written, strict=True):
        assert number == row.request_id
        # Times are in units of 20 us.
        assert row.sent_ns - 20_000 <= came_ns <= written_ns <= out_ns + 40_000
        assert out_ns <= monotonic_ns()


async def test_a_stop_string_and_a_client_that_leaves_are_told_at_once_and_nothing_after_an_error(
    queue_class: type[Any], watched: Watched, heard: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    watch, processor = watched
    for name in ("stops", "leaves", "stays"):
        processor.add_request(request(name), None, None, 0, queue_class())
    processor.stopped.add("stops")
    processor.process_outputs([output("stops"), output("leaves")], 0.0)
    processor.abort_requests(["leaves"], internal=True)
    assert [each.front.ended for each in reports(heard)] == [[(0, "stop")], [(1, "abort")]]
    watch._chunks = None  # type: ignore[assignment]
    answer = vllm_front_end.generate(processor.queues["stays"])
    for _ in range(2):
        processor.process_outputs([output("stays")], 0.0)
        await anext(answer)
    processor.process_outputs([output("stays", "length")], 0.0)
    assert [each async for each in answer][-1].finished
    assert "process_outputs" not in vars(processor)
    assert caplog.text.count("watches this API server no more") == 1


async def test_requests_that_vllm_refuses_have_no_chunk_and_the_next_one_is_told(
    queue_class: type[Any], watched: Watched, heard: socket.socket
) -> None:
    watch, processor = watched
    for names in (("alone",), ("choice 0", "choice 1")):  # two choices of one request
        queue = queue_class()
        for index, name in enumerate(names):
            processor.add_request(request(name), None, None, index, queue)
        processor.process_outputs([output(name, "error") for name in names], 0.0)
        with pytest.raises(ConnectionRefusedError):
            await vllm_front_end.stream(queue, lambda _: None)
    queue = queue_class()
    processor.add_request(request("later"), None, None, 0, queue)
    processor.process_outputs([output("later", "length")], 0.0)
    await vllm_front_end.stream(queue, lambda _: None)
    watch._flush()
    [told] = reports(heard)
    assert told.names == ["alone", "choice 0", "choice 1", "later"]
    assert [number for number, _, _ in told.front.chunks()] == [3]
    assert told.front.ended == []


async def test_reports_wait_while_the_engines_socket_is_full_and_none_is_told_twice(
    tmp_path: Path, heard: socket.socket
) -> None:
    watch = FrontEndWatch(0, [tmp_path / "front", tmp_path / "no such engine"])
    for number in range(40):
        watch._ended = [(number, "stop")]
        watch._flush()
    assert watch._sender._unsent
    told = []
    while watch._sender._unsent:
        told += reports(heard)
        watch._flush()
    told += reports(heard)
    assert sorted(each.front.ended[0][0] for each in told) == list(range(40))


class Front:
    """An API server beside a played engine. It delivers each token a little later."""

    def __init__(self, path: Path, number: int, pid: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._path, self._number, self._pid = str(path), number, pid
        self._numbers: dict[str, int] = {}

    def send(self, front: FrontEnd, names: list[str]) -> None:
        payload = msgspec.msgpack.encode(FrontReport(self._pid, front, names))
        self._socket.sendto(payload, self._path)

    def take(self, name: str) -> None:
        number = self._numbers[name] = len(self._numbers)
        now_ns = monotonic_ns()
        row = TakenRow(number, now_ns - 3_000_000, now_ns, is_streamed=True)
        self.send(FrontEnd.of(self._number, [row], [], []), [name])

    def deliver(self, names: list[str]) -> None:
        now_ns = monotonic_ns()
        chunks = [(self._numbers[name], now_ns, now_ns + 2_000_000) for name in names]
        self.send(FrontEnd.of(self._number, [], chunks, []), [])

    def end(self, name: str, reason: str) -> None:
        self.send(FrontEnd.of(self._number, [], [], [(self._numbers[name], reason)]), [])


def played(attach: Attach, tmp_path: Path, stopped: set[str]) -> list[tuple[int, Any]]:
    """A recorded schedule with aborts, each of its requests at one of two API servers."""
    scheduler = PlayedScheduler("0.32.0", "abort")
    attachment = attach(scheduler)
    fronts = [Front(tmp_path / "vllm.reports", number, 7) for number in (0, 1)]
    of: dict[str, Front] = {}
    num_out: dict[str, int] = {}

    calls = scheduler.play()
    for line in scheduler.calls:
        if line["call"] == "add":
            of[line["id"]] = fronts[int(line["id"]) % 2]
            of[line["id"]].take(line["id"])
        for name in line["ids"] if line["call"] == "finish" else ():
            of[name].end(name, "stop" if name in stopped else "abort")
        next(calls)
        out = {name: each.num_output_tokens for name, each in scheduler._all.items()}
        for front in fronts:
            got = [name for name in out if out[name] > num_out.get(name, 0) and of[name] is front]
            front.deliver(got)
        num_out = out
    attachment.close()
    return published(attachment)


def test_a_stop_string_is_no_abort_and_a_client_that_left_is(
    attach: Attach, tmp_path: Path
) -> None:
    stopped = {"1", "5"}
    found = Published([message for _, message in played(attach, tmp_path, stopped)])
    finished = {found.names[each.request_id]: each.reason for each in found.of(Finished)}
    aborted = {found.names[each.request_id]: each.reason for each in found.of(Aborted)}
    assert {name for name, reason in finished.items() if reason == "stop"} == stopped
    assert aborted == dict.fromkeys(["0", "2", "3", "6"], "its client left")


def test_parts_by_both_clocks_sum_up_to_what_was_served(attach: Attach, tmp_path: Path) -> None:
    state, sums, served = SessionState(), FrontSums(), {}
    for _, message in played(attach, tmp_path, set()):
        outcome = state.apply(message)
        sums.take(message, state.requests)
        if outcome is not None:
            served.update(outcome.served_ttft_ns)
    views: list[Any] = [view for view in state.requests.values() if view.num_output_tokens]
    for view in views:
        front, shares = view.front, shares_of(view)
        assert front.number == int(view.client_id) % 2
        assert shares["front end"] == 3_000_000
        inside_ns = view.first_token_ns - front.sent_ns
        outside_ns = shares["front end"] + shares["first delivery"]
        assert served[view.request_id] == shares["served TTFT"] == outside_ns + inside_ns
        assert front.num_chunks == view.num_output_tokens
    counts = [sums.of()[f"API server {number}: first delivery"].count for number in (0, 1)]
    assert all(counts)
    assert sum(counts) == len(views)


def test_a_life_from_http_to_delivery_has_no_hole(attach: Attach, tmp_path: Path) -> None:
    messages = played(attach, tmp_path, {"1", "5"})
    explainer, state = Explainer(-1, -1, 5), SessionState()
    for _, message in messages:
        explainer.take(message)
        state.apply(message)
    view: Any = state.requests[5]
    life = served_life(explainer.waits.life, view)
    assert [life[0].cause, life[-1].cause] == ["front_end", "delivery"]
    assert {"queued", "prompt"} <= {piece.cause for piece in life}
    assert life[0].start_ns == view.front.http_ns
    assert life[-1].start_ns + life[-1].ns == view.front.last_out_ns
    for piece, following in pairwise(life):
        assert piece.start_ns + piece.ns == following.start_ns
    assert served_life(explainer.waits.life, replace(view, front=None)) == explainer.waits.life


def test_two_engines_hear_of_all_requests_and_each_tells_of_its_own(tmp_path: Path) -> None:
    recorder = StepRecorder(None, caches_prefixes=False)
    reports = ProcessReports(tmp_path / "front", recorder, lambda report: None)
    reports.open()
    front = Front(tmp_path / "front", 3, 1)
    reports.arrived("late", 8)
    for name in ("early", "elsewhere", "late"):
        front.take(name)
    reports.read()
    reports.arrived("early", 9)  # its report was faster than vLLM's own message
    front.deliver(["elsewhere", "early", "late"])
    Front(tmp_path / "front", 3, 2).send(FrontEnd.of(3, [], [(0, 5, 5)], []), [])  # anew
    front._socket.sendto(b"not a report", str(tmp_path / "front"))
    reports.read()
    reports.close()
    told: Any = recorder.drain()["front"]
    assert [row.request_id for each in told for row in each.taken] == [8, 9]
    chunks = [chunk for each in told for chunk in each.chunks()]
    assert [request_id for request_id, _, _ in chunks] == [9, 8]
    assert chunks[0][2] - chunks[0][1] == 2_000_000
    assert {each.number for each in told} == {3}


def test_an_api_server_is_watched_once_its_configuration_is_made_and_serves_if_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class EngineArgs:
        def create_engine_config(self) -> str:
            return "vLLM's configuration"

    class AsyncLLM:
        def __init__(self, size: int | None) -> None:
            parallel = SimpleNamespace(data_parallel_size=size)
            self.vllm_config = SimpleNamespace(parallel_config=parallel)
            self.engine_core = SimpleNamespace(client_index=1)
            self.output_processor = Processor()

    queue = type("Queue", (vllm_front_end.Queue,), {})
    for name, members in {
        "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.v1.engine.output_processor": {"RequestOutputCollector": queue},
    }.items():
        for parent in accumulate(name.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, ModuleType(parent)))
        vars(sys.modules[name]).update(members)
    for _ in range(2):
        plugin._wrap_front_end(f"ipc://{tmp_path}/vllm")
        assert EngineArgs().create_engine_config() == "vLLM's configuration"
    assert set(vars(AsyncLLM(1).output_processor)) >= {"process_outputs", "add_request"}
    assert not caplog.text
    found: list[list[Path]] = []
    monkeypatch.setattr(front_end, "ReportSender", found.append)
    AsyncLLM(1)
    AsyncLLM(2)
    # Dense ranks are engines of their own, the first of which is called as if it were alone.
    names = [[path.name.removesuffix(".reports") for path in paths] for paths in found]
    assert names == [["vllm"], ["vllm", "vllm.dp0", "vllm.dp1"]]
    assert "process_outputs" not in vars(AsyncLLM(None).output_processor)
    assert caplog.text.count("stepscope is not attached") == 1
