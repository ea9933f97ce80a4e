"""`ThreadChoice`: chooses one thread or all of them for each step on a CPU, by trying both.

If each of two threads has a core, they finish a prefill chunk in half the time. But a decode step
of a small model ends before a second thread has started. And if other programs use the same cores,
each of the hundred matrix products of a step waits for the thread that is not running: two threads
then take up to four times as long as one. Which is faster cannot be known beforehand, and changes
while the engine runs. So steps of similar size are timed with the number of threads in use, and the
other number is tried now and then.
"""

from collections import deque
from dataclasses import dataclass, field

FIRST_TRIAL = 4  # steps of a size until the other way is tried; doubles each time it loses
LAST_TRIAL = 128
REMEMBERED = 9  # latest times to keep, of the way in use
REMEMBERED_TRIALS = 3  # ... and of the other way, whose times may be old
# Larger steps always get all threads: trying one with a single thread would stall the engine.
LARGEST_TRIED = 256
CLEARLY = 0.95  # a winner takes at most this share of the other's time


@dataclass(slots=True)
class _Size:
    times_ns: dict[int, deque[int]] = field(default_factory=dict)  # by threads, newest last
    best: int = 0
    until_trial: int = FIRST_TRIAL
    interval: int = FIRST_TRIAL


class ThreadChoice:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_tokens: int) -> int:
        """Return the number of threads for a step of `num_tokens`. `note` must follow."""
        if num_tokens > LARGEST_TRIED:
            return self._num_threads
        size = self._size(num_tokens)
        size.until_trial -= 1
        if size.until_trial > 0:
            return size.best
        size.until_trial = size.interval
        return self._other(size.best)

    def note(self, num_tokens: int, threads: int, elapsed_ns: int) -> None:
        """Record how long the step took for which `choose` returned `threads`."""
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
            if other_wins:  # the way in use has become slower, so try the other soon
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
    return sorted(times_ns)[len(times_ns) // 2]
