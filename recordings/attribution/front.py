"""The front end's share: what a client waited for before the engine had its request, and after.

All times are by one clock. The engine's own record begins with the tokenising of the prompt, so
the front end's share and the engine's overlap there, and a life is counted from HTTP on.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from stepscope.engine.protocol.wire import EngineStatus, RequestView, StepRecord, Telemetry
from stepscope.recordings.attribution.causes import Piece
from stepscope.recordings.state.series.distribution import Distribution

PARTS = ("front end", "delivery", "longest gap")


class Share(NamedTuple):
    """The parts of one request's first token that the engine's record does not tell, in ns.

    Attributes:
        front_ns: from HTTP until it was sent to the engine; None: not by HTTP.
        delivery_ns: from the engine's first token until it had gone out; None: it has not.
        served_ns: from HTTP to its first chunk.
    """

    front_ns: int | None
    delivery_ns: int | None
    served_ns: int | None


def share_of(view: RequestView) -> Share | None:
    """Return the front end's share in a request; None if no front end tells of it."""
    if (front := view.front) is None:
        return None
    http_ns, out_ns, token_ns = front.http_ns, front.first_out_ns, view.first_token_ns
    return Share(
        None if http_ns is None else front.sent_ns - http_ns,
        None if out_ns is None or token_ns is None else max(0, out_ns - token_ns),
        None if out_ns is None or http_ns is None else out_ns - http_ns,
    )


def served_life(pieces: Sequence[Piece], view: RequestView) -> list[Piece]:
    """Add what the front end took to the pieces of a request's life."""
    if (front := view.front) is None or not pieces:
        return list(pieces)
    first, last = pieces[0], pieces[-1]
    life = []
    for piece in pieces:  # the engine's record begins before the request was sent
        cut_ns = min(piece.ns, max(0, front.sent_ns - piece.start_ns))
        if cut_ns < piece.ns:
            life.append(piece._replace(start_ns=piece.start_ns + cut_ns, ns=piece.ns - cut_ns))
    if front.http_ns is not None and not view.is_partial:
        took_ns = max(front.sent_ns, first.start_ns) - front.http_ns
        life.insert(0, Piece("front_end", front.http_ns, max(0, took_ns), first.step))
    end_ns = last.start_ns + last.ns
    if view.status == "finished" and (front.last_out_ns or 0) > end_ns:
        assert front.last_out_ns is not None
        life.append(Piece("delivery", end_ns, front.last_out_ns - end_ns, last.step))
    return life


class FrontSums:
    """How long each front end took, of the requests whose first chunk has gone out."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, tuple[int | None, ...]]] = {}

    def take(self, message: Telemetry, views: Mapping[int, RequestView]) -> None:
        """Add what a message tells. `views` are those after it."""
        if isinstance(message, StepRecord | EngineStatus):
            ids = {each for told in message.front or () for each in told.request_ids}
            self.add(views[each] for each in ids if each in views)

    def add(self, views: Iterable[RequestView]) -> None:
        """Add requests, or what is new of them."""
        for view in views:
            share, front = share_of(view), view.front
            if share and front and front.first_out_ns is not None and front.is_streamed:
                told = share.front_ns, share.delivery_ns, front.worst_gap_ns
                self._known[view.request_id] = front.number, told

    def of(self) -> dict[int, dict[str, Distribution]]:
        """For each front end, by its number: how long requests took, by what."""
        found: dict[int, dict[str, Distribution]] = {}
        for number, told in sorted(self._known.values(), key=itemgetter(0)):
            sums = found.setdefault(number, {name: Distribution() for name in PARTS})
            for name, ns in zip(PARTS, told, strict=True):
                if ns is not None:
                    sums[name].add(ns)
        return found
