"""API keys: read once, kept as hashes, looked up in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from pathlib import Path

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

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys)

    def find(self, presented: bytes) -> ApiKey | None:
        """The key with this text, or None. Looks at every key, so that time tells nothing."""
        digest = hashlib.sha256(presented).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def load_keys(keys_file: str | None, variable: str) -> KeyRing:
    """Keys of a file and of a variable's text together.

    Raises:
        ConfigError: the file cannot be read, or a key is not good.
    """
    from_file: list[ApiKey] = []
    if keys_file is not None:
        try:
            text = Path(keys_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"access.keys_file: {keys_file} cannot be read: {reason}") from None
        from_file = list(parse_keys(text, "access.keys_file"))
        if not from_file:
            raise ConfigError(f"access.keys_file: there is no key in {keys_file}")
    return KeyRing([*from_file, *parse_keys(variable, "PD_SERVE_API_KEYS")])


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
