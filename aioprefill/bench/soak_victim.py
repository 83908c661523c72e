"""A client process that the soak kills: `python -m aioprefill.bench.soak_victim PREFILL DECODE SEED`."""

from __future__ import annotations

import asyncio
import random
import sys

from aioprefill.wire.client import PairClient

REQUESTS = 20


async def main(prefill: str, decode: str, seed: int) -> None:
    """Submit long requests, say so, and read them until killed."""
    rng = random.Random(seed)
    async with PairClient(prefill, decode, timeout_s=30.0) as client:
        streams = [
            client.submit(
                [rng.randrange(256) for _ in range(rng.randint(1, 600))], max_new_tokens=200, ignore_eos=True
            )
            for _ in range(REQUESTS)
        ]
        await client.ping()
        print("submitted", flush=True)
        await asyncio.gather(*(stream.finished() for stream in streams), return_exceptions=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
