"""What becomes of a daemon whose bundled runtime ended before it ever was ready."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.attachment import Place
from dataplane.ingress import Ingress
from dataplane.partitions import parse_partition
from dataplane.served import Served
from dataplane.stats import Stats


def served(runtime: str, partitions: Sequence[str]) -> Served:
    name, *_ = partitions
    config: Any = SimpleNamespace(runtime=runtime)
    attachments: Any = SimpleNamespace(places={each: Place(each) for each in partitions})
    partition = None if name == "default" else parse_partition(f"{name}=0")
    nobody: Any = None
    return Served(
        config, Ingress(Stats(), 5.0, name=name), partition, attachments, nobody, nobody,
        lambda: None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("runtime", "partitions", "status"),
    [
        ("echo", ["default"], 1),
        ("smollm2", ["default"], 1),
        ("smollm2", ["a"], 1),
        ("smollm2-torch", ["default"], 2),  # a package that is missing is a wrong command line
        ("cuda-echo", ["a"], 2),
    ],
)
def test_what_will_fail_again_ends_the_daemon(
    runtime: str, partitions: list[str], status: int
) -> None:
    one = served(runtime, partitions)
    assert not one._ended_early(status)
    assert one.is_settled
    assert f"{runtime}" in str(one.error)
    assert f"ended with status {status} before it was ready" in str(one.error)


def test_what_was_ready_once_is_started_again_whatever_it_says() -> None:
    one = served("echo", ["default"])
    one.is_settled = True
    assert one._ended_early(7)
    assert one.error is None
    assert "the runtime echo ended with status 7" in one.ingress.why_unavailable


@pytest.mark.parametrize(
    ("runtime", "partitions", "status"),
    [
        ("cuda-echo", ["default"], 1),
        ("smollm2-torch", ["default"], -9),
        ("cuda-echo", ["a"], 1),
        ("echo", ["a", "b"], 1),
        ("cuda-echo", ["a", "b"], 2),
    ],
)
def test_what_may_recover_is_started_again_with_503_meanwhile(
    runtime: str, partitions: list[str], status: int
) -> None:
    one = served(runtime, partitions)
    assert one._ended_early(status)
    assert one.is_settled
    assert one.error is None
    assert "it is started again, and the log says why" in one.ingress.why_unavailable
    assert ("in partition a" in one.ingress.why_unavailable) is (partitions[0] == "a")
