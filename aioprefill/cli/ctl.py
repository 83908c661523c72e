"""`aioprefill ctl`: operate a running prefill process."""

from __future__ import annotations

import asyncio
import json as jsonlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioprefill.cli.settings_flags import NOTE, command
from aioprefill.config import CtlConfig
from aioprefill.config_sources import Settings
from aioprefill.control import PauseMode
from aioprefill.errors import InvalidRequest

if TYPE_CHECKING:
    from aioprefill.wire.client import PairClient

app = typer.Typer(
    help="Operate a running prefill process: each command returns when it has taken effect.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Values = Mapping[str, Any]
_INTERRUPTED = 130


def _examples(*examples: str) -> str:
    return "Examples:\n\n" + "\n\n".join(examples) + "\n\n" + NOTE


def _ask(settings: Settings, call: Callable[[PairClient], Awaitable[Values]]) -> Values | None:
    """What the server answers; None when the user did not wait for it. Raises the command's error."""
    from aioprefill.wire.client import PairClient
    from aioprefill.wire.security import load_keys

    config = settings.build(CtlConfig)
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    keys = load_keys(config.curve_keys) if config.curve_keys else None

    async def ask() -> Values:
        async with PairClient(
            config.prefill_endpoint, keys=keys, timeout_s=config.answer_timeout_s
        ) as client:
            return await call(client)

    try:
        return asyncio.run(ask())
    except KeyboardInterrupt:
        return None


def _told(values: Values | None, json: bool, text: Callable[[Values], str]) -> int:
    """Print an answer; the exit code."""
    if values is None:
        return _INTERRUPTED
    print(jsonlib.dumps(dict(values)) if json else text(values))
    return 0


@app.command(
    epilog=_examples(
        "`aioprefill ctl pause` stops launching; results of what runs come after the resume.",
        "`aioprefill ctl pause --mode retract --barrier` also waits until nothing touches the weights.",
        "`aioprefill ctl pause --mode wait` lets admitted prompts finish first.",
    )
)
@command("ctl")
def pause(
    settings: Settings,
    mode: Annotated[
        PauseMode,
        typer.Option(
            help="in_place: keep all as it is. retract: requeue what runs. abort: abort every request. "
            "wait: finish what was admitted."
        ),
    ] = PauseMode.IN_PLACE,
    barrier: Annotated[
        bool,
        typer.Option(
            "--barrier", help="Return when every launched forward is complete too (wait, abort: always)."
        ),
    ] = False,
    json: Json = False,
) -> int:
    """Stop launching. Requests are still taken, and wait; transfers go on."""
    values = _ask(settings, lambda client: client.pause(mode, barrier=barrier))
    return _told(values, json, lambda found: f"paused ({mode.value}){_facts(found)}")


@app.command(epilog=_examples("`aioprefill ctl resume`"))
@command("ctl")
def resume(settings: Settings, json: Json = False) -> int:
    """Go on after a pause."""
    return _told(_ask(settings, lambda client: client.resume()), json, lambda found: "running")


@app.command(
    "update-weights",
    epilog=_examples(
        "`aioprefill ctl update-weights ./checkpoint-1200`", "`… update-weights /models/new --json`"
    ),
)
@command("ctl")
def update_weights(
    settings: Settings,
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Folder of safetensors, on the machine of the server.")
    ],
    json: Json = False,
) -> int:
    """Swap the model's weights. They are checked first; if they do not fit, the old ones go on serving."""
    folder = path.expanduser().absolute()
    values = _ask(settings, lambda client: client.update_weights(folder))
    return _told(values, json, lambda found: f"weights updated{_facts(found)}")


@app.command(
    epilog=_examples(
        "`aioprefill ctl abort 3f2a…` one request, whoever submitted it.",
        "`aioprefill ctl abort 'batch7-*'` all whose id begins so.",
        "`aioprefill ctl abort --all`",
    )
)
@command("ctl")
def abort(
    settings: Settings,
    target: Annotated[
        str | None, typer.Argument(metavar="[ID | PREFIX*]", help="A request's id, or how ids begin and a *.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every request.")] = False,
    json: Json = False,
) -> int:
    """Abort requests in any state. Exit code 0 also when there was none: then that is what it says."""
    if everything == (target is not None):
        raise InvalidRequest("abort", "say either an id (or PREFIX*), or --all")
    values = _ask(settings, lambda client: _abort(client, target))
    subject = "no request is open" if target is None else f"no open request matches {target}"
    return _told(values, json, lambda found: f"aborted {found['aborted']}" if found["aborted"] else subject)


def _abort(client: PairClient, target: str | None) -> Awaitable[Values]:
    if target is None:
        return client.abort_matching("")
    if target.endswith("*"):
        return client.abort_matching(target[:-1])
    return client.abort_request(target)


@app.command("flush-cache", epilog=_examples("`aioprefill ctl flush-cache --json`"))
@command("ctl")
def flush_cache(settings: Settings, json: Json = False) -> int:
    """Forget cached prefixes; pages that are in use stay."""
    values = _ask(settings, lambda client: client.flush_cache())
    return _told(values, json, lambda found: f"prefix cache flushed{_facts(found)}")


@app.command(
    epilog=_examples("`aioprefill ctl drain`", "`aioprefill ctl drain --timeout 5` drops what takes longer.")
)
@command("ctl")
def drain(
    settings: Settings,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Default: what the server has for its shutdown."),
    ] = None,
    json: Json = False,
) -> int:
    """Finish what was launched, drop the rest by name, and end the process (its exit code is 0)."""
    values = _ask(settings, lambda client: client.drain(timeout))

    def text(found: Values) -> str:
        lines = [f"drained: {found['finished']} finished, {found['dropped']} dropped"]
        return "\n".join(lines + [f"dropped {request_id}" for request_id in found["dropped_ids"]])

    return _told(values, json, text)


@app.command(epilog=_examples("`aioprefill ctl stats`", "`aioprefill ctl stats --json`"))
@command("ctl")
def stats(settings: Settings, json: Json = False) -> int:
    """Print the counters of the loop and of its host."""
    values = _ask(settings, lambda client: client.stats())
    return _told(values, json, lambda found: "\n".join(f"{name}={value}" for name, value in found.items()))


@app.command(
    epilog=_examples(
        "`aioprefill ctl health --answer-timeout-s 1` as a probe: exit code 0 ready, 1 not, or no answer.",
        "`aioprefill ctl health --json`",
    )
)
@command("ctl")
def health(settings: Settings, json: Json = False) -> int:
    """Say whether the process is ready: exit code 0, or 1 with the reason."""

    async def ask(client: PairClient) -> Values:
        found = await client.health()
        return {"live": found.live, "ready": found.ready, "reason": found.reason}

    values = _ask(settings, ask)
    code = _told(values, json, lambda found: "ready" if found["ready"] else f"not ready: {found['reason']}")
    return 1 if values is not None and not values["ready"] else code


def _facts(values: Values) -> str:
    """The answer's numbers, behind a sentence."""
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
    return f": {facts}" if facts else ""
