"""How a setting is declared, found again and checked. The settings themselves are in `config`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from aioprefill.config_kinds import Kind
from aioprefill.errors import ConfigError

_OPTION = "aioprefill.option"


@dataclass(frozen=True)
class Option:
    """The declaration of one setting."""

    name: str
    """As in flags and files: "page-size"."""
    kind: Kind
    default: Any
    help: str
    flags: tuple[str, ...] = ()
    """Further flags, for the commands where no other option has them."""
    extra_env: tuple[str, ...] = ()
    """Further environment variables, looked at after `env`."""

    @property
    def env(self) -> str:
        """The environment variable: "AIOPREFILL_PAGE_SIZE"."""
        return "AIOPREFILL_" + self.name.upper().replace("-", "_")


class SettingsConflict(ConfigError):
    """Settings that are fine one by one but not together. `names` are the options in question."""

    def __init__(self, names: tuple[str, ...], message: str) -> None:
        super().__init__(f"{' and '.join(names)}: {message}")
        self.names = names
        self.message = message


def option(default: Any, kind: Kind, text: str, *, name: str = "", **more: tuple[str, ...]) -> Any:
    """A dataclass field that is a setting. Its name is the field's, with dashes, unless `name` is given."""
    return field(default=default, metadata={_OPTION: {"name": name, "kind": kind, "help": text, **more}})


def own_options(config: Any) -> Iterator[tuple[str, Option]]:
    """(field name, option) of the settings that a config class or object has itself."""
    for item in fields(config):
        declared = item.metadata.get(_OPTION)
        if declared is not None:
            name = declared["name"] or item.name.replace("_", "-")
            yield item.name, Option(**{**declared, "name": name, "default": item.default})


def groups(config: Any) -> Iterator[tuple[str, type[Checked]]]:
    """(field name, class) of the config classes that a config class is made of."""
    for item in fields(config):
        if _OPTION not in item.metadata and item.default_factory is not MISSING:
            factory: Any = item.default_factory
            yield item.name, factory


def all_options(config: type[Checked]) -> list[Option]:
    """The settings of a config class and of those it is made of, in the order of declaration."""
    found = [declared for _, declared in own_options(config)]
    for _, group in groups(config):
        found += all_options(group)
    return found


class Checked:
    """Base of the config classes: values are checked, and put in their normal form, when one is made.

    Text is taken too, as on the command line: `EngineConfig(kv_memory="512MiB")`.
    """

    panel: ClassVar[str] = "Options"
    """Title that the settings stand under in the help."""

    def __post_init__(self) -> None:
        for name, declared in own_options(self):
            try:
                value = declared.kind.read(getattr(self, name))
            except ValueError:
                message = f"{name} must be {declared.kind.allowed}, got {getattr(self, name)!r}"
                raise ConfigError(message) from None
            object.__setattr__(self, name, value)
        self.check_together()

    def check_together(self) -> None:
        """Raise `SettingsConflict` for settings that do not fit each other."""
