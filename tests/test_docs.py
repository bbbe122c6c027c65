"""The documentation names what there is: every setting, page and command."""

import re
from pathlib import Path

from dataplane.config import SETTINGS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_setting_stands_in_the_readme_with_its_default() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| `--")]
    documented = set(re.findall(r"`(--[a-z-]+)", "\n".join(rows)))
    assert documented == {setting.flag for setting in SETTINGS}
    for setting in SETTINGS:
        row = next(
            line for line in rows if f"`{setting.flag} " in line or f"`{setting.flag}`" in line
        )
        if isinstance(setting.default, int | float):
            assert f"| {setting.default:g} |" in row


def test_every_file_that_the_readme_links_to_is_there() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert "tests/examples/echo.py" in targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_the_c_example_has_the_length_that_the_readme_says() -> None:
    said = re.search(r"echo\.c\), (\d+) lines", README)
    assert said
    text = (ROOT / "tests/examples/echo.c").read_text(encoding="utf-8")
    assert int(said[1]) == len(text.splitlines())
