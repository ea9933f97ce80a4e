"""`LiveEngine`: a simulated engine behind real sockets, on a thread of the test's process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stepscope.engine.control.intake import Intake
from stepscope.engine.control.server import ControlServer
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.protocol.commands import GetAudit, Shutdown
from stepscope.engine.protocol.knobs import ConfigError, Knobs, Limits
from stepscope.engine.protocol.replies import AnyReply
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import Runner, ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import VOCAB_SIZE, SimulatedRunner
from stepscope.engine.simulation.step_time import shape_of
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.token_publisher import TokenPublisher
from stepscope.engine.text.tokenizer import TextStream
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
from stepscope.engine.transport.gate import Gate
from tests.support.engines.core_ends import GivenWorkload
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import simulated_info


class ByteCodec:
    """One token a byte, and no chat template."""

    def encode(self, text: str, most: int | None = None) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: object, most: int | None = None) -> list[int]:
        raise ConfigError("no_chat_template", "messages: bytes have no chat template")

    def text_stream(self) -> TextStream:
        return TextStream(
            lambda token_ids: bytes(i for i in token_ids if i < 256).decode(errors="replace")
        )


class PacedRunner(SimulatedRunner):
    """A simulated runner that sleeps as long as its cost model says."""

    def clock(self) -> int:
        return time.monotonic_ns()

    def execute(self, step: ScheduledStep) -> StepResult:
        launch_ns = time.monotonic_ns()
        token_ids = super().execute(step).token_ids
        time.sleep(self._cost.step_time(shape_of(step)).device_s)
        return StepResult(token_ids, launch_ns=launch_ns, tokens_ns=time.monotonic_ns())


@dataclass
class LiveEngine:
    endpoint: Endpoint
    core: EngineCore
    publisher: Publisher
    control: ControlServer
    thread: threading.Thread
    workload: GivenWorkload
    changes: dict[str, Any]  # of its info, from its next publication on

    def becomes(self, **changes: Any) -> None:
        """Let an engine with another description answer at the address from now on."""
        self.changes.update(changes)
        done, core = threading.Event(), self.core

        class OnItsThread:
            def reply(self, message: AnyReply) -> None:
                core.publish_info()
                done.set()

        core.inbox.put(Call(GetAudit(), OnItsThread()))
        assert done.wait(60), "the engine does not answer"


LIMITS = Limits(max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=1024)


@contextmanager
def running_engine(
    address: Path | str,
    *,
    with_tokens: bool = False,
    gate: Gate | None = None,
    limits: Limits = LIMITS,
    num_blocks: int = 256,
    runner: Runner | None = None,
    knobs: Knobs | None = None,
    open_publisher: Callable[[str], Publisher] | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    has_tokenizer: bool = True,
    **options: Any,
) -> Iterator[LiveEngine]:
    """Run it until the end of the block, or until its core stops.

    Args:
        address: an endpoint, or the folder of one.
        tokenizer: of `runner`; None: bytes.
        options: of `EngineCore`.
    """
    endpoint = Endpoint.parse(f"{address}/engine" if isinstance(address, Path) else address)
    cost = CostModel(floor_ms=5.0, token_us=2.0, context_ns=0.0)
    with EndpointLock(endpoint, gate and gate.local):
        if open_publisher is not None:
            publisher = open_publisher(endpoint.telemetry)
        else:
            publisher = Publisher(endpoint.telemetry, ring_size=4096, gate=gate)
        knobs = knobs or Knobs(max_num_seqs=limits.max_num_seqs)
        scheduler = Scheduler(KVCacheManager(num_blocks, 16), knobs, limits)
        info = simulated_info(limits, num_blocks, 16, seed, is_served=True)
        workload, codec = GivenWorkload(), (tokenizer or ByteCodec()) if has_tokenizer else None
        changes: dict[str, Any] = {}
        core = EngineCore(
            msgspec.structs.replace(info, with_tokens=with_tokens),
            runner or PacedRunner(cost),
            scheduler,
            publisher,
            workload=workload,
            token_publisher=TokenPublisher(ByteCodec().text_stream) if with_tokens else None,
            anchor=lambda info: msgspec.structs.replace(info, **changes),
            **options,
        )
        control = ControlServer(
            endpoint.control,
            core,
            Intake(
                codec,
                getattr(runner, "vocab_size", VOCAB_SIZE),
                limits.max_model_len,
                with_tokens=with_tokens,
            ),
            tokenizer,
            publisher.replay,
            gate,
        )
        control.start()
        thread = threading.Thread(target=core.run, name="engine")
        thread.start()
        try:
            yield LiveEngine(endpoint, core, publisher, control, thread, workload, changes)
        finally:
            core.inbox.put(Call(Shutdown(), SilentClient()))
            thread.join(timeout=60)
            assert not thread.is_alive(), "the engine did not stop"
            control.close()
            publisher.close()
