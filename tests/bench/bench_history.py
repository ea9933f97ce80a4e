"""Measures `History` and the recording format on a long session of many requests.

    python tests/bench/bench_history.py [--steps 100000] [--requests 64]

Prints time to take a step, memory, time to go to any step, and size and seek time of a recording.
"""

import argparse
import gc
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import (
    Admitted,
    Arrived,
    BatchRow,
    BlockMove,
    EngineInfo,
    Finished,
    FirstToken,
    KVCounts,
    Phase,
    RequestEvent,
    RowFlag,
    StepRecord,
)
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.recordings.history.history import History

NUM_BLOCKS = 2048
BLOCK_SIZE = 16
STEP_NS = 18_000_000
PROMPT_TOKENS = 300
OUTPUT_TOKENS = 200


def session(num_steps: int, num_requests: int) -> Iterator[bytes]:
    """Payloads of a session that always has `num_requests` in the batch, as one ends after another
    and the next one takes its place."""
    now_ns = 1_000_000_000_000
    yield wire.encode(
        EngineInfo(
            engine_id="bench",
            name="bench",
            software_version="0",
            model="none",
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            monotonic_ns=now_ns,
            wall_ns=1_700_000_000_000_000_000,
        )
    )
    rng = random.Random(0)
    next_id = 0
    seats: list[list[int]] = []  # request id, tokens computed, tokens in all
    for step in range(num_steps):
        now_ns += STEP_NS + rng.randrange(-500_000, 500_000)
        rows: list[BatchRow] = []
        events: list[RequestEvent] = []
        moves: list[BlockMove] = []
        num_prefill = 0
        if len(seats) < num_requests:
            arrived = Arrived(
                request_id=next_id,
                client_id=f"chat-{next_id}",
                num_prompt_tokens=PROMPT_TOKENS,
                max_tokens=OUTPUT_TOKENS,
                priority=0,
                time_ns=now_ns - STEP_NS,
            )
            events += [arrived, Admitted(next_id, 0), FirstToken(next_id)]
            end = PROMPT_TOKENS + OUTPUT_TOKENS - rng.randrange(100)
            seats.append([next_id, 0, end])
            next_id += 1
        for seat in seats:
            request_id, computed, _ = seat
            num_tokens = 1 if computed else PROMPT_TOKENS
            phase = Phase.DECODE if computed else Phase.PREFILL
            flags = RowFlag.LAST_CHUNK | (0 if computed else RowFlag.FIRST_TOKEN)
            seat[1] = computed + num_tokens
            num_prefill += 0 if computed else num_tokens
            num_blocks = -(-seat[1] // BLOCK_SIZE)
            if seat[1] % BLOCK_SIZE == 0:
                moves.append(BlockMove(rng.randrange(NUM_BLOCKS), request_id, 1))
            rows.append(
                BatchRow(request_id, int(phase), computed, num_tokens, 0, num_blocks, int(flags))
            )
        events += [
            Finished(seat[0], "length", seat[1] + 1 - PROMPT_TOKENS)
            for seat in seats
            if seat[1] >= seat[2]
        ]
        seats = [seat for seat in seats if seat[1] < seat[2]]
        yield wire.encode(
            StepRecord(
                step=step,
                schedule_start_ns=now_ns - STEP_NS + 700_000,
                schedule_end_ns=now_ns - STEP_NS + 900_000,
                launch_ns=now_ns - STEP_NS + 1_000_000,
                tokens_ns=now_ns,
                knobs_version=0,
                token_budget=2048,
                max_num_seqs=256,
                num_prefill_tokens=num_prefill,
                num_decode_tokens=len(rows) - (num_prefill > 0),
                num_padded_tokens=0,
                batch=rows,
                kv=KVCounts(used=1500, cached=500, empty=48, evicted=len(moves)),
                moves=moves,
                num_running=len(seats),
                num_waiting=0,
                waiting_reasons={},
                events=events,
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=64)
    arguments = parser.parse_args()
    history = History()
    gc.collect()
    before_bytes = _resident_bytes()
    spent_s = 0.0
    num_bytes = 0
    for sequence, payload in enumerate(session(arguments.steps, arguments.requests)):
        started_s = time.thread_time()
        history.append(sequence, payload)
        spent_s += time.thread_time() - started_s
        num_bytes += len(payload)
    memory = (_resident_bytes() - before_bytes) / 1e6
    print(f"record size on the wire      {num_bytes / arguments.steps:8.0f} bytes a step")
    print(f"taken                        {spent_s / arguments.steps * 1e6:8.1f} us a step")
    print(f"memory                       {memory:8.1f} MB for {history.num_steps:,} steps")
    _measure_history(history, arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.mcap"
        writer = RecordingWriter(path)
        writer.start()
        for sequence, payload in enumerate(session(arguments.steps, arguments.requests)):
            writer.on_frame(b"step" if sequence else b"info", sequence, payload)
            while writer.num_queued_bytes > 8_000_000:  # making it is faster than writing it
                time.sleep(0.01)
        writer.close()
        print(
            f"recording                    {writer.num_bytes / arguments.steps:8.0f} bytes a step"
        )
        _measure_recording(path, arguments.steps)


def _measure_history(history: History, num_steps: int) -> None:
    rng = random.Random(1)
    steps = [rng.randrange(history.first_step or 0, num_steps) for _ in range(200)]
    _print("state at any step", [_timed(history.state_at, step) for step in steps])
    _print("record of any step", [_timed(history.record, step) for step in steps])
    _print("lanes of 200 steps", [_timed(history.lanes, s - 199, s) for s in steps[:50]])
    _print("200 summaries", [_timed(history.summaries, s - 199, s) for s in steps])
    last = num_steps - 1
    history.lanes(last - 199, last)
    _print("lanes, nothing new", [_timed(history.lanes, last - 199, last) for _ in range(20)])
    _print("latencies of 60 s", [_timed(history.latency) for _ in range(20)])
    _print("latencies of all", [_timed(history.latency, None, None) for _ in range(3)])
    _print("rates of 10 s", [_timed(history.rates) for _ in range(20)])


def _measure_recording(path: Path, num_steps: int) -> None:
    rng = random.Random(2)
    print(f"{'open a recording':28} {_timed(Recording, path):8.2f} ms")
    with Recording(path) as recording:
        spent_ms = [_timed(recording.find_step, rng.randrange(num_steps)) for _ in range(100)]
        _print("find any step in it", spent_ms)


def _timed(function: object, *arguments: object) -> float:
    assert callable(function)
    started_s = time.perf_counter()
    function(*arguments)
    return (time.perf_counter() - started_s) * 1e3


def _print(what: str, spent_ms: list[float]) -> None:
    spent_ms.sort()
    print(
        f"{what:28} {spent_ms[len(spent_ms) // 2]:8.2f} ms, at most {spent_ms[-1]:.2f} ms "
        f"({len(spent_ms)} times)"
    )


def _resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
