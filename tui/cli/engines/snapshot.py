"""`stepscope snapshot`: prints the state of an engine, or who changed it."""

from collections.abc import Iterator

import msgspec

from stepscope.engine.adapters.metrics.fetch import MetricsAddress, is_metrics_url
from stepscope.engine.protocol.audit_fold import side_by_side
from stepscope.engine.protocol.commands import GetAudit
from stepscope.engine.protocol.replies import AuditPage
from stepscope.engine.protocol.wire import Audited, EngineInfo, Snapshot
from stepscope.recordings.state.audit_text import change_text, typed_text, who_text
from stepscope.recordings.state.session import SessionState
from stepscope.tui.cli.shared.arguments import find_recording
from stepscope.tui.cli.shared.connect import choose, connect, is_recorded
from stepscope.tui.cli.shared.options import argument, command, flag
from stepscope.tui.cli.shared.output import say, write_json
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.views import format as fmt

_METRICS_S = 2.0  # how long to read a server's metrics: they tell what changed from one to the next


@command(
    "stepscope snapshot --json | jq .kv",
    "stepscope snapshot --audit",
    "stepscope snapshot session.mcap --audit --json | jq '.[] | .who'",
    takes_key=True,
)
def snapshot(
    target: str | None = argument(
        "ENDPOINT|FILE",
        "name of a local engine, ipc://PATH, tcp://HOST:PORT or http://HOST:PORT; with "
        "--audit also a recording or a shipped sample (default: the only local engine)",
    ),
    shows_audit: bool = flag(
        "who changed the engine, and which changes it refused, oldest first", "--audit"
    ),
    as_json: bool = flag(
        "the whole snapshot and the figures of the last minute, or the audit, as JSON", "--json"
    ),
) -> None:
    """Show what an engine or a /metrics page says now.

    In the audit, a name after 'key' was proved with that key. Any other name is only a claim.
    """
    is_server = target is not None and is_metrics_url(target)
    is_file = not is_server and is_recorded(target)
    if shows_audit:
        audit(target, is_file, as_json)
        return
    if is_file:
        raise WrongUsage(f"{target} is a recording: give --audit, or 'stepscope stats {target}'")
    # `--help` needs none of these.
    from stepscope.recordings.history.history import History
    from stepscope.recordings.history.verdict import verdict_at
    from stepscope.tui.cli.recordings.measured import LIVE_S, last_seconds, scraped
    from stepscope.tui.cli.shared.levels import chosen_levels

    history: History | None = None
    if target is not None and is_server:
        history = scraped(MetricsAddress.parse(target), _METRICS_S, chosen_levels({}))
        taken = history.snapshot()
        assert taken is not None, "it has a step"
    else:
        chosen = choose(target, "stepscope snapshot {}")
        with connect(chosen) as client:
            taken = client.snapshot()
        if taken.info.publishes:
            history = last_seconds(chosen, LIVE_S, chosen_levels({}))
            with connect(chosen) as client:  # again: verdict and figures are of one moment
                taken = client.snapshot()
    verdict = figures = None
    if history is not None:
        state = SessionState.from_snapshot(taken)
        verdict = verdict_at(history, state, None, history.windows.latency()).text
        figures = history.windows.figures(None, LIVE_S)
    if as_json:
        write_json({**msgspec.to_builtins(taken), "verdict": verdict, "figures": figures})
        return
    said = [] if verdict is None else [("verdict", verdict)]
    say(*(f"{name:<10} {text}" for name, text in (*said, *_summary(taken))))


def _summary(taken: Snapshot) -> Iterator[tuple[str, str]]:
    info = taken.info
    state = SessionState.from_snapshot(taken)
    by_status = {"running": state.num_running, "waiting": state.num_waiting}
    if state.totals is None or taken.requests:
        by_status = {"running": 0, "waiting": 0, "preempted": 0}
        for request in taken.requests:
            by_status[request.status] = by_status.get(request.status, 0) + 1
    elif not state.is_load_known:
        by_status = {}
    where = info.control_endpoint or f"http://{info.http_endpoint}"
    yield "engine", f"{info.name} (pid {info.pid or 'unknown'}) on {where}"
    yield "model", ", ".join(filter(None, (info.model, info.architecture, info.dtype)))
    if info.role is not None:
        yield "role", ", then ".join(filter(None, (info.role, info.decode_engine)))
    if info.device is not None:
        yield "device", ", attention by ".join(filter(None, (info.device, info.attention_backend)))
    yield "state", f"{taken.state}, step {taken.step:,}"
    yield "requests", ", ".join(f"{n} {status}" for status, n in by_status.items()) or "unknown"
    if (kv := taken.kv) is not None:
        share = kv.used / (kv.num_blocks or 1)
        rest = f"{kv.cached:,} cached, {kv.empty:,} empty"
        yield "KV blocks", f"{kv.used:,} used ({share:.0%}), {rest}"
    elif state.kv_share is not None:
        yield "KV cache", f"{state.kv_share:.0%} used"
    if state.is_summed_up:
        yield "knobs", f"unknown: {info.imported or 'a page of metrics'} does not tell them"
        return
    yield "workload", taken.workload or "none of its own"
    knobs = ", ".join(f"{name}={typed_text(value)}" for name, value in taken.knobs.items())
    yield "knobs", f"version {taken.knobs_version}: {knobs}"
    if info.with_tokens:
        yield "privacy", "everyone who watches or records gets prompts and outputs"
    if (control := taken.control) is not None:
        counts = {
            "bad messages": control.bad, "commands beyond a client's share": control.limited,
            "commands of viewers": control.denied, "connections without a key": control.keyless,
        }  # fmt: skip
        yield "refused", ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    if taken.num_dropped:
        yield "dropped", f"{taken.num_dropped:,} telemetry messages so far"


def audit(target: str | None, is_file: bool, as_json: bool) -> None:
    """Print the audit trail of an engine (None: the only one) or a recording, oldest first."""
    info, parts, missing = _of_file(target or "") if is_file else _of_engine(target)
    entries = [entry for part in parts for entry in part]
    if as_json:
        write_json(
            [{**msgspec.structs.asdict(e), "wall_ns": info.wall_at(e.time_ns)} for e in entries]
        )
        return
    nothing = "no change is recorded in it" if is_file else "no changes yet"
    say(*filter(None, (missing, "" if entries else nothing)))
    for entry in (entry for part in parts for entry in side_by_side(part)):
        step = "refused" if entry.code else f"step {entry.effective_step or 0:,}"
        say(
            f"{entry.number:>5}  {fmt.clock(info.wall_at(entry.time_ns))}  {step:>14}  "
            f"{who_text(entry):<20}  {change_text(entry)}"
        )


def _of_engine(target: str | None) -> tuple[EngineInfo, list[list[Audited]], str]:
    with connect(choose(target, "stepscope snapshot {} --audit")) as client:
        entries: list[Audited] = []
        after, newest, missing = 0, 1, ""
        while after < newest:
            page = client.ask(GetAudit(after=after))
            assert isinstance(page, AuditPage)
            missing = missing or page.detail
            entries += page.entries
            after, newest = (entries[-1].number, page.newest) if page.entries else (0, 0)
        return client.info(), [entries], missing


def _of_file(target: str) -> tuple[EngineInfo, list[list[Audited]], str]:
    from stepscope.recordings.file.messages import indexes  # loads mcap, which a snapshot does not
    from stepscope.recordings.file.reader import Position, Recording

    with Recording(find_recording(target)) as recording:
        info = recording.info
        first, _ = recording.keyframe_before(Position(0, 0))
        said = [each for _, index in indexes(recording) for _, each in index.said]
    since = [each for each in said if isinstance(each, Audited)]
    # Of a damaged file, the first keyframe that can be read may come after some of them.
    before = [each for each in first.audit or () if not since or each.number < since[0].number]
    num_before = since[0].number - 1 if since else max((each.number for each in before), default=0)
    few = f"the first {num_before:,} entries are from before the recording, which has "
    few += f"{len(before):,} of them, alike ones as one"
    return info, [before, since], few if num_before > len(before) else ""
