"""The tour strip above a page: the chapter, its text, and the keys to continue."""

import textwrap

from stepscope.tui.views.lines import Line, fitted, spread

HEIGHT = 4
_PARTS = {"before": "what comes", "question": "look", "answer": "try"}


def draw(
    title: str,
    part: str,
    text: str,
    keys: tuple[tuple[str, str], ...],
    width: int,
    *,
    is_held: bool,
) -> list[Line]:
    """Return the strip, `HEIGHT` lines: chapter, text, and pairs of a key and what it does."""
    left: Line = ((f" {title} ", "title"), (f" {_PARTS.get(part, '')}", "muted"))
    if is_held and part == "question":
        left = (*left, (": ", "muted"), ("picture held", "caution"))
    right = tuple(run for key, what in keys for run in ((f" {key} ", "key"), (f"{what} ", "muted")))
    lines = [spread(left, right, width)]
    texts = textwrap.wrap(text, width - 2)
    style = "mark" if part == "question" else "text"
    lines += [fitted(((f" {each}", style),), width) for each in texts[: HEIGHT - 1]]
    return [*lines, *[fitted((), width)] * (HEIGHT - len(lines))]
