"""The command line: help, settings, errors and exit codes, and the client against a fake pair."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys

import msgspec
import pytest
from model_fakes import write_folder
from typer.testing import CliRunner
from wire_fakes import FakeDecode, FakeScheduler, welcome
from wire_support import wait_until

import aioprefill
from aioprefill.cli import app
from aioprefill.cli.generate import Job, run_generate
from aioprefill.config import COMMANDS, GenerateConfig
from aioprefill.config_option import all_options
from aioprefill.engine.model_text import ModelText
from aioprefill.errors import ConfigError, InvalidRequest
from aioprefill.request import Timeouts
from aioprefill.sampling_params import SamplingParams

CLEAN = {"XDG_CONFIG_HOME": "/nonexistent", "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


@pytest.fixture
def cli():
    """Runs the command line in this process, without the machine's own settings."""
    runner = CliRunner()

    def run(*arguments, env=None, stdin=None):
        return runner.invoke(app, list(arguments), env={**CLEAN, **(env or {})}, input=stdin)

    return run


def one_line_error(result, code=2):
    """The error line of a failed command: the only thing on stderr."""
    assert result.exit_code == code, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


# help


@pytest.mark.parametrize("command", ["serve", "decode", "generate", "demo"])
def test_help_shows_every_setting(cli, command):
    """Each setting of a command is a flag of it, with its default; there are examples."""
    text = cli(command, "--help").output
    for option in all_options(COMMANDS[command]):
        assert f"--{option.name}" in text
    assert "Examples:" in text and f"aioprefill {command}" in text and "AIOPREFILL_PAGE_SIZE" in text
    assert "Default: smollm2-135m-instruct." in text


@pytest.mark.parametrize(
    "command", ["", "config", "keygen", "model", "model pull", "model path", "model list", "model remove"]
)
def test_other_helps(cli, command):
    """Every other command has help, with examples."""
    result = cli(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.output or command == "model"


def test_version_and_speed():
    """`--help` and `--version` are quick and import none of the heavy libraries."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run(
        [sys.executable, "-m", "aioprefill", "--version"], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert shown.stdout == f"aioprefill {aioprefill.__version__}\n"
    # 0.3 s on an idle machine; CPU time, because it may be busy
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    code = (
        "import sys; from aioprefill.cli import app; from typer.testing import CliRunner;"
        "print(CliRunner().invoke(app, ['serve', '--help']).exit_code);"
        "print(sorted({'torch', 'transformers', 'nixl', 'zmq'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split("\n")[:2] == ["0", "[]"]


# settings


def settings_of(result):
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    return found, {(row["name"], *row["commands"]): row for row in found["settings"]}


def test_config_shows_values_and_sources(cli, tmp_path):
    """Flag, environment, file and default each show up as a source; commands may differ."""
    file = tmp_path / "c.toml"
    file.write_text("page-size = 64\nlease-s = 3\n[decode]\nlease-s = 4.5")
    result = cli(
        "config", "--json", "--config", str(file), "--no-prefix-cache", "--kv-memory", "1GiB",
        env={"AIOPREFILL_CHUNK_TOKENS": "100", "AIOPREFILL_CHUNKTOKENS": "1"},
    )  # fmt: skip
    found, rows = settings_of(result)
    assert found["file"] == str(file) and found["unknown_variables"] == ["AIOPREFILL_CHUNKTOKENS"]
    engine, native = ("serve", "decode", "demo"), ("serve", "demo")
    for key, value, source in (
        (("page-size", *engine), 64, f"file {file}"),
        (("kv-memory", *engine), "1GiB", "flag --kv-memory"),
        (("prefix-cache", *native), False, "flag --prefix-cache"),
        (("chunk-tokens", *native), 100, "env AIOPREFILL_CHUNK_TOKENS"),
        (("lease-s", "serve"), 3.0, f"file {file}"),
        (("lease-s", "decode"), 4.5, f"file {file} [decode]"),
        (("threads", *engine), "auto", "default"),
    ):
        assert (rows[key]["value"], rows[key]["source"]) == (value, source)
    assert "note: no setting has the environment variable AIOPREFILL_CHUNKTOKENS" in result.stderr


def test_config_table_has_every_setting(cli):
    """Without --json it is a table: one line per setting and value."""
    lines = cli("config").stdout.splitlines()
    names = {option.name for config in COMMANDS.values() for option in all_options(config)}
    assert names <= {line.split()[0] for line in lines}
    assert any(line.split() == ["page-size", "16", "default", "serve,", "decode,", "demo"] for line in lines)


def test_config_finds_settings_that_do_not_fit(cli):
    """`config` prints, then says what serve would refuse."""
    result = cli("config", "--prefill-endpoint", "tcp://0.0.0.0:1")
    assert "tcp://0.0.0.0:1" in result.stdout
    assert "keys are required" in one_line_error(result)


# errors


@pytest.mark.parametrize(
    ("arguments", "env", "text"),
    [
        (["serve", "--page-size", "0"], {}, "page-size (flag --page-size) must be a whole number"),
        (["serve", "--listen", "x"], {}, "prefill-endpoint (flag --listen) must be tcp://HOST:PORT"),
        (["decode", "--listen", "tcp://0.0.0.0:1"], {}, "(decode-endpoint from flag --listen; "),
        (["decode"], {"AIOPREFILL_LEASE_S": "x"}, "lease-s (env AIOPREFILL_LEASE_S) must be seconds"),
        (["demo", "--config", "/nonexistent.toml"], {}, "config file /nonexistent.toml: No such file"),
        (["generate", "x", "--temperature", "nan"], {}, "sampling.temperature: must be within"),
        (["generate", "x", "--top-p", "0"], {}, "sampling.top_p"),
        (["generate", "x", "--max-new-tokens", "0"], {}, "max_new_tokens: must be at least 1"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line_and_exit_2(cli, arguments, env, text):
    """A wrong setting or argument is one line that names it, and exit code 2."""
    assert text in one_line_error(cli(*arguments, env=env))


@pytest.mark.parametrize("command", [["serve"], ["decode"], ["demo"], ["generate", "x"], ["model", "path"]])
def test_unknown_model_exits_1(cli, command, tmp_path):
    """Every command that needs a model says what was tried, before it starts anything."""
    line = one_line_error(cli(*command, "--model", str(tmp_path / "none"), "--cache-dir", str(tmp_path)), 1)
    assert f"no folder or file {tmp_path}/none" in line


def test_usage_errors_exit_2(cli):
    """Unknown flags and missing arguments are usage errors."""
    assert cli("serve", "--pagesize", "1").exit_code == 2
    assert cli("generate").exit_code == 2
    assert cli("nonsense").exit_code == 2


@pytest.mark.parametrize("how", [["--debug", "model", "path"], ["generate", "hi", "--log-level", "debug"]])
def test_debug_shows_a_traceback(cli, how, tmp_path):
    """With --debug, or log level debug, there is a traceback as well as the line."""
    result = cli(*how, "--model", "none", "--cache-dir", str(tmp_path))
    assert "Traceback" in result.stderr and result.stderr.splitlines()[-1].startswith("error: model 'none'")


def test_prompt_from_standard_input_must_be_utf8(cli, tmp_path):
    """Bytes that are no text are refused, by the name of the field."""
    result = cli("generate", "-", stdin=b"\xff\xfe")
    assert "prompt: standard input is not UTF-8" in one_line_error(result)


# models and keys


def test_model_commands(cli, tmp_path):
    """`path` prints the folder, `list` what is known, `pull` and `path` take a name instead of --model."""
    folder = write_folder(tmp_path / "m")
    cache = ("--cache-dir", str(tmp_path / "cache"))
    assert cli("model", "path", "--model", str(folder), *cache).stdout == f"{folder}\n"
    assert cli("model", "pull", "--verify", str(folder), *cache).stdout == f"{folder}\n"
    found = json.loads(cli("model", "path", str(folder), "--json", *cache).stdout)
    assert found["path"] == str(folder) and len(found["fingerprint"]) == 32
    listed = json.loads(cli("model", "list", "--json", *cache).stdout)["models"]
    assert [(row["name"], row["path"]) for row in listed] == [("smollm2-135m-instruct", None)]
    assert "not fetched yet" in cli("model", "list", *cache).stdout
    assert "run `aioprefill model pull" in one_line_error(cli("model", "path", *cache), 1)
    assert "see `aioprefill model list`" in one_line_error(cli("model", "remove", "x", *cache), 1)


def test_keygen(cli, tmp_path):
    """Keys are made once, secret ones for the owner only, and then never overwritten."""
    made = cli("keygen", str(tmp_path / "keys")).stdout.split()
    assert str(tmp_path / "keys" / "server.key_secret") in made
    assert (tmp_path / "keys" / "client.key_secret").stat().st_mode & 0o777 == 0o600
    assert "holds keys already" in one_line_error(cli("keygen", str(tmp_path / "keys")))


# generate, against a fake pair


async def generated(model, job, answer, **changes):
    """Run the client; the fake pair streams the tokens of `answer`."""
    server = msgspec.structs.replace(welcome(), fingerprint=model.fingerprint, **changes)
    scheduler, decode, ids = FakeScheduler(), FakeDecode(), ModelText(model.path).encode(answer)
    async with asyncio.timeout(20), scheduler.service(welcome=server) as prefill, decode.server:
        config = GenerateConfig(prefill_endpoint=prefill.endpoint, decode_endpoint=decode.server.endpoint)
        client = asyncio.create_task(run_generate(config, job))
        await wait_until(lambda: client.done() or (scheduler.requests and decode.attached), "the request")
        if client.done():
            return await client, None
        (request,) = scheduler.requests.values()
        # the last token may well come before the news of the first one
        decode.stream(request.request_id, ids)
        scheduler.publish(request.request_id, ids[0])
        scheduler.finish(request.request_id)
        return await client, request


@pytest.mark.asyncio
async def test_generate_streams_text(embedded_model, capsys):
    """Raw text is continued: its ids go out as they are, the answer's text comes back whole."""
    sampling = SamplingParams(temperature=0.5, seed=3)
    job = Job("The capital of France is", False, sampling, 64, True, False)
    code, request = await generated(embedded_model, job, " Paris 日本 🙂")
    assert (code, capsys.readouterr().out) == (0, " Paris 日本 🙂\n")
    assert list(request.token_ids) == [504, 3575, 282, 4649, 314]
    assert (request.sampling, request.max_new_tokens, request.ignore_eos) == (sampling, 64, True)


@pytest.mark.asyncio
async def test_generate_json_and_chat(embedded_model, capsys):
    """--json prints one object with text, counts and times; --chat applies the template."""
    timeouts = Timeouts(queue_s=3.0, transfer_s=4.0)
    job = Job("Hi", True, SamplingParams(logprobs=2), 64, False, True, timeouts)
    code, request = await generated(embedded_model, job, "Hello there")
    found = json.loads(capsys.readouterr().out)
    assert (code, found["text"], found["finish_reason"]) == (0, "Hello there", "eos")
    assert found["new_tokens"] == len(found["token_ids"]) == 2
    assert found["weight_versions"] == [0] and request.timeouts == timeouts
    assert found["kv_bytes"] == 4096 and found["transferred_ms"] == pytest.approx(9, abs=1)
    assert [top["token_id"] for top in found["first_token"]["top_logprobs"]] == [7, 8]
    text = ModelText(embedded_model.path)
    assert list(request.token_ids) == text.encode_chat([{"role": "user", "content": "Hi"}])


@pytest.mark.asyncio
async def test_generate_refuses_another_model(embedded_model):
    """Ids of one model's tokenizer are not sent to another model."""
    job = Job("Hi", False, SamplingParams(), 4, False, False)
    async with asyncio.timeout(20), FakeScheduler().service() as prefill, FakeDecode().server as decode:
        config = GenerateConfig(prefill_endpoint=prefill.endpoint, decode_endpoint=decode.endpoint)
        with pytest.raises(ConfigError, match="the server has 'tiny', which is not 'smollm2-135m-instruct'"):
            await run_generate(config, job)


@pytest.mark.asyncio
async def test_generate_passes_on_the_servers_error(embedded_model, capsys):
    """What the server refuses is the client's error; nothing is printed but the line's end."""
    scheduler, decode = FakeScheduler(), FakeDecode()
    scheduler.error = InvalidRequest("prompt", "longer than the model's context")
    server = msgspec.structs.replace(welcome(), fingerprint=embedded_model.fingerprint)
    async with asyncio.timeout(20), scheduler.service(welcome=server) as prefill, decode.server:
        config = GenerateConfig(prefill_endpoint=prefill.endpoint, decode_endpoint=decode.server.endpoint)
        with pytest.raises(InvalidRequest, match="prompt: longer than"):
            await run_generate(config, Job("Hi", False, SamplingParams(), 4, False, False))
