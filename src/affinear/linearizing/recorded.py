"""The swap in transformers' own files: `save_pretrained` writes it into config.json, `from_pretrained` does it again.

transformers lets a package change a network between its making and the loading of its weights, for those that are saved
in another form than they are trained in: a quantizer, named in the configuration. Ours changes the attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .choices import Choices
from .in_transformers import NAME
from .report import Report, checked_names

METHOD = "affinear"


class Linearized(QuantizationConfigMixin):
    """What config.json says of the swap: the choices, and the names of the layers that are linear.

    Args:
        choices: As `Choices.as_dict` gives them.
        layers: Names.

    Raises:
        ValueError: If a file says something that cannot be.
    """

    def __init__(
        self, choices: Mapping[str, Any] | None = None, layers: list[str] | None = None, **unknown: Any
    ) -> None:
        unknown.pop("quant_method", None)
        if unknown:
            raise ValueError(f"quantization_config: affinear knows choices and layers, got {', '.join(unknown)}")
        self.quant_method = METHOD  # pyright: ignore[reportAttributeAccessIssue]
        self.choices = Choices.from_dict(choices or {}).as_dict()
        self.layers = checked_names(layers or [], "quantization_config")


class Swapper(HfQuantizer):
    """Linearizes a network that transformers has just made, before it gets its weights."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        from .swap import apply

        said = self.quantization_config
        assert isinstance(said, Linearized)
        apply(model, Choices.from_dict(said.choices), said.layers)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        # Its weights are as good as any: nothing that is closed to quantized networks is closed to it.
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.is_quantized = False  # pyright: ignore[reportArgumentType]
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """It can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """It can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """It can be compiled."""
        return True


def register() -> None:
    """Make the swap known to transformers."""
    register_quantization_config(METHOD)(Linearized)
    register_quantizer(METHOD)(Swapper)


def check_free(model: PreTrainedModel) -> None:
    """Raise ValueError if a configuration has no place for the swap."""
    held = getattr(model.config, "quantization_config", None)
    if held is not None and not isinstance(held, Linearized):
        raise ValueError(
            "model: expected one that is not quantized, as its configuration has one place for either; linearize first"
        )


def note(model: PreTrainedModel, report: Report) -> None:
    """Write the swap into the configuration, and choose our attention there."""
    check_free(model)
    names = [layer.name for layer in report.swapped]
    model.config.quantization_config = Linearized(report.choices.as_dict(), names)
    model.set_attn_implementation(NAME)
