"""`WholeLives`: requests that a prefill engine hands over, each as one life across both engines."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stepscope.engine.protocol.wire import RequestView
from stepscope.recordings.fleets.figures import EngineFigures
from stepscope.recordings.state.session import SessionState

KEPT_NS = 60_000_000_000  # after its end


class WholeLife(NamedTuple):
    """One request. Times are of the clock that both engines share, None: not yet, or unknown."""

    prefill: str  # name of the engine
    request_id: int  # there
    client_id: str
    arrival_ns: int
    is_waiting: bool = False  # in the prefill engine, and has no token yet
    first_token_ns: int | None = None
    decode: str | None = None
    decode_id: int | None = None  # its number there
    sent_ns: int | None = None
    received_ns: int | None = None
    is_admitted: bool = False  # there
    end_ns: int | None = None


class WholeLives:
    """Those of one fleet. Belongs to the screen's thread."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], WholeLife] = {}
        self._now_ns = 0

    def look(
        self, engines: Sequence[EngineFigures], states: Sequence[SessionState]
    ) -> tuple[WholeLife, ...]:
        """The lives as of now, in the order in which they arrived; none without such engines.

        Args:
            states: of each of `engines`.
        """
        if not any(each.info is not None and each.info.role == "prefill" for each in engines):
            self._lives.clear()
            return ()
        pairs = list(zip(engines, states, strict=True))
        self._now_ns = max((state.time_ns for state in states), default=0)
        for engine, state in pairs:
            if engine.info is not None and engine.info.role == "prefill":
                self._take_prefills(engine.info.name, state.requests.values())
        for engine, state in pairs:
            if engine.info is not None and engine.info.role == "decode":
                self._take_decodes(engine.info.name, state.requests.values())
        self._lives = {
            key: life
            for key, life in self._lives.items()
            if life.end_ns is None or self._now_ns - life.end_ns < KEPT_NS
        }
        return tuple(sorted(self._lives.values(), key=lambda life: life.arrival_ns))

    @property
    def now_ns(self) -> int:
        """The newest moment that the engines have told of."""
        return self._now_ns

    def _take_prefills(self, name: str, views: Iterable[RequestView]) -> None:
        for view in views:
            key = name, view.request_id
            if view.is_partial or (key in self._lives and view.handed_to is not None):
                continue
            is_gone = view.status == "finished" and view.handed_to is None
            self._lives[key] = WholeLife(
                name,
                view.request_id,
                view.client_id,
                view.arrival_ns,
                is_waiting=view.status == "waiting" and view.first_token_ns is None,
                first_token_ns=view.first_token_ns,
                end_ns=view.finish_ns if is_gone else None,
            )

    def _take_decodes(self, name: str, views: Iterable[RequestView]) -> None:
        for view in views:
            origin = view.origin
            if origin is None or origin.request_id is None:
                continue
            self._lives[origin.engine, origin.request_id] = WholeLife(
                origin.engine,
                origin.request_id,
                view.client_id,
                view.arrival_ns,
                first_token_ns=origin.first_token_ns,
                decode=name,
                decode_id=view.request_id,
                sent_ns=origin.sent_ns,
                received_ns=origin.received_ns,
                is_admitted=view.status != "waiting",
                end_ns=view.finish_ns,
            )
