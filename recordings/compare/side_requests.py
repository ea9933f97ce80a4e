"""The requests of two runs, and how they are matched with each other."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

MAX_REQUESTS = 100_000  # most requests kept of a run, the first to arrive


@dataclass(slots=True)
class RequestRun:
    """What happened to one request in a run, in engine time. None: unknown, or not yet happened."""

    request_id: int
    client_id: str
    num_prompt_tokens: int
    arrival_ns: int
    ttft_ns: int | None = None
    worst_itl_ns: int | None = None
    worst_step: int | None = None  # the step in which that wait ended
    first_token_step: int | None = None
    end_ns: int | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int | None = None  # of the prompt, skipped by a hit, at first admission
    max_tokens: int = 0  # 0 if unknown
    was_there: bool = False  # live before the first step of the run
    was_queued: bool = False  # waited before it
    has_all: bool = False  # whether it finished normally, with all its output


class Pair(NamedTuple):
    a: RequestRun
    b: RequestRun

    @property
    def name(self) -> str:
        return self.a.client_id or self.b.client_id or f"r{self.a.request_id}"

    @property
    def ttft_change_ns(self) -> int | None:
        """TTFT in B minus TTFT in A."""
        return _change(self.a.ttft_ns, self.b.ttft_ns)

    @property
    def worst_change_ns(self) -> int | None:
        return _change(self.a.worst_itl_ns, self.b.worst_itl_ns)

    @property
    def difference_ns(self) -> int:
        """The larger of the absolute changes of TTFT and longest ITL."""
        return max(abs(self.ttft_change_ns or 0), abs(self.worst_change_ns or 0))

    @property
    def has_same_prompt(self) -> bool:
        return self.a.num_prompt_tokens == self.b.num_prompt_tokens


class Matched(NamedTuple):
    """Pairs of matching requests, those with the largest differences first."""

    pairs: list[Pair]
    by: str  # client id, order of arrival, or (within one session) request id
    only_a: int  # number of requests without a partner
    only_b: int


def matched(a: Mapping[int, RequestRun], b: Mapping[int, RequestRun]) -> Matched:
    """Match the requests of two runs by client id, or else in order of arrival.

    By client id if at least half of those of the smaller run occur in the other one; the n-th
    request of an id matches the n-th.
    """
    pairs, by = _of_one_name(a, b), "client id"
    if len(pairs) * 2 < max(1, min(len(a), len(b))):
        both = zip(_in_order(a), _in_order(b), strict=False)
        pairs, by = [Pair(*each) for each in both], "order of arrival"
    return _largest_first(pairs, by, len(a), len(b))


def were_sent_twice(a: Mapping[int, RequestRun], b: Mapping[int, RequestRun]) -> bool:
    """Whether both runs got the same requests, sent anew: equal client ids and prompt lengths."""
    again = [
        pair
        for pair in _of_one_name(a, b)
        if pair.a.request_id != pair.b.request_id and pair.has_same_prompt
    ]
    return bool(again) and len(again) * 10 >= min(len(a), len(b)) * 9


def lived_in_both(a: Mapping[int, RequestRun], b: Mapping[int, RequestRun]) -> Matched:
    """Match the requests that were live in both parts of one session."""
    pairs = [Pair(run, b[request_id]) for request_id, run in a.items() if request_id in b]
    return _largest_first(pairs, "request id", len(a), len(b))


def _largest_first(pairs: list[Pair], by: str, num_a: int, num_b: int) -> Matched:
    pairs.sort(key=lambda pair: -pair.difference_ns)
    return Matched(pairs, by, num_a - len(pairs), num_b - len(pairs))


def _in_order(runs: Mapping[int, RequestRun]) -> list[RequestRun]:
    return sorted(runs.values(), key=lambda run: (run.arrival_ns, run.request_id))


def _of_one_name(a: Mapping[int, RequestRun], b: Mapping[int, RequestRun]) -> list[Pair]:
    """The n-th request of each client id in A, with the n-th of that id in B."""
    others = _named(b)
    return [Pair(run, others[key]) for key, run in _named(a).items() if key in others]


def _named(runs: Mapping[int, RequestRun]) -> dict[tuple[str, int], RequestRun]:
    """Index requests by (client id, number of earlier requests with that client id)."""
    found: dict[tuple[str, int], RequestRun] = {}
    times: Counter[str] = Counter()
    for run in _in_order(runs):
        if run.client_id:
            found[run.client_id, times[run.client_id]] = run
            times[run.client_id] += 1
    return found


def _change(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else b - a
