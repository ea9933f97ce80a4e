"""A TCP proxy for both sockets of an engine that cuts, delays, stalls and refuses connections.

Each client gets a proxy of its own. Connections are delayed apart from each other, so that what
the engine says on one overtakes what it has said on another.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
_CHUNK = 16 * 1024
STALL_S = 7.0  # longer than a connection may be silent
FAULTS = ("cut", "cut telemetry", "cut control", "delay", "refuse", "stall")


@dataclass
class _Link:
    """One connection, and the faults for the bytes on it."""

    is_telemetry: bool
    delay_s: float
    writers: list[asyncio.StreamWriter]
    stalled_until_s: float = 0.0

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """Listens on two neighbouring ports for one client. Belongs to the loop of `Proxies`."""

    def __init__(self, upstream: int, listen: int) -> None:
        self.endpoint = f"tcp://127.0.0.1:{listen}"
        self._upstream = upstream
        self._listen = listen
        self._links: list[_Link] = []
        self._servers: list[asyncio.Server] = []
        self._refusing_until_s = 0.0
        self._delays_s = {False: 0.0, True: 0.0}
        self.num_cut = 0

    async def open(self) -> None:
        for is_telemetry in (False, True):
            server = await asyncio.start_server(
                lambda reader, writer, t=is_telemetry: self._serve(reader, writer, t),
                "127.0.0.1",
                self._listen + is_telemetry,
                limit=_CHUNK,
            )
            self._servers.append(server)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        await self.cut()

    # Faults

    async def fault(self, kind: str, rng: random.Random) -> None:
        """Inject a fault of one of the `FAULTS` into the connections of this client."""
        now_s = asyncio.get_running_loop().time()
        if kind == "delay":
            await self.delay(rng.uniform(0, 0.03), rng.uniform(0, 0.03))
        elif kind == "stall":  # the existing connections stay open, but carry nothing
            for link in self._links:
                link.stalled_until_s = now_s + STALL_S
        else:
            if kind == "refuse":  # none is accepted for so long
                self._refusing_until_s = now_s + rng.uniform(0.05, 0.4)
            await self.cut(telemetry=kind != "cut control", control=kind != "cut telemetry")

    async def cut(self, telemetry: bool = True, control: bool = True) -> None:
        for link in self._links:
            if telemetry if link.is_telemetry else control:
                link.cut()
                self.num_cut += 1

    async def delay(self, telemetry_s: float, control_s: float) -> None:
        """Hold every chunk for so long from now on."""
        self._delays_s = {True: telemetry_s, False: control_s}
        for link in self._links:
            link.delay_s = self._delays_s[link.is_telemetry]

    # Connections

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_telemetry: bool
    ) -> None:
        if asyncio.get_running_loop().time() < self._refusing_until_s:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection(
                "127.0.0.1", self._upstream + is_telemetry, limit=_CHUNK
            )
        except OSError:
            writer.transport.abort()
            return
        link = _Link(is_telemetry, self._delays_s[is_telemetry], [writer, up_writer])
        for each in link.writers:
            each.transport.set_write_buffer_limits(high=_CHUNK)
        self._links.append(link)
        ways = (self._carry(reader, up_writer, link), self._carry(up_reader, writer, link))
        tasks = [asyncio.create_task(way) for way in ways]
        # At the end of the run this is cancelled, of which asyncio must not complain.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        link.cut()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._links.remove(link)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while chunk := await reader.read(_CHUNK):
                while (stalled_s := link.stalled_until_s - loop.time()) > 0:
                    await asyncio.sleep(stalled_s)
                if link.delay_s:
                    await asyncio.sleep(link.delay_s)
                writer.write(chunk)
                await writer.drain()
        except OSError:
            return


class Proxies:
    """The thread that the proxies run on. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._proxies: list[Proxy] = []

    def __enter__(self) -> "Proxies":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._proxies:
            self.do(proxy.close())
        self.do(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    async def _end_tasks() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def open(self, upstream: int, listen: int) -> Proxy:
        proxy = Proxy(upstream, listen)
        self.do(proxy.open())
        self._proxies.append(proxy)
        return proxy

    def do(self, what: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30)
