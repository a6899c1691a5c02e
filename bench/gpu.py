"""Do CPU and GPU agree? Runs the tests marked `gpu`; where there is no CUDA device it says so and ends well.

    python bench/gpu.py [--quick] [--json FILE]

`--quick` changes nothing here (the tests take seconds); every script of bench/ takes it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 when all agree or there is nothing to ask."""
    parser = argparse.ArgumentParser(description="Do CPU and GPU agree?")
    parser.add_argument("--quick", action="store_true", help="accepted, and changes nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)

    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was run, and what afina does on a GPU stays unverified")
        return write_rows(options.json, [])
    device = torch.cuda.get_device_name()
    print(f"on {device}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junit-xml={report}", "tests"],
            cwd=ROOT,
            check=False,
        ).returncode
        rows = [figure(device, *counts(report))]
    write_rows(options.json, rows)
    return status


def counts(report: Path) -> tuple[int, int]:
    """(passed, run) of a JUnit report; a skipped test was not run."""
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None, f"{report} holds no test suite"
    tests, skipped, failed = (
        int(suite.get(name, "0")) for name in ("tests", "skipped", "failures")
    )
    run = tests - skipped
    return run - failed - int(suite.get("errors", "0")), run


def figure(device: str, passed: int, run: int) -> dict[str, Any]:
    """One row in the form of every script of bench/: the tests that agreed, beside all that ran."""
    return {
        "bench": "gpu",
        "work": "tests marked gpu",
        "setting": device,
        "metric": "passed",
        "unit": "tests",
        "value": passed,
        "peer": "run",
        "peer_value": run,
        "ratio": passed / run if run else None,
    }


def write_rows(file: Path | None, rows: list[dict[str, Any]]) -> int:
    """Writes the rows where they were asked for, whole or not at all."""
    if file is not None:
        draft = file.with_name(file.name + ".tmp")
        draft.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        draft.replace(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
