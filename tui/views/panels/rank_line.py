"""Lines on the ranks of an engine in a step: their times, whom they waited for, empty stages."""

from statistics import median

from stepscope.engine.protocol.wire import EngineInfo, RankTimes, StepRecord
from stepscope.recordings.state.ranks import late_rank, names, rank_sizes
from stepscope.tui.views import format as fmt
from stepscope.tui.views.lines import Line, first_fitting

_MOST_NAMED = 4


def draw(record: StepRecord, info: EngineInfo | None, width: int) -> list[Line]:
    """Return a line, and one more on the stages of a pipeline; none for an engine of one rank."""
    if not (ranks := record.ranks):
        is_one = rank_sizes(info) == (1, 1)
        return [] if is_one else [((" ranks   unknown: not all of them told", "muted"),)]
    ms = [each.work_ns / 1e6 for each in ranks]
    each = [f"{name} {fmt.milliseconds(t)} ms" for name, t in zip(names(ranks), ms, strict=True)]
    slowest, middle, spread = map(fmt.milliseconds, (max(ms), median(ms), max(ms) - min(ms)))
    of_many = f"slowest of {len(ms)} {slowest} ms, median {middle}, spread {spread}"
    said, style = [", about even", ""], "muted"
    if (late := late_rank(record)) is not None:
        waited = f"{fmt.milliseconds(late[1] / 1e6)} ms"
        said, style = [f": {late[0]} was waited for, {waited}", f": {late[0]} +{waited}"], "caution"
    head = " ranks   " if info is None or info.device in (None, "cpu") else " launch  "
    times = [of_many] if len(ms) > _MOST_NAMED else [", ".join(each), of_many]
    forms = [((head, "muted"), (text, "text"), (end, style)) for text in times for end in said]
    empty = {f"pp{each.stage}": fmt.percent(_empty(each)) for each in ranks}
    stages = ", ".join(f"{stage} {share}" for stage, share in empty.items())
    lines: list[Line] = [first_fitting(forms, width), ((" empty   ", "muted"), (stages, "text"))]
    return lines if len(empty) > 1 else lines[:1]


def _empty(rank: RankTimes) -> float | None:
    empty_ns = rank.empty_ns
    return None if empty_ns is None else empty_ns / max(1, empty_ns + rank.work_ns)
