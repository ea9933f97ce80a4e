"""`find_knee`: where a step time that is flat meets one that is proportional to the tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.recordings.session.knee import find_knee


@given(st.floats(0.1, 20.0), st.floats(20, 10_000), st.booleans(), st.floats(0, 1e-3))
def test_the_knee_is_the_number_of_tokens_that_take_as_long_as_the_smallest_step(
    flat_ms: float, tokens: float, adds_up: bool, pair_share: float
) -> None:
    counts = [1 << number for number in range(round(tokens).bit_length() + 5)]

    def took_s(count: int) -> float:
        computing = count / tokens
        attention = pair_share * count * count / tokens
        return flat_ms / 1e3 * ((1 + computing if adds_up else max(1, computing)) + attention)

    attended = [count * count for count in counts]
    knee = find_knee(counts, [took_s(count) for count in counts], attended)
    assert knee.flat_ms == pytest.approx(flat_ms, rel=0.05)
    assert knee.tokens == pytest.approx(tokens, rel=0.05)
    assert knee.rounded == pytest.approx(knee.tokens, rel=0.05)


@pytest.mark.parametrize(
    "points",
    [
        {},
        {1: 1.0, 2: 1.0, 4: 1.0},
        {2**i: 5.0 for i in range(12)},  # all bound by memory
        {2**i: max(5.0, 2**i / 80) for i in range(10)},  # the largest hardly reach the knee
        {2**i: 5.0 + 2**i / 20 for i in range(6, 14)},  # the smallest are above a quarter
    ],
)
def test_there_is_no_knee_without_steps_far_below_and_above(points: dict[int, float]) -> None:
    assert find_knee([*points], [*points.values()]) is None
