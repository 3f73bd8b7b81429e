"""API keys: read once, kept as hashes, looked up in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

import msgspec

from pd_serve.errors import ConfigError

MIN_KEY_LENGTH = 8


class ApiKey(msgspec.Struct, frozen=True):
    """One key as it is kept: whose it is and the sha256 of its text."""

    tenant: str
    digest: bytes

    @property
    def shown(self) -> str:
        """What logs may show of it."""
        return self.digest.hex()[:8]


class KeyRing:
    """The keys of one application."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: bytes) -> ApiKey | None:
        """The key with this text, or None. Looks at every key, so that time tells nothing."""
        digest = hashlib.sha256(presented).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def parse_keys(text: str, source: str) -> KeyRing:
    """Keys from lines `tenant:key` or `key`; blank lines and lines that begin with # are passed over.

    Args:
        source: names the file or variable in messages, which never hold a key.

    Raises:
        ConfigError: a key is too short, or given twice.
    """
    keys: dict[bytes, ApiKey] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        tenant, _, key = line.rpartition(":")
        if len(key) < MIN_KEY_LENGTH:
            raise ConfigError(f"{source}:{number}: a key needs at least {MIN_KEY_LENGTH} characters")
        digest = hashlib.sha256(key.encode()).digest()
        if digest in keys:
            raise ConfigError(f"{source}:{number}: this key stands there twice")
        keys[digest] = ApiKey(tenant.strip() or digest.hex()[:8], digest)
    return KeyRing(keys.values())
