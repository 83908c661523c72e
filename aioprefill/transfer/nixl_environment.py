"""Settings that UCX and NIXL read from the environment when they are first imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from aioprefill.errors import ConfigError

HOST_TRANSPORTS = "tcp,self"
"""Default for pools in host memory. Shared memory (`sm`) is left out: there a write runs whole inside the
posting call, and is reported done although the peer is stopped."""
_RDMA = ("all", "ib", "rc", "dc", "ud")


def prepare_environment(
    *,
    transports: str = HOST_TRANSPORTS,
    interface: str = "lo",
    memory: str = "DRAM",
    environ: MutableMapping[str, str] | None = None,
) -> dict[str, str]:
    """Set what is not set yet; call it before nixl is imported. Returns the settings in effect.

    `transports` is UCX_TLS. `interface` is the network device for tcp (UCX_NET_DEVICES): by default UCX
    would listen on every one. Pools in VRAM need CUDA transports, which are added. Unless `transports`
    names RDMA, the ib modules stay out (with them loaded, the interpreter crashes at its exit).
    Variables that the user has set are left alone. Raises `ConfigError` for an empty argument.
    """
    for name, value in (("transports", transports), ("interface", interface)):
        if not value.strip():
            raise ConfigError(f"nixl {name}: must not be empty")
    target = os.environ if environ is None else environ
    if memory == "VRAM" and "cuda" not in transports:
        transports += ",cuda_copy,cuda_ipc"
    wanted = {"UCX_TLS": transports, "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
    chosen = target.get("UCX_TLS", transports).split(",")
    if not any(part.lstrip("\\").split("_")[0] in _RDMA for part in chosen):
        wanted |= {"UCX_NET_DEVICES": interface, "UCX_MODULES": "^ib"}
    for name, value in wanted.items():
        target.setdefault(name, value)
    return {name: target[name] for name in (*wanted, "UCX_NET_DEVICES", "UCX_MODULES") if name in target}
