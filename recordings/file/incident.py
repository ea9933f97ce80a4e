"""`Incident`: the alert for which a recording was kept, as stored in its metadata."""

import contextlib
import re
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from stepscope.recordings.file.mcap.index import read_metadata

METADATA = "incident"  # key in the metadata of a file
_PREFIX = "incident-"
_MAX_TEXT = 2_000
_MAX_NAME = 60


class FiredRule(Struct, frozen=True):
    """An alert rule that fired, and the worst value while it held, in the unit of its figure."""

    rule: str
    value: float | None
    shown: str  # the value as people read it


class Incident(Struct, frozen=True, kw_only=True):
    """When and why alert rules fired, and how many requests were late."""

    engine: str
    started_wall_ns: int  # when the first rule began to fire, Unix time
    seconds: float  # time until no rule held any more
    is_over: bool  # whether it had ended when the file was written
    rules: list[FiredRule]
    num_late: int | None = None  # number of requests with a late token; None if unknown
    # The verdict on the engine when it began; the step in flight, the longest ITL and the longest
    # TTFT.
    explanation: str = ""

    @property
    def text(self) -> str:
        """One line: which rules fired, how long, and how many requests were late."""
        what = "; ".join(f"{each.rule}: {each.shown}" for each in self.rules)
        ended = "" if self.is_over else ", still ongoing"
        streams = ""
        if self.num_late is not None:
            streams = f", {self.num_late:,} stream{'' if self.num_late == 1 else 's'} late"
        return f"{what}, {self.seconds:.0f} s{ended}{streams}"

    def as_metadata(self) -> dict[str, str]:
        short = msgspec.structs.replace(self, explanation=self.explanation[:_MAX_TEXT])
        return {METADATA: msgspec.json.encode(short).decode()}

    @property
    def file_name(self) -> str:
        """A file name that sorts by time and names the engine and the figure of the first rule."""
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self.started_wall_ns / 1e9))
        figure = self.rules[0].rule.split()[0]
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{self.engine}-{figure}")[:_MAX_NAME]
        return f"{_PREFIX}{when}-{name}.mcap"


def incident_in(metadata: Mapping[str, str]) -> Incident | None:
    """The incident stored in the metadata of a file; None if there is no valid one."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(metadata.get(METADATA, ""), type=Incident)
    return None


def incidents_in(folder: Path) -> list[tuple[Path, Incident]]:
    found = []
    for path in folder.glob(f"{_PREFIX}*.mcap"):
        incident = incident_in(read_metadata(path) or {})
        if incident is not None:
            found.append((path, incident))
    return sorted(found, key=lambda each: each[1].started_wall_ns, reverse=True)
