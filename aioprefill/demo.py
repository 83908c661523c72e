"""`make demo`: the main job on real input. Eight prompts of mixed length through a real pair.

One prompt of about 2,000 tokens is being prefilled in chunks while the others come in; each continuation
streams from the decode worker that got its KV.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aioprefill.config import DemoConfig
from aioprefill.engine.model_files import resolve_model
from aioprefill.engine.model_text import ModelText
from aioprefill.pair import running_pair
from aioprefill.wire.client import PairClient
from aioprefill.wire.stream import TokenStream

LONG_TOKENS = 2000
NEW_TOKENS = 24
KV_MEMORY = 512 << 20
"""Enough for the demonstration; the default takes seconds to be touched."""

STORY = (
    "The harbour town wakes before the sun. Fishermen carry nets along the quay, the baker opens the "
    "shutters of her shop, and gulls wheel over the boats that come home with the night's catch. On market "
    "days farmers bring apples, honey and cheese from the hills, and the square fills with voices. "
)
SHORT_PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea,",
    "The three primary colours are red,",
    "To make a good cup of tea, first",
    "The opposite of hot is",
)


@dataclass(slots=True)
class Line:
    """One prompt on its way. Times are ms; those of the server count from the request's arrival there."""

    title: str
    prompt_ids: list[int]
    arrival_ms: float = 0.0
    stream: TokenStream | None = None
    text: str = ""
    tokens: int = 0
    cached_tokens: int = 0
    launched_ms: float = 0.0
    first_token_ms: float = 0.0
    transferred_ms: float = 0.0
    kv_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """The prompt's entry in the JSON output."""
        return {
            "prompt": self.title,
            "text": self.text,
            "prompt_tokens": len(self.prompt_ids),
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.tokens,
            "arrival_ms": round(self.arrival_ms, 1),
            "launched_ms": round(self.launched_ms, 1),
            "first_token_ms": round(self.first_token_ms, 1),
            "transferred_ms": round(self.transferred_ms, 1),
        }


def make_lines(text: ModelText) -> list[Line]:
    """The eight prompts; the long one is the second."""
    long = text.encode(STORY)
    while len(long) < LONG_TOKENS:
        long += long[1:]
    medium = text.encode(STORY * 4 + "In the evening")
    lines = [Line(prompt, text.encode(prompt)) for prompt in SHORT_PROMPTS]
    lines.insert(1, Line(f"a story of {LONG_TOKENS} tokens ...", long[:LONG_TOKENS]))
    lines.append(Line(f"a story of {len(medium)} tokens ...", medium))
    return lines


def run_demo(*, json: bool, config: DemoConfig) -> int:
    """Run the demonstration; exit code 0 when all went well. Ctrl-C stops both processes first.

    With `json` the only thing on stdout is one JSON object.
    """
    console = Console(stderr=json)
    model = resolve_model(config.engine.model, cache_dir=config.engine.cache_dir)
    console.print(f"model: {model.name} in {model.path}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(demonstrate(config, ModelText(model.path), console))
    if json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    return 0


async def demonstrate(config: DemoConfig, text: ModelText, console: Console) -> dict[str, Any]:
    """Start the pair, send the prompts, show what comes; the JSON output as a dict."""
    console.print("starting a prefill and a decode process ...")
    started = time.perf_counter()
    async with running_pair(options_of(config)) as pair:
        seconds, ends = time.perf_counter() - started, (pair.prefill.endpoint, pair.decode.endpoint)
        console.print(f"ready after {seconds:.1f} s: {ends[0]}, {ends[1]}")
        async with PairClient(pair.prefill.endpoint, pair.decode.endpoint, timeout_s=30.0) as client:
            lines = make_lines(text)
            with Live(console=console, refresh_per_second=10, transient=True) as live:
                readers = await send_all(client, lines, text, live)
                await asyncio.gather(*readers)
            for line in lines:
                console.print(Text.assemble((line.title, "bold"), line.text.replace("\n", " ")))
            stats = await client.stats()
    console.print(table(lines))
    return {
        "prompts": [line.as_json() for line in lines],
        "max_in_flight": stats["max_in_flight"],
        "arrivals_during_forward": stats["arrivals_during_forward"],
        "kv_bytes": sum(line.kv_bytes for line in lines),
    }


def options_of(config: DemoConfig) -> list[str]:
    """The options that both processes need, as command line options."""
    engine = config.engine
    options = ["--model", engine.model, "--dtype", engine.dtype, "--device", engine.device]
    options += ["--page-size", str(engine.page_size)]
    if engine.cache_dir is not None:
        options += ["--cache-dir", str(engine.cache_dir)]
    if engine.threads is not None:
        options += ["--threads", str(engine.threads)]
    options += ["--kv-memory", str(engine.kv_memory or KV_MEMORY)]
    return options


async def send_all(
    client: PairClient, lines: list[Line], text: ModelText, live: Live
) -> list[asyncio.Task[None]]:
    """Send the first two, wait until a forward is pending, then send the others one by one."""
    start = time.monotonic()
    readers = []
    for number, line in enumerate(lines):
        if number == 2:
            while not (await client.stats())["in_flight"]:
                pass  # each round is an answer of the server, which has the long prompt already
        line.arrival_ms = 1e3 * (time.monotonic() - start)
        line.stream = client.submit(line.prompt_ids, max_new_tokens=NEW_TOKENS)
        readers.append(asyncio.create_task(read(line, line.stream, text, lines, live), name=f"demo.{number}"))
        await client.ping()
    return readers


async def read(line: Line, stream: TokenStream, text: ModelText, lines: list[Line], live: Live) -> None:
    """Follow one stream to its end."""
    pieces = text.stream()
    async for token_id in stream:
        line.tokens += 1
        line.text += pieces.push(token_id)
        live.update(Text("\n".join(f"{each.title}{each.text}".replace("\n", " ") for each in lines)))
    line.text += pieces.finish()
    first, transferred = await stream.first_token(), await stream.transferred()
    line.cached_tokens = first.cached_tokens
    line.launched_ms, line.first_token_ms = first.launched_ms, first.first_token_ms
    line.transferred_ms, line.kv_bytes = transferred.transferred_ms, transferred.kv_bytes


def table(lines: list[Line]) -> Table:
    """Per prompt: when it arrived, and ms from there to launch, first token and KV transferred."""
    result = Table(title="ms: arrival since the first one; then from arrival to ...")
    result.add_column("prompt", no_wrap=True, max_width=17, overflow="ellipsis")
    for column in ("tokens", "arrival", "launched", "1st token", "KV sent", "new"):
        result.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        times = (line.arrival_ms, line.launched_ms, line.first_token_ms, line.transferred_ms)
        result.add_row(
            line.title, str(len(line.prompt_ids)), *(f"{ms:.0f}" for ms in times), str(line.tokens)
        )
    return result
