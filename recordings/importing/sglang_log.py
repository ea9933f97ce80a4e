"""The log of an SGLang server: its lines `Prefill batch` and `Decode batch`.

A prefill line is about one step; a decode line about the 40 or so since the one before. Form of the
lines: SGLang until 0.5, `log_prefill_stats` and `report_decode_stats` of its scheduler.
"""

import re

from stepscope.recordings.importing.log_session import LogFormat, LogLine

_BATCH = re.compile(
    r"\[(?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d:\d\d)(?: ([A-Z]+\d[A-Z\d ]*))?\] (Prefill|Decode) batch\b"
)
_FIGURE = re.compile(r"(#?[A-Za-z][\w\- ()/]*?): (-?[\w.]+)")


_NAMES = {
    "#new-token": "num_prompt",
    "#cached-token": "num_cached",
    "#running-req": "num_running",
    "#queue-req": "num_waiting",
    "token usage": "kv_used",
    "full token usage": "kv_used",  # of layers with full attention, if others have less
}
_OF_DECODES = {"gen throughput (token/s)": "output_rate", "cuda graph": "has_graph"}


def _line(line: str) -> LogLine | None:
    if (head := _BATCH.search(line)) is None:
        return None
    names = _NAMES | _OF_DECODES if head[4] == "Decode" else _NAMES
    figures = dict(_FIGURE.findall(line, head.end()))
    return LogLine(head[1], head[2], head[3] or "rank 0", figures, names)


FORMAT = LogFormat("sglang", _line)
