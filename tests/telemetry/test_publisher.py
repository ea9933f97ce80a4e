"""The publisher never waits, counts what a slow subscriber misses, and can replay it.

Tested for both ways of sending: a compiled thread, and the engine's own.
"""

import gc
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineStatus
from stepscope.engine.telemetry import publisher as telemetry
from stepscope.engine.telemetry import sender
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.sender import open_sender
from stepscope.engine.transport.gate import Gate
from stepscope.engine.transport.keys import KeyFolder
from tests.support.ports import free_port
from tests.support.waiting import wait_for

WAYS = ["thread", "inline"] if sender.is_compiled() else ["inline"]
needs_thread = pytest.mark.skipif(not sender.is_compiled(), reason="it could not be compiled")


def status(step: int, workload: str | None = None) -> EngineStatus:
    return EngineStatus(
        time_ns=step, state="idle", step=step, num_running=0, num_waiting=0, workload=workload
    )


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "inline":
        monkeypatch.setattr(sender, "compiled", None)
    return str(request.param)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/t"


@pytest.fixture
def subscriber() -> Iterator["zmq.Socket[bytes]"]:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.rcvhwm = 0
    yield socket
    socket.close(linger=0)


def join(socket: "zmq.Socket[bytes]", address: str, publisher: Publisher) -> None:
    """Wait until the subscriber has joined and receives everything published from now on."""
    socket.connect(address)
    socket.subscribe(b"")
    while not socket.poll(10):
        publisher.publish(status(0))
    number = -1
    while number < publisher.next_sequence - 1:
        number = wire.sequence_of(socket.recv_multipart()[1])


def test_the_sending_thread_is_compiled_if_there_is_a_compiler() -> None:
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    can_be = shutil.which("cc") is not None and headers.exists()
    assert sender.is_compiled() == can_be


def test_messages_published_before_closing_arrive_even_if_few_are_kept(
    way: str, address: str, subscriber: "zmq.Socket[bytes]"
) -> None:
    publisher = Publisher(address, ring_size=1, ring_bytes=1)
    join(subscriber, address, publisher)
    first = publisher.next_sequence
    for step in range(2_000):
        publisher.publish(status(step))
    publisher.close()
    for step in range(2_000):
        assert subscriber.poll(30_000), step
        topic, sequence, payload = subscriber.recv_multipart()
        assert (topic, wire.sequence_of(sequence)) == (b"status", first + step)
        assert wire.decode(payload) == status(step)
    assert publisher.sender.num_dropped == 0


def test_a_message_published_after_any_silence_arrives(
    way: str, address: str, subscriber: "zmq.Socket[bytes]"
) -> None:
    publisher = Publisher(address, ring_size=8)
    join(subscriber, address, publisher)
    for pause_s in (0.3, 0.09, 0.1, 0.11, 0.0, 0.3):  # the thread sleeps after a tenth
        time.sleep(pause_s)
        publisher.publish(status(1))
        assert subscriber.poll(30_000), f"nothing came after a silence of {pause_s} s"
        assert wire.sequence_of(subscriber.recv_multipart()[1]) == publisher.next_sequence - 1
    publisher.close()


def test_the_replay_ring_resends_what_it_holds_and_says_how_far_back_it_goes(way: str) -> None:
    publisher = Publisher(None, ring_size=4)
    for step in range(10):
        publisher.publish(status(step))
    replayed = publisher.replay(0, limit=100)
    assert [frame.sequence for frame in replayed.frames] == [6, 7, 8, 9]
    assert (replayed.oldest_sequence, replayed.next_sequence) == (6, 10)
    assert [frame.sequence for frame in publisher.replay(7, limit=2).frames] == [7, 8]
    assert publisher.replay(10, limit=5).frames == []
    assert publisher.sender.get(5) is None
    assert publisher.sender.get(10) is None
    first = replayed.frames[0]
    assert (first.topic, wire.decode(first.payload)) == (b"status", status(6))


def test_one_replay_reply_is_bounded_in_bytes_but_never_empty(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MAX_REPLAY_BYTES", 10)
    publisher = Publisher(None, ring_size=4)
    for step in range(3):
        publisher.publish(status(step))
    assert [frame.sequence for frame in publisher.replay(0, limit=3).frames] == [0]


def test_a_subscriber_that_does_not_read_loses_counted_messages_and_delays_none(
    way: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "SUBSCRIBER_QUEUE", 10)
    publisher = Publisher(address, ring_size=8)
    context = zmq.Context.instance()
    slow, quick = context.socket(zmq.SUB), context.socket(zmq.SUB)
    slow.rcvhwm = 1
    quick.rcvhwm = 0
    # A message larger than the kernel's socket buffers, so that the queues fill soon.
    large = status(0, "x" * 400_000)
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
            assert quick.poll(30_000), f"the quick subscriber never got message {number}"
            received.add(wire.sequence_of(quick.recv_multipart()[1]))
        if publisher.sender.num_dropped and step > 50:
            break
    num_dropped = publisher.sender.num_dropped
    assert num_dropped > 0
    for socket in (slow, quick):
        socket.close(linger=0)
    publisher.close()
    publisher.publish(status(0))  # only kept, not sent
    assert publisher.num_dropped >= num_dropped


# The gate


def test_a_subscriber_is_cut_off_once_its_key_is_revoked(
    way: str, tmp_path: Path, subscriber: "zmq.Socket[bytes]"
) -> None:
    keys = KeyFolder(tmp_path / "keys")
    credentials = keys.add("leaver", "viewer", tmp_path / "leaver.key", None)
    with closing(Gate(keys)) as gate:
        address = f"tcp://127.0.0.1:{free_port()}"
        publisher = Publisher(address, ring_size=8, gate=gate)
        subscriber.curve_publickey = credentials.pair.public.encode()
        subscriber.curve_secretkey = credentials.pair.secret.encode()
        subscriber.curve_serverkey = gate.server.public.encode()
        join(subscriber, address, publisher)
        monitor = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        keys.revoke("leaver")

        def is_cut_off() -> bool:
            publisher.publish(status(1))  # the subscribers are checked before each message
            return bool(monitor.poll(20))

        wait_for(is_cut_off, "the connection has ended")
        subscriber.disable_monitor()
        publisher.close()


def test_a_sender_without_a_thread_handles_few_subscriptions_at_a_time(
    subscriber: "zmq.Socket[bytes]",
) -> None:
    num_sent = 3 * sender.MAX_SUBSCRIPTIONS
    with closing(zmq.Context.instance().socket(zmq.XPUB)) as publishing:
        publishing.bind("inproc://flood")
        subscriber.connect("inproc://flood")
        for number in range(num_sent):  # without a key there is no name, as after leaving
            subscriber.subscribe(str(number))
        inline = sender.InlineSender(publishing, 8, 1_000, is_gated=True)
        assert inline.take_subscription() is None
        num_left = 0
        while publishing.poll(0):
            publishing.recv()
            num_left += 1
    assert num_left == num_sent - sender.MAX_SUBSCRIPTIONS


# The thread


@needs_thread
def test_messages_overwritten_before_sending_are_counted_and_never_sent_in_part(
    address: str, subscriber: "zmq.Socket[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "QUEUE_MESSAGES", 5)
    monkeypatch.setattr(sender, "QUEUE_BYTES", 20_000)
    publisher = Publisher(address, ring_size=5, ring_bytes=20_000)
    join(subscriber, address, publisher)
    first, dropped_before = publisher.next_sequence, publisher.sender.num_dropped
    num_messages = 20_000
    for step in range(num_messages):
        publisher.publish(status(step, chr(97 + step % 26) * (step * 37 % 9_000)))
    publisher.close()
    numbers = []
    while subscriber.poll(300):
        topic, number, payload = subscriber.recv_multipart()
        step = wire.sequence_of(number) - first
        assert topic == b"status"
        assert wire.decode(payload) == status(step, chr(97 + step % 26) * (step * 37 % 9_000))
        numbers.append(step)
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == num_messages - 1
    assert 0 < publisher.sender.num_dropped - dropped_before == num_messages - len(numbers)


@needs_thread
def test_the_thread_of_an_unclosed_publisher_ends_with_its_object() -> None:
    publisher = Publisher("tcp://127.0.0.1:*", ring_size=5)
    num_open = len(os.listdir("/proc/self/fd"))
    publisher.publish(status(1))
    del publisher
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < num_open


@needs_thread
def test_a_process_can_fork_and_exit_with_an_open_publisher(
    address: str, subscriber: "zmq.Socket[bytes]"
) -> None:
    # In a process of its own: a fork of this one would take over locks of its other threads.
    code = """
import os, sys
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.protocol.wire import EngineStatus
publisher = Publisher(sys.argv[1], ring_size=5)
for line in sys.stdin:
    if line == "fork\\n":
        child = os.fork()
        if child == 0:
            publisher.close()
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
    else:
        publisher.publish(
            EngineStatus(time_ns=0, state="idle", step=int(line), num_running=0, num_waiting=0)
        )
"""  # it ends with an open publisher
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def tell(line: str) -> None:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()

        subscriber.connect(address)
        subscriber.subscribe(b"")
        while not subscriber.poll(10):
            tell("0")
        tell("fork")
        assert process.stdout.readline() == "0\n"
        tell("7")
        steps = []
        while 7 not in steps:
            assert subscriber.poll(30_000)
            steps.append(wire.decode(subscriber.recv_multipart()[2]).step)
        process.stdin.close()
        assert process.wait(60) == 0


@needs_thread
def test_a_replay_ring_too_large_for_the_memory_of_the_machine_is_refused() -> None:
    with pytest.raises(MemoryError):
        Publisher(None, ring_size=5, ring_bytes=2**62)


# Kept messages


@pytest.mark.skipif(sys.platform != "linux", reason="memory is looked at in /proc")
def test_memory_of_the_replay_ring_depends_on_kept_messages_not_on_all_published_ones(
    way: str,
) -> None:
    sender = open_sender(None, 100, 512 * 1024 * 1024, False)
    payload = bytearray(b"x" * 20_000)

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident_bytes()
    for _ in range(10_000):
        sender.add(b"status", payload)
    assert sender.num_bytes == 2_000_000
    assert resident_bytes() - before < 50_000_000


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 3_000) | st.integers(0, 20_000_000), max_size=12),
    ring_size=st.integers(1, 6),
    ring_bytes=st.sampled_from([1, 900, 2**21 - 1, 2**21, 2**21 + 1, 9_000_000]),
)
def test_the_replay_ring_holds_exactly_the_newest_messages_that_fit_and_all_of_each(
    way: str, sizes: list[int], ring_size: int, ring_bytes: int
) -> None:
    sender = open_sender(None, ring_size, ring_bytes, False)
    kept: list[bytearray] = []
    for number, size in enumerate(sizes):
        payload = bytearray(number.to_bytes(8, "big") * (size // 8))
        sender.add(b"status", payload)
        kept = [*kept, payload][-ring_size:]
        while len(kept) > 1 and sum(map(len, kept)) > ring_bytes:
            kept.pop(0)
        first = number + 1 - len(kept)
        assert (sender.oldest_sequence, sender.num_bytes) == (first, sum(map(len, kept)))
        for place, expected in enumerate(kept):
            assert sender.get(first + place) == (first + place, b"status", expected)
