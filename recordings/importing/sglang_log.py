"""The log of an SGLang server: its lines `Prefill batch` and `Decode batch`.

A prefill line is about one step; a decode line about the 40 or so since the one before. Form of the
lines: SGLang until 0.5, `log_prefill_stats` and `report_decode_stats` of its scheduler.
"""

import re

from stepscope.recordings.importing.log_session import LogClock, LogEntry, log_session
from stepscope.recordings.importing.source import Fields, ForeignFile, ForeignSession

_BATCH = re.compile(
    r"\[(?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d:\d\d)(?: ([A-Z]+\d[A-Z\d ]*))?\] (Prefill|Decode) batch\b"
)
_FIGURE = re.compile(r"(#?[A-Za-z][\w\- ()/]*?): (-?[\w.]+)")
_GRAPHS = {"True": "full", "False": "none"}


def read(file: ForeignFile) -> ForeignSession | None:
    """The session in the log; None if it is no log of SGLang."""
    if _BATCH.search(file.head) is None:
        return None
    clock, entries = LogClock(file), []
    for number, line in file.lines():
        if (head := _BATCH.search(line)) is None:
            continue
        is_prefill = head[4] == "Prefill"
        figures = dict(_FIGURE.findall(line, head.end()))
        told = Fields(file, number, figures)
        used = told.number("token usage", "full token usage")
        graph = None if is_prefill else figures.get("cuda graph")
        entries.append(
            LogEntry(
                wall_ns=clock.wall_ns(number, head[1], head[2]),
                rank=head[3] or "the only rank",
                output_rate=None if is_prefill else told.number("gen throughput (token/s)"),
                num_prompt=told.count("#new-token"),
                num_cached=told.count("#cached-token"),
                num_running=told.count("#running-req"),
                num_waiting=told.count("#queue-req"),
                kv_used=None if used is None else min(1.0, used),
                cuda_graph=_GRAPHS.get(graph or ""),
            )
        )
    return log_session(file, "sglang", entries, None)
