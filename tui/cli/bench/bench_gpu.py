"""`stepscope bench gpu`: measures a GPU with `engine.bench.gpu`, or shows earlier reports."""

import datetime
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from stepscope.engine.bench.gpu import host, results
from stepscope.engine.bench.gpu.conduct import conduct
from stepscope.engine.bench.gpu.parts import PARTS, chosen_models, chosen_parts, plan_jobs
from stepscope.engine.bench.gpu.results import Report
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.tui.cli.bench.bench_gpu_table import side_by_side, table
from stepscope.tui.cli.engines.engine import engine_packages
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.settings.cli_errors import CommandFailed, Interrupted, WrongUsage

# Batching modes of part h to record, with their files: the two that a reader compares.
RECORDED = {"continuous": "arrivals-continuous.mcap", "chunked": "arrivals-chunked.mcap"}
# The command that records. The process that starts it fills in '{endpoint}' and '{file}'.
RECORDER = [
    *(sys.executable, "-m", "stepscope.tui.cli"),
    *("record", "{endpoint}", "--output", "{file}"),
]
LEAST_S = 10.0


def gpu(
    output: str | None,
    device: str,
    only: str | None,
    skip: str | None,
    models: str | None,
    time_limit: float,
    recordings: str | None,
    *,
    quick: bool,
) -> None:
    """Measure a GPU, write a report of the results and print it as a table.

    Raises:
        WrongUsage: an option is not valid.
        CommandFailed: there is no GPU, or a file cannot be written.
        Interrupted: a signal ended the measuring early; the report has what was measured until
            then.
    """
    if not LEAST_S <= time_limit < float("inf"):
        raise WrongUsage(f"--time-limit: expected {LEAST_S:g} seconds or more, got {time_limit:g}")
    is_quick = quick or device == "cpu"
    try:
        letters = chosen_parts(only, skip)
        names = chosen_models(models, is_quick=is_quick)
    except ConfigError as error:
        raise WrongUsage(str(error)) from None
    files = _recordings(recordings, letters)
    with engine_packages():
        named = _device_name(device)
    now = datetime.datetime.now(datetime.UTC)
    file = Path(output or f"bench-gpu-{now:%Y%m%d-%H%M}-{_slug(named)}.json")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise CommandFailed(f"{file} cannot be written: there is no such folder, or no permission")
    report = Report(
        date=now.isoformat(timespec="seconds"),
        is_gpu=device != "cpu",
        is_quick=is_quick,
        device=named,
        commit=host.commit(),
        host=host.describe(),
        settings={"parts": letters, "models": names, "time_limit_s": time_limit, "device": device},
    )
    jobs = plan_jobs(letters, names, device, is_quick=is_quick, for_mode=files)
    for job in jobs:
        job.recorder = RECORDER
    for line in _announcement(report, letters, names, time_limit, file):
        print(line, file=sys.stderr, flush=True)
    with Progress() as progress, _all_signals_interrupt():
        conduct(
            jobs,
            report,
            time_limit,
            progress=progress,
            save=lambda so_far: results.write(so_far, file),
        )
    say(*table(report))
    print(f"every sample is in {file}", file=sys.stderr, flush=True)
    if report.is_interrupted:
        raise Interrupted(f"interrupted: {file} holds what was measured until then")


def show(files: list[str]) -> None:
    """Print one earlier report, or two side by side.

    Raises:
        CommandFailed: a report cannot be read.
    """
    if len(files) > 2:
        raise WrongUsage(f"--show: one file or two, not {len(files)}")
    reports = []
    for name in files:
        try:
            reports.append(results.read(Path(name)))
        except ConfigError as error:
            raise CommandFailed(str(error)) from None
    if len(reports) == 1:
        say(*table(reports[0]))
    else:
        say(*side_by_side(*reports))


def _device_name(device: str) -> str:
    """Return the name of a device.

    Raises:
        CommandFailed: there is no such device.
        WrongUsage: the text does not name a device.
    """
    if device == "cpu":
        return "CPU"
    if re.fullmatch(r"cuda(:\d+)?", device) is None:
        raise WrongUsage(f"--device: expected cuda, cuda:N or cpu, got {device!r}")
    found = host.gpu_name(device)
    if found is None:
        raise CommandFailed(
            f"torch sees no GPU {device!r}: run it where there is one ('stepscope doctor' says "
            "what is missing); '--device cpu' tries the bench itself on tiny models"
        )
    return found


def _announcement(
    report: Report, letters: str, models: list[str], time_limit: float, file: Path
) -> Iterator[str]:
    yield (
        f"{report.device}: {len(letters)} of {len(PARTS)} parts, {', '.join(models)}; up to "
        f"{time_limit / 60:.0f} min, into {file}; Ctrl-C ends it and keeps what it has"
    )
    if not report.is_gpu:
        yield "on a CPU with tiny models: this only shows that the bench runs, and nothing of a GPU"
    elif report.is_quick:
        yield "quick: tiny models and few samples; its figures say nothing about the GPU"


def _recordings(folder: str | None, letters: str) -> dict[str, str]:
    """Return the path of the recording for each batching mode that is to be recorded."""
    if folder is None:
        return {}
    if "h" not in letters:
        raise WrongUsage("--recordings: only part h makes them, and it is not among the parts")
    path = Path(folder)
    if not path.is_dir():
        raise CommandFailed(f"--recordings {folder} is not a folder: make it first")
    files = {mode: path / name for mode, name in RECORDED.items()}
    for file in files.values():
        if file.exists():
            raise CommandFailed(f"{file} is there already; remove it or choose another folder")
    return {mode: str(file.resolve()) for mode, file in files.items()}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "device"


@contextmanager
def _all_signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the bench like Ctrl-C, which keeps what was measured."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
