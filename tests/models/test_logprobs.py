"""Logprobs are those of the model's own logits, not of the logits changed for sampling."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.execution.host_sampling import UNSOUND
from stepscope.engine.execution.sampler import Sampler
from stepscope.engine.protocol.replies import PositionLogprobs
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.request import Request

INF = float("inf")
BOTH_WAYS = pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])


def sampled(
    logits: torch.Tensor, on_host: bool, **sampling: object
) -> tuple[int, PositionLogprobs]:
    """The token of one row, and its logprobs."""
    request = Request(0, [0], SamplingParams(**sampling), arrival_ns=0)  # type: ignore[arg-type]
    chosen = Sampler(0, on_host=on_host).launch(logits[None], [request]).collect()
    assert set(chosen.logprobs) == {0}
    return chosen.token_ids[0], chosen.logprobs[0]


@BOTH_WAYS
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.integers(1, 300),
    num_top=st.integers(0, 20),
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_logprobs_are_the_log_softmax_of_the_raw_logits(
    on_host: bool, seed: int, vocab_size: int, num_top: int, temperature: float, dtype: torch.dtype
) -> None:
    logits = 4 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
    logits = logits.to(dtype)
    token, found = sampled(
        logits,
        on_host,
        logprobs=num_top,
        temperature=temperature,
        top_k=3,
        repetition_penalty=1.5,
        seed=seed,
    )
    expected = logits.float().log_softmax(-1)
    assert found.chosen.token_id == token
    assert found.chosen.logprob == pytest.approx(float(expected[token]), abs=1e-5)
    assert found.rank == 1 + int((expected > expected[token]).sum())
    assert len(found.top) == min(num_top, vocab_size)
    best = expected.sort(descending=True).values[: len(found.top)]
    assert [top.logprob for top in found.top] == pytest.approx(best.tolist(), abs=1e-5)
    for top in found.top:
        assert top.logprob == pytest.approx(float(expected[top.token_id]), abs=1e-5)
    assert len({top.token_id for top in found.top}) == len(found.top)


@BOTH_WAYS
def test_the_first_of_equal_logits_is_the_best_and_the_greedy_token(on_host: bool) -> None:
    logits = torch.tensor([1.0, 2.0, 0.0, 2.0, 2.0])
    token, found = sampled(logits, on_host, logprobs=3)
    assert token == 1
    assert found.rank == 1
    assert [top.token_id for top in found.top] == [1, 3, 4]


def test_on_a_cpu_ties_for_the_last_logprob_are_broken_by_token_id() -> None:
    logits = torch.zeros(1000)
    logits[700] = 1.0
    _, found = sampled(logits, True, logprobs=4)
    assert [top.token_id for top in found.top] == [700, 0, 1, 2]


@BOTH_WAYS
@pytest.mark.parametrize(
    "row",
    [
        [float("nan"), 1.0, 0.0],
        [-INF, 1.0, -INF],
        [INF, 1.0, 0.0],
        [-INF, -INF, -INF],
        [float("nan")] * 3,
        [INF, INF, -INF],
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_largest_logit_gives_no_token_and_changes_no_other(
    on_host: bool, row: list[float], temperature: float
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([row, [0.0, 1.0, -INF]]).to(dtype)
        sampling = SamplingParams(logprobs=3, temperature=temperature, seed=1)
        requests = [Request(i, [1], sampling, arrival_ns=0) for i in range(2)]
        sampled = Sampler(0, on_host=on_host).launch(logits, requests).collect()
        alone = Sampler(0, on_host=on_host).launch(logits[1:], requests[1:]).collect()
        is_sound = math.isfinite(max(row)) and not any(map(math.isnan, row))
        assert (sampled.token_ids[0] != UNSOUND) == (0 in sampled.logprobs) == is_sound
        assert sampled.token_ids[1:] == alone.token_ids
        assert sampled.logprobs[1] == alone.logprobs[0]


@BOTH_WAYS
def test_only_requests_that_ask_get_logprobs(on_host: bool) -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    requests = [
        Request(i, [1], SamplingParams(logprobs=num), arrival_ns=0)
        for i, num in enumerate((None, 0, 2))
    ]
    sampled = Sampler(0, on_host=on_host).launch(logits, requests).collect()
    assert sampled.token_ids == logits.argmax(-1).tolist()
    assert {row: len(found.top) for row, found in sampled.logprobs.items()} == {1: 0, 2: 2}
