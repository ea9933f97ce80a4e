"""Carries out commands. Runs on the engine's thread, between two steps."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import UNSET

from stepscope.engine.loop.changes import apply_change
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol.commands import Change, GetAudit, GetSnapshot, Submit
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import Error, Submitted

if TYPE_CHECKING:
    from stepscope.engine.loop.core import EngineCore

log = logging.getLogger("stepscope.engine")


def apply(core: "EngineCore", call: Call) -> None:
    """Carry out one command and answer its client."""
    command = call.command
    with answering_errors(call):
        if isinstance(command, Change):
            apply_change(core, call, command)
        elif isinstance(command, Submit):
            _submit(core, call, command)
        elif isinstance(command, GetSnapshot):
            core.snapshots.ask(call.client)
        else:
            assert isinstance(command, GetAudit), "the control thread answers all others"
            call.client.reply(core.audit.page(command.after, command.limit))


@contextmanager
def answering_errors(call: Call) -> Iterator[None]:
    """Answer the client of a command with the error, if there is one; the engine goes on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it is logged
        call.client.reply(error_reply(error, type(call.command).__name__))


def error_reply(error: Exception, what: str) -> Error:
    """Return the answer to a command that raised `error`, and log it if it is a bug of ours."""
    if isinstance(error, ConfigError):
        return Error(code=error.code, message=str(error))
    log.error("%s failed", what, exc_info=error)
    return Error(code="internal", message="the engine failed; its log says why")


def _submit(core: "EngineCore", call: Call, command: Submit) -> None:
    if core.draining:
        core.client_requests.refuse(command.client_id, "draining")
        raise ConfigError("draining", "the engine takes no new requests: it is being drained")
    receiver, handed_over = core.scheduler.receiver, command.handed_over
    if receiver is None and handed_over is not UNSET:
        what = "this engine is not a decode engine: start it with --role decode"
        raise ConfigError("role", what)
    if receiver is not None:
        if handed_over is UNSET:
            core.client_requests.refuse(command.client_id, "no prefill engine")
            what = "a decode engine takes no prompts: send them to its prefill engine"
            raise ConfigError("role", what)
        num_tokens = len(call.token_ids or ()) + len(handed_over.output_token_ids) - 1
        receiver.check(handed_over.kv, num_tokens)
    if len(core.scheduler.waiting) >= core.max_waiting:
        core.client_requests.refuse(command.client_id, "queue full")
        raise ConfigError(
            "queue_full", f"{core.max_waiting} requests are waiting already; try again later"
        )
    request = core.client_requests.add(call, command)
    call.client.reply(
        Submitted(request_id=request.request_id, num_prompt_tokens=request.num_prompt_tokens)
    )
