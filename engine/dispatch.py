"""What each command does to the engine. Runs on the engine's thread, between two steps."""

from collections.abc import Callable
from typing import Any

from stepscope.engine.commands import (
    Abort,
    Ack,
    Command,
    Drain,
    Error,
    GetSnapshot,
    Pause,
    ResetPrefixCache,
    Resume,
    SetKnobs,
    Shutdown,
    StepOnce,
    Submit,
    Submitted,
)
from stepscope.engine.config import ConfigError
from stepscope.engine.core import EngineCore
from stepscope.engine.inbox import Call
from stepscope.engine.wire import KnobsChanged


def apply(core: EngineCore, call: Call) -> None:
    """Carry out one command and answer it."""
    handler = _HANDLERS.get(type(call.command))
    if handler is None:
        call.client.reply(
            Error(
                code="unsupported",
                message=f"{type(call.command).__name__} is not answered by this engine",
            )
        )
        return
    try:
        handler(core, call, call.command)
    except ConfigError as error:
        call.client.reply(Error(code=error.code, message=str(error)))


def _acknowledge(core: EngineCore, call: Call, detail: str = "") -> None:
    call.client.reply(Ack(effective_step=core.next_step, version=core.knobs_version, detail=detail))


def _submit(core: EngineCore, call: Call, command: Submit) -> None:
    assert call.token_ids is not None, "a Submit is prepared before it is queued"
    assert (call.stop_text is not None) == bool(command.sampling.stop), "... and its stop strings"
    if core.draining:
        core.refuse(command.client_id, "draining")
        raise ConfigError("draining", "the engine takes no new requests: it is being drained")
    if len(core.scheduler.waiting) >= core.max_waiting:
        core.refuse(command.client_id, "queue full")
        raise ConfigError(
            "queue_full", f"{core.max_waiting} requests are waiting already; try again later"
        )
    request = core.add(command, call.token_ids, call.client, call.stop_text)
    call.client.reply(
        Submitted(request_id=request.request_id, num_prompt_tokens=request.num_prompt_tokens)
    )


def _abort(core: EngineCore, call: Call, command: Abort) -> None:
    if not core.abort(command.request_id, "asked for"):
        raise ConfigError(
            "not_found", f"request {command.request_id} is not there (or has ended already)"
        )
    _acknowledge(core, call)


def _set_knobs(core: EngineCore, call: Call, command: SetKnobs) -> None:
    old = core.scheduler.knobs
    new = old.changed(command.changes, core.limits)
    expected = command.expected_version
    if expected is not None and expected != core.knobs_version:
        raise ConfigError(
            "conflict",
            f"the knobs are at version {core.knobs_version}, not {expected}: somebody changed "
            "them meanwhile; look at the new values and try again",
        )
    if command.dry_run:
        _acknowledge(core, call, "dry run: nothing was changed")
        return
    before, after = old.as_dict(), new.as_dict()
    changed = {name: value for name, value in after.items() if value != before[name]}
    if changed:
        core.scheduler.knobs = new
        core.knobs_version += 1
        core.publish(
            KnobsChanged(
                version=core.knobs_version,
                effective_step=core.next_step,
                who=command.who,
                old={name: before[name] for name in changed},
                new=changed,
                time_ns=core.runner.clock(),
            )
        )
    _acknowledge(core, call, "" if changed else "the knobs have these values already")


def _pause(core: EngineCore, call: Call, _: Pause) -> None:
    core.steps_allowed = 0
    _acknowledge(core, call)


def _resume(core: EngineCore, call: Call, _: Resume) -> None:
    core.steps_allowed = None
    core.draining = False
    _acknowledge(core, call)


def _step(core: EngineCore, call: Call, command: StepOnce) -> None:
    core.steps_allowed = command.n
    _acknowledge(core, call, f"paused after step {core.next_step + command.n - 1}")


def _reset_prefix_cache(core: EngineCore, call: Call, _: ResetPrefixCache) -> None:
    num_blocks = core.scheduler.kv.reset_prefix_cache()
    _acknowledge(core, call, f"{num_blocks} blocks forgotten")


def _get_snapshot(core: EngineCore, call: Call, _: GetSnapshot) -> None:
    core.snapshots.ask(call.client)


def _drain(core: EngineCore, call: Call, _: Drain) -> None:
    core.draining = True
    _acknowledge(core, call, f"{len(core.scheduler.requests)} requests to finish")


def _shutdown(core: EngineCore, call: Call, _: Shutdown) -> None:
    core.stopping = True
    _acknowledge(core, call)


_HANDLERS: dict[type[Command], Callable[[EngineCore, Call, Any], None]] = {
    Submit: _submit,
    Abort: _abort,
    SetKnobs: _set_knobs,
    Pause: _pause,
    Resume: _resume,
    StepOnce: _step,
    ResetPrefixCache: _reset_prefix_cache,
    GetSnapshot: _get_snapshot,
    Drain: _drain,
    Shutdown: _shutdown,
}
