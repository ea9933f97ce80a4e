"""`Tempo`: maps recorded time to the host's clock, to tell when to play each message."""

import time

MIN_SPEED, MAX_SPEED = 0.1, 64.0


class Tempo:
    """Tells when to play each message. Belongs to the playing thread, except `restart`.

    Args:
        speed: recorded seconds per second, clamped to 0.1..64.
    """

    def __init__(self, speed: float) -> None:
        self._speed = _clamped(speed)
        self._origin: tuple[float, int] | None = None  # host and recorded time of one instant

    @property
    def speed(self) -> float:
        return self._speed

    def restart(self, speed: float | None = None) -> None:
        """Let the next message be played at once, and change the speed if one is given.

        Any thread may call it.
        """
        if speed is not None:
            self._speed = _clamped(speed)
        self._origin = None

    def due_s(self, log_ns: int) -> float:
        """Seconds until a message of this recorded time is due."""
        origin = self._origin  # another thread may call `restart`
        if origin is None:
            origin = self._origin = (time.monotonic(), log_ns)
        started_s, started_ns = origin
        return started_s + (log_ns - started_ns) / 1e9 / self._speed - time.monotonic()


def _clamped(speed: float) -> float:
    return min(max(speed, MIN_SPEED), MAX_SPEED)
