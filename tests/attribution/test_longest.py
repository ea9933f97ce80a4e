"""The longest waits in memory are found among any number, without the forgotten ones."""

import pytest

from stepscope.recordings.attribution.late_sweep import Breach, LateWait
from stepscope.recordings.history import lives
from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import SLO
from tests.support.engines.simulated_run import SimulatedWorkload, simulate


def test_listed_late_tokens_equal_those_found_by_reading_every_step_in_memory() -> None:
    history = History(SLO(ttft_ms=30.0, itl_ms=12.0), max_steps=300)
    for sequence, message in simulate(seed=5, num_steps=700, workload=SimulatedWorkload(rate=9.0)):
        history.append(sequence, message)
        if sequence % 200 == 0:
            _assert_lists(history)
    history.set_slo(SLO(ttft_ms=0.001, itl_ms=0.001))
    _assert_lists(history)


def _assert_lists(history: History) -> None:
    first, last = history.first_step, history.last_step
    if first is None or last is None:
        return
    for until in (last, (first + last) // 2):
        late: dict[str, list[Breach]] = {}
        for kind, bound_ms in (("ITL", history.slo.itl_ms), ("TTFT", history.slo.ttft_ms)):
            late[kind] = []
            samples = list(history.windows.samples(kind.lower(), None, None))  # type: ignore[arg-type]
            for each in history.summaries(first, until):
                assert each is not None
                ns = getattr(each, f"max_{kind.lower()}_ns") or 0
                if ns > bound_ms * 1e6:
                    told = [
                        (value, weight) for at, value, weight in samples if at == each.tokens_ns
                    ]
                    number = sum(weight for value, weight in told if value > bound_ms * 1e6)
                    request_id = getattr(each, f"max_{kind.lower()}_request_id")
                    late[kind].append(
                        Breach(each.step, each.tokens_ns, kind, ns, request_id, number)
                    )
        in_order = sorted(late["ITL"] + late["TTFT"], key=lambda each: (each.step, each.kind))
        assert history.windows.breaches(until, 60) == in_order[-60:]
        for kind, other in (("ITL", "TTFT"), ("TTFT", "ITL")):
            found = history.windows.longest(until, 60, kind)
            longest = [sorted(late[each], key=lambda b: (-b.ns, b.step)) for each in (kind, other)]
            assert found == [*longest[0], *longest[1]][:60]
        assert history.windows.late(until) == (
            sum(each.num_tokens for each in in_order),
            len({each.step for each in in_order}),
            len(in_order),
        )


def test_a_stall_says_how_many_streams_it_delayed() -> None:
    history = History(SLO(ttft_ms=1e9, itl_ms=12.0))
    for sequence, message in simulate(seed=3, num_steps=300, workload=SimulatedWorkload(rate=9.0)):
        history.append(sequence, message)
    for stall in history.windows.stalls(None, 300).longest:
        record = history.record(stall.step)
        assert record is not None
        waits = [history.wait(stall.step, row.request_id) for row in record.batch or ()]
        late = [each for each in waits if each is not None and each.token_idx]
        assert sum(each.gap_ns > 12e6 for each in late) == stall.num_tokens


def test_late_first_tokens_count_as_stalls_only_if_no_stream_was_held_up() -> None:
    history = History(SLO(ttft_ms=1.0, itl_ms=12.0))
    for sequence, message in simulate(seed=3, num_steps=300, workload=SimulatedWorkload(rate=9.0)):
        history.append(sequence, message)
    assert {each.kind for each in history.windows.stalls(None, 300).longest} == {"ITL"}
    assert {each.kind for each in history.windows.longest(None, 1000)} == {"ITL", "TTFT"}
    history.set_slo(SLO(ttft_ms=1.0, itl_ms=1e9))
    found = history.windows.stalls(None, 300)
    assert found.number
    assert {each.kind for each in found.longest} == {"TTFT"}
    history.set_slo(SLO(ttft_ms=1e9, itl_ms=1e9))
    assert history.windows.stalls(None, 300) == ([], 0)


def test_the_oldest_stall_in_memory_is_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(SLO(ttft_ms=1e9, itl_ms=12.0))
    for sequence, message in simulate(seed=3, num_steps=300, workload=SimulatedWorkload(rate=9.0)):
        history.append(sequence, message)
    stalls = history.windows.stalls(None, 300).longest
    whole = [history.wait(each.step, each.request_id) for each in stalls]
    assert min(each.step for each in stalls) < 100
    history.set_slo(history.slo)  # forgets all explanations
    monkeypatch.setattr(lives, "MAX_LIFE_STEPS", 100)
    assert [history.wait(each.step, each.request_id) for each in stalls] == whole
    last = history.last_stall(99)
    assert last is not None
    assert last.pieces == history.wait(last.step, last.request_id).pieces  # type: ignore[union-attr]


def test_many_long_waits_are_explained_together_over_several_bounded_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history = History(SLO(ttft_ms=30.0, itl_ms=1.0))
    for sequence, message in simulate(seed=3, num_steps=600, workload=SimulatedWorkload(rate=15.0)):
        history.append(sequence, message)
    monkeypatch.setattr(lives, "MAX_LIFE_STEPS", 50)
    longest = history.windows.longest(None, 12, "TTFT")
    waits = [LateWait(each.step, each.request_id, each.time_ns - each.ns) for each in longest]
    assert sum(each.step - (history.step_at(each.start_ns) or 0) > 50 for each in waits) > 2
    num_calls = 0
    while history.lives.explain(waits, 40) is not None:
        num_calls += 1
        assert num_calls < 30, "it begins anew each time"
    assert num_calls > 2
    assert all(history.lives.is_known(each.step, each.request_id) for each in longest)
