"""The limit of open files. Each connection of a port takes one from the process that has opened the port."""

import resource

_MOST = 65_536


def raise_file_limit() -> int:
    """Raises this process's limit of open files, and that of its future children, towards the hard limit, to 65,536
    at most; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return _MOST if soft == resource.RLIM_INFINITY else soft
