"""Measures a long recording: size, time to write, to open, and to seek.

    python tests/bench/bench_recording.py [--steps 2000000] [--requests 64] [--file FILE]

The session comes from the simulated engine, 50 steps a second: a period of it is played over and
over, with later numbers and times, and noise in its times as a real clock has it. A file that is
there already is measured and kept.
"""

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

from synthetic_session import session

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.recordings.replay.file_index import FileIndex
from stepscope.recordings.replay.seek import state_at


def write(path: Path, num_steps: int, num_requests: int) -> None:
    writer = RecordingWriter(path)
    writer.start()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for frame in session(num_steps, num_requests):
        writer.on_frame(*frame)
        while writer.num_queued_bytes > 32 << 20:
            time.sleep(0.05)
    writer.close()
    assert writer.error is None, writer.error
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    print(
        f"written in {wall_s:.0f} s, with making it up: {cpu_s / num_steps * 1e6:.0f} us of CPU "
        "a step"
    )


def measure(path: Path) -> None:
    size = os.path.getsize(path)
    times = []
    for _ in range(3):
        start_s = time.perf_counter()
        Recording(path).close()
        times.append(time.perf_counter() - start_s)
    with Recording(path) as recording:
        assert recording.first_step is not None
        assert recording.last_step is not None
        num_steps = recording.last_step - recording.first_step + 1
        per_step = size / num_steps
        print(f"{num_steps:,} steps in {size / 1e6:,.0f} MB: {per_step:.1f} bytes a step")
        per_chunk = num_steps / recording.num_chunks
        print(f"{recording.num_chunks:,} chunks of {per_chunk:.0f} steps")
        print(f"opened in {min(times) * 1e3:.0f} ms (first: {times[0] * 1e3:.0f} ms)")
    look_through(path, num_steps)
    seek(path, num_steps)


def look_through(path: Path, num_steps: int) -> None:
    """Processor time to read the index of the whole file, as a replay does in the background."""
    found = FileIndex(path)
    start_cpu_s = time.process_time()
    found.start()
    assert found.wait(3600)
    spent_s = time.process_time() - start_cpu_s
    found.stop()
    with Recording(path) as recording:
        num_bytes = sum(len(recording.stored_index(n) or b"") for n in range(recording.num_chunks))
    print(
        f"its index: {num_bytes / num_steps:.1f} bytes a step, read with "
        f"{spent_s / num_steps * 1e6:.1f} us of CPU a step"
    )


def seek(path: Path, num_steps: int, num_seeks: int = 200) -> None:
    """Time to get the state at a random step: find it, read its keyframe, apply the rest."""
    rng = random.Random(2)
    times: list[float] = []
    found: list[float] = []
    spent: list[float] = []
    with Recording(path) as recording:
        for _ in range(num_seeks):
            step = rng.randrange(num_steps)
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            target = recording.find_step(step)
            assert target is not None
            found.append(time.perf_counter() - start_s)
            state, _ = state_at(recording, target)
            times.append(time.perf_counter() - start_s)
            spent.append(time.thread_time() - start_cpu_s)
            assert state.step == step
    times.sort()
    found.sort()
    spent.sort()
    middle = num_seeks // 2
    print(
        f"seek: the place {found[middle] * 1e3:.1f} ms, the state there {times[middle] * 1e3:.1f} "
        f"ms (median; 99th percentile {times[num_seeks * 99 // 100] * 1e3:.1f} ms); CPU "
        f"{spent[middle] * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--file", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file or Path(folder) / "long.mcap"
        if not path.exists():
            write(path, arguments.steps, arguments.requests)
        measure(path)


if __name__ == "__main__":
    main()
