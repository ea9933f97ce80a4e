"""`IncidentKeeper`: watches a live source with alert rules, and writes a file when one fires.

An incident begins when a rule fires. The steps before that are still in the source's memory, so the
file has them too. Rules that fire during an open incident belong to the same incident: it becomes
one file, whose metadata explain why tokens were late.

`IncidentFolder`: the folder with the files, of which it deletes the oldest.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stepscope.recordings.alerts.judge import Judge, Meter, RuleWatch
from stepscope.recordings.alerts.rule import Rule
from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.explained import affected_by
from stepscope.recordings.attribution.front import FrontSums
from stepscope.recordings.check.strip import stripped
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.figures import value_text
from stepscope.recordings.file.incident import FiredRule, Incident, incidents_in
from stepscope.recordings.history.history import History
from stepscope.recordings.history.memory_file import write_memory
from stepscope.recordings.history.source import Source
from stepscope.recordings.history.verdict import verdict_of
from stepscope.recordings.state.audit_text import in_flight_text

log = logging.getLogger("stepscope.recordings")

KEEP_LAST = 5  # so many newest incidents are never deleted, whatever their size


class IncidentFolder:
    """The folder of one recorder. Raises RecordingError: it cannot be created.

    `keep_bytes`: most bytes of all incidents, beyond which the oldest are deleted. None: keep all.
    """

    def __init__(self, path: Path, keep_bytes: int | None) -> None:
        self.path = path
        self._keep_bytes = keep_bytes
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror or error}") from error

    def new_path(self, incident: Incident) -> Path:
        stem = Path(incident.file_name).stem
        names = (f"{stem}.mcap", *(f"{stem}-{number}.mcap" for number in range(2, 1_000)))
        return next(path for name in names if not (path := self.path / name).exists())

    def delete_old(self) -> None:
        """Delete the oldest files beyond the limit, but never the last `KEEP_LAST`."""
        if self._keep_bytes is None:
            return
        found = [(path, path.stat().st_size) for path, _ in incidents_in(self.path)]
        total = sum(num_bytes for _, num_bytes in found)
        for path, num_bytes in reversed(found[KEEP_LAST:]):
            if total <= self._keep_bytes:
                return
            try:
                path.unlink()
                total -= num_bytes
            except OSError as error:
                log.warning("cannot delete %s: %s", path, error)


def explained(history: History, first: int | None) -> tuple[int, str]:
    """Return how many requests had late tokens, and a text on the worst waits.

    `first`: the first step that counts; None: the oldest in memory.
    """
    follower = history.follow(first)
    state, messages = follower.state, list(follower.read(follower.num_ahead))
    itl_ns, ttft_ns = history.slo.itl_ms * 1e6, history.slo.ttft_ms * 1e6
    baseline, fronts = Baseline(), FrontSums()
    learner = Explainer(itl_ns, ttft_ns, state=state, learns=baseline)
    for message, after_gap, _, _ in messages:
        learner.take(message, after_gap)
        fronts.take(message, learner.state.requests)
    explainer = Explainer(itl_ns, ttft_ns, state=state, baseline=baseline)
    for message, after_gap, _, _ in messages:
        explainer.take(message, after_gap)
    late = [each for each in explainer.late if not each.is_excused]
    parts = []
    if (flying := history.state.in_flight) is not None:
        parts.append(f"{in_flight_text(flying)}, not ended")
    for kind in ("ITL", "TTFT"):
        waits = [each for each in late if each.kind == kind]
        if waits:
            worst = max(waits, key=lambda each: each.gap_ns)
            parts.append(f"longest {kind}: {worst.text} ({worst.explanation})")
    engine_ns = max((each.gap_ns for each in late if each.kind == "ITL"), default=0)
    for name, waits_ns in fronts.of().items():
        if name.endswith("longest served ITL") and waits_ns.largest > engine_ns + itl_ns:
            by_engine = f"{engine_ns / 1e6:,.0f} ms" if engine_ns else "not late"
            parts.append(f"{name} {waits_ns.largest / 1e6:,.0f} ms, by the engine {by_engine}")
    return affected_by(late, 0).num_late, ". ".join(parts)


MAX_S = 300.0  # an incident that lasts longer is written then, and only once
MAX_AN_HOUR = 20

DEFAULT_RULES = (
    "itl_within_slo < 90% for 5s",
    "ttft_within_slo < 50% for 10s",
    "stalled_streams >= 3 for 2s",
    "itl_max > 5s",
    "served_itl_max > 5s",
    "step_in_flight > 5s",
    "preemptions > 20",
    "prefix_thrash > 50% for 10s",
    "queue_age > 30s",
    "silent > 10s",
    "restarts > 0",
)


class KeptIncident(NamedTuple):
    """An incident that is over, and its file. `error` tells why there is no file."""

    incident: Incident
    path: Path | None
    error: str | None = None


@dataclass(slots=True)
class _OpenIncident:
    began_s: float
    wall_ns: int
    engine_id: str | None
    last_bad_s: float
    verdict: str  # on the engine when it began, or its connection, if that says what is wrong
    worst: dict[Rule, float | None] = field(default_factory=dict)


class IncidentKeeper:
    """Watches one source. Belongs to one thread, which calls `look` a few times a second.

    Args:
        source: a live source, whose `History` keeps steps.
        before_s, after_s: seconds of steps to keep before the first rule fired, and after the last
            one stopped holding.
    """

    def __init__(
        self,
        source: Source,
        rules: Sequence[Rule],
        folder: IncidentFolder,
        before_s: float,
        after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.judge = Judge(rules)
        self.num_left_out = 0  # incidents beyond MAX_AN_HOUR
        self._source = source
        self._folder = folder
        self._before_s = before_s
        self._after_s = after_s
        self._clock = clock
        self._meter = Meter(source, clock)
        self._open: _OpenIncident | None = None
        self._spent: set[str] = set()  # rules that have held since the last file was written
        self._written_s: deque[float] = deque()

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def look(self) -> KeptIncident | None:
        """Measure the source and check the rules. Returns an incident if it is completed now."""
        now_s = self._clock()
        self.judge.apply(self._meter.measure(), now_s)
        bad = [each for each in self.judge.firing if each.holds]
        self._spent &= {each.rule.text for each in bad}
        bad = [each for each in bad if each.rule.text not in self._spent]
        if bad:
            self._note(bad, now_s)
        if self._open is None or not self._is_complete(self._open, now_s):
            return None
        return self._end(self._open, now_s, is_over=not bad)

    def close(self) -> KeptIncident | None:
        """Write the open incident, if there is one, without waiting for its end."""
        return None if self._open is None else self._end(self._open, self._clock(), is_over=False)

    def _note(self, bad: Sequence[RuleWatch], now_s: float) -> None:
        if self._open is None:
            info = self._source.history.info
            engine_id = None if info is None else info.engine_id
            if any(each.rule.figure == "restarts" for each in bad):
                engine_id = ""  # it happened to the engine before, which is gone
            said = verdict_of(self._source.history).trouble
            if self._source.status != "live":
                said = self._source.error or ""  # what it did before is not what is wrong
            self._open = _OpenIncident(now_s, time.time_ns(), engine_id, now_s, said)
        self._open.last_bad_s = now_s
        for each in bad:
            self._open.worst[each.rule] = each.worst

    def _is_complete(self, incident: _OpenIncident, now_s: float) -> bool:
        if self._source.status != "live":  # no more messages will come
            return now_s - incident.began_s >= self._after_s
        is_calm = now_s - incident.last_bad_s >= self._after_s
        return is_calm or now_s - incident.began_s >= MAX_S

    def _end(self, ended: _OpenIncident, now_s: float, *, is_over: bool) -> KeptIncident | None:
        self._open = None
        self._spent = {each.rule.text for each in self.judge.firing if each.holds}
        while self._written_s and now_s - self._written_s[0] > 3_600:
            self._written_s.popleft()
        if len(self._written_s) >= MAX_AN_HOUR:
            self.num_left_out += 1
            return None
        self._written_s.append(now_s)
        history = self._history_of(ended)
        back_s = now_s - ended.began_s + self._before_s
        if history is not self._source.history:
            back_s = self._before_s  # this history ended when the incident began
        first = history.step_at(history.state.time_ns - round(back_s * 1e9))
        num_late, text = explained(history, first)
        info = history.info
        incident = Incident(
            engine=self._source.name if info is None else info.name,
            started_wall_ns=ended.wall_ns,
            seconds=ended.last_bad_s - ended.began_s,
            is_over=is_over,
            rules=[
                FiredRule(rule.text, worst, value_text(rule.bound.figure, worst))
                for rule, worst in ended.worst.items()
            ],
            num_late=num_late,
            explanation=". ".join(filter(None, (ended.verdict, text))),
        )
        return self._write(history, first, incident)

    def _history_of(self, ended: _OpenIncident) -> History:
        """The history of the engine that had the incident: the previous one after a restart."""
        history = self._source.history
        info, previous = history.info, history.previous
        has_changed = info is not None and info.engine_id != ended.engine_id
        return previous if has_changed and previous is not None else history

    def _write(self, history: History, first: int | None, incident: Incident) -> KeptIncident:
        path = self._folder.new_path(incident)
        try:
            metadata = incident.as_metadata()
            write_memory(history, path, first=first, metadata=metadata, change=stripped)
        except OSError as error:
            return KeptIncident(incident, None, f"cannot write {path}: {error.strerror or error}")
        except RecordingError as error:
            return KeptIncident(incident, None, str(error))
        self._folder.delete_old()
        return KeptIncident(incident, path)
