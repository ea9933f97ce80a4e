"""The results of a sampler: known tokens, or tokens that a device is still computing."""

from typing import NamedTuple, Protocol

import torch

from stepscope.engine.protocol.replies import PositionLogprobs


class Sampled(NamedTuple):
    """The sampled tokens of some rows, in their order."""

    token_ids: list[int]
    logprobs: dict[int, PositionLogprobs]  # by row, for requests that ask for logprobs


class SamplesInFlight(Protocol):
    """Tokens that a device may still be computing."""

    @property
    def tokens(self) -> torch.Tensor:
        """[rows] int64, on the device of the logits. The next step can use it without waiting."""
        ...

    def collect(self) -> Sampled:
        """Wait for the tokens and return them."""
        ...
