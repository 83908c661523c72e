"""Real SGLang servers on CPU, in processes of their own: a prefill and decode pair, and a plain one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FORKED = {"SHIMS_FORK": "1"}
"""A server whose processes are forked (shims/cpu_shims.py) takes a third of the CPU to start. The one with
the plugin at one rank is not: it starts as a user's does."""
HOST = "127.0.0.1"
READY = "The server is fired up and ready to roll"
READY_S = 240.0
"""Four servers that start at once on a busy machine of two cores take a minute."""
STOP_S = 10.0
"""Longer than SGLang takes to drain nothing."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
CHUNK_TOKENS = 64
PLAIN_CHUNK_TOKENS = 512
"""It has the same answers with fewer forwards."""
LIBRARIES = Path(sys.prefix) / "rdma"
"""Where the Makefile puts libibverbs if the system has none."""

COMMON = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "xgrammar", "--disable-cuda-graph"),
    *("--max-total-tokens", "8192", "--context-length", "2048", "--mem-fraction-static", "0.5"),
    *("--chunked-prefill-size", str(CHUNK_TOKENS), "--sleep-on-idle", "--host", HOST),
)
TRANSFER = ("--disaggregation-transfer-backend", "mooncake_tcp")


def environment(**more: str) -> dict[str, str]:
    """What a server on CPU needs; nothing of aioprefill's is inherited."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AIOPREFILL")}
    libraries = sorted({str(path.parent) for path in LIBRARIES.rglob("lib*.so.*")})
    searched = [*libraries, *filter(None, [inherited.get("LD_LIBRARY_PATH")])]
    return {
        **inherited,
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_HOST_IP": HOST,
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",  # its CUDA events
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # how often a server looks for clients that have left
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE / "stubs"), str(HERE / "shims")]),
        "LD_LIBRARY_PATH": os.pathsep.join(searched),
        "NO_PROXY": "*",
        **more,
    }


def transfer_fault() -> str | None:
    """Why Mooncake cannot be loaded here, or None."""
    run = subprocess.run(
        [sys.executable, "-c", "import mooncake.engine"], env=environment(), capture_output=True, text=True
    )
    return None if run.returncode == 0 else run.stderr.strip().rsplit("\n", 1)[-1]


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Cpu:
    """Seconds of CPU that a server's scheduler processes have used, all ranks together."""

    process_s: float
    main_thread_s: float

    def since(self, before: Cpu) -> Cpu:
        """The difference."""
        return Cpu(self.process_s - before.process_s, self.main_thread_s - before.main_thread_s)


class Server:
    """One server: its whole process group is ended by `kill`. `command` is what a user would type."""

    def __init__(self, name: str, command: Sequence[str], log: Path, **variables: str) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._log = log
        self._up = threading.Event()
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                if READY in line:
                    self._up.set()
        self._up.set()  # it has ended

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    @property
    def alive(self) -> bool:
        """Its launcher runs; SGLang ends that when any of its processes dies."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Returns once it serves; fails with the end of its log."""
        if not self._up.wait(READY_S) or READY not in self.log:
            raise AssertionError(f"{self.name} did not start:\n{self.log[-4000:]}")

    def cpu(self) -> Cpu:
        """What its schedulers have used so far."""
        pids = schedulers_of(self._process.pid)
        assert pids, f"{self.name} has no scheduler process"
        process = sum(_cpu_s(Path(f"/proc/{pid}/stat")) for pid in pids)
        return Cpu(process, sum(_cpu_s(Path(f"/proc/{pid}/task/{pid}/stat")) for pid in pids))

    def stop(self) -> None:
        """Ask it to end, as a supervisor does; SGLang then drains. Fails if it has to be killed."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{self.name} did not end:\n{self.log[-4000:]}") from late
        finally:
            self.kill()

    def kill(self) -> None:
        """End all its processes at once. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()


def schedulers_of(parent: int) -> list[int]:
    """Process ids of SGLang's schedulers below a launcher."""
    group = [path for path in Path("/proc").iterdir() if path.name.isdigit() and _session(path) == parent]
    return [int(path.name) for path in group if b"sglang::scheduler" in _read_bytes(path / "cmdline")]


def _session(process: Path) -> int:
    fields = _read_bytes(process / "stat").rpartition(b")")[2].split()
    return int(fields[3]) if fields else -1


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has just ended


def _cpu_s(stat: Path) -> float:
    fields = _read_bytes(stat).rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def start_plain(model: Path, folder: Path, *, tp: int) -> Server:
    """Prefill and decode in one, SGLang's own loop."""
    command = [*_launcher(), *_model(model, tp), "--chunked-prefill-size", str(PLAIN_CHUNK_TOKENS)]
    return Server("plain", command, folder / "plain.log", **_binding(tp), **FORKED)


def start_decode(model: Path, folder: Path, *, tp: int) -> Server:
    """The decode side of pairs, with SGLang's own loop."""
    role = ("--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "cpu_tensor")
    command = [*_launcher(), *_model(model, tp), *role, *TRANSFER]
    return Server("decode", command, folder / "decode.log", **_binding(tp), **FORKED)


@dataclass
class Prefill:
    """The prefill side of a pair, and the port of its bootstrap server."""

    server: Server
    bootstrap_port: int


def start_prefill(model: Path, folder: Path, loop: str, *, tp: int) -> Prefill:
    """With loop "aioprefill", or SGLang's "blocking" or "polling"."""
    bootstrap_port = free_port()
    role = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap_port))
    arguments = [*_model(model, tp), *role, *TRANSFER]
    variables: Mapping[str, str] = {**_binding(tp), **(FORKED if loop != "aioprefill" or tp > 1 else {})}
    if loop == "aioprefill":
        command = [sys.executable, "-m", "aioprefill", "sglang", "--require", "--", *arguments]
    else:
        command = [*_launcher(), *arguments]
        polling = {"SGLANG_ENABLE_DISAGG_PREFILL_CONTINUOUS_INPUT_POLLING": "1"}
        variables = {**variables, **(polling if loop == "polling" else {})}
    return Prefill(Server(loop, command, folder / f"{loop}.log", **variables), bootstrap_port)


def _launcher() -> list[str]:
    return [sys.executable, "-m", "sglang.launch_server"]


def _model(model: Path, tp: int) -> list[str]:
    return ["--model-path", str(model), "--tp", str(tp), *COMMON]


def _binding(tp: int) -> dict[str, str]:
    """Two ranks share two cores; SGLang wants to be told."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in range(tp))} if tp > 1 else {}
