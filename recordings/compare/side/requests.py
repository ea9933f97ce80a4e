"""The requests of two runs, and which of one is which of the other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_REQUESTS = 100_000  # kept of a run, the first to arrive


@dataclass(slots=True)
class RequestRun:
    """What became of one request, by the engine's clock; None is not known (yet).

    Attributes:
        num_cached_tokens: of its prompt, skipped at its first admission by a prefix hit.
        max_tokens: 0 is not known.
        was_there, was_queued: it was, before the first step of the run.
        has_all: it ended by itself, and has all the output it was after.
    """

    request_id: int
    client_id: str
    num_prompt_tokens: int
    arrival_ns: int
    ttft_ns: int | None = None
    worst_itl_ns: int | None = None
    worst_step: int | None = None  # in which that wait ended
    first_token_step: int | None = None
    end_ns: int | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    max_tokens: int = 0
    was_there: bool = False
    was_queued: bool = False
    has_all: bool = False


class Pair(NamedTuple):
    """One request in both runs."""

    a: RequestRun
    b: RequestRun

    @property
    def name(self) -> str:
        return self.a.client_id or self.b.client_id or f"r{self.a.request_id}"

    @property
    def ttft_change_ns(self) -> int | None:
        """B - A."""
        return _change(self.a.ttft_ns, self.b.ttft_ns)

    @property
    def worst_change_ns(self) -> int | None:
        """B - A."""
        return _change(self.a.worst_itl_ns, self.b.worst_itl_ns)

    @property
    def difference_ns(self) -> int:
        """The larger of both, either way."""
        return max(abs(self.ttft_change_ns or 0), abs(self.worst_change_ns or 0))

    @property
    def has_same_prompt(self) -> bool:
        """As far as lengths tell."""
        return self.a.num_prompt_tokens == self.b.num_prompt_tokens


class Matched(NamedTuple):
    """Largest differences first.

    Attributes:
        by: what was matched: the names that clients gave, the order of arrival, or in one session
            the request itself.
        only_a, only_b: requests without a partner.
    """

    pairs: list[Pair]
    by: str
    only_a: int
    only_b: int


BY_NAME, BY_ORDER, BY_ITSELF = "client id", "order of arrival", "request id"


def matched(a: Mapping[int, RequestRun], b: Mapping[int, RequestRun]) -> Matched:
    """Pairs by the clients' own ids if at least half of the smaller run has them in common.

    An id that came several times is the same request the same time it came. Without such ids the
    n-th to arrive in one run is the n-th in the other.
    """
    runs_a, runs_b = _in_order(a.values()), _in_order(b.values())
    names_a, names_b = _named(runs_a), _named(runs_b)
    common = [key for key in names_a if key in names_b]
    smaller = min(len(runs_a), len(runs_b))
    if smaller and len(common) * 2 >= smaller:
        pairs, by = [Pair(names_a[key], names_b[key]) for key in common], BY_NAME
    else:
        pairs, by = [Pair(*both) for both in zip(runs_a, runs_b, strict=False)], BY_ORDER
    pairs.sort(key=lambda pair: -pair.difference_ns)
    return Matched(pairs, by, len(runs_a) - len(pairs), len(runs_b) - len(pairs))


def were_sent_twice(a: Mapping[int, RequestRun], b: Mapping[int, RequestRun]) -> bool:
    """Whether clients sent the same requests in both, by their names and the lengths of prompts."""
    names_a, names_b = _named(_in_order(a.values())), _named(_in_order(b.values()))
    pairs = [Pair(run, names_b[key]) for key, run in names_a.items() if key in names_b]
    again = [
        pair for pair in pairs if pair.a.request_id != pair.b.request_id and pair.has_same_prompt
    ]
    return bool(again) and len(again) * 10 >= min(len(a), len(b)) * 9


def lived_in_both(a: Mapping[int, RequestRun], b: Mapping[int, RequestRun]) -> Matched:
    """Of two parts of one session: others that came before and after have nothing in common."""
    pairs = [Pair(run, b[request_id]) for request_id, run in a.items() if request_id in b]
    pairs.sort(key=lambda pair: -pair.difference_ns)
    return Matched(pairs, BY_ITSELF, len(a) - len(pairs), len(b) - len(pairs))


def _in_order(runs: Iterable[RequestRun]) -> list[RequestRun]:
    return sorted(runs, key=lambda run: (run.arrival_ns, run.request_id))


def _named(runs: Sequence[RequestRun]) -> dict[tuple[str, int], RequestRun]:
    """By name and how many of that name came before."""
    found: dict[tuple[str, int], RequestRun] = {}
    times: dict[str, int] = {}
    for run in runs:
        if run.client_id:
            number = times.get(run.client_id, 0)
            times[run.client_id] = number + 1
            found[run.client_id, number] = run
    return found


def _change(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else b - a
