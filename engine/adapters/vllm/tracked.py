"""`TrackedRequest`: one request of vLLM, and what was published of it."""

from stepscope.engine.adapters.vllm.shapes import VllmRequest
from stepscope.engine.protocol.wire import RequestStatus, RequestView


class TrackedRequest:
    """Two views of one request: as vLLM has scheduled it, and as observers know it.

    They differ while steps are in flight. The compiled row encoder reads the slots `request_id`
    and `block_table`.

    Attributes:
        request_id: ours; vLLM's goes out as the client's id.
        vllm: vLLM's own object.
        block_table: blocks it holds as scheduled, in order.
        is_prefilling: as scheduled, part of its prompt is still to come.
        recompute_until: tokens before this position are computed a second time.
        published_blocks, status, num_preemptions, num_cached: as published.
        ended: vLLM has freed it.
    """

    __slots__ = (
        "arrival_ns",
        "block_table",
        "ended",
        "first_ns",
        "has_first_token",
        "is_prefilling",
        "last_ns",
        "num_cached",
        "num_preemptions",
        "published_blocks",
        "recompute_until",
        "request_id",
        "status",
        "vllm",
        "was_preempted",
    )

    def __init__(self, request_id: int, vllm: VllmRequest, arrival_ns: int) -> None:
        self.request_id = request_id
        self.vllm = vllm
        self.arrival_ns = arrival_ns
        self.block_table: list[int] = []
        self.published_blocks: list[int] = []
        self.status: RequestStatus = "waiting"
        self.is_prefilling = True
        self.was_preempted = False
        self.has_first_token = False
        self.ended = False
        self.recompute_until = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.first_ns: int | None = None
        self.last_ns: int | None = None

    def view(self, num_in_flight: int) -> RequestView:
        """As a late joiner gets to know it.

        Args:
            num_in_flight: tokens of steps that are not published yet.
        """
        vllm = self.vllm
        return RequestView(
            request_id=self.request_id,
            client_id=vllm.request_id,
            status=self.status,
            arrival_ns=self.arrival_ns,
            num_prompt_tokens=vllm.num_prompt_tokens,
            max_tokens=vllm.max_tokens,
            priority=vllm.priority,
            num_computed_tokens=max(0, vllm.num_computed_tokens - num_in_flight),
            num_output_tokens=vllm.num_output_tokens,
            num_cached_tokens=self.num_cached,
            num_blocks=len(self.published_blocks),
            num_preemptions=self.num_preemptions,
            first_token_ns=self.first_ns,
            last_token_ns=self.last_ns,
        )
