"""Colours and sizes of plots, for paper and screens, safe for colour blindness.

The colours are those of Okabe and Ito ("Color Universal Design", 2008), which stay distinct with
protanopia, deuteranopia and tritanopia. Adjacent shapes also differ in lightness or hatch, so that
a plot printed in grey is readable.

`rendered`: draws a matplotlib figure and returns it as the bytes of an image file.
"""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stepscope.recordings.export.output import missing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200

FigureTheme: TypeAlias = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class FigureColours:
    """The colours of a plot."""

    paper: str
    ink: str
    muted: str
    grid: str
    prefill: str = "#e69f00"
    decode: str = "#0072b2"
    cached: str = "#56b4e9"
    padded: str = "#999999"
    breach: str = "#d55e00"
    knob: str = "#aa4499"
    running: str = "#0072b2"
    waiting: str = "#b0b0b0"
    held: str = "#009e73"


COLOURS: dict[FigureTheme, FigureColours] = {
    "light": FigureColours(paper="#ffffff", ink="#1a1a1a", muted="#555555", grid="#dddddd"),
    "dark": FigureColours(
        paper="#0e1116",
        ink="#e6e9ee",
        muted="#9aa4b2",
        grid="#2b323d",
        decode="#4fb3ff",
        running="#4fb3ff",
        cached="#8ecdf3",
        breach="#ff7a3d",
        knob="#d78bd0",
        held="#35c29a",
        waiting="#6b7480",
    ),
}


def settings(colours: FigureColours) -> dict[str, Any]:
    """Return matplotlib's rcParams, with which a plot looks the same on any machine."""
    return {
        "font.family": "DejaVu Sans",  # comes with matplotlib
        "font.size": 8.0,
        "axes.titlesize": 8.5,
        "axes.labelsize": 8.0,
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "legend.fontsize": 7.5,
        "legend.frameon": True,  # so that no event line crosses its text
        "legend.framealpha": 1.0,
        "legend.facecolor": colours.paper,
        "legend.edgecolor": colours.paper,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": colours.paper,
        "figure.facecolor": colours.paper,
        "savefig.facecolor": colours.paper,
        "text.color": colours.ink,
        "axes.labelcolor": colours.ink,
        "axes.edgecolor": colours.muted,
        "axes.titlecolor": colours.ink,
        "xtick.color": colours.muted,
        "ytick.color": colours.muted,
        "xtick.labelcolor": colours.ink,
        "ytick.labelcolor": colours.ink,
        "grid.color": colours.grid,
        "grid.linewidth": 0.6,
        "hatch.linewidth": 0.5,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "pdf.fonttype": 42,
        "svg.hashsalt": "stepscope",  # the same recording makes the same file
    }


def rendered(
    paint: "Callable[[Figure], None]", target: str, size: tuple[float, float], theme: FigureTheme
) -> bytes:
    """Draw a figure by calling `paint`, and return the bytes of the image file.

    `size`: width and height in inches.

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
