"""`SglangRequest`: wraps SGLang's `Req` in the form that the step recorder reads."""

from stepscope.engine.adapters.sglang.shapes import SglangReq


class SglangRequest:
    """A request of SGLang. It exposes only counts, and never a token.

    Attributes:
        num_prompt_tokens: at arrival. SGLang shortens the prompt of a request that it rejects.
        is_waiting: whether the request is in SGLang's queue.
        was_admitted: whether the request has left the queue before.
    """

    __slots__ = ("is_waiting", "num_prompt_tokens", "req", "request_id", "was_admitted")

    def __init__(self, req: SglangReq) -> None:
        self.req = req
        self.request_id = req.rid
        self.num_prompt_tokens = len(req.origin_input_ids)
        self.is_waiting = True
        self.was_admitted = False

    @property
    def max_tokens(self) -> int:
        return int(self.req.sampling_params.max_new_tokens)

    @property
    def priority(self) -> int:
        return self.req.priority or 0

    @property
    def num_computed_tokens(self) -> int:
        return self.req.kv.kv_committed_len

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens that the client gets: those after a stop string do not count."""
        length = self.req.finished_len
        return len(self.req.output_ids) if length is None else length

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.req.output_ids)
