"""The waits for tokens that ended in a chunk of a recording, step by step.

They are those that a `Timeline` has once these steps are in memory, at two fifths of the price: the
same reducer takes the same steps (`FastForward`), and of a step nothing else is worked out. Where
something is not as it mostly is (lost or repeated messages, another engine, a clock that was set
back, damage) a history is made of the chunk and asked.
"""

from collections import Counter
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineInfo, Mark, Snapshot, StepRecord
from stepscope.recordings.attribution.usual import StepWork, work_with
from stepscope.recordings.file.loaded_chunk import KEYFRAME, LoadedChunk
from stepscope.recordings.file.reader import Position, Recording, whole_sequence
from stepscope.recordings.history.history import History
from stepscope.recordings.history.ring.fast_forward import FastForward
from stepscope.recordings.history.ring.packed_record import decode_packed
from stepscope.recordings.replay.excerpt import Turn, excerpt
from stepscope.recordings.replay.filling import DAMAGE
from stepscope.recordings.state.clocks import goes_on
from stepscope.recordings.state.number_bounds import MAX_NUMBER, check_numbers
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.pauses import Pauses, leave_out
from stepscope.recordings.state.series.events import SessionEvent
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SessionState

_TURN_MESSAGES = 32  # a millisecond: who draws meanwhile is to wait no longer
_GAP = frozenset({"gap"})


class StepWait(NamedTuple):
    """The longest wait of its kind that ended in a step, the operator's pauses not counted."""

    step: int
    time_ns: int  # of the engine, when it ended
    ns: int
    request_id: int
    num_tokens: int  # that came after this very wait


class ChunkWaits(NamedTuple):
    """What was found in a chunk, in order of steps."""

    itl: list[StepWait]  # between two tokens
    ttft: list[StepWait]  # for a first token
    gaps: list[SessionEvent]  # messages that were lost
    steps: list[tuple[StepWork, int]]  # what each that tells it computed, and how long it took


def waits_in(recording: Recording, number: int, turn: Turn) -> ChunkWaits | None:
    """Those of the chunk `number`; None when `turn` has ended it.

    Raises:
        RecordingError: no keyframe can be read.
        msgspec.DecodeError: a message is none.
    """
    try:
        return _Reader(recording, number).read(turn)
    except (_UnusualError, *DAMAGE):
        return _of_history(recording, number, turn)


class _UnusualError(Exception):
    """A message is not the one that follows on the one before it."""


class _Reader:
    """Reads one chunk in which all is as it mostly is."""

    def __init__(self, recording: Recording, number: int) -> None:
        snapshot, self._begin = recording.keyframe_before(Position(number, 1))
        if self._begin > Position(number, 1):
            places = recording.chunk(number).step_places
            if self._begin.chunk > number or (places and places[0] < self._begin.message):
                raise _UnusualError
        elif self._begin.chunk == number:  # maybe something was lost just before it
            frames = recording.chunk(number - 1).frames if number else ()
            if frames and frames[-1].sequence != snapshot.sequence & 0xFFFF_FFFF:
                raise _UnusualError
        self._recording = recording
        self._number = number
        # Blocks say nothing of waits.
        self._state = SessionState.from_snapshot(msgspec.structs.replace(snapshot, blocks=None))
        self._forward = FastForward(self._state)
        self._pauses = Pauses(self._state)
        self._sequence = snapshot.sequence
        self._step, self._tokens_ns = snapshot.step, 0
        self._start_ns, self._end_ns = 0, snapshot.time_ns  # of the last step
        self._is_wanted = False
        self._found = ChunkWaits([], [], [], [])

    def read(self, turn: Turn) -> ChunkWaits | None:
        for number in range(self._begin.chunk, self._number + 1):
            self._is_wanted = number == self._number
            chunk = self._recording.chunk(number)
            place = self._begin.message if number == self._begin.chunk else 0
            while place < len(chunk):
                end = min(len(chunk), place + _TURN_MESSAGES)
                while place < end:
                    place = self._take_some(chunk, place, end)
                if not turn():
                    return None
        return self._found

    def _take_some(self, chunk: LoadedChunk, place: int, end: int) -> int:
        run_end = chunk.end_of_run(place, end)
        for lower, payload in chunk.frames.bodies(place, run_end):
            record = decode_packed(payload)
            self._follow(whole_sequence(lower, self._sequence), record)
            self._note(record, self._forward.advance(record))
        if run_end == place:
            self._take_one(chunk, place)
            return place + 1
        return run_end

    def _take_one(self, chunk: LoadedChunk, place: int) -> None:
        lower, payload = chunk.frames.bodies(place, place + 1)[0]
        sequence = whole_sequence(lower, self._sequence)
        topic = chunk.frames.topics[place]
        if topic == KEYFRAME and sequence <= self._sequence:
            return  # it tells nothing new
        message = wire.decode(payload)
        if isinstance(message, Mark):
            return
        if isinstance(message, EngineInfo | Snapshot):
            info = message.info if isinstance(message, Snapshot) else message
            known = self._state.info
            if known is None or info.engine_id != known.engine_id:
                raise _UnusualError
        if sequence <= self._sequence and not isinstance(message, StepRecord):
            return
        self._follow(sequence, message)
        outcome = self._forward.take(message)
        if isinstance(message, StepRecord):
            assert outcome is not None
            self._note(message, outcome)
        else:
            self._pauses.take(message)

    def _follow(self, sequence: int, message: wire.Telemetry) -> None:
        """A message that is looked at has to be the next one."""
        if sequence != self._sequence + 1:
            raise _UnusualError
        self._sequence = sequence
        if isinstance(message, StepRecord):
            check_numbers(sequence, message)
            if not goes_on(self._step, self._tokens_ns, message):
                raise _UnusualError
            self._step, self._tokens_ns = message.step, message.tokens_ns
            self._start_ns = max(message.schedule_start_ns, self._end_ns)
            self._end_ns = max(message.tokens_ns, self._start_ns)

    def _note(self, record: StepRecord, outcome: Outcome) -> None:
        """What a step brought, as a timeline notes it."""
        pauses, now_ns = self._pauses, record.tokens_ns
        if pauses.has_any:
            pauses.take(record)
        if not self._is_wanted:
            return
        if record.batch is not None:
            ns = self._end_ns - self._start_ns
            self._found.steps.append((work_with(record, outcome.num_attended), ns))
        leave_out(outcome, pauses, self._state, now_ns, self._recording.known_since_ns)
        if (gaps_ns := outcome.gaps_ns) and (ns := max(gaps_ns)) > 0:
            request_id = outcome.gap_request_ids[ns]
            self._found.itl.append(StepWait(record.step, now_ns, ns, request_id, gaps_ns[ns]))
        if (longest := outcome.max_ttft) is not None and longest[1] > 0:
            request_id, ns = longest
            number = sum([ttft_ns == ns for _, ttft_ns in outcome.ttft_ns])
            self._found.ttft.append(StepWait(record.step, now_ns, ns, request_id, number))


def _of_history(recording: Recording, number: int, turn: Turn) -> ChunkWaits | None:
    like = History(SLO(ttft_ms=0.0, itl_ms=0.0), known_since_ns=recording.known_since_ns)
    history = excerpt(recording, like, Position(number, 0), Position(number + 1, 0), turn)
    if history is None:
        return None
    found = ChunkWaits([], [], [], [])
    for each in (history.previous, history):
        if each is not None:
            _add(found, each)
    return found


def _add(found: ChunkWaits, history: History) -> None:
    windows = history.windows
    numbers: Counter[tuple[str, int, int]] = Counter()
    for kind, samples in (
        ("ITL", windows.samples("itl", None, None)),
        ("TTFT", windows.samples("ttft", None, None)),
    ):
        for time_ns, ns, weight in samples:
            numbers[kind, time_ns, ns] += weight
    for each in windows.breaches(None, MAX_NUMBER):
        num_tokens = max(1, numbers[each.kind, each.time_ns, each.ns])
        waits = found.itl if each.kind == "ITL" else found.ttft
        waits.append(StepWait(each.step, each.time_ns, each.ns, each.request_id, num_tokens))
    found.steps.extend(history.durations())
    found.gaps.extend(history.events(limit=MAX_NUMBER, kinds=_GAP))
