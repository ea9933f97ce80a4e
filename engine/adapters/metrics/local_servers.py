"""Finds the vLLM, SGLang and TensorRT-LLM servers on this machine that export metrics.

Asks, on loopback only, the default ports of these servers and the ports on which this user's
processes of these engines listen. A port without a usable answer is skipped for a while.
"""

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import psutil

from stepscope.engine.adapters.metrics.fetch import FetchError, MetricsAddress, reading_of

USUAL_PORTS = (8000, 30000)  # vLLM's and TensorRT-LLM's, SGLang's
_COMMANDS = re.compile(r"vllm( serve|\.entrypoints)|sglang( serve|\.launch_server)|trtllm-serve")
_LOOK_S = 3.0
_ASK_S = 0.3  # a server on this machine answers in milliseconds
_AGAIN_S = 15.0  # until a port that gave no usable answer is tried again
_LOOPBACK = ("127.0.0.1", "0.0.0.0", "::", "::1", "*")


class LocalServer(NamedTuple):
    """A server that answered. `pid` is None if it was found by its port alone."""

    address: MetricsAddress
    engine: str
    pid: int | None


class LocalServers:
    """Looks for local servers again and again, on a background thread."""

    def __init__(self) -> None:
        self.found: tuple[LocalServer, ...] = ()  # those that answered in the last round
        self._not_before_s: dict[tuple[int, int | None], float] = {}
        self._has_looked = threading.Event()
        self._stopping = threading.Event()
        threading.Thread(target=self._run, name="local servers", daemon=True).start()

    def wait(self, timeout_s: float) -> tuple[LocalServer, ...]:
        """Return the servers found when the first round is done, or after `timeout_s`."""
        self._has_looked.wait(timeout_s)
        return self.found

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.found = tuple(self._answering())
            self._has_looked.set()
            self._stopping.wait(_LOOK_S)

    def _answering(self) -> Iterator[LocalServer]:
        for port, pid in listening_ports():
            if time.monotonic() < self._not_before_s.get((port, pid), 0.0):
                continue
            address = MetricsAddress(f"http://127.0.0.1:{port}")
            try:
                engine = reading_of(address, _ASK_S).engine
            except FetchError:
                engine = ""
            if engine and engine != "stepscope":  # our own engine is found by its endpoint
                yield LocalServer(address, engine, pid)
            else:
                self._not_before_s[port, pid] = time.monotonic() + _AGAIN_S


def listening_ports() -> list[tuple[int, int | None]]:
    """Return the default ports, and those of this user's engines with the pid that listens."""
    found: dict[int, int | None] = dict.fromkeys(USUAL_PORTS)
    own = psutil.Process().uids().real
    for process in psutil.process_iter(["pid", "uids", "cmdline"]):
        uids, command = process.info["uids"], " ".join(process.info["cmdline"] or ())
        if uids is None or uids.real != own or not _COMMANDS.search(command):
            continue
        try:
            sockets = process.net_connections(kind="tcp")
        except psutil.Error:
            continue  # the process has ended, or we may not inspect it
        for each in sockets:
            if each.status == psutil.CONN_LISTEN and each.laddr.ip in _LOOPBACK:
                found[each.laddr.port] = process.pid
    return list(found.items())


def without_attached(
    servers: Iterable[LocalServer], engine_pids: Iterable[int]
) -> list[LocalServer]:
    """Return the servers whose engine stepscope is not attached to. The others have an endpoint.

    An attached engine is a child process of its server. So the parents of `engine_pids` count, too.
    """
    attached = set(engine_pids)
    for pid in tuple(attached):
        with contextlib.suppress(psutil.Error):
            attached.update(each.pid for each in psutil.Process(pid).parents())
    return [each for each in servers if each.pid is None or each.pid not in attached]
