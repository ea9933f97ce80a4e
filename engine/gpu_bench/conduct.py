"""Starts a process for each job, gathers what it tells, and ends it when its time is up.

Nothing that happens in such a process reaches this one: it may run out of memory, leave the driver
in a state it does not recover from, or hang. What it has told until then is in the report, and
every part that it owes has a line that says why.
"""

import contextlib
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

from stepscope.engine.gpu_bench import aims, host
from stepscope.engine.gpu_bench.parts import (
    PARTS,
    Begun,
    Doing,
    Ended,
    Failed,
    Found,
    Hello,
    Job,
    Message,
    PeerWork,
    share_of,
)
from stepscope.engine.gpu_bench.results import Outcome, Point, Report

# After its time a process has this long to end by itself: parts look at the clock between points.
GRACE_S = 20.0
WORKER = (sys.executable, "-m", "stepscope.engine.gpu_bench.worker")

# What is measured, its share of the whole time (0..1), and what is being done in it.
Progress = Callable[[str, float, str], None]


def conduct(
    jobs: list[Job],
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
        save: told after every part; the report is good as it is then.
        worker: the command of a process.
    """
    start_s = time.monotonic()
    report.gpu["before"] = host.nvidia_smi()
    left = list(jobs)

    def told(what: str, detail: str) -> None:
        share = min(1.0, (time.monotonic() - start_s) / seconds)
        progress(what, share, detail)

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
                _Conducted(job, report, left, told).run(worker)
            finish()
    except KeyboardInterrupt:
        report.is_interrupted = True
    report.gpu["after"] = host.nvidia_smi()
    finish()


class _Conducted:
    """One job, from the start of its process to its end."""

    def __init__(
        self, job: Job, report: Report, later: list[Job], told: Callable[[str, str], None]
    ) -> None:
        self._job = job
        self._report = report
        self._later = later
        self._told = told
        self._outcome: Outcome | None = None  # of the part that has begun
        self._begun_s = 0.0
        self._ended: set[str] = set()

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
            process.stdin.write(msgspec.json.encode(self._job) + b"\n")
            process.stdin.flush()
            for thread in threads:
                thread.start()
            why = self._listen(lines, deadline_s)
            if not why:
                process.wait(GRACE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            why = why or "its process did not end"
        finally:
            self._stop(process)
            for thread in threads:
                thread.join(1.0)
            if not why and process.returncode:
                why = _last_words(errors, process.returncode)
            self._end_all(why)

    def _listen(self, lines: "queue.SimpleQueue[bytes]", deadline_s: float) -> str:
        """Until the process has said all; returns why there will be no more, if it is not that."""
        while True:
            try:
                line = lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                return f"its process was ended: it took longer than {self._job.seconds:.0f} s"
            if not line:
                return ""
            message = msgspec.json.decode(line, type=Message)
            if isinstance(message, Failed):
                return message.why
            self._take(message)

    def _take(self, message: Hello | Doing | Begun | Found | Ended) -> None:
        report, outcome = self._report, self._outcome
        if isinstance(message, Hello):
            report.device, report.is_gpu = message.device, message.is_gpu
            report.versions.update(message.versions)
        elif isinstance(message, Doing):
            self._told(self._title(message.part), message.detail)
        elif isinstance(message, Begun):
            self._outcome = self._found_outcome(message.part)
            self._begun_s = time.monotonic()
            self._told(self._title(message.part), "")
        elif outcome is None:
            return
        elif isinstance(message, Found):
            outcome.points.append(msgspec.convert(message.point, Point))
        else:
            outcome.seconds += message.seconds
            outcome.why = outcome.why or message.why
            outcome.settings.update(message.settings)
            self._ended.add(outcome.part)
            self._outcome = None

    def _found_outcome(self, part: str) -> Outcome:
        """Both sides of (g) are one outcome."""
        found = self._report.outcome(part, self._job.model)
        if found is None:
            found = Outcome(part=part, model=self._job.model)
            self._report.outcomes.append(found)
        return found

    def _end_all(self, why: str) -> None:
        """Parts that are not measured, or not to their end, get a reason."""
        if self._outcome is not None:
            self._outcome.seconds += time.monotonic() - self._begun_s
        for part in self._job.parts:
            if part not in self._ended:
                outcome = self._found_outcome(part)
                outcome.why = outcome.why or why or "its process ended without a word"

    def _title(self, part: str) -> str:
        on = f", {self._job.model}" if self._job.model else ""
        if part not in PARTS:
            return f"starting{on}"
        left = "".join(each for job in self._later for each in job.parts)
        ahead = f"; {len(left)} to come" if left else ""
        return f"({part}) {PARTS[part].name}{on}{ahead}"

    def _stop(self, process: "subprocess.Popen[bytes]") -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _owe(report: Report, job: Job, why: str) -> None:
    for part in job.parts:
        if report.outcome(part, job.model) is None:
            report.outcomes.append(Outcome(part=part, model=job.model, why=why))


def _peer_works(report: Report, job: Job) -> list[PeerWork]:
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


def _last_words(errors: list[bytes], code: int) -> str:
    said = [line.decode(errors="replace").strip() for line in errors if line.strip()]
    last = f": {said[-1][:300]}" if said else ""
    how = f"by signal {-code}" if code < 0 else f"with {code}"
    return f"its process ended {how}{last}"
