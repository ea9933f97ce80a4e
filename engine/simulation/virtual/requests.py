"""`SimulatedRequest`: a request to a simulated engine: its arrival, lengths and shared prefix.

It has no tokens. The ids of the prompt's blocks say which prompts begin with the same tokens, as in
a Mooncake trace; a prompt without ids shares no prefix.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.block_pool import BlockHash
from stepscope.engine.workload.arrivals import fit, mix
from stepscope.engine.workload.traces import HASH_BLOCK_TOKENS, TraceRow

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
