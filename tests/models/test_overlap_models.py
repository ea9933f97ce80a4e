"""With overlap a real model gives every client the same tokens, text and logprobs as without.

In fp32, greedy tokens are also those of the transformers library's `generate`. On a CPU a step is
over once it is launched; the order in which tokens become known is the same as on a GPU. So are the
steps of `qwen3-graphs`, recorded and padded, but for a stand-in that launches them again.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from stepscope.engine.control.intake import Intake
from stepscope.engine.execution.loading import prepare
from stepscope.engine.execution.runner import LaunchedStep, ModelRunner
from stepscope.engine.execution.sampler import Sampler
from stepscope.engine.protocol.commands import SetKnobs, Submit
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.replies import Output, PositionLogprobs, TokenLogprob
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Preempted
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledStep
from tests.support.engines.core_ends import Client
from tests.support.engines.relaunching import CapturableAttention, RelaunchingDevice
from tests.support.engines.tiny_runner import load_tiny
from tests.support.engines.whole_core import WholeCore

LIMITS = Limits(max_num_batched_tokens=1024, max_num_seqs=16, max_model_len=256)
NUM_OUTPUT = 24
LENGTHS = (5, 64, 45, 101)


@dataclass
class Served:
    runner: ModelRunner
    prompts: list[list[int]]
    expected: list[list[int]]  # by `generate`


@pytest.fixture(scope="module", params=["qwen3-lean", "qwen3-graphs", "phi3-transformers"])
def served(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[..., Path],
    greedy_oracle: Callable[[Path], Callable[[Sequence[int], int], list[int]]],
) -> Served:
    family, kind = request.param.split("-")
    folder = tiny_checkpoint(family)
    impl = "lean" if kind == "graphs" else kind
    runner = load_tiny(folder, model_impl=impl, seq_capacity=LIMITS.max_num_seqs)
    if kind == "graphs":
        runner.backend = CapturableAttention()
        # Room for as many requests as a short prompt has tokens.
        config = EngineConfig(seq_capacity=64, token_capacity=LIMITS.max_num_batched_tokens)
        prepare(runner, config, lambda what, share: None, RelaunchingDevice())
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]
    generate = greedy_oracle(folder)
    return Served(runner, prompts, [generate(prompt, NUM_OUTPUT) for prompt in prompts])


class Engine(WholeCore):
    def __init__(
        self, runner: ModelRunner, overlap: bool, num_blocks: int = 128, **knobs: object
    ) -> None:
        knobs = {"max_num_seqs": 16, **knobs}
        super().__init__(LIMITS, runner, num_blocks, knobs=knobs, overlap=overlap)
        self._intake = Intake(runner.tokenizer, runner.vocab_size, LIMITS.max_model_len)

    def submit(self, prompt: list[int], **sampling: object) -> Client:  # type: ignore[override]
        options = {"max_tokens": NUM_OUTPUT, "ignore_eos": True, **sampling}
        asked = Submit(prompt_token_ids=prompt, sampling=SamplingParams(**options))  # type: ignore[arg-type]
        call = self._intake.call(asked, Client(), lambda: 0)
        return super().submit(prompt, call.stop_text, **options)

    @property
    def num_ahead(self) -> int:
        return sum(record.hidden_ns is not None for record in self.sink.records)


@pytest.mark.parametrize("budget", [7, 64, 1024])
def test_mixed_loads_in_chunks_of_any_size_give_the_tokens_of_transformers_generate(
    served: Served, budget: int
) -> None:
    engine = Engine(served.runner, True, max_num_batched_tokens=budget)
    clients = [engine.submit(prompt) for prompt in served.prompts[:2]]
    for _ in range(4):
        engine.core.step()
    clients += [engine.submit(prompt) for prompt in served.prompts[2:]]
    engine.run()
    assert [client.tokens for client in clients] == served.expected
    assert engine.num_ahead > 0.7 * len(engine.sink.records)
    ways = {record.cuda_graph for record in engine.sink.records}
    assert ways == ({None} if served.runner.graphs is None else {"piecewise", "full"})


def test_prefix_hits_and_preemptions_change_no_token(served: Served) -> None:
    engine = Engine(served.runner, True)
    first = engine.submit(served.prompts[3])
    engine.run()
    # One continues where the first ended, on blocks that steps launched ahead have filled.
    longer = served.prompts[3] + first.tokens
    both = [engine.submit(served.prompts[3]), engine.submit(longer, max_tokens=8)]
    engine.run()
    assert both[0].tokens == served.expected[3]
    assert both[1].outputs[0].num_cached_tokens == (len(longer) - 1) // 16 * 16
    plain = Engine(served.runner, False, enable_prefix_caching=False)
    alone = plain.submit(longer, max_tokens=8)
    plain.run()
    assert both[1].tokens == alone.tokens

    tight = Engine(served.runner, True, num_blocks=17, reserve="none", enable_prefix_caching=False)
    clients = [tight.submit(prompt) for prompt in served.prompts * 2]
    tight.run()
    events = [event for record in tight.sink.records for event in record.events]
    assert any(isinstance(event, Preempted) for event in events)
    assert [client.tokens for client in clients] == served.expected * 2


CHANGES: list[dict[str, object]] = [
    *({"max_num_batched_tokens": budget} for budget in (3, 64, 1024)),
    *({"max_num_seqs": seats} for seats in (2, 16)),
    *({"enable_prefix_caching": is_on} for is_on in (False, True)),
    *({"batching": mode} for mode in ("naive", "separate", "chunked")),
    {"speculative": "ngram", "prompt_lookup_min": 1},
    {"speculative": "off"},
    {"order": "arrival"},
]


@pytest.mark.parametrize("seed", range(3))
def test_neither_live_knobs_nor_steps_without_memory_change_a_token(
    served: Served, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    beginnings = [rng.choice(served.prompts)[: rng.randrange(1, 102)] for _ in range(10)]
    plain = Engine(served.runner, False)
    alone = [plain.submit(prompt, **KINDS[i % 3]) for i, prompt in enumerate(beginnings)]
    plain.run()
    launch, num_failed = served.runner.launch_now, 0

    def launch_or_fail(step: ScheduledStep) -> LaunchedStep:
        nonlocal num_failed
        if sum(row.num_tokens for row in step.rows) > 1 and rng.random() < 0.05:
            num_failed += 1
            raise torch.OutOfMemoryError
        return launch(step)

    monkeypatch.setattr(served.runner, "launch_now", launch_or_fail)
    engine = Engine(served.runner, True, num_blocks=18, reserve="none")
    clients = []
    for i, prompt in enumerate(beginnings):
        clients.append(engine.submit(prompt, **KINDS[i % 3]))
        for _ in range(rng.randrange(20)):
            if rng.random() < 0.3:
                engine.ask(SetKnobs(changes=rng.choice(CHANGES)))
            engine.core.step()
    engine.run()
    assert [client.tokens for client in clients] == [client.tokens for client in alone]
    assert num_failed > 0
    assert engine.num_ahead > 0


def comparable(outputs: list[Output]) -> list[Output]:
    """Outputs with logprobs to four digits: the rest of the batch changes the last digits."""

    def rounded(token: TokenLogprob) -> TokenLogprob:
        return TokenLogprob(token.token_id, round(token.logprob, 4), token.text)

    return [
        output
        if output.logprobs is None
        else msgspec.structs.replace(
            output,
            logprobs=[
                PositionLogprobs(rounded(each.chosen), each.rank, [*map(rounded, each.top)])
                for each in output.logprobs
            ],
        )
        for output in outputs
    ]


KINDS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.9, "seed": 4, "min_p": 0.05, "logprobs": 2},
    {"min_tokens": 6, "logprobs": 0, "temperature": 0.7},
    {"repetition_penalty": 1.3, "max_tokens": 9},
]


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_with_overlap_every_sampling_option_and_finish_reason_gives_equal_outputs(
    served: Served, monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> None:
    monkeypatch.setattr(served.runner, "_sampler", Sampler(0, on_host=on_host))

    def outputs(overlap: bool, ends: list[dict[str, object]]) -> list[list[Output]]:
        engine = Engine(served.runner, overlap)
        rng = random.Random(3)
        clients = []
        for kind, end in zip(KINDS * 2, ends, strict=True):
            prompt = [rng.randrange(256) for _ in range(rng.randrange(4, 60))]
            clients.append(engine.submit(prompt, **{**kind, **end}))
        engine.run()
        if overlap:
            assert engine.num_ahead > 5
            wasted = sum(record.num_wasted_tokens or 0 for record in engine.sink.records)
            assert bool(wasted) == any(ends)
        return [comparable(client.outputs) for client in clients]

    whole: list[dict[str, object]] = [{} for _ in KINDS * 2]
    expected = outputs(False, whole)
    assert outputs(True, whole) == expected
    # Now with ends in mid-way: a token of each, or what it spells.
    tokenizer = served.runner.tokenizer
    ends: list[dict[str, object]] = []
    for number, each in enumerate(expected):
        tokens = [token for output in each for token in output.token_ids]
        middle = len(tokens) // 2
        if number % 2:
            ends.append({"stop_token_ids": (tokens[middle],)})
        else:
            text = tokenizer.decode(tokens[middle : middle + 3])
            ends.append({"stop": (text,)} if text else {})
    stopped = outputs(False, ends)
    assert sum(each[-1].finish_reason == "stop" for each in stopped) > 5
    assert outputs(True, ends) == stopped


def test_sampling_on_a_device_never_reads_tensors_back() -> None:
    """Tensors without content stand for unfinished device work: reading one raises."""
    requests = [
        Request(number, [1, 2, 3], SamplingParams(stop_token_ids=(5,), **kind), arrival_ns=0)  # type: ignore[arg-type]
        for number, kind in enumerate([*KINDS, {"top_k": 3, "temperature": 1.0}])
    ]
    for request in requests:
        request.token_ids += [7, 8]
    logits = torch.empty(len(requests), 64, dtype=torch.bfloat16, device="meta")
    samples = Sampler(0, on_host=False).launch(logits, requests)
    assert samples.tokens.shape == (len(requests),)
    assert samples.tokens.device.type == "meta"
    with pytest.raises(NotImplementedError):
        samples.collect()
