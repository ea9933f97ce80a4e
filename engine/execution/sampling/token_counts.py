"""`TokenCounts`: which tokens a request has had, and how often it has produced each.

What penalties need, at the cost of one dictionary access a token instead of a look at the whole
text. Only tokens that occur are kept, so a penalty touches as many logits as there are different
tokens, not the vocabulary.
"""

import numpy as np
import numpy.typing as npt

from stepscope.engine.scheduling.request import Request


class TokenCounts:
    """Different tokens of a request in the order in which they came.

    Args:
        with_prompt: the prompt's tokens are among them, with a count of 0 until they are produced.
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
        """How often each of `token_ids` stands in the output."""
        return self._counts[: len(self._place)]

    def catch_up(self, request: Request) -> None:
        """Count what the request has produced since the last time.

        A preemption takes blocks, no tokens: what was counted stays right.
        """
        for token_id in request.token_ids[self._num_seen :]:
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[place] = token_id
            self._counts[place] += 1
        self._num_seen = request.num_tokens
