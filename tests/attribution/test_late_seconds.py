"""Of every second, the longest wait of each kind is an event, by the current service levels."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol.wire import Telemetry
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history import lives
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.session import waits as session_waits
from stepscope.recordings.session.waits import Breach
from stepscope.recordings.state.events import SessionEvent, breach_event
from stepscope.recordings.state.latency import SLO
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.seek_sessions import busy, record

SECOND_NS = 1_000_000_000
SLO_KIND = frozenset({"slo"})


Late: TypeAlias = tuple[int, int, int]  # step, time and wait


def crowd(num_steps: int, *, seed: int = 3, rate: float = 9.0) -> list[tuple[int, Telemetry]]:
    return simulate(seed=seed, num_steps=num_steps, workload=SimulatedWorkload(rate=rate))


def worst_of_seconds(late: Sequence[Late]) -> list[Late]:
    seconds = groupby(late, key=lambda each: each[1] // SECOND_NS)
    return [max(second, key=lambda each: each[2]) for _, second in seconds]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, SECOND_NS * 2 // 3), st.integers(1, 9)), max_size=60))
def test_the_worst_wait_of_each_second_is_exact(waits: list[tuple[int, int]]) -> None:
    times_ns, waits_ns = list(accumulate(gap for gap, _ in waits)), [ns for _, ns in waits]
    late = list(zip(range(len(waits)), times_ns, waits_ns, strict=True))
    columns = (np.array(column, dtype=np.int64) for column in (times_ns, waits_ns))
    expected_places = [at for at, _, _ in worst_of_seconds(late)]
    assert session_waits.worst_of_seconds(*columns).tolist() == expected_places


def expected(history: History, until: int | None = None) -> list[SessionEvent]:
    """The events, found by looking at every step in memory."""
    first, last = history.first_step, history.last_step
    if first is None or last is None:
        return []
    summaries = history.summaries(first, last if until is None else until)
    found = []
    for kind, bound_ms in (("ITL", history.slo.itl_ms), ("TTFT", history.slo.ttft_ms)):
        name = kind.lower()
        late = []
        for each in summaries:
            ns = None if each is None else getattr(each, f"max_{name}_ns")
            if each is not None and ns is not None and ns > bound_ms * 1e6:
                late.append((each.step, each.tokens_ns, ns))
        for step, time_ns, ns in worst_of_seconds(late):
            request_id = getattr(history.summary(step), f"max_{name}_request_id")
            found.append(breach_event(history.slo, step, time_ns, kind, ns, request_id))
    return sorted(found, key=lambda each: each.step)


def assert_events(history: History) -> list[SessionEvent]:
    """Every query for events gives what a look at every step gives."""
    events = expected(history)
    assert history.events(None, 10**6, SLO_KIND) == events
    first, last = history.first_step, history.last_step
    if first is not None and last is not None:
        for until in range(first, last + 1, max(1, (last - first) // 9)):
            so_far = expected(history, until)
            assert history.events(until, 5, SLO_KIND) == so_far[-5:]
            after = next((each for each in events if each.step > until), None)
            assert history.next_event(until, 1, SLO_KIND) == after
            before = max((each.step for each in events if each.step < until), default=None)
            found = history.next_event(until, -1, SLO_KIND)
            assert (None if found is None else found.step) == before
        itl = [each for each in events if each.text.startswith("ITL")]
        stalls = history.windows.stalls(10**6)
        if itl:
            assert stalls.number == len(itl)
            assert sorted(each.step for each in stalls.longest) == [each.step for each in itl]
            assert stalls.longest == sorted(stalls.longest, key=lambda each: (-each.ns, each.step))
    return events


def test_late_token_events_match_the_steps_in_memory_and_the_current_service_levels() -> None:
    history = History(SLO(ttft_ms=30.0, itl_ms=12.0), max_steps=300)
    levels = [SLO(ttft_ms=400.0, itl_ms=90.0), SLO(0.001, 0.001), SLO(30.0, 12.0), SLO(1e9, 1e9)]
    number = set[int]()
    for sequence, message in crowd(900, seed=5):
        history.append(sequence, message)
        if sequence % 97 == 0:
            history.set_slo(levels[sequence // 97 % len(levels)])
            number.add(len(assert_events(history)))
            _assert_lists(history)
        elif sequence % 10 == 0:
            history.next_event(0, 1, SLO_KIND)  # the index grows bit by bit
    assert len(number) > 4
    assert history.first_step > 0
    history.set_slo(levels[2])
    assert history.rewind(history.first_step + 150)
    assert assert_events(history)


def test_a_replay_agrees_with_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.recordings.file.writing.recording_file.CHUNK_BYTES", 30_000)
    file = record(tmp_path / "session.mcap", enumerate(busy(7, 900)))
    source = ReplaySource(Recording(file), playing=False)
    source.start()
    try:
        assert source.wait()
        assert source.file_index.wait(30)
        extent = source.extent
        for slo in (SLO(30.0, 12.0), SLO(ttft_ms=900.0, itl_ms=60.0), SLO(500.0, 33.0)):
            history = source.history
            for step in (850, 120, 640, extent[1]):
                source.seek(step)
                assert source.wait()
                history.set_slo(slo)
                assert_events(history)
            assert (history.first_step, history.last_step) == extent, "all of the file"
            for direction in (1, -1):
                at = extent[direction < 0] - direction
                walked = []
                while (found := history.next_event(at, direction, SLO_KIND)) is not None:
                    assert source.file_index.next(at, direction, SLO_KIND, slo) == found
                    walked.append(found)
                    at = found.step
                assert len(walked) > 5
            searched, number = source.file_index.stalls(slo, 1000)
            in_memory = history.windows.stalls(1000)
            assert number == in_memory.number
            assert [each.step for each in searched] == [each.step for each in in_memory.longest]
    finally:
        source.stop()


def _assert_lists(history: History) -> None:
    first, last = history.first_step, history.last_step
    if first is None or last is None:
        return
    for until in (last, (first + last) // 2):
        late: dict[str, list[Breach]] = {}
        for kind, bound_ms in (("ITL", history.slo.itl_ms), ("TTFT", history.slo.ttft_ms)):
            late[kind], numbers = [], Counter[int]()
            for time_ns, ns, weight in history.windows.samples(kind.lower(), None, None):
                numbers[time_ns] += weight * (ns > bound_ms * 1e6)
            for each in history.summaries(first, until):
                ns = getattr(each, f"max_{kind.lower()}_ns") or 0
                if ns > bound_ms * 1e6:
                    request_id = getattr(each, f"max_{kind.lower()}_request_id")
                    told = each.step, each.tokens_ns, kind, ns, request_id
                    late[kind].append(Breach(*told, numbers[each.tokens_ns]))
        in_order = sorted(late["ITL"] + late["TTFT"], key=lambda each: (each.step, each.kind))
        assert history.windows.breaches(until, 60) == in_order[-60:]
        for kind, other in (("ITL", "TTFT"), ("TTFT", "ITL")):
            found = history.windows.longest(until, 60, kind)
            longest = [sorted(late[each], key=lambda b: (-b.ns, b.step)) for each in (kind, other)]
            assert found == [*longest[0], *longest[1]][:60]
        assert history.windows.late(until) == (
            sum(each.num_tokens for each in in_order),
            len({each.step for each in in_order}),
        )


def test_late_first_tokens_count_as_stalls_only_if_no_stream_was_held_up() -> None:
    history = history_of(crowd(300), SLO(ttft_ms=1.0, itl_ms=12.0))
    assert {each.kind for each in history.windows.stalls(300).longest} == {"ITL"}
    assert {each.kind for each in history.windows.longest(None, 1000)} == {"ITL", "TTFT"}
    history.set_slo(SLO(ttft_ms=1.0, itl_ms=1e9))
    found = history.windows.stalls(300)
    assert found.number
    assert {each.kind for each in found.longest} == {"TTFT"}
    history.set_slo(SLO(ttft_ms=1e9, itl_ms=1e9))
    assert history.windows.stalls(300) == ([], 0)


def test_the_oldest_stall_in_memory_is_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    history = history_of(crowd(300), SLO(ttft_ms=1e9, itl_ms=12.0))
    stalls = history.windows.stalls(300).longest
    whole = [history.wait(each.step, each.request_id) for each in stalls]
    assert min(each.step for each in stalls) < 100
    history.set_slo(history.slo)  # forgets all explanations
    monkeypatch.setattr(lives, "MAX_LIFE_STEPS", 100)
    assert [history.wait(each.step, each.request_id) for each in stalls] == whole
    last = history.last_stall(99)
    assert last.pieces == history.wait(last.step, last.request_id).pieces
