"""Language models over texts that lie in pieces on many devices."""

from __future__ import annotations

from torch import Tensor

from ...ops.distributed.group import Mesh, group_of
from .attention import CausalAttention
from .causal_lm import AffinearForCausalLM
from .model import AffinearModel, AffinearPreTrainedModel


def parallelize(model: AffinearPreTrainedModel, mesh: Mesh) -> AffinearPreTrainedModel:
    """Let a language model work on texts over many ranks, in place; see `affinear.models.parallel.parallelize`."""
    body = model.model if isinstance(model, AffinearForCausalLM) else model
    assert isinstance(body, AffinearModel)
    if body.context is not None:
        raise ValueError("model: expected one that is not parallelized, got one that is; make it anew")
    for name, module in body.named_modules():
        if isinstance(module, CausalAttention) and not module.linear:
            raise ValueError(
                f"model: expected linear layers, whose states travel, but {name} is softmax, which needs every key; "
                "choose softmax_every=0"
            )
    body.context = group_of(mesh)
    return model


def cut(tokens: Tensor, mesh: Mesh) -> Tensor:
    """This rank's piece of tokens (B, N), the same on every rank, as even as can be: a view."""
    group = group_of(mesh)
    rank, size, length = group.rank(), group.size(), tokens.shape[1]
    return tokens[:, length * rank // size : length * (rank + 1) // size]
