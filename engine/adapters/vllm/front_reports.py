"""What vLLM's API servers tell of requests, as the engine's process gets it.

Each sends its reports to a Unix socket beside the endpoint, and never waits. A report that does not
arrive leaves unknown what it told.
"""

import contextlib
import socket
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from stepscope.engine.adapters.attached.step_recorder import StepRecorder
from stepscope.engine.protocol.wire import FrontEnd, TakenRow

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_MAX_BYTES = 1 << 20
_MOST_REPORTS = 64  # read at once
_MOST_REQUESTS = 16_384  # known by name


class Report(Struct, array_like=True, frozen=True):
    """What one API server did. It has numbers of its own for requests, from 0.

    Attributes:
        names: vLLM's ids of the requests in `front.taken`.
    """

    pid: int
    front: FrontEnd
    names: list[str]


_decode = msgspec.msgpack.Decoder(Report).decode


class FrontReports:
    """Reads reports, and hands them to the recorder with the recorder's request ids.

    Use it only inside `with attachment.notes.done()`.
    """

    def __init__(self, path: Path, recorder: StepRecorder) -> None:
        self._path, self._recorder = path, recorder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._arrived: dict[str, int] = {}
        self._early: dict[str, tuple[tuple[int, int], TakenRow]] = {}  # not arrived yet
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
        """Note that the engine has got a request."""
        _keep(self._arrived, name, request_id)
        if (early := self._early.pop(name, None)) is not None:
            server, row = early
            row = self._known(server, row, request_id)
            self._recorder.tell(FrontEnd.of(server[0], [row], [], []))

    def reason(self, request_id: int) -> str | None:
        """Why an API server has ended a request: "stop" or "abort"; None: it did not say."""
        self.read()
        return self._reasons.pop(request_id, None)

    def read(self) -> None:
        """Read the reports that are there."""
        for _ in range(_MOST_REPORTS):
            try:
                payload = self._socket.recv(_MAX_BYTES)
            except OSError:  # none is there
                return
            with contextlib.suppress(msgspec.DecodeError):
                self._take(_decode(payload))

    def _take(self, report: Report) -> None:
        front, server = report.front, (report.front.number, report.pid)
        taken = []
        for name, row in zip(report.names, front.taken, strict=False):
            request_id = self._arrived.get(name)
            if request_id is None:
                _keep(self._early, name, (server, row))
            else:
                taken.append(self._known(server, row, request_id))
        chunks = [
            (request_id, came_ns, out_ns)
            for number, came_ns, out_ns in front.chunks()
            if (request_id := self._ids.get((*server, number))) is not None
        ]
        ended = [
            (request_id, reason)
            for number, reason in front.ended
            if (request_id := self._ids.get((*server, number))) is not None
        ]
        for request_id, reason in ended:
            _keep(self._reasons, request_id, reason)
        if taken or chunks or ended:
            self._recorder.tell(FrontEnd.of(front.number, taken, chunks, ended))

    def _known(self, server: tuple[int, int], row: TakenRow, request_id: int) -> TakenRow:
        _keep(self._ids, (*server, row.request_id), request_id)
        return msgspec.structs.replace(row, request_id=request_id)


def _keep(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add an entry; beyond `_MOST_REQUESTS` the oldest goes."""
    known[key] = value
    if len(known) > _MOST_REQUESTS:
        known.pop(next(iter(known)))
