"""`VllmPrefixHashes`: salted hashes of prompt prefixes, from vLLM's own prefix cache."""

import os
import secrets

from stepscope.engine.adapters.vllm.shapes import VllmRequest
from stepscope.engine.scheduling.prefix_hashes import salted

VARIABLE = "STEPSCOPE_PREFIX_HASHES"


class VllmPrefixHashes:
    """Salts vLLM's hashes of the full KV blocks of requests. See `Arrived.prefix_hashes`.

    Args:
        block_size: number of tokens that each hash of vLLM covers.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._salt = secrets.token_bytes(16)

    @classmethod
    def if_wanted(cls, block_size: int) -> "VllmPrefixHashes | None":
        """Return an instance if STEPSCOPE_PREFIX_HASHES is "1" in the environment, else None."""
        return cls(block_size) if os.environ.get(VARIABLE, "") == "1" else None

    def of_prompt(self, request: VllmRequest) -> list[int]:
        """Return the salted hashes of the full blocks of the request's prompt."""
        return self._named(request, 0, request.num_prompt_tokens // self._block_size)

    def of_output(self, request: VllmRequest) -> list[int]:
        """Return the salted hashes of the full blocks after the prompt's full blocks."""
        first = request.num_prompt_tokens // self._block_size
        return self._named(request, first, request.num_tokens // self._block_size)

    def _named(self, request: VllmRequest, first: int, end: int) -> list[int]:
        # With prefix caching, vLLM has a hash for each full block by now.
        hashes = request.block_hashes[first:end]
        return [salted(bytes(each), self._salt) for each in hashes]
