"""`CompareChooser`: the list of runs that a session can be compared with."""

from dataclasses import dataclass
from pathlib import Path

from stepscope.recordings.history.source import Source
from stepscope.tui.settings.terminal import in_browser
from stepscope.tui.views.frame.compare_choices import CompareChoice, LandmarkSearch, choices


@dataclass(slots=True)
class CompareChooser:
    """The rows of the list (None: closed) and the selected one; for the screen's thread."""

    choices: list[CompareChoice] | None = None
    selected: int = 0
    _source: Source | None = None
    _search: LandmarkSearch | None = None
    _num_recorded: int = -1  # landmarks of the recording among the choices; -1: not listed yet

    def open(self, source: Source) -> None:
        """Open the list of runs that the session of this source can be compared with."""
        recording = getattr(source, "recording", None)
        if recording is not None and (self._search is None or self._search.path != recording.path):
            self._search = LandmarkSearch(recording.path)
        self._source = source
        self._num_recorded = -1
        self.selected = 0
        self.choices = []
        self.refresh()

    def close(self) -> None:
        self.choices = self._source = None

    def select(self, direction: int) -> None:
        self.selected = max(0, min(self.selected + direction, len(self.choices or ()) - 1))

    @property
    def chosen(self) -> CompareChoice | None:
        """The selected row; None if the list is empty or closed."""
        found = self.choices or []
        return found[min(self.selected, len(found) - 1)] if found else None

    @property
    def key(self) -> object:
        """A value that differs from the last one whenever the list must be drawn again."""
        is_searched = self._search is not None and self._search.found is not None
        return self.choices is not None, self.selected, is_searched

    def refresh(self) -> None:
        """Make the list again if the recording has more; the choice stays selected."""
        source, search = self._source, self._search
        found = () if search is None else search.found or ()
        if source is None or len(found) == self._num_recorded:
            return
        self._num_recorded = len(found)
        chosen = self.chosen if self.selected else None
        folders = [] if search is None else [search.path.absolute().parent]
        if not in_browser():  # the recordings of this folder are not for everybody who watches
            folders.insert(0, Path.cwd())
        self.choices = choices(source, folders, found)
        if chosen in self.choices:
            self.selected = self.choices.index(chosen)
