"""Causal language models around linear attention, citizens of transformers: `import affinear.models.language`."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache import AffinearCache
from .causal_lm import AffinearForCausalLM
from .config import AffinearConfig
from .loss import chunked_cross_entropy
from .model import AffinearModel
from .presets import preset, presets
from .stepper import Stepper
from .streaming import read, stream

AutoConfig.register(AffinearConfig.model_type, AffinearConfig, exist_ok=True)
AutoModel.register(AffinearConfig, AffinearModel, exist_ok=True)
AutoModelForCausalLM.register(AffinearConfig, AffinearForCausalLM, exist_ok=True)

__all__ = [
    "AffinearCache",
    "AffinearConfig",
    "AffinearForCausalLM",
    "AffinearModel",
    "Stepper",
    "chunked_cross_entropy",
    "preset",
    "presets",
    "read",
    "stream",
]
