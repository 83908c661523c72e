"""Two real processes that hold one sharded engine between them, driven by commands over pipes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from aioprefill.engine.port import SampledToken, Span

SIZE = 2
TIMEOUT_S = 120.0


class Refused(Exception):
    """What a command raised on a rank: the class's name, and the message."""


class RankProcess:
    """In the child: the engine, and one method per command."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.engine: Any = None
        self.launched: list[Any] = []

    def load(self, folder: Path, **options: Any) -> dict[str, Any]:
        """Load this rank's part; `options` that are tuples have one entry per rank."""
        from aioprefill.engine.shard import EngineShard
        from aioprefill.engine.transformers_engine import TransformersEngine

        self.close()
        mine: dict[str, Any] = {
            "name": "tiny",
            "fingerprint": "tiny",
            "dtype": "float32",
            "kv_memory_bytes": 4 << 20,
            "shard": EngineShard(self.rank, SIZE),
        }
        mine |= {name: self._own(value) for name, value in options.items()}
        self.engine = TransformersEngine.load(self._own(folder), **mine)
        return {"spec": self.engine.spec, "pages": self.engine.num_pages}

    def _own(self, value: Any) -> Any:
        return value[self.rank] if isinstance(value, tuple) else value

    def logits(self, spans: Sequence[Span]) -> np.ndarray[Any, Any]:
        """Shape (spans that sample, vocabulary)."""
        import torch

        from aioprefill.engine.batch import pack

        engine = self.engine
        batch = pack(spans, engine.spec, engine.num_pages, engine.pool.rows_per_page)
        logits = engine._stream.compute(partial(engine._logits, batch))
        assert type(logits) is torch.Tensor
        return logits.float().numpy()  # type: ignore[no-any-return]

    def run(self, spans: Sequence[Span]) -> list[SampledToken | None]:
        """Launch and wait."""
        self.launch(spans)
        return self.finish()

    def launch(self, spans: Sequence[Span]) -> None:
        """Launch and do not wait."""
        self.launched.append(self.engine.launch(spans))

    def finish(self) -> list[SampledToken | None]:
        """Wait for the oldest launched."""
        forward = self.launched.pop(0)
        forward.completion.synchronize()
        return list(forward.outputs())

    def pool(self) -> np.ndarray[Any, Any]:
        """All pages, shape (pages, layers, 2, page_size, kv_heads, head_dim)."""
        return self.engine.pool.storage.numpy().copy()  # type: ignore[no-any-return]

    def update(self, folder: Path) -> str:
        """Stage new weights and swap them in; their fingerprint."""
        staged = self._stage(folder)
        self.engine.swap_weights(staged).result(TIMEOUT_S)
        return str(self.engine.weights_fingerprint(staged))

    def stage(self, folder: Path) -> None:
        """Stage new weights, and forget them."""
        self._stage(folder)

    def _stage(self, folder: Path) -> Any:
        return asyncio.run(self.engine.stage_weights(self._own(folder)))

    def threads(self) -> int:
        """CPU threads that an operator of a forward uses."""
        import torch

        return int(self.engine._stream.compute(lambda _: torch.tensor(torch.get_num_threads())))

    def spoil(self) -> None:
        """Let this rank's forwards fail half way."""

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("no memory for this")

        self.engine._model.model.layers[1].forward = fail

    def close(self) -> list[str]:
        """Close the engine; the threads that are left of it."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("aioprefill")]
        for thread in ours:
            thread.join(5.0)
        del engine  # its end would end threads, too
        return [thread.name for thread in ours if thread.is_alive()]


def serve(rank: int, store: Path, pipe: Connection) -> None:
    """The child's main: join the group, obey, and leave when the pipe says None."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=SIZE, store=dist.FileStore(str(store), SIZE))
    process = RankProcess(rank)
    while (command := pipe.recv()) is not None:
        name, arguments, options = command
        try:
            answer = getattr(process, name)(*arguments, **options)
        except Exception as err:
            sticky = " sticky" if getattr(err, "sticky", False) else ""
            answer = Refused(type(err).__name__ + sticky, str(err))
        pipe.send(answer)
    process.close()
    dist.destroy_process_group()


class Ranks:
    """In the test: both processes."""

    def __init__(self, store: Path) -> None:
        context = get_context("spawn")
        self.pipes: list[Any] = []
        self.processes = []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, store, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, rank: int, name: str, *arguments: Any, **options: Any) -> None:
        """Give one rank a command."""
        self.pipes[rank].send((name, arguments, options))

    def answer(self, rank: int) -> Any:
        """What a rank's oldest command came to; `Refused` is returned, not raised."""
        assert self.pipes[rank].poll(TIMEOUT_S), f"rank {rank} does not answer"
        return self.pipes[rank].recv()

    def refusals(self, name: str, *arguments: Any, **options: Any) -> list[Any]:
        """Give all ranks a command; the answers by rank, errors among them."""
        for rank in range(SIZE):
            self.ask(rank, name, *arguments, **options)
        return [self.answer(rank) for rank in range(SIZE)]

    def all(self, name: str, *arguments: Any, **options: Any) -> list[Any]:
        """Give all ranks a command; the answers by rank. Raises the first error."""
        answers = self.refusals(name, *arguments, **options)
        for answer in answers:
            if isinstance(answer, Refused):
                raise answer
        return answers

    def end(self, rank: int) -> None:
        """Let one leave, and wait for it."""
        if self.processes[rank].is_alive():
            self.pipes[rank].send(None)
            self.processes[rank].join(TIMEOUT_S)

    def close(self) -> list[int | None]:
        """End both; their exit codes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.close()
        return codes
