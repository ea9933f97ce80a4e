"""Makes the session of a server's log: a record for each step it tells, or for each second."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain, groupby, pairwise
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from stepscope.engine.protocol.wire import EngineStatus, StepRecord, Telemetry, Totals
from stepscope.recordings.importing.source import Count, ForeignFile, ForeignSession, Number

_NS = 1_000_000_000
_LONGER = 1.5  # a gap this much longer than usual is a time without lines


class LogEntry(Struct, kw_only=True):
    """What one line tells; None is what it does not. Rates are tokens a second."""

    wall_ns: int = 0
    rank: str = ""  # which engine of several printed the line
    elapsed_ms: Number | None = None  # of the step that the line is about; None: of an interval
    prompt_rate: Number | None = None
    output_rate: Number | None = None
    num_prompt: Count | None = None  # tokens that were computed
    num_cached: Count | None = None
    num_output: Count | None = None
    num_running: Count | None = None
    num_waiting: Count | None = None
    num_preempted: Count | None = None
    kv_used: Number | None = None
    has_graph: bool | None = None


# What stands in a line: `YYYY-MM-DD`, `MM-DD` or None; `HH:MM:SS`; the rank; and its figures.
LogLine: TypeAlias = tuple[str | None, str, str, dict[str, str]]


class LogClock:
    """Makes Unix times of stamps that lack the year, or the day.

    The first such stamp is taken for the last possible one before the file was last written, each
    later one for the closest to the one before.
    """

    def __init__(self, file: ForeignFile) -> None:
        self.file = file
        self._last: datetime | None = None

    def wall_ns(self, line: int, date: str | None, clock: str) -> int:
        written = datetime.fromtimestamp(self.file.changed_ns // _NS)
        last, days, around = self._last or written, [date or ""], list[datetime]()
        try:
            if date is None:
                days = [f"{last + timedelta(shift):%Y-%m-%d}" for shift in (-1, 0, 1)]
            elif date.count("-") == 1:
                days = [f"{last.year + shift:04}-{date}" for shift in (-1, 0, 1)]
            for day in days:
                with suppress(ValueError):  # 29 February
                    around.append(datetime.fromisoformat(f"{day} {clock}"))
            if self._last is None and len(days) > 1:
                around = [each for each in around if each <= written + timedelta(hours=1)]
            now = min(around, key=lambda each: abs(each - last))
            stamp_s = time.mktime(now.timetuple())
        except (ValueError, OverflowError):
            place, got = f"{line}, time", f"{date or ''} {clock}"
            raise self.file.error(place, "a date and a time", got) from None
        self._last = now
        return int(stamp_s) * _NS


class LogFormat(NamedTuple):
    """How the log of one kind of server is read."""

    engine: str
    parse: Callable[[str], LogLine | None]  # finds the figures in a line; None if it has none
    names: Mapping[str, str]  # of the fields of `LogEntry`, by the names of figures
    every_s: float | None = None  # between lines about intervals; None: whenever it runs

    def read(self, file: ForeignFile) -> ForeignSession | None:
        """The session of the first rank in a log; None if no line of its begin has figures."""
        if not any(map(self.parse, file.head.splitlines())):
            return None
        clock, ranks = LogClock(file), dict[str, list[LogEntry]]()
        for number, line in file.lines():
            if (entry := self.entry(clock, number, line)) is not None:
                ranks.setdefault(entry.rank, []).append(entry)
        (rank, mine), *others = ranks.items()
        name, note = file.path.name, None
        if others:
            note = (
                f"{name}: it is the log of {len(ranks)} ranks: {rank} is read, not "
                f"{', '.join(name for name, _ in others)}; "
                f"'stepscope top - < {name}' shows all side by side"
            )
        return self.session(file, mine)._replace(note=note)

    def entry(self, clock: LogClock, number: int, line: str) -> LogEntry | None:
        """What a line tells. Raises RecordingError if it has figures, but wrong ones."""
        if (found := self.parse(line)) is None:
            return None
        date, time_of_day, rank, figures = found
        entry = clock.file.fields(number, figures, LogEntry, self.names)
        entry.wall_ns, entry.rank = clock.wall_ns(number, date, time_of_day), rank
        return entry

    def session(
        self, file: ForeignFile, begun: Sequence[LogEntry], later: Iterable[LogEntry | None] = ()
    ) -> ForeignSession:
        """The session of one rank, as its lines come."""
        has_steps, every_s = any(each.elapsed_ms is not None for each in begun), self.every_s
        gaps_s = Counter((b.wall_ns - a.wall_ns) // _NS for a, b in pairwise(begun))
        del gaps_s[0]
        if every_s is not None and gaps_s:
            every_s = min(every_s, float(max(1, gaps_s.most_common(1)[0][0])))
        began_ns, unit_s = begun[0].wall_ns, None if has_steps else every_s or 1.0
        clocks = {"monotonic_ns": began_ns, "wall_ns": began_ns}
        info = file.info(self.engine, "log", totals_every_s=unit_s, **clocks)
        lines = chain(begun, later)
        return ForeignSession(info, _steps(lines) if has_steps else _intervals(lines, every_s))


def _steps(entries: Iterable[LogEntry | None]) -> Iterator[Telemetry]:
    """A record for each step, which lasted as long as its line says.

    Stamps are whole seconds: so a step ends at its stamp, or as soon after as there was time for
    all those before it. Lines about intervals tell the load of the step after them.
    """
    end_ns, step, load = 0, 0, None
    for each in entries:
        if each is None:
            continue
        if each.elapsed_ms is None:
            load = each
            continue
        elapsed_ns = round(each.elapsed_ms * 1e6)
        start_ns = max(end_ns, each.wall_ns - elapsed_ns)
        end_ns = start_ns + elapsed_ns
        if load is not None:
            each.num_running, each.num_waiting = load.num_running, load.num_waiting
        yield _record(step, start_ns, end_ns, each)
        step, load = step + 1, None


def _intervals(entries: Iterable[LogEntry | None], every_s: float | None) -> Iterator[Telemetry]:
    """A record for each second with lines, up to it from the one before."""
    every_ns = round((every_s or 1.0) * _NS)
    last_ns = decoded_ns = None
    for step, lines in enumerate(_seconds(entries)):
        end_ns = max(last_ns or 0, lines[0].wall_ns)
        start_ns = end_ns - every_ns if last_ns is None else last_ns
        if every_s is not None and end_ns - start_ns > _LONGER * every_ns:
            start_ns = end_ns - every_ns
        rates_since_ns = decoded_ns if every_s is None else start_ns
        whole = _sum(lines, None if rates_since_ns is None else end_ns - rates_since_ns)
        if any(each.output_rate is not None for each in lines):
            decoded_ns = end_ns
        yield _record(step, start_ns, end_ns, whole)
        if whole.num_running == whole.num_waiting == 0:
            yield EngineStatus(
                time_ns=end_ns, state="idle", step=step, num_running=0, num_waiting=0
            )
        last_ns = end_ns


def _seconds(entries: Iterable[LogEntry | None]) -> Iterator[list[LogEntry]]:
    """The lines of each second, which ends with a later stamp or when no line comes."""
    for _, group in groupby(entries, lambda each: each and each.wall_ns):
        if lines := [each for each in group if each is not None]:
            yield lines


def _sum(lines: list[LogEntry], rate_ns: int | None) -> LogEntry:
    """What the lines of one second tell together; `rate_ns`: their rates are of this time."""
    whole = LogEntry()
    for each in lines:
        for name in ("num_running", "num_waiting", "kv_used", "has_graph"):
            if getattr(each, name) is not None:
                setattr(whole, name, getattr(each, name))
        for name in ("num_prompt", "num_output", "num_cached", "num_preempted"):
            if getattr(each, name) is not None:
                setattr(whole, name, (getattr(whole, name) or 0) + getattr(each, name))
    for rate, name in (("prompt_rate", "num_prompt"), ("output_rate", "num_output")):
        rates = [found for each in lines if (found := getattr(each, rate)) is not None]
        if rates and rate_ns:  # of no time, their tokens are unknown
            setattr(whole, name, round(sum(rates) / len(rates) * rate_ns / _NS))
    return whole


def _record(step: int, start_ns: int, end_ns: int, told: LogEntry) -> StepRecord:
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
        cuda_graph=None if told.has_graph is None else "full" if told.has_graph else "none",
        totals=Totals(
            num_steps=None if told.elapsed_ms is None else 1,
            num_prompt_tokens=prompt if queried is None else queried,
            num_output_tokens=told.num_output,
            num_cached_tokens=cached,
            num_queried_tokens=queried,
            num_preempted=told.num_preempted,
            is_load_known=told.num_running is not None and told.num_waiting is not None,
            kv_used=None if told.kv_used is None else min(1.0, told.kv_used),
        ),
    )


# vLLM until 0.32, `vllm/v1/metrics/loggers.py`: a line every ten seconds, and iteration details.
_VLLM_EVERY_S = 10.0  # VLLM_LOG_STATS_INTERVAL, unless the log shows another
_VLLM_STAMP = re.compile(r"\b((?:\d{4}-)?\d\d-\d\d) (\d\d:\d\d:\d\d)")
_VLLM_RANK = re.compile(r"Engine (\d+): |(\d+ Engines) Aggregated: |EngineCore_DP(\d+)")
_VLLM_FIGURE = re.compile(r"\b([A-Z][A-Za-z ]*): (-?[\d.]+)")
_VLLM_ITERATION = re.compile(
    r"Iteration\(\d+\): \d+ context requests, (\S+) context tokens, "
    r"\d+ generation requests, (\S+) generation tokens, "
    r"iteration elapsed time: (\S+) ms(?! \(dummy\))"
)
_OF_ITERATION = ("context tokens", "generation tokens", "iteration elapsed time")
_VLLM_NAMES = {
    "Avg prompt throughput": "prompt_rate",
    "Avg generation throughput": "output_rate",
    "Running": "num_running",
    "Pending": "num_waiting",
    "Waiting": "num_waiting",
    "Preemptions": "num_preempted",
    "context tokens": "num_prompt",
    "generation tokens": "num_output",
    "iteration elapsed time": "elapsed_ms",
    "KV cache usage": "kv_used",
}


def _vllm(line: str) -> LogLine | None:
    iteration = _VLLM_ITERATION.search(line)
    if iteration is None and "Avg prompt throughput: " not in line:
        return None
    figures = dict(_VLLM_FIGURE.findall(line))
    for name in [name for name in figures if name.endswith("KV cache usage")]:
        # Of the device (GPU, CPU, TPU), which stands before that; in percent.
        figures["KV cache usage"] = f"{figures[name]}e-2"
    if iteration is not None:
        figures |= dict(zip(_OF_ITERATION, iteration.groups(), strict=True))
    rank, stamp = _VLLM_RANK.search(line), _VLLM_STAMP.search(line)
    number = "0" if rank is None else rank[rank.lastindex or 0].lstrip("0") or "0"
    date, clock = (None, "") if stamp is None else stamp.groups()
    return date, clock, f"engine {number}", figures


# SGLang until 0.5, `log_prefill_stats` and `report_decode_stats` of its scheduler: a prefill line
# is about one step; a decode line about the 40 or so since the one before.
_SGLANG_BATCH = re.compile(
    r"\[(?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d:\d\d)(?: ([A-Z]+\d[A-Z\d ]*))?\] (Prefill|Decode) batch\b"
)
_SGLANG_FIGURE = re.compile(r"(#?[A-Za-z][\w\- ()/]*?): (-?[\w.]+)")
_SGLANG_NAMES = {
    "#new-token": "num_prompt",
    "#cached-token": "num_cached",
    "#running-req": "num_running",
    "#queue-req": "num_waiting",
    "token usage": "kv_used",
    "full token usage": "kv_used",  # of layers with full attention, if others have less
    "gen throughput (token/s)": "output_rate",
    "cuda graph": "has_graph",
}
_OF_DECODES = ("gen throughput (token/s)", "cuda graph")


def _sglang(line: str) -> LogLine | None:
    if (head := _SGLANG_BATCH.search(line)) is None:
        return None
    figures = dict(_SGLANG_FIGURE.findall(line, head.end()))
    if head[4] == "Prefill":  # what it says of decodes is of the time before
        figures = {name: each for name, each in figures.items() if name not in _OF_DECODES}
    return head[1], head[2], head[3] or "rank 0", figures


# TensorRT-LLM 1.x with `print_iter_log`, `tensorrt_llm/_torch/pyexecutor/py_executor.py`: a line
# for each iteration.
_TRTLLM_ITERATION = re.compile(
    r"\biter = \d+, global_rank = (\d+), .*timestamp = (\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)"
)
_TRTLLM_FIGURE = re.compile(r"(\w+)'?(?: =|:) ([\d.]+)")  # N/A is no figure
_TRTLLM_NAMES = {
    "host_step_time": "elapsed_ms",
    "num_ctx_tokens": "num_prompt",
    "num_generation_tokens": "num_output",
    "kv_cache_util": "kv_used",
}


def _trtllm(line: str) -> LogLine | None:
    if (head := _TRTLLM_ITERATION.search(line)) is None:
        return None
    figures = dict(_TRTLLM_FIGURE.findall(line))
    return head[2], head[3], f"rank {head[1]}", figures


LOGS = (
    LogFormat("vllm", _vllm, _VLLM_NAMES, _VLLM_EVERY_S),
    LogFormat("sglang", _sglang, _SGLANG_NAMES),
    LogFormat("tensorrt-llm", _trtllm, _TRTLLM_NAMES),
)
