"""The export dialog: choose the format, the steps and the table; Enter begins the export."""

from collections.abc import Sequence
from pathlib import Path

from textual.geometry import Region

from stepscope.recordings.export.output import missing
from stepscope.recordings.export.tables import TABLES
from stepscope.tui.screens.overlays.overlay import Overlay
from stepscope.tui.session.file_jobs import (
    FORMAT_CHOICES,
    ExportOrder,
    FormatChoice,
    RangeChoice,
    file_name,
)
from stepscope.tui.views.framed_panels import first_shown
from stepscope.tui.views.lines import Line, clean, fitted, framed, spot
from stepscope.tui.views.theme import Skin

_WIDTH = 92
_FULL_HEIGHT = len(FORMAT_CHOICES) + 7
_NAME_WIDTH, _LABEL_WIDTH = 9, 7


class ExportChooser(Overlay[ExportOrder]):
    """Asks what to export, and closes with an `ExportOrder`.

    Args:
        path: the recording.
        ranges: step ranges to choose from; the first is chosen at the start.
        folder: the folder for the exported file.
        engine_id: the run of the engine that numbered the steps in `ranges`.
        last: the previous export; its format and table are chosen at the start.
    """

    def __init__(
        self,
        skin: Skin,
        path: Path,
        ranges: Sequence[RangeChoice],
        folder: Path,
        engine_id: str | None,
        last: ExportOrder | None = None,
    ) -> None:
        super().__init__(skin)
        self._path = path
        self._ranges = ranges
        self._folder = folder
        self._engine_id = engine_id
        self._format = 0 if last is None else FORMAT_CHOICES.index(last.choice)
        self._table = 0 if last is None else TABLES.index(last.table)
        self._range = 0

    @property
    def order(self) -> ExportOrder:
        """The `ExportOrder` that Enter would begin now."""
        return ExportOrder(
            self._path,
            self.choice,
            TABLES[self._table],
            self._ranges[self._range],
            self._folder,
            self._engine_id,
        )

    @property
    def choice(self) -> FormatChoice:
        return FORMAT_CHOICES[self._format]

    def place(self, width: int, height: int) -> Region:
        box_width = min(width, _WIDTH)
        box_height = min(height, _FULL_HEIGHT)
        return Region((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)

    def lines(self, width: int, height: int) -> list[Line]:
        inner = max(1, width - 2)
        is_low = height < _FULL_HEIGHT
        below = [
            self._range_line(inner),
            *self._table_line(is_low),
            self._file_line(inner),
            self._keys_line(),
        ]
        below = below[: max(0, height - 3)]
        room = max(1, height - 2 - len(below))
        first = first_shown(len(FORMAT_CHOICES), room, self._format)
        body = [
            self._format_line(number, inner)
            for number in range(first, min(len(FORMAT_CHOICES), first + room))
        ]
        name = self._path.name.removesuffix(".part")
        title: Line = ((clean(f"export {name}", max(0, width - 6)), "title"),)
        blank: list[Line] = [] if is_low else [()]
        return framed([*body, *blank, *below], width, height, title)

    def _format_line(self, number: int, width: int) -> Line:
        choice = FORMAT_CHOICES[number]
        mark = "+cursor" if number == self._format else ""
        room = max(0, width - _NAME_WIDTH - 3)
        about, style = choice.opens, "muted"
        if not choice.is_there:
            about, style = choice.wanted, "caution"
        return (
            spot("format", number),
            *fitted(
                (
                    ("▶ " if mark else "  ", f"text{mark}"),
                    (f"{choice.name:<{_NAME_WIDTH}} ", f"strong{mark}"),
                    (f"{clean(about, room):<{room}}", f"{style}{mark}"),
                ),
                width,
            ),
        )

    def _range_line(self, width: int) -> Line:
        text = clean(self._ranges[self._range].text, max(0, width - _LABEL_WIDTH - 5))
        return _turned("range", "steps", text, len(self._ranges) > 1)

    def _table_line(self, is_low: bool) -> list[Line]:
        if self.choice.is_table:
            return [_turned("table", "table", f"of {TABLES[self._table]}", True)]
        return [] if is_low else [()]

    def _keys_line(self) -> Line:
        keys = ["↑/↓ format", "Enter writes it" if self.choice.is_there else "", "Esc closes"]
        if self.choice.is_table:
            keys.insert(1, "Tab table")
        if len(self._ranges) > 1:
            keys.insert(1, "←/→ steps")
        return (spot("begin", ""), (self.hint(f" {'  '.join(filter(None, keys))}"), "key"))

    def _file_line(self, width: int) -> Line:
        if not self.choice.is_there:
            return ((f" {clean(self._missing(), width - 1)}", "caution"),)
        name = file_name(self.order)
        room = max(0, width - _LABEL_WIDTH - 2 - len(name) - 5)
        folder = str(self._folder)
        if len(folder) > room:
            folder = "…" + folder[len(folder) - room + 1 :] if room > 1 else ""
        return (
            (f" {'file':<{_LABEL_WIDTH}}", "muted"),
            (clean(name, max(0, width - _LABEL_WIDTH - 2)), "strong"),
            (f"  in {clean(folder, room)}" if folder else "", "muted"),
        )

    def _missing(self) -> str:
        return str(missing(self.choice.package or "", self.choice.name))

    def pressed(self, key: str, character: str | None) -> None:
        if key in ("down", "j"):
            self._format = min(len(FORMAT_CHOICES) - 1, self._format + 1)
        elif key in ("up", "k"):
            self._format = max(0, self._format - 1)
        elif key in ("right", "l", "left", "h"):
            self._range = (self._range + (1 if key in ("right", "l") else -1)) % len(self._ranges)
        elif key in ("tab", "shift+tab") and self.choice.is_table:
            self._table = (self._table + (1 if key == "tab" else -1)) % len(TABLES)
        elif key == "enter" and self.choice.is_there:
            self.dismiss(self.order)
        elif key == "q":
            self.dismiss(None)

    def clicked(self, x: int, y: int) -> None:
        """Choose what was clicked; begin the export if that is chosen already."""
        found = self._box.spot_at(x, y)
        if found is None:
            return
        kind, value = found
        if kind == "format" and int(value) != self._format:
            self._format = int(value)
        else:
            self.pressed({"range": "right", "table": "tab"}.get(kind, "enter"), None)


def _turned(kind: str, label: str, text: str, can_turn: bool) -> Line:
    before, after = ("◀ ", " ▶") if can_turn else ("", "")
    return (
        spot(kind, ""),
        (f" {label:<{_LABEL_WIDTH}}", "muted"),
        (before, "key"),
        (text, "text"),
        (after, "key"),
    )
