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

    def of(self, request: Request, first: int = 0) -> list[int]:
        """The hashes of the full blocks that it has by now, from `first` on."""
        num_full = len(request.token_ids) // self._kv.block_size
        return [self._named(request, index) for index in range(first, num_full)]

    def of_output(self, request: Request) -> list[int]:
        """Those that follow the full blocks of its prompt."""
        return self.of(request, request.num_prompt_tokens // self._kv.block_size)

    def _named(self, request: Request, index: int) -> int:
        digest = self._kv.digest(request, index)
        if isinstance(digest, int):
            digest = digest.to_bytes(16, "big", signed=True)
        return salted(digest, self._salt)


def salted(digest: bytes, salt: bytes) -> int:
    """What an engine's own hash of a block is called outside of it, in 64 bits."""
    return int.from_bytes(hashlib.blake2b(digest, digest_size=8, key=salt).digest(), "big")
