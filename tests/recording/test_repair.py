"""Whatever truncates or damages a recording, the steps written before can be read."""

import contextlib
import fcntl
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from mcap.reader import make_reader

from stepscope.engine.protocol import wire
from stepscope.recordings.check.rewrite import default_output, rewrite, what_is_wrong
from stepscope.recordings.check.verify import VerifyReport, verify
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.chunk_cache import MessageFrame
from stepscope.recordings.file.mcap.format import LOSSES, Loss
from stepscope.recordings.file.mcap.index import ChunkPlace
from stepscope.recordings.file.mcap.sink import RECORD
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.writing import recording_file
from stepscope.recordings.file.writing.recording_file import RecordingFile
from stepscope.recordings.file.writing.writer import RecordingWriter
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.full_disk import full_disk
from tests.support.sessions.being_written import has_steps
from tests.support.sessions.crowded import crowded
from tests.support.sessions.later import Later
from tests.support.sessions.seek_sessions import record
from tests.support.waiting import wait_for

Call = Callable[..., Any]

MESSAGES = crowded(11, 3000, rate=8.0)


def nothing(share: float) -> None:
    assert 0 <= share <= 1


class Written:
    """A file, and how much of it was safely flushed at each moment."""

    def __init__(self, path: Path, num_messages: int, flush_every: int, chunk_bytes: int) -> None:
        self.path = path
        self.safe: list[tuple[int, int]] = [(0, 0)]  # bytes in the file -> frames that are safe
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recording_file, "CHUNK_BYTES", chunk_bytes)
            patch.setattr(os, "fsync", lambda descriptor: None)
            patch.setattr("stepscope.recordings.file.writing.writer.FLUSH_S", 1e9)
            writer = RecordingWriter(path)
            flush = RecordingFile.flush
            add = RecordingFile.add
            count = 0

            def counted(file: RecordingFile, *frame: object) -> None:
                nonlocal count
                add(file, *frame)  # type: ignore[arg-type]
                count += 1
                if count % flush_every == 0:
                    flush(file)
                    self.safe.append((file.num_bytes, count))

            patch.setattr(RecordingFile, "add", counted)
            writer.start()
            for sequence, message in MESSAGES[:num_messages]:
                writer.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))
            writer.close()
        assert writer.error is None
        self.content = path.read_bytes()
        with Recording(path) as recording:
            self.frames = [frame for frame, _ in recording.frames()]
            self.chunks = list(recording.index.chunks)
            chunks = range(recording.num_chunks)
            self.num_in = [len(recording.chunks.load(number).frames) for number in chunks]
        assert len(self.frames) == count
        _, length = RECORD.unpack_from(self.content, self.chunks[-1].end)
        self.end_of_data = self.chunks[-1].end + RECORD.size + length + 13  # behind the last index

    def num_safe(self, num_bytes: int) -> int:
        return max(frames for size, frames in self.safe if size <= num_bytes)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A few kilobytes, in several chunks, flushed after every second message."""
    return Written(tmp_path_factory.mktemp("small") / "small.mcap", 12, 2, 3_000)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("large") / "large.mcap", 3000, 20, 100_000)


@contextlib.contextmanager
def flipped(path: Path, place: int, bits: int) -> Iterator[None]:
    """Flip bits of one byte for a while, in place: to write a file anew takes far longer."""

    def flip() -> None:
        with open(path, "r+b") as stream:
            stream.seek(place)
            (byte,) = stream.read(1)
            stream.seek(place)
            stream.write(bytes([byte ^ bits]))

    flip()
    try:
        yield
    finally:
        flip()


def frames_of(path: Path) -> list[MessageFrame] | None:
    """The frames a reader sees; None if it refuses, in one line that names the file."""
    try:
        with Recording(path) as recording:
            return [frame for frame, _ in recording.frames()]
    except RecordingError as error:
        said = str(error)
    assert "\n" not in said
    assert path.name in said
    return None


def test_a_file_cut_anywhere_is_read_up_to_its_last_flush(small: Written, tmp_path: Path) -> None:
    path = tmp_path / "cut.mcap"
    path.write_bytes(small.content)
    assert len(small.chunks) > 2
    for length in range(len(small.content) - 1, -1, -1):
        os.truncate(path, length)
        kept = frames_of(path)
        num_safe = small.num_safe(length)
        if kept is None:
            assert num_safe == 0
        else:
            assert len(kept) >= num_safe
            assert kept == small.frames[: len(kept)]


def test_a_file_truncated_in_its_index_has_lost_no_steps(small: Written, tmp_path: Path) -> None:
    """The last bytes only index the file: no step lies there."""
    for length in range(len(small.content) - 1, small.chunks[-1].end - 1, -1):
        path = tmp_path / f"cut-{length}.mcap"
        path.write_bytes(small.content[:length])
        with Recording(path) as recording:
            last = recording.last_step
            assert recording.truncated
            said = recording.message or ""
        report = rewrite(path, tmp_path / f"mended-{length}.mcap", nothing)
        if length >= small.end_of_data:
            assert "its index is cut off" in said
            assert "missing" not in said
            assert report.losses == []
            assert frames_of(tmp_path / f"mended-{length}.mcap") == small.frames
        else:  # whether more was to follow cannot be seen
            assert f"what came after step {last:,} is missing" in said
            assert len(report.losses) == 1


def test_verify_finds_every_flipped_byte_that_matters(small: Written, tmp_path: Path) -> None:
    path = tmp_path / "flipped.mcap"
    path.write_bytes(small.content)
    rng = random.Random(6)
    begin = small.chunks[0].offset
    places = set(rng.sample(range(begin, len(small.content)), 150))
    for chunk in small.chunks:  # their heads have no checksum of their own
        places |= set(range(chunk.offset, chunk.offset + 53))
    for place in sorted(places):
        with flipped(path, place, 0x10), contextlib.suppress(RecordingError):
            report = verify(path, nothing)
            # zstd has a bit or two that mean nothing.
            assert not report.is_good or frames_of(path) == small.frames, f"byte {place}"


def test_damage_that_demands_impossible_memory_is_damage(large: Written, tmp_path: Path) -> None:
    path = tmp_path / "vast.mcap"
    content = bytearray(large.content)
    frame = content.index(bytes.fromhex("28b52ffd"), large.chunks[1].offset)
    content[frame + 4] |= 0xC0  # the eight bytes after the next say how large it is
    path.write_bytes(content)
    with Recording(path) as recording:
        assert not recording.check_chunk(1)
        assert recording.check_chunk(2)


def test_a_repaired_file_is_whole_with_every_readable_step(large: Written, tmp_path: Path) -> None:
    path = tmp_path / "broken.mcap.part"
    length = large.chunks[-1].offset + large.chunks[-1].length * 9 // 10
    content = bytearray(large.content[:length])
    damaged = large.chunks[2]
    content[damaged.offset + damaged.length // 2] ^= 0xFF
    path.write_bytes(content)
    kept = frames_of(path)
    output = default_output(path, "repaired")
    assert output == tmp_path / "broken.mcap"
    report = rewrite(path, output, nothing)
    assert path.read_bytes() == content  # the old one is as it was
    assert frames_of(output) == kept
    assert what_is_wrong(output, nothing) is None
    assert report.num_chunks == len(large.chunks)
    assert (report.num_whole, report.num_in_part) == (len(large.chunks) - 2, 2)
    first_loss, end_loss = report.losses
    steps = range(report.first_step or 0, 3000)
    with Recording(output) as recording:
        frames = [frame for frame, _ in recording.frames() if frame.topic == b"step"]
        found = {wire.decode(frame.payload).step for frame in frames}
        assert recording.info == Recording(large.path).info
    missing = set(range(first_loss.after_step + 1, first_loss.before_step))
    assert missing == {step for step in steps if step <= max(found)} - found
    assert (end_loss.after_step, end_loss.before_step) == (max(found), None)
    with open(output, "rb") as stream:
        assert sum(1 for _ in make_reader(stream, validate_crcs=True).iter_messages()) == len(kept)


def test_steps_of_a_chunk_without_its_head_are_told_as_lost(large: Written, tmp_path: Path) -> None:
    """The disk returned zeros and the file was cut too, so that no index has the chunk."""
    path = tmp_path / "zeros.mcap"
    gone = large.chunks[3]
    content = bytearray(large.content[:-20])
    content[gone.offset : gone.end] = bytes(gone.length)
    path.write_bytes(content)
    with Recording(large.path) as recording:
        before, hit, after = (recording.chunks.load(number).end_steps() for number in (2, 3, 4))
    report = rewrite(path, tmp_path / "new.mcap", nothing)
    assert report.losses == [Loss(before[1], after[0])]
    assert before[1] < hit[0] <= hit[1] < after[0]


def test_a_damage_message_names_its_remedy(large: Written, tmp_path: Path, stepscope: Call) -> None:
    path, content = tmp_path / "broken.mcap", bytearray(large.content)
    for place in (large.chunks[0], large.chunks[2]):
        content[place.offset + place.length // 2] ^= 0xFF
    path.write_bytes(content)
    done = stepscope("export", str(path), "-o", str(tmp_path / "broken.csv"))
    assert done.exit_code == 0, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"stepscope: note: broken.mcap: 2 of {len(large.chunks)} chunks are damaged; 'stepscope "
        "verify' says what is missing; 'stepscope verify --repair' makes a whole file of it"
    )


def test_repair_fixes_every_damage_that_verify_reports(small: Written, tmp_path: Path) -> None:
    path, output = tmp_path / "flipped.mcap", tmp_path / "mended.mcap"
    first, last = small.chunks[0], small.chunks[-1]
    begin, head = range(0, first.offset, 7), range(first.offset, first.offset + 60, 2)
    for at in itertools.chain(begin, head, range(last.end, len(small.content), 41)):
        content = bytearray(small.content)
        content[at] ^= 1 << at % 8
        path.write_bytes(content)
        if frames_of(path) is None:
            continue  # it says that a later version wrote it
        is_sound = verify(path, nothing).is_good
        assert is_sound == (what_is_wrong(path, nothing) is None), at
        if not is_sound:
            rewrite(path, output, nothing)
            assert verify(output, nothing).is_good, at
            assert what_is_wrong(output, nothing) is None, at
            output.unlink()


def test_repair_overwrites_no_file_and_leaves_no_part(large: Written, tmp_path: Path) -> None:
    path = tmp_path / "a.mcap"
    path.write_bytes(large.content[:200_000])
    (tmp_path / "precious").write_text("precious")
    with pytest.raises(RecordingError, match="is there already"):
        rewrite(path, tmp_path / "precious", nothing)

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewrite(path, tmp_path / "new.mcap", interrupt)
    (tmp_path / "text.mcap").write_text("text")
    with pytest.raises(RecordingError, match="not a stepscope recording"):
        rewrite(tmp_path / "text.mcap", tmp_path / "new.mcap", nothing)
    assert sorted(os.listdir(tmp_path)) == ["a.mcap", "precious", "text.mcap"]
    assert default_output(path, "repaired") == tmp_path / "a-repaired.mcap"


def damaged(content: bytes, *places: ChunkPlace) -> bytes:
    """The content with a bit flipped near the beginning of each given chunk: it is unreadable."""
    found = bytearray(content)
    for place in places:
        found[place.offset + 60] ^= 1
    return bytes(found)


def test_the_audit_of_a_file_without_its_first_keyframe_has_each_entry_once(
    tmp_path: Path, stepscope: Call
) -> None:
    """The next keyframe that can be read has entries that the index of the lost chunk has, too."""
    changes = {number: {"max_num_seqs": number} for number in (5, 900)}
    path = record(tmp_path / "audit.mcap", simulate(seed=1, num_steps=1000, changes=changes))
    with Recording(path) as recording:
        assert recording.num_chunks > 2
        place = recording.chunks.places[0]
    path.write_bytes(damaged(path.read_bytes(), place))
    shown = stepscope("snapshot", "--audit", str(path)).stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["1", "2"]


def test_a_repair_notes_the_steps_it_lost(large: Written, tmp_path: Path, stepscope: Call) -> None:
    path, output = tmp_path / "broken.mcap", tmp_path / "mended.mcap"
    path.write_bytes(damaged(large.content, large.chunks[3], large.chunks[7]))
    assert not verify(path, nothing).is_good
    found = rewrite(path, output, nothing)
    assert len(found.losses) == 2
    report = verify(output, nothing)
    assert [check for check in report.checks if not check.is_good] == []
    assert report.num_lost_messages > 0
    assert report.losses == found.losses
    num_lost = sum((b.before_step or 0) - (b.after_step or 0) - 1 for b in found.losses)
    num_written = sum(frame.topic == b"step" for frame in large.frames)
    assert num_lost == num_written - report.num_steps
    done = stepscope("verify", str(output))
    assert done.exit_code == 0
    said = done.stdout.splitlines()[-1]
    assert said.startswith("whole but for ")
    assert said.endswith(", repaired")
    assert sum(int(each) for each in re.findall(r"(\d+) steps", said)) == num_lost
    # An index that has to be rebuilt takes nothing of it away.
    path.write_bytes(output.read_bytes()[:-20])
    assert verify(path, nothing).losses == found.losses
    # Nor does what is done to the repaired file later.
    rewrite(output, tmp_path / "stripped.mcap", nothing, without_tokens=True)
    assert verify(tmp_path / "stripped.mcap", nothing).is_good
    with Recording(output) as recording:
        places = recording.index.chunks
    path.write_bytes(damaged(output.read_bytes(), places[3], places[10], places[-1]))
    assert not verify(path, nothing).is_good
    again = rewrite(path, tmp_path / "again.mcap", nothing)
    report = verify(tmp_path / "again.mcap", nothing)
    assert report.is_good
    assert found.losses[1] in report.losses  # the first is a part of what was lost now
    assert [*sorted([found.losses[1], *again.losses[:2]]), again.losses[2]] == report.losses
    last = report.losses[-1].after_step
    said = stepscope("verify", str(tmp_path / "again.mcap")).stdout.splitlines()[-1]
    assert said.endswith(f" and whatever came after step {last:,}, repaired")


def test_a_gap_that_no_repair_noted_stays_a_problem(large: Written, tmp_path: Path) -> None:
    path, output = tmp_path / "broken.mcap", tmp_path / "mended.mcap"
    path.write_bytes(damaged(large.content, large.chunks[3]))
    rewrite(path, output, nothing)
    with Recording(output) as recording:
        places = recording.index.chunks
        frames = [frame for frame, _ in recording.frames()]
        metadata = recording.index.metadata[LOSSES]
        info = recording.info
    for gone in (places[3], places[12]):  # wider than it was told, and at another place
        with Recording(output) as recording:
            number = places.index(gone)
            first, last = recording.chunks.load(number).end_steps()
        file = RecordingFile(tmp_path / f"{number}.mcap")
        file.begin(info, {})
        file.add_metadata(LOSSES, metadata)
        for frame in frames:
            step = wire.decode(frame.payload)
            if not (isinstance(step, wire.StepRecord) and first <= step.step <= last):
                file.add(*frame[:2], frame.payload, frame.log_ns)
        file.close()
        problems = verify(file.path, nothing).sequence.problems
        assert any(problem.endswith("are missing") for problem in problems)


def test_a_flipped_bit_loses_at_most_a_second_or_a_hundredth_of_the_file(tmp_path: Path) -> None:
    """However small its steps are, and whether the file is long or short."""
    workload = SimulatedWorkload(rate=1.0, document_share=0.0, chat_tokens=50, output_tokens=400)
    cost = CostModel(floor_ms=24.0)
    messages = simulate(seed=5, num_steps=10_000, num_blocks=512, workload=workload, cost=cost)
    path = record(tmp_path / "light.mcap", messages)
    spans_ns, num_steps = [], []
    with Recording(path) as recording:
        for number in range(recording.num_chunks):
            chunk = recording.chunks.load(number)
            if times := [chunk.frames[place].log_ns for place in chunk.step_places]:
                spans_ns.append(times[-1] - times[0])
                num_steps.append(len(times))
        duration_ns = recording.end_ns - recording.start_ns
    assert duration_ns > 200e9
    assert max(spans_ns) > 1e9
    for span_ns, count in zip(spans_ns, num_steps, strict=True):
        assert span_ns <= 1e9 or (span_ns <= duration_ns / 100 and count <= 100)
    # They grow with the file, so that a long one has no more of them than it needs.
    assert len(spans_ns) < 250


KILLED = """
import sys, time
from stepscope.engine.protocol import wire
from tests.support.engines.simulated_run import simulate
from stepscope.recordings.file.writing.recording_file import RecordingFile
from stepscope.recordings.file.writing.writer import RecordingWriter

flush, num_safe_steps = RecordingFile.flush, [0]

def flushed(file):
    flush(file)
    num_safe_steps.append(writer.num_steps)

RecordingFile.flush = flushed
writer = RecordingWriter(sys.argv[1])
writer.start()
for number, (sequence, message) in enumerate(simulate(seed=1, num_steps=6000)):
    writer.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))
    if number % 100 == 0:
        time.sleep(0.05)
        print(num_safe_steps[-1], flush=True)
"""


def test_a_recorder_killed_while_writing_loses_only_unflushed_messages(tmp_path: Path) -> None:
    path = tmp_path / "killed.mcap"
    command = [sys.executable, "-c", KILLED, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    num_safe = 0
    try:
        deadline_s = time.monotonic() + 60
        while num_safe == 0 and time.monotonic() < deadline_s:
            num_safe = int(process.stdout.readline() or -1)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert num_safe > 0
    with Recording(path) as recording:
        assert recording.opened_path.name == "killed.mcap.part"
        assert recording.last_step + 1 >= num_safe
        steps = [frame for frame, _ in recording.frames() if frame.topic == b"step"]
        assert len(steps) == recording.last_step + 1
    report = rewrite(recording.opened_path, path, nothing)
    assert report.num_steps == len(steps)
    assert verify(path, nothing).is_good


KILLED_ENGINE = """
import sys, time
from tests.support.engines.simulated_run import simulate
from stepscope.engine.telemetry.publisher import Publisher
messages = simulate(seed=1, num_steps=3000)
publisher = Publisher(sys.argv[1], 4096)
time.sleep(1)  # for the subscriber to find it
for _, message in messages:
    publisher.publish(message)
    time.sleep(0.002)
"""


def test_the_recording_of_a_killed_engine_is_complete(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/telemetry"
    path = tmp_path / "engine.mcap"
    writer = RecordingWriter(path)
    writer.start()
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.RCVTIMEO, 500)
    socket.connect(address)

    def receive() -> None:
        topic, number, payload = socket.recv_multipart()
        writer.on_frame(topic, wire.sequence_of(number), payload)

    process = subprocess.Popen([sys.executable, "-c", KILLED_ENGINE, address])
    try:
        deadline_s = time.monotonic() + 60
        while writer.num_steps < 200:
            assert time.monotonic() < deadline_s
            with contextlib.suppress(zmq.Again):
                receive()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with contextlib.suppress(zmq.Again):
        while True:
            receive()
    socket.close(linger=0)
    writer.close()
    assert (writer.state, writer.error) == ("finished", None)
    report = verify(path, nothing)
    assert [check.problems for check in report.checks if not check.is_good] == []
    assert report.num_steps >= 200


def test_a_full_disk_ends_the_recording_and_loses_only_unflushed_messages(tmp_path: Path) -> None:
    path = tmp_path / "full.mcap"
    with full_disk(60_000):
        writer = RecordingWriter(path)
        writer.start()
        for sequence, message in MESSAGES:
            writer.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))
        writer.close()
    assert writer.state == "failed"
    assert "File too large" in writer.error
    with Recording(f"{writer.path}.part") as recording:
        assert f"(steps 0 to {recording.last_step:,} are in it)" in writer.error
    assert not path.exists()
    with Recording(path) as recording:
        kept = [frame for frame, _ in recording.frames() if frame.topic == b"step"]
        # Checkpoints lie 128 KiB of messages apart: of 60 kB in the file not much is behind one.
        assert len(kept) > 100
        assert [wire.decode(f.payload).step for f in kept] == list(range(len(kept)))
    # A repair that finds the disk full leaves nothing behind either.
    with full_disk(1000), pytest.raises(RecordingError, match="cannot write"):
        rewrite(recording.opened_path, tmp_path / "new.mcap", nothing)
    assert os.listdir(tmp_path) == ["full.mcap.part"]


def test_two_unfinished_chunks_in_one_file_are_both_read(small: Written, tmp_path: Path) -> None:
    """As after a power cut in which the file system lost the head of a chunk."""
    content = bytearray(small.content)
    head = small.chunks[1].offset
    content[head + 1 : head + 9] = b"\xff" * 8
    path = tmp_path / "heads.mcap"
    path.write_bytes(content[: small.chunks[-1].end])
    assert frames_of(path) == small.frames


def test_reading_may_begin_at_any_message_of_a_chunk(large: Written) -> None:
    """Packed steps depend on those before them; reading may begin anywhere, in any order."""
    rng = random.Random(4)
    with Recording(large.path) as recording:
        numbers = range(recording.num_chunks)
        starts = [0, *itertools.accumulate(len(recording.chunks.load(n).frames) for n in numbers)]
        for _ in range(300):
            place = rng.randrange(len(large.frames))
            number = max(n for n in numbers if starts[n] <= place)
            frame = recording.chunks.load(number).frame(place - starts[number])
            assert frame.payload == large.frames[place].payload


BEING_WRITTEN = Later(lambda: simulate(seed=6, num_steps=3000))

RECORDER = """
import sys, time
from stepscope.engine.protocol import wire
from tests.support.engines.simulated_run import simulate
from stepscope.recordings.file.writing import recording_file, writer
writer.FLUSH_S = 0.01
recording_file.CHUNK_BYTES = 50_000
recorder = writer.RecordingWriter(sys.argv[1])
recorder.start()
for sequence, message in simulate(seed=6, num_steps=4000):
    recorder.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))
    time.sleep(0.002)
time.sleep(100)
"""


def problems(report: VerifyReport) -> list[str]:
    return [problem for check in report.checks for problem in check.problems]


def steps_in(path: Path) -> int:
    try:
        with Recording(path) as recording:
            return (recording.last_step or 0) - (recording.first_step or 0)
    except RecordingError:
        return 0


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A process that records into `live.mcap`; yields a function that kills it."""
    process = subprocess.Popen([sys.executable, "-c", RECORDER, str(tmp_path / "live.mcap")])

    def kill() -> None:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    wait_for(lambda: steps_in(tmp_path / "live.mcap") > 100, "steps are in it")
    yield kill
    if process.poll() is None:
        kill()


@pytest.mark.slow
def test_verify_finds_no_problem_in_a_file_being_written(
    tmp_path: Path, recorder: Callable[[], None], stepscope: Call
) -> None:
    path = tmp_path / "live.mcap"
    num_steps = 0
    for _ in range(15):  # wherever the recorder may be in the file
        report = verify(path, nothing)
        assert report.is_being_written
        assert problems(report) == []
        assert report.num_steps >= num_steps
        num_steps = report.num_steps
    assert num_steps > 100
    for name in ("live.mcap", "live.mcap.part"):
        done = stepscope("verify", str(tmp_path / name))
        assert done.exit_code == 0
        assert "it is being written right now: its end is not in it yet" in done.stdout
        assert done.stdout.endswith("all is well so far\n")
    document = json.loads(stepscope("verify", str(path), "--json").stdout)
    assert (document["ok"], document["is_being_written"]) == (True, True)
    with Recording(path) as recording:
        said = f"what comes after step {recording.last_step:,} is not written"
        assert f"being written right now; {said}" in recording.message
    recorder()
    done = stepscope("verify", str(path))
    assert done.exit_code == 1
    assert "it was not closed (crash, full disk or cut copy)" in done.stdout


@pytest.mark.slow
def test_repair_refuses_a_file_being_written_and_repairs_it_after_a_crash(
    tmp_path: Path, recorder: Callable[[], None], stepscope: Call
) -> None:
    part = tmp_path / "live.mcap.part"
    for options in ((), ("--strip-tokens",), ("-o", str(tmp_path / "new.mcap"))):
        done = stepscope("verify", "--repair", str(part), *options)
        assert done.exit_code == 1
        assert "it is being written right now; its recorder makes it whole" in done.stderr
        assert done.stderr.count("\n") == 1
    for make in (rewrite, partial(rewrite, without_tokens=True)):
        with pytest.raises(RecordingError, match="being written right now"):
            make(part, tmp_path / "new.mcap", nothing)
    assert [path.name for path in tmp_path.glob("*.mcap*")] == [part.name]
    recorder()
    assert stepscope("verify", "--repair", str(part)).exit_code == 0
    assert problems(verify(tmp_path / "live.mcap", nothing)) == []


def test_a_half_written_record_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.recordings.file.writing.recording_file.CHUNK_BYTES", 25_000)
    content = record(tmp_path / "whole.mcap", BEING_WRITTEN[:1000]).read_bytes()
    with Recording(tmp_path / "whole.mcap") as recording:
        places = recording.index.chunks
        assert len(places) > 3
    choose = random.Random(5)
    cuts = [places[2].offset + add for add in (0, 1, 8, 20, 56, 57, 58)]
    cuts += [choose.randrange(places[2].offset, places[-1].end) for _ in range(8)]
    path = tmp_path / "live.mcap.part"
    for cut in cuts:
        path.write_bytes(content[:cut])
        with open(path, "rb") as writing:
            fcntl.flock(writing, fcntl.LOCK_EX)
            assert problems(verify(path, nothing)) == []
            damaged = bytearray(content[:cut])
            damaged[places[1].offset + 1000] ^= 1
            path.write_bytes(damaged)
            report = verify(path, nothing)
            assert report.is_being_written
            assert not report.checksums.is_good


def test_a_file_finished_while_verify_reads_it_is_verified_as_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.mcap"
    writer = RecordingWriter(path)
    writer.start()
    for sequence, message in BEING_WRITTEN:
        writer.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))
    wait_for(lambda: has_steps(path), "something is in the file")
    report = verify(path, lambda share: writer.close() if writer.state == "recording" else None)
    assert not path.with_name("a.mcap.part").exists()
    assert report.is_being_written
    assert problems(report) == []
    report = verify(path, nothing)
    assert not report.is_being_written
    assert (problems(report), report.num_steps) == ([], 3000)


def test_a_file_without_messages_yet_is_reported_as_empty(tmp_path: Path, stepscope: Call) -> None:
    path = tmp_path / "a.mcap"
    file = RecordingFile(path)
    for _ in range(2):
        done = stepscope("verify", str(path))
        assert done.exit_code == 1
        assert "is being written right now, and nothing can be read in it yet" in done.stderr
        file.flush()
    file.abandon()
