"""Closes an attachment at the signal that ends its engine, before anything else can happen.

An engine's parent may send the signal and kill the process right after. So a thread of ours hears
of it at once, by Python's wakeup file descriptor, even if the engine's thread waits for a device.
"""

import os
import signal
import threading
from collections.abc import Callable

_ENDS = (signal.SIGTERM, signal.SIGINT)
_NO_END = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


def close_at_signal(close: Callable[[], None]) -> Callable[[], None]:
    """Call `close` on a thread of its own when the process is told to end.

    Does nothing outside of the main thread, or if other code uses the wakeup descriptor. A signal
    that the engine does not handle is no orderly end.

    Returns:
        Ends the thread. The descriptors stay: only the main thread may take them back.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
        return lambda: None

    is_closing = threading.Event()

    def wait() -> None:
        while number := os.read(reader, 1)[0]:
            if number in _ENDS and signal.getsignal(number) not in _NO_END:
                is_closing.set()
                close()
                return

    thread = threading.Thread(target=wait, name="stepscope", daemon=True)
    thread.start()

    def end() -> None:
        if not is_closing.is_set():
            os.write(writer, b"\0")
            thread.join()

    return end
