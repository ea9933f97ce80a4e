"""`stepscope tune --hold`: holds an ITL level by changing the token budget of a running engine."""

import time
from collections.abc import Mapping
from typing import Any

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.autopilot.live_pilot import LivePilot, Moved
from stepscope.recordings.file.service_levels import levels_said, slo_of
from stepscope.recordings.state.audit_text import typed_text
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.errors import StopSignals
from stepscope.tui.cli.shared.levels import chosen_levels, note_own
from stepscope.tui.cli.shared.output import say, write_json_line
from stepscope.tui.session.control.who import who
from stepscope.tui.settings.cli_errors import DONE, FAILED
from stepscope.tui.views.format import plural

_TICK_S = 0.2


def hold(
    target: str | None,
    flags: Mapping[str, Any],
    seconds: float | None,
    *,
    is_shadow: bool,
    as_json: bool,
) -> int:
    """Run the autopilot until a signal, then restore the knobs; exit code 1 if it ended itself."""
    levels = chosen_levels(flags)
    chosen = choose(target, "stepscope tune {} --hold")
    with connect(chosen) as client:
        said = levels_said(client.info())
    note_own(levels, said)
    itl_ms = slo_of(levels, said).itl_ms
    if not as_json:
        what = "says what it would do, changes nothing" if is_shadow else "moves the budget"
        say(
            f"{chosen.name}: holds 95 % of the gaps between tokens within {itl_ms:g} ms; "
            f"{what}; Ctrl-C ends it"
        )
    num_moves, begun_s = 0, time.monotonic()
    with StopSignals() as stop:
        pilot = LivePilot(chosen, itl_ms, who(), is_shadow=is_shadow)
        given_back: Mapping[str, KnobValue] = {}
        try:
            for _ in stop.ticks(_TICK_S, seconds):
                if (moved := pilot.tick(time.monotonic())) is not None:
                    num_moves += 1
                    _print_move(chosen.name, moved, as_json)
                if pilot.ended is not None:
                    break
        finally:
            given_back = pilot.close()
    elapsed_s, late = time.monotonic() - begun_s, pilot.late_share
    if as_json:
        fields = {"late_share": late, "given_back": given_back, "seconds": elapsed_s}
        write_json_line(engine=chosen.name, kind="end", why=pilot.ended, **fields)
    else:
        kept = "no gap between tokens was seen" if late is None else f"{late:.1%} of the gaps late"
        say(
            *([] if pilot.ended is None else [f"ended: {pilot.ended}"]),
            *(f"given back: {name}={typed_text(value)}" for name, value in given_back.items()),
            f"{plural(num_moves, 'move')} in {elapsed_s:.0f} s; {kept}",
        )
    return DONE if pilot.ended is None else FAILED


def _print_move(engine: str, moved: Moved, as_json: bool) -> None:
    before, (changes, reason), step = moved
    if as_json:
        fields = {"old": before, "new": changes, "reason": reason, "step": step}
        write_json_line(engine=engine, kind="move", **fields)
        return
    when = "would set" if step is None else f"step {step:,}:"
    for name, value in changes.items():
        old = typed_text(before[name])
        say(f"{time.strftime('%H:%M:%S')} {when} {name} {old} -> {value} ({reason})")
