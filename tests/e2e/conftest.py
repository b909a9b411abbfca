"""The quartet that the end-to-end tests share."""

from tests.running import shared_quartet  # noqa: F401
