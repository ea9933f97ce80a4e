"""The ring of kept messages reuses its memory and returns every message intact.

Tested for both implementations: compiled, and in Python.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineStatus
from stepscope.engine.telemetry import sender as engine_sender
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.sender import is_compiled, open_sender


def status(step: int, workload: str | None = None) -> EngineStatus:
    return EngineStatus(
        time_ns=step, state="idle", step=step, num_running=0, num_waiting=0, workload=workload
    )


@pytest.fixture(params=["compiled", "python"] if is_compiled() else ["python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(engine_sender, "compiled", None)
    return str(request.param)


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
    sizes=st.lists(st.integers(0, 3_000_000) | st.integers(0, 20_000_000), max_size=12),
    ring_size=st.integers(1, 6),
    ring_bytes=st.sampled_from([1, 2**21 - 1, 2**21, 2**21 + 1, 9_000_000]),
)
def test_messages_that_span_several_memory_blocks_of_the_replay_ring_are_returned_intact(
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
        assert sender.oldest_sequence == first
        for place, expected in enumerate(kept):
            assert sender.get(first + place) == (first + place, b"status", expected)


def test_the_replay_ring_is_bounded_in_bytes_and_says_which_messages_it_still_has(way: str) -> None:
    size = len(wire.encode(status(100)))
    publisher = Publisher(None, ring_size=100, ring_bytes=5 * size)
    for step in range(100, 120):
        publisher.publish(status(step))
    replayed = publisher.replay(0, limit=100)
    assert [frame.sequence for frame in replayed.frames] == [15, 16, 17, 18, 19]
    assert replayed.oldest_sequence == publisher.sender.oldest_sequence == 15
    assert publisher.sender.num_bytes == 5 * size
    # The newest message alone exceeds the ring's limit.
    publisher.publish(status(0, "x" * 9 * size))
    assert [frame.sequence for frame in publisher.replay(0, limit=100).frames] == [20]
    publisher.publish(status(121))
    assert [frame.sequence for frame in publisher.replay(0, limit=100).frames] == [21]
    assert publisher.sender.num_bytes == size


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 300) | st.integers(0, 3000), max_size=60),
    ring_size=st.integers(1, 12),
    ring_bytes=st.integers(100, 900),
)
def test_the_replay_ring_holds_exactly_the_newest_messages_that_fit(
    way: str, sizes: list[int], ring_size: int, ring_bytes: int
) -> None:
    publisher = Publisher(None, ring_size, ring_bytes)
    kept: list[tuple[int, bytes]] = []
    for sequence, size in enumerate(sizes):
        message = status(sequence, chr(97 + sequence % 26) * size)
        publisher.publish(message)
        kept = [*kept, (sequence, wire.encode(message))][-ring_size:]
        while len(kept) > 1 and sum(len(payload) for _, payload in kept) > ring_bytes:
            kept.pop(0)
        replayed = publisher.replay(0, limit=1000)
        assert [(frame.sequence, frame.payload) for frame in replayed.frames] == kept
        assert replayed.oldest_sequence == publisher.sender.oldest_sequence == kept[0][0]
        assert publisher.sender.num_bytes == sum(len(payload) for _, payload in kept)
