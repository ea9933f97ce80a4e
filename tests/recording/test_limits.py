"""What limited each step, and the advice: given where it helps and only there."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import KnobValue, Phase, RowFlag, StepRecord, Telemetry
from stepscope.recordings.compare.advice import advice
from stepscope.recordings.compare.side import Side
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.limits import LIMITS, UNKNOWN, limit_of
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.session import SessionState
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.later import Later

Messages = Sequence[tuple[int, Telemetry]]


class Session(NamedTuple):
    messages: Messages
    knobs: dict[str, KnobValue]


CHATS = SimulatedWorkload(rate=20.0, document_share=0.0, output_tokens=100)
DOCUMENTS = SimulatedWorkload(rate=6.0, document_share=0.8, document_tokens=3000, output_tokens=20)
QUIET = SimulatedWorkload(rate=2.0, document_share=0.0, output_tokens=40)
FAST = CostModel(floor_ms=8.0, token_us=5.0)


def run(
    workload: SimulatedWorkload, cost: CostModel | None = None, num_blocks: int = 4096, **knobs: Any
) -> Session:
    messages = Later(
        lambda: simulate(
            seed=2,
            num_steps=400,
            knobs=Knobs(**knobs),
            workload=workload,
            cost=cost or CostModel(),
            num_blocks=num_blocks,
            max_model_len=min(8192, (num_blocks - 1) * 16),
        )
    )
    return Session(messages, Knobs(**knobs).as_dict())


def side_of(session: Session, slo: SLO | None = None) -> Side:
    side = Side("run", slo or SLO(), SessionState(knobs=session.knobs))
    for _, message in session.messages:
        side.apply(message)
    return side


SEATS = run(CHATS, max_num_seqs=8, max_num_batched_tokens=2048)
SEATS_BUDGET_FULL = run(
    msgspec.structs.replace(DOCUMENTS, output_tokens=3), max_num_seqs=1, max_num_batched_tokens=256
)
BUDGET = run(DOCUMENTS, FAST, max_num_batched_tokens=256)
KV = run(CHATS, num_blocks=128, reserve="prompt")
MODE = run(CHATS, batching="static", max_num_seqs=32)
THRESHOLD = run(DOCUMENTS, FAST, max_num_batched_tokens=4096, long_prefill_token_threshold=64)
WORK = run(QUIET)
BUILT = {
    "seats": SEATS,
    "budget": BUDGET,
    "kv": KV,
    "mode": MODE,
    "threshold": THRESHOLD,
    "work": WORK,
}


def limit_shares(session: Session) -> dict[str, float]:
    figures = side_of(session).figures()
    return {limit: figures[f"limit_{limit}"] or 0.0 for limit in LIMITS}


@pytest.mark.parametrize("limit", BUILT)
def test_a_session_built_for_a_limit_is_mostly_held_by_it(limit: str) -> None:
    shares = limit_shares(BUILT[limit])
    assert sum(shares.values()) == pytest.approx(1)
    assert max(shares, key=lambda each: shares[each]) == limit
    assert shares[limit] > 0.3


def test_a_prompt_chunk_in_a_step_with_budget_left_was_cut_by_the_prefill_threshold() -> None:
    history = history_of(THRESHOLD.messages)
    for _, message in THRESHOLD.messages:
        if not isinstance(message, StepRecord) or message.waiting_reasons:
            continue
        summary = history.summary(message.step)
        is_cut = any(
            row.phase != Phase.DECODE and not row.flags & RowFlag.LAST_CHUNK
            for row in message.batch or ()
        )
        has_budget = summary.num_spent_tokens < (summary.token_budget or 0)
        assert (LIMITS[summary.limit] == "threshold") == (is_cut and has_budget)


@pytest.mark.parametrize("reason", ["transfer", "decode_engine"])
def test_a_step_whose_requests_wait_for_another_engine_has_an_unknown_limit(reason: str) -> None:
    record = next(message for _, message in WORK.messages if isinstance(message, StepRecord))
    outcome = Outcome()
    assert LIMITS[limit_of(record, outcome)] == "work"
    waiting = msgspec.structs.replace(record, num_waiting=3, waiting_reasons={reason: 3})
    assert limit_of(waiting, outcome) == UNKNOWN


@pytest.mark.parametrize(
    ("limit", "slo", "text"),
    [
        ("seats", SLO(), "raise max_num_seqs"),
        ("budget", SLO(ttft_ms=100, itl_ms=60), "raise max_num_batched_tokens"),
        ("kv", SLO(), "KV cache"),
        ("mode", SLO(), "batching=chunked"),
        ("threshold", SLO(), "raise long_prefill_token_threshold"),
    ],
)
def test_advice_says_what_to_change_and_names_its_evidence(limit: str, slo: SLO, text: str) -> None:
    said = {each.limit: each for each in advice(side_of(BUILT[limit], slo))}
    assert text in said[limit].text
    share = limit_shares(BUILT[limit])[limit]
    assert f"limited {share:.0%} of the steps" in said[limit].evidence


@pytest.mark.parametrize(
    ("session", "slo", "limit"),
    [
        (SEATS_BUDGET_FULL, SLO(), "seats"),  # more seats would share the same full budget
        (BUDGET, SLO(ttft_ms=60_000, itl_ms=60), "budget"),  # no first token is late
        (BUDGET, SLO(ttft_ms=100, itl_ms=5), "budget"),  # ITLs are too long already
        (THRESHOLD, SLO(itl_ms=5), "threshold"),
        (WORK, SLO(), "work"),
    ],
    ids=["budget is full", "no late first token", "late gaps", "late gaps in chunks", "nothing"],
)
def test_no_advice_is_given_without_evidence(session: Session, slo: SLO, limit: str) -> None:
    assert limit not in {each.limit for each in advice(side_of(session, slo))}


def test_a_short_session_gives_no_advice() -> None:
    short = [each for each in SEATS.messages if getattr(each[1], "step", 0) < 50]
    assert advice(side_of(SEATS._replace(messages=short))) == []


def test_an_engine_that_does_not_say_why_requests_wait_has_unknown_limits() -> None:
    bare = [
        (n, StepRecord(**{
            **{name: getattr(m, name) for name in StepRecord.__struct_fields__},
            "waiting_reasons": None, "token_budget": None, "max_num_seqs": None,
        })) if isinstance(m, StepRecord) else (n, m)
        for n, m in KV.messages
    ]  # fmt: skip
    figures = side_of(KV._replace(messages=bare)).figures()
    assert all(figures[f"limit_{limit}"] is None for limit in LIMITS)
