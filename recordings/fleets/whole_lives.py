"""`WholeLives`: follows requests that are prefilled in one engine and decoded in another.

The two engines know the same request under different ids. A life is all that is known of the
request in both. Attached engines get it twice, from a proxy, and then the keys and values only.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.recordings.fleets.figures import EngineFigures
from stepscope.recordings.state.session import SessionState

KEPT_NS = 60_000_000_000  # how long a life is kept after its end


class WholeLife(NamedTuple):
    """One request in its prefill and its decode engine; None: not yet, or unknown."""

    prefill: str  # name of the prefill engine
    request_id: int  # in the prefill engine
    client_id: str
    arrival_ns: int
    waited_until_ns: int = 0  # when it was last seen waiting in the prefill engine
    first_token_ns: int | None = None
    decode: str | None = None
    decode_id: int | None = None  # request id in the decode engine
    sent_ns: int | None = None
    received_ns: int | None = None
    loaded_after_ns: int = 0  # when it was last seen waiting in the decode engine
    decodes_here: bool = False  # the prefill engine computed more than the first token
    end_ns: int | None = None


class WholeLives:
    """Joins what the prefill and decode engines of a fleet tell of each request. For one thread."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], WholeLife] = {}
        self._seen: set[tuple[str, int]] = set()  # in the states of the last look
        self.now_ns = 0  # engine time of the newest message of all engines

    def look(
        self, engines: Sequence[EngineFigures], states: Sequence[SessionState]
    ) -> tuple[WholeLife, ...]:
        """Return the lives of requests, in order of arrival; of ended ones for `KEPT_NS`."""
        self._seen.clear()
        pairs = list(zip(engines, states, strict=True))
        self.now_ns = max((state.time_ns for state in states), default=0)
        for engine, state in pairs:
            if engine.info is not None:
                self._add_prefills(engine.info, state)
        by_client = {life.client_id: key for key, life in self._lives.items()}
        for engine, state in pairs:
            if engine.info is not None and engine.info.role == "decode":
                self._add_decodes(engine.info.name, state)
            if engine.info is not None and engine.info.engine is not None:
                self._add_loads(engine.info.name, state, by_client)
        for key in self._lives.keys() - self._seen:
            if self._lives[key].end_ns is None:  # its engine was killed, and no engine took it back
                self._lives[key] = self._lives[key]._replace(end_ns=self.now_ns)
        self._lives = {
            key: life
            for key, life in self._lives.items()
            if life.end_ns is None or self.now_ns - life.end_ns < KEPT_NS
        }
        return tuple(sorted(self._lives.values(), key=lambda life: life.arrival_ns))

    def _add_prefills(self, info: EngineInfo, state: SessionState) -> None:
        name, is_attached = info.name, info.engine is not None
        for view in state.requests.values():
            if (view.elsewhere != "") if is_attached else (info.role != "prefill"):
                continue
            self._seen.add((name, view.request_id))
            before = self._lives.get((name, view.request_id))
            has_left = view.handed_to is not None or (
                is_attached and view.status == "finished" and view.finish_reason != "abort"
            )
            if view.is_partial or (before is not None and has_left and before.sent_ns is not None):
                continue
            waited_ns = 0 if before is None else before.waited_until_ns
            is_gone = view.status == "finished" and not has_left
            self._lives[name, view.request_id] = WholeLife(
                name,
                view.request_id,
                view.client_id,
                view.arrival_ns,
                waited_until_ns=state.time_ns if view.status == "waiting" else waited_ns,
                first_token_ns=view.first_token_ns,
                sent_ns=view.finish_ns if is_attached and has_left else None,
                end_ns=view.finish_ns if is_gone else None,
                decodes_here=view.num_output_tokens > 1,
            )

    def _add_loads(
        self, name: str, state: SessionState, by_client: Mapping[str, tuple[str, int]]
    ) -> None:
        """Join the requests of an attached engine whose prompts another one has computed."""
        for view in state.requests.values():
            key = by_client.get(view.elsewhere or "")
            if key is None:
                continue
            self._seen.add(key)
            life = self._lives[key]
            waits, is_loading = view.status == "waiting", view.held == "remote_kv"
            self._lives[key] = life._replace(
                decode=name,
                decode_id=view.request_id,
                received_ns=state.time_ns if is_loading else life.received_ns or view.arrival_ns,
                loaded_after_ns=state.time_ns if waits and not is_loading else life.loaded_after_ns,
                end_ns=view.finish_ns,
            )

    def _add_decodes(self, name: str, state: SessionState) -> None:
        for view in state.requests.values():
            origin = view.origin
            if origin is None or origin.request_id is None or origin.sent_ns is None:
                continue
            key = origin.engine, origin.request_id
            self._seen.add(key)
            life = self._lives.get(key) or WholeLife(*key, view.client_id, view.arrival_ns)
            waited_ns = life.loaded_after_ns if life.decode_id == view.request_id else 0
            self._lives[key] = life._replace(
                client_id=view.client_id,
                arrival_ns=view.arrival_ns,
                first_token_ns=origin.first_token_ns,
                decode=name,
                decode_id=view.request_id,
                sent_ns=origin.sent_ns,
                received_ns=origin.received_ns,
                loaded_after_ns=state.time_ns if view.status == "waiting" else waited_ns,
                end_ns=view.finish_ns,
                decodes_here=origin.num_output_tokens > 1,
            )
