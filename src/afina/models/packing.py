"""Quantising a model's weights one by one while they are read, so that it is never in memory whole.

Transformers lets a quantiser take each weight as it comes from its file. Ours hands it to whoever chose the weights and
packs them, and leaves no trace in the model: what is packed is so by its own type, not by the model's configuration.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import AfinaError, ConfigError
from ..ops.packed import PackedWeight

METHOD = "afina"
"""The name under which Transformers finds the quantiser."""


class Packer(Protocol):
    """Who says which weights are packed, and packs them: an `afina.Quantize`."""

    def weights(self, model: nn.Module) -> Collection[str]:
        """Names of the weights of a model, which may be on the meta device."""
        ...

    def packed(self, weight: Tensor, name: str) -> nn.Parameter:
        """What takes the place of one of them."""
        ...


def check_packer(packer: object) -> None:
    """Raises for what is none.

    Raises:
        ConfigError: see above.
    """
    if packer is not None and not (hasattr(packer, "weights") and hasattr(packer, "packed")):
        raise ConfigError(
            "quantize is no technique that quantises",
            got=repr(packer)[:80],
            wanted="afina.Quantize(), which is nf4, or afina.Quantize(kind='int8')",
        )


class Packing:
    """One load: what `from_pretrained` must be given, and what went wrong inside of it.

    Attributes:
        failed: the first error of ours; Transformers keeps only its text.
    """

    def __init__(self, packer: Packer, device: torch.device) -> None:
        self.packer, self.device = packer, device
        self.failed: AfinaError | None = None
        self._names: frozenset[str] = frozenset()

    def settings(self) -> Any:
        """The `quantization_config` of `from_pretrained`."""
        made, _ = _classes()
        return made(self)

    def choose(self, model: nn.Module) -> None:
        """Learns the names, from the model without its weights."""
        try:
            self._names = frozenset(self.packer.weights(model))
        except AfinaError as error:
            self.failed = error
            raise

    def takes(self, name: str) -> bool:
        """Whether the weight of that name is packed."""
        return name in self._names

    def pack(self, weight: Tensor, name: str) -> nn.Parameter:
        """The packed weight, on the device where the model will be."""
        try:
            return self.packer.packed(weight.to(self.device), name)
        except AfinaError as error:
            self.failed = self.failed or error
            raise

    @staticmethod
    def clean(model: Any) -> None:
        """Takes Transformers' marks of a quantised model off, and lets go of the file.

        Tensors that were not packed may lie in the file as it is mapped into memory; they get memory of their own, for
        one of them alone would hold all that was read of it.
        """
        for parameter in model.parameters():
            if not isinstance(parameter, PackedWeight):
                parameter.data = parameter.data.clone()
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            if name in vars(model):
                delattr(model, name)
        for module in model.modules():
            config = getattr(module, "config", None)
            for name in ("quantization_config", "_is_quantized"):
                if config is not None and name in vars(config):
                    delattr(config, name)


def unpacked_bytes(model: nn.Module) -> int:
    """What the model's packed weights take when they are computed back and kept."""
    packed = [p for p in model.parameters() if isinstance(p, PackedWeight)]
    return sum(p.numel() * p.element_size() for p in packed)


def unpack(model: nn.Module) -> None:
    """Computes the packed weights back for good: the same answers, as fast as the base gives them, for its memory.

    Products that were of another type than the weight's become products of its own.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, PackedWeight):
                setattr(module, name, nn.Parameter(parameter.unpacked(), requires_grad=False))


@cache
def _classes() -> tuple[Any, Any]:
    """The classes that Transformers wants, made and made known to it once."""
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers.auto import register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class Settings(QuantizationConfigMixin):
        def __init__(self, packing: Packing) -> None:
            self.quant_method: Any = METHOD
            self.packing = packing

        def to_dict(self) -> dict[str, Any]:
            return {"quant_method": METHOD}

    class Pack(ConversionOps):
        def __init__(self, packing: Packing) -> None:
            self.packing = packing

        def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            whole = {n: v[0] if isinstance(v, list) else v for n, v in input_dict.items()}
            return {name: self.packing.pack(value, name) for name, value in whole.items()}

    @register_quantizer(METHOD)
    class Quantizer(HfQuantizer):
        def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
            super().__init__(quantization_config, **kwargs)
            self.packing: Packing = quantization_config.packing

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            self.packing.choose(model)
            return model

        def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
            return self.packing.takes(param_name)

        def get_quantize_ops(self) -> Any:
            return Pack(self.packing)

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return True

    return Settings, Quantizer
