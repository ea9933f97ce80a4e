"""Checks a recording: its bytes, its sequence of messages, and the engine's block counts.

An undamaged file may still have gaps: messages that the engine dropped or the recorder missed. A
file without gaps may come from an engine that miscounts. So each is a check of its own. The checks
of a file's structure are shared with `rewrite`, so that a repair mends whatever is reported.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import msgspec

from stepscope.engine.protocol import wire
from stepscope.recordings.check.ledgers import BlockLedger, TokenLedger
from stepscope.recordings.check.strip import holds_tokens
from stepscope.recordings.file.chunk_cache import KEYFRAME, MessageFrame
from stepscope.recordings.file.mcap.chunk import has_sound_head
from stepscope.recordings.file.mcap.format import Loss, losses_in
from stepscope.recordings.file.mcap.index import read_index
from stepscope.recordings.file.mcap.sink import MAGIC
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import Levels, levels_in


def structure_problems(recording: Recording) -> list[str]:
    """List the structural problems, one line each; empty for an intact file.

    It does not look into chunks, only at the index behind each.
    """
    index = recording.index
    found = []
    if not index.is_being_written and index.why_incomplete is not None:
        found.append(index.why_incomplete)
    recording.stream.seek(0)
    if recording.stream.read(len(MAGIC)) != MAGIC:
        found.append("its first bytes are damaged")
    if not recording.metadata:
        found.append("its metadata cannot be read")
    elif recording.metadata.get("engine_id") != recording.info.engine_id:
        found.append("its metadata and its keyframes name different engines")
    try:
        losses_in(index.metadata)
    except msgspec.DecodeError:
        found.append("its list of repaired losses cannot be read")
    # Without a valid summary, opening the file has walked all chunks.
    walked = read_index(recording.stream, walk=True) if index.is_complete else index
    assert walked is not None
    if walked.num_lost_bytes:
        found.append(f"{walked.num_lost_bytes:,} bytes belong to no record")
    for number, place in enumerate(index.chunks):
        try:
            recording.chunks.stored_index(number)
        except ValueError:
            found.append(f"the index of chunk {number + 1} is damaged")
        if index.is_complete and not has_sound_head(recording.stream, place):
            found.append(f"the head of chunk {number + 1} (byte {place.offset:,}) is damaged")
    if len(walked.chunks) != len(index.chunks):
        found.append(f"{len(walked.chunks)} chunks are found, its index has {len(index.chunks)}")
    return found


MAX_PROBLEMS = 10  # shown for each check; all are counted

Progress = Callable[[float], None]


@dataclass(slots=True)
class Check:
    name: str
    unit: str  # what was checked
    num_checked: int = 0
    num_problems: int = 0
    # Texts of the first problems; `num_problems` counts all.
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.num_problems == 0

    def problem(self, text: str) -> None:
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)


@dataclass(slots=True)
class VerifyReport:
    path: Path
    num_bytes: int = 0
    num_chunks: int = 0
    num_messages: int = 0
    num_steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    # Whether a recorder is writing it, so that its end is still missing.
    is_being_written: bool = False
    num_lost_messages: int = 0  # messages that were sent but are not in the file
    with_tokens: bool = False  # whether its metadata say that it contains prompts and outputs
    levels: Levels = field(default_factory=dict)  # its service levels
    # Steps that an earlier repair had to leave out. They do not count as problems.
    losses: list[Loss] = field(default_factory=list)
    file: Check = field(default_factory=lambda: Check("file", "parts"))
    checksums: Check = field(default_factory=lambda: Check("checksums", "chunks"))
    messages: Check = field(default_factory=lambda: Check("messages", "messages"))
    sequence: Check = field(default_factory=lambda: Check("sequence", "messages"))
    steps: Check = field(default_factory=lambda: Check("step order", "steps"))
    times: Check = field(default_factory=lambda: Check("times", "steps"))
    blocks: Check = field(default_factory=lambda: Check("block accounting", "steps"))
    tokens: Check = field(default_factory=lambda: Check("token accounting", "requests"))
    keyframes: Check = field(default_factory=lambda: Check("keyframes", "keyframes"))
    privacy: Check = field(default_factory=lambda: Check("privacy", "messages"))

    @property
    def checks(self) -> tuple[Check, ...]:
        values = [getattr(self, each.name) for each in fields(self)]
        return tuple(value for value in values if isinstance(value, Check))

    @property
    def is_good(self) -> bool:
        return all(check.is_good for check in self.checks)


def verify(path: Path, progress: Progress) -> VerifyReport:
    """Read a whole file and check it.

    Raises RecordingError: the file is no recording, has a later version, or is unreadable.
    """
    report = VerifyReport(path)
    with Recording(path) as recording:
        report.num_bytes = recording.size
        report.with_tokens = recording.info.with_tokens
        report.levels = levels_in(recording.metadata)
        report.num_chunks = recording.num_chunks
        report.is_being_written = recording.index.is_being_written
        report.first_step, report.last_step = recording.first_step, recording.last_step
        # The preamble, the chunks and, unless it is still to come, the summary.
        report.file.num_checked = 3 - report.is_being_written
        for problem in structure_problems(recording):
            report.file.problem(problem)
        with contextlib.suppress(msgspec.DecodeError):  # reported above as a problem
            report.losses = losses_in(recording.index.metadata)
        session = _MessageChecks(report)
        chunk = -1
        for frame, position in recording.frames():
            if position.chunk != chunk:
                for number in range(chunk + 1, position.chunk + 1):
                    _check_chunk(recording, number, report)
                chunk = position.chunk
                progress(chunk / recording.num_chunks)
            session.take(frame)
        session.end_gap(None)
        for number in range(chunk + 1, recording.num_chunks):
            _check_chunk(recording, number, report)
        expected = recording.index.num_messages
        if expected is not None and expected != report.num_messages and report.checksums.is_good:
            report.file.problem(
                f"its summary counts {expected:,} messages, {report.num_messages:,} are in it"
            )
    return report


def _check_chunk(recording: Recording, number: int, report: VerifyReport) -> None:
    report.checksums.num_checked += 1
    if not recording.check_chunk(number):
        place = recording.index.chunks[number]
        first, last = recording.chunks.load(number).end_steps()
        kept = "nothing of it" if first is None else f"steps {first:,} to {last:,} of it"
        what = "was cut off" if place.is_cut else "is damaged"
        report.checksums.problem(
            f"chunk {number + 1} (byte {place.offset:,}, {place.length:,} bytes) {what}; {kept} "
            "can be read"
        )


class _MessageChecks:
    def __init__(self, report: VerifyReport) -> None:
        self._report = report
        self._sequence: int | None = None
        self._step: int | None = None
        self._tokens_ns = 0
        self._num_missing = 0  # messages since the last step
        self._after_gap = False  # after a loss, until the next keyframe
        self._ledger = BlockLedger()
        self._tokens = TokenLedger()
        self._has_map = True  # whether the engine publishes its block map

    def take(self, frame: MessageFrame) -> None:
        report = self._report
        report.num_messages += 1
        report.messages.num_checked += 1
        try:
            message = wire.decode(frame.payload)
        except msgspec.DecodeError as error:
            report.messages.problem(f"message {frame.sequence:,} cannot be read: {error}")
            return
        if wire.TOPICS[type(message)] != frame.topic:
            report.messages.problem(
                f"message {frame.sequence:,} under {frame.topic.decode()} is a "
                f"{type(message).__name__}"
            )
        report.privacy.num_checked += 1
        if not report.with_tokens and holds_tokens(message):
            report.privacy.problem(
                f"message {frame.sequence:,} holds prompts or outputs, and the file says that it "
                "has none; 'stepscope verify --strip-tokens' takes them out"
            )
        if not isinstance(message, wire.Mark):
            self._take_sequence(frame, message)
        info = message.info if isinstance(message, wire.Snapshot) else message
        if isinstance(info, wire.EngineInfo):
            self._has_map = info.num_blocks is not None
            if not self._has_map:
                self._ledger.close()
        if isinstance(message, wire.StepRecord):
            self._take_step(message)
        elif isinstance(message, wire.EngineStatus):
            self._take_changes(message, f"after step {message.step:,}", message.step < 0)
        elif isinstance(message, wire.Snapshot):
            self._take_keyframe(message)

    def _take_sequence(self, frame: MessageFrame, message: wire.Telemetry) -> None:
        check = self._report.sequence
        check.num_checked += 1
        # A keyframe has the number of the message that led to it, and none of its own.
        sequence = message.sequence if isinstance(message, wire.Snapshot) else frame.sequence
        last = sequence if self._sequence is None else self._sequence
        is_own = frame.topic != KEYFRAME and self._sequence is not None
        num_lost = sequence - last - is_own
        if num_lost > 0:
            self._num_missing += num_lost
            self._report.num_lost_messages += num_lost
            self._after_gap = True
            self._ledger.close()
            self._tokens.forget()
        elif num_lost < 0 and is_own and self._step is not None:
            check.problem(f"message {sequence:,} comes after {last:,}")
        self._sequence = max(last, sequence)

    def end_gap(self, before_step: int | None) -> bool:
        """Report what is missing since the last step, unless a repair told it; whether any is."""
        last, num_missing, self._num_missing = self._step, self._num_missing, 0
        is_known = Loss(last, before_step) in self._report.losses
        if num_missing and not is_known:
            where = "at the beginning" if last is None else f"after step {last:,}"
            self._report.sequence.problem(f"{num_missing:,} messages {where} are missing")
        return num_missing > 0

    def _take_step(self, record: wire.StepRecord) -> None:
        report, step = self._report, record.step
        report.num_steps += 1
        report.steps.num_checked += 1
        has_gap = self.end_gap(step)
        last = self._step
        if last is not None and (step <= last or (step > last + 1 and not has_gap)):
            report.steps.problem(f"step {step:,} comes after step {last:,}")
        self._step = step
        report.times.num_checked += 1
        between = [t for t in (record.schedule_end_ns, record.launch_ns) if t is not None]
        times = [record.schedule_start_ns, *between, record.tokens_ns]
        if times != sorted(times) or record.tokens_ns < self._tokens_ns:
            report.times.problem(f"step {step:,}: its times are not in order")
        self._tokens_ns = max(self._tokens_ns, record.tokens_ns)
        prefills = [row for row in record.batch or () if row.phase != wire.Phase.DECODE]
        if record.held_prefills and any(row.num_tokens > 1 for row in prefills):
            report.tokens.problem(f"step {step:,} computed a prompt though it left prompts out")
        self._take_changes(record, f"step {step:,}", step == 0)

    def _take_changes(
        self, message: wire.StepRecord | wire.EngineStatus, where: str, is_start: bool
    ) -> None:
        ledger, check = self._ledger, self._report.blocks
        for problem in self._tokens.apply(message):
            self._report.tokens.problem(f"{where}: {problem}")
        self._report.tokens.num_checked = self._tokens.num_checked
        if is_start and self._has_map and not self._after_gap and not ledger.is_open:
            ledger.open_empty(message)
        if not ledger.is_open:
            return
        problems = ledger.apply(message)
        check.num_checked += isinstance(message, wire.StepRecord)
        for problem in problems:
            check.problem(f"{where}: {problem}")
        if problems:
            ledger.close()  # report a mistake once, not in each later step

    def _take_keyframe(self, snapshot: wire.Snapshot) -> None:
        check = self._report.keyframes
        check.num_checked += 1
        if self._ledger.is_open and snapshot.sequence == self._sequence:
            for problem in self._ledger.compare(snapshot):
                check.problem(f"keyframe after step {snapshot.step:,}: {problem}")
        if self._step is not None and snapshot.step < self._step:
            check.problem(f"keyframe of step {snapshot.step:,} after step {self._step:,}")
        self._after_gap = False
        self._ledger.open(snapshot)
        self._tokens.open(snapshot)
