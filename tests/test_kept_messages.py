"""What is kept for who has missed it: memory that is used again and again, and comes back whole.

Held for both ways of keeping: compiled, and in Python.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.engine import sender as engine_sender
from stepscope.engine.sender import is_compiled, open_sender


@pytest.fixture(params=["compiled", "python"] if is_compiled() else ["python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(engine_sender, "compiled", None)
    return str(request.param)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is looked at in /proc")
def test_the_ring_takes_the_memory_of_what_it_keeps_not_of_all_that_went_through(way: str) -> None:
    sender = open_sender(None, 100, 512 * 1024 * 1024, None)
    payload = bytearray(b"x" * 20_000)

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident_bytes()
    for _ in range(10_000):
        sender.add(b"status", payload)
    assert sender.num_bytes == 2_000_000
    assert resident_bytes() - before < 50_000_000


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(0, 3_000_000) | st.integers(0, 20_000_000), max_size=12),
    ring_size=st.integers(1, 6),
    ring_bytes=st.sampled_from([1, 2**21 - 1, 2**21, 2**21 + 1, 9_000_000]),
)
def test_messages_larger_than_the_pieces_of_the_memory_come_back_whole(
    way: str, sizes: list[int], ring_size: int, ring_bytes: int
) -> None:
    sender = open_sender(None, ring_size, ring_bytes, None)
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
            found = sender.get(first + place)
            assert found is not None
            assert found.payload == expected
