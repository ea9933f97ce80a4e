"""Compares what clients have noted with what the engines had sent.

Raises `Wrong` for whatever was neither received nor shown as lost, exactly, and for what was lost
although the engine still had it when it was asked.
"""

import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

from truth import Client, Engine, Wrong

from stepscope.recordings.check.verify import verify
from stepscope.recordings.file.reader import Recording

# For each reply of the replay ring: its first and last message, and the oldest in the ring.
Replays: TypeAlias = list[tuple[int, int, int]]


def check_observer(client: Client, engines: list[Engine]) -> dict[str, int]:
    """Compare an observer's notes with the truth; return its figures."""
    told = Counter[str]()
    by_name = {engine.name: engine for engine in engines}
    got: dict[str, dict[int, tuple[str, int]]] = {}
    joined: dict[str, list[int]] = {}
    replays: dict[str, Replays] = {}
    now = ""
    sessions: dict[str, dict[str, Any]] = {}
    for line in client.log_lines():
        words = line.split(maxsplit=1)
        if words[0] == "join":
            now, sequence = words[1].split()[0], int(words[1].split()[1])
            told["joins"] += 1
            joined.setdefault(now, []).append(sequence)
            got.setdefault(now, {})
        elif words[0] == "replay":
            replays.setdefault(now, []).append(_replay(words[1]))
        elif words[0] == "got":
            number, topic, checksum = words[1].split()
            mine = got[now]
            if mine and int(number) <= next(reversed(mine)):
                raise Wrong(f"{client.name} got {number} after {next(reversed(mine))}")
            mine[int(number)] = topic, int(checksum)
        elif words[0] == "session":
            session = json.loads(words[1])
            sessions[session["engine"]] = session
    if set(joined) != set(by_name):
        raise Wrong(f"{client.name} joined {sorted(joined)}, there were {sorted(by_name)}")
    for name, engine in by_name.items():
        session, mine = sessions[name], got[name]
        who = f"{client.name} of {name}"
        for sequence, (topic, checksum) in mine.items():
            if engine.sent.get(sequence, ("", 0, 0))[::2] != (topic, checksum):
                raise Wrong(f"{who}: message {sequence} is not what was sent")
        expected = range(joined[name][0] + 1, session["last_sequence"] + 1)
        missing = [number for number in expected if number not in mine]
        shown = [n for first, last, *_ in session["gaps"] for n in range(first, last + 1)]
        if shown != missing or session["num_lost"] != len(missing):
            raise Wrong(
                f"{who}: {len(missing)} messages missing, {len(shown)} in gaps, "
                f"{session['num_lost']} counted"
            )
        check_steps(who, engine, session, mine, missing)
        check_heard(who, missing, replays.get(name, []))
        if session["num_bad"]:
            raise Wrong(f"{who}: {session['num_bad']} messages could not be read")
        told["received"] += len(mine)
        told["lost"] += len(missing)
        told["gaps"] += len(session["gaps"])
        told["healed"] = session["num_recovered"]
    last = sessions[engines[-1].name]
    if (last["status"], last["error"], last["needs_snapshot"]) != ("live", None, False):
        raise Wrong(f"{client.name} ends {last['status']}: {last['error']}")
    return dict(told)


def check_steps(
    who: str,
    engine: Engine,
    session: dict[str, Any],
    mine: dict[int, tuple[str, int]],
    missing: list[int],
) -> None:
    """Check that the history holds the received steps, and shows a gap for each lost one."""
    steps = [engine.sent[number][1] for number in mine if engine.sent[number][1] >= 0]
    if steps != session["steps"]:
        raise Wrong(f"{who}: {len(steps)} steps came, {len(session['steps'])} are kept")
    for number in missing:
        step = engine.sent[number][1]
        if step >= 0 and not any(
            after < step and (before is None or step < before)
            for _, _, after, before in session["gaps"]
        ):
            raise Wrong(f"{who}: step {step} is lost and no gap shows it")


def check_heard(who: str, missing: list[int], replays: Replays) -> None:
    """Check that each lost message was requested, and was no longer in the ring."""
    oldest_told: dict[int, int] = {}
    wanted = set(missing)
    for first, end, oldest in replays:
        for number in wanted.intersection(range(first, end)):
            oldest_told[number] = max(oldest, oldest_told.get(number, 0))
    for number in missing:
        if number not in oldest_told:
            raise Wrong(f"{who}: message {number} was never asked for")
        if oldest_told[number] <= number:
            raise Wrong(f"{who}: {number} is lost, the engine still had {oldest_told[number]}")


def _replay(words: str) -> tuple[int, int, int]:
    first, end, oldest = map(int, words.split())
    return first, end, oldest


def check_recorder(client: Client, engines: list[Engine], folder: Path) -> dict[str, int]:
    """Compare the recorder's files with the truth; return its figures."""
    told = Counter[str]()
    now = ""
    received: list[dict[int, str]] = []
    replays_of: list[Replays] = []
    for line in client.log_lines():
        words = line.split()
        if words[0] == "replay":
            replays_of[-1].append(_replay(line.removeprefix("replay ")))
        elif words[0] == "join":
            if words[1] != now:
                now = words[1]
                received.append({})
                replays_of.append([])
        elif words[0] == "got":
            received[-1][int(words[1])] = words[2]
    files = sorted(folder.glob("session-*.mcap"))
    if len(files) != len(engines):
        raise Wrong(f"{len(files)} files of {len(engines)} engines: {[f.name for f in files]}")
    noted = zip(files, engines, received, replays_of, strict=True)
    for path, engine, mine, asked in noted:
        report = verify(path, lambda share: None)
        bad = [check.name for check in report.checks if not check.is_good]
        with Recording(path) as recording:
            if recording.info.engine_id != engine.name:
                raise Wrong(f"{path.name} is of {recording.info.engine_id}")
            frames = [frame for frame, _ in recording.frames() if frame.topic != b"keyframe"]
            begin = recording.chunk(0).frames[0].sequence
        for frame in frames:
            sent = engine.sent.get(frame.sequence, ("", 0, 0))
            if sent[::2] != (frame.topic.decode(), zlib.crc32(frame.payload)):
                raise Wrong(f"{path.name}: message {frame.sequence} is not what was sent")
        held = [frame.sequence for frame in frames]
        if held != list(mine):
            raise Wrong(f"{path.name}: {len(held)} messages, {len(mine)} were received")
        last = held[-1] if held else begin  # an engine may end before the recorder got a message
        missing = sorted(set(range(begin + 1, last + 1)) - set(held))
        check_heard(path.name, missing, asked)
        if report.num_lost_messages != len(missing):
            raise Wrong(f"{path.name}: {report.num_lost_messages} lost, {len(missing)} missing")
        if bad != (["sequence"] if missing else []):
            raise Wrong(f"{path.name} fails {bad}")
        told["received"] += len(held)
        told["lost"] += len(missing)
        told["steps"] += report.num_steps
        told["bytes"] += report.num_bytes
    return dict(told)
