"""A simulated engine behind real sockets: `simulated_engine.py ENDPOINT [KEYS [FILE [HANG]]]`.

Not a test. Like the fixture `live_engine`, in a process of its own and without torch. KEYS is
a folder of authorised keys, for those addresses that need none. With FILE it is still starting
until that file exists. While there is a file HANG, its steps do not end.
"""

import os
import sys
import time
from pathlib import Path

from paced_runner import PacedRunner

sys.path.insert(0, str(Path(__file__).parents[3]))

from stepscope.engine.control.intake import Intake
from stepscope.engine.control.server import ControlServer
from stepscope.engine.loop.audit import ControlTally
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import VOCAB_SIZE
from stepscope.engine.simulation.step_time import CostModel
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.step_watcher import StepWatcher
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
from stepscope.engine.transport.gate import gate_of, local_key
from tests.support.engines.simulated_run import simulated_info


class HangingRunner(PacedRunner):
    def execute(self, step: ScheduledStep) -> StepResult:
        while len(sys.argv) > 4 and Path(sys.argv[4]).exists():
            time.sleep(0.01)
        return super().execute(step)


def main() -> None:
    endpoint = Endpoint.parse(sys.argv[1])
    limits = Limits(max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=1024)
    keys = sys.argv[2] if len(sys.argv) > 2 else ""
    with gate_of(keys, endpoint) as gate, EndpointLock(endpoint, local_key(gate)):
        while len(sys.argv) > 3 and sys.argv[3] and not Path(sys.argv[3]).exists():
            time.sleep(0.01)
        publisher = Publisher(endpoint.telemetry, ring_size=4096, gate=gate)
        core = EngineCore(
            simulated_info(limits, 256, 16, seed=os.getpid(), is_served=True),
            HangingRunner(CostModel(floor_ms=2.0, token_us=2.0, context_ns=0.0)),
            Scheduler(KVCacheManager(256, 16), Knobs(max_num_seqs=64), limits),
            limits,
            publisher,
            control_tally=ControlTally(gate),
        )
        control = ControlServer(
            endpoint.control,
            core,
            Intake(None, VOCAB_SIZE, limits.max_model_len),
            None,
            publisher.replay,
            gate,
        )
        control.start()
        StepWatcher(core, publisher.publish_aside).start()
        core.run()


if __name__ == "__main__":
    main()
