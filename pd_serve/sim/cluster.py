"""A whole cluster on virtual time: replicas that start, serve, fail and leave, ingresses, and the arrivals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pd_serve.policy.routing import ROUTERS
from pd_serve.sim.clock import Clock, Streams
from pd_serve.sim.collect import Collector
from pd_serve.sim.engine import Engine
from pd_serve.sim.fleet import Life, Slots, Totals, mixed
from pd_serve.sim.ingress import Ingress
from pd_serve.sim.network import Network
from pd_serve.sim.outcome import Served
from pd_serve.sim.replica import Replica
from pd_serve.sim.spec import Fault, PoolSpec, Spec
from pd_serve.sim.workloads.arrival import Arrival
from pd_serve.types import KvAddress, ReplicaInfo, Role


class Cluster:
    """One simulation.

    Args:
        arrivals: in the order of their times; read one at a time.
        write: called with each finished request.
    """

    def __init__(self, spec: Spec, arrivals: Iterable[Arrival], write: Callable[[Served], None] | None = None) -> None:
        self.spec = spec
        self.clock = Clock()
        streams = Streams(spec.seed)
        self.collector = Collector(spec.slo, spec.window_s)
        self.network = Network(self.clock, spec.links)
        self.replicas: dict[str, Replica] = {}
        """All that were ever ready and are not gone, by id."""
        self.lives: list[Life] = []
        self.arrived = 0
        self.ended = 0
        self._gone: dict[str, Replica] = {}
        """Those that an ingress may still believe in."""
        self._life_of: dict[str, Life] = {}
        self._past = {role: Totals() for role in Role}
        self._write = write
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._more = True
        self._opened = False
        self._phases = streams.get("stats")
        self._front_door = streams.get("front_door")
        self._numbers = dict.fromkeys(Role, 0)
        self._slots = Slots(spec.layout)
        self.ingresses = [
            Ingress(
                f"i{number}",
                spec.path,
                ROUTERS[spec.path.router],
                streams.get(f"router{number}"),
                self.clock,
                spec.decode.profile.overheads.ingress_s,
                spec.links.wire_s,
                self._find,
                self._over,
            )
            for number in range(spec.ingresses)
        ]

    # ------------------------------------------------------------------------------------ run

    def run(self, until: float = float("inf")) -> None:
        """Run until all requests are over, or until that time."""
        if not self._opened:
            self._open()
        self.clock.run(until)

    @property
    def over(self) -> bool:
        """All requests of the workload came and ended."""
        return not self._more and self.ended == self.arrived

    def settle(self, seconds: float) -> None:
        """Go on for so long with no new requests, until what is under way has ended."""
        self.clock.run(self.clock.now + seconds)

    def _open(self) -> None:
        self._opened = True
        pools = {role: pool.replicas for role in Role if (pool := self.spec.pool(role))}
        for role in mixed(pools):
            self._ready(self._new_life(role))
        for ingress in self.ingresses:
            self.clock.after(self._phases.random() * self.spec.path.live.ping_period_s, self._ping, ingress)
        for fault in self.spec.faults:
            self.clock.at(fault.at, self._strike, fault)
        self.clock.after(2 * self.spec.links.wire_s, self._next_arrival)  # when every replica was heard of

    def _next_arrival(self) -> None:
        row = next(self._arrivals, None)
        if row is None:
            self._more = False
            self._stop_if_over()
        else:
            self.clock.at(max(row.at, self.clock.now), self._arrive, row)

    def _arrive(self, row: Arrival) -> None:
        self.arrived += 1
        self.ingresses[int(self._front_door.random() * len(self.ingresses))].arrive(row)
        self._next_arrival()

    def _over(self, served: Served) -> None:
        self.ended += 1
        self.collector.served(served)
        if self._write is not None:
            self._write(served)
        self._stop_if_over()

    def _stop_if_over(self) -> None:
        if self.over:
            self.clock.stop()

    # ------------------------------------------------------------------------------------ replicas

    def add(self, role: Role) -> Life:
        """Start a replica of the pool; it takes requests when it is warm."""
        life = self._new_life(role)
        pool = self._pool(role)
        self.clock.after(pool.profile.start_s + pool.profile.warmup_s, self._ready, life)
        return life

    def drain(self, replica_id: str) -> None:
        """Let a replica finish what it has, and then go."""
        replica = self.replicas[replica_id]
        replica.draining = True
        replica.report(self.ingresses)
        self._unfollow(replica_id)
        self._leave_when_idle(replica, self.clock.now + self.spec.control.drain_s)

    def kill(self, replica_id: str) -> None:
        """End a replica's process. Channels to it break at once, the controller finds out later."""
        replica = self._remove(replica_id)
        replica.kill()
        for ingress in self.ingresses:
            self.clock.after(self.spec.links.wire_s, ingress.channel_lost, replica_id)
        self.clock.after(self.spec.control.detect_s, self._replace, replica)

    def _replace(self, replica: Replica) -> None:
        self._unfollow(replica.info.id)
        self.clock.after(2 * self.spec.control.membership_s, self._forget, replica.info.id)
        if not replica.draining:
            self.add(replica.info.role)

    def _new_life(self, role: Role) -> Life:
        life = Life(role, self._pool(role).rules.gpus, self.clock.now)
        self.lives.append(life)
        return life

    def _ready(self, life: Life) -> None:
        replica = self._make(life)
        self.replicas[replica.info.id] = replica
        self._life_of[replica.info.id] = life
        wait = self.spec.control.membership_s if self.clock.now else 0.0
        for ingress in self.ingresses:
            self.clock.after(wait, ingress.follow, replica.info)
        replica.report([])
        # The first answer is to the ingress's first message.
        self.clock.after(wait + self.spec.links.wire_s, replica.report, self.ingresses)
        self.clock.after(self._phases.random() * self.spec.path.live.stats_period_s, self._report, replica)

    def _make(self, life: Life) -> Replica:
        pool, role = self._pool(life.role), life.role
        rules, profile = pool.rules, pool.profile
        number = self._numbers[role]
        self._numbers[role] += 1
        engine_id = f"{role.value}-{number}"
        place = self._slots.take(rules.gpus)
        info = ReplicaInfo(
            id=engine_id,
            role=role,
            version="v1",
            address="",
            fingerprint="sim",
            kv=KvAddress(transport="sim", engine_id=engine_id),
            node=f"node-{place.node}",
            block_size=profile.block_size,
            max_num_seqs=rules.max_num_seqs,
            kv_tokens_total=profile.kv_tokens // profile.block_size * profile.block_size,
        )
        engine = Engine(
            self.clock,
            profile,
            rules.max_num_seqs,
            rules.max_num_batched_tokens,
            rules.enable_prefix_caching,
            self.collector.gaps[role].add_between,
        )
        spec = self.spec
        return Replica(info, place, engine, profile, spec.path, self.clock, self.network, spec.links.wire_s)

    def _report(self, replica: Replica) -> None:
        if not replica.alive:
            return
        stats = replica.report(self.ingresses)
        if stats is not None:
            self.collector.report(replica.info.role, stats, self.clock.now)
        self.clock.after(self.spec.path.live.stats_period_s, self._report, replica)

    def _leave_when_idle(self, replica: Replica, give_up_at: float) -> None:
        if not replica.alive:
            return
        if replica.sequences and self.clock.now >= give_up_at:
            replica.end_legs()
        if replica.sequences or replica.kv.gives.held():
            self.clock.after(0.1, self._leave_when_idle, replica, give_up_at)
            return
        self._remove(replica.info.id)
        replica.kill()
        for ingress in self.ingresses:
            self.clock.after(self.spec.links.wire_s, ingress.channel_lost, replica.info.id)
        self.clock.after(2 * self.spec.control.membership_s, self._forget, replica.info.id)

    def _remove(self, replica_id: str) -> Replica:
        replica = self.replicas.pop(replica_id)
        self._gone[replica_id] = replica
        self._slots.give_back(replica.place, self._pool(replica.info.role).rules.gpus)
        self._life_of.pop(replica_id).ended = self.clock.now
        self._past[replica.info.role].add(replica)
        return replica

    def _unfollow(self, replica_id: str) -> None:
        for ingress in self.ingresses:
            self.clock.after(self.spec.control.membership_s, ingress.unfollow, replica_id)

    def _forget(self, replica_id: str) -> None:
        self._gone.pop(replica_id, None)

    def _find(self, replica_id: str) -> Replica:
        return self.replicas.get(replica_id) or self._gone[replica_id]

    def _pool(self, role: Role) -> PoolSpec:
        pool = self.spec.pool(role)
        if pool is None:
            raise ValueError(f"there is no {role} pool")
        return pool

    def _ping(self, ingress: Ingress) -> None:
        """The ingress gives up those that are silent, and pings the others."""
        ingress.look_for_silence()
        self.clock.after(self.spec.links.wire_s, self._pinged, ingress)
        self.clock.after(self.spec.path.live.ping_period_s, self._ping, ingress)

    def _pinged(self, ingress: Ingress) -> None:
        answers = [replica.answer() for replica in self.replicas.values()]
        self.clock.after(self.spec.links.wire_s, ingress.on_answers, [answer for answer in answers if answer])

    # ------------------------------------------------------------------------------------ sums

    def totals(self, role: Role) -> Totals:
        """Of all replicas that a pool ever had."""
        totals, past = Totals(), self._past[role]
        for name in Totals.__slots__:
            setattr(totals, name, getattr(past, name))
        for replica in self.replicas.values():
            if replica.info.role is role:
                totals.add(replica)
        return totals

    def gpu_seconds(self, role: Role, begins: float, ends: float) -> float:
        return sum(life.gpus * life.within(begins, ends) for life in self.lives if life.role is role)

    def present_s(self, role: Role, ends: float) -> float:
        """Seconds that replicas of a pool were there, all together."""
        return sum(life.within(0.0, ends) for life in self.lives if life.role is role)

    # ------------------------------------------------------------------------------------ faults

    def _strike(self, fault: Fault) -> None:
        ready = [replica for replica in self.replicas.values() if replica.info.role is fault.role]
        ready = [replica for replica in ready if not replica.draining]
        if not ready:
            return
        replica = ready[fault.pick % len(ready)]
        if fault.kind == "kill":
            self.kill(replica.info.id)
        elif fault.kind == "drain":
            self.drain(replica.info.id)
        elif fault.kind == "hang":
            replica.stall()
            self.clock.after(fault.seconds, replica.wake)
        else:
            replica.engine.slow_down(fault.factor)
            self.clock.after(fault.seconds, replica.engine.slow_down, 1.0)
