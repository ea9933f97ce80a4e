"""`PrefixHashes`: shows observers which requests begin with the same tokens, but no token."""

import hashlib

from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request


class PrefixHashes:
    """Salted 64-bit hashes of the full blocks of requests.

    The hash of a block covers all tokens up to its end, so two requests have the same tokens up to
    their last equal hash. Without the salt nobody can test whether a hash stands for a certain
    text.

    Args:
        salt: a secret, different for each engine; 64 bytes at most.
    """

    def __init__(self, kv: KVCacheManager, salt: bytes) -> None:
        self._kv = kv
        self._salt = salt

    def of_prompt(self, request: Request) -> list[int]:
        """Hashes of the full blocks of the prompt."""
        num_full = request.num_prompt_tokens // self._kv.block_size
        return [self._named(request, index) for index in range(num_full)]

    def of_output(self, request: Request) -> list[int]:
        """Hashes of the full blocks that follow those of the prompt, as far as tokens exist."""
        first = request.num_prompt_tokens // self._kv.block_size
        num_full = len(request.token_ids) // self._kv.block_size
        return [self._named(request, index) for index in range(first, num_full)]

    def _named(self, request: Request, index: int) -> int:
        digest = self._kv.digest(request, index)
        if isinstance(digest, int):
            digest = digest.to_bytes(16, "big", signed=True)
        return salted(digest, self._salt)


def salted(digest: bytes, salt: bytes) -> int:
    """Return the 64-bit hash to publish for the hash by which the engine identifies a block."""
    return int.from_bytes(hashlib.blake2b(digest, digest_size=8, key=salt).digest(), "big")
