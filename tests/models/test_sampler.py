"""Sampling follows its parameters, and a seed means the same text in any batch."""

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.execution.sampler import Sampler, uniform
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.request import Request

VOCAB_SIZE = 50
Sample: TypeAlias = Callable[[int, torch.Tensor, Sequence[Request]], list[int]]
Drawn: TypeAlias = Callable[..., Counter[int]]


def request(request_id: int = 0, num_output: int = 0, **sampling: object) -> Request:
    made = Request(request_id, [1, 2, 3], SamplingParams(**sampling), arrival_ns=0)  # type: ignore[arg-type]
    made.token_ids += [0] * num_output
    return made


def logits_of(*probs: float) -> torch.Tensor:
    return torch.tensor([list(probs)]).log()


@pytest.fixture(params=[True, False], ids=["host", "device"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Samples with the engine's seed, in each of the two implementations."""

    def tokens(seed: int, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        return Sampler(seed, on_host=request.param).launch(logits, requests).collect().token_ids

    return tokens


@pytest.fixture
def drawn(sample: Sample) -> Drawn:
    """How often each token is drawn at `count` positions of one request."""

    def tokens(logits: torch.Tensor, count: int = 400, **sampling: object) -> Counter[int]:
        requests = [request(num_output=i, **sampling) for i in range(count)]
        return Counter(sample(0, logits.expand(count, -1), requests))

    return tokens


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(sample: Sample) -> None:
    rows = torch.randn(40, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    mine = [request(5, i, temperature=1.0, top_p=0.9, seed=42) for i in range(40)]
    alone = [sample(0, rows[i : i + 1], [mine[i]])[0] for i in range(40)]
    assert sample(0, rows, mine) == alone

    others = [request(100 + i, i, temperature=2.0, top_k=3) for i in range(40)]
    mixed = [each for pair in zip(others, mine, strict=True) for each in pair]
    together = sample(99, rows.repeat_interleave(2, dim=0), mixed)
    assert together[1::2] == alone
    assert len(set(alone)) > 5


def test_requests_without_a_seed_differ_but_repeat_with_the_engines_seed(sample: Sample) -> None:
    rows = torch.zeros(30, VOCAB_SIZE)

    def text(engine_seed: int, request_id: int) -> list[int]:
        requests = [request(request_id, i, temperature=1.0) for i in range(30)]
        return sample(engine_seed, rows, requests)

    assert text(0, 1) == text(0, 1)
    assert text(0, 1) != text(0, 2)
    assert text(0, 1) != text(1, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_ends_a_request_before_its_min_tokens(
    sample: Sample, drawn: Drawn, temperature: float
) -> None:
    logits = logits_of(0.90, 0.04, 0.03, 0.03).expand(4, -1)
    held = [
        request(i, num_output, temperature=temperature, min_tokens=2, stop_token_ids=(0, 7))
        for i, num_output in enumerate((0, 1, 2, 3))
    ]
    early = sample(0, logits[:2], held[:2])
    assert 0 not in early
    counts = drawn(logits[:1], temperature=temperature, min_tokens=399, stop_token_ids=(0,))
    assert counts[0] <= 1
    assert sample(0, logits_of(0.97, 0.01, 0.01, 0.01), held[2:3]) == [0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 1e-300, 100.0])
def test_extreme_temperatures_draw_only_possible_tokens(drawn: Drawn, temperature: float) -> None:
    logits = torch.tensor([[3.0, float("-inf"), 500.0, 499.0]])
    counts = drawn(logits, temperature=temperature, seed=1)
    assert counts[1] == 0
    assert temperature > 1 or counts == {2: 400}


def test_tokens_as_likely_as_the_last_kept_token_are_kept_too(drawn: Drawn) -> None:
    logits = logits_of(0.2, 0.4, 0.2, 0.2)
    assert set(drawn(logits, temperature=1.0, top_k=2, seed=3)) == {0, 1, 2, 3}
    assert set(drawn(logits, temperature=1.0, top_p=0.5, seed=3)) == {0, 1, 2, 3}
    assert set(drawn(logits, temperature=1.0, top_p=0.3, seed=3)) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_that_would_leave_no_token_is_ignored(
    sample: Sample, temperature: float
) -> None:
    logits = torch.tensor([[float("-inf"), 3.0, float("-inf"), 1.0]])
    held = request(temperature=temperature, min_tokens=5, stop_token_ids=(1, 3))
    assert sample(0, logits, [held])[0] in (1, 3)
    held = request(temperature=temperature, min_tokens=5, stop_token_ids=(1, 2))
    assert sample(0, logits, [held]) == [3]


@settings(max_examples=20)
@given(
    kinds=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    vocab_size=st.sampled_from([3, 50, 1500]),
)
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_a_row_is_sampled_as_if_alone_in_the_batch(
    on_host: bool, kinds: list[int], seed: int, dtype: torch.dtype, vocab_size: int
) -> None:
    some: list[dict[str, object]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.7},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"temperature": 2.0, "presence_penalty": -1.0, "logprobs": 3},
        {"min_tokens": 90, "stop_token_ids": (0, 1)},
    ]
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(len(kinds), vocab_size, generator=generator)).to(dtype)

    def requests() -> list[Request]:
        made = []
        for i, kind in enumerate(kinds):
            made.append(Request(i, [0, 1], SamplingParams(seed=seed + i, **some[kind]), 0))  # type: ignore[arg-type]
            made[-1].token_ids += [2] * i
        return made

    sampler = Sampler(0, on_host=on_host)
    together = sampler.launch(logits, requests()).collect()
    for i, each in enumerate(requests()):
        alone = sampler.launch(logits[i : i + 1], [each]).collect()
        assert alone.token_ids == together.token_ids[i : i + 1]
        assert alone.logprobs.get(0) == together.logprobs.get(i)


def test_only_requests_with_penalties_have_counts_which_are_freed_with_them() -> None:
    sampler = Sampler(0)
    counted, plain = request(repetition_penalty=1.2), request(temperature=1.0)
    sampler.launch(torch.zeros(2, VOCAB_SIZE), [counted, plain]).collect()
    assert len(sampler._counts) == 1
    del counted
    gc.collect()
    assert len(sampler._counts) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_likeliest_token_is_found_among_negative_and_zero_logits(
    sample: Sample, dtype: torch.dtype
) -> None:
    rows = [
        [-3.0, -1.0, -2.0, -1.0],
        [-0.0, -5.0, 0.0, -1.0],
        [float("-inf"), -1e30, float("-inf"), -2e30],
        [0.5, 1.0, 1.0, -9.0],
    ]
    if dtype == torch.float16:
        rows[2] = [float("-inf"), -6e4, float("-inf"), -6.5e4]
    tokens = sample(0, torch.tensor(rows).to(dtype), [request(i) for i in range(4)])
    assert tokens == [1, 0, 1, 1]


def test_uniform_random_numbers_are_even_and_without_a_visible_pattern() -> None:
    for numbers in ([uniform(i, 0) for i in range(4000)], [uniform(1, i) for i in range(4000)]):
        tenths = Counter(int(10 * number) for number in numbers)
        assert set(tenths) == set(range(10))
        assert all(300 < count < 500 for count in tenths.values())
        pairs = Counter((a < 0.5, b < 0.5) for a, b in itertools.pairwise(numbers))
        assert all(850 < count < 1150 for count in pairs.values())
