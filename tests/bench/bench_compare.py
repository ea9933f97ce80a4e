"""What comparing two recordings costs: reading, memory, one comparison, and drawing its screen.

    python tests/bench/bench_compare.py [FILE] [--steps N]

Without a file a session of 64 requests is simulated and compared with itself. Prints a table.
"""

import argparse
import asyncio
import tempfile
import time
import tracemalloc
from pathlib import Path

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.simulation.simulated import SimulatedWorkload, simulate
from stepscope.recordings.compare.comparison import compare
from stepscope.recordings.compare.side.feed import Stretch
from stepscope.recordings.compare.side.recording_feed import RecordingFeed
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.views.frame.compare_choices import session_origin

SLO_ = SLO(ttft_ms=500.0, itl_ms=50.0)
_DRAWN = 50


def record(path: Path, num_steps: int) -> None:
    messages = simulate(
        seed=1,
        num_steps=num_steps,
        knobs=Knobs(max_num_batched_tokens=1024, max_num_seqs=64),
        workload=SimulatedWorkload(rate=18.0, output_tokens=180),
        num_blocks=4096,
    )
    history = History()
    writer = RecordingWriter(path)
    writer.start()
    for sequence, message in messages:
        history.append(sequence, message)
        if sequence == 0 and (snapshot := history.snapshot()) is not None:
            writer.on_frame(wire.TOPICS[wire.Snapshot], sequence, wire.encode(snapshot))
        writer.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))
    writer.close()


def reading(path: Path) -> tuple[RecordingFeed, float]:
    """Read all of it; return it and the processor seconds that reading took."""
    feed = RecordingFeed(Recording(path), path.name, SLO_, Stretch())
    begin_s = time.process_time()
    feed.read(float("inf"))
    return feed, time.process_time() - begin_s


async def drawing(path: Path) -> float:
    """Seconds of a key that moves the cursor, with the picture it makes, at 200x60."""
    source = ReplaySource(Recording(path), History(SLO_), playing=False)
    source.start()
    app = Dashboard(source, source.history, any_terminal=True, fps=1.0)
    async with app.run_test(size=(200, 60)):
        session = session_origin(source)
        app.compare(session, session._replace(name="again"), "time")
        comparer = app.main.session.compare.comparer
        while comparer is not None and comparer.is_reading:
            await asyncio.sleep(0.1)
        app.main.draw()
        begin_s = time.process_time()
        for _ in range(_DRAWN):
            app.main.action_do("step_forward")
        took_s = time.process_time() - begin_s
    app.close()
    source.stop()
    return took_s / _DRAWN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file
        if path is None:
            path = Path(folder) / "simulated.mcap"
            record(path, arguments.steps)
        feed, seconds = reading(path)
        assert feed.side is not None
        num_steps = feed.side.points.num_steps
        tracemalloc.start()
        kept, _ = reading(path)
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept.side is not None
        begin_s = time.process_time()
        compare(feed.side, kept.side)
        compare_s = time.process_time() - begin_s
        draw_s = asyncio.run(drawing(path))
    for what, value in (
        ("steps of a side", f"{num_steps:,}"),
        ("reading a step", f"{seconds / num_steps * 1e6:.0f} us of CPU"),
        ("kept of a side", f"{num_bytes / 1e6:.1f} MB, {num_bytes / num_steps:.0f} bytes a step"),
        ("one comparison", f"{compare_s * 1e3:.1f} ms"),
        ("cursor key, drawn at 200x60", f"{draw_s * 1e3:.1f} ms"),
    ):
        print(f"{what:<28} {value}")


if __name__ == "__main__":
    main()
