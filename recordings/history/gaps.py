"""`Gaps`: the messages of one engine that were lost for good, and where. A part of `Timeline`."""

from stepscope.recordings.state.series.events import Gap


class Gaps:
    """Of the steps that are kept. One writer.

    Attributes:
        found: oldest first.
        steps: the first steps after lost messages.
        needs_snapshot: messages are missing, and no snapshot has set the state right since.
    """

    def __init__(self) -> None:
        self.found: list[Gap] = []
        self.steps: set[int] = set()
        self.needs_snapshot = False
        self._num_lost_before = 0  # in gaps that are forgotten

    @property
    def num_lost(self) -> int:
        """Messages lost for good, also before the oldest step that is kept."""
        return self._num_lost_before + sum(gap.num_messages for gap in self.found)

    def note(self, first_sequence: int, last_sequence: int, step: int) -> Gap:
        """These messages did not come, after the record of `step`."""
        gap = Gap(first_sequence, last_sequence, step, None)
        self.found.append(gap)
        self.needs_snapshot = True
        return gap

    def end(self, step: int) -> None:
        """The first step after lost messages says how far they reached."""
        for index in range(len(self.found) - 1, -1, -1):
            if self.found[index].before_step is not None:
                break
            self.found[index] = self.found[index]._replace(before_step=step)
            self.steps.add(step)

    def prepend(self, earlier: "Gaps") -> None:
        """Put those of before in front of these."""
        self.found[:0] = earlier.found
        self.steps |= earlier.steps

    def forget_before(self, step: int) -> None:
        """All but how many messages were lost."""
        kept = [gap for gap in self.found if gap.before_step is None or gap.before_step >= step]
        self._num_lost_before = self.num_lost - sum(gap.num_messages for gap in kept)
        self.found = kept
        self.steps = {each for each in self.steps if each >= step}

    def forget_after(self, step: int) -> None:
        self.found = [
            gap for gap in self.found if gap.before_step is not None and gap.before_step <= step
        ]
        self.steps = {each for each in self.steps if each <= step}
