"""Do CPU and GPU agree, and how fast is afina there? Where there is no CUDA device it says so and ends well.

    python bench/gpu.py [--quick] [--json FILE]

First the tests marked `gpu` run, which compare each operation with its reference. Then the operations are timed in bf16
beside PyTorch's and those of installed tools (see `bench/kit/on_gpu.py`), all taking turns; `--quick` has few sizes.
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
    parser.add_argument("--quick", action="store_true", help="fewer sizes, fewer repetitions")
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
        rows = [figure(device, *counts(report)), *speeds(quick=options.quick)]
    write_rows(options.json, rows)
    return status


def speeds(*, quick: bool) -> list[dict[str, Any]]:
    """Rows of the operations' time and memory, which are printed too."""
    sys.path.insert(0, str(ROOT))
    import torch

    from bench import ops
    from bench.kit.on_gpu import figures, left_out
    from bench.kit.report import table

    sizes = ops.Sizes((512,), 1024, 5) if quick else ops.Sizes((128, 512, 2048, 8192), 8192, 11)
    found = list(figures("cuda", torch.bfloat16, sizes, 2048 if quick else 16_384))
    print(table(found))
    for line in left_out("cuda"):
        print(line)
    return [each.row() for each in found]


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
