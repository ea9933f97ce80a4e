"""`VllmPrefixHashes`: which contexts begin alike, from the hashes of vLLM's own prefix cache."""

import os
import secrets

from stepscope.engine.adapters.vllm.shapes import VllmRequest
from stepscope.engine.scheduling.prefix_hashes import salted

VARIABLE = "STEPSCOPE_PREFIX_HASHES"


class VllmPrefixHashes:
    """Names the full blocks of requests, salted; see `Arrived.prefix_hashes`.

    Args:
        block_size: tokens that one of vLLM's hashes stands for.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._salt = secrets.token_bytes(16)

    @classmethod
    def if_wanted(cls, block_size: int) -> "VllmPrefixHashes | None":
        """None unless the environment asks for them."""
        return cls(block_size) if os.environ.get(VARIABLE, "") == "1" else None

    def of_prompt(self, request: VllmRequest) -> list[int]:
        """Of the full blocks of its prompt."""
        return self._named(request, 0, request.num_prompt_tokens // self._block_size)

    def of_output(self, request: VllmRequest) -> list[int]:
        """Of the full blocks that follow them."""
        first = request.num_prompt_tokens // self._block_size
        return self._named(request, first, request.num_tokens // self._block_size)

    def _named(self, request: VllmRequest, first: int, end: int) -> list[int]:
        # vLLM makes them where it caches prefixes, and has one for each full block by then.
        hashes = request.block_hashes[first:end]
        return [salted(bytes(each), self._salt) for each in hashes]
