"""`ThreadChoice`: whether a step on a CPU gets one thread or all of them, found out by trying.

Two threads finish a chunk in half the time, on cores of their own. A decode step of a small model
is over before a second thread has begun, and where something else runs on the same cores, each of
the hundred joint products of a step waits for whichever thread is not running just then: two
threads then take up to four times as long as one. Nothing of that can be known beforehand, and it
changes while the engine runs. So steps are timed, like with like, and now and then the other way is
tried.
"""

from collections import deque
from dataclasses import dataclass, field

FIRST_TRIAL = 4  # steps of a size until the other way is tried; doubled each time it loses
LAST_TRIAL = 128
REMEMBERED = 9  # times of the way that is used, the newest
REMEMBERED_TRIALS = 3  # ... of the other: each may be long ago
# A larger step is worth all threads; to try it with one would be a stall of its own.
LARGEST_TRIED = 256
CLEARLY = 0.95  # a winner takes at most this share of the other's time


@dataclass(slots=True)
class _Size:
    """Steps of about the same number of tokens."""

    times_ns: dict[int, deque[int]] = field(default_factory=dict)  # by threads, the newest last
    best: int = 0
    until_trial: int = FIRST_TRIAL
    interval: int = FIRST_TRIAL


class ThreadChoice:
    """One thread or `num_threads`, for each size of step.

    The result of a step must not depend on it: that is the kernels' promise.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_tokens: int) -> int:
        """Threads for a step of so many tokens; `note` its time before the next one."""
        if num_tokens > LARGEST_TRIED:
            return self._num_threads
        size = self._size(num_tokens)
        size.until_trial -= 1
        if size.until_trial > 0:
            return size.best
        size.until_trial = size.interval
        return self._other(size.best)

    def note(self, num_tokens: int, threads: int, elapsed_ns: int) -> None:
        """What the step took that `choose` was asked about."""
        if num_tokens > LARGEST_TRIED:
            return
        size = self._size(num_tokens)
        is_trial = threads != size.best
        times = size.times_ns.setdefault(threads, deque(maxlen=REMEMBERED))
        times.append(elapsed_ns)
        while is_trial and len(times) > REMEMBERED_TRIALS:
            times.popleft()
        if len(size.times_ns) < 2:
            return
        other = self._other(size.best)
        other_wins = _typical(size.times_ns[other]) < CLEARLY * _typical(size.times_ns[size.best])
        if not is_trial:
            if other_wins:  # it has not changed: this way has become slower
                size.until_trial = 1
        elif other_wins:
            size.best = other
            size.interval = FIRST_TRIAL
        else:
            size.interval = min(2 * size.interval, LAST_TRIAL)

    def _other(self, threads: int) -> int:
        return 1 if threads != 1 else self._num_threads

    def _size(self, num_tokens: int) -> _Size:
        key = num_tokens.bit_length()
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _Size(best=self._num_threads)
        return size


def _typical(times_ns: deque[int]) -> int:
    """The median: one step that the machine held up says nothing of a way."""
    return sorted(times_ns)[len(times_ns) // 2]
