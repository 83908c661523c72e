"""Real processes find each other, and name the one that does not come."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from aioprefill.errors import ConfigError
from aioprefill.ranks.group import RankGroup, _address_of
from aioprefill.ranks.place import RANK_STORE, RankPlace

SCRIPT = str(Path(__file__).with_name("ranks_process.py"))
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", RANK_STORE)


def free_port() -> int:
    """A port of loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def joined(ranks: list[int], size: int, timeout_s: float, **environ: str) -> list[tuple[int, str]]:
    """Run these ranks of a group to their end; exit code and output of each."""

    async def one(rank: int) -> tuple[int, str]:
        mine = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            SCRIPT,
            "join",
            str(timeout_s),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**kept, **mine, **environ},
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode() or err.decode()

    async with asyncio.timeout(90):
        return list(await asyncio.gather(*map(one, ranks)))


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["file", "tcp"])
async def test_two_ranks_join_vote_and_stay_on_loopback(way: str, tmp_path: Path) -> None:
    """Through the supervisor's file, and through MASTER_ADDR and MASTER_PORT."""
    environ = {RANK_STORE: str(tmp_path / "store")}
    if way == "tcp":
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outcomes = await joined([0, 1], 2, 60, **environ)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    words = [text.split() for _, text in outcomes]
    assert [line[:4] for line in words] == [["joined", str(rank), "5", r"b'\x001'"] for rank in (0, 1)]
    assert words[0][4] == words[1][4] and len(words[0][4]) == 16, "the shared id"
    assert {line[5] for line in words} == {"lo"}
    assert words[0][6] == words[1][6] and words[0][6].startswith("tcp://127.0.0.1:")


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["file", "tcp"])
async def test_R2_ranks_that_do_not_come_are_named_by_those_that_did(way: str, tmp_path: Path) -> None:
    """Ranks 1 and 3 of 4 are missing; with TCP the store ends with rank 0, and rank 2 knows all the same."""
    environ = {RANK_STORE: str(tmp_path / "store")}
    if way == "tcp":
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outcomes = await joined([0, 2], 4, 6, **environ)
    for code, text in outcomes:
        assert code == 1 and "error rank rank 1 has not joined within" in text, outcomes
        assert "nor did 3" in text


@pytest.mark.asyncio
async def test_R2_a_rank_without_rank_0_says_where_it_looked() -> None:
    """Nobody listens there."""
    port = str(free_port())
    ((code, text),) = await joined([1], 2, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert code == 1 and "error rank rank 0 cannot be reached" in text and f"127.0.0.1:{port}" in text


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is ''"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
        ({RANK_STORE: "/nowhere/at/all"}, RANK_STORE),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(
    environ: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is opened."""
    for name in (*LAUNCHER, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, environ.get(name, ""))  # restored afterwards, also what `join` sets
    with pytest.raises(ConfigError, match=text):
        RankGroup.join(RankPlace(1, 2, 1), device="cpu", timeout_s=2)


@pytest.mark.asyncio
async def test_a_port_in_use_is_a_config_error() -> None:
    """Of rank 0, whose store is to listen there."""
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        ((code, text),) = await joined([0], 2, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert code == 1 and f"error config MASTER_PORT {port} cannot be listened on" in text


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks on this machine than it has devices."""
    monkeypatch.setenv(RANK_STORE, "/unused")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    with pytest.raises(ConfigError, match=r"--device cuda: rank 99, number 99 .* there are 0"):
        RankGroup.join(RankPlace(99, 100, 99), device="cuda", timeout_s=2)


@pytest.mark.parametrize(
    ("name", "text"), [("", "is not set"), ("127.0.1.1", "cannot reach"), ("no.such.invalid", "MASTER_ADDR")]
)
def test_an_address_that_other_machines_cannot_reach_is_refused(name: str, text: str) -> None:
    """Debian has a machine's own name at 127.0.1.1."""
    with pytest.raises(ConfigError, match=text):
        _address_of(name)
    assert _address_of("192.0.2.7") == "192.0.2.7"
