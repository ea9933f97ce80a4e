"""`Track`: the lane of one request while it grows. `LaneBoard` owns it."""


class Track:
    """The cells of one request so far, one byte per step. `cells[0]` is for step `start`.

    Steps that are not written yet count as `filler`.
    """

    __slots__ = ("cells", "client_id", "filler", "start")

    def __init__(self, client_id: str, start: int, filler: bytes) -> None:
        self.client_id = client_id
        self.start = start
        self.cells = bytearray()
        self.filler = filler

    def fill_to(self, step: int, filler: bytes) -> None:
        """Write `filler` to all steps before `step` that are not written yet."""
        missing = step - self.start - len(self.cells)
        if missing > 0:
            self.cells += filler * missing

    def put(self, step: int, cell: int) -> None:
        self.fill_to(step, self.filler)
        position = step - self.start
        if position == len(self.cells):
            self.cells.append(cell)
        elif 0 <= position < len(self.cells):
            self.cells[position] = cell

    def forget_before(self, step: int) -> None:
        num_old = step - self.start
        if num_old > 0:
            self.fill_to(step, self.filler)
            del self.cells[:num_old]
            self.start = step
