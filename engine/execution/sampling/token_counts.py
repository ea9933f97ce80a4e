"""`TokenCounts`: the distinct tokens of a request, and how often it has produced each.

Penalties need these counts. An update costs one dictionary access per new token, so the whole text
need not be scanned. Only tokens that occur are kept, so a penalty changes as many logits as there
are distinct tokens, not the whole vocabulary.
"""

import numpy as np
import numpy.typing as npt

from stepscope.engine.scheduling.request import Request


class TokenCounts:
    """The distinct tokens of a request, in order of first occurrence, and their counts.

    Args:
        with_prompt: whether to include the tokens of the prompt. Only output counts, so the count
            of a prompt token is 0 until the request produces that token.
    """

    def __init__(self, request: Request, with_prompt: bool) -> None:
        different = dict.fromkeys(request.prompt_token_ids if with_prompt else ())
        self._place = {token_id: place for place, token_id in enumerate(different)}
        prompt = np.fromiter(different, np.int64, len(different))
        self._token_ids: npt.NDArray[np.int64] = np.concatenate([prompt, np.empty(64, np.int64)])
        self._counts: npt.NDArray[np.float32] = np.zeros(len(self._token_ids), np.float32)
        self._num_seen = request.num_prompt_tokens  # tokens of the request that are counted

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        return self._token_ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `token_ids` occurs in the output."""
        return self._counts[: len(self._place)]

    def catch_up(self, request: Request) -> None:
        """Count the tokens that the request has produced since the last call."""
        for token_id in request.token_ids[self._num_seen :]:
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[place] = token_id
            self._counts[place] += 1
        self._num_seen = request.num_tokens
