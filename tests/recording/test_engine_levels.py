"""Service levels belong to the engine; what the viewer chose comes before them, and is said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.recordings.file.service_levels import slo_of
from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import SLO
from tests.support.engines.simulated_run import simulate

ENGINE = {"slo_ttft_ms": 3000.0, "slo_itl_ms": 150.0}


def messages(**levels: float) -> list[tuple[int, Any]]:
    """A session whose engine says these levels."""
    found = list(simulate(seed=3, num_steps=60))
    return [
        (number, msgspec.structs.replace(each, **levels) if each.topic == b"info" else each)
        for number, each in found
    ]


@pytest.mark.parametrize(
    ("chosen", "carried", "slo", "own"),
    [
        ({}, {}, SLO(3000, 150), ""),
        ({"slo_itl_ms": 33.0}, {}, SLO(3000, 33), "your own, not ITL 150 ms"),
        ({"slo_itl_ms": 150.0}, {}, SLO(3000, 150), ""),
        ({}, {"slo_itl_ms": "70"}, SLO(3000, 70), ""),
        ({"slo_itl_ms": 33.0}, {"slo_itl_ms": "70"}, SLO(3000, 33), "your own, not ITL 70 ms"),
    ],
)
def test_the_viewers_choice_comes_before_the_recording_and_that_before_the_engine(
    chosen: dict[str, float], carried: dict[str, str], slo: SLO, own: str
) -> None:
    history = History(chosen)
    history.carried = carried
    assert history.slo == slo_of(chosen)  # before anything of the engine is known
    for sequence, message in messages(**ENGINE):
        history.append(sequence, message)
    assert (history.slo, history.own_levels) == (slo, own)


def test_levels_of_a_restarted_engine_apply_and_a_choice_in_the_dashboard_stays() -> None:
    history = History()
    for sequence, message in messages(**ENGINE):
        history.append(sequence, message)
    history.set_slo(SLO(3000, 40))
    assert (history.slo, history.own_levels) == (SLO(3000, 40), "your own, not ITL 150 ms")
    info = msgspec.structs.replace(messages()[0][1], engine_id="other", slo_ttft_ms=900.0)
    history.append(10_000, info)
    assert (history.slo, history.own_levels) == (SLO(900, 40), "")


def test_a_recording_is_judged_by_what_its_engine_says(
    recorded_to: Callable[..., Any], stepscope: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "a.mcap"
    with recorded_to(path) as source:
        for sequence, message in messages(**ENGINE):
            source.take(sequence, message)
    shown = stepscope("stats", str(path))
    assert "levels TTFT 3,000 ms, ITL 150 ms" in shown.stdout
    assert "service levels" not in shown.stderr
    chosen = stepscope("stats", str(path), "--slo-itl", "9ms")
    assert "levels TTFT 3,000 ms, ITL 9 ms" in chosen.stdout
    assert "service levels: ITL 9 ms, your own, not ITL 150 ms\n" in chosen.stderr


def test_service_levels_do_not_make_another_engine() -> None:
    assert EngineConfig().hash() == EngineConfig(slo_itl_ms=9.0).hash()
