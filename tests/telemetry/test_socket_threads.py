"""No two threads are in one ZeroMQ socket at a time, and each socket but one has one thread.

The one is the publishing socket without the compiled sender, which a lock passes on.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from stepscope.engine.client.client import ControlClient
from stepscope.engine.control import outgoing
from stepscope.engine.protocol.commands import GetAudit, Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.telemetry import sender, step_watcher
from stepscope.engine.telemetry.step_watcher import StepWatcher
from stepscope.engine.transport.gate import Gate
from stepscope.engine.transport.keys import KeyFolder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.session.engine_link import EngineLink
from tests.support.engines.live_engine import running_engine
from tests.support.waiting import wait_for

_CALLS = ("send", "recv", "send_multipart", "recv_multipart", "poll", "setsockopt", "getsockopt")


class SocketWatch:
    """Notes which threads use a socket, and when one does while another is in it."""

    def __init__(self) -> None:
        self.threads: dict[Any, set[str]] = {}
        self.shared: list[str] = []
        self._inside: dict[Any, list[int]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def used(self, *sockets: Any) -> Iterator[None]:
        me = threading.get_ident()
        with self._lock:
            for socket in sockets:
                self.threads.setdefault(socket, set()).add(threading.current_thread().name)
                inside = self._inside.setdefault(socket, [])
                if any(each != me for each in inside):
                    self.shared.append(f"{threading.current_thread().name} in {socket}")
                inside.append(me)
        try:
            yield
        finally:
            with self._lock:
                for socket in sockets:
                    self._inside[socket].remove(me)

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(socket: Any, *args: Any, **kwargs: Any) -> Any:
            with self.used(socket):
                return method(socket, *args, **kwargs)

        return watched


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> SocketWatch:
    """Watches all sockets; telemetry is sent without the compiled sender."""
    made = SocketWatch()
    monkeypatch.setattr(sender, "compiled", None)
    for name in _CALLS:
        monkeypatch.setattr(zmq.Socket, name, made.around(getattr(zmq.Socket, name)))
    for module in (sender, outgoing):  # they bypass a layer of pyzmq
        monkeypatch.setattr(module, "_send", made.around(zmq.backend.Socket.send))
    poll = zmq.Poller.poll

    def watched(poller: zmq.Poller, timeout: float | None = None) -> Any:
        with made.used(*(each for each, _ in poller.sockets if isinstance(each, zmq.Socket))):
            return poll(poller, timeout)

    monkeypatch.setattr(zmq.Poller, "poll", watched)
    return made


def test_every_socket_of_a_served_and_watched_engine_has_one_thread(
    watch: SocketWatch, monkeypatch: pytest.MonkeyPatch, runtime_folder: Path
) -> None:
    monkeypatch.setattr(step_watcher, "LOOK_S", 0.0005)  # every step is published in flight
    monkeypatch.setattr(step_watcher, "LONG_NS", 0)
    monkeypatch.setattr(sender, "LOOK_S", 0.0)
    keys = KeyFolder(runtime_folder / "keys")
    keys.path.mkdir(mode=0o700)
    with (
        closing(Gate(keys)) as gate,
        running_engine(runtime_folder, with_tokens=False, gate=gate) as engine,
    ):
        publishing = engine.publisher._socket
        watcher = StepWatcher(engine.core, engine.publisher.publish_aside)
        watcher.start()
        source = Subscriber(engine.endpoint)
        source.start()
        link = EngineLink(lambda: ControlClient(engine.endpoint))
        with ControlClient(engine.endpoint) as client:
            sampling = SamplingParams(max_tokens=100, ignore_eos=True)
            client.ask(Submit(prompt_token_ids=[1] * 300, sampling=sampling, stream=False))
            link.ask("audit", GetAudit())
            wait_for(lambda: (source.history.last_step or 0) > 90, "the steps")
            wait_for(lambda: link.answers() != [], "the answer")
        link.close()
        source.stop()
        watcher.close()
    assert watch.shared == []
    # Threads that make a socket hand it over before they start its own.
    owners = {
        socket: threads - {threading.current_thread().name}
        for socket, threads in watch.threads.items()
    }
    assert owners.pop(publishing) == {"engine", "step watcher"}
    assert {len(threads) for threads in owners.values()} <= {0, 1}
    assert set().union(*owners.values()) >= {"control", "subscriber", "gate", "engine link"}
