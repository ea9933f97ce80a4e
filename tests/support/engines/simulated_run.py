"""`simulate`: runs a simulated engine without sockets, and keeps its messages. Not a test.

The same seed gives the same messages, byte for byte.
"""

import random
from collections.abc import Iterator
from itertools import islice, repeat

import msgspec
from msgspec import Struct

from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.protocol.commands import SetKnobs, Submit
from stepscope.engine.protocol.knobs import Knobs, Limits, knob_specs
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import EngineInfo, KnobValue, Telemetry
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.simulation import simulated
from stepscope.engine.simulation.simulated import START_NS, VOCAB_SIZE, SimulatedRunner
from stepscope.engine.simulation.step_time import StepTimeModel
from tests.support.engines.core_ends import Sink
from tests.support.engines.cost_model import CostModel


class SimulatedWorkload(Struct, frozen=True, kw_only=True):
    """Requests to simulate: streaming chats and a few long documents, with Poisson arrivals."""

    rate: float = 4.0  # requests a second
    document_share: float = 0.15
    chat_tokens: int = 200  # mean prompt
    document_tokens: int = 3000
    output_tokens: int = 60  # mean
    shared_tokens: int = 64  # length of the system prompt that all chats begin with


def simulated_info(
    limits: Limits, num_blocks: int, block_size: int, seed: int, *, is_served: bool = False
) -> EngineInfo:
    return EngineInfo(
        engine_id=f"simulated-{seed}",
        name="simulated",
        software_version="simulated",
        model="simulated",
        attention_backend="none",
        device="virtual",
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        knobs=knob_specs(limits),
        monotonic_ns=START_NS,
        wall_ns=simulated.WALL_START_NS,
        bundles=is_served,
        keeps_snapshots=is_served,
    )


def simulate(
    seed: int = 0,
    num_steps: int = 500,
    *,
    knobs: Knobs | None = None,
    changes: dict[int, dict[str, KnobValue]] | None = None,
    num_blocks: int = 1024,
    block_size: int = 16,
    max_model_len: int = 8192,
    workload: SimulatedWorkload | None = None,
    cost: StepTimeModel | None = None,
    overlap: bool = False,
) -> list[tuple[int, Telemetry]]:
    """Run a simulated engine for `num_steps` steps.

    Args:
        changes: knobs to set before a step, by step number.
        overlap: whether each step is prepared while the one before it runs.

    Returns:
        (sequence, message) pairs: `EngineInfo`, `KnobsChanged`, `StepRecord` and `EngineStatus`
        in the order they were published.
    """
    workload = workload or SimulatedWorkload()
    most = max(8192, max_model_len)
    limits = Limits(max_num_batched_tokens=most, max_num_seqs=256, max_model_len=max_model_len)
    runner = SimulatedRunner(cost or CostModel(), seed)
    scheduler = Scheduler(KVCacheManager(num_blocks, block_size), knobs or Knobs(), limits)
    sink = Sink()
    info = simulated_info(limits, num_blocks, block_size, seed)
    info = msgspec.structs.replace(info, overlap=True if overlap else None)
    core = EngineCore(info, runner, scheduler, sink, overlap=overlap)
    random_source = random.Random(seed)
    arrival_ns, number = START_NS, 0
    core.publish_heartbeat(idle=True)
    while core.next_step < num_steps:
        while arrival_ns <= runner.clock():
            submit, token_ids = _submission(random_source, workload, number, max_model_len)
            core.inbox.put(Call(submit, SilentClient(), token_ids))
            number += 1
            arrival_ns += round(random_source.expovariate(workload.rate) * 1e9)
        # A step in flight already counts in `next_step`.
        for step in [step for step in changes or () if step <= core.next_step]:
            command = SetKnobs(changes=changes.pop(step), who="simulated")
            core.inbox.put(Call(command, SilentClient()))
        if not core.step():
            runner.advance_to(arrival_ns)
        core.publish_heartbeat(idle=False)
    core.settle()
    return list(enumerate(sink.messages))


def _submission(
    random_source: random.Random, workload: SimulatedWorkload, number: int, max_model_len: int
) -> tuple[Submit, list[int]]:
    document = random_source.random() < workload.document_share
    mean = workload.document_tokens if document else workload.chat_tokens
    length = max(1, round(mean * random_source.uniform(0.5, 1.5)))
    max_tokens = max(1, round(workload.output_tokens * random_source.uniform(0.3, 1.7)))
    length = min(length, max_model_len - max_tokens)
    shared = 0 if document else min(workload.shared_tokens, length)
    token_ids = [*range(shared), *islice(_random_tokens(random_source), length - shared)]
    submit = Submit(
        client_id=f"{'doc' if document else 'chat'}-{number}",
        prompt_token_ids=token_ids,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    return submit, token_ids


def _random_tokens(random_source: random.Random) -> Iterator[int]:
    """Draw what `randrange(VOCAB_SIZE)` would draw again and again, in a fraction of its time."""
    numbers = map(random_source.getrandbits, repeat(VOCAB_SIZE.bit_length()))
    return filter(VOCAB_SIZE.__gt__, numbers)


def encoded(messages: list[tuple[int, Telemetry]]) -> bytes:
    """Encode all messages as one byte string, for comparing two runs."""
    return msgspec.msgpack.encode(messages)
