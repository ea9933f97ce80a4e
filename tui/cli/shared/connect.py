"""Finds the engine that a command is meant for, waits for it, and connects to it with a key."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import typer

from stepscope.engine.adapters.metrics.fetch import MetricsAddress
from stepscope.engine.client.client import (
    ControlClient,
    EngineGone,
    EngineStarting,
    EngineUnreachable,
    KeyRefused,
    NoEngine,
)
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint, find_local
from stepscope.engine.transport.keys import read_credentials
from stepscope.engine.transport.local_engines import called
from stepscope.engine.transport.sockets import KEY_VARIABLE
from stepscope.tui.cli.shared.arguments import RECORDING_SUFFIXES, find_recording
from stepscope.tui.cli.shared.output import Progress
from stepscope.tui.cli.shared.process import expected
from stepscope.tui.session.live_source import Address
from stepscope.tui.settings.cli_errors import DONE, CommandFailed, WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import ClientSettings
from stepscope.tui.settings.terminal import in_browser


def use_key(flags: Mapping[str, Any]) -> None:
    """Make all connections of this process and its children use the key that the user chose."""
    settings = resolve(ClientSettings, "client", flags)
    if settings.key:
        path = Path(settings.key).expanduser().absolute()
        read_credentials(path)
        os.environ[KEY_VARIABLE] = str(path)


PAST_S = 60.0  # how much of the engine's past a dashboard loads when it starts
_HELLO_S = 2.0  # a live engine answers a hello at once, even during a step
_LOOK_S = 0.2  # between two tries to reach an engine that is starting
_ANSWER_S = 60.0  # an engine answers all else between two steps, and a step may be long


class NotThere(CommandFailed):
    """No engine or server answers, but one may come."""


def choose(endpoint: str | None, usage: str) -> Endpoint:
    """Return the engine that was named, or the only one here; an error shows `usage` with it."""
    if endpoint is not None:
        return Endpoint.parse(endpoint)
    found = find_local()
    if not found:
        raise CommandFailed(
            "no engine runs on this machine; start one with 'stepscope serve', "
            f"or name one elsewhere: '{usage.format('tcp://HOST:PORT')}'"
        )
    if len(found) > 1:
        names = ", ".join(called_text(each) for each in found)
        first = found[0].name if found[0].is_ipc else found[0].control
        raise WrongUsage(
            f"{len(found)} engines run here ({names}); name one: '{usage.format(first)}'"
        )
    return found[0]


def recording_or_engine(target: str | None, usage: str) -> Path | Endpoint:
    """Return the recording or sample that the user named, else the engine, as `choose` does."""
    if target is not None and is_recording(target):
        return find_recording(target)
    return choose(target, usage)


def is_recording(target: str) -> bool:
    """Whether a target is a file or a sample, not an engine; CommandFailed if neither."""

    def runs() -> bool:
        return any(each.name == target for each in find_local())

    if target.startswith(("ipc://", "tcp://")):
        return False
    if target.endswith(RECORDING_SUFFIXES):
        return True
    try:
        path = find_recording(target)
    except CommandFailed:
        if runs():
            return False
        raise
    if path.is_dir() and not runs():
        raise CommandFailed(f"{target} is a folder; name a recording in it")
    return path.is_file()


def is_recorded(target: str | None) -> bool:
    """Whether a target is a recording; False also if it is nothing, which `choose` reports."""
    try:
        return target is not None and is_recording(target)
    except CommandFailed:
        return False


def called_text(endpoint: Endpoint) -> str:
    """Return an engine's address for use on the command line, and its name if that differs."""
    address = endpoint.name if endpoint.is_ipc else endpoint.control
    name = called(endpoint)
    return address if name == endpoint.name else f"{address} (called {name})"


def wait_for_any(find: Callable[[], Sequence[Address]], waits: bool) -> Sequence[Address]:
    """Return what `find` returns, once at least one of the engines answers or is starting.

    `find` is called before each look, because ranks that have come have addresses of their own.
    """
    since, said = time.strftime("%H:%M:%S"), ""
    parent = os.getppid()
    while True:
        found = find()
        try:
            check_any(found)
            return found
        except (EngineUnreachable, CommandFailed) as error:
            if not waits or not _may_come(error):
                raise
            why = str(error)
        if in_browser() and os.getppid() != parent:  # its server is gone
            raise typer.Exit(DONE)
        if why != said and sys.stderr is not None:
            names = ", ".join(each.name for each in found)
            how = f"since {since} (Ctrl-C ends)"
            print(f"waiting for {names} {how}: {why}", file=sys.stderr, flush=True)
            said = why
        time.sleep(_LOOK_S)


def connect(endpoint: Endpoint) -> ControlClient:
    """Connect to an engine, once it has started; EngineUnreachable names those that run here."""
    starting: EngineStarting | None = None
    is_over = False
    with Progress() as progress:
        while True:
            try:
                return hello(endpoint)
            except EngineStarting as error:
                starting, is_over = error, False
                progress(f"{error}; waiting for it; Ctrl-C stops waiting", None)
                time.sleep(_LOOK_S)
            except EngineUnreachable as error:
                if starting is None:
                    raise
                if is_over:
                    raise EngineGone(
                        f"{starting.name} (pid {starting.pid}) ended while it was starting: its "
                        f"terminal or log says why; {_who_runs()}"
                    ) from error
                is_over = True  # try once more: it may have started to listen just now


def hello(endpoint: Endpoint) -> ControlClient:
    """Connect to an engine that answers; EngineStarting or EngineUnreachable if it does not."""
    client = ControlClient(endpoint, timeout_s=_HELLO_S)
    try:
        client.info()
    except BaseException as error:
        client.close()
        is_missing = endpoint.path is not None and not endpoint.path.exists()
        if isinstance(error, EngineGone) or (type(error) is EngineUnreachable and is_missing):
            raise type(error)(f"{error}; {_who_runs()}") from error
        raise
    client.timeout_s = _ANSWER_S
    return client


def _who_runs() -> str:
    try:
        found = find_local()
    except (ConfigError, OSError):  # the folder of the sockets belongs to someone else
        found = []
    if not found:
        return "none runs here, 'stepscope serve' starts one, STEPSCOPE_ENDPOINT attaches a vLLM"
    return f"running here: {'; '.join(called_text(each) for each in found)}"


def check_any(endpoints: Sequence[Address]) -> None:
    """Raise CommandFailed (of one engine its own error) unless one of them answers or starts."""
    answers: SimpleQueue[tuple[str, Exception | None]] = SimpleQueue()

    def ask(address: Address) -> None:
        failure: Exception | None = None
        try:
            if isinstance(address, MetricsAddress):
                check_metrics(address)
            elif isinstance(address, Endpoint):
                hello(address).close()
        except EngineStarting:  # good enough: its row, or the command, says so
            pass
        except Exception as error:  # noqa: BLE001 - on any error, an answer is still needed
            failure = error
        answers.put((address.name, failure))

    for endpoint in endpoints:
        Thread(target=ask, args=(endpoint,), name="hello", daemon=True).start()
    errors: list[tuple[str, Exception]] = []
    for _ in endpoints:
        name, error = answers.get()
        if error is None:
            return
        errors.append((name, error))
    if len(errors) == 1:
        raise errors[0][1]
    said = sorted(f"{name}: {(expected(each) or (0, repr(each)))[1]}" for name, each in errors)
    kind = NotThere if any(_may_come(each) for _, each in errors) else CommandFailed
    raise kind(f"none of {len(errors)} engines answers; {'; '.join(said)}")


def _may_come(error: Exception) -> bool:
    """Whether an engine may answer later where this error was raised now."""
    is_there = isinstance(error, KeyRefused | NoEngine)
    return not is_there and isinstance(error, EngineUnreachable | NotThere)


def check_metrics(address: MetricsAddress) -> None:
    from stepscope.engine.adapters.metrics import fetch

    try:
        fetch.reading_of(address)
    except fetch.FetchError as error:
        kind = NotThere if isinstance(error, fetch.NoResponseError) else CommandFailed
        raise kind(str(error)) from error
