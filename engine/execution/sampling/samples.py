"""The results of a sampler: known tokens, or tokens that a device is still computing."""

from typing import NamedTuple, Protocol

import torch

from stepscope.engine.protocol.replies import PositionLogprobs

UNSOUND = -1


class Sampled(NamedTuple):
    """The sampled tokens of some rows, in the order of the rows."""

    token_ids: list[int]  # `UNSOUND` where the row has no finite largest logit
    logprobs: dict[int, PositionLogprobs]  # by row, for requests that ask for logprobs


class SamplesInFlight(Protocol):
    """Tokens that a device may still be computing."""

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens, [rows] int64, on the device of the logits."""

    def collect(self) -> Sampled:
        """Wait for the tokens and return them."""
