"""Kinds of values that a setting can have: what each takes in words, and how it is made of text or
TOML. `dataplane.config` has the settings themselves.
"""

import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.partitions import Partition, parse_partitions

Address = tuple[str, int]

# What a Unix socket's address holds besides its closing zero.
_SOCKET_PATH_BYTES = 107
_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_ADDRESS_TAKES = "HOST:PORT with a port from {} to 65535, an IPv6 address in brackets ([::1]:4433)"
_PORT = re.compile(r"[0-9]{1,5}")
_DIGITS = re.compile(r"[0-9]{1,18}")
_DECIMAL = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of value: what it takes in words, its TOML types, and how it is made of text or TOML.

    `parse` gets the value and the directory that a relative path starts from; it raises ValueError
    on what is not allowed.
    """

    takes: str
    types: tuple[type, ...]
    parse: Callable[[Any, Path], Any]


def parse_address(text: str, lowest_port: int = 0) -> Address:
    """Split `HOST:PORT`; an IPv6 address stands in brackets.

    Raises:
        ValueError: It is something else; the text says what is allowed.
    """
    allowed = _ADDRESS_TAKES.format(lowest_port)
    host, colon, port = text.rpartition(":")
    if not colon or not _PORT.fullmatch(port) or not lowest_port <= int(port) <= 65535:
        raise ValueError(allowed)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_ipv6(host):
            raise ValueError(allowed)
    elif not _HOST.fullmatch(host):
        raise ValueError(allowed)
    return host, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def format_address(address: Address) -> str:
    """Return `HOST:PORT`, with brackets around an IPv6 address."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _absolute(text: str, base: Path) -> Path:
    if not text or "\0" in text:
        raise ValueError(text)
    try:
        return Path(os.path.abspath(base / Path(text).expanduser()))
    except RuntimeError as error:  # a home directory that nobody knows
        raise ValueError(text) from error


def _socket_path(text: str, base: Path) -> Path:
    path = _absolute(text, base)
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise ValueError(text)
    return path


ADDRESS = Kind(_ADDRESS_TAKES.format(0), (str,), lambda text, base: parse_address(text))
PATH = Kind("a path", (str,), _absolute)
SOCKET = Kind(
    f"a path of at most {_SOCKET_PATH_BYTES} bytes, which is what a Unix socket's address holds",
    (str,),
    _socket_path,
)


def choice(choices: Sequence[str]) -> Kind:
    def parse(text: str, base: Path) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return Kind(f"one of {', '.join(choices)}", (str,), parse)


def _switch(value: str | bool, base: Path) -> bool:
    if isinstance(value, bool):
        return value
    if value not in _SWITCH_WORDS:
        raise ValueError(value)
    return _SWITCH_WORDS[value]


_SWITCH_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
SWITCH = Kind("true or false", (bool,), _switch)


def _partitions(value: str | list[str], base: Path) -> tuple[Partition, ...]:
    texts = value.replace(",", " ").split() if isinstance(value, str) else value
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(value)
    return parse_partitions(texts)


PARTITIONS = Kind(
    "NAME=DEVICE, again for each partition (in a variable separated by blanks, in TOML a list)",
    (str, list),
    _partitions,
)


def integer(least: int, most: int) -> Kind:
    """Whole numbers within bounds."""

    def parse(value: str | int, base: Path) -> int:
        if isinstance(value, str) and not _DIGITS.fullmatch(value):
            raise ValueError(value)
        number = int(value)
        if not least <= number <= most:
            raise ValueError(value)
        return number

    return Kind(f"a whole number from {least} to {most}", (int,), parse)


def decimal(least: float, most: float) -> Kind:
    """Numbers within bounds."""

    def parse(value: str | float, base: Path) -> float:
        if isinstance(value, str) and not _DECIMAL.fullmatch(value):
            raise ValueError(value)
        number = float(value)
        if not least <= number <= most:  # so a NaN is refused as well
            raise ValueError(value)
        return number

    return Kind(f"a number from {least:g} to {most:g}", (int, float), parse)
