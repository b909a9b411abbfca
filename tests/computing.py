"""Waits for a process that has begun to compute."""

import asyncio

import psutil


async def computing(pid: int | None, within_s: float, seconds: float = 1.0) -> None:
    """Returns when the process has used so many seconds of processor time from now on."""
    process = psutil.Process(pid)
    begun = process.cpu_times().user
    async with asyncio.timeout(within_s):
        while process.cpu_times().user < begun + seconds:
            await asyncio.sleep(0.05)
