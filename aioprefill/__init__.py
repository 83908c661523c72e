"""aioprefill: an asyncio prefill scheduler for disaggregated LLM serving.

Importing this package loads neither torch nor transformers nor nixl; they come with the host that needs
them: `aioprefill.native.load.load_host`.
"""

from aioprefill.config import EngineConfig, NativeConfig, SchedulerConfig
from aioprefill.control import PauseMode
from aioprefill.errors import (
    AioprefillError,
    ConfigError,
    ControlError,
    DeviceError,
    HostError,
    InvalidRequest,
    ModelError,
    PeerError,
    QueueFull,
    RequestAborted,
    RequestTimeout,
    WireError,
)
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.host import DrainReport, PrefillHost
from aioprefill.request import HandoffResult, PrefillHandle, PrefillRequest, PrefillResult
from aioprefill.sampling_params import SamplingParams
from aioprefill.scheduler import PrefillScheduler
from aioprefill.stats import Health, SchedulerStats
from aioprefill.version import __version__

__all__ = [
    "AioprefillError",
    "ConfigError",
    "ControlError",
    "DeviceError",
    "DrainReport",
    "EngineConfig",
    "GrammarSpec",
    "HandoffResult",
    "Health",
    "HostError",
    "InvalidRequest",
    "ModelError",
    "NativeConfig",
    "PauseMode",
    "PeerError",
    "PrefillHandle",
    "PrefillHost",
    "PrefillRequest",
    "PrefillResult",
    "PrefillScheduler",
    "QueueFull",
    "RequestAborted",
    "RequestTimeout",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerStats",
    "WireError",
    "__version__",
]
