"""`SimulatedRequest`: a request to a simulated engine: its arrival, lengths and shared prefix.

It has no tokens. The ids of the prompt's blocks say which prompts begin with the same tokens, as in
a Mooncake trace; a prompt without ids shares no prefix.
"""

import math
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.block_pool import BlockHash
from stepscope.engine.simulation.simulated import VOCAB_SIZE
from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel
from stepscope.engine.text.text_stream import TextStream
from stepscope.engine.workload.arrivals import fit, mix
from stepscope.engine.workload.traces import HASH_BLOCK_TOKENS, TraceRow


class DrawnStepTimes:
    """A `StepTimeModel` that draws log-normal device times around those of another model.

    Their mean is the other model's time. Each call draws a new time.

    Attributes:
        num_extrapolated: steps so far whose times the other model extrapolated.
    """

    def __init__(self, model: StepTimeModel, seed: int) -> None:
        self.num_extrapolated = 0
        self._model = model
        self._gauss = random.Random(seed).gauss

    def step_time(self, shape: StepShape) -> StepTime:
        device_s, host_s, spread, is_extrapolated = self._model.step_time(shape)
        self.num_extrapolated += is_extrapolated
        if spread:
            device_s *= math.exp(spread * self._gauss(0.0, 1.0) - spread * spread / 2)
        return StepTime(device_s, host_s, 0.0, is_extrapolated)


CHARS_PER_TOKEN = 4


class MadeUpCodec:
    """A `TextCodec` with one token for four characters; equal prefixes have equal tokens."""

    def encode(self, text: str, most: int | None = None) -> list[int]:
        pieces = (text[i : i + CHARS_PER_TOKEN] for i in range(0, len(text), CHARS_PER_TOKEN))
        return [zlib.crc32(piece.encode()) % VOCAB_SIZE for piece in pieces]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None
    ) -> list[int]:
        contents = (turn["content"] for turn in messages)
        texts = (each if isinstance(each, str) else "\n".join(each) for each in contents)
        return self.encode("\n".join(texts), most)

    def text_stream(self) -> TextStream:
        return TextStream(lambda token_ids: "".join(f" {each}" for each in token_ids))


_MAX_BLOCKS = 1 << 24  # of one prompt
_MAX_ID = (1 << 62) - 1


class SimulatedRequest(NamedTuple):
    """One request. Its output always ends after `num_output_tokens`."""

    arrival_ns: int  # since the start
    num_prompt_tokens: int
    num_output_tokens: int
    name: str = ""
    priority: int = 0
    prefix: tuple[int, ...] = ()  # ids of the prompt's blocks: prompts are equal up to an equal id
    prefix_tokens: int = HASH_BLOCK_TOKENS  # tokens of a block with an id
    names_output: bool = False  # whether `prefix` also has ids of the output's blocks

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.num_output_tokens, ignore_eos=True)


def of_trace(
    rows: Iterable[TraceRow], max_model_len: int | None, time_scale: float = 1.0
) -> Iterator[SimulatedRequest]:
    """Return the requests of a trace, cut to the model's length if they are longer."""
    for number, row in enumerate(rows):
        prompt, output, _ = fit(row.num_prompt_tokens, row.num_output_tokens, max_model_len)
        yield SimulatedRequest(
            arrival_ns=round(row.offset_s * time_scale * 1e9),
            num_prompt_tokens=prompt,
            num_output_tokens=output,
            name=f"trace-{number}",
            prefix=row.hash_ids or (),
            prefix_tokens=row.block_tokens,
        )


def of_mix(spec: WorkloadSpec, max_model_len: int | None) -> Iterator[SimulatedRequest]:
    """Return the requests of a synthetic mix, as `arrivals.synthetic` sends them to an engine."""
    for each in mix(spec, max_model_len):
        yield SimulatedRequest(
            arrival_ns=round(each.offset_s * 1e9),
            num_prompt_tokens=each.num_prompt_tokens,
            num_output_tokens=each.max_tokens,
            name=each.name,
            prefix=(0,) if each.num_shared_tokens else (),
            prefix_tokens=max(1, each.num_shared_tokens),
        )


class BlockNames:
    """Makes stand-in hashes for the full blocks of simulated requests, which have no tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_unique = 0

    def of(self, request: SimulatedRequest) -> list[BlockHash]:
        """Return hashes for all full blocks that the request will have, its output included."""
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        num_blocks = num_tokens // self._block_size
        num_nameable = num_tokens if request.names_output else request.num_prompt_tokens
        num_named = min(num_nameable, len(request.prefix) * request.prefix_tokens)
        num_shared = num_named // self._block_size
        names: list[BlockHash] = []
        for number, prefix_id in enumerate(request.prefix, 1):
            # A block has the id of its last token.
            end = min(num_shared, number * request.prefix_tokens // self._block_size)
            first = (prefix_id & _MAX_ID) * _MAX_BLOCKS
            names += range(first + len(names), first + end)
        # Negative names are unique.
        begin = -1 - self._num_unique
        names += range(begin, begin - (num_blocks - num_shared), -1)
        self._num_unique += num_blocks - num_shared
        return names
