"""From a file's bytes to its text, or to what the file really is: names lie, first bytes seldom do."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from afina.errors import DataError, counted

GZIP = b"\x1f\x8b"

MAGIC: dict[bytes, tuple[str, str]] = {
    b"PK\x03\x04": ("a zip archive", "unpack it, and name the file inside"),
    b"PK\x05\x06": ("an empty zip archive", "look for the data elsewhere"),
    b"PAR1": ("Parquet", "name it .parquet"),
    b"ARROW1": ("an Arrow file", "save the table as Parquet"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it: zstd -d FILE"),
    b"BZh": ("compressed with bzip2", "unpack it: bunzip2 FILE"),
    b"\xfd7zXZ": ("compressed with xz", "unpack it: unxz FILE"),
    b"7z\xbc\xaf": ("a 7-Zip archive", "unpack it, and name the file inside"),
    b"GGUF": ("a GGUF model", "the model comes first, then the data: afina train MODEL DATA"),
    b"SQLite format 3": ("an SQLite database", "export the table as CSV"),
    b"%PDF": ("a PDF", "save its text as .txt"),
    b"\x89PNG": ("an image", "afina trains on text"),
    b"\xff\xd8\xff": ("an image", "afina trains on text"),
    b"\x80\x04": ("a pickle, which can run code and is never read", "save it as .jsonl"),
    b"\x80\x05": ("a pickle, which can run code and is never read", "save it as .jsonl"),
}
"""First bytes -> what such a file is, and what to do with it."""

_MARKS = (  # the longer first: the mark of UTF-32 begins with that of UTF-16
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_SAMPLE = 4096


def text_of(path: Path) -> str:
    r"""The file as text with "\n" or "\r\n" at the ends of lines; gunzipped where it is gzip, whatever its name.

    UTF-8 with or without a byte-order mark, or UTF-16 or UTF-32 with one. A file whose only line ends are "\r" has
    "\n" instead.

    Raises:
        DataError: it cannot be read, is no text, or is in another encoding.
    """
    raw = _bytes(path)
    refuse_binary(path, raw)
    encoding = next((name for mark, name in _MARKS if raw.startswith(mark)), "utf-8-sig")
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise _undecodable(path, raw, encoding, error) from error
    return text if "\n" in text else text.replace("\r", "\n")


def _bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read",
            got=error.strerror or error,
            wanted="a file that this user may read",
        ) from error
    if not raw.startswith(GZIP):
        return raw
    import gzip

    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read",
            got=f"damaged gzip: {error}",
            wanted="a whole gzip file",
            cure="copy or download it again",
        ) from error


def what_is(path: Path, raw: bytes) -> tuple[str, str] | None:
    """What the first bytes say a file is, and what to do; None for text and for what is not known."""
    found = next((said for mark, said in MAGIC.items() if raw.startswith(mark)), None)
    if found and found[0] == "a zip archive":
        return _archive(path)
    if raw[8:10] == b'{"' and b"data_offsets" in raw[:_SAMPLE]:
        return "safetensors weights", "the model comes first, then the data: afina train MODEL DATA"
    return found


def _archive(path: Path) -> tuple[str, str]:
    what, cure = MAGIC[b"PK\x03\x04"]
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return what, cure
    if "xl/workbook.xml" in names:
        return "an Excel workbook", "save the sheet as CSV (UTF-8)"
    return f"{what} of {', '.join(names[:3])}{', …' if len(names) > 3 else ''}", cure


def refuse_binary(path: Path, raw: bytes) -> None:
    """Raises for bytes that are no text: another kind of file, or UTF-16 without its mark.

    Raises:
        DataError: saying what it looks like.
    """
    found = what_is(path, raw)
    if found:
        raise DataError(
            f"{path}: this is {found[0]}, not text", got=f"first bytes {raw[:8]!r}", cure=found[1]
        )
    marked = any(raw.startswith(mark) for mark, _ in _MARKS)
    sample = raw[:_SAMPLE]
    nuls = sample.count(0)
    if marked or nuls * 20 < len(sample) or not nuls:
        return
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    if min(even, odd) * 10 < max(even, odd) and nuls * 5 > len(sample):
        name = "UTF-16LE" if odd > even else "UTF-16BE"
        raise DataError(
            f"{path}: this looks like {name} without its byte-order mark",
            got=f"{counted(nuls, 'NUL byte')} among the first {len(sample)}",
            wanted="UTF-8 text",
            cure=f"iconv -f {name} -t UTF-8 {path} > fixed{path.suffix}",
        )
    raise DataError(
        f"{path}: this is binary, not text",
        got=f"{counted(nuls, 'NUL byte')} among the first {len(sample)}; it begins {raw[:16]!r}",
        wanted="UTF-8 text",
        cure="a file that was being written when the machine stopped can be all NULs: write it again"
        if nuls == len(sample)
        else "check that this is the right file",
    )


def _undecodable(path: Path, raw: bytes, encoding: str, error: UnicodeDecodeError) -> DataError:
    line = raw[: error.start].count(b"\n") + 1
    name = encoding.removesuffix("-sig").upper()
    if encoding != "utf-8-sig":
        cure = f"the file may be cut short: write it again, best as UTF-8 (it begins with the mark of {name})"
    else:
        cure = (
            "if it is Windows-1252 or Latin-1: "
            f"iconv -f WINDOWS-1252 -t UTF-8 {path} > fixed{path.suffix}"
        )
    return DataError(
        f"{path}:{line}: not {name}",
        got=f"byte 0x{raw[error.start]:02x} at offset {error.start}",
        wanted="UTF-8 text",
        cure=cure,
    )
