"""A recorder keeps less in memory than a history, but with the same counts."""

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import EngineInfo, Snapshot, StepRecord
from stepscope.recordings.history.history import History, Journal
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.later import Later

# A cache so small that requests are preempted and resumed.
MESSAGES = Later(
    lambda: simulate(
        seed=3,
        num_steps=1500,
        num_blocks=160,
        max_model_len=2048,
        workload=SimulatedWorkload(
            rate=20.0, document_share=0.1, chat_tokens=150, document_tokens=900
        ),
        knobs=Knobs(max_num_batched_tokens=512, reserve="none"),
    )
)


def test_the_test_messages_contain_every_kind_of_request_event() -> None:
    events = {
        type(event).__name__
        for _, message in MESSAGES
        if isinstance(message, StepRecord)
        for event in message.events
    }
    assert events >= {"Arrived", "Admitted", "FirstToken", "Finished", "Preempted"}


@pytest.mark.parametrize("lost", [range(0), range(300, 320), range(1490, 1495)])
def test_a_journal_counts_lost_messages_like_a_history_and_keeps_no_step(lost: range) -> None:
    journal, history = Journal(), History()
    info = next(message for _, message in MESSAGES if isinstance(message, EngineInfo))
    for each in (journal, history):
        for sequence, message in MESSAGES:
            if sequence not in lost:
                each.append(sequence, message)
    for name in ("num_lost", "gaps", "last_sequence", "needs_snapshot", "info"):
        assert getattr(journal, name) == getattr(history, name), name
    state, whole = journal.state, history.state
    assert (state.state, state.step, state.time_ns) == (whole.state, whole.step, whole.time_ns)
    assert journal.num_steps == 0
    assert journal.snapshot() is None
    assert not state.requests  # a week of them would not fit
    # A snapshot corrects the state, and another engine begins a new journal.
    mended = whole.snapshot(len(MESSAGES) + 10)
    assert mended is not None
    journal.append(mended.sequence, mended)
    assert not journal.needs_snapshot
    assert journal.num_lost == len(lost) + 11
    other = msgspec.structs.replace(info, engine_id="another")
    journal.append(5, Snapshot(**_fields(mended) | {"info": other, "sequence": 5}))
    assert journal.num_lost == 0
    assert journal.last_sequence == 5
    assert journal.previous is not None
    assert journal.previous.num_lost == len(lost) + 11
    with pytest.raises(msgspec.DecodeError):
        journal.append(6, b"nonsense")
    assert wire.encode(other)


def _fields(snapshot: Snapshot) -> dict[str, object]:
    return {name: getattr(snapshot, name) for name in snapshot.__struct_fields__}
