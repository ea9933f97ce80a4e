"""`Stepper`: a line above the footer to set one number, by typing or with the arrow keys.

It is used for the token budget.
"""

from collections.abc import Callable
from typing import NamedTuple

from textual.geometry import Region

from stepscope.engine.protocol.wire import KnobSpec, KnobValue
from stepscope.tui.screens.overlays.engine_watch import EngineWatch
from stepscope.tui.screens.overlays.overlay import Overlay
from stepscope.tui.session.control.knob_change import KnobChange
from stepscope.tui.views.lines import Line, clean, fitted, length_of
from stepscope.tui.views.theme import Skin

_STEPS = {"left": -0.05, "right": 0.05, "shift+left": -0.25, "shift+right": 0.25}
_BAR_WIDTH = 24
_LOOK_S = 0.5  # between two checks for changes by others
_HINTS = (
    "  ←/→ 5 %  ⇧←/→ 25 %  digits  Enter applies  Esc drops",
    "  ←/→ 5 %  digits  Enter applies  Esc drops",
    "  Enter applies  Esc drops",
    "  Enter, Esc",
)


_AGAIN = "Esc, then again"
_LEAST_NAME = 8  # do not shorten an author's name below this


class ByNow(NamedTuple):
    """The value that the engine has now, and who set it, if that is known."""

    value: KnobValue | None
    who: str = ""
    version: int = 0  # of the engine's knobs
    spec: KnobSpec | None = None  # None if the engine that answers now has no such knob


class Stepper(Overlay[KnobChange]):
    """Asks for a value of an int knob within its bounds.

    Enter closes with the value, Escape without.

    The change that it returns has the version of the knobs when the stepper opened, or when another
    engine began to answer. By that version the engine notices changes made since.

    Args:
        value: the engine's value.
        by_now: returns the engine's current value.
        chosen: the value to show first; None means `value`.
        watch: watches the engine that has the knob.
    """

    def __init__(
        self,
        skin: Skin,
        spec: KnobSpec,
        value: int,
        by_now: Callable[[], ByNow],
        chosen: int | None = None,
        watch: EngineWatch | None = None,
    ) -> None:
        super().__init__(skin)
        self._by_now = by_now
        self._watch = watch
        self._value = value if chosen is None else chosen
        self._typed = ""
        self._begin(spec, value, by_now().version)

    def _begin(self, spec: KnobSpec, value: int, version: int) -> None:
        """Start from this value of the engine, and base the change on this version of its knobs."""
        self._spec, self._before, self._version = spec, value, version
        self._low = int(spec.low if spec.low is not None else 0)
        self._high = int(spec.high if spec.high is not None else max(value * 4, 1))

    def place(self, width: int, height: int) -> Region:
        return Region(0, max(0, height - 2), width, 1)

    def lines(self, width: int, height: int) -> list[Line]:
        share = (self._value - self._low) / max(1, self._high - self._low)
        bar_width = _BAR_WIDTH if width >= 100 else _BAR_WIDTH // 3
        full = round(max(0.0, min(1.0, share)) * bar_width)
        shown = f"{self._typed}_" if self._typed else f"{self._value}"
        line: Line = (
            (f" {self._spec.name} ", "edit"),
            (f"{self._before} → ", "edit"),
            (f"[ {shown:>7} ]", "badge_paused"),
        )
        bar: Line = (
            (" ", "edit"),
            ("█" * full + "·" * (bar_width - full), "edit"),
            (f" {self._low}..{self._high}", "edit"),
        )
        room = width - length_of(line) - 2
        trouble = None if self._watch is None else self._watch.trouble(room)
        wrong = trouble or self._wrong() or self._overtaken(room)
        if wrong is None or length_of((*line, *bar)) + 2 + len(wrong) <= width:
            line = (*line, *bar)
        if wrong:
            line = (*line, (f"  {wrong}", "caution"))
        else:
            room = width - length_of(line)
            hints = (self.hint(hint) for hint in _HINTS)
            line = (*line, (next((hint for hint in hints if len(hint) <= room), ""), "edit"))
        line = fitted(line, width)
        return [tuple((text, "edit" if style == "text" else style) for text, style in line)]

    def pressed(self, key: str, character: str | None) -> None:
        if key == "enter":
            self._look_again()
            is_admitted = self._watch is None or self._watch.admits()
            if self._wrong() is None and is_admitted:
                self.dismiss(KnobChange(self._spec.name, self._value, self._version))
        elif key in _STEPS:
            self._typed = ""
            change = max(1, round(abs(_STEPS[key]) * self._value))
            moved = self._value + (change if _STEPS[key] > 0 else -change)
            self._value = max(self._low, min(self._high, moved))
        elif key == "backspace":
            self._type(self._typed[:-1])
        elif character is not None:
            self.insert(character)

    def insert(self, text: str) -> None:
        digits = text.strip().replace(",", "")  # screens write 2,048
        if digits.isascii() and digits.isdigit():
            self._type((self._typed + digits)[:9])

    def _type(self, text: str) -> None:
        self._typed = text
        self._value = int(text) if text else self._before

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(_LOOK_S, self._look_and_redraw)

    def _look_and_redraw(self) -> None:
        self._look_again()
        self.redraw()

    def _look_again(self) -> None:
        """Check whether another engine answers; if so, base the chosen value on its knobs."""
        if self._watch is None or not self._watch.look():
            return
        now = self._by_now()
        if now.spec is not None and isinstance(now.value, int):
            self._begin(now.spec, now.value, now.version)

    def _overtaken(self, room: int) -> str | None:
        """Return who has changed the value since the stepper opened, and to what.

        The text is shortened to fit `room`. None if the value is still the same.
        """
        value, who, *_ = self._by_now()
        if value == self._before:
            return None
        who = clean(who, max(0, room))
        rest = f" set {value}: {_AGAIN}"
        short = f"it is {value} now: {_AGAIN}"
        if not who or room - len(rest) < min(_LEAST_NAME, len(who)):
            return short
        whole = f"{who} changed it to {value}: {_AGAIN}"
        return whole if len(whole) <= room else clean(who, room - len(rest)) + rest

    def _wrong(self) -> str | None:
        if self._low <= self._value <= self._high:
            return None
        return f"must be between {self._low} and {self._high}"
