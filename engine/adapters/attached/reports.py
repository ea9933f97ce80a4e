"""What other processes of an engine tell, on its way to the engine's own: API servers, workers.

Each sends its reports to a Unix socket beside the endpoint, and never waits. A report that does not
arrive leaves unknown what it told.
"""

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from stepscope.engine.adapters.attached.step_recorder import StepRecorder
from stepscope.engine.protocol.wire import FrontEnd

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_MAX_BYTES = 1 << 20
_MOST_REPORTS = 256  # read at once, or waiting to be sent
_MOST_REQUESTS = 16_384  # known by name


class FrontReport(Struct, array_like=True, frozen=True, tag=True):
    """What one API server did. It has numbers of its own for requests, from 0.

    `names`: the engine's ids of the requests in `front.taken`.
    """

    pid: int
    front: FrontEnd
    names: list[str]


class RankReport(Struct, array_like=True, frozen=True, gc=False, tag=True):
    """A rank's part of the forward pass of a step.

    `step`: the stamp of its scheduler output; `forward_ns`: from `begin_ns` until its result was
    there, logits or what the next stage gets; `wait_ns`: of that, in collectives, None: unknown.
    """

    step: int
    number: int
    begin_ns: int
    forward_ns: int
    wait_ns: int | None


_decode = msgspec.msgpack.Decoder(FrontReport | RankReport).decode
_encode = msgspec.msgpack.Encoder().encode


class ReportSender:
    """Sends reports to the sockets of engines; one that is not there is left out."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(map(str, paths))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._unsent: deque[tuple[str, bytes]] = deque(maxlen=_MOST_REPORTS)

    def put(self, report: FrontReport | RankReport) -> None:
        """Queue a report; beyond `_MOST_REPORTS` the oldest goes."""
        payload = _encode(report)
        self._unsent += [(path, payload) for path in self._paths]

    def flush(self) -> bool:
        """Send what is queued. Returns False if an engine is too busy to get all of it now."""
        for _ in range(len(self._unsent)):
            path, payload = self._unsent.popleft()
            try:
                self._socket.sendto(payload, path)
            except BlockingIOError:
                self._unsent.append((path, payload))
            except OSError:
                continue  # there is no such engine
        return not self._unsent


class ProcessReports:
    """Reads reports: what is of requests goes to the recorder, with its request ids.

    Use it only inside `with attachment.notes.done()`.
    """

    def __init__(
        self, path: Path, recorder: StepRecorder, add_rank: Callable[[RankReport], None]
    ) -> None:
        self._path, self._recorder, self._add_rank = path, recorder, add_rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._arrived: dict[str, int] = {}
        self._early: dict[str, FrontReport] = {}  # of requests that have not arrived yet
        self._ids: dict[tuple[int, int, int], int] = {}  # API server, process, its number
        self._reasons: dict[int, str] = {}

    def open(self) -> None:
        """Listen. Raises OSError if it cannot."""
        self._path.unlink(missing_ok=True)
        self._socket.bind(str(self._path))
        self._path.chmod(0o600)

    def close(self) -> None:
        self._socket.close()

    def arrived(self, name: str, request_id: int) -> None:
        keep(self._arrived, name, request_id)
        if (early := self._early.pop(name, None)) is not None:
            self._take(early)

    def reason(self, request_id: int) -> str | None:
        """Why an API server has ended a request: "stop" or "abort"; None: it did not say."""
        self.read()
        return self._reasons.pop(request_id, None)

    def read(self) -> None:
        for _ in range(_MOST_REPORTS):
            try:
                payload = self._socket.recv(_MAX_BYTES)
            except OSError:  # none is there
                return
            with contextlib.suppress(msgspec.DecodeError):
                report = _decode(payload)
                if isinstance(report, RankReport):
                    self._add_rank(report)
                else:
                    self._take(report)

    def _take(self, report: FrontReport) -> None:
        front, server, ids = report.front, (report.front.number, report.pid), self._ids
        taken = []
        for name, row in zip(report.names, front.taken, strict=False):
            if (request_id := self._arrived.get(name)) is None:
                early = FrontEnd.of(front.number, [row], [], [])
                keep(self._early, name, FrontReport(report.pid, early, [name]))
            else:
                keep(ids, (*server, row.request_id), request_id)
                taken.append(msgspec.structs.replace(row, request_id=request_id))
        chunks = [
            (ids[*server, at], came_ns, out_ns)
            for at, came_ns, out_ns in front.chunks()
            if (*server, at) in ids
        ]
        ended = [(ids[*server, at], why) for at, why in front.ended if (*server, at) in ids]
        for request_id, reason in ended:
            keep(self._reasons, request_id, reason)
        if taken or chunks or ended:
            self._recorder.tell(FrontEnd.of(front.number, taken, chunks, ended))


def keep(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add an entry; beyond `_MOST_REQUESTS` the oldest goes."""
    known[key] = value
    if len(known) > _MOST_REQUESTS:
        known.pop(next(iter(known)))
