"""Fixtures that several test files share: daemons as processes of their own, on either engine, and
what a machine may lack.

Daemons run on the packet pump. The tests that are marked `both_engines` run on the reference too,
aioquic alone, and `--engine=aioquic` runs all that start daemons on it (`make test-reference`), but
what is marked `pump_only`.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_programs
import pytest
from bundles import IMAGE, TOKENIZER
from daemon_process import ENGINES, Chosen, DaemonProcess, daemon_process
from device_pair import DevicePair, StartPair
from host_gpu import Library

from dataplane import model, pack
from dataplane.client import connect
from dataplane.load import Load
from dataplane.model import ModelError, ModelFiles
from dataplane.pack import Order, Parts

StartDaemon = Callable[..., DaemonProcess]

# NumPy's linear algebra, which nothing here needs, starts a thread a processor in each process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine", choices=list(ENGINES), default="pump", help="what daemons run their packets on"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = metafunc.config.getoption("--engine")
    if chosen == "pump" and metafunc.definition.get_closest_marker("both_engines"):
        metafunc.parametrize("daemon_engine", list(ENGINES), indirect=True, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On the reference nothing is run that starts no daemon: it was run already."""
    if config.getoption("--engine") == "pump":
        return
    kept = [item for item in items if _starts_daemons(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _starts_daemons(item: pytest.Item) -> bool:
    names = vars(item.getparent(pytest.Module).module)  # type: ignore[union-attr]
    starts = "StartDaemon" in names or "DaemonProcess" in names
    return starts and not item.get_closest_marker("pump_only")


@pytest.fixture(scope="module", autouse=True)
def daemon_engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """What daemons run their packets on; fixtures of a file that start one ask for it."""
    name = getattr(request, "param", request.config.getoption("--engine"))
    before, Chosen.engine = Chosen.engine, name
    yield name
    Chosen.engine = before


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StartDaemon]:
    """Start daemons: `daemon("--runtime=echo", "--slots=4")`.

    Each has to end with status 0 and to leave no process, no socket file and no shared memory.
    """
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> DaemonProcess:
            return stack.enter_context(daemon_process(tmp_path, *arguments))

        yield start


@pytest.fixture(scope="module")
def bare_daemon(
    tmp_path_factory: pytest.TempPathFactory, daemon_engine: str
) -> Iterator[DaemonProcess]:
    """One daemon without a runtime for all tests of a file; whoever attaches to it detaches."""
    directory = tmp_path_factory.mktemp("daemon")
    with daemon_process(directory, "--runtime=none", "--idle-timeout=20") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place for one identity; making its keys is the slow part."""
    return tmp_path_factory.mktemp("identity")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The kernels, and a driver for them, on host threads."""
    if shutil.which(gpu_programs.cxx()) is None:
        pytest.skip("no C++ compiler here")
    return Library(gpu_programs.build_library(tmp_path_factory.mktemp("gpu")))


@pytest.fixture
def device_pair(library: Library, state_dir: Path) -> StartPair:
    """Start pairs whose slots lie in a device: `device_pair(slots=1)`."""

    def start(**options: Any) -> DevicePair:
        made = DevicePair(library, state_dir, **options)
        made.connect()
        return made

    return start


@pytest.fixture(scope="module")
def model_files() -> ModelFiles:
    """The small real model's."""
    try:
        return model.locate()
    except ModelError as error:
        pytest.skip(f"no model: {error}")


@pytest.fixture
def tiny_weights(tmp_path: Path) -> Path:
    """A file that stands for a model's weights."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 8192)
    return path


@pytest.fixture
def tiny_runtime(tiny_weights: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have a runtime that may be packed, with a file of every sort; its name."""

    def recipe(order: Order, say: Callable[[str], None]) -> Parts:
        return Parts(
            "Tiny", 100, stop_ids=(2, 7), chat_template="{{ messages }}", tokenizer=TOKENIZER,
            kernels=IMAGE, weights=tiny_weights, weights_source="here",
            targets=("sm_90", "compute_80"),
        )  # fmt: skip

    monkeypatch.setattr(pack, "RECIPES", {**pack.RECIPES, "tiny": recipe})
    monkeypatch.setattr(pack, "_WITH_WEIGHTS", ("tiny",))
    return "tiny"


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Have PyTorch compute in one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["pump", "aioquic"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have clients and loads of this process run on each engine in turn; its name."""
    for made in (connect, Load.__init__):
        defaults = made.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "pump", request.param == "pump")
    name: str = request.param
    return name
