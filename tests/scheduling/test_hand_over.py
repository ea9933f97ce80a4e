"""What a prefill engine does about its decode engine, without processes."""

from types import SimpleNamespace
from typing import Any

from stepscope.engine.handover.decode_link import AwayRequest
from stepscope.engine.handover.hand_over import HandOver
from stepscope.engine.loop.client_requests import ClientRequests
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol.commands import KVTicket, Submit
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.replies import UNSOUND_LOGITS, Output
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from tests.support.engines.core_ends import Client

LIMITS = Limits(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)
TICKET = KVTicket(file=f"stepscope-kv-{'0' * 32}", layout="", frames=[0], stamp=1)


class Sender:
    """A sender whose room the test sets."""

    has_room = False

    def put(self, blocks: object) -> KVTicket | None:
        return TICKET if self.has_room else None


def test_a_hand_over_waiting_for_room_goes_to_the_next_decode_engine_found() -> None:
    scheduler = Scheduler(KVCacheManager(8, 16), Knobs(max_num_batched_tokens=64), LIMITS)
    requests = ClientRequests(scheduler, lambda: 0)
    submit = Submit(prompt_token_ids=[1] * 20, sampling=SamplingParams(max_tokens=9))
    request = requests.add(Call(submit, Client(), [1] * 20), submit)
    sent: list[Any] = []
    link = SimpleNamespace(
        is_open=True, engine="d", start=lambda owner, post: None, send=sent.append
    )
    core: Any = SimpleNamespace(
        scheduler=scheduler,
        client_requests=requests,
        info=SimpleNamespace(name="p"),
        set_decode_engine=lambda name: None,
    )
    sender: Any = Sender()
    hand_over = HandOver(core, link, sender, seed_of=lambda request: 0)  # type: ignore[arg-type]
    rows = scheduler.schedule()
    scheduler.update(rows, [5])
    request.first_token_ns = request.last_token_ns = 1
    hand_over.after_step(rows)
    assert scheduler.leaving == [request]
    assert not scheduler.has_work()
    sender.has_room = True
    hand_over.lost([])  # the link is open again by the time its loss is reported
    hand_over.opened()
    assert not scheduler.leaving
    assert [away.request for away in sent] == [request]


def test_a_client_is_told_why_the_decode_engine_ended_its_request() -> None:
    client = Client()
    submit = Submit(prompt_token_ids=[1] * 20, sampling=SamplingParams(max_tokens=9))
    request = Request(3, [1] * 20, submit.sampling, arrival_ns=0)
    away = AwayRequest(request, client, submit, handed_over=None, ticket=None)  # type: ignore[arg-type]
    last = {"num_prompt_tokens": 20, "num_cached_tokens": 0, "num_output_tokens": 1}
    ended = Output(request_id=9, token_ids=[], finish_reason="abort", why=UNSOUND_LOGITS, **last)
    away.pass_on(ended, now_ns=1)
    [told] = client.outputs
    assert (told.request_id, told.finish_reason, told.why) == (3, "abort", UNSOUND_LOGITS)
