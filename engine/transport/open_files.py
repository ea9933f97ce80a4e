"""Raises the limit of open files: each connection counts as one, so strangers can use them up."""

import contextlib
import errno
import resource

_MANY = 65_536  # the limit to set if the system has none


def allow_many_files() -> int:
    """Raise the soft limit, often a thousand, as far as this user may. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else soft


def is_out_of_files(error: OSError) -> bool:
    """Whether an error means that the limit of open files was reached, not that a file is bad."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
