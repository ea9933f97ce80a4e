"""The layout: where each view goes on the screen, for any terminal size."""

from textual.geometry import Region

from stepscope.tui.settings.action_table import Page

MIN_WIDTH, MIN_HEIGHT = 80, 20
NORMAL_WIDTH = 100  # least width with budget chart, KV map and latency panel
_CHART_FROM = 23  # least height with a budget chart on a narrow screen
WIDE_WIDTH = 160  # least width with the right rail
RAIL_WIDTH = 60
SPARE_ROWS = 9  # that few lanes leave: for a taller budget chart, and an ITL strip of
_ITL_HEIGHT = 8


def plan(
    width: int, height: int, page: Page = "live", strip: int = 0, *, few_lanes: bool = False
) -> dict[str, Region]:
    """Return view name -> region, for the views that fit (below a tour `strip`), all apart."""
    if not strip or width < MIN_WIDTH or height - strip < MIN_HEIGHT:
        return _screen(width, height, page, few_lanes)
    below = {
        name: each.translate((0, strip))
        for name, each in _screen(width, height - strip, page, few_lanes).items()
    }
    return {"tour": Region(0, 0, width, strip), **below}


def _screen(width: int, height: int, page: Page, few_lanes: bool) -> dict[str, Region]:
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return {"too_small": Region(0, 0, width, height)}
    if page in ("fleet", "compare"):  # they do not show one engine at one moment
        return {
            "header": Region(0, 0, width, 1),
            "page": Region(0, 1, width, height - 3),
            "notice": Region(0, height - 2, width, 1),
            "footer": Region(0, height - 1, width, 1),
        }
    top = 4 if width < NORMAL_WIDTH else 3
    places = {
        "header": Region(0, 0, width, 1),
        "verdict": Region(0, 1, width, 1),
        "figures": Region(0, 2, width, top - 2),
        "scrub": Region(0, height - 3, width, 1),
        "notice": Region(0, height - 2, width, 1),
        "footer": Region(0, height - 1, width, 1),
    }
    bottom = height - 3
    if page != "live":
        places["page"] = Region(0, top, width, bottom - top)
        return places
    if width < NORMAL_WIDTH:
        places["latency_line"] = Region(0, bottom - 1, width, 1)
        chart_height = 6 if height >= _CHART_FROM else 0
        if chart_height:
            places["chart"] = Region(0, top, width, chart_height)
        top += chart_height
        places["lanes"] = Region(0, top, width, bottom - 1 - top)
        return places
    has_limits = height >= 40  # room for a row with what limited each step
    chart_height = max(7, min(14, height // 5)) + has_limits
    if few_lanes and width >= WIDE_WIDTH:
        chart_height += SPARE_ROWS - _ITL_HEIGHT
    if width >= WIDE_WIDTH:
        places |= _rail(width - RAIL_WIDTH, top, bottom)
        main_width = width - RAIL_WIDTH
    else:
        main_width = width
        num_events = 2 if height >= 36 else 1
        bottom -= num_events
        places["events"] = Region(0, bottom, width, num_events)
    places["chart"] = Region(0, top, main_width, chart_height)
    if few_lanes and width >= WIDE_WIDTH:
        places["itl"] = Region(0, top + chart_height, main_width, _ITL_HEIGHT)
        chart_height += _ITL_HEIGHT
    bottom = _maps(places, main_width, top + chart_height, bottom)
    places["lanes"] = Region(0, top + chart_height, main_width, bottom - top - chart_height)
    return places


def _maps(places: dict[str, Region], width: int, top: int, bottom: int) -> int:
    """Place KV map and latency panel below the lanes, if they fit; return the lanes' end."""
    panel_height = 10
    if bottom - top < panel_height + 8:
        places["latency_line"] = Region(0, bottom - 1, width, 1)
        return bottom - 1
    bottom -= panel_height
    if "latency" in places:  # it is in the rail already
        places["kv"] = Region(0, bottom, width, panel_height)
    else:
        half = width // 2
        places["kv"] = Region(0, bottom, half, panel_height)
        places["latency"] = Region(half, bottom, width - half, panel_height)
    return bottom


def _rail(x: int, top: int, bottom: int) -> dict[str, Region]:
    """Return the regions at the right edge: inspector, latency, knobs, events, if they fit."""
    rail: dict[str, Region] = {}
    left = bottom - top
    wanted = {"latency": 10, "inspector": 14, "knobs": 14}
    shown = []
    for name, rows in wanted.items():
        if left >= rows + 5 or (name == "latency" and left >= rows):
            shown.append(name)
            left -= rows
    for name in ("inspector", "latency", "knobs"):
        if name in shown:
            rail[name] = Region(x, top, RAIL_WIDTH, wanted[name])
            top += wanted[name]
    if bottom - top >= 3:
        rail["events"] = Region(x, top, RAIL_WIDTH, bottom - top)
    return rail
