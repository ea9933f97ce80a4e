"""`--web`: who may open the page, what browsers may do there, and that nothing is left behind."""

import asyncio
import base64
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
import pyte
import pytest
from aiohttp import WSServerHandshakeError
from aiohttp.test_utils import TestClient, TestServer

from stepscope.engine.http.settings import Address
from stepscope.engine.transport.keys import Credentials, KeyPair, write_credentials
from stepscope.engine.transport.sockets import KEY_VARIABLE
from stepscope.tui.cli.dashboards import browsers
from stepscope.tui.cli.dashboards.browsers import web_app
from tests.support.done import Done
from tests.support.engines.engine_process import EngineProcess
from tests.support.waiting import WAIT_S, until, wait_for

SIZE = (120, 40)


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, runtime_folder: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    monkeypatch.setenv("STEPSCOPE_CONFIG", "none")
    monkeypatch.delenv("STEPSCOPE_WEB_KEY", raising=False)


def key_file(folder: Path, role: str) -> str:
    path = folder / f"{role}.key"
    write_credentials(path, Credentials(KeyPair.new(), KeyPair.new().public, role), role)
    return str(path)


# What is refused


def test_without_the_package_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, stepscope: Callable[..., Done]
) -> None:
    monkeypatch.setattr(browsers, "find_spec", lambda name: None)
    done = stepscope("top", "--web", "0")
    assert done.exit_code == 1
    assert "--web needs textual-serve: pip install 'stepscope[web]'" in done.stderr
    without = "import sys; sys.modules['aiohttp'] = None; import stepscope.tui.cli.dashboards.top"
    subprocess.run([sys.executable, "-c", without], check=True, timeout=60)


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_only_an_operators_key_lets_browsers_steer_and_then_they_need_one_too(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert browsers.browsers_of("8080", readonly=False) == (Address("127.0.0.1", 8080), False)
    monkeypatch.setenv(KEY_VARIABLE, key_file(tmp_path, role))
    if role == "operator":
        with pytest.raises(browsers.WrongUsage, match="users of this machine could steer"):
            browsers.browsers_of("8080", readonly=False)
        monkeypatch.setenv("STEPSCOPE_WEB_KEY", "secret")
    for readonly in (False, True):
        found = browsers.browsers_of("8080", readonly=readonly)
        assert found.steers == (role == "operator" and not readonly)


# Who may open the page


async def test_without_a_key_only_pages_of_this_machine_may_connect() -> None:
    async with TestClient(TestServer(web_app("exit", ""))) as client:
        page = await client.get("/")
        assert page.status == 200
        assert not re.search(r"https?:|//\w", await page.text())  # it needs no other site
        assert (await client.get("/static/js/textual.js")).status == 200
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            assert (await client.get("/", headers=headers)).status == 403
            with pytest.raises(WSServerHandshakeError, match="403"):
                await client.ws_connect("/ws", headers=headers)


async def test_with_a_key_a_browser_must_know_it_once() -> None:
    async with TestClient(TestServer(web_app("exit", "secret"))) as client:
        for given in ("", "Basic ?", basic("me:guess"), basic("secret:"), basic("secret")):
            headers = {"Authorization": given, "Host": "gpu-7", "Cookie": "stepscope=é"}
            refused = await client.get("/", headers=headers)
            assert refused.status == 401
            assert "Basic" in refused.headers["WWW-Authenticate"]
            with pytest.raises(WSServerHandshakeError, match="401"):
                await client.ws_connect("/ws", headers=headers)
        page = await client.get("/", headers={"Authorization": basic("any name:secret")})
        assert page.status == 200
        async with client.ws_connect("/ws") as connection:  # by the cookie
            assert not connection.closed


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


# A real server, its browsers and their processes


@contextmanager
def started(*command: str) -> Iterator["subprocess.Popen[str]"]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *command], stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


class Browser:
    """A connection, and the screen that it draws."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        self.connection = connection
        self._screen = pyte.Screen(*SIZE)
        self._stream = pyte.ByteStream(self._screen)

    async def shows(self, words: str) -> None:
        async def read() -> None:
            while words not in "\n".join(self._screen.display):
                message = await self.connection.receive()
                assert message.type is aiohttp.WSMsgType.BINARY, message
                self._stream.feed(message.data)

        await asyncio.wait_for(read(), WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_several_browsers_watch_and_end_with_the_server(
    runtime_folder: Path, number: signal.Signals
) -> None:
    address = f"ipc://{runtime_folder}/e1"
    top = ("-m", "stepscope.tui.cli", "top", "--web", "0", "--theme", "light", address)
    with EngineProcess(address), started(*top) as process:
        said = process.stdout.readline()
        assert "(read-only; Ctrl-C ends it)" in said
        url = said.split()[2]
        query = f"{url}/ws?width={SIZE[0]}&height={SIZE[1]};touch%20here"
        async with (
            aiohttp.ClientSession() as client,
            client.ws_connect(query) as one,
            client.ws_connect(query) as two,
        ):
            for each in (Browser(one), Browser(two)):
                await each.shows("requests × steps")
                await each.shows("▐LIVE")
                await each.connection.send_json(["stdin", "P"])
                await each.shows("this dashboard is --readonly")
                await each.connection.send_json(["stdin", "S"])
                await each.shows("S writes a file, and this dashboard is in a browser")
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) == 2
            assert {"top", "--readonly", "--no-keep", "light"} <= set(children[0].cmdline())
            await one.close()
            await until(lambda: sum(map(runs, children)) == 1, "it ended with its browser")
            process.send_signal(number)
            await until(lambda: process.poll() is not None, "the server ended")
            wait_for(lambda: not any(map(runs, children)), "the other ended", WAIT_S)


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
