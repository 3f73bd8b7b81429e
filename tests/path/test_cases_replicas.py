"""Public failure cases of replicas that die, hang, fall silent, leave and come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from pd_serve.engine.fake_faults import Action, Fault, Stage
from pd_serve.errors import Draining, EngineFailed, InvalidRequest, NoReplica, PdServeError, ReplicaLost
from pd_serve.path import frames
from pd_serve.path.channel import connect_in_process
from pd_serve.types import Request, Role
from tests.path.cluster import Answer, Cluster, Node, expected, fast, request, rules, until
from tests.path.conftest import Start


def decodes(cluster: Cluster) -> list[Node]:
    return [node for node in cluster.nodes if node.role is Role.DECODE]


def state(cluster: Cluster, node: Node) -> str:
    view = cluster.ingress.pools.view()
    return next(str(v.state) for v in (*view.prefill, *view.decode) if v.info.id == node.name)


def check_right_or_failed(asked: Sequence[Request], results: Sequence[Answer | PdServeError]) -> int:
    """How many were answered, all of them rightly; the others were told why not."""
    answers = [(one, result) for one, result in zip(asked, results, strict=True) if isinstance(result, Answer)]
    for one, answer in answers:
        assert answer.tokens() == expected(one)
    return len(answers)


@pytest.mark.parametrize("stage", ["mid_transfer", "transfer_done"])
@pytest.mark.parametrize("action", ["die", "stall"])
async def test_another_decode_replica_takes_over_before_the_first_token(
    start: Start, stage: Stage, action: Action
) -> None:
    cluster = await start(
        decodes=2,
        settings=fast(overdue_s=0.2),
        decode_faults=[Fault(stage=stage, action=action, seconds=0.3, times=1)],
    )
    asked = [request(200, seed=seed) for seed in range(8)]
    answers = await asyncio.wait_for(asyncio.gather(*(cluster.ask(one) for one in asked)), 30.0)
    assert check_right_or_failed(asked, answers) == 8
    retried = [record for record in cluster.ingress.records if len(record.attempts) == 2]
    if action == "die":
        assert retried
        assert cluster.ingress.sink.total("retries") == len(retried)
        first, second = decodes(cluster)
        for record in retried:
            assert [attempt.decode_replica for attempt in record.attempts] == [first.name, second.name]
        cluster.tell([node for node in cluster.nodes if node is not first])


async def test_a_decode_replica_that_dies_after_the_first_token_ends_the_answer(start: Start) -> None:
    """Invariant 3: what the client has is a prefix of the right answer, then one error; no token comes twice."""
    cluster = await start(decodes=2, decode_faults=[Fault(stage="after_token_k", token=3, action="die")])
    asked = [request(200, seed=seed) for seed in range(8)]
    got: dict[str, list[int]] = {one.id: [] for one in asked}

    async def read(one: Request) -> PdServeError | None:
        try:
            async for delta in cluster.ingress.stream(one):
                got[one.id].extend(token for choice in delta.choices for token in choice.token_ids)
        except PdServeError as error:
            return error
        return None

    errors = await asyncio.gather(*(read(one) for one in asked))
    failed = [one for one, error in zip(asked, errors, strict=True) if error]
    assert failed
    for one, error in zip(asked, errors, strict=True):
        tokens = tuple(got[one.id])
        assert tokens == expected(one)[: len(tokens)]
        assert (len(tokens) == 8) == (error is None)
        assert error is None or isinstance(error, EngineFailed)
    assert {len(got[one.id]) for one in failed} <= {1, 2, 3}
    cluster.tell([*decodes(cluster)[1:], cluster.prefill])


async def test_retries_are_bounded(start: Start) -> None:
    """Invariant 7: a request that every replica fails on costs three attempts, and ends with the last error."""
    cluster = await start(decodes=5)
    for node in decodes(cluster):
        node.engine.script.add(Fault(stage="transfer_done", action="fail"))
    asked = request(200)
    with pytest.raises(EngineFailed):
        await cluster.ask(asked)
    attempts = cluster.ingress.record(asked).attempts
    assert len(attempts) == 3
    assert len({attempt.decode_replica for attempt in attempts}) == 3
    assert {attempt.error for attempt in attempts} == {"EngineFailed"}


async def test_one_bad_request_harms_only_itself(start: Start) -> None:
    """Invariant 10: one that fails on every replica, beside many that do not."""
    cluster = await start(decodes=2)
    for node in decodes(cluster):
        node.engine.script.add(Fault(stage="after_token_k", token=2, action="fail", request="poison"))
    poison = Request(id="poison", prompt_token_ids=(5,) * 100, max_tokens=8)
    unreadable = request(100, sampling=b"\xc1")
    asked = [request(200, seed=seed) for seed in range(20)]
    results = await asyncio.gather(
        *(cluster.ingress.outcome(one) for one in [*asked[:10], poison, unreadable, *asked[10:]])
    )
    assert isinstance(results.pop(10), EngineFailed)
    assert isinstance(results.pop(10), InvalidRequest)
    assert check_right_or_failed(asked, results) == 20


# ---------------------------------------------------------------------------------------------------- B15, B22


async def test_b15_a_prefill_process_that_is_killed(start: Start) -> None:
    cluster = await start(prefills=2, prefill_settings=fast(prefill_tokens_per_s=20_000.0))
    asked = [request(200, seed=seed) for seed in range(16)]
    clients = [asyncio.create_task(cluster.ask(one)) for one in asked]
    await until(lambda: cluster.prefill.host.legs, "prefill is at work")
    cluster.prefill.kill()
    answers = await asyncio.wait_for(asyncio.gather(*clients), 30.0)
    assert check_right_or_failed(asked, answers) == 16
    fallbacks = cluster.ingress.sink.by_label("fallbacks", "reason")
    assert set(fallbacks) == {"prefill_ReplicaLost"}
    cluster.tell()
    asked = [request(200, seed=seed) for seed in range(100, 104)]
    await asyncio.gather(*(cluster.ask(one) for one in asked))
    assert cluster.ingress.sink.by_label("fallbacks", "reason") == fallbacks  # the other one serves, nothing falls back


async def test_b15_a_prefill_process_that_is_stopped_and_goes_on(start: Start) -> None:
    cluster = await start()
    asked = [request(200, seed=seed) for seed in range(8)]
    cluster.prefill.stop()
    answers = await asyncio.wait_for(asyncio.gather(*(cluster.ask(one) for one in asked)), 30.0)
    assert check_right_or_failed(asked, answers) == 8
    assert cluster.ingress.sink.by_label("fallbacks", "reason") == {"prefill_ReplicaLost": 8}
    cluster.prefill.go_on()
    await cluster.until_ready()


async def test_b22_a_stopped_decode_replica_is_left_aside_and_comes_back(start: Start) -> None:
    cluster = await start(decodes=2)
    stopped, other = decodes(cluster)
    stopped.stop()
    asked = [request(200, seed=seed) for seed in range(10)]
    answers = await asyncio.wait_for(asyncio.gather(*(cluster.ask(one) for one in asked)), 30.0)
    assert check_right_or_failed(asked, answers) == 10
    await until(lambda: state(cluster, stopped) == "suspect", "it is suspected")
    assert state(cluster, other) == "ready"

    before = stopped.asked
    await asyncio.gather(*(cluster.ask(request(200, seed=seed)) for seed in range(10, 15)))
    assert stopped.asked == before  # no request waits for it any more
    stopped.go_on()
    await cluster.until_ready()
    await asyncio.gather(*(cluster.ask(request(200, seed=seed)) for seed in range(20, 40)))
    assert stopped.submitted[Role.DECODE] > before


async def test_an_engine_that_makes_no_progress_is_not_ready_until_it_does(start: Start) -> None:
    cluster = await start(decodes=2, settings=fast(overdue_s=0.05))
    stuck, _ = decodes(cluster)
    stuck.engine.stall(0.4)
    client = asyncio.create_task(stuck_client(cluster))
    await until(lambda: state(cluster, stuck) == "suspect", "it is suspected")
    asked = request(200, seed=1)
    assert (await cluster.ask(asked)).tokens() == expected(asked)
    await client
    await cluster.until_ready()


async def stuck_client(cluster: Cluster) -> None:
    """Requests enough that one meets the stuck engine."""
    await asyncio.gather(*(cluster.ask(request(200, seed=seed)) for seed in range(50, 56)))


# ---------------------------------------------------------------------------------------------------- channels


async def test_a_lost_channel_fails_its_legs_and_is_made_anew(start: Start) -> None:
    cluster = await start(decode_settings=fast(decode_step_s=0.005))
    asked = [request(100, max_tokens=900, seed=seed) for seed in range(4)]
    clients = [asyncio.create_task(cluster.ingress.outcome(one)) for one in asked]
    await until(lambda: cluster.decode.host.legs == 4, "all run")
    await asyncio.sleep(0.05)
    cluster.decode.cut()
    results = await asyncio.gather(*clients)
    assert {type(result) for result in results} == {ReplicaLost}
    await cluster.until_ready()
    assert (await cluster.ask(request(100))).tokens()
    await until(lambda: not cluster.decode.host.legs, "the replica aborts the legs of the ingress that fell silent")
    assert cluster.decode.sink.total("ingresses_lost") == 1


async def test_an_ingress_that_dies_leaves_nothing_on_the_replica(start: Start) -> None:
    cluster = await start(decode_faults=[Fault(stage="after_token_k", action="hang", request="ghost")])
    ghost = connect_in_process("ghost", cluster.decode._on_message)
    ghost.send(frames.SubmitDecode(Request(id="ghost", prompt_token_ids=(7,) * 50, max_tokens=5), None, 60.0))
    await until(lambda: cluster.decode.host.legs, "its leg runs")
    await until(lambda: not cluster.decode.host.legs, "its leg was aborted")
    assert cluster.decode.sink.total("ingresses_lost") == 1
    got = [await ghost.receive() for _ in range(2)]
    while not isinstance(got[-1], frames.Failed):  # should it live after all, it is told
        got.append(await ghost.receive())
    assert got[-1].error.kind == "ReplicaLost"


async def test_a_paused_event_loop_blames_nobody(start: Start) -> None:
    """A process that stands still for longer than every patience finds all others alive when it goes on."""
    cluster = await start(decode_settings=fast(decode_step_s=0.005))
    asked = request(100, max_tokens=30)
    client = asyncio.create_task(cluster.ask(asked))
    await until(lambda: cluster.decode.host.legs, "it runs")
    time.sleep(1.4)  # noqa: ASYNC251 (this is the pause)
    assert (await client).tokens() == expected(asked)
    assert cluster.decode.sink.total("ingresses_lost") == 0
    assert cluster.ingress.sink.total("retries") == 0


# ---------------------------------------------------------------------------------------------------- leaving


async def test_a_draining_replica_finishes_its_work_and_takes_no_more(start: Start) -> None:
    cluster = await start(decodes=2, decode_settings=fast(decode_step_s=0.003))
    leaving, staying = decodes(cluster)
    asked = [request(100, max_tokens=40, seed=seed) for seed in range(8)]
    clients = [asyncio.create_task(cluster.ask(one)) for one in asked]
    await until(lambda: leaving.host.legs and staying.host.legs, "both are at work")
    drain = asyncio.create_task(leaving.host.drain(10.0))
    await until(lambda: state(cluster, leaving) == "draining", "the ingress knows")
    before = leaving.submitted[Role.DECODE]
    later = [request(100, seed=seed) for seed in range(20, 28)]
    await asyncio.gather(*(cluster.ask(one) for one in later))
    assert leaving.submitted[Role.DECODE] == before
    assert check_right_or_failed(asked, await asyncio.gather(*clients)) == 8
    await asyncio.wait_for(drain, 1.0)
    assert cluster.ingress.sink.total("retries") == 0


async def test_what_a_replica_cannot_finish_in_time_goes_elsewhere_or_fails(start: Start) -> None:
    cluster = await start(decodes=2)
    leaving, _ = decodes(cluster)
    leaving.engine.script.add(Fault(stage="transfer_done", action="hang", request="silent"))
    leaving.engine.script.add(Fault(stage="after_token_k", token=2, action="hang", request="spoken"))
    asked = [Request(id=f"{kind}{n}", prompt_token_ids=request(100, seed=n).prompt_token_ids, max_tokens=8)
             for n, kind in enumerate(["silent", "spoken"] * 4)]  # fmt: skip
    clients = [asyncio.create_task(cluster.ingress.outcome(one)) for one in asked]
    await until(lambda: leaving.engine.script.struck >= 2, "legs hang")
    await leaving.host.drain(0.1)
    results = await asyncio.gather(*clients)
    for one, result in zip(asked, results, strict=True):
        if isinstance(result, Answer):
            assert result.tokens() == expected(one)
        else:
            assert one.id.startswith("spoken")
            assert isinstance(result, Draining)
    assert leaving.host.legs == 0
    cluster.tell([node for node in cluster.nodes if node is not leaving])


async def test_a_replica_that_serve_no_longer_names_finishes_its_legs(start: Start) -> None:
    cluster = await start(decodes=2, prefills=2, decode_settings=fast(decode_step_s=0.003))
    asked = [request(100, max_tokens=40, seed=seed) for seed in range(8)]
    clients = [asyncio.create_task(cluster.ask(one)) for one in asked]
    await until(lambda: all(node.host.legs for node in decodes(cluster)), "both are at work")
    kept = [decodes(cluster)[1], next(n for n in reversed(cluster.nodes) if n.role is Role.PREFILL)]
    cluster.tell(kept)
    assert check_right_or_failed(asked, await asyncio.gather(*clients)) == 8
    assert cluster.ingress.sink.total("retries") == 0


async def test_a_prefill_replica_that_leaves_during_the_grant_is_a_fallback(start: Start) -> None:
    """It is not the decode replica's fault, and the decode replica is not left out for it."""
    cluster = await start()
    cluster.decode.stop()
    asked = request(200)
    client = asyncio.create_task(cluster.ask(asked))
    await asyncio.sleep(0.05)
    cluster.tell([cluster.decode])
    cluster.decode.go_on()
    assert (await client).tokens() == expected(asked)
    record = cluster.ingress.record(asked)
    assert [attempt.fallback for attempt in record.attempts] == ["prefill_ReplicaLost"]
    cluster.tell()


async def test_a_replica_that_joins_is_used(start: Start) -> None:
    cluster = await start()
    cluster.tell([cluster.prefill])
    client = asyncio.create_task(cluster.ask(asked := request(200)))
    await asyncio.sleep(0.05)
    new = await cluster.add(Role.DECODE, tell=False)
    cluster.tell([cluster.prefill, new])
    assert (await client).tokens() == expected(asked)
    assert cluster.ingress.record(asked).waits["no_replica"] > 0


async def test_without_a_prefill_pool_prompts_are_computed_where_they_decode(start: Start) -> None:
    cluster = await start(prefills=0)
    asked = [request(200, seed=seed) for seed in range(4)]
    answers = await asyncio.gather(*(cluster.ask(one) for one in asked))
    assert check_right_or_failed(asked, answers) == 4
    assert {record.attempts[0].reason for record in cluster.ingress.records} == {"no_prefill_replica"}


async def test_replicas_of_another_model_are_not_paired(start: Start) -> None:
    """Invariant 6: a pair shares one fingerprint."""
    from pd_serve.engine.fake_model import FakeModel

    cluster = await start(prefill_settings=fast(model=FakeModel(weights="other")))
    asked = request(200)
    assert (await cluster.ask(asked)).tokens() == expected(asked)
    assert cluster.ingress.record(asked).attempts[0].reason == "no_prefill_replica"
    assert cluster.prefill.submitted[Role.PREFILL] == 0


async def test_two_ingresses_on_the_same_replicas(start: Start) -> None:
    cluster = await start(prefills=2, decodes=2, ingresses=2, decode_settings=fast(max_num_seqs=3))
    asked = [[request(100, seed=seed + 100 * place) for seed in range(25)] for place in range(2)]
    answers = await asyncio.gather(
        *(ingress.ask(one) for ingress, mine in zip(cluster.ingresses, asked, strict=True) for one in mine)
    )
    assert check_right_or_failed([*asked[0], *asked[1]], answers) == 50
    for ingress in cluster.ingresses:
        assert ingress.sink.by_label("requests", "outcome") == {"ok": 25}


async def test_every_decode_replica_dead_is_an_error_in_bounded_time(start: Start) -> None:
    cluster = await start(decodes=2, rules=rules(no_replica_timeout_s=0.2))
    for node in decodes(cluster):
        node.kill()
    results = await asyncio.gather(*(cluster.ingress.outcome(request(100, seed=seed)) for seed in range(5)))
    assert {type(result) for result in results} == {NoReplica}
    cluster.can_serve = False


async def test_tenants_do_not_share_cached_prompts(start: Start) -> None:
    """Invariant 9: nothing cached for one salt is seen by another, on either side; the same salt does see it."""
    cluster = await start()
    cached: list[tuple[int, int | None]] = []
    for salt in ("a", "a", "b", None):
        asked = request(200, seed=9, cache_salt=salt)
        answer = await cluster.ask(asked)
        assert answer.tokens() == expected(asked)
        attempt = cluster.ingress.record(asked).attempts[0]
        cached.append((attempt.prefill.cached_tokens if attempt.prefill else 0, answer.last.cached_tokens))
    assert cached[0] == cached[2] == cached[3] == (0, 0)
    assert (cached[1][1] or 0) > 0
