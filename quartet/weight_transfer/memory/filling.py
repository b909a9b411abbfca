"""Buckets that one thread fills while another sends them."""

import threading


class Filling:
    """Tells the sending thread which buckets hold the weights of the current push.

    For example: `begin(7)`; the gathering thread calls `full(0)`, `full(1)`, ...; the sending thread's `wait(7, 1,
    60)` returns after `full(1)`, and raises if `end()` comes without it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._push = 0
        self._full: set[int] = set()
        self._over = True

    def begin(self, push: int) -> None:
        """Starts a push: all buckets count as empty."""
        with self._changed:
            self._push, self._full, self._over = push, set(), False
            self._changed.notify_all()

    def full(self, bucket: int) -> None:
        """Marks `bucket` as filled."""
        with self._changed:
            self._full.add(bucket)
            self._changed.notify_all()

    def end(self) -> None:
        """Marks the push as complete: no further bucket will be filled."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, push: int, bucket: int, timeout_s: float) -> None:
        """Returns when the bucket holds the weights of this push.

        Raises:
            RuntimeError: it was not filled within `timeout_s`, or the push ended without it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._push == push and (bucket in self._full or self._over), timeout_s)
            if self._push != push or bucket not in self._full:
                raise RuntimeError(f"bucket {bucket} of push {push} was not gathered within {timeout_s:g} s")
