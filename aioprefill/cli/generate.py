"""`aioprefill generate`: the client on the command line."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from aioprefill.cli.grammar_text import read_grammar
from aioprefill.cli.model_progress import fetch_model
from aioprefill.cli.settings_flags import NOTE, command
from aioprefill.config import GenerateConfig
from aioprefill.config_sources import Settings
from aioprefill.errors import ConfigError, InvalidRequest
from aioprefill.grammar_spec import GrammarSpec, one_grammar
from aioprefill.request import Timeouts
from aioprefill.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aioprefill.engine.model_text import ModelText
    from aioprefill.wire.client import PairClient
    from aioprefill.wire.stream import TokenStream

_EXAMPLES = (
    "Examples:\n\n"
    "`aioprefill generate 'The capital of France is'`\n\n"
    "`aioprefill generate --chat 'What is a prefix cache?' --temperature 0.7 --top-p 0.9 --seed 1`\n\n"
    "`aioprefill generate - --max-new-tokens 300 < prompt.txt`\n\n"
    "`aioprefill generate --chat 'Name a city in France' --regex '[A-Z][a-z]{1,20}'`\n\n"
    "`aioprefill generate --json --logprobs 5 --max-new-tokens 1 'Once upon a'`\n\n" + NOTE
)
_INTERRUPTED = 130
_OUTPUT = "Structured output, one of these"


def _limit(stage: str) -> Any:
    text = f"Give up when the request is {stage} for longer. Default: the server's limit."
    return typer.Option(metavar="SECONDS", help=text, rich_help_panel="Timeouts of this request")


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate, and how to show it."""

    prompt: str
    chat: bool
    sampling: SamplingParams
    max_new_tokens: int
    ignore_eos: bool
    json: bool
    timeouts: Timeouts = Timeouts()
    grammar: GrammarSpec | None = None


@command("generate")
def generate(
    settings: Settings,
    prompt: Annotated[
        str, typer.Argument(metavar="TEXT", help="The prompt; - reads it from standard input.")
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask an instruct model, with its chat template, not raw text.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="Choose among the K likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(metavar="P", help="Choose among the likeliest, up to P.")] = 1.0,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Makes the choice repeatable.")] = None,
    logprobs: Annotated[
        int, typer.Option(metavar="N", help="Report the N likeliest first tokens (with --json).")
    ] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on where the model would end.")
    ] = False,
    json_schema: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|TEXT", help="The output is JSON that fits this schema.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="The output matches this regular expression.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    grammar: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|TEXT", help="The output matches this grammar (EBNF).", rich_help_panel=_OUTPUT
        ),
    ] = None,
    queue_timeout_s: Annotated[float | None, _limit("queued, its handshake done,")] = None,
    handshake_timeout_s: Annotated[float | None, _limit("in its handshake with the decode worker")] = None,
    running_timeout_s: Annotated[float | None, _limit("being prefilled")] = None,
    transfer_timeout_s: Annotated[float | None, _limit("handing its KV over")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> int:
    """Send a prompt to a running pair and stream what it generates."""
    sampling = SamplingParams(temperature, top_k, top_p, seed, logprobs)
    sampling.validate()
    if max_new_tokens < 1:
        raise InvalidRequest("max_new_tokens", f"must be at least 1, got {max_new_tokens}")
    demanded = one_grammar(
        json_schema=read_grammar("json_schema", json_schema),
        regex=regex,
        grammar=read_grammar("grammar", grammar),
    )
    text = _read_prompt(prompt)
    timeouts = Timeouts(
        queue_s=queue_timeout_s,
        handshake_s=handshake_timeout_s,
        running_s=running_timeout_s,
        transfer_s=transfer_timeout_s,
    )
    job = Job(text, chat, sampling, max_new_tokens, ignore_eos, json, timeouts, demanded)
    config = settings.build(GenerateConfig)
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(run_generate(config, job))
    except KeyboardInterrupt:
        return _INTERRUPTED


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as err:
        raise InvalidRequest("prompt", f"standard input is not UTF-8: {err}") from err


async def run_generate(config: GenerateConfig, job: Job) -> int:
    """Print what the pair generates; the exit code. Raises the request's error. Cancelling it aborts."""
    from aioprefill.engine.model_text import ModelText
    from aioprefill.wire.client import PairClient
    from aioprefill.wire.security import load_keys

    model = await asyncio.to_thread(fetch_model, config.model)
    text = ModelText(model.path)
    ids = text.encode_chat([{"role": "user", "content": job.prompt}]) if job.chat else text.encode(job.prompt)
    keys = load_keys(config.curve_keys) if config.curve_keys else None
    async with PairClient(config.prefill_endpoint, config.decode_endpoint, keys=keys) as client:
        _require_same_model(client, model.fingerprint, model.name)
        start = time.monotonic()
        stream = client.submit(
            ids,
            sampling=job.sampling,
            max_new_tokens=job.max_new_tokens,
            ignore_eos=job.ignore_eos,
            grammar=job.grammar,
            timeouts=job.timeouts,
        )
        made, pieces = await _read(stream, text, show=not job.json)
        if job.json:
            print(msgspec.json.encode(await _as_object(stream, text, made, "".join(pieces), start)).decode())
    return 0


def _require_same_model(client: PairClient, fingerprint: str, name: str) -> None:
    """Token ids of another model's tokenizer would give nonsense, not an error."""
    welcome = client.welcome()
    if welcome.fingerprint != fingerprint:
        raise ConfigError(
            f"model: the server has {welcome.model!r}, which is not {name!r} here: give the same with --model"
        )


async def _read(stream: TokenStream, text: ModelText, *, show: bool) -> tuple[list[int], list[str]]:
    """Token ids and pieces of text, printed as they come. Cancelling it aborts the request."""
    decoder, made, pieces = text.stream(), [], []

    def take(piece: str) -> None:
        pieces.append(piece)
        if show and piece:
            sys.stdout.write(piece)
            sys.stdout.flush()

    try:
        async for token_id in stream:
            made.append(token_id)
            take(decoder.push(token_id))
    except BaseException:
        stream.abort()
        raise
    finally:
        take(decoder.finish() + ("\n" if show and made else ""))
    return made, pieces


async def _as_object(
    stream: TokenStream, text: ModelText, made: list[int], generated: str, start: float
) -> dict[str, Any]:
    first, finished = await stream.first_token(), await stream.finished()
    transferred = await stream.transferred()
    top = [{"token_id": i, "text": text.decode([i]), "logprob": p} for i, p in first.top_logprobs]
    return {
        "request_id": stream.request_id,
        "text": generated,
        "token_ids": made,
        "finish_reason": finished.reason,
        "prompt_tokens": first.prompt_tokens,
        "cached_tokens": first.cached_tokens,
        "new_tokens": len(made),
        "weight_versions": list(first.weight_versions),
        "first_token": {"token_id": first.token_id, "logprob": first.logprob, "top_logprobs": top},
        "launched_ms": first.launched_ms,
        "first_token_ms": first.first_token_ms,
        "transferred_ms": transferred.transferred_ms,
        "kv_bytes": transferred.kv_bytes,
        "total_ms": (time.monotonic() - start) * 1e3,
    }


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES)(generate)
