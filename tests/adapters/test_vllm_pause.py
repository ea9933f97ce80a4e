"""vLLM paused through its own API, and its running requests taken out by a reset of its cache."""

import pytest

from stepscope.engine.protocol.wire import EngineStatus, Preempted
from stepscope.recordings.attribution.ledger import Ledger
from stepscope.recordings.history.history import History
from stepscope.recordings.history.verdict import verdict_of
from stepscope.recordings.state.session import SessionState
from tests.adapters.conftest import Attach, published
from tests.adapters.played_vllm import PlayedScheduler
from tests.adapters.test_vllm_schedules import Played, explained


@pytest.fixture(params=["0.32.0", "0.33.0"])
def played(attach: Attach, request: pytest.FixtureRequest) -> Played:
    return Played(attach, request.param, "pause")


def test_a_paused_vllm_says_that_it_is_paused_since_when_and_by_whom(played: Played) -> None:
    session, states, history = SessionState(), [], History()
    said = set()
    for sequence, message in played.messages:
        session.apply(message)
        history.append(sequence, message)
        if isinstance(message, EngineStatus) and message.state != "stopped":
            states.append((message.state, session.pauses.since_ns is not None))
            said.add(verdict_of(history).text.rpartition(" for ")[0])
    told = [each for each, after in zip(states, [*states[1:], None], strict=True) if each != after]
    kinds = [("draining", False), ("running", False), ("paused", True), ("running", False)]
    assert told[-4:] == kinds
    assert "paused by vLLM's own API" in said
    assert [each.command for each in played.audited] == ["Pause", "Resume"] * 2


def test_who_waits_for_a_paused_vllm_waits_for_the_pause(played: Played) -> None:
    assert {"paused": 1} in [step.waiting_reasons for step in played.steps]
    late = explained(played.messages).late
    queued = next(each for each in late if each.token_idx == 0 and each.request_id == 3)
    said = "waited in the queue because the engine admits nobody (paused)"
    assert any(piece.text.startswith(said) for piece in queued.pieces)


def test_requests_that_a_reset_took_out_did_not_lack_blocks(played: Played) -> None:
    assert [event.reason for event in played.of(Preempted)] == ["the prefix cache was reset"] * 6
    assert not any("preemption" in (step.waiting_reasons or {}) for step in played.steps)
    pieces = [piece for late in explained(played.messages).late for piece in late.pieces]
    again = [piece.text for piece in pieces if piece.cause == "recompute"]
    assert again
    assert all(text.endswith("the prefix cache was reset") for text in again)


def test_the_queue_of_a_vllm_that_is_still_paused_waits_for_the_pause(attach: Attach) -> None:
    scheduler = PlayedScheduler("0.32.0", "pause")
    attachment = attach(scheduler)
    for call in scheduler.play():
        if call == "reset" and scheduler.pause_state is not None:
            with attachment.notes.done():
                for _ in range(2):  # the first tells of the preemptions
                    attachment.core.heartbeat.publish_status("paused")
            break
    ledger = Ledger(SessionState())
    for _, message in published(attachment):
        ledger.take(message)
    assert {wait.request_id for wait in ledger.waiting()} == {1, 2, 3, 4}
    assert all(set(wait.reasons) == {"paused"} for wait in ledger.waiting())
