"""How many files this process may open: each connection is one, so strangers can use them up."""

import contextlib
import errno
import resource

_MANY = 65_536  # where the system sets no limit


def allow_many_files() -> int:
    """Lift the soft limit, often a thousand, as far as this user may. Gives the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else soft


def is_out_of_files(error: OSError) -> bool:
    """Whether it says nothing of the file that was to be opened."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
