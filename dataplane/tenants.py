"""Whose requests go to which partition: API keys, as `--tenants FILE` has them.

The file is TOML, a table for each tenant:

    [acme]
    partition = "a"             # may be left out where there is one partition
    key_sha256 = ["9f86d081..."]  # of each key that is theirs, or one as a string

Keys stand there as hashes, so that whoever reads the file cannot use them; and a key is looked up
by its hash, so that how long that takes tells nothing about the keys there are.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from dataplane._native import ffi, lib
from dataplane.errors import Refusal, Status, UsageError
from dataplane.ingress import Ingress
from dataplane.stats import Stats

_HASH = re.compile(r"[0-9a-fA-F]{64}")
_NOTHING = sha256(b"").digest()
_KEYS = ("partition", "key_sha256")
_HOW = "`authorization: Bearer KEY`, `x-api-key`, or extension 1 of a prompt/1 header"
NO_KEY = Refusal(Status.UNAUTHORIZED, f"an API key is needed: {_HOW}")
UNKNOWN_KEY = Refusal(Status.UNAUTHORIZED, "the API key is none of this daemon's")


class KeyedRoutes:
    """Admits a request to the partition of the tenant whose key it carries (`ingress.Routes`).

    Args:
        ingresses: By partition.
        tenants: A partition for each SHA-256 of a key.
    """

    sole = None

    def __init__(self, ingresses: Mapping[str, Ingress], tenants: Mapping[bytes, str]) -> None:
        self.home: Ingress = next(iter(ingresses.values()))
        self.stats: Stats = self.home.stats
        for ingress in ingresses.values():
            ingress.is_alone = len(ingresses) == 1
        self.keys: Mapping[bytes, Ingress] = {
            digest: ingresses[name] for digest, name in tenants.items()
        }
        self._ingresses = tuple(ingresses.values())
        numbers = {ingress: number for number, ingress in enumerate(self._ingresses)}
        native = lib.dp_keys_new(
            b"".join(self.keys), [numbers[of] for of in self.keys.values()], len(self.keys)
        )
        if native == ffi.NULL:
            raise MemoryError("no memory for the API keys")
        self._native = ffi.gc(native, lib.dp_keys_free)
        self._plain = ffi.new("struct dp_h3_plain *")

    def of(self, key: bytes | None) -> Ingress | Refusal:
        """Return who admits the requests of this key; 401 without one that is known."""
        if not key:
            return NO_KEY
        return self.keys.get(sha256(key).digest(), UNKNOWN_KEY)

    def of_whole(self, data: Any, at: int, size: int) -> tuple[Ingress, Any] | None:
        """Return who admits a plain HTTP/3 request that came whole, by the key in it.

        What was read of it is good until the next call.
        """
        plain = self._plain
        number = lib.dp_read_whole(self._native, data, at, size, plain)
        return (self._ingresses[number], plain) if number >= 0 else None


def read(path: Path, partitions: Sequence[str]) -> dict[bytes, str]:
    """Read a file of tenants.

    Args:
        path: The file.
        partitions: The names that there are.

    Returns:
        A partition for each SHA-256 of a key.

    Raises:
        UsageError: It cannot be read, or something in it is wrong; the text says what and where.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--tenants {path}: it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of UTF-8 or of TOML
        raise UsageError(f"--tenants {path}: it is no TOML: {error}") from error
    found: dict[bytes, str] = {}
    owners: dict[bytes, str] = {}
    for tenant, entry in document.items():
        where = f"--tenants {path}: [{tenant}]"
        if not isinstance(entry, dict):
            raise UsageError(
                f"{where}: it is a value; each tenant is a table with {_listed(_KEYS)}"
            )
        partition = _partition(where, entry, partitions)
        for digest in _digests(where, entry):
            if digest in owners:
                raise UsageError(f"{where}: a key_sha256 of it is {owners[digest]}'s already")
            owners[digest], found[digest] = tenant, partition
    if not found:
        raise UsageError(f"--tenants {path}: there is no tenant in it, so nobody could ask")
    return found


def _partition(where: str, entry: Mapping[str, Any], partitions: Sequence[str]) -> str:
    unknown = [name for name in entry if name not in _KEYS]
    if unknown:
        raise UsageError(f"{where}: there is no setting {unknown[0]!r}, only {_listed(_KEYS)}")
    if "partition" not in entry:
        if len(partitions) > 1:
            raise UsageError(f"{where}: partition is needed, one of {_listed(partitions)}")
        return partitions[0]
    name = entry["partition"]
    if name not in partitions:
        raise UsageError(f"{where}: there is no partition {name!r}, only {_listed(partitions)}")
    return str(name)


def _digests(where: str, entry: Mapping[str, Any]) -> list[bytes]:
    given = entry.get("key_sha256")
    texts: list[Any] = given if isinstance(given, list) else [given]
    if not texts or not all(isinstance(text, str) and _HASH.fullmatch(text) for text in texts):
        raise UsageError(
            f"{where}: key_sha256 must be the SHA-256 of a key, 64 hexadecimal digits, or a list of"
            ' those: `printf %s "$KEY" | sha256sum` prints one'
        )
    digests = [bytes.fromhex(text) for text in texts]
    if _NOTHING in digests:
        raise UsageError(
            f"{where}: that key_sha256 is the hash of an empty key, which is none: was $KEY set?"
        )
    return digests


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
