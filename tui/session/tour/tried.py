"""Finds out, from what the screen shows, which of the tour's suggestions the person has tried."""

from collections.abc import Iterator, Mapping

from stepscope.engine.protocol.wire import KnobValue
from stepscope.tui.session.tour.chapters import SMALL, Try
from stepscope.tui.views.view import View


def tried(
    view: View, knobs: Mapping[str, KnobValue], held_step: int | None = None
) -> Iterator[Try]:
    """Yield each suggestion of the tour that the screen shows as done.

    Args:
        held_step: the step at which the tour stopped the picture.
    """
    if view.cursor != held_step:
        yield "time"
    if view.page == "request":
        yield "request"
    if knobs.get("max_num_batched_tokens", SMALL) != SMALL:
        yield "budget"
    if view.zoom_idx or view.axis == "time":
        yield "columns"
    if view.kv_by_owner:
        yield "owners"
    if view.page != "latency":
        yield "leave"
