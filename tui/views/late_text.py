"""Says why a token was late, in as many words as fit: never half a word, or half a number.

The wait for a late token is split into pieces, each with one cause. What matters least is left out
first: first full names, then causes that took little time. `misses_texts`: how a prompt fared in
the prefix cache, what was hit, and why the rest was not.
"""

import re
from collections.abc import Callable

from stepscope.engine.protocol.wire import PrefixMisses, RequestView
from stepscope.recordings.attribution.causes import WORDS, Late, Piece
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt

_BRACKETS = re.compile(r" \([^)]*\)")
_STEP = re.compile(r"^step [\d,]+ (?!→)")
_TOKENS = re.compile(r",? [\d,]+ tok( again)?(?= →)")


def of_piece(piece: Piece, room: int) -> str:
    """Return the cause of a piece in words, without its duration, in the longest form that fits."""
    return fmt.first_fitting(_forms(piece), room)


def of_wait(late: Late, room: int) -> str:
    """Return the pieces of a wait in words, the longest first; those without room are summed up."""
    parts = late.shown_pieces
    texts = [[f"{_ms(piece.ns)} {form}" for form in _forms(piece)] for piece in parts]
    for level in range(max(map(len, texts))):
        said = "; ".join(forms[min(level, len(forms) - 1)] for forms in texts)
        if len(said) <= room:
            return said
    for number in range(len(parts) - 1, 0, -1):
        said = "; ".join(forms[-1] for forms in texts[:number])
        rest_ns = sum(piece.ns for piece in parts[number:])
        left = f"; {_ms(rest_ns)} in {len(parts) - number} more"
        if len(said) <= room:
            return said + left if len(said + left) <= room else said
    return fmt.first_fitting((*texts[0], f"{_ms(parts[0].ns)} {WORDS[parts[0].cause].label}"), room)


def of_stall(late: Late, room: int) -> str:
    """Return step, cause and duration of a stall, as much of it as fits."""
    text = late.text
    forms = [text, _BRACKETS.sub("", text), _TOKENS.sub("", _BRACKETS.sub("", text))]
    how_long = f"{late.kind} {late.gap_ns / 1e6:.0f} ms"
    forms += [_STEP.sub("", forms[-1]), f"step {late.step:,} → {how_long}", how_long]
    return fmt.first_fitting((*forms, ""), room)


def _forms(piece: Piece) -> list[str]:
    """Return the cause of a piece in words, in several forms from the longest to the shortest."""
    forms = [piece.text]
    if piece.cause == "held_up":
        forms += [f"the machine or the engine was {piece.short}", piece.short]
    forms.append(_BRACKETS.sub("", forms[-1]))
    if piece.cause == "prefill" and piece.request_id is not None:
        name = request_name(piece.request_id)
        forms.append(f"beside {piece.num_tokens:,} prefill tokens of {name}")
    forms.append(_BRACKETS.sub("", piece.short))
    return forms


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.1f} ms"


def parts_of(view: RequestView, misses: PrefixMisses) -> dict[str, int]:
    hit, evicted, diverged = view.num_cached_tokens, misses.num_evicted, misses.num_diverged
    new = view.num_prompt_tokens - hit - evicted - diverged
    return {"hit": hit, "evicted": evicted, "diverged": diverged, "new": new}


def misses_texts(
    view: RequestView, block_size: int | None, clock: Callable[[int], str]
) -> list[str]:
    """Return one or two texts on what a prompt found in the prefix cache; none if not known."""
    if (misses := view.misses) is None:
        return []
    counts = ", ".join(f"{number:,} {name}" for name, number in parts_of(view, misses).items())
    larger = ""
    if misses.num_evicted:
        half, twice = misses.num_more_hits_1_5x, misses.num_more_hits_2x
        larger = f"; a pool 1.5x as large would have hit {half:,} more, 2x {twice:,}"
    why = []
    if misses.evicted_ns is not None and misses.evicted_by is not None:
        when, who = clock(misses.evicted_ns), request_name(misses.evicted_by)
        seconds = (misses.life_ns or 0) / 1e9
        why.append(f"evicted at {when} by {who}, after {seconds:,.1f} s in the cache")
    if misses.diverged_from is not None:
        first = view.num_prompt_tokens - misses.num_diverged
        block = f" (block {first // block_size + 1:,})" if block_size else ""
        other = request_name(misses.diverged_from)
        why.append(f"diverged from {other} at token {first + 1:,}{block}")
    said = f"prompt of {view.num_prompt_tokens:,} tokens: {counts}{larger}"
    return [said, "; ".join(why)] if why else [said]
