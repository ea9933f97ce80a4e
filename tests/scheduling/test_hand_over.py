"""A prefill engine loses its decode engine and finds another within one step."""

from types import SimpleNamespace
from typing import Any

from stepscope.engine.handover.hand_over import HandOver
from stepscope.engine.loop.client_requests import ClientRequests
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol.commands import KVTicket, Submit
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
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
