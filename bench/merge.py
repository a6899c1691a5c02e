"""A merged model beside its base: is any overhead left? And what does the adapter cost while it is not merged?

    python bench/merge.py --quick                        # a minute: about how fast
    python bench/merge.py --json merge.json              # five windows of each
    python bench/merge.py --model FOLDER --rank 64 --threads 4

One process holds the base, the base with a LoRA on all its linears, and the model that `afina.merge` makes of the two.
They take turns, window by window, so that what the machine does meanwhile meets all three. Two works: *prefill* reads
a batch of rows in one pass, *decode* answers one prompt token by token. The figures are medians of the windows, in
tokens a second, and stand beside the base's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Sizes:
    """How much is run.

    Attributes:
        rows, tokens: of a prefill's batch.
        answer: tokens of a decode.
        windows: of each model and work; one more comes first and is not counted.
    """

    rows: int
    tokens: int
    answer: int
    windows: int


FULL = Sizes(rows=8, tokens=128, answer=64, windows=5)
QUICK = Sizes(rows=2, tokens=64, answer=16, windows=3)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status, 0."""
    options = parse(arguments)
    sys.path.insert(0, str(ROOT))
    import torch

    from bench.kit.pieces import only_one
    from bench.kit.report import table, write_figures

    torch.set_num_threads(options.threads)
    sizes = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(dir=options.work) as folder, only_one():
        models = build(options.model, options.rank, Path(folder))
        figures = measured(models, sizes, Path(options.model).name)
    print(table(figures))
    if options.json:
        write_figures(options.json, figures)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A merged model beside its base.")
    parser.add_argument("--quick", action="store_true", help="smaller windows, three of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--model", default="smollm2-135m", help="the base, as afina.load takes it")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--work", type=Path, help="where the merged model lies meanwhile")
    return parser.parse_args(arguments)


def build(name: str, rank: int, folder: Path) -> dict[str, Any]:
    """The three models in fp32: `base`, `unmerged` and `merged`."""
    import torch

    import afina
    from afina.adapters import files

    unmerged, tokenizer = afina.load(name, dtype="fp32", device="cpu")
    edit = afina.apply(unmerged, [afina.LoRA(rank=rank)])
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in edit.trainable().items():
            if key.endswith(".b"):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 1e-3)
    files.save(edit, folder / "adapter", base=name, tokenizer=tokenizer)
    settings = afina.MergeSettings(dtype="fp32", verify=False)
    afina.merge(folder / "adapter", folder / "merged", settings=settings)
    base, _ = afina.load(name, dtype="fp32", device="cpu")
    (folder / "merged" / "merge.json").unlink()  # it would warn that nobody compared the answers
    merged, _ = afina.load(folder / "merged", dtype="fp32", device="cpu")
    return {"base": base, "unmerged": unmerged.eval(), "merged": merged}


def measured(models: dict[str, Any], sizes: Sizes, work: str) -> list[Any]:
    """The figures of all works: merged and unmerged, each beside the base."""
    from bench.kit.report import Figure

    figures = []
    for metric, run, tokens in works(models["base"], sizes):
        speeds = of_each(models, run, tokens, sizes.windows)
        figures += [
            Figure("merge", work, name, metric, "tokens/s", speeds[name], "base", speeds["base"])
            for name in ("merged", "unmerged")
        ]
    return figures


Run = Callable[[Any], object]


def works(base: Any, sizes: Sizes) -> Sequence[tuple[str, Run, int]]:
    """(name, what is run on a model, tokens of it)."""
    import torch

    draw = torch.Generator().manual_seed(1)
    most = base.config.vocab_size
    ids_BT = torch.randint(0, most, (sizes.rows, sizes.tokens), generator=draw)

    def prefill(model: Any) -> object:
        return model(input_ids=ids_BT, use_cache=False, logits_to_keep=1)

    def decode(model: Any) -> object:
        prompt = ids_BT[:1, :16]
        lengths = {"min_new_tokens": sizes.answer, "max_new_tokens": sizes.answer}
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, do_sample=False, **lengths)

    return (
        ("prefill", prefill, sizes.rows * sizes.tokens),
        ("decode", decode, sizes.answer),
    )


def of_each(models: dict[str, Any], run: Run, tokens: int, windows: int) -> dict[str, float]:
    """Median speed of each model in tokens a second, the models taking turns."""
    import torch

    from bench.kit.turns import interleaved

    with torch.inference_mode():
        found = interleaved({name: partial(run, model) for name, model in models.items()}, windows)
    return {name: tokens / seconds for name, seconds in found.items()}


if __name__ == "__main__":
    sys.exit(main())
