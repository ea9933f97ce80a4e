"""`PrefixHashes`: which contexts begin alike, for observers, without a token of them."""

import hashlib

from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request


class PrefixHashes:
    """Names the full blocks of requests by salted 64-bit hashes.

    The hash of a block is that of all tokens before its end. So two contexts are equal up to their
    last equal hash. Without the salt nobody can test which text a hash may stand for.

    Args:
        kv: of the engine; it hashes the same blocks for its prefix cache.
        salt: secret, and another one for each engine; 64 bytes at most.
    """

    def __init__(self, kv: KVCacheManager, salt: bytes) -> None:
        self._kv = kv
        self._salt = salt

    def of_prompt(self, request: Request) -> list[int]:
        """The hashes of the full blocks of its prompt."""
        num_full = request.num_prompt_tokens // self._kv.block_size
        return [self._named(request, index) for index in range(num_full)]

    def of_output(self, request: Request) -> list[int]:
        """Those of the full blocks after them, as far as it has got by now."""
        first = request.num_prompt_tokens // self._kv.block_size
        num_full = len(request.token_ids) // self._kv.block_size
        return [self._named(request, index) for index in range(first, num_full)]

    def _named(self, request: Request, index: int) -> int:
        digest = self._kv.digest(request, index)
        if isinstance(digest, int):
            digest = digest.to_bytes(16, "big", signed=True)
        return salted(digest, self._salt)


def salted(digest: bytes, salt: bytes) -> int:
    """What an engine's own hash of a block is called outside of it, in 64 bits."""
    return int.from_bytes(hashlib.blake2b(digest, digest_size=8, key=salt).digest(), "big")
