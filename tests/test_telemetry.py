"""The publisher never waits, counts what a slow subscriber misses, and can repeat it."""

import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from stepscope.engine import telemetry, wire
from stepscope.engine.client import ControlClient
from stepscope.engine.commands import AnyReply, GetSnapshot
from stepscope.engine.snapshot_desk import MAX_WAIT_NS, SHARE, SnapshotDesk
from stepscope.engine.telemetry import Publisher
from stepscope.engine.wire import EngineStatus, Snapshot


def status(step: int) -> EngineStatus:
    return EngineStatus(time_ns=step, state="idle", step=step, num_running=0, num_waiting=0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/t"


def test_messages_arrive_in_three_frames_numbered_without_a_gap(address: str) -> None:
    publisher = Publisher(address, ring_size=8)
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect(address)
    subscriber.subscribe(b"")
    while not subscriber.poll(10):
        publisher.publish(status(0))
    first = wire.sequence_of(subscriber.recv_multipart()[1])
    for _ in range(5):
        publisher.publish(status(1))
    received = []
    while subscriber.poll(200):
        topic, sequence, payload = subscriber.recv_multipart()
        assert topic == b"status"
        assert isinstance(wire.decode(payload), EngineStatus)
        received.append(wire.sequence_of(sequence))
    assert received == list(range(first + 1, publisher.next_sequence))
    subscriber.close()
    publisher.close()


def test_the_ring_repeats_what_it_holds_and_says_how_far_back_that_is() -> None:
    publisher = Publisher(None, ring_size=4)
    for step in range(10):
        publisher.publish(status(step))
    replayed = publisher.replay(0, limit=100)
    assert [frame.sequence for frame in replayed.frames] == [6, 7, 8, 9]
    assert (replayed.oldest_sequence, replayed.next_sequence) == (6, 10)
    assert [frame.sequence for frame in publisher.replay(7, limit=2).frames] == [7, 8]
    assert publisher.replay(10, limit=5).frames == []
    message = wire.decode(replayed.frames[0].payload)
    assert isinstance(message, EngineStatus)
    assert message.step == 6


def test_one_answer_is_bounded_in_bytes_but_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_REPLAY_BYTES", 10)
    publisher = Publisher(None, ring_size=4)
    for step in range(3):
        publisher.publish(status(step))
    assert [frame.sequence for frame in publisher.replay(0, limit=3).frames] == [0]


def test_a_subscriber_that_does_not_read_is_counted_and_holds_up_nobody(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "SUBSCRIBER_QUEUE", 10)
    publisher = Publisher(address, ring_size=8)
    context = zmq.Context.instance()
    slow, quick = context.socket(zmq.SUB), context.socket(zmq.SUB)
    slow.rcvhwm = 1
    quick.rcvhwm = 0
    # A message larger than the kernel's socket buffers, so that the queues fill soon.
    large = EngineStatus(
        time_ns=0, state="idle", step=0, num_running=0, num_waiting=0, workload="x" * 400_000
    )
    for socket in (slow, quick):
        socket.connect(address)
        socket.subscribe(b"")
        while not socket.poll(10):
            publisher.publish(status(0))
    received = set()
    for step in range(1, 200):
        # A socket looks for room in its queues at most once a millisecond.
        time.sleep(0.003)
        publisher.publish(large)
        number = publisher.next_sequence - 1
        while number not in received:
            assert quick.poll(5_000), f"the quick subscriber never got message {number}"
            received.add(wire.sequence_of(quick.recv_multipart()[1]))
        if publisher.num_dropped and step > 50:
            break
    assert publisher.num_dropped > 0
    for socket in (slow, quick):
        socket.close(linger=0)
    publisher.close()


def test_the_ring_is_bounded_in_bytes_too_and_says_what_it_still_has() -> None:
    size = len(wire.encode(status(100)))
    publisher = Publisher(None, ring_size=100, ring_bytes=5 * size)
    for step in range(100, 120):
        publisher.publish(status(step))
    replayed = publisher.replay(0, limit=100)
    assert [frame.sequence for frame in replayed.frames] == [15, 16, 17, 18, 19]
    assert replayed.oldest_sequence == publisher.ring.oldest_sequence == 15
    assert publisher.ring.num_bytes == 5 * size
    large = EngineStatus(
        time_ns=0, state="idle", step=0, num_running=0, num_waiting=0, workload="x" * 9 * size
    )
    publisher.publish(large)  # alone it is more than the ring may hold, and it is the newest
    assert [frame.sequence for frame in publisher.replay(0, limit=100).frames] == [20]
    publisher.publish(status(121))
    assert [frame.sequence for frame in publisher.replay(0, limit=100).frames] == [21]
    assert publisher.ring.num_bytes == size


@given(
    sizes=st.lists(st.integers(0, 300), max_size=60),
    ring_size=st.integers(1, 12),
    ring_bytes=st.integers(100, 900),
)
def test_the_ring_holds_the_newest_messages_that_fit_and_no_others(
    sizes: list[int], ring_size: int, ring_bytes: int
) -> None:
    publisher = Publisher(None, ring_size, ring_bytes)
    kept: list[tuple[int, int]] = []
    for sequence, size in enumerate(sizes):
        message = EngineStatus(
            time_ns=0, state="idle", step=0, num_running=0, num_waiting=0, workload="x" * size
        )
        publisher.publish(message)
        kept = [*kept, (sequence, len(wire.encode(message)))][-ring_size:]
        while len(kept) > 1 and sum(num_bytes for _, num_bytes in kept) > ring_bytes:
            kept.pop(0)
        replayed = publisher.replay(0, limit=1000)
        assert [frame.sequence for frame in replayed.frames] == [number for number, _ in kept]
        assert replayed.oldest_sequence == kept[0][0]
        assert publisher.ring.num_bytes == sum(num_bytes for _, num_bytes in kept)


# Snapshots


class Asker:
    """A client that keeps what it is told."""

    def __init__(self) -> None:
        self.replies: list[Any] = []

    def reply(self, message: AnyReply) -> None:
        self.replies.append(message)


def test_many_who_join_cost_the_engine_a_bounded_share_and_all_get_a_snapshot() -> None:
    now_ns, cost_ns, num_made = 0, 3_000_000, 0

    def take() -> Any:
        nonlocal now_ns, num_made
        now_ns += cost_ns
        num_made += 1
        return num_made

    desk = SnapshotDesk(take, lambda: now_ns)
    askers: list[tuple[int, Asker]] = []
    num_steps, step_ns = 1000, 10_000_000
    for step in range(num_steps):
        now_ns += step_ns
        for _ in range(1 + step % 3):
            askers.append((num_made, Asker()))
            desk.ask(askers[-1][1])
        desk.serve()
    assert num_made * cost_ns <= SHARE * now_ns + 2 * cost_ns
    assert desk.due_ns is not None
    now_ns = desk.due_ns
    desk.serve()
    assert desk.due_ns is None
    for made_before, asker in askers:
        # One each, and one that was made after it was asked for.
        assert asker.replies == [made_before + 1]


def test_who_joins_alone_does_not_wait_and_nobody_waits_for_ever() -> None:
    now_ns = 0

    def take() -> Any:
        nonlocal now_ns
        now_ns += 10**12
        return "snapshot"

    desk = SnapshotDesk(take, lambda: now_ns)
    first, second, third = Asker(), Asker(), Asker()
    desk.ask(first)
    desk.serve()
    assert first.replies == ["snapshot"]
    desk.ask(second)
    desk.serve()
    assert second.replies == []
    now_ns += MAX_WAIT_NS
    desk.serve()
    assert second.replies == ["snapshot"]
    desk.ask(third)
    desk.serve(at_once=True)  # the engine ends
    assert third.replies == ["snapshot"]


def test_a_flood_of_those_who_join_does_not_stop_the_engine(
    live_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, num_made = live_engine.core.snapshots._take, 0

    def slow_take() -> Any:
        nonlocal num_made
        num_made += 1
        time.sleep(0.01)
        return take()

    monkeypatch.setattr(live_engine.core.snapshots, "_take", slow_take)
    started_s = time.monotonic()
    with ControlClient(live_engine.endpoint) as client:
        asked = {client.send(GetSnapshot()) for _ in range(60)}
        while asked:
            received = client.receive(20.0)
            assert received is not None
            assert isinstance(received[1], Snapshot), received
            asked.discard(received[0])
    # One at once, and after that one a second at most.
    assert num_made <= 2 + (time.monotonic() - started_s)
