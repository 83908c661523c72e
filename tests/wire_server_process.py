"""A prefill service in a process of its own, to be killed: accepts everything, answers nothing.

Usage: wire_server_process.py PORT. Prints its port when it serves.
"""

import asyncio
import secrets
import sys

from wire_fakes import FakeScheduler, welcome


async def main() -> None:
    """Serve until killed."""
    service = FakeScheduler().service(
        f"tcp://127.0.0.1:{sys.argv[1]}", welcome=welcome(epoch=secrets.token_hex(4))
    )
    async with service:
        print(service.endpoint.rpartition(":")[2], flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
