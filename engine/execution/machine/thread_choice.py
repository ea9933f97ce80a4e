"""`ThreadChoice`: chooses one thread or all of them for each step on a CPU, by trying both.

If each of two threads has a core, they finish a prefill chunk in half the time. But a decode step
of a small model ends before a second thread has started. And if other programs use the same cores,
each of the hundred matrix products of a step waits for the thread that is not running: two threads
then take up to four times as long as one. Which is faster cannot be known beforehand, and changes
while the engine runs. So steps of similar size are timed with the number of threads in use, and the
other number is tried now and then.
"""

import statistics
from collections import defaultdict, deque

FIRST_TRIAL = 4  # the other way is tried in this step of a size, then when the count has doubled,
LAST_TRIAL = 128  # ... and from this step on, always after so many
REMEMBERED = 5  # latest times to keep, of each way
# Larger steps always get all threads: trying one with a single thread would stall the engine.
LARGEST_TRIED = 256
CLEARLY = 0.95  # a winner takes at most this share of the other's time


class _Size:
    """What is known of steps of about one size."""

    def __init__(self, best: int) -> None:
        self.best = best
        self.num_steps = 0
        # By number of threads.
        self.times_ns: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=REMEMBERED))


class ThreadChoice:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_tokens: int) -> int:
        """Return the number of threads for a step of `num_tokens`. `note` must follow."""
        if num_tokens > LARGEST_TRIED:
            return self._num_threads
        size = self._size(num_tokens)
        size.num_steps += 1
        count = size.num_steps
        is_power = count & (count - 1) == 0
        is_trial = count >= FIRST_TRIAL and (is_power or count % LAST_TRIAL == 0)
        return self._other(size.best) if is_trial else size.best

    def note(self, num_tokens: int, threads: int, elapsed_ns: int) -> None:
        """Record how long the step took for which `choose` returned `threads`."""
        if num_tokens > LARGEST_TRIED:
            return
        size = self._size(num_tokens)
        size.times_ns[threads].append(elapsed_ns)
        other = self._other(size.best)
        if len(size.times_ns) == 2:
            ours, theirs = (statistics.median(size.times_ns[n]) for n in (size.best, other))
            if theirs < CLEARLY * ours:
                size.best = other

    def _other(self, threads: int) -> int:
        return 1 if threads != 1 else self._num_threads

    def _size(self, num_tokens: int) -> _Size:
        return self._sizes.setdefault(num_tokens.bit_length(), _Size(self._num_threads))
