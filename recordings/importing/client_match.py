"""Finds the requests of a client's result in a recording, and divides what the client waited for.

They are found by the id that the client gave to a request, or else by when requests came and how
long they were. Of the clocks only bounds are known: a request arrives after it was sent, and a
token comes to the client after the engine had it.

A wait has parts before the engine, in it and after it, which add up to the client's own figure.
Between two clocks that are not the same, time before and after the engine may be exchanged by as
much as `ClientMatch.error_ns`.
"""

import math
import re
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from stepscope.engine.protocol.wire import Arrived, BatchRow, Mark, Phase, RowFlag, StepRecord
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.messages import messages
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.importing.source import ClientRequest, ForeignSession
from stepscope.recordings.state.lazy_numpy import np
from stepscope.recordings.state.session import request_name

# The number of a request of 'vllm bench serve', or a UUID, in the id that a server makes of it.
_ID = re.compile(r"bench-[0-9a-f]{8}(-\d+)|([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
NEAR_NS = 5_000_000_000  # a result may tell its time in whole seconds
_WIDTHS_NS = (50_000_000, 500_000_000, 5_000_000_000)  # by how much front ends may differ
_WIDTHS_IN_ORDER = (0, 8, 64)  # places
_REACH = 20  # widths after the usual delay in which a slow request may come
_MAX_TRIED = 4_000_000  # pairs
_MOST = 0.9  # of the most votes is as good
_SLACK_NS = 1_000_000  # by which stamps of one machine may contradict each other
_NUM_MARKS = 5  # of each kind

_Kind: TypeAlias = "Callable[[ClientRequest | ServedRequest], object]"


@dataclass(slots=True)
class ServedRequest:
    """A request in a recording, seen from its arrival. Times are the engine's."""

    request_id: int
    client_id: str
    arrival_ns: int
    num_prompt: int
    num_output: int = 0
    begun_ns: int = 0  # when the first step that computed it was scheduled
    times_ns: "array[int]" = field(default_factory=lambda: array("q"))
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    is_whole: bool = True

    def add(self, row: BatchRow, record: StepRecord) -> None:
        self.begun_ns = self.begun_ns or record.schedule_start_ns
        if row.phase != Phase.DECODE and not row.flags & RowFlag.LAST_CHUNK:
            return
        num_tokens = row.num_tokens if row.phase == Phase.DECODE else 1
        before, self.num_output = self.num_output, row.start + row.num_tokens + 1 - self.num_prompt
        self.is_whole = self.is_whole and self.num_output == before + num_tokens
        self.times_ns.append(record.tokens_ns)
        self.steps.append(record.step)


class ClientPair(NamedTuple):
    client: ClientRequest
    engine: ServedRequest

    @property
    def has_same_chunks(self) -> bool:
        chunks = self.client.tokens_ns if self.client.has_gaps else ()
        return len(chunks) == len(self.engine.times_ns)

    @property
    def offsets_ns(self) -> tuple[int, int]:
        """Between which bounds engine time minus client time is, as far as it can tell."""
        tokens = list(zip(self.engine.times_ns, self.client.tokens_ns, strict=False))
        low = max(a - b for a, b in (tokens if self.has_same_chunks else tokens[:1]))
        return low, self.engine.arrival_ns - self.client.start_ns

    def fits(self, low: int, high: int) -> bool:
        """Whether every offset between these two agrees with what the pair tells."""
        own_low, own_high = self.offsets_ns
        return own_low <= low and high <= own_high


class ClientMatch(NamedTuple):
    """The requests of a client's result that were found in a recording."""

    pairs: list[ClientPair]
    num_requests: int  # those of the result that got a token
    by: str  # what they were found by
    num_unlike: int  # pairs whose client counts other lengths than the engine
    num_unfit: int  # pairs that contradict the clocks of the others
    offset_ns: int | None  # engine time minus client time; None: the client tells no times
    error_ns: int  # by how much it may be wrong; 0: both read one clock
    apart_ns: int  # how far it is from where clocks would be that agree


def served_requests(recording: Recording) -> list[ServedRequest]:
    """The requests of a recording that are whole and got a token, in order of arrival.

    Raises RecordingError: it cannot be read, or does not tell its requests.
    """
    name, found = recording.path.name, []
    if recording.info.totals_every_s is not None:
        raise RecordingError(f"{name} does not tell the requests of each step of an engine")
    live: dict[int, ServedRequest] = {}
    for message, _, _, _ in messages(recording):
        for event in getattr(message, "events", ()):
            if isinstance(event, Arrived):
                told = event.request_id, event.client_id, event.time_ns, event.num_prompt_tokens
                live[event.request_id] = each = ServedRequest(*told)
                found.append(each)
        if isinstance(message, StepRecord):
            for row in message.batch or ():
                if row.request_id in live:
                    live[row.request_id].add(row, message)
    whole = [each for each in found if each.is_whole and each.times_ns]
    return sorted(whole, key=lambda each: each.arrival_ns)


def client_match(session: ForeignSession, recording: Recording) -> ClientMatch:
    """Find the requests of a client's result in a recording.

    Raises RecordingError: the recording cannot be read, or has fewer than half of the requests.
    """
    served, info, client = served_requests(recording), recording.info, session.info
    nominal: Sequence[int] = ()  # offsets of clocks that agree: both monotonic, both wall clocks
    if session.has_starts:
        nominal = 0, client.wall_ns - client.monotonic_ns - (info.wall_ns - info.monotonic_ns)
    clients = [each for each in session.requests if each.error is None and each.tokens_ns]
    kinds: tuple[_Kind, ...] = (_id, _lengths, lambda each: each.num_output, lambda each: "any")
    for kind in kinds:
        if pairs := _alike(clients, served, kind, nominal):
            break
    else:
        raise RecordingError(
            f"{recording.path.name}: expected the requests of {client.name}, got {len(served):,} "
            f"others: ids, times and lengths match fewer than half of its {len(clients):,}"
        )
    by = "request id" if kind is _id else "time and lengths" if nominal else "order and lengths"
    num_found, num_unlike = len(pairs), sum(_lengths(a) != _lengths(b) for a, b in pairs)
    if not nominal:
        return ClientMatch(pairs, len(clients), by, num_unlike, 0, None, 0, 0)
    low, high = _bounds(pairs)
    fit = [each for each in pairs if each.fits(low, high)]
    if kind is not _id:
        pairs = fit
    offset_ns, error_ns = (low + high) // 2, (high - low + 1) // 2
    if low - _SLACK_NS <= 0 <= high + _SLACK_NS:
        offset_ns = error_ns = 0
    elif low <= nominal[1] <= high:
        offset_ns, error_ns = nominal[1], max(nominal[1] - low, high - nominal[1])
    apart_ns, num_unfit = min(abs(offset_ns - at) for at in nominal), num_found - len(fit)
    told = num_unlike, num_unfit, offset_ns, error_ns, apart_ns
    return ClientMatch(pairs, len(clients), by, *told)


def _id(each: ClientRequest | ServedRequest) -> str | None:
    if isinstance(each, ClientRequest):
        return each.client_id or None
    found = _ID.search(each.client_id)
    return found and (found[1] or found[2])


def _lengths(each: ClientRequest | ServedRequest) -> tuple[int, int]:
    return each.num_prompt, each.num_output


def _alike(
    clients: Sequence[ClientRequest],
    served: Sequence[ServedRequest],
    kind: _Kind,
    nominal: Sequence[int],
) -> list[ClientPair]:
    """Pairs of one kind that are as far apart as most of them; empty if fewer than half are."""
    sent = [each.start_ns for each in clients] if nominal else list(range(len(clients)))
    came = [each.arrival_ns for each in served] if nominal else list(range(len(served)))
    of_kind: dict[object, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    sides: tuple[Sequence[ClientRequest | ServedRequest], ...] = (clients, served)
    for side, requests in enumerate(sides):
        for place, each in enumerate(requests):
            if (key := kind(each)) is not None:
                of_kind[key][side].append(place)
    groups, best = [each for each in of_kind.values() if all(each)], list[ClientPair]()
    for width in _WIDTHS_NS if nominal else _WIDTHS_IN_ORDER:
        if (after := _usual_delay(groups, sent, came, width, nominal)) is None:
            continue
        reach = math.inf if kind is _id else _REACH * width
        pairs = []
        for ours, theirs in groups:
            times, free = [came[place] for place in theirs], 0
            for place in sorted(ours, key=sent.__getitem__):
                free = max(free, bisect_left(times, sent[place] + after - width))
                if free < len(times) and times[free] <= sent[place] + after + reach:
                    pairs.append(ClientPair(clients[place], served[theirs[free]]))
                    free += 1
        if len(pairs) > len(best):
            best = pairs
    return best if len(best) * 2 >= len(clients) else []


def _usual_delay(
    groups: Sequence[tuple[list[int], list[int]]],
    sent: Sequence[int],
    came: Sequence[int],
    width: int,
    nominal: Sequence[int],
) -> int | None:
    """How long after clients' most engines' requests come, within `width`; None: no such time."""
    every = sum(len(ours) * len(theirs) for ours, theirs in groups) // _MAX_TRIED + 1
    tried = [(ours[::every], theirs) for ours, theirs in groups]
    if not tried:
        return None
    sent_at, came_at = np.array(sent), np.array(came)
    delays = [(came_at[theirs][:, None] - sent_at[ours]).ravel() for ours, theirs in tried]
    found = np.sort(np.concatenate(delays))
    votes = np.searchsorted(found, found + width, "right") - np.arange(len(found))
    if votes.max() * 2 < sum(len(ours) for ours, _ in tried):
        return None
    for at in nominal:  # of runs that were alike, that at the time of the result
        near = np.abs(found - at) < NEAR_NS
        if near.any() and votes[near].max() >= _MOST * votes.max():
            votes = np.where(near, votes, 0)
            break
    return int(found[votes.argmax()])


def _bounds(pairs: Sequence[ClientPair]) -> tuple[int, int]:
    edges = sorted(edge for each in pairs for edge in zip(each.offsets_ns, (0, 1), strict=True))
    best = number = low = high = 0
    for place, (at_ns, is_end) in enumerate(edges):
        number += -1 if is_end else 1
        if number > best:
            best, low, high = number, at_ns, edges[place + 1][0]
    return low, high


class ClientWait(NamedTuple):
    """One TTFT (`chunk` 0) or ITL of a client, and its parts as `ClientWaits.names` calls them."""

    pair: ClientPair
    chunk: int
    ns: int
    parts_ns: tuple[int, ...]

    @property
    def request_id(self) -> int:
        return self.pair.engine.request_id

    @property
    def step(self) -> int:
        return self.pair.engine.steps[self.chunk]


class ClientWaits(NamedTuple):
    kind: str
    names: tuple[str, ...]
    waits: list[ClientWait]

    def at(self, rank: float) -> ClientWait:
        """The nearest-rank percentile, of a rank in (0, 100]."""
        return self.waits[-math.ceil(rank * len(self.waits) / 100)]

    def worst(self, number: int) -> list[ClientWait]:
        longest: dict[int, ClientWait] = {}
        for each in self.waits:
            longest.setdefault(each.step, each)
            if len(longest) == number:
                break
        return list(longest.values())


def client_waits(match: ClientMatch) -> tuple[ClientWaits, ClientWaits]:
    """The client's TTFTs, and its ITLs where its chunks are the engine's steps, one by one."""
    names: tuple[str, ...] = ("front end", "queue", "prefill", "delivery")
    if match.offset_ns is None:
        names = ("queue", "prefill", "front end + delivery")
    first, gaps = [], []
    for pair in match.pairs:
        client, engine = pair
        came_ns, had_ns = client.tokens_ns, engine.times_ns
        ttft_ns = came_ns[0] - client.start_ns
        parts_ns = [engine.begun_ns - engine.arrival_ns, had_ns[0] - engine.begun_ns]
        if match.offset_ns is not None:
            parts_ns.insert(0, engine.arrival_ns - client.start_ns - match.offset_ns)
        first.append(ClientWait(pair, 0, ttft_ns, (*parts_ns, ttft_ns - sum(parts_ns))))
        for chunk in range(1, len(came_ns) if pair.has_same_chunks else 0):
            itl_ns, decode_ns = (each[chunk] - each[chunk - 1] for each in (came_ns, had_ns))
            gaps.append(ClientWait(pair, chunk, itl_ns, (decode_ns, itl_ns - decode_ns)))
    for waits in (first, gaps):
        waits.sort(key=lambda each: -each.ns)
    return ClientWaits("TTFT", names, first), ClientWaits("ITL", ("decode", "delivery"), gaps)


def worst_marks(match: ClientMatch, tool: str) -> list[Mark]:
    found = []
    for of in client_waits(match):
        for each in of.worst(_NUM_MARKS):
            ns, part = max(zip(each.parts_ns, of.names, strict=True))
            text = f"client's {of.kind} {each.ns / 1e6:,.1f} ms of {request_name(each.request_id)}"
            text += f": {part} {ns / 1e6:,.1f} ms"
            time_ns = each.pair.engine.times_ns[each.chunk]
            found.append(Mark(step=each.step, time_ns=time_ns, text=text, who=tool))
    return found
