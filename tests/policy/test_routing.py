"""Who gets a request."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pd_serve.policy.routing import ROUTERS, NoPlan, RoutingRules, fullness, least_loaded, prompt_backlog
from pd_serve.types import (
    ClusterView,
    EngineStats,
    KvAddress,
    Plan,
    ReplicaInfo,
    ReplicaState,
    ReplicaView,
    Request,
    Role,
)

RULES = RoutingRules(min_handoff_tokens=16)
NONE: frozenset[str] = frozenset()


def replica(
    role: Role, name: str, fingerprint: str = "f", state: ReplicaState = ReplicaState.READY, **counts: int
) -> ReplicaView:
    own = {key: counts.pop(key) for key in ("own_prompt_tokens", "own_kv_tokens") if key in counts}
    info = ReplicaInfo(
        id=name,
        role=role,
        version="v1",
        address="",
        fingerprint=fingerprint,
        kv=KvAddress("in_process", name),
        kv_tokens_total=1000,
    )
    return ReplicaView(info=info, state=state, stats=EngineStats(**counts), **own)


def prefill(name: str, **fields: object) -> ReplicaView:
    return replica(Role.PREFILL, name, **fields)  # type: ignore[arg-type]


def decode(name: str, **fields: object) -> ReplicaView:
    return replica(Role.DECODE, name, **fields)  # type: ignore[arg-type]


def view(*replicas: ReplicaView) -> ClusterView:
    return ClusterView(
        now=0.0,
        prefill=tuple(r for r in replicas if r.info.role is Role.PREFILL),
        decode=tuple(r for r in replicas if r.info.role is Role.DECODE),
    )


def request(tokens: int = 100, **fields: str) -> Request:
    return Request(id="r", prompt_token_ids=(1,) * tokens, max_tokens=10, **fields)  # type: ignore[arg-type]


def plan(
    seen: ClusterView, asked: Request | None = None, tried: frozenset[str] = NONE, rules: RoutingRules = RULES
) -> Plan | NoPlan:
    return least_loaded(asked or request(), seen, rules, tried, random.Random(0))


def chosen(
    seen: ClusterView, asked: Request | None = None, tried: frozenset[str] = NONE, rules: RoutingRules = RULES
) -> Plan:
    made = plan(seen, asked, tried, rules)
    assert isinstance(made, Plan)
    return made


def test_the_least_loaded_of_each_kind() -> None:
    made = chosen(
        view(
            prefill("p0", waiting_prompt_tokens=500),
            prefill("p1", waiting_prompt_tokens=20),
            decode("d0", kv_tokens_used=10),
            decode("d1", kv_tokens_used=900),
        )
    )
    assert (made.prefill, made.decode, made.reason) == ("p1", "d0", "least_loaded")
    assert made.scores == {"p0": 500.0, "p1": 20.0, "d0": 0.01, "d1": 0.9}


def test_what_was_sent_since_the_last_report_counts() -> None:
    made = chosen(
        view(prefill("p0", own_prompt_tokens=300), prefill("p1"), decode("d0", own_kv_tokens=300), decode("d1"))
    )
    assert (made.prefill, made.decode) == ("p1", "d1")


def test_promised_room_counts_as_used() -> None:
    assert fullness(decode("d", kv_tokens_used=100, reserved_tokens=400)) == 0.5
    assert fullness(decode("d", kv_tokens_used=100, reserved_tokens=400, own_kv_tokens=450)) == 0.5
    assert prompt_backlog(prefill("p", waiting_prompt_tokens=10, own_prompt_tokens=40)) == 40


def test_a_replica_without_a_free_sequence_is_full_however_little_kv_it_uses() -> None:
    """Sixteen short requests fill one of sixteen sequences each; two long ones leave room."""
    short, long = decode("d0", running=16, kv_tokens_used=50), decode("d1", running=2, kv_tokens_used=600)
    assert fullness(short) > fullness(long)
    assert chosen(view(short, long)).decode == "d1"


def test_why_a_prompt_is_computed_where_it_decodes() -> None:
    both = view(prefill("p"), decode("d"))
    reasons = {
        "short_prompt": chosen(both, request(15)),
        "prompt_logprobs": chosen(both, request(decode_only="prompt_logprobs")),
        "forced_prefill_on_decode": chosen(both, rules=RoutingRules(min_handoff_tokens=16, prefill_on_decode=True)),
        "no_prefill_replica": chosen(view(decode("d"))),
    }
    for reason, made in reasons.items():
        assert (made.prefill, made.decode, made.reason) == (None, "d", reason)
    assert chosen(both, request(16)).prefill == "p"


def test_only_replicas_of_one_fingerprint_are_paired() -> None:
    """Invariant 6: a pair shares one fingerprint."""
    made = chosen(
        view(
            prefill("p0", fingerprint="a"),
            prefill("p1", fingerprint="b", waiting_prompt_tokens=999),
            decode("d", fingerprint="b"),
        )
    )
    assert made.prefill == "p1"
    made = chosen(view(prefill("p0", fingerprint="a"), decode("d", fingerprint="b")))
    assert (made.prefill, made.reason) == (None, "no_prefill_replica")


def test_no_plan_says_why() -> None:
    """Invariant 5: policies say why."""
    assert plan(view(prefill("p"))) == NoPlan("there is no decode replica")
    assert plan(view(decode("d", state=ReplicaState.SUSPECT))) == NoPlan("no decode replica is ready")
    assert plan(view(decode("d")), tried=frozenset({"d"})) == NoPlan("no decode replica is ready")


def test_equals_are_drawn_so_that_ingresses_do_not_herd() -> None:
    seen = view(*(prefill(f"p{n}") for n in range(3)), *(decode(f"d{n}") for n in range(3)))
    plans = [least_loaded(request(), seen, RULES, NONE, random.Random(seed)) for seed in range(100)]
    pairs = {(made.prefill, made.decode) for made in plans if isinstance(made, Plan)}
    assert len(pairs) == 9


def test_the_names_of_the_configuration() -> None:
    assert ROUTERS["least_loaded"] is least_loaded


states = st.sampled_from(ReplicaState)
counts = st.integers(0, 2000)
views = st.builds(
    lambda prefills, decodes: view(
        *(prefill(f"p{n}", fingerprint=f, state=s, waiting_prompt_tokens=c) for n, (f, s, c) in enumerate(prefills)),
        *(decode(f"d{n}", fingerprint=f, state=s, kv_tokens_used=c) for n, (f, s, c) in enumerate(decodes)),
    ),
    st.lists(st.tuples(st.sampled_from("ab"), states, counts), max_size=5),
    st.lists(st.tuples(st.sampled_from("ab"), states, counts), max_size=5),
)
tried_sets = st.frozensets(st.sampled_from([f"{kind}{n}" for kind in "pd" for n in range(5)]), max_size=6)


@given(views, tried_sets, st.integers(1, 40), st.integers(0, 9))
def test_a_plan_names_replicas_that_can_take_the_request(
    seen: ClusterView, tried: frozenset[str], tokens: int, seed: int
) -> None:
    made = least_loaded(request(tokens), seen, RULES, tried, random.Random(seed))
    usable = {
        r.info.id: r for r in (*seen.prefill, *seen.decode) if r.state is ReplicaState.READY and r.info.id not in tried
    }
    if isinstance(made, NoPlan):
        assert not any(r.info.role is Role.DECODE for r in usable.values())
        assert made.reason
        return
    target = usable[made.decode]
    assert target.info.role is Role.DECODE
    assert made.reason
    assert fullness(target) == min(fullness(r) for r in usable.values() if r.info.role is Role.DECODE)
    if made.prefill is None:
        return
    source = usable[made.prefill]
    assert source.info.role is Role.PREFILL
    assert source.info.fingerprint == target.info.fingerprint
    assert tokens >= RULES.min_handoff_tokens


@given(views, st.integers(0, 9))
def test_a_decision_depends_on_what_it_was_given_only(seen: ClusterView, seed: int) -> None:
    """Invariant 5: the same view, request, rules and seed give the same decision, also after a trip over a wire."""
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(seen), type=ClusterView)
    decisions = [least_loaded(request(), one, RULES, NONE, random.Random(seed)) for one in (seen, seen, again)]
    assert decisions[0] == decisions[1] == decisions[2]
