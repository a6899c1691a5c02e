"""What a model's head does to the final hidden states, so that its loss can be had without all of its logits.

Models differ here: some scale their logits (Cohere, Granite), some cap them (Gemma 2), a technique may have changed the
head. The form is read off the configuration and then checked against the model itself on a few tokens. A head that
does not compute what its form says keeps its logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from afina import seams
from afina.ops.loss import Part, linear_cross_entropy
from afina.ops.prefix import knowing
from afina.tree import front_of

WITHIN = 2e-2
"""Relative difference of logits, at most, in half precision; that of fp32 is far below, that of a wrong form above."""


@dataclass(frozen=True)
class Head:
    """logits = cap(scale · hidden · weightᵀ + bias).

    Attributes:
        trunk: the model without its head; gives the final hidden states.
        linear: the head.
        scale: factor of the products.
        softcap: bound of the logits, approached softly; None for none.
    """

    trunk: nn.Module
    linear: nn.Module
    scale: float
    softcap: float | None

    def losses(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Minus the log-probability of each target (N,), in fp32 or wider."""
        bias_V = getattr(self.linear, "bias", None)
        return linear_cross_entropy(
            hidden_ND,
            self.linear.get_parameter("weight"),
            targets_N,
            # The bias is scaled with the products, as in `logits`.
            bias_V=bias_V,
            scale=self.scale,
            softcap=self.softcap,
            part=_part(self.linear),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """The same as logits (…, V)."""
        logits = self.linear(hidden) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@torch.no_grad()
def head_of(model: nn.Module) -> Head | None:
    """The head's form; None where none was found that computes what the model computes."""
    speaker: Any = model
    site = seams.head(model)
    trunk = getattr(model, "base_model", None)
    if seams.classifies(model) is not None:
        return None  # what lies between trunk and classifier (pooling, dropout) is the model's own
    if site.module is None or trunk is None or trunk is model or not _is_plain(site.module):
        return None
    # Whoever set a hook on the whole model waits for it to be called.
    if model._forward_hooks or model._forward_pre_hooks:
        return None
    config = speaker.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = float(scale) / float(getattr(config, "logits_scaling", None) or 1.0)
    head = Head(trunk, site.module, scale, getattr(config, "final_logit_softcapping", None))
    return head if _agrees(model, head) else None


def _is_plain(module: nn.Module) -> bool:
    """Whether the head is a linear that nothing acts beside; one that processes share out puts its parts together."""
    weight = getattr(module, "weight", None)
    hooks = len(module._forward_hooks) - (_part(module) is not None)
    alone = not list(module.children()) and not hooks
    return alone and isinstance(weight, nn.Parameter) and weight.is_floating_point()


def _part(module: nn.Module) -> Part | None:
    """Which part of the head is here; None where it is whole."""
    found = getattr(module, seams.PART, None)
    return found if isinstance(found, Part) else None


def _agrees(model: nn.Module, head: Head) -> bool:
    speaker: Any = model
    training, implementation = model.training, speaker.config._attn_implementation
    device = head.linear.get_parameter("weight").device
    vocabulary = head.linear.get_parameter("weight").shape[0]
    ids_BT = torch.arange(1, 6, device=device)[None] * 7 % vocabulary
    try:
        model.eval()
        # Attention by rows wants its context, which these few tokens have not. What acts in front of a row may act in
        # attention too.
        speaker.set_attn_implementation(knowing("eager") if front_of(model) else "eager")
        whole = speaker(input_ids=ids_BT, use_cache=False).logits
        trunk: Any = head.trunk
        mine = head.logits(trunk(input_ids=ids_BT, use_cache=False).last_hidden_state)
    finally:
        model.train(training)
        speaker.set_attn_implementation(implementation)
    if whole.shape != mine.shape:
        return False
    wide = torch.promote_types(whole.dtype, torch.float32)
    apart = (whole.to(wide) - mine.to(wide)).norm()
    within = WITHIN if whole.dtype in (torch.bfloat16, torch.float16) else 1e-4
    return bool(apart <= within * whole.to(wide).norm())
