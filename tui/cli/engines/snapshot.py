"""`stepscope snapshot`: prints once what an engine is doing now, or who changed it."""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer

from stepscope.engine.adapters.metrics.fetch import MetricsAddress, is_metrics_url
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.audit_fold import side_by_side
from stepscope.engine.protocol.commands import GetAudit
from stepscope.engine.protocol.replies import AuditPage
from stepscope.engine.protocol.silence import publishes
from stepscope.engine.protocol.wire import Audited, EngineInfo, Snapshot
from stepscope.engine.transport.endpoints import find_local
from stepscope.recordings.state.audit_text import change_text, typed_text, who_text
from stepscope.recordings.state.session import SessionState
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.errors import say, write_json
from stepscope.tui.cli.shared.options import example, with_key
from stepscope.tui.cli.shared.recording_path import RECORDING_SUFFIXES, find_recording, is_recorded
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.views import format as fmt

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
    if target is not None and _is_file(target):
        raise WrongUsage(f"{target} is a recording: give --audit, or 'stepscope stats {target}'")
    # `--help` needs none of these.
    from stepscope.recordings.history.verdict import verdict_at
    from stepscope.tui.cli.recordings.measured import LIVE_S, last_seconds, scraped
    from stepscope.tui.cli.shared.levels import chosen_levels

    if target is not None and is_metrics_url(target):
        address = MetricsAddress.parse(target)
        history = scraped(address, _METRICS_S, chosen_levels({}))
        told = history.snapshot()
        assert told is not None, "it has a step"
        taken = told
    else:
        chosen = choose(target, "stepscope snapshot {}")
        with connect(chosen) as client:
            taken = client.snapshot()
        if not publishes(taken.info):
            _print(taken, None, None, as_json)
            return
        history = last_seconds(chosen, LIVE_S, chosen_levels({}))
        with connect(chosen) as client:  # again: the verdict and the figures are of one moment
            taken = client.snapshot()
    state = SessionState.from_snapshot(taken)
    verdict = verdict_at(history, state, None, history.latency())
    _print(taken, verdict.text, history.figures(None, LIVE_S), as_json)


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
    if state.totals is None or taken.requests:
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


def audit(target: str | None, as_json: bool) -> None:
    """Print the audit trail, oldest entry first.

    Args:
        target: a recording or sample, else an engine; None: the only local engine.
    """
    is_file = target is not None and _is_file(target)
    info, entries, missing = _of_file(target or "") if is_file else _of_engine(target)
    if as_json:
        write_json([_as_dict(entry, info) for entry in entries])
        return
    if missing:
        say(missing)
    if not entries:
        say("no changes yet")
    say(*_lines(entries, info))


def _is_file(target: str) -> bool:
    """Whether a target is a recording or a sample; a running engine of that name goes before."""
    if target.endswith(RECORDING_SUFFIXES):
        return True
    if any(each.name == target for each in find_local()):
        return False
    try:
        return is_recorded(find_recording(target))
    except CommandFailed:
        return False


def _of_engine(target: str | None) -> tuple[EngineInfo, list[Audited], str]:
    with connect(choose(target, "stepscope snapshot {} --audit")) as client:
        info = client.info()
        entries: list[Audited] = []
        after, missing = 0, ""
        while True:
            page = client.ask(GetAudit(after=after))
            if not isinstance(page, AuditPage):
                raise CommandFailed(f"the engine answered with {type(page).__name__}")
            missing = missing or page.detail
            entries += page.entries
            if not page.entries or page.entries[-1].number >= page.newest:
                break
            after = page.entries[-1].number
    return info, entries, missing


def _of_file(target: str) -> tuple[EngineInfo, list[Audited], str]:
    from stepscope.recordings.file.reader import Recording  # loads mcap, which a snapshot does not

    found: dict[int, Audited] = {}
    kinds = (wire.TOPICS[Audited], wire.TOPICS[Snapshot])
    with Recording(find_recording(target)) as recording:
        info = recording.info
        for number in range(recording.num_chunks):
            for frame in recording.chunk_frames(number):
                # Of the snapshots, only the first is the engine's: it has the entries from before
                # the recording.
                if frame.topic not in kinds or (frame.topic == kinds[1] and number):
                    continue
                try:
                    message = wire.decode(frame.payload)
                except msgspec.DecodeError:
                    continue  # 'stepscope verify' reports it
                if isinstance(message, Audited):
                    found[message.number] = message
                elif isinstance(message, Snapshot):
                    found |= {each.number: each for each in message.audit or ()}
    entries = [found[number] for number in sorted(found)]
    num_missing = entries[0].number - 1 if entries else 0
    missing = f"the first {num_missing:,} entries are not in this file" if num_missing else ""
    return info, entries, missing


def _lines(entries: list[Audited], info: EngineInfo) -> Iterator[str]:
    for entry in side_by_side(entries):
        step = "refused" if entry.code else f"step {entry.effective_step or 0:,}"
        yield (
            f"{entry.number:>5}  {fmt.clock(_wall_ns(entry, info))}  {step:>14}  "
            f"{who_text(entry):<20}  {change_text(entry)}"
        )


def _wall_ns(entry: Audited, info: EngineInfo) -> int:
    return info.wall_ns + entry.time_ns - info.monotonic_ns


def _as_dict(entry: Audited, info: EngineInfo) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.structs.asdict(entry)
    document["wall_ns"] = _wall_ns(entry, info)
    return document
