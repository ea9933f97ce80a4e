"""`stepscope explain --profile`: prints what ran in each step, by a torch profiler's trace."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.importing import torch_trace
from stepscope.tui.cli.shared.output import in_ms, note, say, text_table, told, write_json

_KINDS_OF_STEPS: dict[str, Callable[[torch_trace.KernelTimes], bool]] = {
    "all": lambda each: True,
    "decodes alone": lambda each: not each.profiled.batch[0],
    "with a prefill": lambda each: each.profiled.batch[0] > 0,
}
_NUM_KERNELS = 8
_NAME_WIDTH = 72


def print_profile(name: str, recording: Recording, file: str, limit: int, as_json: bool) -> None:
    """Print the time in kernels of each kind, and what is left to the host, by kind of step."""
    note("reading the trace")
    trace = torch_trace.read_trace(Path(file))
    match = torch_trace.matched_steps(trace, recording)
    if as_json:
        write_json(_document(trace, match))
        return
    ran, idle = f"kernels on {trace.device}", "no kernel"
    if not trace.device:
        ran, idle = "operators on a CPU", "no operator"
    slowest = sorted(match.steps, key=lambda each: -each.ns)[: limit or None]
    shown = [("slowest" if not n else "", [each]) for n, each in enumerate(slowest)]
    groups = [(kind, list(filter(of, match.steps))) for kind, of in _KINDS_OF_STEPS.items()]
    cells = [_row(kind, steps) for kind, steps in [*groups, *shown] if steps]
    heading = [
        "mean ms of a step",
        "steps",
        "step",
        "requests",
        *torch_trace.KERNEL_KINDS,
        "host",
        "took",
    ]
    say(
        f"{name} beside {file}: {ran}, rank {trace.rank}",
        *_matched(match),
        "",
        *text_table(heading, cells),
        "",
        *text_table(["most time in", "ms", "of all", ""], list(_kernels(trace)), "<>><"),
        "",
        f"host: {idle} ran of the step: scheduling, launching, waiting",
    )


def _matched(match: torch_trace.ProfileMatch) -> list[str]:
    first, last = match.steps[0].step, match.steps[-1].step
    said = f"{len(match.steps):,} of {match.num_profiled:,} steps found by their batches"
    clock = "" if match.clock_ns is None else f"; wall clocks {match.clock_ns / 1e6:,.1f} ms apart"
    return [f"{said}: steps {first:,} to {last:,}{clock}"]


def _row(kind: str, steps: Sequence[torch_trace.KernelTimes]) -> list[str]:
    is_one = len(steps) == 1
    _, num_prefill, _, num_decode = steps[0].profiled.batch
    tokens = f"{num_prefill:,} prefill, {num_decode:,} decode"
    times = [
        *(fmean(each.profiled.kernel_ns[of] for each in steps) for of in torch_trace.KERNEL_KINDS)
    ]
    times += [fmean(each.host_ns for each in steps), fmean(each.ns for each in steps)]
    return [
        kind,
        f"{len(steps):,}",
        f"{steps[0].step:,}" if is_one else "",
        tokens if is_one else "",
        *(f"{ns / 1e6:,.2f}" for ns in times),
    ]


def _kernels(trace: torch_trace.TorchTrace) -> Iterator[list[str]]:
    total_ns = sum(trace.kernels.values()) or 1
    for (kind, name), ns in trace.kernels.most_common(_NUM_KERNELS):
        short = name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"
        yield [kind, f"{ns / 1e6:,.1f}", f"{ns / total_ns:.1%}", short]


def _document(trace: torch_trace.TorchTrace, match: torch_trace.ProfileMatch) -> dict[str, Any]:
    return {
        "device": trace.device or None,
        "rank": trace.rank,
        "num_profiled": match.num_profiled,
        "clock_ms": in_ms(match.clock_ns),
        "steps": [
            {
                **told(each, "step", "ns", "host_ns"),
                **told(each.profiled, "busy_ns"),
                **{f"{kind}_ms": in_ms(ns) for kind, ns in each.profiled.kernel_ns.items()},
            }
            for each in match.steps
        ],
        "kernels": [
            {"kind": kind, "name": name, "ms": in_ms(ns)}
            for (kind, name), ns in trace.kernels.most_common()
        ],
    }
