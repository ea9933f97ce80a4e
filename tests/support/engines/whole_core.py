"""`WholeCore`: an `EngineCore` on a virtual clock; its clients and telemetry are kept."""

from typing import Any

from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol.commands import Command, Submit
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import Runner
from stepscope.engine.simulation.simulated import SimulatedRunner
from stepscope.engine.text.text_stream import StopText
from tests.support.engines.core_ends import Client, Sink
from tests.support.engines.cost_model import CostModel
from tests.support.engines.kv_integrity import check_integrity
from tests.support.engines.simulated_run import simulated_info


class WholeCore:
    """An `EngineCore` with all that it needs.

    Args:
        runner: the simulated one by default.
        options: of `EngineCore`.
    """

    def __init__(
        self,
        limits: Limits,
        runner: Runner | None = None,
        num_blocks: int = 64,
        block_size: int = 16,
        knobs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.runner: Any = runner or SimulatedRunner(CostModel())
        settings = Knobs(**{"max_num_seqs": limits.max_num_seqs, **(knobs or {})})
        self.scheduler = Scheduler(KVCacheManager(num_blocks, block_size), settings, limits)
        self.sink = Sink()
        self.core = EngineCore(
            simulated_info(limits, num_blocks, block_size, seed=0),
            self.runner,
            self.scheduler,
            self.sink,
            **options,
        )

    def submit(
        self, prompt: list[int], stop_text: StopText | None = None, **sampling: Any
    ) -> Client:
        client = Client()
        submit = Submit(client_id="c", prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
        self.core.inbox.put(Call(submit, client, prompt, stop_text))
        return client

    def ask(self, command: Command) -> Client:
        client = Client()
        self.core.inbox.put(Call(command, client))
        return client

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.core.step():
                self.core.settle()
                return
            check_integrity(self.scheduler.kv)
        raise AssertionError("the requests never end")
