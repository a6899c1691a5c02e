"""The settings that several rooms share: training, evaluation, generation. Each is a frozen value, declared once.

Units are in the names (rows, tokens, steps). `ONE_OF` names the settings that say the same thing in two ways; at most
one of each tuple may be given, and a later layer of configuration that gives one takes away the other of one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from afina.problems import Frozen

Count = Annotated[int, Field(ge=1)]
"""A number of things, at least one."""

NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["fp32", "bf16", "fp16", "fp64"]
Metric = Literal["loss", "exact_match", "accuracy"]


class Settings(Frozen):
    """A frozen value that refuses settings it does not know; of those that exclude each other, it takes one."""

    ONE_OF: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _at_most_one(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        for names in cls.ONE_OF:
            given = [name for name in names if values.get(name) is not None]
            if len(given) > 1:
                raise ValueError(
                    f"{' and '.join(given)} say the same thing twice: give one of them"
                )
        return values


class TrainSettings(Settings):
    """How a run trains: its length, its step, its optimiser, and what it keeps.

    The learning rate is for adapters: about ten times what full fine-tuning takes ("LoRA Without Regret", Thinking
    Machines 2025, and Tinker's `hyperparam_utils.py`, which fixes the factor at 10). Full fine-tuning takes about 2e-5
    for 1 to 8 billion parameters and 1e-4 for 135 million, so adapters take 2e-4 to 1e-3; the default lies between,
    within a factor of 2.5 of both ends. Full fine-tuning should set a tenth of it.
    """

    ONE_OF = (
        ("steps", "epochs"),
        ("rows_per_step", "tokens_per_step"),
        ("micro_rows", "micro_tokens"),
        ("warmup_steps", "warmup_ratio"),
    )

    steps: Count | None = Field(default=None, description="optimiser steps in the run")
    epochs: Positive | None = Field(
        default=None, description="passes over the data; 1 when steps is not given either"
    )
    rows_per_step: Count | None = Field(
        default=None,
        description="rows of one optimiser step; 16 when tokens_per_step is not given either",
    )
    tokens_per_step: Count | None = Field(
        default=None, description="real tokens of one optimiser step"
    )
    micro_rows: Count | Literal["auto"] | None = Field(
        default=None, description="rows of one forward pass; auto finds what fits"
    )
    micro_tokens: Count | Literal["auto"] | None = Field(
        default=None, description="tokens of one forward pass; auto finds what fits"
    )
    lr: Positive = Field(default=5e-4, description="peak learning rate")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="the learning rate after warm-up"
    )
    schedule_by: Literal["steps", "tokens"] = Field(
        default="steps",
        description="what the rate falls with after warm-up: the steps made, or the tokens shown, for runs whose early "
        "steps have fewer of them",
    )
    warmup_steps: NotNegative | None = Field(default=None, description="steps of linear warm-up")
    warmup_ratio: Fraction | None = Field(
        default=None,
        description="warm-up as a share of the run; 0.03 when warmup_steps is not given either",
    )
    optimizer: str = Field(default="adamw", description="a class of torch.optim, by name")
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="share of each weight taken off, times the learning rate"
    )
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.999), description="AdamW's running means"
    )
    eps: Positive = Field(default=1e-8, description="AdamW's guard against dividing by zero")
    clip: Positive | None = Field(
        default=1.0, description="largest norm of the whole gradient; null: none"
    )
    seed: NotNegative = Field(
        default=0, description="of the data order, the adapter's values and dropout"
    )
    eval_every: Count | None = Field(
        default=None, description="steps between evaluations; null: at the end"
    )
    save_every: Count | None = Field(
        default=100, description="steps between checkpoints; null: at the end"
    )
    keep_last: Count | None = Field(
        default=2, description="checkpoints kept beside the best; null: all"
    )
    save_async: bool = Field(
        default=False,
        description="write checkpoints while training goes on, from a copy in memory of what they hold",
    )
    early_stopping: Count | None = Field(
        default=None,
        description="evaluations without a better score before the run stops; null: never",
    )
    best: Metric = Field(
        default="loss", description="the validation score that chooses the best checkpoint"
    )
    dtype: Dtype | None = Field(default=None, description="of the frozen weights; null: by device")
    device: str | None = Field(
        default=None, description="cpu, cuda, cuda:1 …; null: the best there is"
    )
    threads: Count | None = Field(
        default=None, description="CPU threads of torch; null: torch's own choice"
    )
    compile: bool | Literal["auto"] = Field(
        default="auto",
        description="run the model's blocks as compiled graphs; auto: on a CPU, where the run is long enough to pay",
    )
    attention: Literal["auto", "triton", "flash"] = Field(
        default="auto",
        description="what computes attention in training; triton: afina's own kernels, flash: the package flash-attn, "
        "both unverified on a GPU so far",
    )
    kernels: bool = Field(
        default=True,
        description="train with afina's kernels in C++ where the CPU multiplies bf16 itself (AMX, AVX512-BF16), "
        "or without",
    )
    recompute: bool | Count | Literal["selective"] = Field(
        default=False,
        description="compute blocks again in backward instead of keeping what they hold: all, every n-th, or "
        "(selective) all but their matrix products",
    )
    offload_activations: bool = Field(
        default=False,
        description="keep what backward needs in the host's memory meanwhile, for steps that do not fit on a GPU; "
        "unverified on a GPU so far",
    )
    step_in_backward: bool = Field(
        default=False,
        description="move each tensor inside the backward pass and drop its gradient, for full fine-tuning in less "
        "memory; wants clip: null",
    )
    cache_inputs_gib: Positive | None = Field(
        default=None,
        description="where only upper blocks train: keep what enters them on the disk, in at most so many GiB, so that "
        "the blocks below run in the first epoch alone; null: no",
    )
    on_nan: Literal["stop", "skip"] = Field(
        default="stop",
        description="at a loss or gradient that is not finite: end the run, or leave the step out",
    )
    tensorboard: bool = Field(default=False, description="also write TensorBoard events")

    @model_validator(mode="before")
    @classmethod
    def _fill_choices(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give every either-or its default, so that a value read later is never None on both sides."""
        micro = "micro_tokens" if values.get("tokens_per_step") is not None else "micro_rows"
        filled = dict(values)
        for names, name, default in (
            (cls.ONE_OF[0], "epochs", 1.0),
            (cls.ONE_OF[1], "rows_per_step", 16),
            (cls.ONE_OF[2], micro, "auto"),
            (cls.ONE_OF[3], "warmup_ratio", 0.03),
        ):
            if all(values.get(other) is None for other in names):
                filled[name] = default
        return filled

    @model_validator(mode="after")
    def _micro_within_step(self) -> TrainSettings:
        for kind in ("rows", "tokens"):
            micro, step = getattr(self, f"micro_{kind}"), getattr(self, f"{kind}_per_step")
            if isinstance(micro, int) and step is not None and micro > step:
                raise ValueError(
                    f"micro_{kind} ({micro}) is a part of a step, so at most {kind}_per_step ({step})"
                )
        return self

    @model_validator(mode="after")
    def _schedule_by_what(self) -> TrainSettings:
        if self.schedule_by == "tokens" and self.schedule == "constant":
            raise ValueError(
                "schedule_by: tokens would do nothing, for a constant rate does not fall: leave schedule_by out, or "
                "set schedule to linear or cosine"
            )
        return self

    @model_validator(mode="after")
    def _offload_what_is_saved(self) -> TrainSettings:
        if self.offload_activations and (self.compile is True or self.recompute == "selective"):
            name = "compile: true" if self.compile is True else "recompute: selective"
            raise ValueError(
                f"offload_activations moves what autograd saves, and {name} keeps it elsewhere: leave one of the two "
                "out (recompute: true goes with it)"
            )
        return self

    @model_validator(mode="after")
    def _gradients_one_by_one(self) -> TrainSettings:
        if self.step_in_backward and self.clip is not None:
            raise ValueError(
                f"step_in_backward moves tensors before the norm of the whole gradient is known, so clip ({self.clip}) "
                "cannot be kept: set clip to null, or leave step_in_backward out"
            )
        if self.step_in_backward and self.on_nan == "skip":
            raise ValueError(
                "step_in_backward moves tensors before the whole gradient is known to be finite, so such a step cannot "
                "be left out: leave on_nan out (it is then stop), or step_in_backward"
            )
        return self


class ParallelSettings(Settings):
    """How a run is spread over several processes. What is left of them beside tensor and pipeline sees different rows.

    Attributes are degrees: processes = pipeline * replicate * (rows are shared out over) * tensor.
    """

    zero: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="what processes with different rows share out instead of holding it whole: nothing, the "
        "optimiser's state, also gradients, also weights",
    )
    replicate: Count = Field(
        default=1, description="groups that each hold one shared-out copy; 1 shares over all"
    )
    tensor: Count = Field(default=1, description="processes that share each weight matrix")
    pipeline: Count = Field(default=1, description="processes that share the blocks")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        default="1f1b", description="in which order a pipeline runs its micro-batches"
    )
    split: tuple[Count, ...] | None = Field(
        default=None,
        description="blocks of each stage of the pipeline, in order; null shares them out evenly, by the time that "
        "they take. Process n runs stages n, n + pipeline and so on",
    )
    offload: bool = Field(
        default=False, description="with zero=3 on a GPU: weights and optimiser stay in the CPU"
    )
    devices: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description="devices of one process that share the blocks, as cuda:0, cuda:1; the first has all else too, and "
        "is where the run computes. A model that no device holds is loaded with train.device=cpu",
    )
    timeout_s: Count = Field(
        default=600, description="seconds after which a process that waits for another gives up"
    )

    @model_validator(mode="after")
    def _devices_of_one_process(self) -> ParallelSettings:
        if self.devices and (self.pipeline, self.tensor, self.zero) != (1, 1, 0):
            raise ValueError(
                "devices share the blocks out within one process, and pipeline, tensor and zero between several: leave "
                "one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _split_into_stages(self) -> ParallelSettings:
        if self.split is None:
            return self
        each, rest = divmod(len(self.split), self.pipeline)
        if self.pipeline == 1:
            raise ValueError(
                "split would do nothing: there is no pipeline; set pipeline, or leave it out"
            )
        if rest or not each:
            raise ValueError(
                f"split has {len(self.split)} stages for pipeline {self.pipeline}: one for each process, or as many "
                "for each"
            )
        if self.schedule in ("gpipe", "1f1b") and each > 1:
            raise ValueError(
                f"split has {each} stages a process, and {self.schedule} runs one: take schedule=interleaved or "
                f"zero_bubble, or {self.pipeline} stages"
            )
        if self.schedule == "interleaved" and each == 1:
            raise ValueError(
                "split has one stage a process, and interleaved runs several: give twice as many, or take "
                "schedule=1f1b"
            )
        return self

    @model_validator(mode="after")
    def _offload_what_is_shared(self) -> ParallelSettings:
        if self.offload and self.zero != 3:
            raise ValueError(
                f"offload moves the weights that zero=3 shares out, and zero is {self.zero}: set zero to 3, or leave "
                "offload out"
            )
        return self


class GenerateSettings(Settings):
    """How text is generated. Temperature 0 is greedy: the likeliest token, always."""

    max_new_tokens: Count = Field(default=256, description="most tokens of one answer")
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="0: always the likeliest token; 1: as the model says"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="sample from the likeliest tokens that hold this much probability"
    )
    top_k: NotNegative = Field(
        default=0, description="sample from this many likeliest tokens; 0: from all"
    )
    seed: NotNegative = Field(default=0, description="of the sampling")
    system: str | None = Field(default=None, description="system prompt; null: none")
    batch_rows: Count = Field(default=8, description="prompts answered at once")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="texts that end an answer, beside the model's own stop tokens"
    )


class EvalSettings(Settings):
    """What an evaluation measures.

    Loss and perplexity always; exact match when `generate` is on; accuracy when the rows or `choices` give the answers
    to choose among.
    """

    generate: bool = Field(default=True, description="answer each prompt, for exact match")
    max_rows: Count | None = Field(default=None, description="only the first rows; null: all")
    batch_rows: Count = Field(default=8, description="rows of one forward pass when measuring loss")
    choices: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="the answers to choose among, for accuracy"
    )
    fields: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description="fields of a JSON answer scored on their own, such as intent or slots.city",
    )
    answers: GenerateSettings = Field(
        default=GenerateSettings(), description="how the answers are generated"
    )
