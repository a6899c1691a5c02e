"""Prompt tuning, P-tuning and prefix tuning in PEFT's layout.

| what | key | shape |
|---|---|---|
| the vectors in front of a row | `prompt_embeddings` | (n, width) |
| keys and values, layer after layer, keys first | `prompt_embeddings` | (n, 2 · layers · width of keys) |
| a module that is trained whole | `base_model.` and its name in the model | its own |

Where a network makes them in training, the file has what it gives.

Source: the files that PEFT 0.21.2 writes and reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from afina import seams
from afina.adapters.checking import LACKS, NO_PLACE, Problem
from afina.adapters.kinds import Allowed, Config, Found, Kind, Part
from afina.errors import AdapterError
from afina.techniques.front import BeforeRows
from afina.techniques.p_tuning import PTuning, PTuningDelta
from afina.techniques.prefix import PrefixDelta, PrefixTuning, form_of
from afina.techniques.prompt import PromptDelta, PromptTuning

KEY = "prompt_embeddings"
WHOLE = "base_model."
"""What stands before a module's name; other kinds have `base_model.model.` there."""


def allowed(free: frozenset[str]) -> Allowed:
    """What may stand in the configuration of a method that puts something in front of the rows.

    Args:
        free: what one method has more, and what its tensors already contain.
    """
    return Allowed(
        needed=("num_virtual_tokens",),
        types={
            "num_virtual_tokens": (int,),
            "modules_to_save": (list,),
        },
        items={"modules_to_save": str},
        neutral={"num_transformer_submodules": (1, None)},
        free=frozenset({
            "auto_mapping", "base_model_name_or_path", "inference_mode", "num_attention_heads", "num_layers",
            "peft_version", "revision", "runtime_config", "task_type", "token_dim",
        }) | free,
        cures={"num_transformer_submodules": "adapters of encoder-decoder models are not known"},
    )  # fmt: skip


# --- reading ------------------------------------------------------------------------------------------------------


def read_front(
    model: nn.Module,
    config: Config,
    tensors: Mapping[str, Tensor],
    width: int,
    made: Callable[[int, tuple[str, ...]], BeforeRows],
) -> Found:
    """What a file of such a method holds.

    Args:
        model: the base.
        config: of the adapter.
        tensors: of the adapter.
        width: numbers that each place in front should have.
        made: the technique of so many places, with these whole modules beside.
    """
    problems: list[Problem] = []
    count = config["num_virtual_tokens"]
    vectors = tensors.get(KEY)
    if vectors is None:
        problems.append((KEY, LACKS))
    elif tuple(vectors.shape) != (count, width):
        wanted = f"the configuration and the model want {(count, width)}"
        problems.append((KEY, f"shape {tuple(vectors.shape)}, {wanted}"))
    own = dict(model.named_parameters(remove_duplicate=False))
    whole: set[str] = set()
    for key, tensor in tensors.items():
        name = key.removeprefix(WHOLE)
        if key == KEY:
            continue
        if name == key or name not in own:
            problems.append((key, NO_PLACE))
        elif own[name].shape != tensor.shape:
            wanted = f"the model wants {tuple(own[name].shape)}"
            problems.append((key, f"shape {tuple(tensor.shape)}, {wanted}"))
        else:
            whole.add(name.rpartition(".")[0])
    problems += [
        (f"{WHOLE}{name}", LACKS)
        for name in own
        if name.rpartition(".")[0] in whole and f"{WHOLE}{name}" not in tensors
    ]
    return Found(made(count, tuple(sorted(whole))), tensors, problems)


def width_of(model: nn.Module) -> int:
    """Of a vector that stands where an embedding would."""
    return model.get_submodule(seams.input_embedding(model)).get_parameter("weight").shape[1]


# --- writing ------------------------------------------------------------------------------------------------------


def common(part: Part) -> dict[str, Any]:
    """The lines of the configuration that all such methods have."""
    technique: Any = part.technique
    model: Any = part.model
    text = model.config.get_text_config()
    return {
        "num_virtual_tokens": technique.tokens,
        "num_transformer_submodules": 1,
        "num_layers": text.num_hidden_layers,
        "num_attention_heads": text.num_attention_heads,
        "token_dim": width_of(part.model),
    }


def with_whole(vectors: Tensor, part: Part) -> dict[str, Tensor]:
    """The tensors of a file: the vectors, and the modules that train whole, a tied tensor under each of its names."""
    trained = {id(p) for p in part.in_place.values()}
    every = part.model.named_parameters(remove_duplicate=False)
    return {KEY: vectors} | {f"{WHOLE}{name}": p for name, p in every if id(p) in trained}


def fill_front(
    stored: Callable[[Part], dict[str, Tensor]], exact: Callable[[Part], bool]
) -> Callable[[Part, Mapping[str, Tensor]], None]:
    """Gives a part the values of a file; refused where a network makes them, for there is no way back through it."""

    def fill(part: Part, tensors: Mapping[str, Tensor]) -> None:
        if not exact(part):
            raise AdapterError(
                "a network makes these vectors, and an adapter holds what came out of it",
                got=part.technique.key,
                cure="put the adapter onto a fresh model: afina.load_adapter(model, folder)",
            )
        with torch.no_grad():
            for key, target in stored(part).items():
                if not target.is_meta:
                    target.copy_(tensors[key])

    return fill


# --- the three ----------------------------------------------------------------------------------------------------


def _prompt_stored(part: Part) -> dict[str, Tensor]:
    (delta,) = part.deltas.values()
    assert isinstance(delta, PromptDelta)
    return with_whole(delta.weight, part)


def _prompt_config(part: Part) -> dict[str, Any]:
    # How the vectors started does not matter any more, and PEFT would want a tokenizer for a text.
    return {
        **common(part),
        "prompt_tuning_init": "RANDOM",
        "prompt_tuning_init_text": None,
        "tokenizer_kwargs": None,
        "tokenizer_name_or_path": None,
    }


def _read_prompt(model: nn.Module, config: Config, tensors: Mapping[str, Tensor]) -> Found:
    def made(count: int, whole: Sequence[str]) -> PromptTuning:
        return PromptTuning(tokens=count, modules_to_save=tuple(whole))

    return read_front(model, config, tensors, width_of(model), made)


def _network(part: Part) -> PTuningDelta | PrefixDelta:
    (delta,) = part.deltas.values()
    assert isinstance(delta, PTuningDelta | PrefixDelta)
    return delta


def _direct(part: Part) -> bool:
    return _network(part).direct


def _made_stored(part: Part) -> dict[str, Tensor]:
    """What trains itself as it is; else what the network gives, without its dropout."""
    delta = _network(part)
    if delta.direct:
        return with_whole(delta.weight, part)
    mode = delta.training
    delta.eval()
    with torch.no_grad():
        vectors = delta.made()
    delta.train(mode)
    return with_whole(vectors, part)


def _p_tuning_config(part: Part) -> dict[str, Any]:
    technique = part.technique
    assert isinstance(technique, PTuning)
    lstm = technique.network == "lstm"
    return {
        **common(part),
        "encoder_reparameterization_type": "LSTM" if lstm else "MLP",
        "encoder_hidden_size": technique.hidden or width_of(part.model),
        "encoder_num_layers": technique.lstm_layers if lstm else 2,
        "encoder_dropout": technique.dropout if lstm else 0.0,
    }


def _read_p_tuning(model: nn.Module, config: Config, tensors: Mapping[str, Tensor]) -> Found:
    def made(count: int, whole: Sequence[str]) -> PTuning:
        return PTuning(tokens=count, network="none", modules_to_save=tuple(whole))

    return read_front(model, config, tensors, width_of(model), made)


def _prefix_config(part: Part) -> dict[str, Any]:
    technique, delta = part.technique, _network(part)
    assert isinstance(technique, PrefixTuning)
    assert isinstance(delta, PrefixDelta)
    return {
        **common(part),
        "num_layers": delta.form.layers,
        "num_attention_heads": delta.form.heads,
        "token_dim": delta.form.width,
        "encoder_hidden_size": technique.hidden or delta.width,
        "prefix_projection": False,
        "init_weights": None,
    }


def _read_prefix(model: nn.Module, config: Config, tensors: Mapping[str, Tensor]) -> Found:
    def made(count: int, whole: Sequence[str]) -> PrefixTuning:
        return PrefixTuning(tokens=count, start="random", modules_to_save=tuple(whole))

    form = form_of(model)
    return read_front(model, config, tensors, 2 * form.layers * form.width, made)


PROMPT = Kind(
    technique=PromptTuning,
    peft_type="PROMPT_TUNING",
    allowed=allowed(
        frozenset({
            "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_kwargs", "tokenizer_name_or_path",
        })
    ),
    config=_prompt_config,
    stored=_prompt_stored,
    fill=fill_front(_prompt_stored, lambda part: True),
    read=_read_prompt,
)  # fmt: skip

P_TUNING = Kind(
    technique=PTuning,
    peft_type="P_TUNING",
    allowed=allowed(
        frozenset({
            "encoder_reparameterization_type", "encoder_hidden_size", "encoder_num_layers", "encoder_dropout",
        })
    ),
    config=_p_tuning_config,
    stored=_made_stored,
    fill=fill_front(_made_stored, _direct),
    read=_read_p_tuning,
    exact=_direct,
)  # fmt: skip

PREFIX_KIND = Kind(
    technique=PrefixTuning,
    peft_type="PREFIX_TUNING",
    allowed=allowed(frozenset({"encoder_hidden_size", "prefix_projection", "init_weights"})),
    config=_prefix_config,
    stored=_made_stored,
    fill=fill_front(_made_stored, _direct),
    read=_read_prefix,
    exact=_direct,
)
