"""Which of an engine's ranks the others waited for in a step, from `StepRecord.ranks`."""

from collections.abc import Sequence
from statistics import median

from stepscope.engine.protocol.wire import EngineInfo, RankTimes, StepRecord

MATTERS = 0.1  # share of a step: less is how times vary


def waited_for(ranks: Sequence[RankTimes]) -> tuple[int, int] | None:
    """Return the rank that others waited for longest, by number, and the time; None: no others.

    It did more work than the median of them. Those of its pipeline stage wait in collectives, the
    other stages for its results.
    """
    stages: dict[int, dict[int, int]] = {}
    for number, each in enumerate(ranks):
        stages.setdefault(each.stage, {})[number] = each.work_ns
    slowest = dict(max(each.items(), key=lambda item: item[1]) for each in stages.values())
    found = [_waited(each) for each in (*stages.values(), slowest) if len(each) > 1]
    return max(found, key=lambda each: each[1], default=None)


def _waited(work_ns: dict[int, int]) -> tuple[int, int]:
    *others, (longest_ns, worst) = sorted((ns, number) for number, ns in work_ns.items())
    return worst, round(longest_ns - median(ns for ns, _ in others))


def late_rank(record: StepRecord) -> tuple[str, int] | None:
    """Return the name of the rank that held a step up, and for how long; None: none did."""
    number, ns = waited_for(record.ranks or ()) or (0, 0)
    took_ns = record.tokens_ns - record.schedule_start_ns
    return (names(record.ranks or ())[number], ns) if ns and ns >= MATTERS * took_ns else None


def names(ranks: Sequence[RankTimes]) -> list[str]:
    num_stages = len({each.stage for each in ranks})
    size = len(ranks) // max(1, num_stages)
    return [_name(number, size, num_stages) for number in range(len(ranks))]


def rank_sizes(info: EngineInfo | None) -> tuple[int, int]:
    """Return the number of ranks of a pipeline stage of an engine, and the number of stages."""
    sizes = (info.tensor_parallel_size, info.pipeline_parallel_size) if info else (1, 1)
    return sizes[0] or 1, sizes[1] or 1


def slow_rank(waits_ns: Sequence[int], info: EngineInfo | None) -> str:
    """Return the name of the rank with the longest of these waits, by number; empty: no waits."""
    number = max(range(len(waits_ns)), key=lambda each: waits_ns[each], default=None)
    return "" if number is None else _name(number, *rank_sizes(info))


def _name(number: int, stage_size: int, num_stages: int) -> str:
    """The name of a rank, as vLLM has it: tp1, pp0, pp1 tp0."""
    stage = f"pp{number // stage_size}" if num_stages > 1 else ""
    return f"{stage} tp{number % stage_size}".strip() if stage_size > 1 else stage
