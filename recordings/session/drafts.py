"""`Speculation`: how many drafts were accepted, and what it bought, by the number of requests."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.session.steps import StepTable
from stepscope.recordings.session.sums import per
from stepscope.recordings.state.lazy_numpy import Ints, np

_NUM_SLICES = 16
_MIN_STEPS = 30  # of decodes alone, to fit what drafts cost
_SURE = 0.2  # of a step: beyond twice the standard error, its part for drafts is unknown
_LONG = 3  # a step of so many medians was held up by something else
_NAMES = ("num_decode_rows", "num_drafted_tokens", "num_accepted_tokens", "num_prefill_tokens")


class DraftCount(NamedTuple):
    drafted: int
    accepted: int

    @property
    def share(self) -> float | None:
        return per(self.accepted, self.drafted)


class SpeculationGroup(NamedTuple):
    """The steps in which `low` to `high` requests decoded, and nothing else was computed.

    `extra`: the time for the drafts, as a share of the step without them; None if unknown.
    """

    low: int
    high: int
    num_steps: int
    tokens_per_decode: float  # what a request got in a step, on average
    extra: float | None
    gain: float | None  # tokens a second, divided by those without drafts; None if unknown


class Speculation(NamedTuple):
    """The drafts of a stretch of a session.

    Attributes:
        trend: the share that was accepted, in equal parts of that time; None where none was.
        positions: of the first, second... draft of a request in a step; of the last steps alone.
    """

    total: DraftCount
    groups: list[SpeculationGroup]
    trend: list[float | None]
    positions: Sequence[DraftCount] = ()
    requests: Mapping[int, DraftCount] = MappingProxyType({})  # by request id, of these steps

    @property
    def pays_up_to(self) -> int | None:
        """Most requests at once of a group that gains; 0 if none does, None if unknown."""
        known = [each for each in self.groups if each.gain is not None]
        gaining = (each.high for each in known if (each.gain or 0.0) >= 1)
        return max(gaining, default=0) if known else None


def speculation_in(table: StepTable, first: int, last: int) -> Speculation | None:
    """What drafts did in the steps in the places [first, last); None if there were none."""
    chosen = slice(first, last)
    rows, drafted, accepted, prefill = (
        np.maximum(table.values(name)[chosen], 0) for name in _NAMES
    )
    if not drafted.any():
        return None
    starts, ends = (table.values(name)[chosen] for name in ("schedule_start_ns", "tokens_ns"))
    parts = np.searchsorted(np.linspace(starts[0], ends[-1], _NUM_SLICES + 1)[1:-1], ends)
    trend = [
        per(int(accepted[parts == part].sum()), int(drafted[parts == part].sum()))
        for part in range(_NUM_SLICES)
    ]
    alone = (prefill == 0) & (rows > 0)
    columns = [each[alone] for each in (rows, drafted, accepted, ends - starts)]
    total = DraftCount(int(drafted.sum()), int(accepted.sum()))
    return Speculation(total, _groups(*columns) if alone.any() else [], trend)


def _groups(rows: Ints, drafted: Ints, accepted: Ints, ns: Ints) -> list[SpeculationGroup]:
    """Group steps of decodes alone by powers of two of their requests."""
    draft_ns, found = _draft_ns(rows, drafted, ns), []
    for power in range(int(rows.max()).bit_length() + 1):
        low, high = (1 << power) // 2 + 1, 1 << power
        steps = (rows >= low) & (rows <= high)
        if not steps.any():
            continue
        tokens = 1 + float(accepted[steps].sum() / rows[steps].sum())
        mean_ns, extra = float(ns[steps].mean()), None
        for_drafts_ns, error_ns = draft_ns(drafted[steps]) if draft_ns else (0.0, mean_ns)
        if error_ns <= _SURE * mean_ns:
            extra = max(0.0, for_drafts_ns) / max(1.0, mean_ns - max(0.0, for_drafts_ns))
        gain = None if extra is None else tokens / (1 + extra)
        found.append(SpeculationGroup(low, high, int(steps.sum()), tokens, extra, gain))
    return found


def _draft_ns(rows: Ints, drafted: Ints, ns: Ints) -> Callable[[Ints], tuple[float, float]] | None:
    """Fit what drafts add to a step: for each draft, and for having any (least squares).

    Returns:
        From the drafts of steps to the mean time for them, and twice its standard error. None if
        the steps cannot tell drafts from requests.
    """
    usual = ns <= _LONG * np.median(ns)
    rows, drafted, ns = rows[usual], drafted[usual], ns[usual]
    work = np.stack([np.ones(len(ns)), rows, drafted, drafted > 0], axis=1).astype(float)
    costs, _, rank, _ = np.linalg.lstsq(work, ns.astype(float), rcond=None)
    if rank < len(costs) or len(ns) < _MIN_STEPS:
        return None
    error = float(np.sum((ns - work @ costs) ** 2)) / (len(ns) - len(costs))
    variances = np.linalg.inv(work.T @ work)[2:, 2:] * error

    def mean_of(drafted: Ints) -> tuple[float, float]:
        number = np.array([drafted.mean(), (drafted > 0).mean()])
        return float(number @ costs[2:]), 2 * float(number @ variances @ number) ** 0.5

    return mean_of


def with_records(found: Speculation, records: Iterable[StepRecord]) -> Speculation:
    """Return `found` with the drafts of `records` counted by position and by request."""
    drafted, accepted = Counter[int](), Counter[int]()  # by request
    tried, right = Counter[int](), Counter[int]()  # by position
    for row in (row for record in records for row in record.drafts or ()):
        drafted[row.request_id] += row.num_drafted
        accepted[row.request_id] += row.num_accepted
        tried.update(range(row.num_drafted))
        right.update(range(row.num_accepted))
    positions = [DraftCount(tried[place], right[place]) for place in range(len(tried))]
    requests = {each: DraftCount(drafted[each], accepted[each]) for each in drafted}
    return found._replace(positions=positions, requests=requests)
