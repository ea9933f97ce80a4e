"""`stepscope serve --http-for`: serves the OpenAI API for an engine in another process."""

import logging
import os
import socket
import sys
import threading
from typing import Annotated, Any

import typer

from stepscope.engine.http.settings import HttpSettings, check_private, parse_address
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.transport.endpoints import Endpoint, find_local
from stepscope.tui.cli.shared.arguments import EngineName, with_key
from stepscope.tui.cli.shared.connect import choose
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.cli.shared.options import with_options
from stepscope.tui.settings.cli_errors import CommandFailed
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import load_alerts

commands = typer.Typer(rich_markup_mode=None)


_DEFAULTS = {"bind": "127.0.0.1:8000"}
_EXTRAS = {"starlette", "uvicorn", "prometheus_client"}


@commands.command("http-server")
@with_key
@with_options("http", defaults=_DEFAULTS)
def http(
    endpoint: EngineName = None,
    inherited: Annotated[int | None, typer.Option("--inherited-socket", hidden=True)] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Serve the OpenAI API over HTTP for an engine; `serve` runs it as a child process."""
    settings = resolve(HttpSettings, "http", flags, _DEFAULTS)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    if inherited is not None:
        assert endpoint is not None
        parent_gone = threading.Event()
        threading.Thread(target=_watch_stdin, args=(parent_gone,), daemon=True).start()
        _run(settings, Endpoint.parse(endpoint), socket.socket(fileno=inherited), parent_gone)
        return
    address = parse_address(settings.bind)
    check_private(address, settings.api_key)
    where = choose(endpoint, "stepscope serve --http-for {}")
    listener, text = open_listener(settings.bind)
    say(*announcement(text, settings))
    if where.name not in {each.name for each in find_local()} and where.is_ipc:
        say(f"no engine runs at {where.control} yet; the server will use it once it starts")
    with listener:
        _run(settings, where, listener, None)


def open_listener(bind: str) -> tuple[socket.socket, str]:
    """Bind a listening socket. Returns it and its address as HOST:PORT.

    Raises:
        CommandFailed: a package is missing.
        ConfigError: the address cannot be bound.
    """
    require_packages()
    from stepscope.engine.http.server.server import bound_address, listen

    listener = listen(parse_address(bind))
    return listener, bound_address(listener).text


def require_packages() -> None:
    """Raise CommandFailed if a package that the server needs is not installed."""
    try:
        import stepscope.engine.http.server.server  # noqa: F401 - only to see if it works
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        raise CommandFailed(
            f"{missing} is not installed, and the HTTP server needs it: "
            "pip install 'stepscope[http]'"
        ) from error


def announcement(address: str, settings: HttpSettings, *, takes_prompts: bool = True) -> list[str]:
    """Return lines for the operator: where the API is, and how to try it."""
    if not takes_prompts:
        return [f"metrics on http://{address}/metrics; prompts go to the prefill engine"]
    key = ' -H "Authorization: Bearer $STEPSCOPE_HTTP_API_KEY"' if settings.api_key else ""
    return [
        f"OpenAI API on http://{address}/v1",
        f"try it: curl http://{address}/v1/completions{key} "
        """-d '{"prompt": "Once upon a time", "max_tokens": 32}'""",
    ]


def _run(
    settings: HttpSettings,
    endpoint: Endpoint,
    listener: socket.socket,
    parent_gone: threading.Event | None,
) -> None:
    require_packages()
    from stepscope.engine.http.server.server import serve_http
    from stepscope.tui.cli.engines.alert_metrics import judged_rules

    names: set[str] = set()

    def found(info: EngineInfo) -> None:
        if parent_gone is None and info.engine_id not in names:
            names.add(info.engine_id)
            say(f"serving {info.model} of {info.name}")

    with judged_rules(endpoint, load_alerts()) as gauges:
        serve_http(
            settings, endpoint, listener, parent_gone=parent_gone, found=found, collectors=gauges
        )


def _watch_stdin(parent_gone: threading.Event) -> None:
    """Wait until standard input ends, then set the event.

    The parent process holds the other end of that pipe as long as it lives.
    """
    while os.read(sys.stdin.fileno(), 4096):
        continue
    parent_gone.set()
