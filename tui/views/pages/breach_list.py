"""The list of late tokens on the latency page: which are in it, their order, and the heading.

A late token is called a breach: its TTFT or ITL is above the service level.
"""

from stepscope.recordings.attribution.late_sweep import Breach
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Line, length_of

MAX_BREACHES = 200


def listed(frame: Frame) -> list[Breach]:
    """Return the breaches up to the cursor, one per step and kind, in the order that was chosen."""
    windows = frame.history.windows
    if frame.view.longest_first:
        return windows.longest(frame.cursor, MAX_BREACHES, _first_kind(frame))
    return windows.breaches(frame.cursor, MAX_BREACHES)[::-1]


def heading(frame: Frame, room: int) -> Line:
    """Return how many tokens are late, their order and its key, in as many words as fit."""
    order = (f"  {_order(frame)}", "muted")
    late = frame.history.windows.late(frame.cursor)
    if not late.num_breaches and not frame.tells_requests:
        return (("breaches", "title"), order)
    tokens = "1 token" if late.num_tokens == 1 else f"{late.num_tokens:,} tokens"
    steps = "1 step" if late.num_steps == 1 else f"{late.num_steps:,} steps"
    # Count tokens, as `explain` does: several may be late in a step, but a line is a step and kind.
    in_full = f"{tokens} late in {steps}" if late.num_breaches else "0 tokens late"
    of_what = _of_what(frame)
    in_short = f"{late.num_tokens:,} late"
    forms = [f"{in_full}{of_what}", f"{in_short} in {steps}{of_what}", f"{in_short}{of_what}"]
    forms.append(forms[-1].replace("the cursor", "here"))
    if late.num_breaches > MAX_BREACHES:
        which = "longest" if frame.view.longest_first else "last"
        forms.insert(0, f"{forms[0]}, the {which} {MAX_BREACHES} shown")
    lines: list[Line] = [((f"breaches ({form})", "title"), order) for form in forms]
    return next((line for line in lines if length_of(line) <= room), lines[-1])


def _of_what(frame: Frame) -> str:
    """Return to what part of the session the number of late tokens applies; empty if to all."""
    end = None if frame.extent is None else frame.extent[1]
    is_at_end = frame.cursor is None or end is None or frame.cursor >= end
    in_memory = "" if frame.is_whole else " in memory"
    return in_memory if is_at_end else f"{in_memory} up to the cursor"


def _first_kind(frame: Frame) -> str:
    """Return the kind whose breaches come first: ITL, which longer first waits would hide."""
    return "TTFT" if frame.view.latency == "ttft" else "ITL"


def _order(frame: Frame) -> str:
    key = frame.key("reverse")
    if frame.view.longest_first:
        return f"longest {_first_kind(frame)} first ({key}: newest)"
    return f"newest first ({key}: longest)"
