"""Divides what a client waited for: before the engine, in it, and after it.

The parts of a wait add up to the client's own figure. Between two clocks that are not the same,
time before and after the engine may be exchanged by as much as `ClientMatch.error_ns`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepscope.engine.protocol.wire import Mark
from stepscope.recordings.importing.client_match import ClientMatch, ClientPair
from stepscope.recordings.state.session import request_name

TTFT_PARTS = ("front end", "queue", "prefill", "delivery")
ITL_PARTS = ("decode", "delivery")
_NUM_MARKS = 5  # of each kind


class ClientWait(NamedTuple):
    """One TTFT or ITL of a client.

    Attributes:
        parts_ns: of `TTFT_PARTS` or `ITL_PARTS`. The first part of a TTFT is None if the client
            does not tell when it began: it is then in the last one.
    """

    pair: ClientPair
    chunk: int  # 0: a TTFT
    ns: int
    parts_ns: tuple[int | None, ...]

    @property
    def step(self) -> int:
        """The step in which the engine had the token."""
        return self.pair.engine.steps[self.chunk]


def ttfts(match: ClientMatch) -> list[ClientWait]:
    """The times to first token, as the client measured them."""
    found = []
    for pair in match.pairs:
        client, engine = pair
        ttft_ns = client.tokens_ns[0] - client.start_ns
        before_ns, queue_ns = None, engine.begun_ns - engine.arrival_ns
        if match.offset_ns is not None:
            before_ns = engine.arrival_ns - client.start_ns - match.offset_ns
        prefill_ns = engine.times_ns[0] - engine.begun_ns
        after_ns = ttft_ns - (before_ns or 0) - queue_ns - prefill_ns
        found.append(ClientWait(pair, 0, ttft_ns, (before_ns, queue_ns, prefill_ns, after_ns)))
    return found


def itls(match: ClientMatch) -> list[ClientWait]:
    """The gaps between chunks, of requests whose chunks are those of the engine's steps."""
    found = []
    for pair in match.pairs:
        if pair.has_same_chunks:
            client_ns, engine_ns = pair.client.tokens_ns, pair.engine.times_ns
            for chunk in range(1, len(client_ns)):
                ns = client_ns[chunk] - client_ns[chunk - 1]
                decode_ns = engine_ns[chunk] - engine_ns[chunk - 1]
                found.append(ClientWait(pair, chunk, ns, (decode_ns, ns - decode_ns)))
    return found


def at_ranks(waits: Sequence[ClientWait], ranks: Sequence[float]) -> list[ClientWait]:
    """The waits that are the nearest-rank percentiles, each rank in (0, 100]."""
    ordered = sorted(waits, key=lambda each: each.ns)
    return [ordered[math.ceil(rank * len(ordered) / 100) - 1] for rank in ranks if ordered]


def worst(waits: Sequence[ClientWait], number: int) -> list[ClientWait]:
    """The longest waits, one of each step, longest first."""
    longest: dict[int, ClientWait] = {}
    for each in sorted(waits, key=lambda each: -each.ns):
        longest.setdefault(each.step, each)
        if len(longest) == number:
            break
    return list(longest.values())


def worst_marks(match: ClientMatch, tool: str) -> list[Mark]:
    """Marks at the steps where the client waited longest for a token."""
    found: Mapping[str, tuple[Sequence[ClientWait], Sequence[str]]] = {
        "TTFT": (ttfts(match), TTFT_PARTS),
        "ITL": (itls(match), ITL_PARTS),
    }
    return [
        Mark(
            step=each.step,
            time_ns=each.pair.engine.times_ns[each.chunk],
            text=f"client's {kind} {each.ns / 1e6:,.1f} ms of "
            f"{request_name(each.pair.engine.request_id)}: {_largest(each, names)}",
            who=tool,
        )
        for kind, (waits, names) in found.items()
        for each in worst(waits, _NUM_MARKS)
    ]


def _largest(wait: ClientWait, names: Sequence[str]) -> str:
    ns, name = max((ns or 0, name) for ns, name in zip(wait.parts_ns, names, strict=True))
    return f"{name} {ns / 1e6:,.1f} ms"
