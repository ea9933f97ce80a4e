"""`stepscope snapshot`: prints once what an engine is doing right now."""

from typing import Annotated

import msgspec
import typer

from stepscope.engine.adapters.metrics.fetch import MetricsAddress, is_metrics_url
from stepscope.engine.protocol.silence import publishes
from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.state.audit_text import typed_text
from stepscope.recordings.state.session import SessionState
from stepscope.tui.cli.shared.arguments import EngineName, example, with_key
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.errors import say, write_json

commands = typer.Typer(rich_markup_mode=None)


_METRICS_S = 2.0  # how long to read a server's metrics: they tell what changed from one to the next


@commands.command(epilog=example("stepscope snapshot --json | jq .kv"))
@with_key
def snapshot(
    endpoint: EngineName = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="the whole snapshot and the figures of the last minute, as JSON"
        ),
    ] = False,
) -> None:
    """Show once what an engine, or a server with /metrics, is doing now."""
    # `--help` needs none of these.
    from stepscope.recordings.history.verdict import verdict_of
    from stepscope.tui.cli.recordings.measured import LIVE_S, last_seconds, scraped
    from stepscope.tui.cli.shared.levels import chosen_levels

    if endpoint is not None and is_metrics_url(endpoint):
        address = MetricsAddress.parse(endpoint)
        history = scraped(address, _METRICS_S, chosen_levels({}))
        told = history.snapshot()
        assert told is not None, "it has a step"
        taken = told
    else:
        chosen = choose(endpoint, "stepscope snapshot {}")
        with connect(chosen) as client:
            taken = client.snapshot()
        if not publishes(taken.info):
            _print(taken, None, None, as_json)
            return
        history = last_seconds(chosen, LIVE_S, chosen_levels({}))
    _print(taken, verdict_of(history).text, history.figures(None, LIVE_S), as_json)


def _print(
    taken: Snapshot, verdict: str | None, figures: dict[str, float | None] | None, as_json: bool
) -> None:
    if as_json:
        write_json({**msgspec.to_builtins(taken), "verdict": verdict, "figures": figures})
        return
    said = [] if verdict is None else [("verdict", verdict)]
    say(*(f"{name:<10} {text}" for name, text in (*said, *_summary(taken))))


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
