"""Measures a long recording: size, time to write, to open, to seek, and where the bytes go.

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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stepscope.engine import wire
from stepscope.engine.config import Knobs
from stepscope.engine.simulated import CostModel, SimulatedWorkload, simulate
from stepscope.engine.wire import EMPTY, Aborted, EngineInfo, EngineStatus, KVCounts
from stepscope.recordings.reader import Recording
from stepscope.recordings.session import SessionState
from stepscope.recordings.writer import RecordingWriter

PERIOD_STEPS = 20_000
NUM_BLOCKS = 4096
WEEK_STEPS = 7 * 24 * 3600 * 50
_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode


def period(num_requests: int) -> list[Any]:
    """Messages of a session that ends with nothing left; the first is the engine's introduction."""
    messages = [
        message
        for _, message in simulate(
            seed=5,
            num_steps=PERIOD_STEPS,
            num_blocks=64 * num_requests,
            max_model_len=4096,
            knobs=Knobs(max_num_batched_tokens=1024, max_num_seqs=num_requests),
            workload=SimulatedWorkload(
                rate=17.0 * num_requests / 64,
                document_share=0.05,
                chat_tokens=300,
                document_tokens=1500,
                output_tokens=190,
            ),
            cost=CostModel(floor_ms=15.0, token_us=25.0, context_ns=2.0),
        )
    ]
    state = SessionState()
    for message in messages:
        state.apply(message)
    assert state.block_owner is not None
    live = [view for view in state.requests.values() if view.status != "finished"]
    end = EngineStatus(
        time_ns=state.time_ns,
        state="idle",
        step=state.step,
        num_running=0,
        num_waiting=0,
        kv=KVCounts(used=0, cached=0, empty=len(state.block_owner), evicted=0),
        moves=[
            wire.BlockMove(block, EMPTY, 0)
            for block, owner in enumerate(state.block_owner)
            if owner != EMPTY
        ],
        events=[Aborted(view.request_id, "end of the period") for view in live],
    )
    return [messages[0], *(m for m in messages if not isinstance(m, EngineInfo)), end]


def session(num_steps: int, num_requests: int) -> Iterator[tuple[bytes, int, bytes]]:
    """Frames of a session of so many steps."""
    rng = random.Random(1)
    info, *rest = period(num_requests)
    encoded = [(wire.TOPICS[type(m)], wire.encode(m)) for m in rest]
    num_ids = 1 + max(e.request_id for m in rest for e in getattr(m, "events", ()))
    duration_ns = rest[-1].time_ns - info.monotonic_ns + 20_000_000
    yield wire.TOPICS[EngineInfo], 0, wire.encode(info)
    sequence = steps_done = number = 0
    while True:
        for topic, payload in encoded:
            message = _decode(payload)
            shift(message, number, num_ids, duration_ns, rng)
            sequence += 1
            yield topic, sequence, _encode(message)
            if topic == b"step":
                steps_done += 1
                if steps_done == num_steps:
                    return
        number += 1


def shift(
    message: dict[str, Any], number: int, num_ids: int, duration_ns: int, rng: random.Random
) -> None:
    """Make a message one of the period `number`."""
    if "step" in message and message["step"] >= 0:
        message["step"] += number * PERIOD_STEPS
    first_id, later_ns = number * num_ids, number * duration_ns
    if "tokens_ns" in message:
        noise_ns = 0
        for name in ("schedule_start_ns", "schedule_end_ns", "launch_ns", "tokens_ns"):
            noise_ns += rng.randrange(30_000)
            message[name] += later_ns + noise_ns
    if "time_ns" in message:
        message["time_ns"] += later_ns
    for row in message.get("batch", ()):
        row[0] += first_id
    for move in message.get("moves", ()):
        if move[1] >= 0:
            move[1] += first_id
    for event in message.get("events", ()):
        event["request_id"] += first_id
        if "time_ns" in event:
            event["time_ns"] += later_ns


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
        print(f"a week of 50 steps a second ({WEEK_STEPS:,}): {per_step * WEEK_STEPS / 1e9:.2f} GB")
        per_chunk = num_steps / recording.num_chunks
        print(f"{recording.num_chunks:,} chunks of {per_chunk:.0f} steps")
        print(f"opened in {min(times) * 1e3:.0f} ms (first: {times[0] * 1e3:.0f} ms)")
    seek(path, num_steps)
    print("bytes a step before compression, by topic (first 20,000 messages):")
    with Recording(path) as recording:
        total: Counter[str] = Counter()
        count = steps = 0
        for number in range(recording.num_chunks):
            for frame in recording._chunks.load(number).frames:
                total[frame.topic.decode()] += len(frame.payload) + 31
                steps += frame.topic == b"step"
                count += 1
            if count > 20_000:
                break
        for topic, num_bytes in total.most_common():
            print(f"  {topic:10} {num_bytes / steps:8.1f}")


def seek(path: Path, num_steps: int, num_seeks: int = 200) -> None:
    """Time to have the state at a random step: find it, read its keyframe, apply what follows."""
    rng = random.Random(2)
    times: list[float] = []
    found: list[float] = []
    with Recording(path) as recording:
        for _ in range(num_seeks):
            step = rng.randrange(num_steps)
            start_s = time.perf_counter()
            target = recording.find_step(step)
            assert target is not None
            found.append(time.perf_counter() - start_s)
            snapshot, position = recording.keyframe_before(target)
            state = SessionState.from_snapshot(snapshot)
            for frame, after in recording.frames(position, snapshot.sequence):
                if after > target:
                    break
                state.apply(wire.decode(frame.payload))
            times.append(time.perf_counter() - start_s)
            assert state.step == step
    times.sort()
    found.sort()
    middle = num_seeks // 2
    print(
        f"seek: the place {found[middle] * 1e3:.1f} ms, the state there {times[middle] * 1e3:.1f} "
        f"ms (median; 99th percentile {times[num_seeks * 99 // 100] * 1e3:.1f} ms)"
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
