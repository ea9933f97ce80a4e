"""`Failures`: shows an error in a key, mouse or timer handler as a notice, and carries on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from stepscope.tui.settings.log_file import see_log
from stepscope.tui.views.notices import Notices

log = logging.getLogger("stepscope.tui")


class Failures:
    """Shows and logs errors; logs the same error only once, however often it happens."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._logged: set[str] = set()

    @contextmanager
    def shown(self, what: str) -> Iterator[None]:
        """Return a context manager that shows an exception as a notice that `what` failed."""
        try:
            yield
        except Exception as error:
            text = f"{what} failed, {see_log(error)}"
            if text not in self._logged:
                self._logged.add(text)
                log.exception("%s failed", what)
            self._notices.say(text, "caution")
