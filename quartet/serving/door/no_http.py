"""Serve's HTTP port, which is not opened: the services speak gRPC only."""

import asyncio
from typing import Any


class NoServer:
    """Stands in for uvicorn's server, for which Serve binds its HTTP port, and does not listen there.

    Through that port a web page could make a browser of this machine send requests, and connections that rest there
    would take the files of the process that serves gRPC.
    """

    def __init__(self, config: Any) -> None:
        """Takes uvicorn's configuration."""
        self.config = config

    async def serve(self, sockets: Any) -> None:
        """Waits for as long as uvicorn's server would serve, with the bound sockets."""
        await asyncio.Event().wait()
