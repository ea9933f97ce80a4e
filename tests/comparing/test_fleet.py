"""Several engines in figures: unknown ones stay unknown, outliers are named with since when.

Engines that end, return or restart are reported as such."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.engine.protocol.wire import EngineInfo, EngineStatus, KVCounts, Snapshot, StepRecord
from stepscope.recordings.fleets.figures import EngineFigures, figures, measure
from stepscope.recordings.fleets.fleet import FLEET_STEPS, LOOK_S, NUM_LOADS, Fleet, shared_bytes
from stepscope.recordings.fleets.imbalance import HOLD_S, ImbalanceKeeper, differences, findings
from stepscope.recordings.history.history import MAX_STEPS, History

Call = Callable[..., Any]

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def engine(name: str, **values: Any) -> EngineFigures:
    """An engine that is up and unremarkable."""
    usual = {"status": "live", "state": "running", "num_running": 30, "num_waiting": 2}
    usual |= {"num_seats": 64, "kv_used": 0.5, "ttft_p95_ms": 200.0, "itl_p95_ms": 20.0}
    return EngineFigures(name, **{**usual, "num_preempted": 0, "prefix_hit_rate": 0.5, **values})


def info(engine_id: str, **values: Any) -> EngineInfo:
    named = {"name": "e", "software_version": "1", "model": "m", "monotonic_ns": 0, "wall_ns": 0}
    return EngineInfo(engine_id=engine_id, **named, **values)


def told(source: Any) -> str:
    return "; ".join(f"{event.name} {event.text}" for event in source.picture.events)


# Figures


def test_what_an_engine_does_not_publish_is_unknown_and_never_zero(still_source: Call) -> None:
    source = still_source(2)
    history = source.history = History()
    history.append(0, info("attached"))
    counts = {"num_prefill_tokens": 0, "num_decode_tokens": 4, "num_running": 4, "num_waiting": 1}
    for number in range(20):
        times = {"schedule_start_ns": number * 20 * MS, "tokens_ns": (number + 1) * 20 * MS}
        history.append(number + 1, StepRecord(step=number, **times, **counts))
    found = figures("attached", source, measure(history))
    assert (found.num_running, found.num_waiting) == (4, 1)
    assert found.steps_per_s == pytest.approx(50)
    unknown = ["kv_used", "num_seats", "budget_used", "ttft_p95_ms", "itl_p95_ms", "num_preempted"]
    unknown += ["output_tokens_per_s", "prefix_hit_rate"]
    assert [name for name in unknown if getattr(found, name) is not None] == []


def test_fleet_figures_of_a_busy_engine_equal_those_of_its_history(still_source: Call) -> None:
    source = still_source()
    found = figures("busy", source, measure(source.history))
    state, latency = source.history.state, source.history.windows.latency()
    assert found.num_running == state.num_running
    assert found.num_seats == 32  # the knob, not the capacity
    assert found.ttft_p95_ms == latency.ttft.p95_ms
    assert found.itl_p95_ms == latency.itl.p95_ms
    last = source.history.summary(source.history.last_step)
    steps = filter(None, source.history.summaries(0, last.step))
    recent = [each for each in steps if each.tokens_ns > last.tokens_ns - 10_000 * MS]
    spent, budget = sum(s.num_spent_tokens for s in recent), sum(s.token_budget for s in recent)
    assert found.budget_used == pytest.approx(spent / budget)
    num_blocks = state.kv.used + state.kv.cached + state.kv.empty
    assert found.kv_used == pytest.approx(state.kv.used / num_blocks)


@pytest.mark.parametrize("status", ["down", "connecting"])
def test_an_engine_that_does_not_answer_has_no_figures(still_source: Call, status: str) -> None:
    source = still_source()
    source.status, source.error = status, "nobody there"
    found = figures("gone", source, measure(source.history))
    assert found.status == "down"
    assert found.num_running is found.kv_used is found.itl_p95_ms is found.steps_per_s is None
    assert found.load is None


# Who stands out


def test_the_engine_with_most_of_the_queue_is_named_beside_the_one_with_least() -> None:
    engines = [
        engine("a", num_waiting=2, kv_used=0.12),
        engine("b", num_waiting=12),
        engine("c", num_waiting=38, kv_used=0.97),
        engine("d", num_waiting=10),
    ]
    found = {each.figure: each for each in findings(engines)}
    assert {name: (each.engine, each.text) for name, each in found.items()} == {
        "waiting": (2, "61% of all waiting requests (38 of 62), a has 2"),
        "kv": (2, "KV 97%, a 12%"),
    }


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"ttft_p95_ms": 1040.0}, "TTFT p95 1.0 s, 5.2x the median of the others"),
        ({"itl_p95_ms": 62.0}, "ITL p95 62 ms, 3.1x the median of the others"),
        ({"prefix_hit_rate": 0.1}, "prefix hits 10%, the others 50%"),
    ],
)
def test_an_engine_unlike_the_others_is_named(values: dict[str, float], text: str) -> None:
    (found,) = findings([engine("a"), engine("b", **values), engine("c")])
    assert (found.engine, found.text) == (1, text)


def test_an_engine_without_a_queue_has_room_while_others_queue() -> None:
    engines = [
        engine("a", num_running=2, num_waiting=0, kv_used=0.1),
        engine("b", num_waiting=9, num_running=64),
        engine("c", num_waiting=8, num_running=64),
    ]
    found = {each.figure: each for each in findings(engines)}
    assert found["room"].engine == 0
    assert found["room"].text == "has room: 2 of 64 seats, KV 10%, 17 wait elsewhere"
    paused = [engines[0]._replace(state="paused"), *engines[1:]]
    assert "room" not in {each.figure for each in findings(paused)}


def test_down_engines_and_unknown_figures_are_neither_high_nor_low() -> None:
    names = ("kv_used", "ttft_p95_ms", "itl_p95_ms", "num_waiting", "prefix_hit_rate")
    unknown = engine("u", **dict.fromkeys(names))
    gone = EngineFigures("gone", "down")
    assert findings([engine("a"), unknown, gone, engine("b")]) == []
    assert findings([]) == findings([engine("a", kv_used=1.0, num_waiting=99)]) == []


_share = st.one_of(st.none(), st.floats(0, 1))
_figures = st.builds(
    engine,
    st.sampled_from("abcdef"),
    status=st.sampled_from(["live", "stale", "down"]),
    num_waiting=st.one_of(st.none(), st.integers(0, 500)),
    kv_used=_share,
    ttft_p95_ms=st.one_of(st.none(), st.floats(0, 1e5)),
    itl_p95_ms=st.one_of(st.none(), st.floats(0, 1e4)),
    num_preempted=st.one_of(st.none(), st.integers(0, 1000)),
    prefix_hit_rate=_share,
)


@given(st.lists(_figures, max_size=8))
def test_findings_are_of_engines_that_are_up_and_not_alike(engines: list[EngineFigures]) -> None:
    for found in findings(engines):
        assert engines[found.engine].is_up
        assert found.weight >= 0
    same = [each._replace(name=str(n)) for n, each in enumerate(engines[:1] * 5)]
    assert [found for found in findings(same) if found.figure != "room"] == []


def test_an_imbalance_is_named_once_it_has_lasted_and_hidden_when_it_ends() -> None:
    keeper = ImbalanceKeeper()
    calm = [engine("a"), engine("b"), engine("c")]
    loud = [engine("a"), engine("b", num_waiting=30), engine("c")]
    assert keeper.update(loud, 10.0) == []
    (found,) = keeper.update(loud, 10.0 + HOLD_S)
    assert (found.name, found.since_s, found.has_room) == ("b", 10.0, False)
    assert found.figures == ("waiting",)
    assert keeper.update(calm, 20.0) == []
    assert keeper.update(loud, 20.5) == []  # from the beginning
    assert keeper.update(loud, 20.5 + HOLD_S)
    down = [loud[0], EngineFigures("b", "down"), loud[2]]
    assert keeper.update(down, 21.0 + HOLD_S) == []


def test_differing_knobs_are_shown_against_those_of_the_majority() -> None:
    large, small = ({"max_num_batched_tokens": n, "policy": "fcfs"} for n in (8192, 512))
    engines = [
        engine("a", info=info("1"), knobs=large),
        engine("b", info=info("2", num_blocks=99), knobs=small),
        engine("c", info=info("3"), knobs=large),
    ]
    assert differences(engines) == ["max_num_batched_tokens: b 512; the others 8192"]
    assert differences(engines[:2]) == ["max_num_batched_tokens: a 8192; b 512"]
    whole = engines[0]._replace(knobs={"enable_chunked_prefill": False})
    sliced = engines[1]._replace(knobs={"enable_chunked_prefill": True})
    assert differences([whole, sliced])[-1] == "enable_chunked_prefill: a off; b on"
    twice = [engines[0], engines[0]._replace(name="z")]
    assert differences(twice) == ["a and z are one and the same engine"]


# The fleet over time


def test_engines_that_end_return_or_restart_are_reported(still_source: Call, clock: Clock) -> None:
    source, other = still_source(), still_source()
    source.name, other.name = "a", "b"
    fleet = Fleet([source, other], clock, clock)

    def look() -> Any:
        clock.now_s += LOOK_S
        return fleet.look().lines[0]

    assert look().figures.is_up
    source.status, source.error = "down", "nobody answers"
    clock.now_s += 7
    line = look()
    assert (line.figures.status, line.status_s, line.load[-1]) == ("down", 0.0, None)
    assert fleet.picture.num_up == 1
    assert "a is down: nobody answers" in told(fleet)
    source.status, source.error = "live", None
    look()
    source.status, source.error = "down", "a is gone: it was killed"
    look()
    assert told(fleet).endswith("a is gone: it was killed")
    source.status, source.error = "live", None
    assert look().figures.is_up
    assert told(fleet).endswith("a is back, the same engine as before")
    assert look().new_s is None
    history = source.history
    other = msgspec.structs.replace(history.info, engine_id="another")
    history.append(history.last_sequence + 1, other)
    line = look()
    assert told(fleet).endswith("a restarted: a new engine")
    assert line.new_s == 0.0
    clock.now_s += 100
    assert look().new_s is None
    status = EngineStatus(time_ns=1, state="paused", step=-1, num_running=0, num_waiting=0)
    history.append(history.last_sequence + 1, status)
    look()
    assert told(fleet).endswith("a was paused")
    source.status = "stale"
    assert look().silent_s == LOOK_S
    assert told(fleet).endswith("a answers, but sends no telemetry")
    assert not any(event.name == "b" for event in fleet.picture.events)


def test_silence_is_counted_from_the_last_message(still_source: Call, clock: Clock) -> None:
    source = still_source()
    fleet = Fleet([source], clock, clock)
    fleet.look()
    clock.now_s += 3.2
    assert fleet.look().lines[0].silent_s == pytest.approx(3.2)
    status = EngineStatus(time_ns=1, state="idle", step=-1, num_running=0, num_waiting=0)
    source.history.append(source.history.last_sequence + 1, status)
    clock.now_s += 1
    assert fleet.look().lines[0].silent_s == 0


def test_memory_does_not_grow_with_the_number_of_engines(still_source: Call, clock: Clock) -> None:
    sources = [still_source() for _ in range(16)]
    for number, source in enumerate(sources):
        source.name = f"e{number}"
    fleet = Fleet(sources, clock, clock)
    fleet.open(sources[3])
    kept = [source.history.max_steps for source in sources]
    assert kept.pop(3) == MAX_STEPS
    assert set(kept) == {FLEET_STEPS}
    assert sources[0].history.max_bytes == shared_bytes(16)
    assert 16 * shared_bytes(16) <= 4 * shared_bytes(4) == shared_bytes(1)
    fleet.open(sources[0])
    assert sources[3].history.max_steps == FLEET_STEPS
    for _ in range(NUM_LOADS + 10):
        clock.now_s += LOOK_S
        fleet.look()
    assert {len(line.load) for line in fleet.picture.lines} == {NUM_LOADS}


def test_a_lowered_step_limit_forgets_the_oldest_steps(still_source: Call) -> None:
    history = still_source(1_500).history
    assert history.num_steps == 1_500
    history.keep(300, 10**9)
    last = history.record(history.last_step)
    told = {"time_ns": last.tokens_ns, "step": last.step, "num_running": 0, "num_waiting": 0}
    history.append(history.last_sequence + 1, EngineStatus(state="idle", **told))
    assert 300 <= history.num_steps <= 600
    assert history.last_step == 1_499


def test_new_engines_join_and_share_the_memory_limit(still_source: Call, clock: Clock) -> None:
    appearing = [[], [still_source(), still_source()], []]
    fleet = Fleet([still_source()], clock, clock, lambda: appearing.pop(0))
    fleet.take_in()
    assert len(fleet) == 1
    assert fleet.sources[0].history.max_steps == MAX_STEPS
    fleet.take_in()
    fleet.take_in()
    assert fleet.names == ("still", "still#2", "still#3")
    fleet.look()
    assert told(fleet) == "still#2 has appeared; still#3 has appeared"
    kept = [source.history.max_steps for source in fleet.sources]
    assert kept == [MAX_STEPS, FLEET_STEPS, FLEET_STEPS]  # the one that was looked at


def test_engines_with_equal_names_are_numbered(still_source: Call, clock: Clock) -> None:
    fleet = Fleet([still_source(), still_source(), still_source()], clock)
    assert fleet.names == ("still", "still#2", "still#3")
    fleet.remove(fleet.sources[0])
    assert len(fleet.look().lines) == len(fleet) == 2


def test_an_engine_without_a_step_has_the_figures_of_its_snapshot(still_source: Call) -> None:
    source = still_source(2)
    source.history = History()
    settings = {"info": info("new", max_num_seqs=8), "knobs": {"max_num_seqs": 4}}
    kv = KVCounts(used=1, cached=0, empty=9, evicted=0)
    state = {"state": "idle", "requests": [], "blocks": None, "kv": kv, "knobs_version": 1}
    source.history.append(7, Snapshot(sequence=7, step=-1, time_ns=5, **settings, **state))
    found = figures("new", source, measure(source.history))
    assert (found.num_running, found.num_seats, found.kv_used) == (0, 4, 0.1)
    assert found.steps_per_s == 0.0  # it is idle: that is known
    assert found.itl_p95_ms is None


def test_an_engine_that_was_starting_is_reported_up(still_source: Call) -> None:
    source, clock = still_source(), Clock()
    fleet = Fleet([source], clock, clock)
    for status in ("starting", "connecting", "live", "live"):
        source.status = status
        clock.now_s += 1.0
        fleet.look()
    assert [event.text for event in fleet.picture.events][-1] == "is up"
    assert sum(event.text == "is up" for event in fleet.picture.events) == 1
