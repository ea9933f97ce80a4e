"""Of every second, the longest wait of each kind is an event, by the current service levels."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TypeAlias

import pytest

from stepscope.engine.protocol.wire import Telemetry
from stepscope.recordings.history import lives
from stepscope.recordings.history.history import History
from stepscope.recordings.session.waits import Breach
from stepscope.recordings.state.events import SessionEvent, breach_event
from stepscope.recordings.state.latency import SLO
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.history_steps import history_of

SECOND_NS = 1_000_000_000
SLO_KIND = frozenset({"slo"})


Late: TypeAlias = tuple[int, int, int]  # step, time and wait


def crowd(num_steps: int, *, seed: int = 3, rate: float = 9.0) -> list[tuple[int, Telemetry]]:
    return simulate(seed=seed, num_steps=num_steps, workload=SimulatedWorkload(rate=rate))


def worst_of_seconds(late: Sequence[Late]) -> list[Late]:
    seconds = groupby(late, key=lambda each: each[1] // SECOND_NS)
    return [max(second, key=lambda each: each[2]) for _, second in seconds]


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
