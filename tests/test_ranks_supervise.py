"""The supervisor of ranks, with small children in place of servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from aioprefill.errors import HostError
from aioprefill.ranks.child import describe, exit_code
from aioprefill.ranks.supervise import supervise

SUPERVISOR = """
import json, sys
from aioprefill.ranks.supervise import supervise
argv, size, options = json.loads(sys.argv[1])
code = supervise(argv, size, **options)
assert "torch" not in sys.modules
sys.exit(code)
"""
# each child tells its rank and pid on stderr, then does what its rank is to do: code in WHAT
CHILD = """
import os, signal, sys
rank = int(os.environ["RANK"])
def tell(*words):
    print(*words, file=sys.stderr, flush=True)
def until_told():
    "Ends in order, as a server does: by SIGTERM, or when stdin ends."
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    tell("up", os.getpid())
    sys.stdin.read()
    os._exit(0)
"""


class Supervised:
    """A supervisor process and what it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.said: list[str] = []

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def until(self, *beginnings: str) -> list[str]:
        """Read stderr until a line begins so, for each of these in any order; those lines."""
        assert self._process.stderr is not None
        missing, found = list(beginnings), []
        while missing:
            line = (await self._process.stderr.readline()).decode()
            assert line, f"it ended without {missing}: {self.said}"
            self.said.append(line.rstrip("\n"))
            for beginning in missing:
                if line.startswith(beginning):
                    missing.remove(beginning)
                    found.append(line.rstrip("\n"))
                    break
        return found

    async def up(self, size: int) -> dict[int, int]:
        """Wait until all ranks are up; their pids."""
        lines = await self.until(*(f"[rank {rank}] up" for rank in range(size)))
        return {int(line.split()[1].rstrip("]")): int(line.split()[-1]) for line in lines}

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, and all of stderr."""
        out, err = await self._process.communicate()
        assert self._process.returncode is not None
        self.said += err.decode().splitlines()
        return self._process.returncode, out.decode(), "\n".join(self.said)


@asynccontextmanager
async def supervised(what: str, size: int = 3, **options: float) -> AsyncIterator[Supervised]:
    """A supervisor of ranks that do `what`."""
    argv = [sys.executable, "-c", CHILD + what]
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SUPERVISOR,
        json.dumps([argv, size, options]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 24,
        env={**kept, "MASTER_ADDR": "10.0.0.1"},
    )
    try:
        async with asyncio.timeout(40):
            yield Supervised(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def gone(pids: list[int], timeout_s: float = 20) -> bool:
    """These processes end."""
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return not psutil.wait_procs(processes, timeout=timeout_s)[1]


@pytest.mark.asyncio
async def test_each_rank_learns_its_place_and_the_store_they_meet_at() -> None:
    """And a part of the cores; variables of another launcher do not get through."""
    what = (
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR AIOPREFILL_ENDS_WITH_PARENT'\n"
        "names = names.split()\n"
        "tell(*(os.environ.get(name) for name in names), int(os.environ['OMP_NUM_THREADS']) >= 1)\n"
        "store = os.environ['AIOPREFILL_RANK_STORE']\n"
        "tell('store', store, oct(os.stat(os.path.dirname(store)).st_mode))"
    )
    async with supervised(what) as it:
        code, _, said = await it.end()
    assert code == 0
    lines = said.splitlines()
    for rank in range(3):
        assert f"[rank {rank}] {rank} 3 {rank} 3 None 1 True" in lines
    stores = {line.partition("store ")[2] for line in lines if "store" in line}
    assert len(stores) == 1 and stores.pop().endswith("0o40700"), "one store, for this user only"


@pytest.mark.asyncio
async def test_rank_0_speaks_on_stdout_the_others_are_marked_on_stderr() -> None:
    """Whoever waits for the ready line finds it as it was."""
    what = (
        "print(f'ready serve endpoint=tcp://{rank}', flush=True)\n"
        "tell('x' * 5_000_000 if rank == 1 else 'short')\n"
        "sys.stderr.write('no end of line')"
    )
    async with supervised(what) as it:
        code, out, said = await it.end()
    assert code == 0 and out == "ready serve endpoint=tcp://0\n"
    lines = said.splitlines()
    for rank in (1, 2):
        assert f"[rank {rank}] ready serve endpoint=tcp://{rank}" in lines
    assert "[rank 0] short" in lines and "[rank 2] no end of line" in lines
    assert sum(line.count("x") for line in lines) == 5_000_000


@pytest.mark.asyncio
async def test_output_that_a_rank_s_own_child_keeps_open_holds_up_nobody() -> None:
    """Rank 1 ends and leaves a process behind that has its stderr."""
    what = (
        "if rank == 1:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        signal.pause()\n"
        "    tell('child', child)"
    )
    async with supervised(what) as it:
        (line,) = await it.until("[rank 1] child")
        try:
            code, _, said = await it.end()
        finally:
            os.kill(int(line.split()[-1]), signal.SIGKILL)
        assert code == 0 and "goes on" not in said


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_goes_to_rank_0_alone_which_tells_the_others(number: int) -> None:
    """Here by a file, as the order's stand-in; everybody ends with 0, so does the supervisor."""
    what = (
        "pipe = os.path.dirname(os.environ['AIOPREFILL_RANK_STORE']) + f'/{rank}'\n"
        "got = []\n"
        "for n in (signal.SIGTERM, signal.SIGINT): signal.signal(n, lambda n, _: got.append(n))\n"
        "os.mkfifo(pipe)\n"
        "tell('up', os.getpid())\n"
        "if rank == 0:\n"
        "    while not got: signal.pause()\n"
        "    for other in (1, 2): open(pipe[:-1] + str(other), 'w').close()\n"
        "else: open(pipe).read()\n"
        "tell('got', *(int(n) for n in got))"
    )
    async with supervised(what) as it:
        await it.up(3)
        it.signal(number)
        code, _, said = await it.end()
    assert code == 0 and "aioprefill:" not in said
    assert f"[rank 0] got {int(number)}" in said
    assert "[rank 1] got\n" in said + "\n" and "[rank 2] got\n" in said + "\n"


@pytest.mark.asyncio
async def test_S2_the_second_signal_reaches_rank_0_too_and_its_code_is_the_exit_code() -> None:
    """The others are not waited for as long as after the first."""
    what = (
        "if rank == 0:\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (tell('draining'), "
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(4))))\n"
        "    tell('up', os.getpid())\n"
        "    while True: signal.pause()\n"
        "until_told()"
    )
    async with supervised(what, grace_s=600, term_s=0.3) as it:
        await it.up(3)
        it.signal(signal.SIGTERM)
        await it.until("[rank 0] draining")
        it.signal(signal.SIGTERM)
        code, _, said = await it.end()
    assert code == 4
    assert "rank 0 failed first: it ended with exit code 4" in said and "rank 1 goes on" in said


@pytest.mark.asyncio
@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_R2_a_rank_that_is_killed_brings_the_others_down_and_is_named(victim: int) -> None:
    """With its last lines; the others have failed in consequence, each with code 1, and are not."""
    what = (
        "signal.signal(signal.SIGUSR1, lambda *_: os._exit(1))\n"
        "tell('a last line'); tell('up', os.getpid()); sys.stdin.read(); os._exit(0)"
    )
    async with supervised(what, grace_s=600) as it:
        pids = await it.up(3)
        os.kill(pids[victim], signal.SIGKILL)
        await it.until(f"aioprefill: rank {victim} was killed by SIGKILL")
        for rank, pid in pids.items():
            if rank != victim:
                os.kill(pid, signal.SIGUSR1)  # they notice by themselves
        code, _, said = await it.end()
    assert code == 128 + signal.SIGKILL
    assert (
        f"rank {victim} failed first: it was killed by SIGKILL; its last lines:\n    a last line\n    up"
        in said
    )


@pytest.mark.asyncio
async def test_R2_ranks_that_do_not_end_by_themselves_get_sigterm_then_sigkill() -> None:
    """Rank 1 fails with 7; rank 0 heeds SIGTERM, rank 2 is stopped."""
    what = (
        "if rank == 1:\n"
        "    signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))\n"
        "    tell('up', os.getpid())\n"
        "    while True: signal.pause()\n"
        "until_told()"
    )
    async with supervised(what, grace_s=0.3, term_s=0.5) as it:
        pids = await it.up(3)
        os.kill(pids[2], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGUSR1)
        code, _, said = await it.end()
    assert code == 7
    for rank in (0, 2):
        assert f"rank {rank} goes on although another one has ended, so it gets SIGTERM" in said
    assert "rank 0 goes on although another one has ended, so it gets SIGKILL" not in said
    assert "rank 2 goes on although another one has ended, so it gets SIGKILL" in said
    assert "rank 1 failed first: it ended with exit code 7" in said
    assert gone([pids[0], pids[2]], 0)


@pytest.mark.asyncio
async def test_a_rank_that_does_not_end_with_the_others_makes_another_exit_code() -> None:
    """Ranks 0 and 1 drain and end with 0, rank 2 hangs: 3, as for a device call that never ends."""
    what = (
        "if rank == 2:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    tell('up', os.getpid())\n"
        "    while True: signal.pause()\n"
        "until_told()"
    )
    async with supervised(what, grace_s=0.3, term_s=0.3) as it:
        pids = await it.up(3)
        it.signal(signal.SIGTERM)
        os.kill(pids[1], signal.SIGTERM)
        code, _, said = await it.end()
    assert code == 3 and "rank 2 goes on although another one has ended, so it gets SIGKILL" in said


@pytest.mark.asyncio
async def test_a_signal_after_rank_0_has_ended_shortens_the_wait_for_the_others() -> None:
    """Nobody has to wait for the whole grace."""
    async with supervised("until_told()", grace_s=600) as it:
        pids = await it.up(3)
        os.kill(pids[0], signal.SIGKILL)
        await it.until("aioprefill: rank 0 was killed")
        it.signal(signal.SIGINT)
        code, _, said = await it.end()
    assert code == 137 and "rank 1 goes on although another one has ended, so it gets SIGTERM" in said


@pytest.mark.asyncio
async def test_nothing_is_left_when_the_supervisor_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' stdin ends with it. Its folder stays, but for that nobody can do anything."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with supervised("until_told()") as it:
        pids = await it.up(3)
        it.signal(signal.SIGKILL)
        assert await asyncio.to_thread(gone, list(pids.values()))


def test_a_program_that_cannot_be_started_is_a_clear_error() -> None:
    """It names the program."""
    with pytest.raises(HostError, match="rank 0: cannot start /no/such/program"):
        supervise(["/no/such/program"], 2)


def test_exit_codes_are_those_of_a_shell() -> None:
    """And told in words."""
    assert [exit_code(code) for code in (0, 7, -9)] == [0, 7, 137]
    assert describe(7) == "ended with exit code 7" and describe(-15) == "was killed by SIGTERM"
    assert describe(-250) == "was killed by signal 250"
