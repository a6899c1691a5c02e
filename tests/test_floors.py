"""The floors hold, and the check that says so can see when they do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINT = Path(sys.executable).with_name("lint-imports")
RUFF = Path(sys.executable).with_name("ruff")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its rules, to be spoilt."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def floors(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's verdict on the package in `root`/src, not on the one that is installed."""
    return subprocess.run(
        [LINT, "--no-cache", root / "pyproject.toml"],
        cwd=root,
        env={"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def banned(root: Path) -> str:
    """What ruff says of banned modules in `root`, one place a line."""
    command = [
        RUFF,
        "check",
        "--select",
        "TID251",
        "--output-format",
        "concise",
        "--no-cache",
        "src",
    ]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout


def test_floors_hold(copy: Path) -> None:
    verdict = floors(copy)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    assert "0 broken" in verdict.stdout


@pytest.mark.parametrize(
    ("file", "line", "chain"),
    [
        ("tree/edit.py", "import afina.table", "afina.tree.edit -> afina.table"),
        ("techniques/lora.py", "import afina.models", "afina.techniques.lora -> afina.models"),
        ("errors.py", "import afina.types", "afina.errors -> afina.types"),
    ],
    ids=["upward", "sideways", "sideways at the bottom"],
)
def test_a_planted_import_is_caught(copy: Path, file: str, line: str, chain: str) -> None:
    spoilt = copy / "src/afina" / file
    spoilt.write_text(f"{spoilt.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    verdict = floors(copy)
    assert verdict.returncode == 1, verdict.stdout + verdict.stderr
    assert chain in verdict.stdout


def test_a_room_on_no_floor_is_caught(copy: Path) -> None:
    (copy / "src/afina/shed.py").write_text('"""A room that nobody placed."""\n', encoding="utf-8")
    verdict = floors(copy)
    assert verdict.returncode == 1, verdict.stdout + verdict.stderr
    assert "afina.shed" in verdict.stdout


def test_every_room_is_a_package() -> None:
    """A folder without `__init__.py` would be invisible to the floors, and missing from the wheel."""
    package = ROOT / "src/afina"
    rooms = {file.parent for file in package.rglob("*.py")}
    assert {
        str(room.relative_to(package)) for room in rooms if not (room / "__init__.py").exists()
    } == set()


def test_nothing_banned_is_used(copy: Path) -> None:
    assert "TID251" not in banned(copy)


@pytest.mark.parametrize(
    "line", ["import pickle", "import torch.distributed", "import torch\ntorch.load('weights')"]
)
def test_a_planted_ban_is_caught_outside_parallel_only_for_processes(copy: Path, line: str) -> None:
    spoilt = copy / "src/afina/errors.py"
    spoilt.write_text(f"{spoilt.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    assert "src/afina/errors.py" in banned(copy)


def test_parallel_may_talk_to_other_processes(copy: Path) -> None:
    room = copy / "src/afina/parallel"
    room.mkdir(exist_ok=True)
    (room / "planted.py").write_text("import torch.distributed\n", encoding="utf-8")
    assert "TID251" not in banned(copy)
