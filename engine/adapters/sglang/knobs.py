"""The knobs (runtime settings) of a running SGLang.

An operator may change some of them, up to the values at SGLang's start.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.engine.adapters.attached.knob_values import changed
from stepscope.engine.adapters.sglang.broadcast import CHUNK, SEATS, ChangeRequests
from stepscope.engine.adapters.sglang.shapes import SglangScheduler
from stepscope.engine.protocol.settings.knobs import Limits, knob_specs
from stepscope.engine.protocol.wire import KnobSpec, KnobValue


class SglangKnobs(Struct, frozen=True, kw_only=True):
    """All settings that stepscope shows. `SglangKnobBoard.specs` lists the changeable ones."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_prefill_tokens: int
    enable_chunked_prefill: bool
    enable_mixed_chunk: bool
    policy: str
    enable_prefix_caching: bool

    def as_dict(self) -> dict[str, KnobValue]:
        return msgspec.structs.asdict(self)


class SglangKnobBoard:
    """The knobs of one tensor-parallel group.

    `set` builds a request to the group's ranks. `drain` returns the request for sending.

    Args:
        parallel: SGLang's parallel context, which has the limit on running requests.

    Attributes:
        knobs: the values that were set last. They apply from the next batch on.
        specs: the knobs that can change while SGLang runs.
        limits: the values at start, which bound the knobs.
    """

    is_deferred = True

    def __init__(self, scheduler: SglangScheduler, parallel: Any) -> None:
        self._requests = ChangeRequests()
        self._to_send: list[Any] = []
        chunk = scheduler.chunked_prefill_size
        seats = min(parallel.pp_max_micro_batch_size, scheduler.max_running_requests)
        self.limits = Limits(
            max_num_batched_tokens=chunk or scheduler.max_prefill_tokens,
            max_num_seqs=seats,
            max_model_len=scheduler.model_config.context_len,
        )
        self.knobs = SglangKnobs(
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_num_seqs=seats,
            max_prefill_tokens=scheduler.max_prefill_tokens,
            enable_chunked_prefill=chunk is not None,
            enable_mixed_chunk=scheduler.is_mixed_chunk,
            policy=str(scheduler.schedule_policy),
            enable_prefix_caching=not scheduler.disable_radix_cache,
        )
        self._start = self.knobs
        self.specs = tuple(_specs(scheduler, self.knobs, self.limits))

    def changed(self, changes: Mapping[str, KnobValue]) -> SglangKnobs:
        """Return the knobs with `changes` applied, without setting them.

        Raises:
            ConfigError: an unknown or fixed knob, a wrong type, a value outside its bounds.
        """
        return changed("SGLang", self.knobs, self.specs, changes)

    def set(self, knobs: SglangKnobs) -> None:
        """Set the knobs on all ranks, from the next batch on."""
        values = {}
        if knobs.max_num_batched_tokens != self.knobs.max_num_batched_tokens:
            values[CHUNK] = knobs.max_num_batched_tokens
        if knobs.max_num_seqs != self.knobs.max_num_seqs:
            values[SEATS] = knobs.max_num_seqs
        if values:
            self._to_send.append(self._requests.make(values))
        self.knobs = knobs

    def restore(self) -> None:
        """Build a request that restores the values at SGLang's start.

        The next `drain` returns it.
        """
        self.set(self._start)

    def drain(self) -> list[Any]:
        """Return the requests that change the knobs on all ranks, built since the last call."""
        requests, self._to_send = self._to_send, []
        return requests


def _specs(scheduler: SglangScheduler, knobs: SglangKnobs, limits: Limits) -> list[KnobSpec]:
    if scheduler.recv_skipper is not None:
        return []  # the skipper drops requests that a rank adds to a loop iteration
    if scheduler.server_args.nnodes > 1:
        return []  # a node without our plugin would ignore the request and decide differently
    least, most = _least_chunk(scheduler, knobs), knobs.max_num_batched_tokens
    lows = {"max_num_seqs": 1}
    if knobs.enable_chunked_prefill and least <= most:
        lows["max_num_batched_tokens"] = least
    return [
        msgspec.structs.replace(
            spec,
            default=getattr(knobs, spec.name),
            low=lows[spec.name],
            high=getattr(knobs, spec.name),
        )
        for spec in knob_specs(limits)
        if spec.name in lows
    ]


def _least_chunk(scheduler: SglangScheduler, knobs: SglangKnobs) -> int:
    """Return the smallest chunk size with which every prompt makes progress.

    Prefill chunks end at page boundaries, and decodes of mixed batches use part of the chunk.
    """
    least = max(scheduler.page_size, scheduler.truncation_align_size or 1)
    return least + knobs.max_num_seqs if knobs.enable_mixed_chunk else least
