"""The layout: where each view goes on the screen, for any terminal size."""

from textual.geometry import Region

from stepscope.tui.settings.action_table import Page

MIN_WIDTH, MIN_HEIGHT = 80, 20
NORMAL_WIDTH = 100  # least width with budget chart, KV map and latency panel
_CHART_FROM = 23  # least height with a budget chart on a narrow screen
WIDE_WIDTH = 160  # least width with the right rail
RAIL_WIDTH = 60


def plan(width: int, height: int, page: Page = "live", strip: int = 0) -> dict[str, Region]:
    """Return view name -> region, for the views that fit (below a tour `strip`), all apart."""
    if not strip or width < MIN_WIDTH or height - strip < MIN_HEIGHT:
        return _screen(width, height, page)
    below = _screen(width, height - strip, page)
    moved = {name: each.translate((0, strip)) for name, each in below.items()}
    return {"tour": Region(0, 0, width, strip), **moved}


def _screen(width: int, height: int, page: Page) -> dict[str, Region]:
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return {"too_small": Region(0, 0, width, height)}
    places = {
        "header": Region(0, 0, width, 1),
        "notice": Region(0, height - 2, width, 1),
        "footer": Region(0, height - 1, width, 1),
    }
    if page in ("fleet", "compare"):  # they do not show one engine at one moment
        return places | {"page": Region(0, 1, width, height - 3)}
    top, bottom = 4 if width < NORMAL_WIDTH else 3, height - 3
    places["verdict"] = Region(0, 1, width, 1)
    places["figures"] = Region(0, 2, width, top - 2)
    places["scrub"] = Region(0, bottom, width, 1)
    if page != "live":
        return places | {"page": Region(0, top, width, bottom - top)}
    main_width = width
    if width < NORMAL_WIDTH:
        chart_height = 6 if height >= _CHART_FROM else 0
    else:
        # With room for a row with what limited each step.
        chart_height = max(7, min(14, height // 5)) + (height >= 40)
        if width >= WIDE_WIDTH:
            main_width = width - RAIL_WIDTH
            places |= _rail(main_width, top, bottom)
        else:
            num_events = 2 if height >= 36 else 1
            bottom -= num_events
            places["events"] = Region(0, bottom, width, num_events)
    if chart_height:
        places["chart"] = Region(0, top, main_width, chart_height)
    top += chart_height
    bottom = _maps(places, main_width, top, bottom)
    places["lanes"] = Region(0, top, main_width, bottom - top)
    return places


def _maps(places: dict[str, Region], width: int, top: int, bottom: int) -> int:
    """Place KV map and latency panel below the lanes, if they fit; return the lanes' end."""
    panel_height = 10
    if width < NORMAL_WIDTH or bottom - top < panel_height + 8:
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
    left = bottom - top - 10
    rows = {"inspector": 14 if left >= 19 else 0, "latency": 10, "knobs": 14 if left >= 33 else 0}
    for name, height in rows.items():
        if height:
            rail[name] = Region(x, top, RAIL_WIDTH, height)
            top += height
    if bottom - top >= 3:
        rail["events"] = Region(x, top, RAIL_WIDTH, bottom - top)
    return rail
