"""Divides what a client waited for: before the engine, in it, and after it.

The parts of a wait add up to the client's own figure. Between two clocks that are not the same,
time before and after the engine may be exchanged by as much as `ClientMatch.error_ns`.
"""

import math
from typing import NamedTuple

from stepscope.engine.protocol.wire import Mark
from stepscope.recordings.importing.client_match import ClientMatch, ClientPair
from stepscope.recordings.state.session import request_name

_NUM_MARKS = 5  # of each kind


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
        """The wait that is the nearest-rank percentile of a rank in (0, 100]."""
        return self.waits[-math.ceil(rank * len(self.waits) / 100)]

    def worst(self, number: int) -> list[ClientWait]:
        longest: dict[int, ClientWait] = {}
        for each in self.waits:
            longest.setdefault(each.step, each)
            if len(longest) == number:
                break
        return list(longest.values())


def client_waits(match: ClientMatch) -> tuple[ClientWaits, ClientWaits]:
    """The TTFTs and the ITLs as the client measured them.

    Of ITLs, those of requests whose chunks are the engine's steps, one by one.
    """
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
    for kind, names, each in (
        (of.kind, of.names, each) for of in client_waits(match) for each in of.worst(_NUM_MARKS)
    ):
        ns, part = max(zip(each.parts_ns, names, strict=True))
        text = f"client's {kind} {each.ns / 1e6:,.1f} ms of {request_name(each.request_id)}"
        time_ns = each.pair.engine.times_ns[each.chunk]
        text += f": {part} {ns / 1e6:,.1f} ms"
        found.append(Mark(step=each.step, time_ns=time_ns, text=text, who=tool))
    return found
