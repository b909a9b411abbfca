"""A process of its own that keeps the front door open until its input ends, and prints its target. Its argument is
the path of a policy file."""

import asyncio
import sys
from pathlib import Path

from quartet.security.port import Port
from tests.unit.front_door import front_door


async def main(policy: Path) -> None:
    async with front_door(Port(policy=policy)) as (target, _):
        print(target, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
