"""An idle engine that has worked before: what it tells of itself is shown all the same."""

from collections.abc import Callable
from typing import Any

import msgspec

from stepscope.recordings.history import History
from stepscope.tui.app import Dashboard


async def test_an_idle_engine_has_its_step_its_seats_and_its_budget(
    still_source: Callable[..., Any],
) -> None:
    busy = still_source()
    snapshot = busy.history.snapshot()
    history = History()
    knobs = {"max_num_batched_tokens": 512, "max_num_seqs": 32}
    idle = {"knobs": knobs, "state": "idle", "num_running": 0, "num_waiting": 0, "requests": []}
    history.reset(msgspec.structs.replace(snapshot, **idle))
    source = type(busy)(history)
    app = Dashboard(source, history, control_endpoint="ipc:///nobody", any_terminal=True, fps=10.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        text = "\n".join(strip.text for strip in app.main._compositor.render_strips())
    app.close()
    for part in ("step 399", "RUN 0/32", "BUDGET —/512", "idle since step 399; 'stepscope load'"):
        assert part in text, part
