"""Why a token was late: each cause in a session built for it, and pieces that add up."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import Command, Pause, Resume, SetKnobs, StepOnce, Submit
from stepscope.engine.protocol.knobs import Batching, Knobs, Limits
from stepscope.engine.protocol.replies import AnyReply, Error
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Admitted, Arrived, StepRecord, Telemetry
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.simulation.simulated import SimulatedRunner
from stepscope.recordings.attribution.causes import WORDS, Late, by_cause
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.explained import Affected, explain_recording
from stepscope.recordings.errors import NotInRecording
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import simulated_info
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.seek_sessions import record

MS = 1_000_000
# A step of decodes alone takes 8 ms and 40 us a token; every prefill token adds 40 us.
COST = CostModel(floor_ms=8.0, token_us=40.0, context_ns=0.0)


Messages = list[tuple[int, Telemetry]]


class Script:
    """A simulated engine that the test drives; keeps the messages that it publishes."""

    def __init__(self, num_blocks: int = 1024, *, overlap: bool = False, **knobs: Any) -> None:
        limits = Limits(max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=4096)
        self.runner = SimulatedRunner(COST)
        self.messages: Messages = []
        self.next_sequence = 0
        self.num_dropped = 0
        scheduler = Scheduler(KVCacheManager(num_blocks, 16), Knobs(**knobs), limits)
        info = simulated_info(limits, num_blocks, 16, 0)
        self.core = EngineCore(info, self.runner, scheduler, self, overlap=overlap)
        self._tokens = 0
        self.core.publish_heartbeat(idle=True)

    def publish(self, message: Telemetry) -> None:
        self.messages.append((self.next_sequence, wire.decode(wire.encode(message))))
        self.next_sequence += 1

    def reply(self, message: AnyReply) -> None:
        assert not isinstance(message, Error), message

    def ask(self, command: Command) -> None:
        self.core.inbox.put(Call(command, self))

    def submit(self, prompt: int, output: int, priority: int = 0, arrival_ns: Any = None) -> None:
        """Submit a prompt that shares no prefix with any other."""
        token_ids = [(self._tokens + at) % 4000 for at in range(prompt)]
        self._tokens += prompt + 1
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        named = {"client_id": f"c{self._tokens}", "priority": priority}
        submit = Submit(prompt_token_ids=token_ids, sampling=sampling, **named)
        self.core.inbox.put(Call(submit, self, token_ids, arrival_ns=arrival_ns))

    def run(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            stepped = self.core.step()
            self.core.publish_heartbeat(idle=not stepped)

    def sleep(self, ms: int) -> None:
        self.runner.advance_to(self.runner.clock() + ms * MS)


def explained(
    messages: Iterable[tuple[int, Telemetry]], itl_ms: float = 0, ttft_ms: float = 0
) -> list[Late]:
    explainer = Explainer(itl_ms * MS, ttft_ms * MS)
    for _, message in messages:
        explainer.take(message)
    assert_adds_up(explainer.late)
    return explainer.late


def assert_adds_up(waits: Iterable[Late]) -> None:
    for late in waits:
        assert sum(piece.ns for piece in late.pieces) == late.gap_ns
        assert sum(by_cause(late.pieces).values()) == late.gap_ns
        assert all(piece.ns > 0 and piece.cause in WORDS for piece in late.pieces)
        begun = [piece.start_ns for piece in late.pieces]
        assert begun == sorted(begun)
        assert late.text
        assert late.explanation


def wait_of(waits: list[Late], request_id: int, token_idx: int) -> Late:
    return next(w for w in waits if (w.request_id, w.token_idx) == (request_id, token_idx))


def causes(late: Late) -> dict[str, float]:
    return {piece.cause: piece.ns / MS for piece in late.pieces}


# Each cause


def test_prefills_that_wait_for_their_step_name_the_cadence_queued_and_running() -> None:
    script = Script(prefill_schedule_interval=4, max_num_batched_tokens=128)
    script.submit(64, 40)
    script.run()
    script.submit(200, 4)  # two chunks
    script.run(12)
    (late,) = [e for e in explained(script.messages) if e.request_id == 1 and not e.token_idx]
    queued = [each for each in late.pieces if each.cause == "queued"]
    left_out = [each for each in late.pieces if each.cause == "left_out"]
    assert {each.detail for each in queued} == {"cadence"}
    assert sum(each.num_steps for each in queued) == 3
    assert [(each.detail, each.num_steps) for each in left_out] == [("cadence", 3)]
    history = history_of(script.messages, SLO())
    held = [m.held_prefills for _, m in script.messages if isinstance(m, StepRecord)]
    assert history.windows.sums(None, None).limits["cadence"] == sum(held) / len(held)
    assert sum(held) == 6


def test_a_request_that_a_later_one_of_higher_priority_overtakes_waits_for_priority() -> None:
    script = Script(policy="priority", max_num_seqs=1)
    script.submit(64, 4)
    script.run()
    script.submit(64, 4, priority=1)  # r1
    script.run()
    script.submit(64, 4, priority=0)  # r2 takes the seat of r0
    script.run(12)
    waits = {late.request_id: late for late in explained(script.messages) if not late.token_idx}
    overtaken = "waited in the queue because later requests of higher priority went ahead"
    assert overtaken in waits[1].explanation
    assert "for a seat (max_num_seqs)" in waits[1].explanation
    assert overtaken not in waits[2].explanation
    records = [m for _, m in script.messages if isinstance(m, StepRecord)]
    ((step, rows),) = [(record.step, record.held) for record in records if record.held]
    assert [(row.request_id, row.reason) for row in rows] == [(1, "priority")]
    events = [e for _, m in script.messages if getattr(m, "step", 0) == step for e in m.events]
    assert [event.request_id for event in events if isinstance(event, Admitted)] == [2]


def test_a_prefill_chunk_in_the_step_is_named_as_cause_with_its_tokens() -> None:
    engine = Script()
    engine.submit(16, 10)
    engine.run(3)
    engine.submit(1000, 2)
    engine.submit(200, 2)
    engine.run(1)
    late = wait_of(explained(engine.messages), 0, 3)
    assert late.cause == "prefill"
    assert (late.main.request_id, late.main.num_tokens) == (1, 1000)
    assert late.main.num_other_tokens == 200
    assert late.main.ns == 8 * MS + 1201 * 40_000 + 200_000
    assert late.text == "step 3 prefill r1 1000 tok → ITL 56 ms"
    assert "shared 1 step with 1,000 prefill tokens of r1 (and 200 of others)" in late.explanation


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"max_num_seqs": 1}, "seats"),
        ({"max_num_batched_tokens": 1}, "budget"),
        ({"num_blocks": 256 + 1, "prompt": 4000}, "kv_blocks"),
        ({"batching": "naive"}, "batch"),
    ],
)
def test_a_wait_in_the_queue_names_what_was_waited_for(knobs: dict[str, Any], reason: str) -> None:
    prompt = knobs.pop("prompt", 16)
    engine = Script(**{"max_num_batched_tokens": 8192, **knobs})
    engine.submit(prompt, 5)
    engine.run(1)
    engine.submit(prompt, 5)
    engine.run(60)
    late = wait_of(explained(engine.messages), 1, 0)
    queued = next(piece for piece in late.pieces if piece.cause == "queued")
    assert queued.detail == reason
    steps = [m for _, m in engine.messages if isinstance(m, StepRecord)]
    (admitted,) = [s.step for s in steps for e in s.events if e == Admitted(1, 0)]
    assert sum(p.num_steps for p in late.pieces if p.cause == "queued") == admitted - 1
    assert late.kind == "TTFT"


def test_the_wait_of_a_decode_left_out_for_lack_of_budget_has_the_cause_budget() -> None:
    engine = Script(order="arrival")
    for _ in range(3):
        engine.submit(16, 20)
    engine.run(3)
    engine.ask(SetKnobs(changes={"max_num_batched_tokens": 1}, who="test"))
    engine.run(4)
    engine.ask(SetKnobs(changes={"max_num_batched_tokens": 64}, who="test"))
    engine.run(1)
    late = wait_of(explained(engine.messages), 1, 3)
    assert late.cause == "budget"
    assert late.main.num_steps == 4
    assert causes(late)["budget"] == pytest.approx(4 * (8 + 0.2 + 0.04))


def test_the_wait_of_a_decode_left_out_of_prefill_only_steps_names_the_prompt() -> None:
    engine = Script(batching="separate", max_num_batched_tokens=512)
    engine.submit(16, 20)
    engine.run(3)
    engine.submit(1100, 2)
    engine.run(4)
    late = wait_of(explained(engine.messages), 0, 3)
    # Two steps spend the budget; the third has some left and decodes nothing all the same.
    told = [(p.cause, p.request_id, p.num_tokens) for p in late.pieces]
    assert told == [("budget", 1, 1024), ("left_out", 1, 76), ("step", None, 0)]
    assert late.cause == "budget"


def test_a_preemption_is_named_with_the_tokens_recomputed() -> None:
    engine = Script(num_blocks=256, reserve="none", enable_prefix_caching=False)
    engine.submit(2000, 120)
    engine.submit(2000, 120)
    engine.run(150)
    records = [m for _, m in engine.messages if isinstance(m, StepRecord)]
    events = [(record.step, event) for record in records for event in record.events]
    step, victim = next((s, e.request_id) for s, e in events if isinstance(e, wire.Preempted))
    waits = [w for w in explained(engine.messages) if w.request_id == victim]
    late = next(w for w in waits if any(p.cause == "preempted" for p in w.pieces))
    rows = [row for r in records if step < r.step <= late.step for row in r.batch or ()]
    rows = [row for row in rows if row.request_id == victim]
    again = [row.num_tokens for row in rows if row.phase == wire.Phase.RECOMPUTE]
    assert late.cause == "preempted"
    recomputed = next(piece for piece in late.pieces if piece.cause == "recompute")
    assert recomputed.num_tokens == sum(again) > 2000
    out = [piece for piece in late.pieces if piece.cause == "preempted"]
    assert min(piece.step for piece in out) == step
    assert sum(p.num_steps for p in out) + recomputed.num_steps == late.step - step + 1


def test_explanations_distinguish_an_operators_pause_from_time_between_steps() -> None:
    engine = Script()
    engine.submit(16, 20)
    engine.run(2)
    engine.ask(Pause())
    engine.run(1)
    engine.sleep(700)
    engine.run(1)
    engine.ask(Resume())
    engine.run(1)
    engine.sleep(300)
    engine.run(1)
    waits = explained(engine.messages, itl_ms=50)
    assert [w.cause for w in waits if w.token_idx] == ["paused", "between"]
    paused, between = (w for w in waits if w.token_idx)
    assert (paused.paused_ns, paused.is_excused) == (700 * MS, True)
    assert "700.0 ms the operator had paused the engine" in paused.explanation
    assert (causes(between)["between"], between.is_excused) == (300.0, False)
    assert "300.0 ms between steps (update, record, publish)" in between.explanation


def test_a_requests_wait_at_an_idle_engine_is_idle_time() -> None:
    engine = Script()
    engine.submit(16, 1)
    engine.run(2)
    engine.sleep(40)
    engine.submit(16, 3)
    engine.run(3)
    for message in (m for _, m in engine.messages if isinstance(m, StepRecord)):
        for place, event in enumerate(message.events):
            if isinstance(event, Arrived) and event.request_id == 1:
                earlier = msgspec.structs.replace(event, time_ns=event.time_ns - 30 * MS)
                message.events[place] = earlier
    late = explained(engine.messages)[1]
    assert late.kind == "TTFT"
    assert "between" not in causes(late)
    assert causes(late)["idle"] == 30.0
    assert "30.0 ms the engine had been idle" in late.explanation


def test_waits_between_single_steps_count_as_the_operators_pause() -> None:
    engine = Script()
    engine.submit(16, 20)
    engine.run(2)
    for _ in range(3):
        engine.ask(StepOnce(n=1))
        engine.run(1)
        engine.sleep(500)
    engine.ask(Resume())
    engine.run(2)
    waits = [w for w in explained(engine.messages, itl_ms=50) if w.token_idx]
    assert len(waits) == 3
    assert all(w.paused_ns == 500 * MS and w.is_excused for w in waits)


def test_a_long_step_with_only_decodes_is_itself_the_cause_of_the_wait() -> None:
    engine = Script()
    engine.submit(16, 5)
    engine.run(3)
    late = wait_of(explained(engine.messages), 0, 1)
    assert (late.cause, len(late.pieces)) == ("step", 1)


def test_waits_over_lost_records_are_unknown_and_never_guessed() -> None:
    engine = Script()
    engine.submit(16, 40)
    engine.submit(30, 40)
    engine.ask(SetKnobs(changes={"max_num_batched_tokens": 2}, who="test"))
    engine.run(40)
    lost = [isinstance(m, StepRecord) and 20 <= m.step < 25 for _, m in engine.messages]
    kept = [each for each, is_lost in zip(engine.messages, lost, strict=True) if not is_lost]
    explainer, last = Explainer(50 * MS, 50 * MS), -1
    for number, message in kept:
        explainer.take(message, lost=number > last + 1)
        last = number
    assert_adds_up(explainer.late)
    steps = {m.step: m for _, m in kept if isinstance(m, StepRecord)}
    late = wait_of(explainer.late, 1, 0)
    unknown_ns = [piece.ns for piece in late.pieces if piece.cause == "unknown"]
    assert unknown_ns == [steps[25].schedule_start_ns - steps[19].tokens_ns]


# Laws


@st.composite
def sessions(draw: st.DrawFn) -> Messages:
    """Sessions of small engines under load, with pauses and knob changes in between."""
    rng = random.Random(draw(st.integers(0, 2**16)))
    engine = Script(
        num_blocks=draw(st.sampled_from([256, 300, 1024])),
        max_num_batched_tokens=draw(st.sampled_from([8, 64, 512, 4096])),
        max_num_seqs=draw(st.sampled_from([1, 3, 16])),
        order=draw(st.sampled_from(["decode_first", "arrival"])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        reserve=draw(st.sampled_from(["none", "prompt"])),
        batching=draw(st.sampled_from(get_args(Batching))),
    )
    for _ in range(draw(st.integers(3, 12))):
        for _ in range(rng.randrange(4)):
            engine.submit(rng.choice((3, 40, 900)), rng.randrange(1, 30), rng.randrange(3))
        what = rng.randrange(6)
        if what == 0:
            engine.ask(Pause())
            engine.run(1)
            engine.sleep(rng.randrange(1, 2500))
            engine.ask(rng.choice((Resume(), StepOnce(n=2))))
        elif what == 1:
            budget = rng.choice((2, 32, 2048))
            engine.ask(SetKnobs(changes={"max_num_batched_tokens": budget}, who="test"))
        engine.run(rng.randrange(1, 30))
        if not engine.core.scheduler.has_work():
            engine.sleep(rng.randrange(200))
    engine.ask(Resume())
    engine.run(60)
    return engine.messages


@settings(max_examples=15)
@given(sessions())
def test_a_wait_or_request_alone_is_explained_as_in_the_whole_session(messages: Messages) -> None:
    history = history_of(messages, SLO(ttft_ms=0.001, itl_ms=0.001))
    waits = explained(messages, itl_ms=0.001, ttft_ms=0.001)
    for late in waits[:: max(1, len(waits) // 25)]:
        assert history.wait(late.step, late.request_id) == late
    for view in list(history.state.requests.values())[:5]:
        life = history.lives.life(view)
        mine = [late for late in waits if late.request_id == view.request_id]
        assert [w.pieces for w in life.waits] == [late.pieces for late in mine]
        assert sum(p.ns for p in life.pieces) >= sum(late.gap_ns for late in mine)


# A whole recording


def test_time_before_the_recording_is_told_from_lost_messages(tmp_path: Path) -> None:
    engine = Script(max_num_batched_tokens=64)
    engine.submit(400, 3)
    engine.run(2)
    snapshot = engine.core.snapshot()
    num_before = len(engine.messages)
    engine.run(9)
    messages = [(snapshot.sequence, snapshot), *engine.messages[num_before:]]
    with Recording(record(tmp_path / "session.mcap", messages)) as recording:
        (joined,) = explain_recording(recording, SLO(1, 900)).late
    assert joined.pieces[0].text == "before the recording began"
    assert sum(piece.ns for piece in joined.pieces) == joined.gap_ns
    lost = [*engine.messages[:num_before], *engine.messages[num_before + 2 :]]
    with Recording(record(tmp_path / "session.mcap", lost)) as recording:
        (late,) = explain_recording(recording, SLO(1, 900)).late
    texts = {piece.text for piece in late.pieces if piece.cause == "unknown"}
    assert texts == {"records are missing"}


def test_a_wait_that_64_bits_do_not_hold_is_explained(tmp_path: Path) -> None:
    """An engine with a clock gone mad tells such times, and they are valid."""
    script = Script()
    script.submit(64, 20)
    script.run(10)
    *before, (sequence, last) = script.messages
    assert isinstance(last, StepRecord)
    mad = sequence, msgspec.structs.replace(last, tokens_ns=2**63 + 2**62)
    with Recording(record(tmp_path / "mad.mcap", [*before, mad])) as recording:
        found = explain_recording(recording, SLO())
    assert (found.itl.num_waits, found.itl.num_late) == (9, 1)
    assert found.itl.median_ms is not None


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("is_over", [False, True])
def test_an_earlier_pause_is_in_no_latency(tmp_path: Path, is_over: bool, is_told: bool) -> None:
    """Unless the snapshot tells of pauses, waits that began before it do not count."""
    engine = Script(max_num_batched_tokens=64)
    engine.ask(Pause())
    engine.submit(200, 3)
    engine.run(1)
    engine.sleep(900)
    if is_over:
        engine.ask(Resume())
        engine.run(2)  # of the four that the prompt takes
    history = history_of(engine.messages, SLO())
    snapshot = history.snapshot()
    assert [view.first_token_ns for view in snapshot.requests] == [None]
    if not is_told:
        snapshot = msgspec.structs.replace(snapshot, pauses=None)
    num_before = len(engine.messages)
    engine.ask(Resume())
    engine.run(8)
    messages = [(snapshot.sequence, snapshot), *engine.messages[num_before:]]
    with Recording(record(tmp_path / "session.mcap", messages)) as recording:
        found = explain_recording(recording, SLO(500, 50))
    is_known = is_told or not is_over
    assert [(late.kind, late.is_excused) for late in found.late] == [("TTFT", True)] * is_known
    assert (found.ttft.num_waits, found.ttft.num_late) == (int(is_known), 0)
    assert found.affected == Affected(1, 0, 0)
    assert found.itl.num_waits == 2
    pieces = [piece for late in found.late for piece in late.pieces]
    assert all(piece.ns < 100 * MS for piece in pieces if piece.cause == "unknown")


@pytest.mark.parametrize("num_single_steps", [0, 2])
def test_who_joins_during_a_pause_has_the_latencies_of_earlier_ones(num_single_steps: int) -> None:
    engine = Script(max_num_batched_tokens=64)
    engine.submit(16, 20)
    engine.submit(400, 4)
    engine.run(2)
    engine.ask(Pause())
    engine.run(1)
    engine.sleep(6000)
    for _ in range(num_single_steps):
        engine.ask(StepOnce(n=1))
        engine.run(2)
        engine.sleep(500)
    engine.run(1)
    told = engine.core.snapshot()
    there, late = History(), History()
    for sequence, message in engine.messages:
        there.append(sequence, message)
    late.append(told.sequence, told)
    seen = len(engine.messages)
    engine.ask(Resume())
    engine.run(12)
    for sequence, message in engine.messages[seen:]:
        there.append(sequence, message)
        late.append(sequence, message)
    since_ns = told.time_ns
    for kind in ("ttft", "itl"):
        expected = there.windows.samples(kind, None, None).cut(since_ns, there.state.time_ns)
        assert list(late.windows.samples(kind, None, None)) == list(expected) != []
    assert late.windows.breaches(None, 100) == []
    first = late.first_step
    waits = [late.wait(first, each) for each in late.state_at(first).requests]
    assert {wait.cause for wait in waits if wait is not None} == {"paused"}


# Arrivals


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("others_wait", [False, True])
def test_a_request_that_comes_during_a_step_waits_for_it(overlap: bool, others_wait: bool) -> None:
    """The next step's record tells of its arrival, or the one after where steps overlap."""
    engine = Script(max_num_seqs=2, overlap=overlap)
    engine.submit(20, 40)
    engine.run(3)
    if others_wait:  # until shortly before
        engine.submit(20, 2)
        engine.submit(20, 2)
        engine.run(4)
    steps = [m for _, m in engine.messages if isinstance(m, StepRecord)]
    last = steps[-1]
    came_ns = last.tokens_ns - 3 * MS  # the last step took 8
    engine.submit(30, 2, arrival_ns=came_ns)
    engine.run(4)
    late = wait_of(explained(engine.messages), engine.core.client_requests.next_request_id - 1, 0)
    assert late.start_ns == came_ns
    assert late.pieces[0].cause == "queued"
    assert late.pieces[0].step == last.step
    # Then for the step that was in flight behind it, or for a seat.
    assert late.pieces[0].ns == 3 * MS or ((overlap or others_wait) and late.pieces[0].ns > 3 * MS)
    assert "unknown" not in causes(late)


def affected(path: Path, itl_ms: float, ttft_ms: float, only: int | None = None) -> Affected:
    with Recording(path) as recording:
        return explain_recording(recording, SLO(ttft_ms, itl_ms), only).affected


def test_a_request_that_ended_before_the_recording_is_known_but_not_counted(tmp_path: Path) -> None:
    engine = Script()
    for _ in range(4):
        engine.submit(16, 3)
    engine.run(6)
    engine.submit(16, 40)
    engine.run(30)
    state = SessionState()
    begin = next(n for n, (_, m) in enumerate(engine.messages) if getattr(m, "step", 0) == 12)
    for _, message in engine.messages[:begin]:
        state.apply(message)
    snapshot = state.snapshot(begin - 1)
    assert [view.status for view in snapshot.requests].count("finished") == 4
    path = record(tmp_path / "later.mcap", [(begin - 1, snapshot), *engine.messages[begin:]])
    assert affected(path, 1, 1) == Affected(1, 1, 0)
    assert affected(path, 1, 1, only=0) == Affected(1, 0, 0)
    with pytest.raises(NotInRecording, match=r"\(r0 to r4\)"):
        affected(path, 1, 1, only=5)
