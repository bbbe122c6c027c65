"""`--partition NAME=DEVICE`: which runtime process gets which device, or which part of one.

A device is an index, a card's UUID or a MIG instance's UUID, as `dataplane doctor` lists them.
Reading such a text asks no device; `check_devices` holds it against those that there are.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from dataplane._native import lib
from dataplane.errors import UsageError
from dataplane.gpus import MIG_MOST, Device, Gpus

PARTITIONS_MAX: int = lib.DP_RAW_PARTITIONS
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_INDEX = re.compile(r"[0-9]{1,3}")
_DIGITS = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_CARD = re.compile(f"GPU-{_DIGITS}")
# The second form is that of drivers before 470.
_INSTANCE = re.compile(rf"MIG-{_DIGITS}|MIG-GPU-{_DIGITS}/[0-9]+/[0-9]+")
_PLACE_OF_A_CARD = re.compile(r"[0-9]{1,3}[:/.][0-9:/.]*")

_FORMS = (
    "an index (0), a card's UUID (GPU-...) or a MIG instance's UUID (MIG-...), whole, as"
    " `dataplane doctor` lists them"
)
_MIG = (
    f"a MIG instance is named by its UUID (`dataplane doctor` lists them; at most {MIG_MOST} on a"
    " card)"
)


class DeviceKind(Enum):
    """How a partition's device is named."""

    INDEX = "index"
    CARD = "card"
    INSTANCE = "instance"


@dataclass(frozen=True, slots=True)
class Partition:
    """A name and its device.

    Attributes:
        device: As it stands in CUDA_VISIBLE_DEVICES.
    """

    name: str
    kind: DeviceKind
    device: str

    def __str__(self) -> str:
        return f"{self.name}={self.device}"

    def environ(self) -> dict[str, str]:
        """What in its runtime's environment leaves CUDA this device alone.

        An index counts as NVML's do, by the order of the buses; CUDA's own order is by speed.
        """
        return {"CUDA_VISIBLE_DEVICES": self.device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def parse_partition(text: str) -> Partition:
    """Read `NAME=DEVICE`.

    Raises:
        UsageError: It is something else; the text says what it takes.
    """
    name, equals, device = text.partition("=")
    if not equals:
        raise _refuse(text, f"it takes NAME=DEVICE, where DEVICE is {_FORMS}")
    if not _NAME.fullmatch(name):
        raise _refuse(
            text,
            "a name has 1 to 64 letters, digits, dots, dashes or underscores, and begins with a"
            " letter or a digit",
        )
    if _INDEX.fullmatch(device):
        return Partition(name, DeviceKind.INDEX, str(int(device)))
    if _PLACE_OF_A_CARD.fullmatch(device):
        raise _refuse(text, _MIG)
    # The hexadecimal digits of a UUID are the same in capitals; its prefix has to be in them.
    prefix, dash, rest = device.partition("-")
    canonical = prefix.upper() + dash + rest.lower().replace("gpu-", "GPU-")
    if _CARD.fullmatch(canonical):
        return Partition(name, DeviceKind.CARD, canonical)
    if _INSTANCE.fullmatch(canonical):
        return Partition(name, DeviceKind.INSTANCE, canonical)
    if "," in device:
        raise _refuse(text, "a partition has one device; give --partition once for each")
    raise _refuse(text, f"the device is to be {_FORMS}")


def parse_partitions(texts: Iterable[str]) -> tuple[Partition, ...]:
    """Read several, of which no two may share a name or a device.

    Raises:
        UsageError: One is wrong, two collide, or there are too many.
    """
    found: list[Partition] = []
    for text in texts:
        partition = parse_partition(text)
        for other in found:
            if other.name == partition.name:
                raise _refuse(text, f"there is a partition {other.name} already ({other})")
            if other.device == partition.device:
                raise _refuse(
                    text,
                    f"that device is partition {other.name}'s already; nothing is shared between"
                    " two",
                )
        found.append(partition)
    if len(found) > PARTITIONS_MAX:
        raise UsageError(f"--partition: there are {len(found)}; at most {PARTITIONS_MAX} can be")
    return tuple(found)


def check_devices(partitions: Sequence[Partition], gpus: Gpus) -> None:
    """Hold partitions against the devices that there are, each of which may be one's alone.

    Raises:
        UsageError: One names no device, a card that is split, or the device of another.
    """
    owners: dict[str, Partition] = {}
    for partition in partitions:
        uuid = _find(partition, gpus.devices)
        if uuid in owners:
            raise _refuse(
                str(partition),
                f"that is the device of partition {owners[uuid].name} ({owners[uuid]}) by another"
                " name; nothing is shared between two",
            )
        owners[uuid] = partition


def _find(partition: Partition, devices: Sequence[Device]) -> str:
    """Return what names a partition's device for good."""
    text, name = str(partition), partition.device
    if partition.kind is DeviceKind.INSTANCE:
        return _find_instance(text, name, devices)
    for device in devices:
        if name in (str(device.index), device.uuid):
            if device.mig == "on":
                uuids = ", ".join(instance.uuid for instance in device.instances)
                raise _refuse(
                    text,
                    f"{_say(device)} is split, and CUDA would take one of its MIG instances: name"
                    f" that instead ({uuids or 'it has none yet'})",
                )
            return device.uuid
    there = ", ".join(_say(device) for device in devices) or "none at all"
    raise _refuse(text, f"there is no such device; there are: {there}")


def _find_instance(text: str, name: str, devices: Sequence[Device]) -> str:
    for device in devices:
        if any(instance.uuid == name for instance in device.instances):
            return name
        if name.startswith(f"MIG-{device.uuid}/"):  # older drivers' form, which NVML does not list
            return name
    split = [
        f"{_say(device)} has {len(device.instances)} of at most {device.mig_most or MIG_MOST}"
        for device in devices
        if device.mig == "on"
    ]
    raise _refuse(
        text, f"there is no such MIG instance; {'; '.join(split) or 'no card here is split'}"
    )


def _say(device: Device) -> str:
    return f"card {device.index} ({device.name}, {device.uuid})"


def _refuse(text: str, why: str) -> UsageError:
    return UsageError(f"--partition {text!r}: {why}")
