"""`aioprefill model pull|path|list|remove`."""

from __future__ import annotations

import json as jsonlib
from dataclasses import replace
from typing import Annotated

import typer

from aioprefill.cli.model_progress import fetch_model, shown_progress
from aioprefill.cli.settings_flags import NOTE, command
from aioprefill.config import ModelConfig
from aioprefill.config_sources import Settings

app = typer.Typer(help="Fetch, find and list models.", no_args_is_help=True, rich_markup_mode="markdown")

Name = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Instead of --model.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _config(settings: Settings, name: str | None) -> ModelConfig:
    config = settings.build(ModelConfig)
    return config if name is None else replace(config, model=name)


@app.command(
    epilog=(
        "Examples:\n\n`aioprefill model pull` fetches the embedded model.\n\n"
        "`aioprefill model pull Qwen/Qwen3-0.6B`\n\n"
        "`aioprefill model pull --verify` reads every file and fetches again what is damaged.\n\n" + NOTE
    )
)
@command("model")
def pull(
    settings: Settings,
    name: Name = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check all files by SHA-256.")] = False,
) -> int:
    """Fetch a model, convert it if need be, and print its folder."""
    found = fetch_model(_config(settings, name), verify=verify)
    print(found.path)
    return 0


@app.command(
    epilog="Examples:\n\n`aioprefill model path`\n\n`aioprefill model path ./llama.gguf --json`\n\n" + NOTE
)
@command("model")
def path(settings: Settings, name: Name = None, json: Json = False) -> int:
    """Print the folder of a model that is on this machine; fetch nothing."""
    found = fetch_model(_config(settings, name), fetch=False)
    if json:
        print(jsonlib.dumps({"name": found.name, "path": str(found.path), "fingerprint": found.fingerprint}))
    else:
        print(found.path)
    return 0


@app.command("list", epilog="Examples:\n\n`aioprefill model list --json`\n\n" + NOTE)
@command("model")
def list_(settings: Settings, json: Json = False) -> int:
    """List the embedded models and those in the cache."""
    from aioprefill.engine.model_files import list_models

    found = list_models(settings.build(ModelConfig).cache_dir)
    if json:
        rows = [
            {
                "name": model.name,
                "path": str(model.path) if model.path else None,
                "size_bytes": model.size_bytes,
                "source": model.source,
            }
            for model in found
        ]
        print(jsonlib.dumps({"models": rows}, indent=1))
        return 0
    for model in found:
        where = f"{model.size_bytes / 1e6:,.0f} MB in {model.path}" if model.path else "not fetched yet"
        print(f"{model.name}  {where}  (from {model.source})")
    return 0


@app.command(epilog="Examples:\n\n`aioprefill model remove smollm2-135m-instruct`\n\n" + NOTE)
@command("model")
def remove(
    settings: Settings,
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A name as `aioprefill model list` shows it.")],
) -> int:
    """Delete a converted model from the cache. Hub models are the hub's: `hf cache delete`."""
    from aioprefill.engine.model_files import remove_model

    with shown_progress(f"model {name}") as report:
        print(f"removed {remove_model(name, settings.build(ModelConfig).cache_dir, progress=report)}")
    return 0
