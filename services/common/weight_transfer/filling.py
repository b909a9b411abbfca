"""Buckets that one thread fills while another sends them."""

import threading


class Filling:
    """Which buckets of which push are full."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._push = 0
        self._full: set[int] = set()
        self._over = True

    def begin(self, push: int) -> None:
        """From now on buckets are filled with the weights of this push; none is full."""
        with self._changed:
            self._push, self._full, self._over = push, set(), False
            self._changed.notify_all()

    def full(self, bucket: int) -> None:
        """This one is."""
        with self._changed:
            self._full.add(bucket)
            self._changed.notify_all()

    def end(self) -> None:
        """No more will be."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, push: int, bucket: int, timeout_s: float) -> None:
        """Returns when the bucket holds the weights of this push.

        Raises:
            RuntimeError: it does not within `timeout_s`, or never will.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._push == push and (bucket in self._full or self._over), timeout_s)
            if self._push != push or bucket not in self._full:
                raise RuntimeError(f"bucket {bucket} of push {push} was not gathered within {timeout_s:g} s")
