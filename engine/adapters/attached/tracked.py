"""`TrackedRequest`: one request of the other engine, and its published state."""

from typing import Protocol

from stepscope.engine.protocol.wire import RequestStatus, RequestView


class EngineRequest(Protocol):
    """A request as its engine reports it. The engine counts tokens as computed once scheduled."""

    @property
    def request_id(self) -> str: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def priority(self) -> int: ...


class TrackedRequest:
    """The two states of one request: as scheduled by its engine, and as published.

    They differ while steps are in flight. The compiled row encoder reads the slots `request_id`
    and `block_table`.

    Attributes:
        max_tokens: tokens that the request may put out at most; 0 if it only reads its prompt.
        request_id: our id. The engine's id is published as the client's id.
        engine_request: the engine's own object.
        block_table: a zero for each block that the request holds as scheduled.
        is_prefilling: whether part of the prompt is not scheduled yet.
        num_known: tokens that it had when it was resumed last; all are computed before it decodes.
        num_computed: tokens that were computed once, of a request that prefills or was preempted.
        num_blocks, status, num_preemptions, num_cached: as published.
        held, held_blocks: why the engine holds it back while it waits, and the blocks that it has
            meanwhile, as published in `HeldRow`.
        elsewhere: as in `Arrived`.
        num_loaded: tokens whose keys and values come from elsewhere, as scheduled.
        is_loaded_early: whether they came before its first step.
        was_overtaken: whether one that came later was scheduled before it, for its priority.
        ended: whether the engine has ended it.
    """

    __slots__ = (
        "arrival_ns",
        "block_table",
        "elsewhere",
        "ended",
        "engine_request",
        "first_ns",
        "has_first_token",
        "held",
        "held_blocks",
        "is_loaded_early",
        "is_prefilling",
        "last_ns",
        "max_tokens",
        "num_blocks",
        "num_cached",
        "num_computed",
        "num_known",
        "num_loaded",
        "num_preemptions",
        "request_id",
        "status",
        "was_overtaken",
        "was_preempted",
    )

    def __init__(self, request_id: int, engine_request: EngineRequest, arrival_ns: int) -> None:
        self.request_id = request_id
        self.engine_request = engine_request
        self.max_tokens = engine_request.max_tokens
        self.arrival_ns = arrival_ns
        self.block_table: list[int] = []
        self.num_blocks = 0
        self.status: RequestStatus = "waiting"
        self.is_prefilling = True
        self.was_preempted = False
        self.has_first_token = False
        self.held = ""
        self.held_blocks = 0
        self.elsewhere: str | None = None
        self.num_loaded, self.is_loaded_early = 0, False
        self.was_overtaken = False
        self.ended = False
        self.num_known = self.num_computed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.first_ns: int | None = None
        self.last_ns: int | None = None

    def view(self, num_in_flight: int) -> RequestView:
        """Return the request's published state, for a snapshot.

        Args:
            num_in_flight: the request's tokens in steps that are not published yet.
        """
        engine_request = self.engine_request
        return RequestView(
            request_id=self.request_id,
            client_id=engine_request.request_id,
            status=self.status,
            arrival_ns=self.arrival_ns,
            num_prompt_tokens=engine_request.num_prompt_tokens,
            max_tokens=self.max_tokens,
            priority=engine_request.priority,
            num_computed_tokens=max(0, engine_request.num_computed_tokens - num_in_flight),
            num_output_tokens=engine_request.num_output_tokens,
            num_cached_tokens=self.num_cached,
            num_blocks=self.num_blocks,
            num_preemptions=self.num_preemptions,
            first_token_ns=self.first_ns,
            last_token_ns=self.last_ns,
            held=self.held,
            elsewhere=self.elsewhere,
        )
