"""What the engine makes of a GPU, against what the GPU can do.

Models have real shapes and random weights: nothing is downloaded. The parts: a ceilings (copy,
product); b decode; c prefill; d step time over tokens, and its knee; e attention alone; f the
256-request yardstick; g the same through transformers; h long prompts among decodes, in each
batching mode; i telemetry on and off; j exactness. It writes one JSON, and prints one table.

    python tests/bench/bench_gpu.py
    python tests/bench/bench_gpu.py --only b,c --models qwen3-8b -o mine.json
    python tests/bench/bench_gpu.py --show mine.json theirs.json
    python tests/bench/bench_gpu.py --steps mine.json qwen3-8b > steps.csv  # for 'simulate'
    python tests/bench/bench_gpu.py --device cpu

Each job (some parts on one model) runs in a process of its own, which may run out of memory, break
the driver's state, or hang: what it had measured is in the report, and a part that fails is a line.
"""

import argparse
import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gpu_report
import msgspec
from gpu_report import PARTS, UNFINISHED, Report

from stepscope.engine.bench.throughput import describe_machine
from stepscope.engine.models.made_checkpoints import SHAPES

NEED_CEILINGS = "bcde"  # these parts report shares of the ceilings, so they need (a)
PEER_WEIGHT = 12.0  # of transformers' side of (g)
START_WEIGHT = 4.0  # of loading a model, compiling kernels and recording graphs
MODELS = ("qwen3-0.6b", "qwen3-8b", "llama-3.1-8b")
QUICK_MODELS = ("qwen3-tiny", "llama-tiny")
# A worker that is out of time may take this long to end: it checks the clock between points only.
GRACE_S = 20.0
LEAST_S = 10.0
PACKAGES = ("triton", "flash-attn", "flash-attn-4", "transformers", "numpy", "stepscope")
# Batching modes of (h) to record, with their files: the two that a reader compares.
RECORDED = {"continuous": "arrivals-continuous.mcap", "chunked": "arrivals-chunked.mcap"}
_SMI = (
    *("name", "driver_version", "memory.total", "power.limit", "power.draw", "clocks.max.sm"),
    *("clocks.sm", "clocks.max.mem", "clocks.mem", "temperature.gpu"),
    "clocks_event_reasons.active",  # what throttles it
)


class Job(msgspec.Struct, kw_only=True):
    """What one worker process measures: some parts on one model, in order."""

    parts: str  # letters
    model: str | None
    device: str
    is_quick: bool
    is_peer: bool = False  # transformers' side of (g), else ours
    seconds: float = 0.0  # time limit
    recordings: dict[str, str] = {}  # file by batching mode

    def weights(self, parts: str) -> list[float]:
        return [PEER_WEIGHT if self.is_peer else PARTS[part][1] for part in parts]


def plan_jobs(
    parts: str, models: list[str], device: str, recordings: dict[str, str], *, is_quick: bool
) -> list[Job]:
    """Return the jobs that measure `parts` (letters) on `models`, in the order in which they run.

    (a) and (e) need no model. (b), (c) and (d) run on every model, (f) and (g) on the first two,
    (h) on the second or the only one, (i) and (j) on the first: its steps are short, so telemetry
    weighs most.
    """
    if any(each in parts for each in NEED_CEILINGS):
        parts += "a"
    wanted: list[tuple[str, str | None, bool]] = [("ae", None, False), ("j", models[0], False)]
    for place, model in enumerate(models):
        is_early, has_arrivals = place < 2, place == min(1, len(models) - 1)
        letters = "bcd" + "fg" * is_early + "h" * has_arrivals + "i" * (place == 0)
        wanted += [("g", model, True)] * is_early + [(letters, model, False)]
    rest = {"device": device, "is_quick": is_quick, "recordings": recordings}
    return [
        Job(parts=chosen, model=model, is_peer=is_peer, **rest)
        for letters, model, is_peer in wanted
        if (chosen := "".join(each for each in letters if each in parts))
    ]


# The parent: starts a worker for each job


def conduct(
    jobs: list[Job], report: Report, file: Path, seconds: float, worker: list[str]
) -> Report:
    """Run the jobs one after the other, in about `seconds`. Returns the report, also in `file`.

    SIGINT ends it early, and the report has what was measured so far.
    """
    start_s = time.monotonic()
    report.gpu["before"] = _nvidia_smi(jobs[0].device)
    report.write(file)
    weights, is_interrupted = [START_WEIGHT + sum(job.weights(job.parts)) for job in jobs], True
    with contextlib.suppress(KeyboardInterrupt):
        for place, job in enumerate(jobs):
            left_s = seconds - (time.monotonic() - start_s)
            job.seconds = max(0.0, left_s) * weights[place] / sum(weights[place:])
            _run(job, file, worker)
        is_interrupted = False
    report = _with_reasons(file, "it was interrupted")
    report.is_interrupted = is_interrupted
    report.gpu["after"] = _nvidia_smi(jobs[0].device)
    report.seconds = time.monotonic() - start_s
    report.write(file)
    return report


def _run(job: Job, file: Path, worker: list[str]) -> None:
    """Run one job, whose worker process writes into the report in `file`."""
    report = gpu_report.read(file)
    for part in job.parts:
        outcome = report.outcome(part, job.model)
        outcome.why = outcome.why or UNFINISHED
    report.write(file)
    if job.seconds <= 0:
        _with_reasons(file, "no time was left for it (see --time-limit)")
        return
    process = subprocess.Popen(
        [*worker, msgspec.json.encode(job).decode(), str(file)],
        stdin=subprocess.PIPE,  # whose end tells it that this process is gone
        start_new_session=True,  # so that Ctrl-C reaches only this process
    )
    why = UNFINISHED
    try:
        if code := process.wait(job.seconds + GRACE_S):
            how = f"by signal {-code}" if code < 0 else f"with {code}"
            why = f"its process ended {how}: its last lines say why"
    except subprocess.TimeoutExpired:
        why = f"its process was ended: it took longer than {job.seconds:.0f} s"
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    _with_reasons(file, why)


def _with_reasons(file: Path, why: str) -> Report:
    """Say in the report why parts of it have not ended."""
    report = gpu_report.read(file)
    for outcome in report.outcomes:
        if outcome.why == UNFINISHED:
            outcome.why = why
    report.write(file)
    return report


# The worker


def work(job: Job, file: Path) -> int:
    """Measure the parts of a job, into the report in `file`. Returns the exit status."""
    start_s = time.monotonic()
    from stepscope.engine.execution.environment import prepare_environment
    from stepscope.engine.protocol.engine_config import EngineConfig

    prepare_environment(EngineConfig())
    import gpu_engine
    import gpu_kernels
    import gpu_requests
    import gpu_transformers
    import torch
    from gpu_bench import Bench, reason

    from stepscope.engine.execution.devices import find_device

    report, device = gpu_report.read(file), find_device(job.device)
    is_gpu = device.type == "cuda"
    report.device, report.is_gpu = torch.cuda.get_device_name(device) if is_gpu else "CPU", is_gpu
    # Torch itself names its build (2.13.0+cu130). The package's version may leave that out.
    report.versions = {"torch": str(torch.__version__), "CUDA": torch.version.cuda or "none"}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            report.versions[name] = version(name)
    bench = Bench(device, report, file, is_quick=job.is_quick)
    bench.recordings = job.recordings
    torch.manual_seed(0)
    # Each is called with the bench, and the engine or the name of the model.
    measures = {
        "a": gpu_kernels.measure_ceilings,
        "b": gpu_engine.measure_decode,
        "c": gpu_engine.measure_prefill,
        "d": gpu_engine.measure_curve,
        "e": gpu_kernels.measure_kernels,
        "f": gpu_requests.measure_yardstick,
        "g": gpu_requests.measure_same_work,
        "h": gpu_requests.measure_arrivals,
        "i": gpu_requests.measure_telemetry,
        "j": gpu_transformers.measure_exactness,
    }
    if job.is_peer:
        measures["g"] = gpu_transformers.measure_generate_batch
    try:
        with contextlib.ExitStack() as stack:
            subject = job.model
            if job.model is not None and not job.is_peer and job.parts != "j":
                subject = stack.enter_context(gpu_engine.engine_side(bench, job.model))
            for place, part in enumerate(job.parts):
                weights = job.weights(job.parts[place:])
                left_s = job.seconds - (time.monotonic() - start_s)
                with bench.part(part, job.model, max(0.0, left_s) * weights[0] / sum(weights)):
                    measures[part](bench, subject)
    except Exception as error:  # noqa: BLE001 - drivers and libraries may raise anything
        report.write(file)
        _with_reasons(file, reason(error))
        return 1
    return 0


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


# The machine


def _output(*command: str, timeout_s: float = 10.0) -> str:
    """What a command prints; nothing if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        options: dict[str, Any] = {"stderr": subprocess.DEVNULL, "text": True}
        return subprocess.check_output(command, timeout=timeout_s, **options).strip()
    return ""


def _nvidia_smi(device: str) -> dict[str, str]:
    """What nvidia-smi reports about 'cuda:N'. Only queries: it changes no setting."""
    if device == "cpu":
        return {}
    query = ("nvidia-smi", "--format=csv,noheader", "-i", device.partition(":")[2] or "0")
    # One by one: a field that the driver does not support fails the whole query.
    values = {field: _output(*query, f"--query-gpu={field}") for field in _SMI}
    return {field: value for field, value in values.items() if value}


def _device_name(parser: argparse.ArgumentParser, device: str) -> str:
    if device == "cpu":
        return "CPU"
    if re.fullmatch(r"cuda(:\d+)?", device) is None:
        parser.error(f"--device: expected cuda, cuda:N or cpu, got {device!r}")
    # In a child process, so that this one takes none of the device's memory.
    code = "import sys, torch; print(torch.cuda.get_device_name(torch.device(sys.argv[1])))"
    name = _output(sys.executable, "-c", code, device, timeout_s=120.0)
    if not name:
        parser.error(f"torch sees no GPU {device!r}; '--device cpu' tries the bench itself")
    return name


def _commit() -> str | None:
    git = ("git", "-C", str(Path(__file__).parent))
    found = _output(*git, "rev-parse", "--short=12", "HEAD")
    is_changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return (f"{found}, and changes" if is_changed else found) or None


def _letters(parser: argparse.ArgumentParser, option: str, text: str) -> str:
    letters = text.replace(",", " ").split()
    for each in letters:
        if each not in PARTS:
            known = ", ".join(f"{letter} ({name})" for letter, (name, _) in PARTS.items())
            parser.error(f"{option}: there is no part {each!r}; there are: {known}")
    return "".join(letters)


def _recordings(parser: argparse.ArgumentParser, folder: str | None) -> dict[str, str]:
    files = {mode: Path(folder, name) for mode, name in RECORDED.items()} if folder else {}
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            parser.error(f"{file} is there already; remove it or choose another folder")
    return {mode: str(file.resolve()) for mode, file in files.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", help="the report [default: bench-gpu-DATE-DEVICE.json]")
    parser.add_argument("--only", metavar="PARTS", help="these parts, by letter: a,b,e")
    parser.add_argument("--skip", metavar="PARTS", help="all but these parts", default="")
    parser.add_argument("--models", metavar="NAMES", help=f"shapes [default: {','.join(MODELS)}]")
    parser.add_argument("--time-limit", type=float, default=460.0, metavar="SECONDS")
    parser.add_argument("--recordings", metavar="FOLDER", help="write recordings of part h there")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for tiny models")
    parser.add_argument("--quick", action="store_true", help="tiny models, about a minute")
    parser.add_argument("--show", nargs="+", metavar="FILE", help="only print one report, or two")
    parser.add_argument("--steps", nargs=2, metavar=("FILE", "MODEL"), help="only print its steps")
    args = parser.parse_args()
    if args.steps is not None:
        print(*gpu_report.steps_csv(gpu_report.read(Path(args.steps[0])), args.steps[1]), sep="\n")
        return 0
    if args.show is not None:
        if len(args.show) > 2:
            parser.error(f"--show: one file or two, not {len(args.show)}")
        print(*gpu_report.table(*(gpu_report.read(Path(each)) for each in args.show)), sep="\n")
        return 0
    if not LEAST_S <= args.time_limit < float("inf"):
        parser.error(f"--time-limit: expected {LEAST_S:g} seconds or more")
    only = _letters(parser, "--only", args.only or ",".join(PARTS))
    skip = _letters(parser, "--skip", args.skip)
    letters = "".join(each for each in PARTS if each in only and each not in skip)
    if not letters:
        parser.error("--only and --skip leave nothing to measure")
    is_quick = args.quick or args.device == "cpu"
    models = list(QUICK_MODELS if is_quick else MODELS)
    if args.models is not None:
        models = list(dict.fromkeys(name.strip() for name in args.models.split(",")))
        if unknown := set(models) - set(SHAPES):
            parser.error(f"--models: no shape is called {unknown}; there are: {', '.join(SHAPES)}")
    named = _device_name(parser, args.device)
    now = datetime.datetime.now(datetime.UTC)
    slug = re.sub(r"[^a-z0-9]+", "-", named.lower()).strip("-") or "device"
    file = Path(args.output or f"bench-gpu-{now:%Y%m%d-%H%M}-{slug}.json")
    machine = describe_machine()
    report = Report(
        date=now.isoformat(timespec="seconds"),
        is_gpu=args.device != "cpu",
        is_quick=is_quick,
        device=named,
        commit=_commit(),
        host={name: getattr(machine, name) for name in ("python", "system", "cpu", "num_cores")},
        settings={"parts": letters, "models": models, "device": args.device},
    )
    report.settings["time_limit_s"] = args.time_limit
    report.write(file)  # now, so that an error does not come after minutes of measuring
    recordings = _recordings(parser, args.recordings)
    jobs = plan_jobs(letters, models, args.device, recordings, is_quick=is_quick)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    worker = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    report = conduct(jobs, report, file, args.time_limit, worker)
    print(*gpu_report.table(report), sep="\n")
    print(f"every sample is in {file}", file=sys.stderr)
    return 130 if report.is_interrupted else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        threading.Thread(target=_end_with_input, daemon=True).start()
        code = work(msgspec.json.decode(sys.argv[2], type=Job), Path(sys.argv[3]))
        os._exit(code)  # do not wait for a library's threads, which may never end
    sys.exit(main())
