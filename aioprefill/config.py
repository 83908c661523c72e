"""Every setting, declared once: type, default, help. Flags, environment, file and library all read it here.

Rules:
- A field made by `option` is a setting; a field that is a config class itself groups settings.
- A command's options are the fields of its class in `COMMANDS`, so what a command uses is written once too.
- Every class checks itself when it is made and raises `ConfigError`, whether the command line or a program
  makes it. Where a value came from is the business of `config_sources`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from aioprefill.config_kinds import (
    Auto,
    Bytes,
    Choice,
    Endpoint,
    FilePath,
    Integer,
    Part,
    Pattern,
    Seconds,
    Switch,
)
from aioprefill.config_option import Checked, SettingsConflict, option, own_options
from aioprefill.pacer import FINE_S

DEFAULT_MODEL = "smollm2-135m-instruct"
PREFILL_ENDPOINT = "tcp://127.0.0.1:7410"
DECODE_ENDPOINT = "tcp://127.0.0.1:7420"


def _prefill_endpoint(*flags: str) -> Any:
    text = "Where the prefill process listens."
    return option(PREFILL_ENDPOINT, Endpoint(), text, name="prefill-endpoint", flags=flags)


def _decode_endpoint(*flags: str) -> Any:
    text = "Where the decode worker listens."
    return option(DECODE_ENDPOINT, Endpoint(), text, name="decode-endpoint", flags=flags)


def _lease() -> Any:
    text = "Seconds of silence after which the other side of a hand-off is taken for dead."
    return option(10.0, Seconds(0.5, 3600), text)


def _timeout(default: float | None, what: str) -> Any:
    text = f"Seconds that a request may take {what}, unless it brings its own limit."
    return option(default, Auto(Seconds(0.001, 86_400), "none"), text)


def _drain_timeout() -> Any:
    text = "Seconds that a shutdown waits for what was launched and for its transfers."
    return option(30.0, Seconds(0, 86_400), text)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
    """Which model, and where converted and fetched ones are kept."""

    panel: ClassVar[str] = "Model"
    model: str = option(
        DEFAULT_MODEL,
        Pattern(r"\S(.*\S)?", "a model name, a local path (folder or .gguf file) or a hub id (owner/name)"),
        "Model: the embedded one, a local folder or .gguf file, or a hub id (owner/name).",
    )
    cache_dir: Path | None = option(  # noqa: RUF009
        None,
        Auto(FilePath()),
        "Folder for models; auto is $XDG_CACHE_HOME/aioprefill, or ~/.cache/aioprefill.",
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ModelConfig):
    """How the model is run."""

    panel: ClassVar[str] = "Model and engine"
    dtype: str = option(
        "auto",
        Choice(
            ("auto", "float32", "bfloat16", "float16"),
            {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"},
        ),
        "Number format of weights and KV; auto is the checkpoint's own.",
    )
    device: str = option(
        "cpu",
        Pattern(r"cpu|cuda(:\d{1,3})?", "cpu, cuda or cuda:N", "DEVICE"),
        "Device of the model.",
    )
    threads: int | None = option(
        None, Auto(Integer(1, 4096)), "CPU threads of a forward; auto leaves the choice to torch."
    )
    page_size: int = option(16, Integer(1, 1024), "Tokens per KV page. Prefill and decode must agree.")
    kv_memory: int | None = option(
        None,
        Auto(Bytes(1 << 20)),
        "Size of the KV page pool; auto is a quarter of the free memory, at most 4GiB.",
    )
    grammar_timeout_s: float = option(
        10.0, Seconds(0.1, 600), "Seconds that a request waits for its grammar to be compiled, then it fails."
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Checked):
    """The loop. Times are seconds."""

    panel: ClassVar[str] = "Loop"
    continuous_intake: bool = option(
        True,
        Switch(),
        "Keep taking in, preparing and transferring while a forward runs; off waits in the blocking way.",
        extra_env=("AIOPREFILL_ENABLE_CONTINUOUS_INTAKE",),
    )
    drain_timeout_s: float = _drain_timeout()
    stall_limit_s: float = option(
        120.0, Seconds(0.1, 86_400), "Seconds after which a pending forward makes the process unready."
    )
    slow_call_s: float = option(
        0.005, Seconds(0, 60), "Host calls that block the loop for longer, in seconds, are counted as slow."
    )


@dataclass(frozen=True, kw_only=True)
class NativeConfig(Checked):
    """The built-in host: batches and queue."""

    panel: ClassVar[str] = "Batches and queue"
    chunk_tokens: int = option(512, Integer(1, 1 << 20), "Most prompt tokens of one forward.")
    max_batch_requests: int = option(64, Integer(1, 4096), "Most requests of one forward.")
    max_queue_requests: int = option(
        4096, Integer(1, 1 << 24), "Requests that may wait; further ones are refused with a retry hint."
    )
    max_queue_tokens: int = option(
        1 << 22,
        Integer(1, 1 << 32),
        "Prompt tokens that may wait; further ones are refused with a retry hint.",
    )
    handshake_timeout_s: float | None = _timeout(60.0, "for its decode peer to reserve pages")
    queue_timeout_s: float | None = _timeout(None, "to be launched, once it may be")
    running_timeout_s: float | None = _timeout(None, "from its launch to its first token")
    transfer_timeout_s: float | None = _timeout(120.0, "from its first token until its KV is handed off")
    prefix_cache: bool = option(True, Switch(), "Reuse the KV of prompt beginnings seen before.")
    policy: str = option(
        "fcfs",
        Choice(("fcfs", "longest-prefix", "shortest-first", "hrrn", "priority", "deadline")),
        "Order of waiting requests: first come, most cached tokens, fewest tokens to compute, highest "
        "response ratio, highest priority, or earliest deadline first.",
    )
    policy_max_wait_s: float = option(
        45.0,
        Seconds(0, 86_400),
        "Seconds after which a waiting request may not be passed by later ones, whatever the policy.",
    )
    late_deadlines: str = option(
        "refuse",
        Choice(("refuse", "serve")),
        "What becomes of a request whose deadline cannot be met: refused early, or served late.",
    )
    max_chunk_share: float = option(
        0.5,
        Part(0.05, 1),
        "Part of a forward's tokens that prompts of many forwards may have together while others want some.",
    )
    optimistic: bool = option(
        False, Switch(), "Launch a request before the handshake with its decode peer has ended."
    )
    optimistic_attempts: int = option(
        3, Integer(1, 100), "Times that a request may be launched so, for it yields its pages to ready ones."
    )
    tier_dir: Path | None = option(  # noqa: RUF009
        None,
        Auto(FilePath(), "none"),
        "Folder for the storage tier: prefixes that leave the KV pool are kept there, also over restarts.",
    )
    tier_size: int = option(8 << 30, Bytes(1 << 20), "Size limit of the storage tier.")

    def check_together(self) -> None:
        """The tier keeps what the prefix cache lets go."""
        if self.tier_dir is not None and not self.prefix_cache:
            raise SettingsConflict(("tier-dir", "prefix-cache"), "the storage tier needs the prefix cache")


@dataclass(frozen=True, kw_only=True)
class RanksConfig(Checked):
    """Tensor parallelism: one process per rank, each with a part of every layer."""

    panel: ClassVar[str] = "Tensor-parallel ranks"
    tp: int = option(
        1,
        Integer(1, 1024),
        "Ranks that the model is divided over. They are started here, unless torchrun or a cluster manager "
        "started this process as one of them (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).",
    )
    rank_timeout_s: float = option(
        60.0,
        Seconds(0.5, 86_400),
        "Seconds that a rank may be silent, or later than another one with a vote or a host call, before "
        "it is given up and all ranks stop.",
    )


@dataclass(frozen=True, kw_only=True)
class RecordConfig(Checked):
    """A recording of what the scheduler decides, for `aioprefill replay`."""

    panel: ClassVar[str] = "Recording"
    record: Path | None = option(  # noqa: RUF009
        None,
        Auto(FilePath(), "none"),
        "File to record all decisions and their inputs in, prompts included, for `aioprefill replay`.",
    )
    record_size: int = option(
        256 << 20, Bytes(1 << 20), "Size limit of a recording: of FILE and of the older FILE.1 together."
    )


@dataclass(frozen=True, kw_only=True)
class ProcessConfig(Checked):
    """What every process has."""

    panel: ClassVar[str] = "Process"
    curve_keys: Path | None = option(  # noqa: RUF009
        None,
        Auto(FilePath(), "none"),
        "Folder made by `aioprefill keygen`: connections are encrypted, and only holders of its keys get in.",
    )
    log_level: str = option(
        "info",
        Choice(("debug", "info", "warning", "error"), {"warn": "warning"}),
        "Least level of messages that are logged.",
    )


@dataclass(frozen=True, kw_only=True)
class ListenerConfig(ProcessConfig):
    """A process that others connect to."""

    def check_together(self) -> None:
        """Off loopback, only with keys: whoever connects can read prompts and write to the KV pool."""
        from aioprefill.wire.security import is_local  # here, because most commands do without zmq

        for name, declared in own_options(self):
            if not isinstance(declared.kind, Endpoint) or self.curve_keys is not None:
                continue
            endpoint = getattr(self, name)
            if not is_local(endpoint):
                message = (
                    f"{endpoint} is not on loopback, so keys are required: run `aioprefill keygen DIR` "
                    "and give --curve-keys DIR on both sides"
                )
                raise SettingsConflict((declared.name, "curve-keys"), message)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ListenerConfig):
    """`aioprefill serve`: the prefill process."""

    listen: str = _prefill_endpoint("--listen")
    lease_s: float = _lease()
    engine: EngineConfig = field(default_factory=EngineConfig)
    native: NativeConfig = field(default_factory=NativeConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)
    recording: RecordConfig = field(default_factory=RecordConfig)

    def check_together(self) -> None:
        """Besides the listener's rules: what the tier holds comes from before, so no recording has it all."""
        super().check_together()
        if self.recording.record is not None and self.native.tier_dir is not None:
            message = "a recording cannot be replayed with a storage tier: leave one of them out"
            raise SettingsConflict(("record", "tier-dir"), message)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(ListenerConfig):
    """`aioprefill decode`: the reference decode worker."""

    listen: str = _decode_endpoint("--listen")
    lease_s: float = _lease()
    max_batch_requests: int = option(32, Integer(1, 4096), "Most requests of one decode step.")
    room_timeout_s: float = option(
        3600.0,
        Seconds(1, 864_000),
        "Seconds that reserved pages may wait for KV from a prefill that is alive.",
    )
    drain_timeout_s: float = _drain_timeout()
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ProcessConfig):
    """`aioprefill generate`: the client."""

    prefill_endpoint: str = _prefill_endpoint()
    decode_endpoint: str = _decode_endpoint()
    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass(frozen=True, kw_only=True)
class CtlConfig(ProcessConfig):
    """`aioprefill ctl`: operating a prefill process."""

    prefill_endpoint: str = _prefill_endpoint("--endpoint")
    answer_timeout_s: float = option(
        5.0,
        Seconds(0.1, 3600),
        "Seconds that the server may take to give a sign of life; a command itself may take longer.",
    )


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Checked):
    """`aioprefill demo`: both processes, started and stopped for the demonstration."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    native: NativeConfig = field(default_factory=NativeConfig)


@dataclass(frozen=True, kw_only=True)
class SglangConfig(Checked):
    """The loop inside SGLang: read from the environment of SGLang's own processes."""

    panel: ClassVar[str] = "SGLang"
    pause_barrier: bool = option(
        False, Switch(), "Inside SGLang: a pause, and what comes behind it, waits until no forward runs."
    )
    shutdown_timeout_s: float = option(
        3.0,
        Seconds(0, 3600),
        "Inside SGLang: seconds that a shutdown waits for transfers of what was launched.",
    )
    input_poll_s: float = option(
        0.005,
        Seconds(0.001, 10),
        "Inside SGLang: interval of intake where the receiver has no sockets to watch.",
    )
    look_s: float = option(
        FINE_S,
        Seconds(0.00001, 0.1),
        "Inside SGLang: shortest time between looks for the end of a forward. Longer: less CPU, found later.",
    )
    loop: SchedulerConfig = field(default_factory=SchedulerConfig)


COMMANDS: dict[str, type[Checked]] = {
    "serve": ServeConfig,
    "decode": DecodeConfig,
    "generate": GenerateConfig,
    "ctl": CtlConfig,
    "demo": DemoConfig,
    "model": ModelConfig,
    "sglang": SglangConfig,
}
"""The config class of each command; also the names of the tables of a config file."""
