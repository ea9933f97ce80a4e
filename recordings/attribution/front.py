"""The front end's share: what a client waited for before the engine had its request, and after.

All times are by one clock. The engine's own record begins with the tokenising of the prompt, so
the front end's share and the engine's overlap there.
"""

from collections.abc import Iterable, Mapping, Sequence

from stepscope.engine.protocol.wire import EngineStatus, RequestView, StepRecord, Telemetry
from stepscope.recordings.attribution.causes import Piece
from stepscope.recordings.state.distribution import Distribution


def shares_of(view: RequestView) -> dict[str, int]:
    """Return how long a request took, by what, in nanoseconds, as far as a front end tells it.

    "front end": from HTTP until it was sent; "first delivery": from the engine's first token until
    the first chunk had gone out; "served TTFT": from HTTP until then; "longest served ITL": the
    longest time between two chunks.
    """
    if (front := view.front) is None:
        return {}
    http_ns, out_ns, token_ns = front.http_ns, front.first_out_ns, view.first_token_ns
    shares = {"longest served ITL": front.worst_gap_ns} if front.num_chunks > 1 else {}
    if http_ns is not None:
        shares["front end"] = front.sent_ns - http_ns
    if out_ns is not None and front.is_streamed:
        if token_ns is not None:
            shares["first delivery"] = max(0, out_ns - token_ns)
        if http_ns is not None:
            shares["served TTFT"] = out_ns - http_ns
    return dict(sorted(shares.items()))


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
    """How long each front end took, by what, over the requests of a session."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, dict[str, int]]] = {}

    def take(self, message: Telemetry, views: Mapping[int, RequestView]) -> None:
        """Add what a message tells. `views` are those after it."""
        if isinstance(message, StepRecord | EngineStatus):
            ids = {each for told in message.front or () for each in told.request_ids}
            self.add(views[each] for each in ids if each in views)

    def add(self, views: Iterable[RequestView]) -> None:
        for view in views:
            if view.front is not None:
                self._known[view.request_id] = view.front.number, shares_of(view)

    def of(self) -> dict[str, Distribution]:
        """For each front end and each of its shares, how long requests took."""
        found: dict[str, Distribution] = {}
        for number, shares in self._known.values():
            for name, ns in shares.items():
                found.setdefault(f"API server {number}: {name}", Distribution()).add(ns)
        return dict(sorted(found.items()))
