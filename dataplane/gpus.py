"""The NVIDIA devices of this machine, as the driver lists them.

Asked through NVML (nvidia-ml-py, the extra `gpu`), which makes no CUDA context: the daemon has none
(`runtime/cuda.py` says why). Where only CuPy is installed a process of its own asks that. Nothing
here changes a setting of a device, its MIG mode least of all.

That something is missing is an answer and no error: `Gpus.missing` says what, `remedy` what helps.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.errors import UsageError
from dataplane.fatbin import Capability
from dataplane.installing import pip_install

DRIVER = Path("/proc/driver/nvidia/version")
"""There while the kernel's part of the driver is loaded."""

MIG_MOST = 7
"""Instances of a card that can be split; the driver says how many for the card at hand."""

_ON = 1
_CUPY_WITHIN_S = 60.0
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND = 2, 3, 4, 6
# What a place without an instance is answered with, or with one that is not this container's.
_NO_INSTANCE = (_INVALID_ARGUMENT, _NO_PERMISSION, _NOT_FOUND)
_REMEDIES = {
    _NO_PERMISSION: "give this user, or this container, access to /dev/nvidia*",
    9: "load it (`modprobe nvidia`); in a container, start that with the NVIDIA container toolkit"
    " (--gpus all)",
    12: "install NVIDIA's driver; in a container, start that with the NVIDIA container toolkit"
    " (--gpus all)",
    18: "restart the machine: the driver's library and its kernel module are of two versions",
}


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG instance: a part of a card that is a device of its own."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Device:
    """A card.

    Attributes:
        index: Its place in the driver's list, which is the order of the buses.
        memory_bytes: 0 where it shares the processor's, None where the driver does not say.
        mig: `on`, `off`, or `none` where the card cannot be split.
        mig_most: How many instances it can be split into.
    """

    index: int
    uuid: str
    name: str
    capability: Capability
    memory_bytes: int | None
    mig: str = "none"
    mig_most: int = 0
    instances: tuple[Instance, ...] = ()

    @property
    def architecture(self) -> str:
        """As nvcc spells what is built for it."""
        return "sm_{}{}".format(*self.capability)


@dataclass(frozen=True, slots=True)
class Gpus:
    """What was found; `missing` and `remedy` where devices cannot be listed."""

    devices: tuple[Device, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    missing: str | None = None
    remedy: str | None = None


def look(nvml: Any = None, driver_file: Path = DRIVER) -> Gpus:
    """List the devices.

    Args:
        nvml: The module `pynvml`, or one like it; imported where it is installed.
        driver_file: Says whether there is a driver, where NVML cannot be asked.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return _without_nvml(driver_file)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _failed(error)
    try:
        return _list(nvml)
    except nvml.NVMLError as error:
        return _failed(error)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _failed(error: Any) -> Gpus:
    number = int(getattr(error, "value", 0))
    words = {9: "the NVIDIA driver is not loaded", 12: "there is no NVIDIA driver on this machine"}
    return Gpus(
        missing=words.get(number) or f"the NVIDIA driver does not answer: {error}",
        remedy=_REMEDIES.get(number, "see what `nvidia-smi` says"),
    )


def _without_nvml(driver_file: Path) -> Gpus:
    if not driver_file.exists():
        return Gpus(missing="there is no NVIDIA driver on this machine", remedy=_REMEDIES[12])
    if importlib.util.find_spec("cupy") is not None:
        return _ask_cupy()
    return Gpus(
        missing="there is an NVIDIA driver, but nvidia-ml-py, which asks it, is not installed",
        remedy=pip_install("gpu"),
    )


# NVML.


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _list(nvml: Any) -> Gpus:
    version = int(nvml.nvmlSystemGetCudaDriverVersion())
    return Gpus(
        devices=tuple(_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())),
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda=f"{version // 1000}.{version % 1000 // 10}",
    )


def _device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    mig, most = _mig(nvml, handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=(int(major), int(minor)),
        memory_bytes=_memory(nvml, handle),
        mig=mig,
        mig_most=most,
        instances=tuple(_instances(nvml, handle, most)) if mig == "on" else (),
    )


def _memory(nvml: Any, handle: Any) -> int | None:
    """0 where it has none of its own: on a board whose GPU shares the processor's memory. None
    where it is not told: a container that has an instance may not ask this of the whole card."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        if error.value not in (_NOT_SUPPORTED, _NO_PERMISSION):
            raise
        return 0 if error.value == _NOT_SUPPORTED else None


def _mig(nvml: Any, handle: Any) -> tuple[str, int]:
    """Whether it is split, and into how many parts it can be."""
    try:
        mode = nvml.nvmlDeviceGetMigMode(handle)[0]
        most = int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    except nvml.NVMLError as error:
        if error.value != _NOT_SUPPORTED:
            raise
        return "none", 0
    return ("on" if mode == _ON else "off"), most


def _instances(nvml: Any, handle: Any, most: int) -> Iterator[Instance]:
    for index in range(most):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError as error:
            if error.value not in _NO_INSTANCE:
                raise
            continue  # the places have gaps
        yield Instance(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(instance)),
            name=_text(nvml.nvmlDeviceGetName(instance)),
            memory_bytes=_memory(nvml, instance),
        )


# CuPy.

# The UUID of CuPy's properties is a C string: it ends at the first zero that is in it.
_ASK = """
import ctypes, json, cupy
cuda, driver = cupy.cuda.runtime, ctypes.CDLL("libcuda.so.1")
found = [cuda.getDeviceProperties(number) for number in range(cuda.getDeviceCount())]
def uuid(number):
    device, digits = ctypes.c_int(), ctypes.create_string_buffer(16)
    assert not driver.cuDeviceGet(ctypes.byref(device), number)
    assert not driver.cuDeviceGetUuid(digits, device)
    return digits.raw.hex()
print(json.dumps({"cuda": cuda.driverGetVersion(), "devices": [
    [p["name"].decode(), p["major"], p["minor"], p["totalGlobalMem"], uuid(number)]
    for number, p in enumerate(found)]}))
"""


def _ask_cupy() -> Gpus:
    """Without what only NVML knows: the driver's version, and MIG."""
    # All of them, and in NVML's order: what a runtime would see of them is asked for later.
    environ = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_CUPY_WITHIN_S,
            check=True, env=environ,
        )  # fmt: skip
        found = json.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        return Gpus(
            missing=f"CuPy cannot list the devices: {' '.join(told)}",
            remedy=f"{pip_install('gpu')}, and see what `nvidia-smi` says",
        )
    version = int(found["cuda"])
    devices = [
        Device(index, _uuid(uuid), name, (major, minor), memory)
        for index, (name, major, minor, memory, uuid) in enumerate(found["devices"])
    ]
    return Gpus(tuple(devices), cuda=f"{version // 1000}.{version % 1000 // 10}")


def _uuid(digits: str) -> str:
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32])
    return f"GPU-{'-'.join(parts)}"


# Which ones a process would get.


def visible(gpus: Gpus, environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the devices of which CUDA takes the first in a process with this environment.

    More than one where NVML cannot tell: CUDA counts the fastest first, unless told not to.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES names none of this machine.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return gpus.devices
    first = given.split(",")[0].strip()
    if first.isdecimal():
        if int(first) >= len(gpus.devices):
            found: tuple[Device, ...] = ()
        elif environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            found = (gpus.devices[int(first)],)
        else:
            found = gpus.devices
    elif first:
        found = tuple(device for device in gpus.devices if _is_named(device, first))
    else:
        found = ()
    if not found:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={given!r} leaves none of this machine's devices:"
            " `dataplane doctor` lists them"
        )
    return found


def _is_named(device: Device, name: str) -> bool:
    """CUDA takes the beginning of a UUID, too."""
    return any(
        uuid.startswith(name)
        for uuid in (device.uuid, *(instance.uuid for instance in device.instances))
    )
