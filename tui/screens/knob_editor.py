"""The knob editor: the knobs of the engine with their bounds, or one of them; Enter changes one.

The list shows the engine's current values. A change names the version of the knobs at which the
operator began to type: if another client was quicker, the engine refuses it. So does another engine
that answers by then.
"""

from collections.abc import Callable, Sequence

from textual.geometry import Region

from stepscope.engine.protocol.knobs import typed
from stepscope.engine.protocol.wire import KnobSpec, KnobValue
from stepscope.recordings.state.audit_text import value_text
from stepscope.tui.screens.overlay import Overlay
from stepscope.tui.session.engine_link import KnobChange, KnobsNow
from stepscope.tui.session.what_if import KnobForecast
from stepscope.tui.views.lines import Line, clean, framed
from stepscope.tui.views.pages.knobs_page import bounds_text
from stepscope.tui.views.theme import Skin

_LOOK_S = 0.2  # between two looks at the values and the forecast
_STEPS = {"left": -0.05, "right": 0.05, "shift+left": -0.25, "shift+right": 0.25}  # of a number


class KnobEditor(Overlay[KnobChange]):
    """Lets the operator choose a knob and a new value for it.

    Numbers are typed, or changed by the arrow keys. Switches and choices start at their current
    value, and the arrow keys go through the others. Enter on a changed value closes the editor with
    the change; Enter on the current value of a switch or choice ends the edit. Escape closes the
    editor without a change.

    Args:
        forecast: starts to find out what a value would have done; None if nothing can.
        is_alone: show only that knob, ready to be edited, above the footer.
    """

    def __init__(
        self,
        skin: Skin,
        look: Callable[[], KnobsNow],
        name: str | None = None,
        forecast: Callable[[str, KnobValue], KnobForecast] | None = None,
        is_alone: bool = False,
    ) -> None:
        super().__init__(skin)
        self._look = look
        self._forecast = forecast
        self._asked: KnobForecast | None = None
        self._only = name if is_alone else None
        self._now = look()
        self._specs = [spec for spec in self._now.specs if self._only in (None, spec.name)]
        names = [spec.name for spec in self._specs]
        self._at = names.index(name) if name in names else 0
        self._begun = self._now  # the knobs when the operator began to type
        # The text typed for the knob that is being edited; None if none is.
        self._draft: str | None = None
        if is_alone:
            self._begin()

    def place(self, width: int, height: int) -> Region:
        box_width = min(width, 110)
        box_height = min(height, len(self._specs) + 4)
        if self._only is not None:
            return Region(0, max(0, height - 2 - box_height), width, box_height)
        return Region((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)

    def lines(self, width: int, height: int) -> list[Line]:
        first = self._first(height)
        shown = range(first, min(len(self._specs), first + height - 4))
        body = [self._row(idx, width - 2) for idx in shown]
        spec = self._specs[self._at]
        wrong = self._wrong()
        about, style = f" {spec.help} (default {value_text(spec.default)})", "muted"
        if wrong is not None:
            about, style = wrong, "caution"
        elif self._asked is not None:
            about, style = f" {self._asked.text}", "text"
        body.append(((clean(about, width - 3), style),))
        keys = " ↑/↓ choose  Enter edit"
        if self._draft is not None:
            how = "←/→ change" if _values(spec) else "type a value, or ←/→ 5 %  ⇧←/→ 25 %"
            keys = f" Enter applies  Esc drops  {how}"
            keys += "  w what if" if self._forecast is not None and self._draft else ""
        body.append(((self.hint(keys), "key"),))
        title = "knobs of the engine" if self._only is None else f"now {self._value_of(spec)}"
        return framed(body, width, height, title)

    def _first(self, height: int) -> int:
        return max(0, self._at - (height - 6)) if height > 5 else self._at

    def clicked(self, x: int, y: int) -> None:
        """Select the clicked knob. If it is selected already, edit it, or apply the edit."""
        height = self.place(*self.size).height
        at = self._first(height) + y - 1
        if 1 <= y < height - 3 and at < len(self._specs):
            if at == self._at:
                self.pressed("enter", None)
            elif self._draft is None:
                self._at = at

    def _row(self, idx: int, width: int) -> Line:
        spec = self._specs[idx]
        editing = idx == self._at and self._draft is not None
        value = self._value_of(spec)
        if editing:
            value = f"◀ {self._draft} ▶" if _values(spec) else f"{self._draft}_"
        mark, sign = ("+cursor", "▶") if idx == self._at else ("", " ")
        room = max(0, width - 49)
        return (
            (f"{sign} {clean(spec.name, 30):<30} ", f"text{mark}"),
            (f"{value:>14} ", "badge_paused" if editing else f"strong{mark}"),
            (f" {clean(bounds_text(spec), room):<{room}}", f"muted{mark}"),
        )

    def _value_of(self, spec: KnobSpec) -> str:
        return value_text(self._now.values.get(spec.name))

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(_LOOK_S, self._look_again)

    def on_unmount(self) -> None:
        self._drop_forecast()

    def _drop_forecast(self) -> None:
        if self._asked is not None:
            self._asked.drop()
            self._asked = None

    def _look_again(self) -> None:
        self._now = self._look()
        self.redraw()

    def pressed(self, key: str, character: str | None) -> None:
        spec = self._specs[self._at]
        if self._draft is None:
            if key in ("down", "j"):
                self._at = min(len(self._specs) - 1, self._at + 1)
            elif key in ("up", "k"):
                self._at = max(0, self._at - 1)
            elif key == "enter":
                self._begin()
            elif key == "q":
                self.dismiss(None)
            return
        if key == "w":
            if self._forecast is not None and self._draft and self._wrong() is None:
                self._drop_forecast()
                self._asked = self._forecast(spec.name, typed(spec, self._draft))
            return
        if key != "enter":
            self._drop_forecast()
        if key == "enter":
            is_same = _values(spec) and self._draft == self._value_of(spec)
            if not self._draft or is_same:
                self._draft = None
                if self._only is not None:
                    self.dismiss(None)
            elif self._wrong() is None:
                value, begun = typed(spec, self._draft), self._begun
                self.dismiss(KnobChange(spec.name, value, begun.version, begun.engine_id))
        elif values := _values(spec):
            if key in ("left", "right", "up", "down", "space"):
                at = values.index(self._draft) if self._draft in values else 0
                self._draft = values[(at + (-1 if key in ("left", "up") else 1)) % len(values)]
        elif key in _STEPS:
            self._draft = _moved(spec, self._draft or self._value_of(spec), _STEPS[key])
        elif key == "backspace":
            self._draft = self._draft[:-1]
        elif character is not None and character in "0123456789.-":
            self.insert(character)

    def _begin(self) -> None:
        spec = self._specs[self._at]
        self._draft = self._value_of(spec) if _values(spec) else ""
        self._begun = self._now

    def insert(self, text: str) -> None:
        """Append text to the edited number, or turn the edited switch or choice to it."""
        spec, text = self._specs[self._at], text.strip()
        if self._draft is None or not text:
            return
        self._drop_forecast()
        if not (values := _values(spec)):
            self._draft = (self._draft + text.replace(",", ""))[:12]  # screens write 2,048
        elif text in values:
            self._draft = text

    def _wrong(self) -> str | None:
        if not self._draft:
            return None
        spec = self._specs[self._at]
        try:
            value = typed(spec, self._draft)
        except ValueError:
            return f" {spec.name} takes a number within {bounds_text(spec)}"
        if isinstance(value, int | float) and not isinstance(value, bool):
            low = value if spec.low is None else spec.low
            high = value if spec.high is None else spec.high
            if not low <= value <= high:
                return f" {spec.name} must be within {bounds_text(spec)}"
        return None


def _values(spec: KnobSpec) -> Sequence[str]:
    """Return the values of a knob with few, which the arrow keys go through; empty for a number."""
    return {"bool": ("off", "on"), "choice": spec.choices}.get(spec.kind, ())


def _moved(spec: KnobSpec, text: str, share: float) -> str:
    """Return a number moved by a share of itself, by 1 at least, within the bounds of its knob."""
    try:
        value = float(text)
    except ValueError:
        return text
    by = abs(share * value) if spec.kind == "float" else max(1, round(abs(share * value)))
    value = max(value + (by if share > 0 else -by), value if spec.low is None else spec.low)
    return f"{value if spec.high is None else min(value, spec.high):.12g}"
