"""`EngineLog`: selects and orders the messages of one engine for a `RecordingFile`.

A file begins with the engine's description and contains each message once. The session state kept
here is written now and then as a keyframe, from which any later state can be restored. Belongs to
the writing thread.
"""

from collections.abc import Mapping

from stepscope.engine.protocol import wire
from stepscope.recordings.file.writing.recording_file import RecordingFile
from stepscope.recordings.session.indexer import Indexer
from stepscope.recordings.state.clocks import known_since, lost_before
from stepscope.recordings.state.session import SessionState

_TIMED = wire.EngineStatus | wire.KnobsChanged | wire.Snapshot | wire.Audited | wire.StepInFlight


class EngineLog:
    """Writes the messages of one engine, from its first to its last.

    `metadata`: metadata for each file, besides the description of the engine.
    """

    def __init__(self, file: RecordingFile, metadata: Mapping[str, str]) -> None:
        self.engine_id = ""  # empty before it is known
        self.num_steps = 0  # written so far, as are the next two
        self.first_step: int | None = None
        self.last_step: int | None = None
        self._file = file
        self._metadata = dict(metadata)
        self._indexer = Indexer()
        self._anchor: wire.EngineInfo | None = None  # pair of monotonic and wall time
        self._last_log_ns = 0

    @property
    def can_go_on(self) -> bool:
        """Whether the state is complete, so that another file can begin."""
        return self._anchor is not None and not self._indexer.needs_snapshot

    def go_on_in(self, file: RecordingFile) -> None:
        """Write into another file from now on, which can be read without the earlier ones."""
        self._file = file
        self._begin_file()
        state = self._indexer.state
        info, snapshot = state.info, state.snapshot(self._indexer.sequence or 0)
        assert info is not None
        assert snapshot is not None
        # Who reads the new file alone knows the waits that begin in it.
        self._indexer = Indexer(state, snapshot.sequence, known_since(snapshot))
        for message in (info, snapshot):
            file.add(message.topic, snapshot.sequence, wire.encode(message), self._last_log_ns)

    def append(self, message: wire.Telemetry, sequence: int, payload: bytes) -> None:
        """Write the next message, given decoded and as received."""
        if self._anchor is None and not self._introduce(message, sequence):
            return
        indexer = self._indexer
        last = None if isinstance(message, wire.Mark) else indexer.sequence
        num_lost = lost_before(sequence, message, last, is_unsure=indexer.needs_snapshot)
        if num_lost is None:  # a duplicate, or a needless keyframe
            return
        log_ns = self._log_ns(message)
        self._file.end_chunk_if_full(log_ns)
        is_first = indexer.state.info is None
        if self._file.wants_keyframe and not num_lost and not isinstance(message, wire.Snapshot):
            self._add_keyframe()
        self._last_log_ns = log_ns
        self._file.add(message.topic, sequence, payload, log_ns)
        indexer.take(sequence, message)
        if isinstance(message, wire.StepRecord):
            self.num_steps += 1
            self.last_step = message.step
            if self.first_step is None:
                self.first_step = message.step
        if isinstance(message, wire.Snapshot) and not is_first:
            # A snapshot after a loss lacks requests that finished before it. Our own keyframe has
            # them.
            self._add_keyframe()

    def _add_keyframe(self) -> None:
        """Write the state after the last message as a keyframe, unless messages are missing."""
        sequence = self._indexer.sequence
        if self._indexer.needs_snapshot or sequence is None:
            return
        if (snapshot := self._indexer.state.snapshot(sequence)) is not None:
            self._file.add(snapshot.topic, sequence, wire.encode(snapshot), self._last_log_ns)

    def _introduce(self, message: wire.Telemetry, sequence: int) -> bool:
        """Begin the file, if a message describes the engine. Returns whether it did."""
        info = message.info if isinstance(message, wire.Snapshot) else message
        if not isinstance(info, wire.EngineInfo):
            return False
        self.engine_id = info.engine_id
        self._anchor = info
        time_ns = message.time_ns if isinstance(message, wire.Snapshot) else info.monotonic_ns
        self._last_log_ns = info.wall_at(time_ns)
        self._begin_file()
        if message is info:  # without a snapshot, the file begins with an empty keyframe
            nothing = SessionState(info=info).snapshot(sequence - 1)
            assert nothing is not None
            self.append(nothing, nothing.sequence, wire.encode(nothing))
        return True

    def _begin_file(self) -> None:
        assert self._anchor is not None
        self._file.begin(self._anchor, self._metadata, lambda: self._indexer.cut().encode())

    def _log_ns(self, message: wire.Telemetry) -> int:
        """Wall time of a message; never earlier than that of the message before it."""
        assert self._anchor is not None
        if isinstance(message, wire.StepRecord):
            time_ns = message.tokens_ns
        elif isinstance(message, _TIMED):
            time_ns = message.time_ns
        else:
            return self._last_log_ns
        return max(self._last_log_ns, self._anchor.wall_at(time_ns))
