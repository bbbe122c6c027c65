"""`--partition NAME=DEVICE`, read without asking a device."""

import pytest
from fake_nvml import CARD, INSTANCE

from dataplane.errors import UsageError
from dataplane.partitions import DeviceKind, Partition, parse_partition, parse_partitions

MIG = INSTANCE.format(3)


@pytest.mark.parametrize(
    ("text", "kind", "device"),
    [
        ("a=0", DeviceKind.INDEX, "0"),
        ("a=007", DeviceKind.INDEX, "7"),
        (f"a={CARD}", DeviceKind.CARD, CARD),
        (f"a={CARD.lower()}", DeviceKind.CARD, CARD),
        (f"a={CARD.upper()}", DeviceKind.CARD, CARD),
        (f"a={MIG}", DeviceKind.INSTANCE, MIG),
        (f"a=MIG-{CARD}/1/0", DeviceKind.INSTANCE, f"MIG-{CARD}/1/0"),
        (f"a=mig-{CARD.lower()}/1/0", DeviceKind.INSTANCE, f"MIG-{CARD}/1/0"),
    ],
)
def test_each_form_of_a_device_is_read(text: str, kind: DeviceKind, device: str) -> None:
    assert parse_partition(text) == Partition("a", kind, device)


def test_it_is_written_as_it_is_read() -> None:
    assert str(parse_partition(f"blue.1-x={MIG}")) == f"blue.1-x={MIG}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it takes NAME=DEVICE"),
        ("blue", "it takes NAME=DEVICE, where DEVICE is an index (0)"),
        ("=0", "a name has 1 to 64 letters"),
        ("-a=0", "begins with a letter or a digit"),
        ("a b=0", "a name has 1 to 64 letters"),
        ("a" * 65 + "=0", "a name has 1 to 64 letters"),
        ("a=", "the device is to be an index (0), a card's UUID"),
        ("a=1000", "the device is to be"),
        ("a=-1", "the device is to be"),
        ("a=cuda", "`dataplane doctor` lists them"),
        ("a=0=1", "the device is to be"),
        (f"a={CARD[:-1]}", "whole"),
        (f"a={CARD}\n", "whole"),
        (f"a={CARD[4:]}", "whole"),
        ("a=0,1", "a partition has one device; give --partition once for each"),
        ("a=0:3", "a MIG instance is named by its UUID"),
        ("a=0/8", "at most 7 on a card"),
    ],
)
def test_what_is_something_else_is_refused_in_words(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_partition(text)
    assert str(caught.value).startswith(f"--partition {text!r}: ")
    assert why in str(caught.value)


def test_several_are_read_in_their_order() -> None:
    assert [str(one) for one in parse_partitions(["b=1", "a=0"])] == ["b=1", "a=0"]
    assert parse_partitions([]) == ()


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ("a=1", "there is a partition a already (a=0)"),
        ("b=00", "that device is partition a's already"),
    ],
)
def test_no_two_share_a_name_or_a_device(second: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_partitions(["a=0", second])
    assert why in str(caught.value)
