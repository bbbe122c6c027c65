"""What errors tell a user to type installs into the environment that runs."""

import os
import sys
from pathlib import Path

import pytest

from dataplane.installing import pip_install


def test_the_interpreter_that_runs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/somewhere/else/python")
    assert pip_install("gpu") == "/somewhere/else/python -m pip install -e '.[gpu]'"


def test_one_in_this_folder_is_named_as_the_readme_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", os.path.join(os.getcwd(), ".venv/bin/python"))
    assert pip_install("cuda13,gpu") == ".venv/bin/python -m pip install -e '.[cuda13,gpu]'"
