"""The channel keys of one application: made once, held by a named Ray actor, handed to whoever serves it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import ray
from ray import serve

from pd_serve.errors import EngineFailed
from pd_serve.path.zmq_channel import ChannelKeys

logger = logging.getLogger(__name__)

NAMESPACE = "pd_serve"
RENEW_S = 20.0
CLAIM_S = 30.0
"""A claim that takes longer has failed."""
FORGET_S = 120.0
"""Keys that nobody asked for within this time are forgotten, with their actor."""


class KeyHolder:
    """Holds the keys until nobody wants them.

    Args:
        keys: Ray keeps constructor arguments, so that a holder which it restarts still has the same keys.
        forget_s: seconds without a `claim` after which the actor ends itself.
    """

    def __init__(self, keys: ChannelKeys, forget_s: float = FORGET_S) -> None:
        self._keys = keys
        self._forget_s = forget_s
        self._claimed = time.monotonic()
        self._me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_when_forgotten, daemon=True).start()

    def claim(self) -> ChannelKeys:
        self._claimed = time.monotonic()
        return self._keys

    def _end_when_forgotten(self) -> None:
        while (left := self._claimed + self._forget_s - time.monotonic()) > 0:
            time.sleep(left)
        ray.kill(self._me, no_restart=True)


class KeyClaim:
    """One process's hold on the keys of its application. Use on one event loop.

    Args:
        application: its name in Ray Serve.
        forget_s: see `KeyHolder`; counts for whoever comes first.
    """

    def __init__(self, application: str, forget_s: float = FORGET_S) -> None:
        self._name = f"keys:{application}"
        self._forget_s = forget_s
        self._keys: ChannelKeys | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._lost = False

    @classmethod
    def of_this_replica(cls) -> KeyClaim:
        """Must be called in a replica of a Ray Serve deployment."""
        return cls(serve.get_replica_context().app_name)

    async def keys(self) -> ChannelKeys:
        """The application's keys; they are claimed again every `RENEW_S` until `close`.

        Raises:
            EngineFailed: Ray did not say within `CLAIM_S`.
        """
        if self._keys is None:
            self._keys = await self._claim(ChannelKeys.generate())
            self._renewing = asyncio.create_task(self._renew())
        return self._keys

    async def _claim(self, mine: ChannelKeys) -> ChannelKeys:
        """`mine` become the application's keys unless it has some."""
        try:
            async with asyncio.timeout(CLAIM_S):
                # Ray looks the name up with a blocking call, which takes long when its control service hangs.
                holder = await asyncio.to_thread(_holder, self._name, mine, self._forget_s)
                keys: ChannelKeys = await holder.claim.remote()
        except TimeoutError:
            raise EngineFailed(f"the holder of the channel keys did not answer within {CLAIM_S:.0f} s") from None
        return keys

    async def _renew(self) -> None:
        assert self._keys is not None
        while True:
            await asyncio.sleep(min(RENEW_S, self._forget_s / 4))
            try:
                self._lost = await self._claim(self._keys) != self._keys
            except Exception as error:  # whatever Ray raises: these keys are good for as long as they are renewed
                reason = str(error).partition("\n")[0]
                logger.warning("channel keys not renewed, trying again: %s: %s", type(error).__name__, reason)

    def check(self) -> None:
        """Raises EngineFailed when the application has other keys by now, so that nobody can be reached with these."""
        if self._lost:
            raise EngineFailed("the application's channel keys were replaced")

    def close(self) -> None:
        if self._renewing:
            self._renewing.cancel()


def _holder(name: str, mine: ChannelKeys, forget_s: float) -> Any:
    """A handle to the actor of this name, which is made with `mine` if there is none."""
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
    }
    return ray.remote(KeyHolder).options(**options).remote(mine, forget_s)
