"""Steps that took far longer than their work explains are found, and no others."""

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import StepRecord, Telemetry
from stepscope.engine.simulation.step_time import StepShape
from stepscope.recordings.attribution.baseline import MIN_STEPS, Baseline, StepWork
from stepscope.recordings.attribution.causes import HOLD_UPS, Late
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.explained import Explanation, explain_recording
from stepscope.recordings.attribution.ledger import Ledger
from stepscope.recordings.attribution.queue import reason_text
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload
from tests.support.sessions.seek_sessions import record as recorded
from tests.support.sessions.slow_step_sessions import (
    HELD_MS,
    MS,
    NoisyCost,
    once_beside_a_prompt,
    session,
    slow_pieces,
)

Call = Callable[..., Any]

Messages = list[tuple[int, Telemetry]]
Slow = tuple[Path, Messages, int]  # the recording, what is in it, and its slow step


def explained(messages: Messages, *, learns: bool = False) -> list[Late]:
    """All waits; each step is judged by all steps or, with `learns`, by the steps before it."""
    baseline = Baseline()
    first = Explainer(-1, -1, learns=baseline)
    second = Explainer(-1, -1, baseline=baseline, learns=baseline if learns else None)
    for explainer in (second,) if learns else (first, second):
        for _, message in messages:
            explainer.take(message)
    for late in second.late:
        assert sum(piece.ns for piece in late.pieces) == late.gap_ns
    return second.late


def of_file(path: Path, itl_ms: float = 5, ttft_ms: float = 50, **options: Any) -> Explanation:
    with Recording(path) as recording:
        return explain_recording(recording, SLO(ttft_ms, itl_ms), **options)


def record_of(messages: Messages, step: int) -> StepRecord:
    return next(m for _, m in messages if isinstance(m, StepRecord) and m.step == step)


def changed(messages: Messages, step: int, **values: Any) -> Messages:
    old = record_of(messages, step)
    return [(n, msgspec.structs.replace(m, **values) if m is old else m) for n, m in messages]


@pytest.fixture(scope="module")
def slow_session(tmp_path_factory: pytest.TempPathFactory, recorded_to: Call) -> Slow:
    """A session in which one step with a prompt was slow."""
    cost = NoisyCost(holds=once_beside_a_prompt(600))
    messages = session(cost, knobs=Knobs(max_num_batched_tokens=256, max_num_seqs=16))
    path = tmp_path_factory.mktemp("usual") / "held.mcap"
    with recorded_to(path) as source:
        for sequence, message in messages:
            source.take(sequence, message)
    (step,) = cost.slow
    return path, messages, step


def test_a_slow_step_is_not_blamed_on_the_prompt_in_it(slow_session: Slow) -> None:
    path, _, step = slow_session
    found = of_file(path, 200, 60_000)
    gaps = [late for late in found.late if late.step == step]
    assert gaps
    assert gaps == found.late  # no other step took so long
    for late in gaps:
        assert late.cause == "held_up"
        assert sum(piece.ns for piece in late.pieces) == late.gap_ns
        (slow,) = slow_pieces([late])
        (shared,) = [piece for piece in late.pieces if piece.cause == "prefill"]
        assert slow.ns / MS == pytest.approx(HELD_MS, rel=0.05)
        assert shared.ns == slow.baseline_ns == slow.took_ns - slow.ns
        assert f"1 step took {slow.times:.0f}x as long as is usual for its work" in late.explanation
        assert late.text.startswith(f"step {step} held up (")
    assert found.shares[0].cause == "held_up"
    assert found.shares[0].num_late == len(gaps)


def test_explain_names_the_slow_step_in_json_and_table(slow_session: Slow, stepscope: Call) -> None:
    path, _, step = slow_session
    options = ("explain", str(path), "--slo-itl", "200ms", "--slo-ttft", "60s")
    found = json.loads(stepscope(*options, "--json").stdout)
    assert found["causes"][0]["cause"] == "held_up"
    for late in found["late"]:
        assert (late["step"], late["cause"]) == (step, "held_up")
        (slow,) = [piece for piece in late["pieces"] if piece["cause"] == "held_up"]
        assert slow["ms"] == pytest.approx(slow["took_ms"] - slow["baseline_ms"])
        others = [piece for piece in late["pieces"] if piece is not slow]
        assert all(piece["took_ms"] == piece["baseline_ms"] == 0 for piece in others)
    table = stepscope(*options).stdout
    assert re.search(r"^machine or engine held up +\d+ +[\d,]+ ms +\d\d\.\d%$", table, re.MULTILINE)


def test_explained_in_one_pass_a_step_is_judged_by_earlier_steps(slow_session: Slow) -> None:
    _, messages, step = slow_session
    assert {piece.step for piece in slow_pieces(explained(messages, learns=True))} == {step}


def test_a_slow_step_also_delays_queued_and_prefilling_requests(slow_session: Slow) -> None:
    _, messages, step = slow_session
    record = record_of(messages, step)
    waits = explained(messages)
    through = [w for w in waits if w.start_ns <= record.schedule_start_ns and w.step >= step]
    assert {w.kind for w in through} == {"ITL", "TTFT"}
    for late in through:
        (slow,) = slow_pieces([late])
        assert slow.ns / MS == pytest.approx(HELD_MS, rel=0.05)
    others = [w for w in waits if w.end_ns <= record.schedule_start_ns or w.step > step + 200]
    assert not slow_pieces(others)


def test_causes_do_not_depend_on_the_bounds_or_the_selected_request(slow_session: Slow) -> None:
    path, _, step = slow_session
    given = {(w.request_id, w.step): w.pieces for w in of_file(path, 20, 200).late}
    derived = {(w.request_id, w.step): w.pieces for w in of_file(path).late}
    both = given.keys() & derived.keys()
    assert any(at == step for _, at in both)
    assert all(given[key] == derived[key] for key in both)
    request_id = next(request_id for request_id, at in both if at == step)
    alone = of_file(path, 20, 200, request_id=request_id)
    assert {(w.request_id, w.step): w.pieces for w in alone.late} == {
        key: pieces for key, pieces in given.items() if key[0] == request_id
    }


def test_memory_and_recording_explain_a_slow_step_alike(slow_session: Slow) -> None:
    path, messages, step = slow_session
    history = History(SLO(ttft_ms=60_000, itl_ms=200))
    for sequence, message in messages:
        history.append(sequence, message)
        if isinstance(message, StepRecord) and message.step == step:
            assert history.stall(step).cause == "held_up"
    late = history.stall(step)
    of = {w.request_id: w for w in of_file(path, 200, 60_000).late if w.step == step}
    told = of[late.request_id]
    assert [piece.cause for piece in late.pieces] == [piece.cause for piece in told.pieces]
    for mine, other in zip(late.pieces, told.pieces, strict=True):
        assert mine.ns == pytest.approx(other.ns, rel=0.1)
    life = history.lives.life(history.state.requests[late.request_id])
    assert [wait.pieces for wait in life.waits if wait.step == step] == [late.pieces]


LONG = SimulatedWorkload(rate=0.6, document_share=0.5, document_tokens=20_000, output_tokens=60)
MIXED = SimulatedWorkload(rate=4.0, document_share=0.3, document_tokens=3000, output_tokens=60)


LARGE = {"num_blocks": 8192, "max_model_len": 40_000, "context_ns": 60.0}
BATCHES: dict[str, dict[str, Any]] = {
    "chunks": {"knobs": Knobs(max_num_batched_tokens=256)},
    "long contexts": {"knobs": Knobs(max_num_batched_tokens=512), "workload": LONG, **LARGE},
    "whole prompts": {
        "knobs": Knobs(max_num_batched_tokens=8192, enable_chunked_prefill=False),
        "context_ns": 60.0,
    },
    "padded": {"knobs": Knobs(batching="static", max_num_seqs=8)},
    "separate": {"knobs": Knobs(batching="separate")},
    "preempted": {"knobs": Knobs(max_num_batched_tokens=1024), "num_blocks": 520},
    "overlap": {"knobs": Knobs(max_num_batched_tokens=256), "overlap": True},
}


@cache
def undisturbed(name: str, seed: int) -> Messages:
    """A session in which no step was slow, with large batches of this kind."""
    given = {"workload": MIXED, **BATCHES[name]}
    base = CostModel(floor_ms=4.0, context_ns=given.pop("context_ns", 20.0))
    return session(NoisyCost(base), **given, seed=seed)


@pytest.mark.parametrize("learns", [False, True], ids=["all steps known", "steps so far"])
@pytest.mark.parametrize("name", list(BATCHES))
def test_a_large_batch_alone_makes_no_step_slow(name: str, learns: bool) -> None:
    assert not slow_pieces(explained(undisturbed(name, seed=1), learns=learns))


def test_a_chunk_late_in_a_long_prompt_is_slow_only_above_the_baseline_of_such_chunks() -> None:
    base = CostModel(floor_ms=4.0, context_ns=30.0)

    def holds(step: int, shape: StepShape) -> bool:
        num_tokens = shape.num_prefill_tokens
        if cost.slow or step < 300 or num_tokens <= 256:
            return False
        return shape.num_prefill_pairs > 15_000 * num_tokens

    cost = NoisyCost(base, holds)
    messages = session(
        cost, knobs=Knobs(max_num_batched_tokens=512), workload=LONG, num_blocks=8192,
        max_model_len=40_000, num_steps=900,
    )  # fmt: skip
    chunks = [
        (row.start, record.tokens_ns - record.schedule_start_ns, record.step)
        for _, record in messages
        if isinstance(record, StepRecord)
        for row in record.batch or ()
        if row.num_tokens > 400
    ]
    early = min(ns for start, ns, _ in chunks if start < 1000)
    late = min(ns for start, ns, _ in chunks if start > 15_000)
    assert late > 5 * early  # against the median of equal chunks, the late ones would be slow
    assert {piece.step for piece in slow_pieces(explained(messages))} == set(cost.slow)


def test_no_step_counts_as_slow_without_enough_similar_steps() -> None:
    cost = NoisyCost(holds=once_beside_a_prompt(5))
    messages = session(cost, num_steps=MIN_STEPS, workload=SimulatedWorkload(rate=60.0))
    assert cost.slow
    assert not slow_pieces(explained(messages))


def test_the_baseline_of_rare_work_uses_steps_of_more_work_never_of_less() -> None:
    baseline, work = Baseline(), StepWork(100, 100_000, 500)

    def baseline_ns(work: StepWork) -> int | None:
        slow = baseline.slow_step(work, 10**15)
        return None if slow is None else slow.baseline_ns

    for _ in range(MIN_STEPS):
        baseline.add(work, 50 * MS)
    assert baseline_ns(work) == pytest.approx(50 * MS, rel=0.01)
    for figure in StepWork._fields:
        number = getattr(work, figure)
        assert baseline_ns(work._replace(**{figure: number // 3})) == baseline_ns(work)
        assert baseline_ns(work._replace(**{figure: number * 2})) is None
        assert baseline_ns(work._replace(**{figure: number // 30})) is None  # far less of it
    assert baseline.slow_step(work, 140 * MS) is None
    slow = baseline.slow_step(work, 500 * MS)
    assert slow.took_ns - slow.baseline_ns == pytest.approx(450 * MS, rel=0.01)
    still = baseline.slow_step(work, 140 * MS, after_slow=True)
    assert still.took_ns - still.baseline_ns == pytest.approx(90 * MS, rel=0.01)
    assert baseline.slow_step(work, 95 * MS, after_slow=True) is None


def num_read(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> int:
    """How many messages the call decodes."""
    number, decode = 0, wire.decode

    def counted(payload: bytes) -> Telemetry:
        nonlocal number
        number += 1
        return decode(payload)

    with monkeypatch.context() as patch:
        patch.setattr(wire, "decode", counted)
        call()
    return number


def test_the_steps_of_a_request_are_seldom_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(SLO(ttft_ms=60_000, itl_ms=200))
    workload = SimulatedWorkload(rate=2.0, output_tokens=3000)
    request_id, before, num_anew = None, 0, 0
    for sequence, message in session(NoisyCost(), workload=workload, num_steps=1600):
        history.append(sequence, message)
        if sequence % 50 or not history.state.requests:
            continue
        request_id = min(history.state.requests) if request_id is None else request_id
        view = history.state.requests[request_id]
        read = num_read(monkeypatch, lambda view=view: history.lives.life(view))
        num_anew += read > sequence + 1 - before
        before = sequence + 1
    assert 0 < num_anew <= 8


def test_the_waits_of_a_request_are_explained_again_once_one_of_its_steps_is_found_slow() -> None:
    cost = NoisyCost(holds=once_beside_a_prompt(5))
    history, view, told = History(SLO(ttft_ms=60_000, itl_ms=200)), None, []
    for sequence, message in session(cost, knobs=Knobs(max_num_batched_tokens=256)):
        history.append(sequence, message)
        if isinstance(message, StepRecord) and cost.slow == [message.step]:
            view = history.state.requests[message.batch[0].request_id]
        if view is not None and sequence % 10 == 0:
            life = history.lives.life(view)
            told.append([piece.step for piece in slow_pieces(life.waits)])
            assert sum(piece.ns for piece in life.pieces) == sum(w.gap_ns for w in life.waits)
    assert told[0] == []  # too few steps are known
    assert told[-1] == cost.slow


def held_waits(slow_session: Slow, *rows: wire.HoldUp) -> list[Late]:
    """The waits through the slow step, of which this is known."""
    _, messages, step = slow_session
    found = [late for late in explained(with_held_up(messages, step, *rows)) if late.step == step]
    assert found
    return found


def with_held_up(messages: Messages, step: int, *rows: wire.HoldUp) -> Messages:
    return changed(messages, step, hold_ups=list(rows))


@pytest.mark.parametrize(
    ("kind", "detail", "said"),
    [
        ("stopped", "", "the engine's process was stopped (SIGSTOP, or its host froze it)"),
        ("stopped", "9 pages", "stood still, and read 9 pages of its memory from the disk"),
        ("descheduled", "", "the engine waited for a processor"),
        ("gc", "generation 2", "Python collected garbage (generation 2)"),
        ("gc_elsewhere", "generation 2 on another thread", "(generation 2 on another thread)"),
        ("jit", "_fwd", "the kernel _fwd was compiled"),
    ],
)
def test_a_known_hold_up_is_named(slow_session: Slow, kind: str, detail: str, said: str) -> None:
    _, messages, step = slow_session
    record = record_of(messages, step)
    known = wire.HoldUp(kind, record.tokens_ns - 840 * MS, 2_000 * MS, detail)
    unknown, named = held_waits(slow_session), held_waits(slow_session, known)
    for before, late in zip(unknown, named, strict=True):
        (held,) = [piece for piece in before.pieces if piece.cause == "held_up"]
        (piece,) = [piece for piece in late.pieces if piece.cause == HOLD_UPS[kind]]
        assert late.cause == piece.cause
        assert piece.ns == pytest.approx(held.ns, rel=0.01)  # no more than the step was slower
        assert said in late.explanation
        assert not slow_pieces([late])


def test_of_a_slow_step_the_part_that_nothing_explains_stays_held_up(slow_session: Slow) -> None:
    _, messages, step = slow_session
    start_ns = record_of(messages, step).schedule_start_ns
    rows = [wire.HoldUp("gc", start_ns + each * MS, 60 * MS, "generation 2") for each in (0, 40)]
    for late in held_waits(slow_session, *rows):
        (gc,) = [piece for piece in late.pieces if piece.cause == "gc"]
        (held,) = slow_pieces([late])
        assert gc.ns == 100 * MS  # they overlap
        assert held.ns / MS == pytest.approx(HELD_MS - 100, rel=0.05)


def test_the_time_between_two_steps_is_divided_by_what_held_the_engine_up() -> None:
    messages = session(NoisyCost(noise=0.0), num_steps=60)
    steps = [m for _, m in messages if isinstance(m, StepRecord)]
    before, later = next((a, b) for a, b in pairwise(steps) if a.num_running and not b.events)
    half_ns = (later.tokens_ns - later.schedule_start_ns) // 2
    later = msgspec.structs.replace(later, schedule_start_ns=later.schedule_start_ns + half_ns)
    messages = [(n, later if getattr(m, "step", -1) == later.step else m) for n, m in messages]
    begin_ns = before.tokens_ns
    gap_ns = later.schedule_start_ns - begin_ns
    row = wire.HoldUp("jit", begin_ns + gap_ns // 4, gap_ns // 2, "kernel")
    unknown = wire.HoldUp("of the future", begin_ns, gap_ns)
    found = explained(with_held_up(messages, later.step, unknown, row))
    causes = [
        [(piece.cause, piece.ns) for piece in late.pieces if piece.start_ns < begin_ns + gap_ns]
        for late in found
        if late.start_ns == begin_ns and late.step == later.step
    ]
    expected = [("between", gap_ns - gap_ns // 2), ("jit", gap_ns // 2)]
    assert causes == [expected] * len(causes) != []


def with_loads(messages: Messages, step: int, *loads: wire.Admitted) -> Messages:
    return changed(messages, step, events=[*record_of(messages, step).events, *loads])


def test_a_step_that_loads_more_than_it_prefills_names_its_largest_load(slow_session: Slow) -> None:
    _, messages, step = slow_session
    loads = [wire.Admitted(9_000, 640, 512), wire.Admitted(9_001, 640, 640)]
    for late in explained(with_loads(messages, step, *loads)):
        if late.step == step:
            assert late.cause == "transfer"
            assert "640 tokens of r9001 were loaded" in late.explanation
            assert not any(piece.cause == "prefill" for piece in late.pieces)


def test_a_slow_step_is_divided_between_its_prefill_and_a_smaller_load(slow_session: Slow) -> None:
    _, messages, step = slow_session
    found = explained(with_loads(messages, step, wire.Admitted(9_000, 16, 16)))
    named = [late for late in found if late.step == step and late.cause == "transfer"]
    causes = [[piece.cause for piece in late.pieces if piece.ns > MS] for late in named]
    assert causes == [["prefill", "transfer"]] * len(named) != []


def test_the_screens_name_the_hold_up(slow_session: Slow, tmp_path: Path, stepscope: Call) -> None:
    _, messages, step = slow_session
    record = record_of(messages, step)
    known = wire.HoldUp("stopped", record.tokens_ns - 840 * MS, 840 * MS)
    path = recorded(tmp_path / "held.mcap", with_held_up(messages, step, known))
    for page, size, said in (
        ("step", "200x60", "held up 840 ms: the engine's process was stopped (SIGSTOP, or its"),
        ("step", "80x24", "held up 840 ms: the engine's process was stopped"),
        ("main", "200x60", f"stood still 0.9 s at step {step}: process stopped"),
    ):
        picture = tmp_path / f"{page}-{size}.txt"
        options = ["--page", page, "--at", str(step), "--size", size, "-o", str(picture)]
        assert stepscope("screenshot", str(path), *options).exit_code == 0
        assert said in picture.read_text("utf-8")


def test_a_wait_for_a_processor_gets_what_is_left_of_a_slow_step(slow_session: Slow) -> None:
    end_ns = record_of(*slow_session[1:]).tokens_ns
    waited = wire.HoldUp("descheduled", end_ns - 600 * MS, 600 * MS)
    collected = wire.HoldUp("gc", end_ns - 500 * MS, 400 * MS, "generation 2")
    for late in held_waits(slow_session, waited, collected):
        ns = {piece.cause: piece.ns for piece in late.pieces}
        assert ns["gc"] == 400 * MS
        assert ns["descheduled"] / MS == pytest.approx(HELD_MS - 400, rel=0.05)
        assert "held_up" not in ns


def test_the_queue_says_how_long_it_waited_for_a_process_that_was_stopped() -> None:
    messages = session(NoisyCost(), num_steps=400, knobs=Knobs(max_num_seqs=1))
    steps = [m for _, m in messages if isinstance(m, StepRecord)]
    last = next(m for m in steps[200:] if m.num_waiting and not m.events)
    ns = last.tokens_ns - last.schedule_start_ns
    known = wire.HoldUp("stopped", last.schedule_start_ns, ns - ns // 4)
    ledger = Ledger(SessionState())
    for _, message in with_held_up(messages, last.step, known):
        ledger.take(message)
    waits = [*ledger.admitted(), *ledger.waiting()]
    stopped = {wait.reasons["stopped"] for wait in waits if "stopped" in wait.reasons}
    assert stopped == {known.ns}
    assert reason_text("stopped") == "the engine's process, which was stopped"
