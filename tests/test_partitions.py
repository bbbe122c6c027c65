"""`--partition NAME=DEVICE`: how it is read, and held against the devices that there are."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import CARD, INSTANCE, OTHER_CARD, FakeNvml, card

from dataplane.config import add_flags, load
from dataplane.errors import UsageError
from dataplane.gpus import look
from dataplane.partitions import (
    DeviceKind,
    Partition,
    check_devices,
    parse_partition,
    parse_partitions,
)

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


def test_there_are_at_most_64() -> None:
    texts = [f"p{number}={number}" for number in range(65)]
    assert len(parse_partitions(texts[:64])) == 64
    with pytest.raises(UsageError, match="--partition: there are 65; at most 64 can be"):
        parse_partitions(texts)


# The devices that there are.


SPLIT = card(OTHER_CARD, mig="on", instances=range(7))


def refusal(texts: list[str], *cards: Any) -> str:
    with pytest.raises(UsageError) as caught:
        check_devices(parse_partitions(texts), look(FakeNvml(*cards)))
    return str(caught.value)


@pytest.mark.parametrize(
    "texts",
    [
        ["a=0"],
        [f"a={CARD}"],
        [f"a={CARD}", f"b={INSTANCE.format(0)}", f"c={INSTANCE.format(6)}"],
        [f"a=MIG-{OTHER_CARD}/7/0"],
    ],
)
def test_devices_that_are_there_are_taken(texts: list[str]) -> None:
    check_devices(parse_partitions(texts), look(FakeNvml(card(), SPLIT)))


def test_two_names_of_one_card_are_one_device() -> None:
    told = refusal(["a=0", f"b={CARD}"], card(), SPLIT)
    assert "that is the device of partition a (a=0) by another name" in told
    assert told.startswith(f"--partition 'b={CARD}'")


def test_a_device_that_is_not_there_is_told_with_those_that_are() -> None:
    assert f"there are: card 0 (NVIDIA H200, {CARD})" in refusal(["a=1"], card())
    assert f"there are: card 0 (NVIDIA H200, {CARD})" in refusal([f"a={OTHER_CARD}"], card())


def test_a_card_that_is_split_is_not_taken_whole() -> None:
    told = refusal(["a=1"], card(), SPLIT)
    assert f"card 1 (NVIDIA H200, {OTHER_CARD}) is split" in told
    assert INSTANCE.format(3) in told
    assert "it has none yet" in refusal(["a=0"], card(mig="on"))


def test_an_eighth_instance_is_told_that_seven_are_the_most() -> None:
    texts = [f"p{place}={INSTANCE.format(place)}" for place in range(8)]
    told = refusal(texts, card(), SPLIT)
    assert told.startswith(f"--partition '{texts[7]}'")
    assert "there is no such MIG instance" in told
    assert "has 7 of at most 7" in told
    assert "no card here is split" in refusal(texts[:1], card())


def test_an_index_counts_as_the_devices_are_listed() -> None:
    [partition] = parse_partitions(["a=1"])
    assert partition.environ() == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


# The settings.


def test_partitions_come_from_every_source(tmp_path: Path) -> None:
    tenants = str(tmp_path / "tenants.toml")
    file = tmp_path / "dataplane.toml"
    file.write_text(f'partition = ["a=0", "b=1"]\ntenants = "{tenants}"\n')
    wanted = ["a=0", "b=1"]
    flags = {"state_dir": str(tmp_path), "tenants": tenants}
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = vars(parser.parse_args(["--partition", "a=0", "--partition=b=1"]))
    for config in (
        load({**flags, "partition": given["partition"]}, {}),
        load(flags, {"DATAPLANE_PARTITION": "a=0  b=1"}),
        load({"state_dir": str(tmp_path), "config": str(file)}, {}),
    ):
        assert [str(one) for one in config.partition] == wanted
        assert config.tenants == Path(tenants)


@pytest.mark.parametrize(
    ("flags", "environ", "why"),
    [
        ({"partition": "a=0 b=1"}, {}, "the partitions a, b need --tenants FILE"),
        ({"partition": "a=0", "runtime": "null"}, {}, "--runtime null is none"),
        ({"partition": "a"}, {}, "--partition 'a': it takes NAME=DEVICE"),
        ({}, {"DATAPLANE_PARTITION": "a"}, "DATAPLANE_PARTITION: --partition 'a': it takes"),
        ({"partition": ""}, {}, "'' is not allowed; it takes NAME=DEVICE"),
    ],
)
def test_partitions_that_cannot_be_are_refused(
    tmp_path: Path, flags: dict[str, str | None], environ: dict[str, str], why: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load({"state_dir": str(tmp_path), **flags}, environ)
    assert why in str(caught.value)


def test_a_partition_in_a_file_is_a_list_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "dataplane.toml"
    file.write_text("partition = [1]\n")
    with pytest.raises(UsageError, match=r":partition: \[1\] is not allowed"):
        load({"state_dir": str(tmp_path), "config": str(file)}, {})
