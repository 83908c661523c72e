"""Settings: declarations, precedence, provenance, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioprefill.config import (
    COMMANDS,
    DecodeConfig,
    EngineConfig,
    GenerateConfig,
    NativeConfig,
    SchedulerConfig,
    ServeConfig,
)
from aioprefill.config_kinds import Bytes, Endpoint, Integer, Seconds, Switch
from aioprefill.config_option import all_options
from aioprefill.config_sources import find_config_file, resolve_settings, unknown_variables
from aioprefill.errors import ConfigError

ALL = [(command, option) for command, config in COMMANDS.items() for option in all_options(config)]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return path


def settle(command="serve", *, flags=None, env=None, file=None):
    """Settings with nothing of the machine's own environment."""
    given = {name: (f"--{name}", value) for name, value in (flags or {}).items()}
    return resolve_settings(
        command, flags=given, env={"XDG_CONFIG_HOME": "/nonexistent", **(env or {})}, config_file=file
    )


def test_library_defaults_need_no_command_line():
    """The config classes work by themselves, with the documented defaults."""
    config = ServeConfig()
    assert config.engine == EngineConfig(model="smollm2-135m-instruct", page_size=16, kv_memory=None)
    assert config.native == NativeConfig(chunk_tokens=512, max_queue_requests=4096)
    assert config.scheduler == SchedulerConfig(
        continuous_intake=True, drain_timeout_s=30.0, stall_limit_s=120.0, slow_call_s=0.005
    )
    assert (config.listen, DecodeConfig().listen) == ("tcp://127.0.0.1:7410", "tcp://127.0.0.1:7420")
    assert config.native.optimistic is False and DecodeConfig().lease_s == 10.0


def test_library_values_are_checked_and_put_in_normal_form():
    """A wrong value raises at once and says what is allowed; text with units is understood."""
    assert EngineConfig(kv_memory="512MiB", dtype="bf16").kv_memory == 512 << 20
    assert EngineConfig(dtype="bf16").dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"page_size must be a whole number from 1 to 1,024, got 0"):
        EngineConfig(page_size=0)
    with pytest.raises(ConfigError, match="optimistic must be true or false"):
        NativeConfig(optimistic=1)


@pytest.mark.parametrize(("command", "option"), ALL, ids=lambda part: getattr(part, "name", part))
def test_every_default_can_be_written(command, option):
    """What `show` prints is what `parse` reads, so flags, files and the printed table agree."""
    assert option.kind.parse(option.kind.show(option.default)) == option.default
    assert option.help.endswith(".") and option.kind.allowed and option.kind.metavar


def test_names_are_unique_within_a_command():
    """No command has two settings of one name, environment variable or flag."""
    for config in COMMANDS.values():
        options = all_options(config)
        names = [name for option in options for name in (option.name, *option.flags, option.env)]
        assert len(names) == len(set(names))


def test_precedence_and_source(tmp_path):
    """Flag beats environment beats file beats default, and each value knows where it came from."""
    file = write(tmp_path, 'page-size = 64\nchunk_tokens = 256\nkv-memory = "1GiB"\nmodel = "x/y"')
    env = {"AIOPREFILL_PAGE_SIZE": "32", "AIOPREFILL_CHUNK_TOKENS": "128"}
    found = settle(flags={"page-size": "8"}, env=env, file=file).values
    assert [
        (found[n].value, found[n].source) for n in ("page-size", "chunk-tokens", "kv-memory", "lease-s")
    ] == [
        (8, "flag --page-size"),
        (128, "env AIOPREFILL_CHUNK_TOKENS"),
        (1 << 30, f"file {file}"),
        (10.0, "default"),
    ]


def test_settings_build_nested_config(tmp_path):
    """Values reach the config object of the command, groups included."""
    table = '[serve]\noptimistic = true\nprefill-endpoint = "ipc:///tmp/a"'
    file = write(tmp_path, f"page-size = 64\n{table}")
    config = settle(file=file, env={"AIOPREFILL_LEASE_S": "2.5"}).build(ServeConfig)
    assert (config.engine.page_size, config.native.optimistic, config.lease_s) == (64, True, 2.5)
    assert config.listen == "ipc:///tmp/a"


def test_file_table_is_for_one_command(tmp_path):
    """A table beats the top level for its command only, and is named as the source."""
    file = write(tmp_path, "page-size = 64\n[decode]\npage-size = 32")
    assert settle("serve", file=file).values["page-size"].value == 64
    decode = settle("decode", file=file).values["page-size"]
    assert (decode.value, decode.source) == (32, f"file {file} [decode]")


@pytest.mark.parametrize(
    ("env", "value"),
    [
        ({"AIOPREFILL_ENABLE_CONTINUOUS_INTAKE": "0"}, False),
        ({"AIOPREFILL_CONTINUOUS_INTAKE": "off"}, False),
        ({"AIOPREFILL_ENABLE_CONTINUOUS_INTAKE": "yes"}, True),
        ({"AIOPREFILL_ENABLE_CONTINUOUS_INTAKE": ""}, True),
    ],
)
def test_continuous_intake_switch(env, value):
    """The switch obeys both of its environment variables; an empty one counts as unset."""
    assert settle(env=env).build(ServeConfig).scheduler.continuous_intake is value


@pytest.mark.parametrize(
    ("name", "raw", "allowed"),
    [
        ("page-size", "0", "a whole number from 1 to 1,024"),
        ("page-size", "1.5", "a whole number"),
        ("kv-memory", "4 gigs", "a size such as 512MiB or 4GiB"),
        ("kv-memory", "10KiB", "at least 1MiB"),
        ("lease-s", "nan", "seconds from 0.5 to 3600"),
        ("drain-timeout-s", "-1", "seconds from 0"),
        ("continuous-intake", "maybe", "true or false"),
        ("dtype", "int3", "one of auto, float32, bfloat16, float16"),
        ("device", "tpu", "cpu, cuda or cuda:N"),
        ("log-level", "loud", "one of debug, info, warning, error"),
        ("threads", "many", "or auto"),
        ("prefill-endpoint", "127.0.0.1:7410", "tcp://HOST:PORT"),
        ("prefill-endpoint", "tcp://127.0.0.1:70000", "tcp://HOST:PORT"),
        ("model", " ", "a model name"),
        ("cache-dir", "", "a path"),
    ],
)
def test_bad_value_names_setting_source_and_what_is_allowed(name, raw, allowed):
    """The error of a bad value says which setting, from where, and what may be given."""
    with pytest.raises(ConfigError) as caught:
        settle(flags={name: raw})
    message = str(caught.value)
    assert message.startswith(f"{name} (flag --{name}) must be ") and allowed in message
    assert repr(raw) in message


def test_bad_value_in_environment_and_file(tmp_path):
    """The variable or the file is named, also for a value of the wrong TOML type."""
    with pytest.raises(ConfigError, match=r"page-size \(env AIOPREFILL_PAGE_SIZE\) must be .*, got 'x'"):
        settle(env={"AIOPREFILL_PAGE_SIZE": "x"})
    for raw in ("true", "1.5", "[1]", "1979-05-27"):
        file = write(tmp_path, f"page-size = {raw}")
        with pytest.raises(ConfigError, match=r"page-size \(file .*settings.toml\) must be a whole number"):
            settle(file=file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pagesize = 1", "no setting 'pagesize', did you mean 'page-size'"),
        ("zzz = 1", "no setting 'zzz'; known are answer-timeout-s, cache-dir, "),
        ("[serv]\npage-size = 1", r"no table \[serv\], did you mean 'serve'"),
        ("[decode]\noptimistic = true", r"no setting 'optimistic' in \[decode\]"),
        ("page-size = 1\npage_size = 2", "'page_size' is there twice"),
        ("page-size = ", "not valid TOML"),
        ("\udcff", "not valid TOML"),
    ],
)
def test_bad_file(tmp_path, text, message):
    """A file with unknown names is refused, with the nearest known name; so is one that is no TOML."""
    path = tmp_path / "settings.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message) as caught:
        settle(file=path)
    assert str(path) in str(caught.value)


def test_which_file_is_read(tmp_path):
    """--config beats AIOPREFILL_CONFIG beats the user's own file, and a named file must exist."""
    own = tmp_path / "aioprefill" / "config.toml"
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert find_config_file(None, env) is None
    own.parent.mkdir()
    own.write_text("page-size = 4")
    assert find_config_file(None, env) == own
    assert find_config_file(None, {**env, "AIOPREFILL_CONFIG": "/a.toml"}) == Path("/a.toml")
    assert find_config_file(Path("/b.toml"), {**env, "AIOPREFILL_CONFIG": "/a.toml"}) == Path("/b.toml")
    assert settle(env=env).values["page-size"].source == f"file {own}"
    with pytest.raises(ConfigError, match=r"config file .*missing.toml: No such file"):
        settle(file=tmp_path / "missing.toml")


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:7410", "tcp://*:7410", "tcp://gpu7:7410"])
def test_off_loopback_needs_keys(endpoint, tmp_path):
    """Listening where others can reach it is refused without keys; the error has the source."""
    with pytest.raises(ConfigError, match=r"not on loopback.*prefill-endpoint from flag --prefill-endpoint"):
        settle(flags={"prefill-endpoint": endpoint}).build(ServeConfig)
    flags = {"prefill-endpoint": endpoint, "curve-keys": str(tmp_path)}
    assert settle(flags=flags).build(ServeConfig).listen == endpoint
    # a client only connects: whether keys are needed is for the connection to say
    assert settle("generate", flags={"prefill-endpoint": endpoint}).build(GenerateConfig)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("512 mib", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("1048576", 1 << 20),
    ],
)
def test_sizes(text, size):
    """Sizes are read with binary and decimal units, and shown so that they read back."""
    kind = Bytes(1)
    assert kind.parse(text) == size
    assert kind.parse(kind.show(size)) == size


def test_kinds_refuse_booleans_for_numbers():
    """`true` is no number, although Python says so; 1 is no switch."""
    for kind, value in ((Integer(0, 9), True), (Seconds(0, 9), True), (Bytes(0), True), (Switch(), 1)):
        with pytest.raises(ValueError):
            kind.check(value)
    with pytest.raises(ValueError):
        Endpoint().check(7410)


def test_paths_expand_home():
    """~ works in files and variables, where no shell expands it."""
    config = settle(env={"AIOPREFILL_CACHE_DIR": "~/models"}).build(ServeConfig)
    assert config.engine.cache_dir == Path.home() / "models"


def test_unknown_variables():
    """A misspelt variable is noticed."""
    env = {"AIOPREFILL_PAGESIZE": "1", "AIOPREFILL_PAGE_SIZE": "1", "AIOPREFILL_CONFIG": "", "HOME": ""}
    env["AIOPREFILL_ENABLE_CONTINUOUS_INTAKE"] = "1"
    assert unknown_variables(env) == ["AIOPREFILL_PAGESIZE"]
