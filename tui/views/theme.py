"""Tables of glyphs and of styles. Widgets name a style, never a colour.

Every state has its own glyph, so the characters alone show what happens, and colours can be left
out. People with protanopia or deuteranopia can still tell apart the colours of prefill, decode,
cached and preempted. Red is only for late tokens and for engines that are down.
"""

from collections.abc import Mapping
from functools import cache
from typing import Literal, TypeAlias

from rich.style import Style

from stepscope.recordings.attribution.causes import Cause
from stepscope.recordings.state.lanes import Cell
from stepscope.recordings.state.limits import Limit

ThemeName: TypeAlias = Literal["dark", "light"]
ColourMode: TypeAlias = Literal["dark", "light", "ansi", "none"]

# In the order of `Cell`; the last is a step that still runs, without its token (on the time axis).
_LANES = (
    (" ", "text"), ("?", "muted"), ("·", "idle"), ("╌", "idle"), ("░", "cached"), ("━", "decode"),
    ("═", "multi"), ("▓", "prefill"), ("▒", "prefill"), ("▓", "prefill"), ("▒", "prefill"),
    ("●", "finished"), ("○", "aborted"), ("✗", "preempted"), ("─", "idle"),
)  # fmt: skip
assert len(_LANES) == len(Cell) + 1
LANE_GLYPHS = "".join(glyph for glyph, _ in _LANES)
LATE = "!"  # a token that came late
LANE_STYLES = dict(_LANES) | {LATE: "breach"}

LEVELS = "▁▂▃▄▅▆▇█"  # one to eight eighths of a cell

# States of KV blocks, most valuable last: of equally frequent states a cell shows the later one.
KV_EMPTY, KV_CACHED, KV_USED, KV_SHARED = range(4)
KV_GLYPHS = "·░▓█"
_KV_TO_ASCII = str.maketrans(KV_GLYPHS, ".:+#")  # its own table: elsewhere ▓ (prefill) is `#`
KV_STYLES = ("kv_empty", "kv_cached", "kv_used", "kv_shared")
_KV_MEANINGS = ("empty", "cached and free", "used", "shared by requests")
KV_LEGEND = tuple(zip(KV_GLYPHS, KV_STYLES, _KV_MEANINGS, strict=True))[::-1]

# Causes of a request's time. If a cell has several, the one that is last here is shown.
CAUSE_GLYPHS: Mapping[Cause, tuple[str, str]] = {
    "idle": ("–", "muted"),
    "between": ("┊", "muted"),
    "step": ("━", "decode"),
    "prompt": ("▓", "prefill"),
    "prefill": ("▚", "caution"),
    "recompute": ("▒", "prefill"),
    "budget": ("╌", "caution"),
    "left_out": ("┄", "caution"),
    "transfer": ("→", "prefill"),
    "front_end": ("‹", "muted"),
    "delivery": ("›", "muted"),
    "queued": ("·", "idle"),
    "unknown": ("?", "muted"),
    "held_up": ("≠", "caution"),
    "descheduled": ("¦", "caution"),
    "gc": ("◊", "caution"),
    "jit": ("ƒ", "caution"),
    "stopped": ("■", "caution"),
    "rank": ("≡", "caution"),
    "paused": ("‖", "mark"),
    "preempted": ("✗", "preempted"),
}

# What limited a step: letters for the row below the budget chart. Where a limit held for many
# steps, the row shows its name instead.
LIMIT_LETTERS: Mapping[Limit, str] = {
    "budget": "B",
    "seats": "S",
    "kv": "K",
    "mode": "M",
    "threshold": "T",
    "paused": "‖",
    "work": "·",
    "lora": "L",
    "grammar": "G",
    "remote_kv": "R",
    "encoder": "E",
    "cadence": "C",
}

LEGEND = (
    # glyph, style, what it means
    ("▓", "prefill", "prefill chunk (the next chunk alternates with ▒)"),
    ("━", "decode", "decode: one token for each running request"),
    ("═", "multi", "decode, several tokens accepted at once"),
    ("░", "cached", "prefix hit: prompt tokens that were cached and skipped"),
    ("·", "idle", "waiting, or unused budget (its dots end at the budget line)"),
    ("╌", "idle", "running, but left out of this step; in the budget chart: padding"),
    ("─", "idle", "its step runs, a client waits; in the budget chart: largest graph"),
    ("▒", "caution", "in the budget chart: a step in flight (its decodes: ╍)"),
    ("✗", "preempted", "preempted: its blocks are freed and computed again later"),
    ("●", "finished", "finished"),
    ("○", "aborted", "aborted or rejected"),
    ("◆", "mark", "a knob change took effect here"),
    ("▼", "mark", "your mark"),
    (
        "B",
        "limit_budget",
        "limit: budget; S seats, K KV blocks, M mode, T threshold, C cadence, ‖ paused",
    ),
    ("!", "breach", "breaks the service level: a figure, or a token of this step"),
    ("?", "muted", "lost steps, or an unknown value"),
)

# One ASCII character for each glyph that widgets use, so that a line keeps its width.
_ASCII = {
    **dict(zip("▓▒━╍═░·✗●○◆▼", "#%=-*:.Xo0^v", strict=True)),
    **dict(zip(LEVELS, "___--###", strict=True)),
    **dict(zip("▔▀", "'#", strict=True)),  # for bars that hang down
    **dict(zip("─╌│┤├┬┴┼╭╮╰╯", "-~|+++++++++", strict=True)),
    **dict(zip("▐▌▲→←↑↓⇧▶◀⟨⟩", "[]^><^v^><<>", strict=True)),
    **dict(zip("×≥≤–—…▚┄‖┊", "x><--~&;H,", strict=True)),
    **dict(zip("└◂▸≈≠±‹›≡", "+<>~!~()E", strict=True)),
    **dict(zip("¦◊ƒ■", "|$f@", strict=True)),
}
TO_ASCII = str.maketrans(_ASCII)


# name: on dark, on light, of a terminal's sixteen colours
_COLOURS = {
    "background": ("#0e1116", "#fbfaf7", "default"),
    "raised": ("#2b3546", "#dde4ee", "bright_black"),  # behind the cursor, a selected lane
    "text": ("#d8dee6", "#1f2630", "default"),
    "muted": ("#8b95a5", "#5f6977", "default"),
    "frame": ("#434d5c", "#b3bac4", "bright_black"),
    "prefill": ("#f0a202", "#a35f00", "yellow"),
    "decode": ("#4fb3ff", "#0a62b8", "cyan"),
    "multi": ("#f2f2f2", "#101010", "bright_white"),
    "cached": ("#3b8ec9", "#4d86b0", "blue"),
    "idle": ("#7a7a7a", "#8d8d8d", "bright_black"),
    "alarm": ("#ff5d5d", "#c01c28", "red"),
    "accent": ("#c792ea", "#8338b8", "magenta"),
    "good": ("#7fc98a", "#20713a", "green"),
    "caution": ("#e6c34a", "#7d6200", "yellow"),
    "held": ("#3d7fae", "#4a80aa", "cyan"),  # KV blocks in use: calm, as they cover a large area
    "badge_text": ("#0e1116", "#ffffff", "black"),
}
BY_MODE: Mapping[ColourMode, Mapping[str, str]] = {
    "dark": {name: colours[0] for name, colours in _COLOURS.items()},
    "light": {name: colours[1] for name, colours in _COLOURS.items()},
    "ansi": {name: colours[2] for name, colours in _COLOURS.items()},
}

# As rich writes a style, with the names of colours from above.
_STYLES = {
    "text": "text", "strong": "bold text", "muted": "muted", "frame": "frame",
    "title": "bold text", "prefill": "prefill", "decode": "decode", "multi": "multi",
    "cached": "cached", "idle": "idle", "preempted": "bold badge_text on caution",
    "finished": "text", "aborted": "text", "mark": "bold accent", "breach": "bold alarm",
    "good": "good", "caution": "bold caution", "key": "bold accent",
    "kv_empty": "idle", "kv_cached": "idle",
    "limit_budget": "badge_text on prefill", "limit_seats": "badge_text on decode",
    "limit_kv": "badge_text on held", "limit_paused": "badge_text on accent",
    "limit_other": "badge_text on idle", "kv_used": "held", "kv_shared": "multi",
    "badge_live": "bold badge_text on good", "badge_paused": "bold badge_text on caution",
    "badge_replay": "bold badge_text on accent", "badge_down": "bold badge_text on alarm",
    "edit": "bold text on raised", "selected": "bold background on text",
}  # fmt: skip


@cache
def styles(mode: ColourMode) -> Mapping[str, Style]:
    """Return style name -> rich style for one colour mode ("none" has no colours)."""
    if mode == "none":
        return _without_colour()
    colours = BY_MODE[mode]

    def style(words: str) -> Style:
        full = words if " on " in words else f"{words} on background"
        return Style.parse(" ".join(colours.get(word, word) for word in full.split()))

    found = {name: style(words) for name, words in _STYLES.items()}
    if mode == "ansi":
        found["edit"] = Style(bold=True, reverse=True)
        found["selected"] = Style(bold=True, underline=True)
    return found


def _without_colour() -> Mapping[str, Style]:
    plain, bold = Style(), Style(bold=True)
    reverse = Style(reverse=True, bold=True)
    looks = dict.fromkeys(styles("dark"), plain)
    looks |= dict.fromkeys(("strong", "title", "mark", "breach", "caution", "key"), bold)
    looks |= {name: reverse for name in looks if name.startswith(("badge_", "limit_"))}
    underlined = Style(bold=True, underline=True)
    return looks | {"preempted": reverse, "edit": reverse, "selected": underlined}


class Skin:
    """How one screen looks: styles by name (`+cursor`: highlighted), block or ASCII glyphs."""

    def __init__(self, mode: ColourMode = "dark", ascii_only: bool = False) -> None:
        self.mode: ColourMode = mode
        self.ascii_only = ascii_only
        self.styles = dict(styles(mode))
        ground = self.styles["text"].bgcolor
        # A blank looks the same in all of these styles.
        self.plain_styles = frozenset(
            name
            for name, style in self.styles.items()
            if style.bgcolor == ground and not style.reverse
        )
        for name, style in list(self.styles.items()):
            self.styles[f"{name}+cursor"] = self._raised(style, name in self.plain_styles)

    def _raised(self, style: Style, is_plain: bool) -> Style:
        if self.mode in ("none", "ansi"):
            # No one of sixteen colours surely differs from the background and from all others.
            return style + (Style(reverse=True) if is_plain else Style(underline=True))
        raised = Style(bgcolor=BY_MODE[self.mode]["raised"])
        if style.bgcolor == raised.bgcolor:
            return style + Style(underline=True)
        # A style with its own background gets that colour as its foreground.
        return style + raised if is_plain else style + Style(color=style.bgcolor) + raised

    def text(self, text: str, style: str = "text") -> str:
        """Return `text`, as wide as it is, without the glyphs that this screen may not use."""
        if not self.ascii_only or text.isascii():
            return text
        table = _KV_TO_ASCII if style.startswith("kv_") else TO_ASCII
        return text.translate(table).encode("ascii", "replace").decode()


def colour_mode(theme: ThemeName, color_system: str | None, no_color: bool) -> ColourMode:
    """Return the mode for a theme on a terminal, whose colours are named as rich does."""
    if no_color or color_system is None:
        return "none"
    return "ansi" if color_system in ("standard", "windows") else theme
