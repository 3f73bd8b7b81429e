"""The holder of the channel keys: one set an application, kept over restarts, forgotten when nobody wants it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    directory = tempfile.mkdtemp(prefix="pdk-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        _temp_dir=directory,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


async def test_everyone_gets_the_same_keys_and_other_applications_get_others() -> None:
    from pd_serve.serve.keys import KeyClaim

    claims = [KeyClaim("a"), KeyClaim("a"), KeyClaim("b")]
    first, again, other = [await claim.keys() for claim in claims]
    assert first == again
    assert first.client_secret != other.client_secret
    for claim in claims:
        claim.check()
        claim.close()


async def test_a_holder_that_crashes_comes_back_with_its_keys() -> None:
    import ray

    from pd_serve.serve.keys import NAMESPACE, KeyClaim

    claim = KeyClaim("crash")
    keys = await claim.keys()
    ray.kill(ray.get_actor("keys:crash", namespace=NAMESPACE), no_restart=False)
    other = KeyClaim("crash")
    assert await asyncio.wait_for(other.keys(), 30) == keys
    claim.close()
    other.close()


async def test_a_holder_that_is_gone_is_made_anew_by_whoever_has_the_keys() -> None:
    import ray

    from pd_serve.serve.keys import NAMESPACE, KeyClaim

    claim = KeyClaim("gone", forget_s=2.0)
    keys = await claim.keys()
    ray.kill(ray.get_actor("keys:gone", namespace=NAMESPACE), no_restart=True)
    await asyncio.sleep(1.5)  # it claims every half second
    newcomer = KeyClaim("gone")
    assert await asyncio.wait_for(newcomer.keys(), 30) == keys
    claim.check()
    claim.close()
    newcomer.close()


async def test_keys_that_nobody_wants_are_forgotten() -> None:
    import ray

    from pd_serve.serve.keys import NAMESPACE, KeyClaim

    claim = KeyClaim("left", forget_s=1.0)
    keys = await claim.keys()
    await asyncio.sleep(2.5)  # renewed meanwhile
    assert ray.get_actor("keys:left", namespace=NAMESPACE)
    claim.close()

    def is_there() -> bool:
        try:
            ray.get_actor("keys:left", namespace=NAMESPACE)
        except ValueError:
            return False
        return True

    for _ in range(100):
        if not is_there():
            break
        await asyncio.sleep(0.1)
    assert not is_there()
    newcomer = KeyClaim("left")
    assert await newcomer.keys() != keys
    newcomer.close()
