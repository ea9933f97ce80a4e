"""A simulated engine behind real sockets: `simulated_engine.py ENDPOINT [KEYS [FILE [HANG]]]`.

Not a test. Like the fixture `live_engine`, in a process of its own and without torch. KEYS is
a folder of authorised keys, for those addresses that need none. With FILE it is still starting
until that file exists. While there is a file HANG, its steps do not end.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from stepscope.engine.loop.audit import ControlTally
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.step_watcher import StepWatcher
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.gate import gate_of
from tests.support.engines.cost_model import CostModel
from tests.support.engines.live_engine import PacedRunner, running_engine

KEYS, FILE, HANG = [*sys.argv[2:], "", "", ""][:3]


class HangingRunner(PacedRunner):
    def execute(self, step: ScheduledStep) -> StepResult:
        while HANG and Path(HANG).exists():
            time.sleep(0.01)
        return super().execute(step)


def main() -> None:
    with gate_of(KEYS, Endpoint.parse(sys.argv[1])) as gate:

        def open_publisher(address: str) -> Publisher:
            while FILE and not Path(FILE).exists():
                time.sleep(0.01)
            return Publisher(address, ring_size=4096, gate=gate)

        with running_engine(
            sys.argv[1],
            gate=gate,
            runner=HangingRunner(CostModel(floor_ms=2.0, token_us=2.0, context_ns=0.0)),
            open_publisher=open_publisher,
            seed=os.getpid(),
            has_tokenizer=False,
            control_tally=ControlTally(gate),
        ) as engine:
            StepWatcher(engine.core, engine.publisher.publish_aside).start()
            engine.thread.join()


if __name__ == "__main__":
    main()
