"""The start screen: sections of entries, what each entry opens, and how they are drawn."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.state.session import model_text
from stepscope.tui.views import format as fmt
from stepscope.tui.views.framed_panels import Column, first_shown, table
from stepscope.tui.views.lines import Line, Run, clean, fitted

if TYPE_CHECKING:  # the first picture has neither, and does not wait for them
    from stepscope.recordings.file.overview import Overview
    from stepscope.recordings.fleets.fleet import EngineLine

Kind: TypeAlias = Literal["engines", "file", "tour", "demo", "ask"]

MAX_RECORDINGS = 12
_ENGINE_COLUMNS = (
    Column("state", 14),
    Column("running", 9, True),
    Column("waiting", 8, True),
    Column("steps/s", 8, True),
    Column("model", 0),
)
_FILE_COLUMNS = (
    Column("when", 12),
    Column("length", 7, True),
    Column("steps", 10, True),
    Column("size", 7, True),
    Column("engine", 16),
    Column("folder", 0),
)
_GROWING_S = 10.0  # a file changed this recently still grows: a writer adds to it once a second


class StartChoice(NamedTuple):
    """What an entry of the start screen opens: engines (by address), a file, a prompt."""

    kind: Kind
    names: tuple[str, ...] = ()


class Entry(NamedTuple):
    choice: StartChoice
    title: str
    cells: tuple[Run, ...]  # under the columns; of fewer, the last extends over the rest
    style: str = "strong"
    about: str = ""  # a longer text for the notice line


class Section(NamedTuple):
    title: str
    columns: tuple[Column, ...]  # beside the titles
    entries: tuple[Entry, ...]
    otherwise: str = ""  # shown if there is no entry


class File(NamedTuple):
    path: Path
    num_bytes: int
    written_s: float  # Unix time of the file's last change
    overview: "Overview | None"  # None until the file has been read


def engines_section(
    lines: "Sequence[tuple[str, EngineLine]]", configured: Sequence[str], is_looking: bool
) -> Section:
    """Return the section of the engines here (address, figures) and of the config file."""
    entries = [_engine(address, line) for address, line in lines]
    if len(lines) > 1:
        choice = StartChoice("engines", tuple(address for address, _ in lines))
        entries.append(Entry(choice, f"all {len(lines)} of them", (("side by side", "muted"),)))
    if configured:
        about = f"[fleet] of the config file: {', '.join(configured)}"
        choice = StartChoice("engines", tuple(configured))
        entries.append(Entry(choice, "your fleet", ((about, "muted"),)))
    none = "none runs here; 'stepscope serve --model demo' starts one"
    otherwise = "looking …" if is_looking else none
    return Section("engines on this machine", _ENGINE_COLUMNS, tuple(entries), otherwise)


def _engine(address: str, line: "EngineLine") -> Entry:
    from stepscope.tui.views.frame.fleet_view import FIGURES, state_text
    from stepscope.tui.views.panels.inspector import how_to_see_steps

    figures = line.figures
    state, style = state_text(line)
    running, waiting, steps = (FIGURES[key](figures) for key in ("run", "wait", "steps"))
    model, about = "-" if figures.info is None else model_text(figures.info), address
    if figures.info is not None and figures.info.totals_every_s is not None:
        model = f"{model}, totals of {figures.info.engine}'s /metrics"
        about = f"{address}; {' '.join(how_to_see_steps(figures.info.engine))}"
    if figures.status == "starting":
        about = figures.error or address
    style = "caution" if style.startswith("badge") else style
    cells = ((state, style), running, waiting, steps, (model, "muted"))
    return Entry(StartChoice("engines", (address,)), figures.name, cells, about=about)


def recordings_section(files: Sequence[File], now_s: float) -> Section:
    entries = tuple(_file(file, now_s) for file in files[:MAX_RECORDINGS])
    none = "none here yet; R in the dashboard or 'stepscope record -o session.mcap' makes one"
    return Section("recordings", _FILE_COLUMNS, entries, none)


def _file(file: File, now_s: float) -> Entry:
    seen = file.overview
    when, size = when_text(file.written_s, now_s), fmt.size(file.num_bytes)
    folder = str(file.path.parent).replace(str(Path.home()), "~", 1)
    title = file.path.name
    choice = StartChoice("file", (str(file.path),))
    if seen is not None and (said := seen.error or seen.incident) is not None:
        style = "strong" if seen.error is None else "caution"
        text = said if seen.error is None else f"not readable: {said}"
        cells = ((when, "muted"), (text, "caution"))
        return Entry(choice, title, cells, style, f"{file.path}: {said}")
    length = steps = engine = "…"
    if seen is not None:
        length = "-" if seen.duration_s is None else fmt.short_span(seen.duration_s)
        steps = fmt.count(seen.num_steps)
        is_growing = file.path.suffix == PART_SUFFIX and now_s - file.written_s < _GROWING_S
        engine = f"{seen.engine}{', cut' if seen.is_cut and not is_growing else ''}"
        steps += "+" if is_growing else ""
    texts = ((when, "muted"), (length, "text"), (steps, "text"), (size, "text"))
    named = (engine, "caution" if ", cut" in engine else "text")
    return Entry(choice, title, (*texts, named, (folder, "muted")), about=str(file.path))


def samples_section(samples: Sequence[tuple[str, str]], *, has_torch: bool) -> Section:
    """Return the section of what stepscope ships: sample recordings, the tour and the demo."""
    engine = "a real engine" if has_torch else "a simulated H100 (a real engine needs torch)"
    entries = [_plain(StartChoice("file", (name,)), name, about) for name, about in samples]
    tour = "learn to read the screen, in ten short chapters"
    entries.append(_plain(StartChoice("tour"), "tour", tour))
    entries.append(_plain(StartChoice("demo"), "demo", f"{engine} with requests to serve"))
    return Section("to look at", (Column("what it shows", 0),), tuple(entries))


def elsewhere_section(key: str) -> Section:
    """Return the section for engines at other addresses, with the key that opens a prompt."""
    about = "tcp://HOST:PORT, http://HOST:PORT (several: spaces between), or a file"
    entry = _plain(StartChoice("ask"), f"{key}  address or file", about)
    return Section("elsewhere", (Column("", 0),), (entry,))


def _plain(choice: StartChoice, title: str, about: str) -> Entry:
    return Entry(choice, title, ((about, "muted"),), about=about)


def when_text(then_s: float, now_s: float) -> str:
    """Return a time in at most twelve cells: today 12:41, Nov 03 12:41, 2025-11-03."""
    then, now = time.localtime(then_s), time.localtime(now_s)
    if then[:3] == now[:3]:
        return time.strftime("today %H:%M", then)
    if abs(now_s - then_s) < 180 * 24 * 3600:
        return time.strftime("%b %d %H:%M", then)
    return time.strftime("%Y-%m-%d", then)


def typed_choice(text: str) -> StartChoice:
    """Return what a typed text means: a file if it looks like one, else addresses of engines."""
    path = Path(text.strip()).expanduser()
    if path.suffix in (".mcap", ".part") or path.is_file():
        return StartChoice("file", (str(path),))
    return StartChoice("engines", tuple(text.split()))


def what_is_wrong(text: str) -> str | None:
    """Return one line about why a typed text cannot be opened; None if nothing is wrong with it."""
    from stepscope.engine.adapters.metrics.fetch import MetricsAddress, is_metrics_url
    from stepscope.engine.protocol.knobs import ConfigError
    from stepscope.engine.transport.endpoints import Endpoint  # with sockets, only when needed

    if not text.strip() or typed_choice(text).kind == "file":
        return None
    try:
        for name in text.split():
            if is_metrics_url(name):
                MetricsAddress.parse(name)
            else:
                Endpoint.parse(name)
    except ConfigError as error:
        return str(error)
    return None


_TITLE_WIDTHS = ((120, 40), (100, 26), (0, 18))  # least width of the screen, width of the titles


def entries_of(sections: Sequence[Section]) -> list[Entry]:
    return [entry for section in sections for entry in section.entries]


def draw(sections: Sequence[Section], selected: int, width: int, height: int) -> list[Line]:
    """Return as many lines as fit around the selected entry; a click finds the row of an entry."""
    lines: list[Line] = []
    number = at = 0
    is_tight = sum(len(s.entries) or 1 for s in sections) + 2 * len(sections) > height + 1
    room = next(cells for least, cells in _TITLE_WIDTHS if width >= least)
    for section in sections:
        if lines and not is_tight:
            lines.append(())
        title = section.title if len(section.title) <= room else section.title.split(" on ")[0]
        rows = [((_title(each, room), each.style), *each.cells) for each in section.entries]
        columns = (Column(title, room), *section.columns)
        chosen = selected - number if number <= selected < number + len(rows) else None
        heading, *listed = table(columns, rows, width, len(rows) + 1, chosen, number)
        lines.append((*heading[:1], *((name, "title") for name, _ in heading[1:2]), *heading[2:]))
        if chosen is not None:
            at = len(lines) + chosen
        lines += listed or [((f"  {clean(section.otherwise, width)}", "muted"),)]
        number += len(rows)
    first = first_shown(len(lines), height, at)
    shown = [fitted(line, width) for line in lines[first : first + height]]
    return [*shown, *[fitted((), width)] * (height - len(shown))]


def _title(entry: Entry, room: int) -> str:
    """Return the title of an entry; of a long file name the end, which tells most."""
    is_long = entry.choice.kind == "file" and len(entry.title) > room
    return "…" + entry.title[len(entry.title) - room + 1 :] if is_long else entry.title
