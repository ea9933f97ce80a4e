"""Sessions to seek in, and the reference for a seek: applying every message one by one."""

from collections.abc import Iterable
from pathlib import Path

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import Telemetry
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.seek import state_at
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.lanes_of import lanes_of


def busy(seed: int, num_steps: int) -> list[Telemetry]:
    """A session with prefill chunks, prefix hits, preemptions and knob changes."""
    told = simulate(
        seed=seed,
        num_steps=num_steps,
        num_blocks=200,
        max_model_len=2048,
        knobs=Knobs(max_num_batched_tokens=512, reserve="none"),
        changes={num_steps // 2: {"max_num_batched_tokens": 128}},
        workload=SimulatedWorkload(
            rate=14.0, document_share=0.1, document_tokens=1500, output_tokens=90
        ),
    )
    return [message for _, message in told]


def record(path: Path, messages: Iterable[tuple[int, Telemetry]]) -> Path:
    """Messages with their sequence numbers, as a recording."""
    writer = RecordingWriter(path)
    writer.start()
    for sequence, message in messages:
        writer.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))
    writer.close()
    assert writer.error is None
    return path


def one_by_one(
    recording: Recording, begin: Position, end: Position, history: History | None = None
) -> History:
    history = History() if history is None else history
    state, sequence = state_at(recording, begin)
    history.begin(state.copy(), sequence)
    for frame, after in recording.frames(begin, sequence):
        if after > end:
            break
        history.append(frame.sequence, frame.payload)
    return history


def assert_the_same(history: History, expected: History) -> None:
    """Check that all that a screen may show of two histories is equal."""
    first, last = expected.first_step, expected.last_step
    assert (history.first_step, history.last_step) == (first, last)
    assert (history.state, history.last_sequence) == (expected.state, expected.last_sequence)
    assert history.record(last) == expected.record(last)  # before any is unpacked
    assert history.summaries(first, last) == expected.summaries(first, last)
    assert lanes_of(history, first - 3, last + 3) == lanes_of(expected, first - 3, last + 3)
    assert history.windows.latency(None, None) == expected.windows.latency(None, None)
    for kind in ("itl", "ttft", "tpot", "step"):
        samples = [each.windows.samples(kind, None, None) for each in (history, expected)]
        assert list(samples[0]) == list(samples[1]), kind
    assert history.windows.sums(None, None) == expected.windows.sums(None, None)
    assert history.events(limit=10**6) == expected.events(limit=10**6)
    for name in ("knob_changes", "marks", "gaps", "num_lost", "needs_snapshot", "info"):
        assert getattr(history, name) == getattr(expected, name), name
    assert history.last_stall() == expected.last_stall()
    for step in {*range(first, last + 1, 61), first, last}:
        assert history.state_at(step) == expected.state_at(step)
        assert history.record(step) == expected.record(step)
    followers = [each.follow() for each in (history, expected)]
    assert followers[0].state == followers[1].state
    assert [*followers[0].read(10**6)] == [*followers[1].read(10**6)]
