"""Step times between measured points."""

from pathlib import Path

import pytest

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.simulation.measured import MeasuredModel, MeasuredPoint, read_points
from stepscope.engine.simulation.step_time import StepShape

POINTS = [
    MeasuredPoint(1, 0, 0.010),
    MeasuredPoint(1, 1000, 0.011),
    MeasuredPoint(9, 0, 0.018),
    MeasuredPoint(9, 9000, 0.027),
    MeasuredPoint(512, 0, 0.100),
]


def decodes(count: int, context: int) -> StepShape:
    """`context`: the tokens that each decode finds in the KV cache."""
    return StepShape(count, count, 0, 0, count * (context + 1))


def seconds(step: StepShape) -> float:
    return MeasuredModel(POINTS).step_time(step).device_s


def test_a_measured_step_size_gets_its_measured_time() -> None:
    assert seconds(decodes(1, 1000)) == pytest.approx(0.011)
    assert seconds(StepShape(1, 0, 512, 0, 0, 512)) == pytest.approx(0.100)


def test_between_measured_points_time_is_interpolated_linearly() -> None:
    assert seconds(decodes(1, 500)) == pytest.approx(0.0105)
    # Halfway from 1 to 9 tokens, with 2,000 tokens of context: 0.012 s and 0.020 s.
    assert seconds(decodes(5, 400)) == pytest.approx(0.016)


def test_with_one_context_length_measured_its_cost_comes_from_other_step_sizes() -> None:
    late_chunk = StepShape(1, 0, 512, 0, 0, 512 + 10_000)
    assert seconds(late_chunk) == pytest.approx(0.100 + 10_000 * 1e-6)


def test_steps_beyond_all_measured_points_are_marked() -> None:
    model = MeasuredModel(POINTS)
    assert not model.step_time(decodes(9, 100)).is_extrapolated
    assert model.step_time(decodes(9, 5000)).is_extrapolated
    assert model.step_time(StepShape(1, 0, 1024, 0, 0, 1024)).is_extrapolated


def test_measured_points_are_read_from_a_csv(tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    file.write_text("tokens,context,seconds\n1,0,0.010\n512,0,0.1\n")
    assert read_points(file) == [MeasuredPoint(1, 0, 0.010), MeasuredPoint(512, 0, 0.1)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tokens,seconds\n1,0.1\n", "line 2: context: this field is.*tokens,context,seconds"),
        ("tokens,context,seconds\n1,0,fast\n", "line 2: seconds: expected a number"),
        ("tokens,context,seconds\n1,0,nan\n", "line 2: seconds: expected a number > 0"),
        ("tokens,context,seconds\n", "has no points"),
        ('{"a": 1}', "has no points"),
    ],
)
def test_a_malformed_file_of_points_is_refused_in_one_line(
    tmp_path: Path, text: str, why: str
) -> None:
    file = tmp_path / "points"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_points(file)


def test_measured_points_of_a_single_size_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 2 are needed"):
        MeasuredModel(POINTS[:2])
