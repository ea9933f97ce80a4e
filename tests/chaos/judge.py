"""Compares what clients have noted with what the engines had sent.

Raises `Wrong` for whatever was neither received nor shown as lost, exactly, and for what was lost
although the engine still had it when it was asked.
"""

import json
import subprocess
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy import Proxy

from stepscope.recordings.check.verify import verify
from stepscope.recordings.file.reader import Recording


class Wrong(Exception):  # noqa: N818
    """A fault that the run has found."""


@dataclass
class Engine:
    """One generation of the engine."""

    name: str
    truth: Path
    process: "subprocess.Popen[bytes]"
    sent: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # topic, step, checksum

    @property
    def last_sequence(self) -> int:
        with self.truth.open("rb") as file:
            file.seek(max(0, self.truth.stat().st_size - 200))
            lines = file.read().split(b"\n")
        return int(lines[-2].split()[0]) if len(lines) > 1 else -1

    def read_truth(self) -> None:
        for line in self.truth.read_text().splitlines():
            words = line.split()
            if len(words) == 4:  # the last one may be cut
                self.sent[int(words[0])] = (words[1], int(words[2]), int(words[3]))

    def check_sent(self, who: str, sequence: int, topic: str, checksum: int) -> None:
        if self.sent.get(sequence, ("", 0, 0))[::2] != (topic, checksum):
            raise Wrong(f"{who}: message {sequence} is not what was sent")


@dataclass
class Noted:
    """What a client noted of one engine."""

    joined: list[int] = field(default_factory=list)
    got: dict[int, tuple[str, int]] = field(default_factory=dict)  # topic, checksum
    # Of each reply of the replay ring: its first message, its end, and the oldest in the ring.
    replays: list[list[int]] = field(default_factory=list)
    session: dict[str, Any] = field(default_factory=dict)


@dataclass
class Client:
    """A subscriber or recorder, and its proxy."""

    name: str
    proxy: Proxy
    log: Path
    process: "subprocess.Popen[bytes]"

    def log_lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def has_noted(self, begin: str) -> bool:
        return any(line.startswith(begin) for line in reversed(self.log_lines()))

    def noted(self) -> dict[str, Noted]:
        """By the name of the engine, in their order."""
        found: dict[str, Noted] = defaultdict(Noted)
        now = Noted()
        for line in self.log_lines():
            kind, rest = line.split(maxsplit=1)
            words = rest.split()
            if kind == "join":
                now = found[words[0]]
                now.joined.append(int(words[1]))
            elif kind == "replay":
                now.replays.append([int(word) for word in words])
            elif kind == "got":
                if now.got and int(words[0]) <= (newest := next(reversed(now.got))):
                    raise Wrong(f"{self.name} got {words[0]} after {newest}")
                now.got[int(words[0])] = words[1], int(words[2])
            else:
                session = json.loads(rest)
                found[session["engine"]].session = session
        return found


def check_observer(client: Client, engines: Sequence[Engine]) -> dict[str, int]:
    """Compare an observer's notes with the truth; return its figures."""
    told, noted = Counter[str](), client.noted()
    if set(noted) != {engine.name for engine in engines}:
        raise Wrong(f"{client.name} joined {sorted(noted)}, not {[e.name for e in engines]}")
    for engine in engines:
        mine, who = noted[engine.name], f"{client.name} of {engine.name}"
        session = mine.session
        for sequence, (topic, checksum) in mine.got.items():
            engine.check_sent(who, sequence, topic, checksum)
        expected = range(mine.joined[0] + 1, session["last_sequence"] + 1)
        missing = [number for number in expected if number not in mine.got]
        shown = [n for first, last, *_ in session["gaps"] for n in range(first, last + 1)]
        if shown != missing or session["num_lost"] != len(missing):
            raise Wrong(
                f"{who}: {len(missing)} messages missing, {len(shown)} in gaps, "
                f"{session['num_lost']} counted"
            )
        check_steps(who, engine, mine, missing)
        check_asked(who, missing, mine)
        if session["num_bad"]:
            raise Wrong(f"{who}: {session['num_bad']} messages could not be read")
        told["joins"] += len(mine.joined)
        told["received"] += len(mine.got)
        told["lost"] += len(missing)
        told["gaps"] += len(session["gaps"])
        asked = {number for first, end, _ in mine.replays for number in range(first, end)}
        told["healed"] += len(asked & mine.got.keys())
    last = noted[engines[-1].name].session
    if (last["status"], last["error"], last["needs_snapshot"]) != ("live", None, False):
        raise Wrong(f"{client.name} ends {last['status']}: {last['error']}")
    return dict(told)


def check_steps(who: str, engine: Engine, mine: Noted, missing: Sequence[int]) -> None:
    """Check that the history holds the received steps, and shows a gap for each lost one."""
    steps = [step for number in mine.got if (step := engine.sent[number][1]) >= 0]
    if steps != mine.session["steps"]:
        raise Wrong(f"{who}: {len(steps)} steps came, {len(mine.session['steps'])} are kept")
    for number in missing:
        step = engine.sent[number][1]
        if step >= 0 and not any(
            after < step and (before is None or step < before)
            for _, _, after, before in mine.session["gaps"]
        ):
            raise Wrong(f"{who}: step {step} is lost and no gap shows it")


def check_asked(who: str, missing: Sequence[int], mine: Noted) -> None:
    """Check that each lost message was requested, and was no longer in the ring."""
    oldest_told: dict[int, int] = {}
    wanted = set(missing)
    for first, end, oldest in mine.replays:
        for number in wanted.intersection(range(first, end)):
            oldest_told[number] = max(oldest, oldest_told.get(number, 0))
    for number in missing:
        if number not in oldest_told:
            raise Wrong(f"{who}: message {number} was never asked for")
        if oldest_told[number] <= number:
            raise Wrong(f"{who}: {number} is lost, the engine still had {oldest_told[number]}")


def check_recorder(client: Client, engines: Sequence[Engine], folder: Path) -> Mapping[str, int]:
    """Compare the recorder's files with the truth; return its figures."""
    told = Counter[str]()
    files = sorted(folder.glob("session-*.mcap"))
    if len(files) != len(engines):
        raise Wrong(f"{len(files)} files of {len(engines)} engines: {[f.name for f in files]}")
    for path, engine, mine in zip(files, engines, client.noted().values(), strict=True):
        report = verify(path, lambda share: None)
        bad = [check.name for check in report.checks if not check.is_good]
        with Recording(path) as recording:
            if recording.info.engine_id != engine.name:
                raise Wrong(f"{path.name} is of {recording.info.engine_id}")
            frames = [frame for frame, _ in recording.frames() if frame.topic != b"keyframe"]
            begin = recording.chunks.load(0).frames[0].sequence
        for frame in frames:
            checksum = zlib.crc32(frame.payload)
            engine.check_sent(path.name, frame.sequence, frame.topic.decode(), checksum)
        held = [frame.sequence for frame in frames]
        if held != list(mine.got):
            raise Wrong(f"{path.name}: {len(held)} messages, {len(mine.got)} were received")
        last = held[-1] if held else begin  # an engine may end before the recorder got a message
        missing = sorted(set(range(begin + 1, last + 1)) - set(held))
        check_asked(path.name, missing, mine)
        if report.num_lost_messages != len(missing):
            raise Wrong(f"{path.name}: {report.num_lost_messages} lost, {len(missing)} missing")
        if bad != (["sequence"] if missing else []):
            raise Wrong(f"{path.name} fails {bad}")
        told["received"] += len(held)
        told["lost"] += len(missing)
        told["steps"] += report.num_steps
        told["bytes"] += report.num_bytes
    return told
