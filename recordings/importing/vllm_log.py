"""The log of a vLLM server: its line every ten seconds, and its iteration details.

Form of the lines: vLLM until 0.32, `vllm/v1/metrics/loggers.py`.
"""

import re

from stepscope.recordings.importing.log_session import LogClock, LogEntry, log_session
from stepscope.recordings.importing.source import Fields, ForeignFile, ForeignSession

_EVERY_S = 10.0  # VLLM_LOG_STATS_INTERVAL, unless the log shows another
_STAMP = re.compile(r"\b((?:\d{4}-)?\d\d-\d\d) (\d\d:\d\d:\d\d)")
_RANK = re.compile(r"Engine (\d+): |(\d+ Engines) Aggregated: |EngineCore_DP(\d+)")
_FIGURE = re.compile(r"\b([A-Z][A-Za-z ]*): (-?[\d.]+)")
_ITERATION = re.compile(
    r"Iteration\(\d+\): \d+ context requests, (?P<prompt>[\d.]+) context tokens, "
    r"\d+ generation requests, (?P<output>[\d.]+) generation tokens, "
    r"iteration elapsed time: (?P<ms>[\d.]+) ms(?P<dummy> \(dummy\))?"
)
_TOTALS = "Avg prompt throughput: "


def read(file: ForeignFile) -> ForeignSession | None:
    """The session in the log; None if it is no log of vLLM."""
    if _TOTALS not in file.head and _ITERATION.search(file.head) is None:
        return None
    clock, entries = LogClock(file), []
    for number, line in file.lines():
        iteration = _ITERATION.search(line)
        if (iteration is None and _TOTALS not in line) or (iteration and iteration["dummy"]):
            continue
        stamp = _STAMP.search(line)
        if stamp is None:
            raise file.error(number, "time", "MM-DD HH:MM:SS before the figures", line.strip())
        rank = _RANK.search(line)
        told = Fields(file, number, dict(_FIGURE.findall(line)))
        device = next((each for each in told.values if each.endswith("KV cache usage")), "")
        used = told.number(device)
        entry = LogEntry(
            wall_ns=clock.wall_ns(number, *stamp.groups()),
            rank="engine " + (_number(rank[1] or rank[2] or rank[3]) if rank else "0"),
            kv_used=None if used is None else min(1.0, used / 100),
        )
        if iteration is not None:
            told = Fields(file, number, iteration.groupdict())
            entry.is_step = True
            entry.elapsed_ns = round(told.needed("ms") * 1e6)
            entry.num_prompt, entry.num_output = told.count("prompt"), told.count("output")
        else:
            entry.prompt_rate = told.needed("Avg prompt throughput")
            entry.output_rate = told.needed("Avg generation throughput")
            entry.num_running = told.count("Running")
            entry.num_waiting = told.count("Waiting", "Pending")
            entry.num_preempted = told.count("Preemptions")
        entries.append(entry)
    return log_session(file, "vllm", entries, _EVERY_S) if entries else None


def _number(rank: str) -> str:
    return str(int(rank)) if rank.isdecimal() else rank
