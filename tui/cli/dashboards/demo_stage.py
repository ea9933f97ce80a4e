"""What the demo does in its first minute: load grows, one stall comes, hints say what to press."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import CommandRefused, EngineUnreachable
from stepscope.engine.protocol.commands import Command, SetKnobs, SetWorkload, Submit
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import StepCosts
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.history.history import History

log = logging.getLogger("stepscope.tui")

WHO = "stepscope demo"
STALL_S = 9.0  # when a long prompt is prefilled whole
_STALL_MS = 800.0  # how long it shall take
_LEAST_TOKENS, _MOST_TOKENS = 768, 3072
_WHOLE: dict[str, int | bool] = {
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 8192,
}
_TIMEOUT_S = 60.0  # commands wait for the step in flight
_AGAIN_S = 0.4  # the prompt is being prefilled by then, however slow the machine
# Requests under way from a second on. Two at a time: their prompts fit into three seconds.
_RAMP = {0.0: 2, 3.0: 4, 6.0: 6, 11.0: 8, 12.5: 10, 14.0: 12}


class Act(NamedTuple):
    """A command to the engine at a second of the demo, and what to tell the operator then."""

    at_s: float
    command: Command | None = None
    hint: str = ""


def first_minute(workload: WorkloadSpec, knobs: Knobs, costs: StepCosts | None) -> list[Act]:
    """Return the acts of the demo, in order of time; `costs` tell how long a stall may be."""
    num_tokens = _LEAST_TOKENS
    if costs is not None and costs.prefill_ms > 0:
        fitting = round(_STALL_MS / costs.prefill_ms * costs.num_prefill_tokens)
        num_tokens = max(_LEAST_TOKENS, min(_MOST_TOKENS, fitting))
    acts = [
        Act(at_s, SetWorkload(workload=replace(workload, max_concurrency=num, seed=n), who=WHO))
        for n, (at_s, num) in enumerate(_RAMP.items())
    ]
    text = " ".join(f"Line {n} of a long document." for n in range(num_tokens))
    prompt = Submit(
        client_id="the-long-prompt",
        prompt=text,
        max_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=16, ignore_eos=True),
        stream=False,
        with_text=False,
    )
    before = {name: value for name, value in knobs.as_dict().items() if name in _WHOLE}
    reason = "a prompt prefilled whole, to show a stall"
    acts += [
        Act(4.0, hint="each line is a request, each column a step; space stops the picture"),
        Act(STALL_S, SetKnobs(changes={**_WHOLE}, reason=reason, who=WHO)),
        Act(STALL_S, prompt),
        Act(STALL_S + _AGAIN_S, SetKnobs(changes=before, reason="chunks again", who=WHO)),
        Act(STALL_S + 2.0, hint="all stood still: w goes there, Enter says why, L comes back"),
        Act(32.0, hint="B changes the token budget and shows what that does; ? lists all keys"),
    ]
    return sorted(acts, key=lambda act: act.at_s)


class DemoStage:
    """Plays the acts on a thread, until `history` tells that someone else changed the engine."""

    def __init__(self, endpoint: Endpoint, acts: Sequence[Act], history: History) -> None:
        self._endpoint = endpoint
        self._acts = acts
        self._history = history
        self._hints: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._play, name="demo", daemon=True)

    def start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def news(self) -> str | None:
        """Return a hint that was not shown yet; None if there is none. The first call starts."""
        self.start()
        return self._hints.pop(0) if self._hints else None

    def _play(self) -> None:
        start_s = time.monotonic()
        with ControlClient(self._endpoint, _TIMEOUT_S) as client:
            for act in self._acts:
                if self._stopping.wait(max(0.0, start_s + act.at_s - time.monotonic())):
                    return
                if any(entry.who != WHO for entry in self._history.state.audit):
                    return
                if act.hint:
                    self._hints.append(act.hint)
                if act.command is not None:
                    try:
                        client.ask(act.command)
                    except CommandRefused as error:
                        log.warning("the demo goes on without a step: %s", error)
                    except EngineUnreachable:
                        return
            self._stopping.wait()  # the prompt lives as long as its client
