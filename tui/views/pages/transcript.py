"""The prompt and the output of a request, if the engine publishes them (`--with-tokens`)."""

from stepscope.recordings.state.transcripts import KnownText
from stepscope.tui.views.lines import Line, clean, framed

MIN_HEIGHT = 4
_PROMPT_SHARE = 3  # the prompt gets a third of the lines if the output needs the rest


def height_for(known: KnownText | None, height: int) -> int:
    """Return the height of the panel on a page of this height; 0 without text or room for it."""
    if known is None or height < 18:
        return 0
    return min(12, max(MIN_HEIGHT, height // 5))


def draw(known: KnownText, last_step: float, width: int, height: int) -> list[Line]:
    """Return the panel: the end of the prompt, and the end of the output as of step `last_step`."""
    room = height - 2
    prompt = _prompt(known)
    output = known.output_text(last_step)
    if not output:
        ids = [each for said in known.said if said.step <= last_step for each in said.token_ids]
        output = _numbers(ids) if any(said.text is None for said in known.said) else ""
    output_lines = _wrapped(output, width - 4) if output else []
    num_prompt = max(1, room // _PROMPT_SHARE, room - len(output_lines))
    prompt_lines = _wrapped(prompt, width - 4)
    shown = [(line, "muted", "◂ ") for line in _tail(prompt_lines, num_prompt)]
    num_left = room - len(shown)
    shown += [(line, "text", "▸ ") for line in _tail(output_lines, num_left)]
    body: list[Line] = []
    before = ""
    for text, style, mark in shown:
        body.append(((mark if mark != before else "  ", style), (text, style)))
        before = mark
    title: Line = (("text", "title"), ("  ◂ prompt  ▸ output, up to the cursor", "muted"))
    return framed(body, width, height, title)


def _prompt(known: KnownText) -> str:
    if known.prompt_text is not None:
        return known.prompt_text
    if known.prompt_token_ids is None:
        return "(not in memory: it arrived too early)"
    return _numbers(known.prompt_token_ids)


def _numbers(token_ids: "tuple[int, ...] | list[int]") -> str:
    return " ".join(map(str, token_ids))


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines of at most `width` cells; its line breaks stay."""
    lines = []
    for paragraph in text.split("\n"):
        safe = clean(paragraph, len(paragraph))
        lines += [safe[at : at + width] for at in range(0, len(safe), width)] or [""]
    return lines


def _tail(lines: list[str], count: int) -> list[str]:
    if len(lines) <= count or count < 1:
        return lines[: max(0, count)]
    return ["…" + lines[-count][1:], *lines[len(lines) - count + 1 :]]
