"""Starts a worker process for each job, gathers its results, and ends it when its time is up.

A failure in a worker cannot harm this process: a worker may run out of memory, break the driver's
state, or hang. The report keeps what the worker has reported before the failure, and gives a reason
for every part that is missing.
"""

import contextlib
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

import msgspec

from stepscope.engine.bench.gpu import aims, host
from stepscope.engine.bench.gpu.gather import Gatherer
from stepscope.engine.bench.gpu.parts import BenchJob, Message, PeerWork, share_of
from stepscope.engine.bench.gpu.results import Facts, PartOutcome, Report

# A worker that is out of time may take this long to end by itself, as it checks the clock only
# between points.
GRACE_S = 20.0
WORKER = (sys.executable, "-m", "stepscope.engine.bench.gpu.measure.worker")

# Called with what is measured, the share of the whole time that has passed (0..1), and the detail.
Progress = Callable[[str, float, str], None]


def conduct(
    jobs: list[BenchJob],
    report: Report,
    seconds: float,
    *,
    progress: Progress,
    save: Callable[[Report], None],
    worker: tuple[str, ...] = WORKER,
) -> None:
    """Run `jobs` one after the other and fill in `report`, in about `seconds` in total.

    SIGINT ends the benchmark early. The report then has what was measured so far, and
    `is_interrupted` is set.

    Args:
        progress: see `Progress`.
        save: called with the report after every job, and at the end.
        worker: the command that starts a worker process.
    """
    start_s = time.monotonic()
    report.gpu["before"] = _clocks(jobs)
    left = list(jobs)

    def show(ahead: int, what: str, detail: str) -> None:
        share = min(1.0, (time.monotonic() - start_s) / seconds)
        progress(what + (f"; {ahead} to come" if ahead else ""), share, detail)

    def finish() -> None:
        report.seconds = time.monotonic() - start_s
        report.aims = aims.judge(report)
        save(report)

    try:
        while left:
            weights = sum(job.weight for job in left)
            job = left.pop(0)
            left_s = seconds - (time.monotonic() - start_s)
            job.seconds = share_of(left_s, job.weight, weights)
            job.peer_works = _peer_works(report, job)
            if left_s <= 0:
                _owe(report, job, "no time was left for it (see --time-limit)")
            else:
                ahead = sum(len(each.parts) for each in left)
                gatherer = Gatherer(job, report, functools.partial(show, ahead))
                _Process(job, gatherer).run(worker)
            finish()
    except KeyboardInterrupt:
        report.is_interrupted = True
    report.gpu["after"] = _clocks(jobs)
    finish()


class _Process:
    """Starts the worker process of one job, feeds its messages to the gatherer, and ends it."""

    def __init__(self, job: BenchJob, gatherer: Gatherer) -> None:
        self._job = job
        self._gatherer = gatherer

    def run(self, worker: tuple[str, ...]) -> None:
        deadline_s = time.monotonic() + self._job.seconds + GRACE_S
        process = subprocess.Popen(
            worker,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches only this process
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        errors: list[bytes] = []
        threads = [
            threading.Thread(target=_read, args=(process.stdout, lines.put), daemon=True),
            threading.Thread(target=_read, args=(process.stderr, errors.append), daemon=True),
        ]
        why = "it was interrupted"
        try:
            for thread in threads:
                thread.start()
            process.stdin.write(msgspec.json.encode(self._job) + b"\n")
            process.stdin.flush()
            why = self._listen(lines, deadline_s)
            if not why:
                process.wait(GRACE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            why = ""
        finally:
            code = process.poll()
            _stop(process)
            for thread in threads:
                thread.join(1.0)
            if not why and code != 0:
                why = _last_words(errors, code)
            self._gatherer.end(why)

    def _listen(self, lines: "queue.SimpleQueue[bytes]", deadline_s: float) -> str:
        """Gather messages until the process ends or the deadline passes.

        Returns why the process was cut short. Empty if it ended by itself.
        """
        while True:
            try:
                line = lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                return f"its process was ended: it took longer than {self._job.seconds:.0f} s"
            if not line:
                return ""
            self._gatherer.take(msgspec.json.decode(line, type=Message))


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def _clocks(jobs: list[BenchJob]) -> Facts:
    device = jobs[0].device
    return {} if device == "cpu" else host.nvidia_smi(device)


def _owe(report: Report, job: BenchJob, why: str) -> None:
    for part in job.parts:
        if report.outcome(part, job.model) is None:
            report.outcomes.append(PartOutcome(part=part, model=job.model, why=why))


def _peer_works(report: Report, job: BenchJob) -> list[PeerWork]:
    """Return which requests transformers ran in (g) on this model, for stepscope to run too."""
    outcome = report.outcome("g", job.model)
    if outcome is None:
        return []
    return [
        PeerWork(
            num_requests=int(point.number("num_requests") or 0),
            most_output=int(point.number("most_output") or 0),
        )
        for point in outcome.points
        if point.samples and point.facts.get("contender") == "generate_batch"
    ]


def _read(stream: IO[bytes], put: Callable[[bytes], object]) -> None:
    """Call `put` with every line of `stream`, and with an empty line after the last."""
    for line in stream:
        put(line)
    put(b"")


def _last_words(errors: list[bytes], code: int | None) -> str:
    if code is None:
        return "its process did not end by itself"
    said = [line.decode(errors="replace").strip() for line in errors if line.strip()]
    last = f": {said[-1][:300]}" if said else ""
    how = f"by signal {-code}" if code < 0 else f"with {code}"
    return f"its process ended {how}{last}"
