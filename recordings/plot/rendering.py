"""`rendered`: draws a matplotlib figure and returns it as the bytes of an image file."""

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
    """Draw a figure by calling `paint`, and return the bytes of the image file.

    Args:
        size: width and height in inches.

    Raises MissingPackage: matplotlib is not installed.
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
        # Leave out the date, so that equal figures are equal files.
        dates: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        with warnings.catch_warnings():
            # Characters that the font lacks are drawn as boxes; do not print a warning for that.
            warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from", UserWarning)
            drawing.savefig(stream, format=target, metadata=dates.get(target, {}))
    return stream.getvalue()
