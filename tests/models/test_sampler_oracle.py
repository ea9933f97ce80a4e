"""The tokens that can be drawn, and their probabilities, are those of transformers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stepscope.engine.execution.sampler import Sampler, uniform
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.request import Request
from tests.support.engines.tiny_runner import load_tiny, next_row, run_rows

BOTH_WAYS = pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
# Closer to a border than this, rounding decides on which side of it a number is.
ROUNDING = 1e-5
NUM_DRAWN = 64


def expected_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[vocab_size], by the library's own processors, in vLLM's order: min-p, then top-k, top-p."""
    scores = logits[None].float()
    no_ids = torch.zeros(1, 0, dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(no_ids, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(no_ids, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(no_ids, scores)
    if params.top_p < 1:
        ordered = scores.softmax(-1).double().sort(descending=True).values.cumsum(-1)
        assume(bool((ordered - params.top_p).abs().min() > ROUNDING))
        scores = TopPLogitsWarper(params.top_p)(no_ids, scores)
    return scores.softmax(-1)[0]


@BOTH_WAYS
@settings(max_examples=20)
@given(
    vocab_size=st.integers(2, 1600),
    scale=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.05, 5.0),
    top_k=st.one_of(st.sampled_from([0, 2**31 - 1]), st.integers(1, 40), st.integers(1, 2000)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_sampled_tokens_follow_the_cumulative_distribution_of_transformers(
    on_host: bool,
    vocab_size: int,
    scale: float,
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    dtype: torch.dtype,
) -> None:
    logits = scale * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
    # Without ties, of which the library's top-p keeps some and drops some.
    assume(len(logits.to(dtype).unique()) == vocab_size or top_p == 1.0)
    logits = logits.to(dtype)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    probs = expected_probs(logits, params)
    if min_p > 0:
        ratio = (logits.float() - logits.float().max()).div(temperature).exp()
        assume(bool((ratio - min_p).abs().min() > ROUNDING))
    requests = []
    for position in range(NUM_DRAWN):
        requests.append(Request(0, [0], params, arrival_ns=0))
        requests[-1].token_ids += [0] * position
    drawn = (
        Sampler(0, on_host=on_host)
        .launch(logits.expand(NUM_DRAWN, -1), requests)
        .collect()
        .token_ids
    )
    ends = probs.double().cumsum(-1).numpy()
    for position, token in enumerate(drawn):
        random = uniform(seed, position) * ends[-1]
        before = ends[token - 1] if token else 0.0
        assert before - ROUNDING <= random <= ends[token] + ROUNDING
        assert probs[token] > 0


@BOTH_WAYS
@settings(max_examples=20)
@given(
    prompt=st.lists(st.integers(0, 29), min_size=1, max_size=40),
    output=st.lists(st.integers(0, 29), max_size=150),
    penalty=st.floats(0.1, 3.0),
    frequency=st.floats(-2.0, 2.0),
    presence=st.floats(-2.0, 2.0),
    seed=st.integers(0, 2**31),
)
def test_penalised_logits_equal_those_of_transformers_and_of_the_openai_formula(
    on_host: bool,
    prompt: list[int],
    output: list[int],
    penalty: float,
    frequency: float,
    presence: float,
    seed: int,
) -> None:
    logits = 3 * torch.randn(1, 30, generator=torch.Generator().manual_seed(seed))
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits)
    counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=30)
    wanted = wanted[0] - frequency * counts - presence * (counts > 0)
    best_two = wanted.sort(descending=True).values[:2]
    assume(float(best_two[0] - best_two[1]) > ROUNDING)

    request = Request(
        0,
        prompt,
        SamplingParams(
            repetition_penalty=penalty, frequency_penalty=frequency, presence_penalty=presence
        ),
        arrival_ns=0,
    )
    sampler = Sampler(0, on_host=on_host)
    before = logits.clone()
    # As in practice: some tokens were counted before, and some arrive in a burst.
    for part in np.array_split(np.array(output, dtype=int), 3):
        request.token_ids += part.tolist()
        (token,) = sampler.launch(logits, [request]).collect().token_ids
    assert token == int(wanted.argmax())
    assert torch.equal(logits, before), "the model's logits were changed"


@pytest.mark.parametrize("penalty", [0.6, 1.3])
def test_greedy_text_with_a_repetition_penalty_equals_that_of_transformers_generate(
    tiny_checkpoint: Callable[..., Path], penalty: float
) -> None:
    folder = tiny_checkpoint("qwen3")
    runner = load_tiny(folder)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = [7, 7, 80, 9, 200, 13, 7, 44]
    expected = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        repetition_penalty=penalty,
    )[0, len(prompt) :].tolist()

    request = Request(0, prompt, SamplingParams(repetition_penalty=penalty), arrival_ns=0)
    request.block_table = list(range(4))
    while request.num_output_tokens < 40:
        run_rows(runner, [next_row(request, request.num_tokens)])
    assert request.output_token_ids == expected
    assert len(set(expected)) > (30 if penalty > 1 else 0)
