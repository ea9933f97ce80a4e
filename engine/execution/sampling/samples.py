"""What a sampler gives back: at once, or while the device is still at it."""

from typing import NamedTuple, Protocol

import torch

from stepscope.engine.protocol.replies import PositionLogprobs


class Sampled(NamedTuple):
    """What was chosen for some rows, in their order."""

    token_ids: list[int]
    logprobs: dict[int, PositionLogprobs]  # of the rows whose requests ask for them


class SamplesInFlight(Protocol):
    """Tokens that a device is choosing."""

    @property
    def tokens(self) -> torch.Tensor:
        """[rows] int64, where the logits are: to go on with before the host knows them."""
        ...

    def collect(self) -> Sampled:
        """Wait for them."""
        ...
