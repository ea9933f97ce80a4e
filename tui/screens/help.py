"""The help page: the keys that work here, and how to read the glyphs. Made from the tables."""

from textual.geometry import Region

from stepscope.tui.actions import GROUPS, Abilities
from stepscope.tui.log_file import log_path
from stepscope.tui.screens.overlay import Overlay
from stepscope.tui.theme import LEGEND, Skin
from stepscope.tui.widgets.lines import Line, Run, clean, framed

_READING = (
    "The budget chart has two scales: the rows above show prefill tokens of each step against the",
    "token budget (the dotted line); the row below says which steps decoded, its label how many of",
    "the max_num_seqs seats did at the cursor.",
    "Below it each request has a lane; a column is the same step in both. A column that merges",
    "several steps shows the worst of them: preempted, then ended, then prefill, then decode.",
    "Latencies are exact samples of the last minute, from the engine's own clock.",
)


def help_lines(abilities: Abilities) -> list[Line]:
    """The whole page, without its frame."""
    lines: list[Line] = []
    available = list(abilities.available())
    for group, name in GROUPS.items():
        actions = [action for action in available if action.group == group]
        if not actions:
            continue
        lines += [(), ((f" {name}", "title"),)]
        for action in actions:
            lines.append(((f"   {action.shown:<10}", "key"), (f"{action.help}", "text")))
    lines += [(), ((" Glyphs", "title"),)]
    for glyph, style, meaning in LEGEND:
        lines.append((("   ", "text"), (glyph, style), (f"         {meaning}", "text")))
    kv: tuple[Run, ...] = (
        ("   ", "text"),
        ("█", "kv_shared"),
        ("▓", "kv_used"),
        ("░", "kv_cached"),
        ("·", "kv_empty"),
        ("      KV blocks: shared by requests, used, cached and free, empty", "text"),
    )
    lines += [kv, (), ((" How to read it", "title"),)]
    lines += [((f"   {line}", "text"),) for line in _READING]
    lines += [(), ((f"   Errors are written to {clean(str(log_path()), 80)}", "muted"),)]
    return lines


class HelpPage(Overlay[None]):
    """Scrolls; any other key closes it."""

    def __init__(self, skin: Skin, abilities: Abilities) -> None:
        super().__init__(skin)
        self._content = help_lines(abilities)
        self._first = 0

    def place(self, width: int, height: int) -> Region:
        box_width, box_height = min(width, 110), min(height, len(self._content) + 4)
        return Region((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)

    def lines(self, width: int, height: int) -> list[Line]:
        self._first = max(0, min(self._first, len(self._content) - (height - 2)))
        hint: Line = (("↑/↓ PgUp/PgDn scroll, any other key closes", "muted"),)
        return framed(self._content[self._first :], width, height, (("help", "title"),), hint)

    def pressed(self, key: str, character: str | None) -> None:
        page = max(1, self.size.height - 6)
        steps = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": page, "pageup": -page}
        if key in steps:
            self._first += steps[key]
        else:
            self.dismiss(None)
