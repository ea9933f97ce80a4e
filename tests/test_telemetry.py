"""The publisher never waits, counts what a slow subscriber misses, and can repeat it."""

import time
from pathlib import Path

import pytest
import zmq

from stepscope.engine import telemetry, wire
from stepscope.engine.telemetry import Publisher
from stepscope.engine.wire import EngineStatus


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
