"""A whole cluster in one event loop: fake engines behind replica hosts, channels, and ingresses with the path."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from pd_serve.engine.fake import FakeEngine, FakeSettings
from pd_serve.engine.fake_faults import Fault
from pd_serve.engine.fake_model import FakeModel, KvCache
from pd_serve.engine.fake_timing import Timing
from pd_serve.errors import PdServeError, ReplicaLost
from pd_serve.kv.transport.in_process import InProcessEnd, Registry
from pd_serve.observe.counting import CountingSink
from pd_serve.observe.request_metrics import count_record
from pd_serve.path import frames
from pd_serve.path.channel import IngressWire, ReplicaWire, connect_in_process
from pd_serve.path.pools import Pools
from pd_serve.path.record import Record, Recorder
from pd_serve.path.replica_host import ReplicaHost
from pd_serve.path.request import PathRules, RequestPath
from pd_serve.policy.admission import AdmissionRules
from pd_serve.policy.routing import RoutingRules, least_loaded
from pd_serve.types import Delta, ReplicaInfo, Request, Role

BLOCK = 16
FAST = FakeSettings(
    model=FakeModel(block_size=BLOCK),
    timing=Timing(prefill_tokens_per_s=500_000.0, decode_step_s=0.0005),
    grant_s=60.0,
)


def fast(**fields: object) -> FakeSettings:
    """FAST with other fields; those of `Timing` are passed on to it."""
    timing = {name: fields.pop(name) for name in list(fields) if name in Timing.__struct_fields__}
    settings = msgspec.structs.replace(FAST, **fields)
    return msgspec.structs.replace(settings, timing=msgspec.structs.replace(FAST.timing, **timing))


RULES = PathRules(
    admission=AdmissionRules(max_running=256, max_queue=256),
    routing=RoutingRules(min_handoff_tokens=BLOCK),
    first_token_timeout_s=60.0,
    total_timeout_s=90.0,
    no_replica_timeout_s=5.0,
    lease_s=10.0,
)
_ids = itertools.count()


def rules(max_running: int = 256, max_queue: int = 256, **fields: object) -> PathRules:
    """RULES with other fields."""
    return msgspec.structs.replace(
        RULES, admission=AdmissionRules(max_running=max_running, max_queue=max_queue), **fields
    )


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids that no other (length, seed) shares a block with."""
    rng = random.Random(f"{tokens}/{seed}")
    return tuple(rng.randrange(3, 49_000) for _ in range(tokens))


def request(tokens: int | Sequence[int] = 100, max_tokens: int = 8, seed: int = 0, **fields: object) -> Request:
    """A request with an id of its own; `sampling` may be a dict."""
    ids = prompt(tokens, seed) if isinstance(tokens, int) else tuple(tokens)
    if isinstance(sampling := fields.get("sampling"), dict):
        fields["sampling"] = msgspec.msgpack.encode(sampling)
    return Request(id=f"r{next(_ids)}", prompt_token_ids=ids, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def expected(asked: Request, model: FakeModel = FAST.model, index: int = 0) -> tuple[int, ...]:
    """The right answer, from the model alone: no scheduler, cache, hand-off or path."""
    cache, token_ids, computed = KvCache(model.layers), list(asked.prompt_token_ids), 0
    for _ in range(asked.max_tokens):
        model.compute(cache, token_ids[computed:])
        computed = len(token_ids)
        token_ids.append(model.next_token(cache, choice=index))
    return tuple(token_ids[len(asked.prompt_token_ids) :])


class Answer:
    """Everything that a client got for one request."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def tokens(self, index: int = 0) -> tuple[int, ...]:
        return tuple(t for d in self.deltas for c in d.choices if c.index == index for t in c.token_ids)

    def text(self, index: int = 0) -> str:
        return "".join(c.text for d in self.deltas for c in d.choices if c.index == index)

    def finish_reason(self, index: int = 0) -> str | None:
        reasons = [c.finish_reason for d in self.deltas for c in d.choices if c.index == index and c.finish_reason]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None

    @property
    def last(self) -> Delta:
        return self.deltas[-1]


class _Tap:
    """A replica's wire that may be held up."""

    def __init__(self, node: Node, wire: ReplicaWire) -> None:
        self._node = node
        self._wire = wire

    @property
    def peer(self) -> str:
        return self._wire.peer

    def send(self, message: frames.ToIngress) -> None:
        if self._node.stopped:
            self._node.held_out.append((self._wire, message))
        else:
            self._wire.send(message)


class Node:
    """One replica."""

    def __init__(self, role: Role, name: str, settings: FakeSettings, registry: Registry, faults: Sequence[Fault]):
        self.role, self.name = role, name
        self.transport = InProcessEnd(registry, engine_id=name)
        self.engine = FakeEngine(settings, self.transport, faults)
        self.sink = CountingSink()
        self.host = ReplicaHost(self.engine, self.sink)
        self.submitted: Counter[Role] = Counter()
        self.aborts = 0
        self.dead = False
        self.stopped = False
        self.held_out: list[tuple[ReplicaWire, frames.ToIngress]] = []
        self._held_in: list[tuple[ReplicaWire, frames.ToReplica]] = []
        self._wires: list[IngressWire] = []

    async def start(self) -> None:
        described = await self.engine.start()
        self.host.start()
        self.info = ReplicaInfo(
            id=self.name,
            role=self.role,
            version="v1",
            address=f"inproc://{self.name}",
            fingerprint=described.fingerprint,
            kv=described.kv,
            block_size=described.block_size,
            max_num_seqs=described.max_num_seqs,
            kv_tokens_total=described.kv_tokens_total,
        )

    def connect(self) -> IngressWire:
        if self.dead:
            raise ReplicaLost("connection refused")
        wire = connect_in_process(f"peer-{next(_ids)}", self._on_message)
        self._wires.append(wire)
        return wire

    def _on_message(self, wire: ReplicaWire, message: frames.ToReplica) -> None:
        if self.dead:
            return
        if self.stopped:
            self._held_in.append((wire, message))
            return
        match message:
            case frames.SubmitDecode():
                self.submitted[Role.DECODE] += 1
            case frames.SubmitPrefill():
                self.submitted[Role.PREFILL] += 1
            case frames.Abort():
                self.aborts += 1
        self.host.on_message(_Tap(self, wire), message)

    def cut(self) -> None:
        """Every channel breaks; new ones may be made."""
        for wire in self._wires:
            wire.close()
        self._wires.clear()

    def kill(self) -> None:
        """The process is gone: engine, channels and all."""
        self.dead = True
        self.engine.die("killed")
        self.cut()

    @property
    def asked(self) -> int:
        """Decode legs that were sent here, whether they were read or not."""
        return self.submitted[Role.DECODE] + sum(isinstance(m, frames.SubmitDecode) for _, m in self._held_in)

    def stop(self) -> None:
        """As SIGSTOP looks from outside: nothing goes in or out."""
        self.stopped = True

    def go_on(self) -> None:
        """As SIGCONT: what waited goes in and out."""
        self.stopped = False
        for wire, answer in self.held_out:
            wire.send(answer)
        for wire, message in self._held_in:
            self._on_message(wire, message)
        self.held_out.clear()
        self._held_in.clear()

    async def close(self) -> None:
        await self.host.close()
        await self.engine.close()


class Ingress:
    """One ingress replica without HTTP."""

    def __init__(self, cluster: Cluster, rules: PathRules, seed: int) -> None:
        self.sink = CountingSink()
        self.records: list[Record] = []
        self.recorder = Recorder(write=self._note)
        self.pools = Pools(lambda info: cluster.node(info.id).connect())
        self.path = RequestPath(self.pools, least_loaded, rules, self.recorder, self.sink, random.Random(seed))
        self.asked = 0

    def _note(self, record: Record) -> None:
        self.records.append(record)
        count_record(record, self.sink)

    def follow(self, nodes: Sequence[Node]) -> None:
        for role in Role:
            self.pools.follow(role, [node.info for node in nodes if node.role is role])

    async def stream(self, asked: Request) -> AsyncGenerator[Delta]:
        self.asked += 1
        async with aclosing(self.path.generate(asked)) as deltas:
            async for delta in deltas:
                yield delta

    async def ask(self, asked: Request) -> Answer:
        answer = Answer()
        async with aclosing(self.stream(asked)) as deltas:
            async for delta in deltas:
                answer.deltas.append(delta)
        return answer

    async def outcome(self, asked: Request) -> Answer | PdServeError:
        """The answer, or what the client is told instead."""
        try:
            return await self.ask(asked)
        except PdServeError as error:
            return error

    def record(self, asked: Request) -> Record:
        return next(record for record in self.records if record.id == asked.id)


class Cluster:
    """P prefill and D decode replicas, and ingresses that know them all."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.nodes: list[Node] = []
        self.ingresses: list[Ingress] = []
        self.can_serve = True
        """False once the test has taken away what a request needs."""

    @classmethod
    async def start(
        cls,
        prefills: int = 1,
        decodes: int = 1,
        *,
        ingresses: int = 1,
        settings: FakeSettings = FAST,
        prefill_settings: FakeSettings | None = None,
        decode_settings: FakeSettings | None = None,
        prefill_faults: Sequence[Fault] = (),
        decode_faults: Sequence[Fault] = (),
        rules: PathRules = RULES,
    ) -> Cluster:
        """Faults are of the first replica of each role."""
        cluster = cls()
        for number in range(prefills):
            faults = prefill_faults if number == 0 else ()
            await cluster.add(Role.PREFILL, prefill_settings or settings, faults, tell=False)
        for number in range(decodes):
            faults = decode_faults if number == 0 else ()
            await cluster.add(Role.DECODE, decode_settings or settings, faults, tell=False)
        cluster.ingresses = [Ingress(cluster, rules, seed) for seed in range(ingresses)]
        cluster.tell()
        await cluster.until_ready()
        return cluster

    async def add(
        self, role: Role, settings: FakeSettings = FAST, faults: Sequence[Fault] = (), *, tell: bool = True
    ) -> Node:
        node = Node(role, f"{role}-{len(self.nodes)}", settings, self.registry, faults)
        self.nodes.append(node)
        await node.start()
        if tell:
            self.tell()
        return node

    def tell(self, nodes: Sequence[Node] | None = None) -> None:
        """Tell ingresses which replicas exist, as Serve's controller does: all live ones, unless others are named."""
        for ingress in self.ingresses:
            ingress.follow([node for node in self.nodes if not node.dead] if nodes is None else nodes)

    async def until_ready(self) -> None:
        def ready() -> bool:
            views = [ingress.pools.view() for ingress in self.ingresses]
            return all(v.state == "ready" for view in views for v in (*view.prefill, *view.decode))

        await until(ready, "every replica is ready")

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    @property
    def prefill(self) -> Node:
        return next(node for node in self.nodes if node.role is Role.PREFILL)

    @property
    def decode(self) -> Node:
        return next(node for node in self.nodes if node.role is Role.DECODE)

    @property
    def ingress(self) -> Ingress:
        return self.ingresses[0]

    async def ask(self, asked: Request) -> Answer:
        return await self.ingress.ask(asked)

    async def close(self) -> None:
        for ingress in self.ingresses:
            await ingress.pools.close()
        for node in self.nodes:
            await node.close()


async def until(condition: Callable[[], object], what: str, limit_s: float = 10.0) -> None:
    """Return as soon as the condition holds; fail after `limit_s`."""
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.005)
