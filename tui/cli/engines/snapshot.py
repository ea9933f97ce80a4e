"""`stepscope snapshot`: prints once what an engine is doing right now."""

from typing import Annotated

import msgspec
import typer

from stepscope.engine.adapters.metrics.fetch import MetricsAddress, is_metrics_url
from stepscope.engine.protocol.silence import publishes
from stepscope.engine.protocol.wire import Snapshot
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.state.audit_text import typed_text
from stepscope.recordings.state.session import SessionState
from stepscope.tui.cli.engines.audit import audit
from stepscope.tui.cli.shared.arguments import example, with_key
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.errors import say, write_json
from stepscope.tui.cli.shared.recording_path import RECORDING_SUFFIXES
from stepscope.tui.settings.cli_errors import WrongUsage

commands = typer.Typer(rich_markup_mode=None)


_METRICS_S = 2.0  # how long to read a server's metrics: they tell what changed from one to the next


@commands.command(
    epilog=example(
        "stepscope snapshot --json | jq .kv",
        "stepscope snapshot --audit",
        "stepscope snapshot session.mcap --audit --json | jq '.[] | .who'",
    )
)
@with_key
def snapshot(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="ENDPOINT|FILE",
            help="name of a local engine, ipc://PATH, tcp://HOST:PORT or http://HOST:PORT; with "
            "--audit also a recording or sample (default: the only local engine)",
        ),
    ] = None,
    shows_audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="who changed the engine, and which changes it refused, oldest first"
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="the whole snapshot and the figures of the last minute, or the audit, as JSON",
        ),
    ] = False,
) -> None:
    """Show what an engine or a /metrics page says now.

    In the audit, a name after 'key' was proved with that key. Any other name is only a claim.
    """
    if shows_audit:
        audit(target, as_json)
        return
    if target is not None and target.endswith(RECORDING_SUFFIXES):
        raise WrongUsage(f"{target} is a recording: give --audit, or 'stepscope stats {target}'")
    if target is not None and is_metrics_url(target):
        figures: dict[str, float | None] | None
        taken, figures = _of_metrics(MetricsAddress.parse(target))
    else:
        chosen = choose(target, "stepscope snapshot {}")
        with connect(chosen) as client:
            taken = client.snapshot()
        figures = _last_minute(chosen, taken) if as_json else None
    if as_json:
        write_json({**msgspec.to_builtins(taken), "figures": figures})
        return
    say(*(f"{name:<10} {text}" for name, text in _summary(taken)))


def _last_minute(endpoint: Endpoint, taken: Snapshot) -> dict[str, float | None] | None:
    """Return the figures of the last minute; None if the engine publishes no steps."""
    if not publishes(taken.info):
        return None
    from stepscope.tui.cli.recordings.measured import LIVE_S, last_seconds  # only --json needs them
    from stepscope.tui.cli.shared.levels import chosen_levels

    return last_seconds(endpoint, LIVE_S, chosen_levels({})).figures(None, LIVE_S)


def _of_metrics(address: MetricsAddress) -> tuple[Snapshot, dict[str, float | None]]:
    """What a server's metrics tell, and the figures of the seconds in which they were read."""
    from stepscope.tui.cli.recordings.measured import scraped  # an engine needs none of it
    from stepscope.tui.cli.shared.levels import chosen_levels

    history = scraped(address, _METRICS_S, chosen_levels({}))
    taken = history.snapshot()
    assert taken is not None, "it has a step"
    return taken, history.figures(None, None)


def _summary(taken: Snapshot) -> list[tuple[str, str]]:
    info = taken.info
    parts = [info.model, info.architecture, info.dtype, info.device, info.attention_backend]
    state = SessionState.from_snapshot(taken)
    by_status = {"running": state.num_running, "waiting": state.num_waiting}
    if state.totals is None:
        by_status = {"running": 0, "waiting": 0, "preempted": 0}
        for request in taken.requests:
            by_status[request.status] = by_status.get(request.status, 0) + 1
    elif not state.is_load_known:
        by_status = {}
    where = info.control_endpoint or f"http://{info.http_endpoint}"
    lines = [
        ("engine", f"{info.name} (pid {info.pid or 'unknown'}) on {where}"),
        ("model", ", ".join(part for part in parts if part)),
        ("state", f"{taken.state}, step {taken.step:,}"),
        ("requests", ", ".join(f"{n} {status}" for status, n in by_status.items()) or "unknown"),
    ]
    if info.role is not None:
        goes_on = f", then {info.decode_engine} goes on" if info.decode_engine else ""
        lines.insert(2, ("role", info.role + goes_on))
    if taken.kv is not None:
        kv = taken.kv
        total = kv.used + kv.cached + kv.empty
        share = kv.used / total if total else 0.0
        lines.append(
            (
                "KV blocks",
                f"{kv.used:,} used ({share:.0%}), {kv.cached:,} cached, {kv.empty:,} empty",
            )
        )
    elif state.kv_share is not None:
        lines.append(("KV cache", f"{state.kv_share:.0%} used"))
    if state.is_summed_up:
        return [*lines, ("knobs", "unknown: /metrics do not tell them")]
    lines.append(("workload", taken.workload or "none of its own"))
    knobs = ", ".join(f"{name}={typed_text(value)}" for name, value in taken.knobs.items())
    lines.append(("knobs", f"version {taken.knobs_version}: {knobs}"))
    if info.with_tokens:
        lines.append(("privacy", "everyone who watches or records gets prompts and outputs"))
    if (control := taken.control) is not None:
        counts = {
            "bad messages": control.bad,
            "commands beyond a client's share": control.limited,
            "commands of viewers": control.denied,
            "connections without a key": control.keyless,
        }
        refusals = (f"{count:,} {what}" for what, count in counts.items() if count)
        lines.append(("refused", ", ".join(refusals)))
    if taken.num_dropped:
        lines.append(("dropped", f"{taken.num_dropped:,} telemetry messages so far"))
    return lines
