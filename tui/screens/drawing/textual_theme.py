"""The colours of a screen for what Textual itself draws: the background and the palette."""

from typing import Any

from textual.app import App
from textual.theme import Theme

from stepscope.tui.views.theme import BY_MODE, ColourMode


def use_colours(app: App[Any], mode: ColourMode) -> None:
    """Let Textual draw in the colours of this mode; the terminal's own if it has few or none."""
    if mode not in ("dark", "light"):
        app.theme = "ansi-dark"
        return
    colours, name = BY_MODE[mode], f"stepscope-{mode}"
    theme = Theme(
        name,
        primary=colours["accent"],
        foreground=colours["text"],
        background=colours["background"],
        surface=colours["raised"],
        panel=colours["raised"],
        dark=mode == "dark",
    )
    app.register_theme(theme)
    app.theme = name
