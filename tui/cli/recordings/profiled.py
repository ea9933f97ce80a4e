"""`stepscope explain --profile`: prints what ran in each step, by a torch profiler's trace."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.importing import torch_trace
from stepscope.tui.cli.shared.output import in_ms, ms, note, say, text_table, told, write_json

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
    heading = ["mean ms of a step", "steps", "step", "requests", *torch_trace.KERNEL_KINDS]
    found, first, last = len(match.steps), match.steps[0].step, match.steps[-1].step
    clock = "" if match.clock_ns is None else f"; wall clocks {ms(match.clock_ns)} apart"
    say(
        f"{name} beside {file}: {ran}, rank {trace.rank}",
        f"{found:,} of {match.num_profiled:,} steps found by their batches: steps {first:,} to "
        f"{last:,}{clock}",
        "",
        *text_table([*heading, "host", "took"], cells),
        "",
        *text_table(["most time in", "ms", "of all", ""], list(_kernels(trace)), "<>><"),
        "",
        f"host: {idle} ran of the step: scheduling, launching, waiting",
    )


def _row(kind: str, steps: Sequence[torch_trace.KernelTimes]) -> list[str]:
    of_one = ["", ""]
    if len(steps) == 1:
        _, num_prefill, _, num_decode = steps[0].profiled.batch
        of_one = [f"{steps[0].step:,}", f"{num_prefill:,} prefill, {num_decode:,} decode"]
    kinds = torch_trace.KERNEL_KINDS
    times = [[*(each.profiled.kernel_ns[of] for of in kinds), each.host_ns, each.ns]
             for each in steps]  # fmt: skip
    means = (fmean(column) for column in zip(*times, strict=True))
    return [kind, f"{len(steps):,}", *of_one, *(f"{ns / 1e6:,.2f}" for ns in means)]


def _kernels(trace: torch_trace.TorchTrace) -> Iterator[list[str]]:
    total_ns = sum(trace.kernels.values()) or 1
    for (kind, name), ns in trace.kernels.most_common(_NUM_KERNELS):
        short = name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"
        yield [kind, f"{ns / 1e6:,.1f}", f"{ns / total_ns:.1%}", short]


def _document(trace: torch_trace.TorchTrace, match: torch_trace.ProfileMatch) -> dict[str, Any]:
    return {
        "device": trace.device or None,
        "rank": trace.rank,
        **told(match, "num_profiled", "clock_ns"),
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
