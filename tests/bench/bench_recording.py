"""Measures a long recording: size, time to write, to open, and to seek.

    python tests/bench/bench_recording.py [--steps 2000000] [--requests 64] [--file FILE]

The session comes from the simulated engine, 50 steps a second: a period of it is played over and
over, with later numbers and times, and noise in its times as a real clock has it. A file that is
there already is measured and kept.
"""

import random
import tempfile
import time
from pathlib import Path

from common import medians, parser, percentile
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
    spent_us = cpu_s / num_steps * 1e6
    print(f"written in {wall_s:.0f} s, with making it up: {spent_us:.0f} us of CPU a step")


def measure(path: Path) -> None:
    opened_ms = []
    for _ in range(3):
        start_s = time.perf_counter()
        Recording(path).close()
        opened_ms.append(1e3 * (time.perf_counter() - start_s))
    # To read the index of the whole file, as a replay does in the background.
    index = FileIndex(path)
    start_cpu_s = time.process_time()
    index.start()
    assert index.wait(3600)
    index_us = (time.process_time() - start_cpu_s) * 1e6
    index.stop()
    with Recording(path) as recording:
        num_steps, chunks = recording.last_step - recording.first_step + 1, recording.num_chunks
        num_bytes = path.stat().st_size
        print(
            f"{num_steps:,} steps in {num_bytes / 1e6:,.0f} MB: {num_bytes / num_steps:.1f} bytes "
            f"a step; {chunks:,} chunks of {num_steps / chunks:.0f} steps"
        )
        print(f"opened in {min(opened_ms):.0f} ms (first: {opened_ms[0]:.0f} ms)")
        index_bytes = sum(
            len(recording.chunks.stored_index(number) or b"") for number in range(chunks)
        )
        print(
            f"its index: {index_bytes / num_steps:.1f} bytes a step, read with "
            f"{index_us / num_steps:.1f} us of CPU a step"
        )
        seek(recording, num_steps)


def seek(recording: Recording, num_steps: int, num_seeks: int = 200) -> None:
    """Time to get the state at a random step: find it, read its keyframe, apply the rest."""
    rng = random.Random(2)
    times_ms = []
    for _ in range(num_seeks):
        step = rng.randrange(num_steps)
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        target = recording.find_step(step)
        found_s = time.perf_counter()
        state, _ = state_at(recording, target)
        spent = (found_s - start_s, time.perf_counter() - start_s, time.thread_time() - start_cpu_s)
        times_ms.append([1e3 * each for each in spent])
        assert state.step == step
    place_ms, there_ms, cpu_ms = medians(times_ms)
    most_ms = percentile([each[1] for each in times_ms], 0.99)
    print(
        f"seek: the place {place_ms:.1f} ms, the state there {there_ms:.1f} ms "
        f"(median; 99th percentile {most_ms:.1f} ms); CPU {cpu_ms:.1f} ms"
    )


def main() -> None:
    given = parser(__doc__, steps=2_000_000, requests=64, file=Path).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.file or Path(folder) / "long.mcap"
        if not path.exists():
            write(path, given.steps, given.requests)
        measure(path)


if __name__ == "__main__":
    main()
