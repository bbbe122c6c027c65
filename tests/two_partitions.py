"""A daemon with two partitions, a tenant for each, for several test files."""

import contextlib
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

from daemon_process import DaemonProcess

from dataplane.client import Client, connect

TWO = ("--partition=a=0", "--partition=b=1")
KEYS = {"a": "alpha", "b": "beta"}


def tenants_file(directory: Path, partitions: dict[str, str | None]) -> str:
    """Write a file with one tenant for each partition; the flag that names it."""
    lines = []
    for name, partition in partitions.items():
        lines += [f"[tenant-{name}]", f'key_sha256 = "{sha256(KEYS[name].encode()).hexdigest()}"']
        if partition is not None:
            lines.append(f'partition = "{partition}"')
    path = directory / "tenants.toml"
    path.write_text("\n".join(lines))
    return f"--tenants={path}"


def is_ready(daemon: DaemonProcess, partition: str) -> bool:
    return daemon.get(f"/readyz?partition={partition}")[0] == 200


@contextlib.asynccontextmanager
async def client(daemon: DaemonProcess) -> AsyncIterator[Client]:
    async with connect(daemon.address, daemon.ca) as found:
        yield found


async def ask(raw: Client, name: str) -> int | None:
    """Ask an echo; the status."""
    answer = await raw.submit([1], api_key=KEYS[name])
    if answer.status == 200:
        assert (await answer.result()).token_ids == [1]
    return answer.status
