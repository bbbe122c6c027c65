"""A module like `pynvml`, with the devices that a test gives it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

CARD = "GPU-11111111-2222-3333-4444-555555555555"
OTHER_CARD = "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
INSTANCE = "MIG-66666666-7777-8888-9999-00000000000{}"
GIB = 2**30


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


def card(
    uuid: str = CARD,
    name: str = "NVIDIA H200",
    capability: tuple[int, int] = (9, 0),
    memory: int | None = 140 * GIB,
    mig: str = "off",
    instances: Sequence[int] = (),
    most: int = 7,
) -> SimpleNamespace:
    """Return a card; `instances` are the places that are taken.

    Its memory is not supported when it is None, and not told when it is less than 0.
    """
    return SimpleNamespace(
        uuid=uuid,
        name=name,
        capability=capability,
        memory=memory,
        mig=mig,
        most=most,
        instances={
            place: SimpleNamespace(
                uuid=INSTANCE.format(place), name=f"{name} MIG 1g.18gb", memory=16 * GIB
            )
            for place in instances
        },
    )


class FakeNvml:
    """The functions that are called, over `cards`; `fails` names errors by function."""

    NVMLError = NVMLError

    def __init__(self, *cards: SimpleNamespace, fails: dict[str, int] | None = None) -> None:
        self.cards = cards
        self.fails = fails or {}
        self.open = 0

    def _check(self, function: str) -> None:
        if function in self.fails:
            raise NVMLError(self.fails[function])

    def nvmlInit(self) -> None:  # noqa: N802
        self._check("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.95.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return 13000

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetUUID(self, handle: Any) -> str:  # noqa: N802
        return str(handle.uuid)

    def nvmlDeviceGetName(self, handle: Any) -> str:  # noqa: N802
        return str(handle.name)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> list[int]:  # noqa: N802
        return list(handle.capability)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:  # noqa: N802
        if handle.memory is None:
            raise NVMLError(3)
        if handle.memory < 0:
            raise NVMLError(4)
        return SimpleNamespace(total=handle.memory)

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:  # noqa: N802
        if handle.mig == "none":
            raise NVMLError(3)
        return [int(handle.mig == "on"), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:  # noqa: N802
        return int(handle.most)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:  # noqa: N802
        if index not in handle.instances:
            raise NVMLError(self.fails.get("a gap", 6))
        return handle.instances[index]
