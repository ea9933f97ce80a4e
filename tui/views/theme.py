"""Tables of glyphs and of styles. Widgets name a style, never a colour.

Every state has its own glyph, so the characters alone show what happens, and colours can be left
out. People with protanopia or deuteranopia can still tell apart the colours of prefill, decode,
cached and preempted. Red is only for late tokens and for engines that are down.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from rich.style import Style

from stepscope.recordings.attribution.causes import Cause
from stepscope.recordings.state.series.lanes import Cell
from stepscope.recordings.state.series.limits import Limit

ThemeName: TypeAlias = Literal["dark", "light"]
ColourMode: TypeAlias = Literal["dark", "light", "ansi", "none"]

# In the order of `Cell`; the last is a step that still runs, without its token (on the time axis).
LANE_GLYPHS = " ?·╌░━═▓▒▓▒●○✗─"
_LANE_STYLES = (
    "text",
    "muted",
    "idle",
    "idle",
    "cached",
    "decode",
    "multi",
    "prefill",
    "prefill",
    "prefill",
    "prefill",
    "finished",
    "aborted",
    "preempted",
    "idle",
)
LATE = "!"  # a token that came late
assert len(LANE_GLYPHS) == len(_LANE_STYLES) == len(Cell) + 1
LANE_STYLES = dict(zip(LANE_GLYPHS, _LANE_STYLES, strict=True)) | {LATE: "breach"}

LEVELS = "▁▂▃▄▅▆▇█"  # one to eight eighths of a cell

# States of KV blocks, most valuable last: of equally frequent states a cell shows the later one.
KV_EMPTY, KV_CACHED, KV_USED, KV_SHARED = range(4)
KV_GLYPHS = "·░▓█"
_KV_TO_ASCII = str.maketrans(KV_GLYPHS, ".:+#")  # its own table: elsewhere ▓ (prefill) is `#`
KV_STYLES = ("kv_empty", "kv_cached", "kv_used", "kv_shared")
KV_LEGEND = (
    ("█", "kv_shared", "shared by requests"),
    ("▓", "kv_used", "used"),
    ("░", "kv_cached", "cached and free"),
    ("·", "kv_empty", "empty"),
)

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
}

LEGEND = (
    # glyph, style, what it means
    ("▓", "prefill", "prefill chunk (the next chunk alternates with ▒)"),
    ("━", "decode", "decode: one token for each running request"),
    ("═", "multi", "decode, several tokens accepted at once"),
    ("░", "cached", "prefix hit: prompt tokens that were cached and skipped"),
    ("·", "idle", "waiting, or unused budget (its dots end at the budget line)"),
    ("╌", "idle", "running, but left out of this step; in the budget chart: padding"),
    ("─", "idle", "on the time axis: its step still runs; the token comes at the end"),
    ("▒", "caution", "in the budget chart: a step in flight (its decodes: ╍)"),
    ("✗", "preempted", "preempted: its blocks are freed and computed again later"),
    ("●", "finished", "finished"),
    ("○", "aborted", "aborted or rejected"),
    ("◆", "mark", "a knob change took effect here"),
    ("▼", "mark", "your mark"),
    (
        "B",
        "limit_budget",
        "limit: token budget; S seats, K KV blocks, M mode, T threshold, ‖ paused",
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
    **dict(zip("▏└◂▸≈≠", "|+<>~!", strict=True)),
}
TO_ASCII = str.maketrans(_ASCII)


@dataclass(frozen=True, slots=True)
class _Colours:
    background: str
    raised: str  # behind the cursor, a selected lane, an open editor
    text: str
    muted: str
    frame: str
    prefill: str
    decode: str
    multi: str
    cached: str
    idle: str
    alarm: str
    accent: str
    good: str
    caution: str
    held: str  # KV blocks in use: a calm tone, because they cover a large area
    badge_text: str


_DARK = _Colours(
    background="#0e1116",
    raised="#2b3546",
    text="#d8dee6",
    muted="#8b95a5",
    frame="#434d5c",
    prefill="#f0a202",
    decode="#4fb3ff",
    multi="#f2f2f2",
    cached="#3b8ec9",
    idle="#7a7a7a",
    alarm="#ff5d5d",
    accent="#c792ea",
    good="#7fc98a",
    caution="#e6c34a",
    held="#3d7fae",
    badge_text="#0e1116",
)
_LIGHT = _Colours(
    background="#fbfaf7",
    raised="#dde4ee",
    text="#1f2630",
    muted="#5f6977",
    frame="#b3bac4",
    prefill="#a35f00",
    decode="#0a62b8",
    multi="#101010",
    cached="#4d86b0",
    idle="#8d8d8d",
    alarm="#c01c28",
    accent="#8338b8",
    good="#20713a",
    caution="#7d6200",
    held="#4a80aa",
    badge_text="#ffffff",
)
_ANSI = _Colours(
    background="default",
    raised="bright_black",
    text="default",
    muted="default",
    frame="bright_black",
    prefill="yellow",
    decode="cyan",
    multi="bright_white",
    cached="blue",
    idle="bright_black",
    alarm="red",
    accent="magenta",
    good="green",
    caution="yellow",
    held="cyan",
    badge_text="black",
)
_BY_MODE: Mapping[ColourMode, _Colours] = {"dark": _DARK, "light": _LIGHT, "ansi": _ANSI}


@cache
def styles(mode: ColourMode) -> Mapping[str, Style]:
    """Return style name -> rich style for one colour mode ("none" has no colours)."""
    if mode == "none":
        return _without_colour()
    c = _BY_MODE[mode]

    def on(colour: str, *, bold: bool = False, background: str = c.background) -> Style:
        return Style(color=colour, bgcolor=background, bold=bold)

    return {
        "text": on(c.text),
        "strong": on(c.text, bold=True),
        "muted": on(c.muted),
        "frame": on(c.frame),
        "title": on(c.text, bold=True),
        "prefill": on(c.prefill),
        "decode": on(c.decode),
        "multi": on(c.multi),
        "cached": on(c.cached),
        "idle": on(c.idle),
        "preempted": on(c.badge_text, bold=True, background=c.caution),
        "finished": on(c.text),
        "aborted": on(c.text),
        "mark": on(c.accent, bold=True),
        "breach": on(c.alarm, bold=True),
        "good": on(c.good),
        "caution": on(c.caution, bold=True),
        "key": on(c.accent, bold=True),
        "kv_empty": on(c.idle),
        "kv_cached": on(c.idle),
        "limit_budget": on(c.badge_text, background=c.prefill),
        "limit_seats": on(c.badge_text, background=c.decode),
        "limit_kv": on(c.badge_text, background=c.held),
        "limit_paused": on(c.badge_text, background=c.accent),
        "limit_other": on(c.badge_text, background=c.idle),
        "kv_used": on(c.held),
        "kv_shared": on(c.multi),
        "badge_live": on(c.badge_text, bold=True, background=c.good),
        "badge_paused": on(c.badge_text, bold=True, background=c.caution),
        "badge_replay": on(c.badge_text, bold=True, background=c.accent),
        "badge_down": on(c.badge_text, bold=True, background=c.alarm),
        "edit": Style(bold=True, reverse=True)
        if mode == "ansi"
        else on(c.text, bold=True, background=c.raised),
        "selected": Style(bold=True, underline=True)
        if mode == "ansi"
        else on(c.background, bold=True, background=c.text),
    }


def _without_colour() -> Mapping[str, Style]:
    plain, bold = Style(), Style(bold=True)
    reverse = Style(reverse=True, bold=True)
    looks = dict.fromkeys(styles("dark"), plain)
    looks |= dict.fromkeys(("strong", "title", "mark", "breach", "caution", "key"), bold)
    looks |= {name: reverse for name in looks if name.startswith(("badge_", "limit_"))}
    underlined = Style(bold=True, underline=True)
    return looks | {"preempted": reverse, "edit": reverse, "selected": underlined}


class Skin:
    """How one screen looks: its colours, and whether it uses block or ASCII glyphs.

    Attributes:
        styles: by name; a name that ends in `+cursor` means the same style, highlighted.
    """

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
        raised = Style(bgcolor=_BY_MODE[self.mode].raised)
        if style.bgcolor == raised.bgcolor:
            return style + Style(underline=True)
        # A style with its own background gets that colour as its foreground.
        return style + raised if is_plain else style + Style(color=style.bgcolor) + raised

    @property
    def background(self) -> str:
        """The background colour of the screen, as Textual names colours."""
        colours = _BY_MODE.get(self.mode)
        if colours is None or colours.background == "default":
            return "ansi_default"
        return colours.background

    def text(self, text: str, style: str = "text") -> str:
        """Return `text` with the glyphs replaced that this screen may not use.

        Its width stays the same.
        """
        if not self.ascii_only or text.isascii():
            return text
        table = _KV_TO_ASCII if style.startswith("kv_") else TO_ASCII
        return text.translate(table).encode("ascii", "replace").decode()


def colour_mode(theme: ThemeName, color_system: str | None, no_color: bool) -> ColourMode:
    """Return the colour mode to use for a theme on this terminal.

    Args:
        color_system: as rich names it: None, "standard" (16 colours), "256" or "truecolor".
        no_color: whether the user asked for no colours (NO_COLOR).
    """
    if no_color or color_system is None:
        return "none"
    return "ansi" if color_system in ("standard", "windows") else theme
