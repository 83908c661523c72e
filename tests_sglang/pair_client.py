"""Asks pairs and plain servers of SGLang, and compares what comes back."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from messages import prompt
from servers import HOST, Prefill, Server

ANSWER_S = 120.0
"""A request, or a queue that drains, that takes longer hangs."""
AT_A_TIME = 24
_rooms = itertools.count(1)

SCHEMAS = (
    {"type": "boolean"},
    {"enum": ["red", "green", "blue"]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
)


@dataclass(frozen=True)
class Job:
    """One request: the same prompt and sampling give the same answer, by greedy sampling."""

    number: int
    tokens: tuple[int, ...]
    new_tokens: int = 8
    schema: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """As `/generate` takes it."""
        sampling = {"temperature": 0, "max_new_tokens": self.new_tokens}
        if self.schema is not None:
            sampling["json_schema"] = self.schema
        return {"input_ids": list(self.tokens), "sampling_params": sampling}


@dataclass(frozen=True)
class Answer:
    """What one server said. `tokens` is empty for a refusal; `finish` is SGLang's word or "http STATUS"."""

    tokens: tuple[int, ...]
    finish: str


class Jobs:
    """Makes jobs; each has a prompt that no other one has."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._shared = prompt(999_983, 150)
        """Beginning of every fifth prompt, for the prefix cache."""

    def plain(self, length: int) -> Job:
        """A prompt of `length` tokens."""
        number = next(self._numbers)
        own = prompt(1000 + number, length)
        tokens = [*self._shared, *own] if number % 5 == 4 else own
        return Job(number, tuple(tokens))

    def with_schema(self, length: int) -> Job:
        """A prompt whose answer must match one of the schemas; a title makes each a schema of its own."""
        number = next(self._numbers)
        schema = {**SCHEMAS[number % len(SCHEMAS)], "title": f"t{number // 8}"}
        return Job(number, tuple(prompt(1000 + number, length)), 12, json.dumps(schema))


@dataclass
class Progress:
    """Counts what has been answered, so that something may be done amid it."""

    done: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def count(self) -> None:
        """One more."""
        async with self._changed:
            self.done += 1
            self._changed.notify_all()

    async def reached(self, count: int) -> None:
        """Wait for so many."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: self.done >= count), ANSWER_S)


class Client:
    """Use it with `async with`. Each request has a connection of its own: servers drop those that rest."""

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, server: Server, path: str, **body: Any) -> None:
        """A command; it must be taken."""
        async with self._session.post(server.url + path, json=body) as response:
            assert response.status == 200, f"{server.name} {path}: {response.status} {await response.text()}"

    async def get(self, server: Server, path: str) -> Any:
        """JSON of a path."""
        async with self._session.get(server.url + path) as response:
            assert response.status == 200, f"{server.name} {path}: {response.status}"
            return await response.json()

    async def healthy(self, server: Server) -> bool:
        """Its health endpoint says so."""
        async with self._session.get(server.url + "/health") as response:
            return response.status == 200

    async def generate(self, server: Server, body: dict[str, Any]) -> Answer:
        """One request."""
        async with self._session.post(server.url + "/generate", json=body) as response:
            if response.status != 200:
                return Answer((), f"http {response.status}")
            told = await response.json()
        return Answer(tuple(told["output_ids"]), told["meta_info"]["finish_reason"]["type"])

    async def references(self, server: Server, jobs: Iterable[Job]) -> dict[Job, Answer]:
        """What a plain server answers, some at a time."""
        gate = asyncio.Semaphore(AT_A_TIME)

        async def one(job: Job) -> tuple[Job, Answer]:
            async with gate:
                return job, await self.generate(server, job.body)

        return dict(await asyncio.gather(*(one(job) for job in jobs)))


class Pair:
    """A prefill and a decode server, asked together."""

    def __init__(self, client: Client, prefill: Prefill, decode: Server) -> None:
        self.client = client
        self.prefill = prefill.server
        self.decode = decode
        self._bootstrap = {"bootstrap_host": HOST, "bootstrap_port": prefill.bootstrap_port}
        self.progress = Progress()

    async def ask(self, job: Job, rid: str | None = None) -> tuple[Answer, Answer]:
        """The answers of the prefill and the decode side."""
        body = {**job.body, **self._bootstrap, "bootstrap_room": next(_rooms), "rid": rid}
        body = {name: value for name, value in body.items() if value is not None}
        halves = await asyncio.gather(*(self.client.generate(s, body) for s in (self.prefill, self.decode)))
        await self.progress.count()
        return halves[0], halves[1]

    async def abort(self, rid: str) -> None:
        """On both sides."""
        for server in (self.prefill, self.decode):
            await self.client.post(server, "/abort_request", rid=rid)

    async def loop_info(self) -> dict[str, Any] | None:
        """What `/server_info` tells of aioprefill, if anything."""
        states = (await self.client.get(self.prefill, "/server_info"))["internal_states"]
        return states[0].get("aioprefill")

    async def drained(self) -> None:
        """Wait until no queue of either side holds anything."""
        deadline = asyncio.get_running_loop().time() + ANSWER_S
        while left := [*await self._left(self.prefill), *await self._left(self.decode)]:
            assert asyncio.get_running_loop().time() < deadline, f"not drained: {', '.join(left)}"
            await asyncio.sleep(0.1)  # SGLang has no way to tell

    async def _left(self, server: Server) -> list[str]:
        (load,) = (await self.client.get(server, "/v1/loads"))["loads"]
        counts = {"running": load["num_running_reqs"], "waiting": load["num_waiting_reqs"]}
        counts |= {"tokens": load["num_used_tokens"], **load["queues"]}
        counts |= {name: value for name, value in load["disaggregation"].items() if name.endswith("_reqs")}
        return [f"{server.name} {name}={value}" for name, value in counts.items() if value]


def differences(
    answers: Sequence[tuple[Job, tuple[Answer, Answer]]], references: dict[Job, Answer]
) -> list[str]:
    """Where a pair did not say what a plain server says; the prefill side has the first token only."""
    wrong = []
    for job, (first, whole) in answers:
        reference = references[job]
        if whole != reference:
            wrong.append(f"decode, job {job.number} of {len(job.tokens)} tokens: {whole}, not {reference}")
        if first.tokens != reference.tokens[:1]:
            wrong.append(f"prefill, job {job.number} of {len(job.tokens)} tokens: {first}, not {reference}")
    return wrong
