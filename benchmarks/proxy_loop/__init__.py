"""The largest requests that the port takes: how long one keeps an event loop, and its memory."""
