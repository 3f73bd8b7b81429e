"""The same application behind Ray Serve's own proxy, which is slower but must be as right."""

from __future__ import annotations

import pytest

from tests.serve.running import Running, fake_args, text_of
from tests.serve.test_haproxy import error_of, leave_early

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

HAPROXY = False
ARGS = fake_args(prefill=None)


def test_answers(running: Running) -> None:
    whole = running.complete(max_tokens=12)
    assert whole.status_code == 200
    with running.streaming(max_tokens=12) as (_, stream):
        assert text_of(stream) == whole.json()["choices"][0]["text"]
    assert running.chat().status_code == 200


def test_without_a_prefill_pool_everything_is_local(running: Running) -> None:
    assert running.http.get("/readyz").json() == {"ready": True, "pools": {"decode": "ready"}}
    running.complete()
    (record,) = running.records()
    assert (record["prefill_replica"], record["kv_outcome"]) == (None, "local")


def test_a_bad_request_is_a_plain_400(running: Running) -> None:
    response = running.complete(logit_bias={"999999": 1}, stream=True)
    assert response.status_code == 400
    assert error_of(response)["param"] == "logit_bias"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(running: Running, stream: bool) -> None:
    leave_early(running, stream)
    running.until(lambda: running.records()[0]["outcome"] == "cancelled", 5)
    running.until(lambda: running.busy() == 0, 5)
