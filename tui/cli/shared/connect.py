"""Finds the engine that a command is meant for, and connects to it."""

import time

from stepscope.engine.adapters.metrics.address import MetricsAddress
from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import EngineGone, EngineStarting, EngineUnreachable
from stepscope.engine.protocol.commands import MAX_PAST_S
from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.transport.endpoints import Endpoint, find_local
from stepscope.engine.transport.local_engines import called
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage

PAST_S = 60.0  # how much of the engine's past a dashboard loads when it starts
_HELLO_S = 2.0  # a live engine answers a hello at once, even during a step
_LOOK_S = 0.2  # between two tries to reach an engine that is starting
_ANSWER_S = 60.0  # an engine answers all else between two steps, and a step may be long


def choose(endpoint: str | None, usage: str) -> Endpoint:
    """Return the endpoint that the user named, or that of the only engine on this machine.

    Args:
        endpoint: as the user gave it; None if not given.
        usage: the command as it should be typed, with {} for the endpoint, to show in an error.

    Raises:
        ConfigError: `endpoint` is not an endpoint.
        CommandFailed: no endpoint is given, and no engine runs here.
        WrongUsage: no endpoint is given, and several engines run here.
    """
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


def called_text(endpoint: Endpoint) -> str:
    """Return an engine's address for use on the command line, and its name if that differs."""
    address = endpoint.name if endpoint.is_ipc else endpoint.control
    name = called(endpoint)
    return address if name == endpoint.name else f"{address} (called {name})"


def connect(endpoint: Endpoint) -> ControlClient:
    """Connect to an engine. If the engine is still starting, wait until it answers.

    Raises:
        EngineUnreachable: no engine answers within two seconds, and none is starting; the message
            names the engines of this machine.
        EngineGone: the engine that was starting has ended.
    """
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
    """Connect to an engine that answers. Unlike `connect`, do not wait for one that is starting.

    Raises:
        EngineStarting: the engine is still starting.
        EngineUnreachable: no engine answers within two seconds.
    """
    client = ControlClient(endpoint, timeout_s=_HELLO_S)
    try:
        client.info()
    except EngineStarting:
        client.close()
        raise
    except EngineUnreachable as error:
        client.close()
        if isinstance(error, EngineGone):
            raise EngineGone(f"{error}; {_who_runs()}") from error
        if endpoint.path is None or endpoint.path.exists():
            raise
        raise EngineUnreachable(f"{error}; {_who_runs()}") from error
    except BaseException:
        client.close()
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


def check_metrics(address: MetricsAddress) -> None:
    """Raise CommandFailed unless the address serves metrics that we can read."""
    from stepscope.engine.adapters.metrics.ask import reading_of  # imports a parser
    from stepscope.engine.adapters.metrics.fetch import FetchError

    try:
        reading_of(address)
    except FetchError as error:
        raise CommandFailed(str(error)) from error


def check_past(past_s: float) -> None:
    """Check the value of --past.

    Raises:
        WrongUsage: it is negative, or no engine keeps steps for so many seconds.
    """
    if not 0 <= past_s <= MAX_PAST_S:
        raise WrongUsage(f"--past: expected 0 to {MAX_PAST_S:.0f} seconds, got {past_s:g}")
