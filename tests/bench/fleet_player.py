"""Plays a simulated session on many endpoints at once: `fleet_player.py RATE ENDPOINT...`.

Not a measurement. What many engines would publish, from one cheap process: the session is
simulated once, and each endpoint sends it under an engine id of its own, at so many steps a second.
"""

import sys
import time

import msgspec
import zmq

from stepscope.engine.protocol import commands, replies, wire
from stepscope.engine.protocol.commands import GetInfo, GetSnapshot, ReplayFrom
from stepscope.engine.protocol.replies import Replayed
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import EngineInfo, StepRecord
from stepscope.engine.simulation.simulated import SimulatedWorkload, simulate
from stepscope.engine.simulation.step_time import CostModel
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.state.session import SessionState

NUM_STEPS = 6_000
NUM_REQUESTS = 64


class Endpoints:
    """The sockets of all engines, and the messages they have sent."""

    def __init__(self, addresses: list[str]) -> None:
        context = zmq.Context.instance()
        self.state = SessionState()
        self.sequence = -1
        self.controls, self.publishers = [], []
        for address in addresses:
            endpoint = Endpoint.parse(address)
            control, publisher = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
            control.bind(endpoint.control)
            publisher.bind(endpoint.telemetry)
            self.controls.append(control)
            self.publishers.append(publisher)

    def info(self, number: int) -> EngineInfo:
        assert self.state.info is not None
        return msgspec.structs.replace(
            self.state.info, engine_id=f"played-{number}", name=f"played-{number}"
        )

    def publish(self, sequence: int, message: wire.Telemetry) -> None:
        self.state.apply(message)
        self.sequence = sequence
        payload = wire.encode(message)
        topic, frame = wire.TOPICS[type(message)], wire.sequence_frame(sequence)
        for number, publisher in enumerate(self.publishers):
            if isinstance(message, EngineInfo):
                payload = wire.encode(self.info(number))
            publisher.send_multipart([topic, frame, payload])

    def answer(self) -> None:
        """Answer the commands received meanwhile."""
        for number, control in enumerate(self.controls):
            while control.poll(0):
                identity, command_id, payload = control.recv_multipart()
                command = commands.decode_command(payload)
                reply = replies.encode(self._reply(number, command))
                control.send_multipart([identity, command_id, reply])

    def _reply(self, number: int, command: object) -> wire.Telemetry | Replayed:
        if isinstance(command, GetSnapshot):
            snapshot = self.state.snapshot(self.sequence)
            assert snapshot is not None
            return msgspec.structs.replace(snapshot, info=self.info(number))
        if isinstance(command, ReplayFrom):
            return Replayed(frames=[], oldest_sequence=self.sequence, next_sequence=self.sequence)
        assert isinstance(command, GetInfo), command
        return self.info(number)


def main() -> None:
    rate, addresses = float(sys.argv[1]), sys.argv[2:]
    messages = simulate(
        seed=1,
        num_steps=NUM_STEPS,
        knobs=Knobs(max_num_batched_tokens=2048, max_num_seqs=NUM_REQUESTS),
        num_blocks=4096,
        workload=SimulatedWorkload(rate=14.0, output_tokens=240),
        cost=CostModel(floor_ms=14.0, token_us=10.0, context_ns=1.0),
    )
    endpoints = Endpoints(addresses)
    print("ready", flush=True)
    due_s = time.monotonic()
    num_steps = 0
    for sequence, message in messages:
        endpoints.publish(sequence, message)
        if not isinstance(message, StepRecord):
            continue
        num_steps += 1
        if num_steps < 1_000:  # the first ones fill the seats
            continue
        due_s = max(due_s, time.monotonic() - 1) + 1 / rate
        while (left_s := due_s - time.monotonic()) > 0:
            endpoints.answer()
            time.sleep(min(left_s, 0.005))


if __name__ == "__main__":
    main()
