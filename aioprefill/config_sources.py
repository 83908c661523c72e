"""Where the settings of a command come from: flag, then environment, then file, then default.

Every value keeps its source, so that an error and `aioprefill config` can name it.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from aioprefill.config import COMMANDS
from aioprefill.config_option import Checked, Option, SettingsConflict, all_options, groups, own_options
from aioprefill.errors import ConfigError

CONFIG_ENV = "AIOPREFILL_CONFIG"

_Config = TypeVar("_Config", bound=Checked)


@dataclass(frozen=True, slots=True)
class Effective:
    """The value of one setting and where it came from."""

    option: Option
    value: Any
    source: str
    """ "flag --page-size", "env AIOPREFILL_PAGE_SIZE", "file PATH", "file PATH [serve]" or "default"."""

    @property
    def text(self) -> str:
        """The value as one would write it."""
        return self.option.kind.show(self.value)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A TOML file: settings at its top level are for all commands, those in a table for one command."""

    path: Path
    values: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]

    def find(self, name: str, command: str) -> tuple[Any, str] | None:
        """(raw value, source) of a setting, or None."""
        table = self.tables.get(command, {})
        if name in table:
            return table[name], f"file {self.path} [{command}]"
        if name in self.values:
            return self.values[name], f"file {self.path}"
        return None


def find_config_file(flag: Path | None, env: Mapping[str, str]) -> Path | None:
    """The file to read: the flag's, else that of AIOPREFILL_CONFIG, else the user's own where it exists."""
    named = flag or (Path(env[CONFIG_ENV]) if env.get(CONFIG_ENV) else None)
    if named is not None:
        return named.expanduser()
    home = Path(env.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    usual = home / "aioprefill" / "config.toml"
    return usual if usual.is_file() else None


def load_config_file(path: Path) -> ConfigFile:
    """Read and check a file. Raises `ConfigError` when it is missing, no TOML, or has unknown names."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"config file {path}: {err.strerror}") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"config file {path}: not valid TOML: {err}") from err
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    known = {declared.name for config in COMMANDS.values() for declared in all_options(config)}
    top = _checked_names(path, "", {k: v for k, v in content.items() if k not in tables}, known)
    for name, table in tables.items():
        if name not in COMMANDS:
            raise ConfigError(f"config file {path}: no table [{name}]{_nearest(name, COMMANDS)}")
        mine = {declared.name for declared in all_options(COMMANDS[name])}
        tables[name] = _checked_names(path, f" in [{name}]", table, mine)
    return ConfigFile(path, top, tables)


def _checked_names(path: Path, where: str, raw: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in raw.items():
        name = key.replace("_", "-")
        if name not in known:
            raise ConfigError(f"config file {path}: no setting {key!r}{where}{_nearest(name, known)}")
        if name in found:
            raise ConfigError(f"config file {path}: {key!r}{where} is there twice, with - and with _")
        found[name] = value
    return found


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f", did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one command."""

    command: str
    values: Mapping[str, Effective]

    def build(self, config: type[_Config]) -> _Config:
        """The config object. Raises `ConfigError`, with sources, for values that do not fit each other."""
        try:
            return self._build(config)
        except SettingsConflict as err:
            sources = "; ".join(f"{name} from {self.values[name].source}" for name in err.names)
            raise ConfigError(f"{err} ({sources})") from err

    def _build(self, config: type[_Config]) -> _Config:
        given: dict[str, Any] = {}
        for name, declared in own_options(config):
            if declared.name in self.values:
                given[name] = self.values[declared.name].value
        for name, group in groups(config):
            given[name] = self._build(group)
        return config(**given)


def resolve_settings(
    command: str,
    *,
    flags: Mapping[str, tuple[str, Any]] | None = None,
    env: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Settings:
    """The effective settings of `command`, one of `COMMANDS`.

    `flags` maps option names to (flag as typed, raw value). Raises `ConfigError` that names the setting,
    the source and what is allowed.
    """
    environ = os.environ if env is None else env
    path = find_config_file(config_file, environ)
    file = load_config_file(path) if path is not None else None
    found = {}
    for declared in all_options(COMMANDS[command]):
        raw = _find(declared, command, flags or {}, environ, file)
        if raw is None:
            found[declared.name] = Effective(declared, declared.default, "default")
        else:
            found[declared.name] = Effective(declared, _read(declared, *raw), raw[1])
    return Settings(command, found)


def _find(
    declared: Option,
    command: str,
    flags: Mapping[str, tuple[str, Any]],
    env: Mapping[str, str],
    file: ConfigFile | None,
) -> tuple[Any, str] | None:
    if declared.name in flags:
        flag, raw = flags[declared.name]
        return raw, f"flag {flag}"
    for variable in (declared.env, *declared.extra_env):
        if env.get(variable):  # an empty variable counts as unset, as is usual
            return env[variable], f"env {variable}"
    return file.find(declared.name, command) if file is not None else None


def _read(declared: Option, raw: Any, source: str) -> Any:
    try:
        return declared.kind.read(raw)
    except ValueError:
        message = f"{declared.name} ({source}) must be {declared.kind.allowed}, got {raw!r}"
        raise ConfigError(message) from None


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """AIOPREFILL_* variables that no setting has: most likely misspelt."""
    known = {CONFIG_ENV}
    for config in COMMANDS.values():
        for declared in all_options(config):
            known.update((declared.env, *declared.extra_env))
    return sorted(name for name in env if name.startswith("AIOPREFILL_") and name not in known)
