"""`stepscope top`: shows the dashboard of one engine, or of several side by side."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stepscope.engine.adapters.metrics.fetch import MetricsAddress
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint, find_local
from stepscope.recordings.fleets.fleet import FLEET_STEPS, Fleet, shared_bytes
from stepscope.tui.cli.dashboards.browsers import WEB, browsers_of
from stepscope.tui.cli.dashboards.dashboard import need_terminal, new_history, run_live
from stepscope.tui.cli.shared.connect import PAST_S, choose, connect, wait_for_any
from stepscope.tui.cli.shared.options import Past, Wait, argument, command
from stepscope.tui.cli.shared.output import note
from stepscope.tui.cli.shared.process import running
from stepscope.tui.session import live_source
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings, FleetSettings
from stepscope.tui.settings.terminal import can_be_drawn_on, piped_input

_SERVERS_S = 1.0  # how long to wait for servers on this machine to answer
_WITH_WHOLE_PAST = 4  # engines; more of them load less past each: it must all be read


@command(
    "stepscope top",
    "stepscope top engine-0 engine-1 tcp://127.0.0.1:5555",
    "stepscope top http://127.0.0.1:8000",
    "stepscope top --web 8080",
    "tail -F server.log | stepscope top -",
    takes_key=True,
    sections=("dashboard",),
)
def top(
    endpoints: list[str] | None = argument(
        "ENDPOINT",
        "names of local engines, ipc://PATH, tcp://HOST:PORT, http://HOST:PORT with /metrics, a "
        "JSON file that lists servers, - for a log from a pipe; several are shown side by side "
        "(default: [fleet] engines of the config file, else those of this machine)",
    ),
    *,
    past: Past = PAST_S,
    wait: Wait = True,
    web: str | None = WEB,
    flags: dict[str, Any],
) -> None:
    """Watch and steer running engines."""
    if endpoints == ["-"]:
        if web is not None:
            raise WrongUsage("--web: not of a log on standard input")
        _show_log(resolve(DashboardSettings, "dashboard", flags))
        return
    named = named_engines(endpoints or ())
    settings = resolve(DashboardSettings, "dashboard", flags)
    browsers = browsers_of(web, readonly=settings.readonly)
    waits = wait and (can_be_drawn_on() or browsers is not None)
    chosen = wait_for_any(lambda: engines_to_show(named), waits)
    if browsers is not None:
        browsers.serve(endpoints or (), {**flags, "past": past})
        return
    need_terminal("'stepscope record' and 'stepscope snapshot' work without one")
    if len(chosen) == 1 and isinstance(chosen[0], Endpoint):
        connect(chosen[0]).close()  # of several, the row of each says that it is starting
    past *= min(1.0, _WITH_WHOLE_PAST / len(chosen))
    known, find = set(chosen), partial(_addresses, named) if named else find_local

    def received(
        found: Sequence[live_source.Address], *limits: int
    ) -> list[live_source.LiveSource]:
        histories = (new_history(settings, *limits) for _ in found)
        return [live_source.receive(*each, past) for each in zip(found, histories, strict=True)]

    def newcomers() -> list[live_source.LiveSource]:
        try:
            found = [each for each in find() if each not in known]
        except (ConfigError, OSError):  # such as: the folder of the sockets is no longer ours
            return []
        known.update(found)
        return received(found, FLEET_STEPS)

    limits = (FLEET_STEPS, shared_bytes(len(chosen))) if len(chosen) > 1 else ()
    _show(received(chosen, *limits), newcomers, settings)


def _show_log(settings: DashboardSettings) -> None:
    from stepscope.recordings.importing.log_source import LogPipe

    pipe = LogPipe(piped_input(), partial(new_history, settings, FLEET_STEPS))
    need_terminal("'stepscope stats' and 'screenshot' read a log without one")
    note("waiting for a line with figures; Ctrl-C ends")
    _show(pipe.begin(), pipe.newcomers, settings)


def _show(
    sources: Sequence[live_source.LiveSource],
    newcomers: Callable[[], Sequence[live_source.LiveSource]],
    settings: DashboardSettings,
) -> None:
    fleet = Fleet(sources, newcomers=newcomers)
    with running(fleet):
        run_live(sources[0], settings, fleet=fleet)


def named_engines(named: Sequence[str]) -> list[str]:
    """Return the engines that are named, else those of the environment or the config file."""
    return list(named) or list(resolve(FleetSettings, "fleet", {}).engines)


def engines_to_show(named: Sequence[str]) -> list[live_source.Address]:
    """Return the addresses of the named engines; without names, of all engines on this machine."""
    if names := named_engines(named):
        return _addresses(names)
    from stepscope.engine.adapters.metrics.local_servers import LocalServers  # imports a parser

    servers = LocalServers()
    try:
        found = live_source.local_addresses(servers.wait(_SERVERS_S))
    finally:
        servers.stop()
    is_fleet = len(found) > 1 or any(isinstance(each, MetricsAddress) for each in found)
    return found if is_fleet else [choose(None, "stepscope top {}")]


def _addresses(names: Sequence[str]) -> list[live_source.Address]:
    return list(dict.fromkeys(each for name in names for each in live_source.addresses(name)))
