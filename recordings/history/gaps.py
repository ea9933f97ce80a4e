"""`Gaps`: where messages of one engine were lost and cannot be requested again."""

from stepscope.recordings.state.series.events import Gap


class Gaps:
    """The gaps among the steps in memory. Only one thread may write."""

    def __init__(self) -> None:
        self.found: list[Gap] = []  # the gaps, oldest first
        self.steps: set[int] = set()  # for each gap, the first step after it
        # Whether messages are missing and no snapshot has corrected the state since.
        self.needs_snapshot = False
        self._num_lost_before = 0  # messages lost in forgotten gaps

    @property
    def num_lost(self) -> int:
        """Number of messages lost for good, including those before the oldest step in memory."""
        return self._num_lost_before + sum(gap.num_messages for gap in self.found)

    def note(self, first_sequence: int, last_sequence: int, step: int) -> Gap:
        """Add a gap: messages were lost after the record of `step`."""
        gap = Gap(first_sequence, last_sequence, step, None)
        self.found.append(gap)
        self.needs_snapshot = True
        return gap

    def end(self, step: int) -> None:
        """Store `step` as the first step after the newest gaps, unless they have one already."""
        for index in range(len(self.found) - 1, -1, -1):
            if self.found[index].before_step is not None:
                break
            self.found[index] = self.found[index]._replace(before_step=step)
            self.steps.add(step)

    def prepend(self, earlier: "Gaps") -> None:
        """Insert the gaps of an earlier part of the session before these."""
        self.found[:0] = earlier.found
        self.steps |= earlier.steps

    def forget_before(self, step: int) -> None:
        """Forget gaps before a step, but keep counting the messages lost in them."""
        kept = [gap for gap in self.found if gap.before_step is None or gap.before_step >= step]
        self._num_lost_before = self.num_lost - sum(gap.num_messages for gap in kept)
        self.found = kept
        self.steps = {each for each in self.steps if each >= step}

    def forget_after(self, step: int) -> None:
        self.found = [
            gap for gap in self.found if gap.before_step is not None and gap.before_step <= step
        ]
        self.steps = {each for each in self.steps if each <= step}
