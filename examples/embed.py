"""Embeds the prefill scheduler in an asyncio program: first tokens of a few prompts, while others come in."""

import asyncio
import sys

from aioprefill import EngineConfig, PrefillRequest, PrefillScheduler
from aioprefill.engine.model_files import resolve_model
from aioprefill.engine.model_text import ModelText
from aioprefill.native.load import load_host

PROMPTS = ["The capital of France is", "Water freezes at zero degrees", "One, two, three,"]


async def main(model: str) -> None:
    text = ModelText(resolve_model(model).path)
    host = load_host(EngineConfig(model=model, kv_memory=256 << 20))
    async with PrefillScheduler(host) as scheduler:
        handles = [scheduler.submit(PrefillRequest(text.encode(prompt))) for prompt in PROMPTS]
        for prompt, handle in zip(PROMPTS, handles, strict=True):
            result = await handle
            took_ms = 1e3 * (result.first_token_s - result.arrival_s)
            print(f"{prompt}{text.decode([result.token_id])}   ({took_ms:.0f} ms)")
        print(scheduler.stats())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"))
