"""`rendered`: a matplotlib figure as a file."""

import io
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepscope.recordings.export.output import missing
from stepscope.recordings.plot.style import COLOURS, DPI, FigureTheme, settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rendered(
    paint: "Callable[[Figure], None]", target: str, size: tuple[float, float], theme: FigureTheme
) -> bytes:
    """Draw with `paint` and return the file.

    Args:
        target: "svg", "png" or "pdf".
        size: width and height in inches.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("matplotlib", "a figure") from error
    look: Any = settings(COLOURS[theme])
    with mpl.rc_context(look):
        drawing = Figure(figsize=size, dpi=DPI)
        paint(drawing)
        stream = io.BytesIO()
        # Nothing of the machine and of today is in it.
        dates: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        with warnings.catch_warnings():
            # A mark in a script that the font lacks is drawn as boxes: no news to who asked.
            warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from", UserWarning)
            drawing.savefig(stream, format=target, metadata=dates.get(target, {}))
    return stream.getvalue()
