"""`run_compare`: opens the dashboard on its compare screen."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.compare.columns import Align
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.source import Source
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.dashboards.dashboard import dashboard_options, need_terminal, new_history
from stepscope.tui.cli.shared.connect import connect
from stepscope.tui.cli.shared.recording_path import find_recording
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.recent import remember
from stepscope.tui.settings.settings import DashboardSettings
from stepscope.tui.views.frame.compare_choices import Split, session_origin, split_origins
from stepscope.tui.views.frame.compare_origin import Origin


def run_compare(
    a: str,
    b: str | None,
    split: Split | None,
    align: Align,
    settings: DashboardSettings,
    live: dict[str, Endpoint],
) -> None:
    """Show the comparison on the screen until the operator leaves.

    Args:
        b: the run to compare A with; None: A is divided at `split`.
        live: name -> endpoint, if A or B is a running engine.

    Raises:
        RecordingError: a file is not a recording.
        EngineUnreachable: nothing listens at an address.
        WrongUsage: both are engines.
    """
    need_terminal("'--table', '--json' and '-o' work without one")
    if b is not None and a in live and b in live:
        raise WrongUsage(
            f"{a} and {b} are both live: 'stepscope top {a} {b}' shows them side by side"
        )
    with _compared(a, b, split, settings, live) as (source, origins):
        _run(source, origins, align, settings)


def draw_compare(
    a: str,
    b: str | None,
    split: Split | None,
    align: Align,
    settings: DashboardSettings,
    path: Path,
    size: tuple[int, int],
) -> None:
    """Read both runs, then write the compare screen into a picture file.

    Raises:
        RecordingError: a file is not a recording, or the picture cannot be written.
    """
    from stepscope.tui.app.picture import screenshot  # loads Textual

    with _compared(a, b, split, settings, {}) as (source, origins):
        screenshot(
            source,
            source.history,
            path,
            size,
            theme=settings.theme,
            ascii=bool(settings.ascii),
            compared=(*origins, align),
        )


@contextmanager
def _compared(
    a: str,
    b: str | None,
    split: Split | None,
    settings: DashboardSettings,
    live: dict[str, Endpoint],
) -> "Iterator[tuple[ReplaySource | Subscriber, tuple[Origin, Origin]]]":
    """Start the source that the dashboard shows, and stop it at the end of the block.

    Yields:
        (the source, (where to read run A from, where to read run B from))
    """
    shown = b if b is not None and b in live else a
    source = _source(shown, live, settings)
    source.start()
    try:
        session = _named(session_origin(source), shown)
        if split is not None:
            yield source, split_origins(session, *split)
        else:
            assert b is not None
            other = _origin(a if shown is b else b, session.slo)
            yield source, (other, session) if shown is b else (session, other)
    finally:
        source.stop()


def _named(origin: Origin, name: str) -> Origin:
    return origin._replace(name=Path(name).name.removesuffix(".mcap"))


def _source(
    name: str, live: dict[str, Endpoint], settings: DashboardSettings
) -> ReplaySource | Subscriber:
    history = new_history(settings)
    if name in live:
        connect(live[name]).close()
        return Subscriber(live[name], history)
    recording = Recording(find_recording(name))
    if recording.message is not None:
        print(f"stepscope: note: {recording.message}", file=sys.stderr)
    remember(recording.path)
    return ReplaySource(recording, history, playing=False)


def _origin(name: str, slo: SLO) -> Origin:
    path = find_recording(name)
    with Recording(path):
        remember(path)  # only after it could be opened
    return _named(Origin(name, slo, path=path), name)


def _run(
    source: Source, origins: tuple[Origin, Origin], align: Align, settings: DashboardSettings
) -> None:
    from stepscope.tui.app.run import run_dashboard

    run_dashboard(
        source,
        source.history,
        control_endpoint=source.endpoint.control if isinstance(source, Subscriber) else None,
        compared=(*origins, align),
        **dashboard_options(settings),
    )
