"""`stepscope top`: shows the dashboard of one engine, or of several side by side."""

import contextlib
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

from stepscope.engine.adapters.metrics.address import MetricsAddress
from stepscope.engine.client.errors import EngineStarting
from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.transport.endpoints import Endpoint, find_local
from stepscope.recordings.fleets.fleet import FLEET_STEPS, Fleet, shared_bytes
from stepscope.tui.cli.dashboards.dashboard import need_terminal, new_history, run_live
from stepscope.tui.cli.shared.connect import (
    PAST_S,
    check_metrics,
    check_past,
    choose,
    connect,
    hello,
)
from stepscope.tui.cli.shared.errors import expected
from stepscope.tui.session.control.who import call_me
from stepscope.tui.session.live_source import (
    Address,
    LiveSource,
    addresses,
    local_addresses,
    receive,
)
from stepscope.tui.settings.cli_errors import CommandFailed
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings, FleetSettings

_SERVERS_S = 1.0  # how long to wait for servers on this machine to answer
_WITH_WHOLE_PAST = 4  # engines; more of them load less past each: it must all be read


def top(
    endpoints: Sequence[str],
    flags: Mapping[str, Any],
    name: str | None = None,
    past_s: float = PAST_S,
) -> None:
    """Show the dashboard of one engine, or of several side by side.

    Args:
        name: the operator's name for the engine's audit trail.
        past_s: seconds of earlier steps to load at the start, of each engine.

    Raises:
        EngineUnreachable: nothing listens at the endpoint, and no engine is starting there.
        CommandFailed: several engines are meant, and none of them answers or is starting.
    """
    call_me(name)
    check_past(past_s)
    settings = resolve(DashboardSettings, "dashboard", flags)
    chosen = engines_to_show(endpoints)
    check_any(chosen)
    need_terminal("'stepscope record' and 'stepscope snapshot' work without one")
    if len(chosen) == 1 and isinstance(chosen[0], Endpoint):
        connect(chosen[0]).close()  # of several, the row of each says that it is starting
    show_engines(chosen, settings, is_open=not named_engines(endpoints), past_s=past_s)


def named_engines(named: Sequence[str]) -> list[str]:
    """Return the engines that are named, else those of the environment or the config file."""
    return list(named) or list(resolve(FleetSettings, "fleet", {}).engines)


def engines_to_show(named: Sequence[str]) -> list[Address]:
    """Return the addresses of the named engines; without names, of all engines on this machine.

    Args:
        named: engines named on the command line; empty: see `named_engines`.

    Raises:
        ConfigError: a name is not an endpoint.
        CommandFailed: there is no engine at all.
    """
    names = named_engines(named)
    if names:
        return list(dict.fromkeys(each for name in names for each in addresses(name)))
    found = _on_this_machine()
    if len(found) > 1 or any(isinstance(each, MetricsAddress) for each in found):
        return found
    return [choose(None, "stepscope top {}")]


def _on_this_machine() -> list[Address]:
    from stepscope.engine.adapters.metrics.local_servers import LocalServers  # imports a parser

    servers = LocalServers()
    try:
        return local_addresses(servers.wait(_SERVERS_S))
    finally:
        servers.stop()


def check_any(endpoints: Sequence[Address]) -> None:
    """Check that at least one of the engines answers or is starting.

    Raises:
        EngineUnreachable: the only engine does not answer, and is not starting.
        CommandFailed: there are several engines, and none answers or is starting.
    """
    if len(endpoints) == 1:
        with contextlib.suppress(EngineStarting):
            _ask(endpoints[0])
        return
    answers: SimpleQueue[str | None] = SimpleQueue()

    def ask(endpoint: Address) -> None:
        try:
            _ask(endpoint)
        except EngineStarting:
            answers.put(None)  # good enough: its row says that it is starting
        except Exception as error:  # noqa: BLE001 - on any error, the caller still needs an answer
            known = expected(error)
            answers.put(f"{endpoint.name}: {repr(error) if known is None else known[1]}")
        else:
            answers.put(None)

    for endpoint in endpoints:
        Thread(target=ask, args=(endpoint,), name="hello", daemon=True).start()
    errors: list[str] = []
    while len(errors) < len(endpoints):
        error = answers.get()
        if error is None:
            return
        errors.append(error)
    raise CommandFailed(f"none of {len(errors)} engines answers; {'; '.join(sorted(errors))}")


def _ask(address: Address) -> None:
    """Raise EngineUnreachable or CommandFailed if nothing answers at the address."""
    if isinstance(address, MetricsAddress):
        check_metrics(address)
    elif isinstance(address, Endpoint):
        hello(address).close()


def show_engines(
    endpoints: Sequence[Address],
    settings: DashboardSettings,
    is_open: bool = False,
    past_s: float = PAST_S,
) -> None:
    """Show the dashboard of these engines until the operator leaves it.

    Args:
        is_open: whether to add engines that start on this machine meanwhile.
        past_s: seconds of earlier steps to load of each engine; of many engines, less is loaded.
    """
    known = set(endpoints)
    past_s *= min(1.0, _WITH_WHOLE_PAST / len(endpoints))

    def newcomers() -> list[LiveSource]:
        try:
            found = [each for each in find_local() if each not in known]
        except (ConfigError, OSError):  # the folder of the sockets is no longer ours
            return []
        known.update(found)
        return [receive(each, new_history(settings, FLEET_STEPS), past_s) for each in found]

    if len(endpoints) == 1:
        sources = [receive(endpoints[0], new_history(settings), past_s)]
    else:
        share = shared_bytes(len(endpoints))
        sources = [
            receive(endpoint, new_history(settings, FLEET_STEPS, share), past_s)
            for endpoint in endpoints
        ]
    fleet = Fleet(sources, newcomers=newcomers if is_open else None)
    fleet.start()
    try:
        run_live(sources[0], settings, fleet=fleet)
    finally:
        fleet.stop()
