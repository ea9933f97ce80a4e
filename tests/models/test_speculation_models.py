"""A real model gives the same tokens with and without drafts, greedy and sampled."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from stepscope.engine.execution.sampler import Sampler
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.acceptance import accepted, take_bursts
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledStep
from tests.support.engines.kv_integrity import check_integrity
from tests.support.engines.tiny_runner import load_tiny

LIMITS = Limits(max_num_batched_tokens=256, max_num_seqs=16, max_model_len=256)


def outputs(folder: Path, temperature: float, **knobs: object) -> tuple[object, int]:
    runner = load_tiny(folder)
    kv = KVCacheManager(28, 16)
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 16, **knobs}
    scheduler = Scheduler(kv, Knobs(**settings), LIMITS)  # type: ignore[arg-type]
    rng = random.Random(1)
    requests = []
    for number in range(5):
        phrase = [rng.randrange(256) for _ in range(6)]
        sampling = SamplingParams(max_tokens=70, ignore_eos=True, temperature=temperature)
        requests.append(Request(number, phrase * rng.randint(2, 9), sampling, number))
        scheduler.add(requests[-1])
    num_accepted = 0
    step = 0
    while scheduler.has_work():
        rows = scheduler.schedule()
        if rows:
            result = runner.execute(ScheduledStep(step, rows))
            _, bursts = take_bursts(scheduler, rows, result)
            num_accepted += sum(len(burst) - 1 for burst in bursts.values())
        check_integrity(kv)
        step += 1
    assert sum(request.num_preemptions for request in requests) > 0
    return [request.output_token_ids for request in requests], num_accepted


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_tokens_with_drafts_equal_those_without(
    tiny_checkpoint: Callable[..., Path], temperature: float
) -> None:
    folder = tiny_checkpoint("llama")
    expected, _ = outputs(folder, temperature)
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    for num_tokens in (1, 4):
        knobs = {"speculative": "ngram", "num_speculative_tokens": num_tokens, **lookup}
        actual, num_accepted = outputs(folder, temperature, **knobs)
        assert actual == expected
        if temperature == 0:
            assert num_accepted > 0


def test_sampled_tokens_with_drafts_have_the_models_distribution() -> None:
    """Chi-square, 7 degrees of freedom, at the level of 0.1 %: 24.3."""
    probs = np.array([0.3, 0.25, 0.15, 0.1, 0.08, 0.06, 0.04, 0.02])
    logits = torch.tensor(np.log(probs), dtype=torch.float32)
    sampler = Sampler(seed=5)
    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    num_requests = 2000
    for number in range(num_requests):
        sampling = SamplingParams(max_tokens=50, temperature=1.0)
        request = Request(number, [1, 2, 3], sampling, 0)
        request.draft_token_ids = [0, 0]
        sampled = sampler.launch(logits.repeat(3, 1), [request] * 3, [0, 1, 2]).collect()
        burst = accepted(request.draft_token_ids, sampled.token_ids)
        first[burst[0]] += 1
        if len(burst) > 1:
            second[burst[1]] += 1
    for counts in (first, second):
        total = sum(counts.values())
        expected = probs * total
        found = np.array([counts[token] for token in range(8)])
        assert ((found - expected) ** 2 / expected).sum() < 24.3
    assert 0.25 < second.total() / num_requests < 0.35  # the draft was accepted as often as likely
