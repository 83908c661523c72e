"""aioprefill: an asyncio prefill scheduler for disaggregated LLM serving.

Importing this package loads neither torch nor transformers nor nixl; they come with the host that needs
them: `aioprefill.native.load.load_host`.
"""

from aioprefill.config import EngineConfig, NativeConfig, SchedulerConfig
from aioprefill.errors import (
    AioprefillError,
    ConfigError,
    DeviceError,
    HostError,
    InvalidRequest,
    ModelError,
    PeerError,
    QueueFull,
    RequestAborted,
    WireError,
)
from aioprefill.host import DrainReport, PrefillHost
from aioprefill.request import HandoffResult, PrefillHandle, PrefillRequest, PrefillResult
from aioprefill.sampling_params import SamplingParams
from aioprefill.scheduler import Health, PrefillScheduler, SchedulerStats
from aioprefill.version import __version__

__all__ = [
    "AioprefillError",
    "ConfigError",
    "DeviceError",
    "DrainReport",
    "EngineConfig",
    "HandoffResult",
    "Health",
    "HostError",
    "InvalidRequest",
    "ModelError",
    "NativeConfig",
    "PeerError",
    "PrefillHandle",
    "PrefillHost",
    "PrefillRequest",
    "PrefillResult",
    "PrefillScheduler",
    "QueueFull",
    "RequestAborted",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerStats",
    "WireError",
    "__version__",
]
