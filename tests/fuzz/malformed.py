"""What a broken or malicious client might send: frames of the control socket.

Everything is drawn from one `random.Random`, so that a seed gives the same messages again.
"""

import random
import struct
from typing import Any

import msgspec

from stepscope.engine.protocol import commands
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.workload_spec import WorkloadSpec

SAMPLING = SamplingParams(max_tokens=4, stop=("x",))
HELLO = commands.ChatMessage(role="user", content="hello")
HARMLESS = (
    commands.GetInfo(),
    commands.GetSnapshot(),
    commands.GetKeptSnapshot(past_s=60.0),
    commands.ReplayFrom(sequence=3, limit=10),
    commands.GetAudit(after=1),
)
CHANGES = (
    commands.SetKnobs(changes={"max_num_seqs": 3, "order": "arrival"}, who="fuzz"),
    commands.Pause(who="fuzz", once="abc", engine_id="e", seen=3),
    commands.Resume(),
    commands.StepOnce(n=7),
    commands.Submit(prompt_token_ids=[1, 2, 3], sampling=SAMPLING),
    commands.Submit(messages=[HELLO], client_id="c"),
    commands.Abort(request_id=3),
    commands.ResetPrefixCache(),
    commands.SetWorkload(workload=WorkloadSpec(rate=2.0)),
    commands.Drain(),
    commands.Shutdown(),
)
SEEDS = [commands.encode(command) for command in (*HARMLESS, *CHANGES)]
KINDS = (
    *("random", "flipped", "truncated", "extended", "spliced", "lengths", "nested", "mistyped"),
    *("huge", "frames"),
)
_NUMBERS = (0, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"))
_NASTY = (*_NUMBERS, None, True, False, "", "x" * 10_000, "\x00", "é" * 99, b"", b"x" * 256)


def is_command(payload: bytes) -> bool:
    """Whether an engine would accept it as a command that may change something."""
    try:
        return not isinstance(commands.decode_command(payload), tuple(map(type, HARMLESS)))
    except msgspec.DecodeError:
        return False


class Malformer:
    """Draws frames, of each kind as often; a huge one only now and then."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def frames(self) -> tuple[str, list[bytes]]:
        """Their kind, and frames that no engine may accept as a command."""
        draw = self._random
        while True:
            kind = draw.choice(KINDS)
            if kind == "huge" and draw.random() > 0.02:
                continue
            payload = self._payload(kind)
            if kind == "frames":
                return kind, self._wrong_frames(payload)
            if not is_command(payload):
                return kind, [draw.randbytes(8), payload]

    def _payload(self, kind: str) -> bytes:
        draw = self._random
        payload = bytearray(draw.choice(SEEDS))
        place = draw.randrange(len(payload))
        match kind:
            case "flipped":
                for _ in range(draw.randint(1, 4)):
                    payload[draw.randrange(len(payload))] ^= 1 << draw.randrange(8)
            case "truncated":
                del payload[place:]
            case "extended":
                payload += draw.randbytes(draw.randint(1, 40))
            case "spliced":
                other = draw.choice(SEEDS)
                payload[place:] = other[draw.randrange(len(other)) :]
            case "lengths":  # a map, array or string that claims to be longer than what follows
                head = draw.choice((0xDF, 0xDD, 0xDB, 0xC6, 0xC9, 0xDE, 0xDC, 0xD9))
                size = draw.choice((2**32 - 1, 2**31, 65_536, 255))
                payload[place : place + 1] = bytes([head]) + struct.pack(">I", size)
            case "nested":
                opening = draw.choice((b"\x91", b"\x81\xa1x"))
                return opening * draw.choice((10, 900, 5_000, 100_000)) + b"\xc0"
            case "mistyped":
                document: dict[str, Any] = msgspec.msgpack.decode(payload)
                document[draw.choice([*document, "mood", "x" * 300])] = self._anything(3)
                return msgspec.msgpack.encode(document)
            case "huge":
                limit = commands.MAX_COMMAND_BYTES
                text = "y" * (limit + draw.choice((-100, 1, limit // 2)))
                return msgspec.msgpack.encode({"type": "Submit", "prompt": "x", "client_id": text})
            case _:
                return draw.randbytes(draw.choice((0, 1, 2, 5, 50, 500, 5000)))
        return bytes(payload)

    def _anything(self, depth: int) -> Any:
        inner = range(self._random.randint(0, 4) if depth else 0)
        draw = self._random.random()
        if draw < 0.2:
            return [self._anything(depth - 1) for _ in inner]
        if draw < 0.4:
            return {str(number): self._anything(depth - 1) for number in inner}
        return self._random.choice(_NASTY)

    def _wrong_frames(self, payload: bytes) -> list[bytes]:
        number = self._random.randbytes(8)
        wrong = (
            *([b""], [number], [number * 40, payload], [number, payload, payload]),
            *([number[: self._random.randrange(8)], payload], [number, b"", payload]),
            *([b""] * 4, [number] * 200),
        )
        return list(self._random.choice(wrong))
