"""Starts a process for each job, gathers what it reports, and ends it when its time is up.

Nothing that happens in such a process reaches this one: it may run out of memory, leave the driver
in a state it does not recover from, or hang. What it has reported until then is in the report, and
every part that it owes has a line that says why.
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

# After its time a process has this long to end by itself: parts look at the clock between points.
GRACE_S = 20.0
WORKER = (sys.executable, "-m", "stepscope.engine.bench.gpu.measure.worker")

# What is measured, its share of the whole time (0..1), and what is being done in it.
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
    """Run `jobs` one after the other and fill in `report`; about `seconds` altogether.

    SIGINT ends it early: the report has what was measured until then, and says so.

    Args:
        save: called after every part; the report is good as it is then.
        worker: the command of a process.
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
    """The process of one job, from its start to its end."""

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
            start_new_session=True,  # Ctrl-C is ours
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
        """Until the process has said all; returns why there is more that will not come."""
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
    """What transformers did of (g) for this model: our side does the same."""
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
    """Every line, and at the end an empty one."""
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
