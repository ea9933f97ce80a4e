"""Makes the session of a server's log: a record for each step it tells, or for each second."""

import time
from calendar import isleap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby, pairwise

from stepscope.engine.protocol.wire import (
    EngineInfo,
    EngineStatus,
    StepRecord,
    Telemetry,
    Totals,
)
from stepscope.recordings.importing.source import ForeignFile, ForeignSession

_NS = 1_000_000_000
_LONGER = 1.5  # a gap this much longer than usual is a time without lines


@dataclass(slots=True, kw_only=True)
class LogEntry:
    """What one line tells; None is what it does not.

    Attributes:
        rank: which engine of several printed the line.
        elapsed_ns: how long the step took that the line is about; None: it sums up an interval.
        is_step: whether it is about one step.
        prompt_rate, output_rate: tokens a second since such a line before.
    """

    wall_ns: int
    rank: str = ""
    is_step: bool = False
    elapsed_ns: int | None = None
    prompt_rate: float | None = None
    output_rate: float | None = None
    num_prompt: int | None = None  # tokens that were computed
    num_cached: int | None = None
    num_output: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    num_preempted: int | None = None
    kv_used: float | None = None
    cuda_graph: str | None = None


class LogClock:
    """Makes Unix times of stamps that lack the year, or the day.

    The first such stamp is taken for the last possible one before the file was last written, each
    later one for the closest to the one before.
    """

    def __init__(self, file: ForeignFile) -> None:
        self._file = file
        self._last: datetime | None = None

    def wall_ns(self, line: int, date: str | None, clock: str) -> int:
        """The time of a stamp in local time.

        Args:
            date: `YYYY-MM-DD`, `MM-DD` or None.
            clock: `HH:MM:SS`.

        Raises:
            RecordingError: there is no such time.
        """
        written = datetime.fromtimestamp(self._file.changed_s)
        last = self._last or written
        try:
            if date is None:
                now = datetime.fromisoformat(f"{last:%Y-%m-%d} {clock}")
                around = [now + timedelta(days=days) for days in (-1, 0, 1)]
            elif date.count("-") == 1:
                years = (last.year - 1, last.year, last.year + 1)
                around = [
                    datetime.fromisoformat(f"{year:04}-{date} {clock}")
                    for year in years
                    if date != "02-29" or isleap(year)
                ]
            else:
                around = [datetime.fromisoformat(f"{date} {clock}")]
            if self._last is None and len(around) > 1:
                around = [each for each in around if each <= written + timedelta(hours=1)]
            now = min(around, key=lambda each: abs(each - last))
            stamp_s = time.mktime(now.timetuple())
        except (ValueError, OverflowError):
            got = f"{date or ''} {clock}".strip()
            raise self._file.error(line, "time", "a date and a time", got) from None
        self._last = now
        return int(stamp_s) * _NS


def log_session(
    file: ForeignFile, engine: str, entries: Iterable[LogEntry], every_s: float | None
) -> ForeignSession:
    """The session of the first rank in a log.

    Args:
        every_s: how often the server prints such lines; None: whenever it runs. Lines about steps
            go before lines about intervals, which then tell the load alone.
    """
    found = list(entries)
    ranks = list(dict.fromkeys(each.rank for each in found))
    mine = [each for each in found if each.rank == ranks[0]]
    note = None
    if len(ranks) > 1:
        others = ", ".join(ranks[1:])
        note = f"{file.name} is the log of {len(ranks)} ranks: {ranks[0]} is read, not {others}"
    has_steps = any(each.is_step and each.elapsed_ns is not None for each in mine)
    gaps_s = Counter((b.wall_ns - a.wall_ns) // _NS for a, b in pairwise(mine))
    del gaps_s[0]
    if every_s is not None and gaps_s:
        every_s = min(every_s, float(gaps_s.most_common(1)[0][0]))
    info = EngineInfo(
        engine_id=file.name,
        name=file.name,
        software_version="",
        model="",
        engine=engine,
        imported=f"a log of {engine}",
        monotonic_ns=mine[0].wall_ns,
        wall_ns=mine[0].wall_ns,
        totals_every_s=None if has_steps else every_s or 1.0,
    )
    return ForeignSession(info, _steps(mine) if has_steps else _intervals(mine, every_s), note)


def _steps(entries: list[LogEntry]) -> Iterator[Telemetry]:
    """A record for each step, which lasted as long as its line says.

    Stamps are whole seconds: so a step ends at its stamp, or as soon after as there was time for
    all those before it.
    """
    end_ns, step, load = entries[0].wall_ns - (entries[0].elapsed_ns or 0), 0, None
    for each in entries:
        if each.elapsed_ns is None:
            load = each
            continue
        start_ns = max(end_ns, each.wall_ns - each.elapsed_ns)
        end_ns = start_ns + each.elapsed_ns
        if load is not None:
            each.num_running, each.num_waiting = load.num_running, load.num_waiting
        yield _record(step, start_ns, end_ns, each, num_steps=1)
        step, load = step + 1, None


def _intervals(entries: list[LogEntry], every_s: float | None) -> Iterator[Telemetry]:
    """A record for each second with lines, up to it from the one before."""
    every_ns = None if every_s is None else round(every_s * _NS)
    last_ns = decoded_ns = None
    for step, (stamp_ns, group) in enumerate(groupby(entries, lambda each: each.wall_ns)):
        lines = list(group)
        end_ns = stamp_ns if last_ns is None else max(last_ns, stamp_ns)
        if every_ns is None:
            start_ns = end_ns - _NS if last_ns is None else last_ns
            rate_ns = None if decoded_ns is None else end_ns - decoded_ns
        else:
            is_next = last_ns is not None and end_ns - last_ns <= _LONGER * every_ns
            start_ns = last_ns if last_ns is not None and is_next else end_ns - every_ns
            rate_ns = end_ns - start_ns
        whole = _sum(lines, rate_ns)
        if any(each.output_rate is not None for each in lines):
            decoded_ns = end_ns
        num_steps = len(lines) if all(each.is_step for each in lines) else None
        yield _record(step, start_ns, end_ns, whole, num_steps)
        if whole.num_running == whole.num_waiting == 0:
            yield EngineStatus(
                time_ns=end_ns, state="idle", step=step, num_running=0, num_waiting=0
            )
        last_ns = end_ns


def _sum(lines: list[LogEntry], rate_ns: int | None) -> LogEntry:
    """What the lines of one second tell together; `rate_ns`: their rates are of this time."""

    def last(name: str) -> object:
        return next((v for e in reversed(lines) if (v := getattr(e, name)) is not None), None)

    def total(name: str, rate: str = "") -> int | None:
        counts = [value for each in lines if (value := getattr(each, name)) is not None]
        rates = [value for each in lines if rate and (value := getattr(each, rate)) is not None]
        if rates and rate_ns is not None:
            counts.append(round(sum(rates) / len(rates) * rate_ns / _NS))
        return sum(counts) if counts else None

    return LogEntry(
        wall_ns=lines[-1].wall_ns,
        num_prompt=total("num_prompt", "prompt_rate"),
        num_output=total("num_output", "output_rate"),
        num_cached=total("num_cached"),
        num_preempted=total("num_preempted"),
        **{name: last(name) for name in _GAUGES},  # type: ignore[arg-type]
    )


_GAUGES = ("num_running", "num_waiting", "kv_used", "cuda_graph")


def _record(
    step: int, start_ns: int, end_ns: int, told: LogEntry, num_steps: int | None
) -> StepRecord:
    prompt, cached = told.num_prompt, told.num_cached
    queried = None if prompt is None or cached is None else prompt + cached
    return StepRecord(
        step=step,
        schedule_start_ns=start_ns,
        tokens_ns=end_ns,
        num_prefill_tokens=prompt or 0,
        num_decode_tokens=told.num_output or 0,
        num_running=told.num_running or 0,
        num_waiting=told.num_waiting or 0,
        cuda_graph=told.cuda_graph,
        totals=Totals(
            num_steps=num_steps,
            num_prompt_tokens=prompt if queried is None else queried,
            num_output_tokens=told.num_output,
            num_cached_tokens=cached,
            num_queried_tokens=queried,
            num_preempted=told.num_preempted,
            is_load_known=told.num_running is not None and told.num_waiting is not None,
            kv_used=told.kv_used,
        ),
    )
