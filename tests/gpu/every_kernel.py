"""Run every kernel once, on few tokens of an odd width, and print the names of those that ran.

For tools that watch a whole process, such as compute-sanitizer.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from typing import Any

import torch

import affinear as af
from affinear.ops import add_norm, rotary_1d
from affinear.ops import triton as kernels
from affinear.ops.depthwise import depthwise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def discover() -> dict[str, Any]:
    """Every kernel of the library, by its file and name."""
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            function = getattr(value, "fn", None)
            if name.endswith("_kernel") and function and function.__module__ == module.name:
                found[f"{module.name.removeprefix(f'{kernels.__name__}.')}.{name}"] = value
    return found


def watch(found: dict[str, Any], ran: set[str]) -> None:
    """Note the names of kernels that run."""
    names = {id(kernel): name for name, kernel in found.items()}
    for kind in {type(kernel) for kernel in found.values()}:
        run = kind.run

        def noted(self: Any, *args: Any, run: Any = run, **kwargs: Any) -> Any:
            ran.add(names.get(id(self), "?"))
            return run(self, *args, **kwargs)

        kind.run = noted


def main(length: int) -> None:
    """Full attention in one launch and in several, causal attention with a past, decoding; forwards and backwards."""
    found, ran = discover(), set[str]()
    watch(found, ran)

    def tokens(heads: int, width: int) -> torch.Tensor:
        return torch.randn(2, length, heads, width, device=DEVICE, dtype=torch.float16, requires_grad=True)

    query, key, value = tokens(2, 40), tokens(1, 40), tokens(1, 24)
    options: dict[str, Any] = {"rotary": rotary_1d(length, 40, device=DEVICE), "backend": "triton"}
    mask = torch.rand(2, length, device=DEVICE) > 0.2
    few: Any = [x[:, :50] for x in (query, key, value)]
    af.attention(
        *few, key_mask=mask[:, :50], rotary=rotary_1d(50, 40, device=DEVICE), backend="triton"
    ).sum().backward()
    af.attention(query, key, value, key_mask=mask, **options).sum().backward()
    state = af.summarize(key, value, key_mask=mask, **options)
    af.attend(query, state, **options).sum().backward()
    state = state.map(torch.Tensor.detach)
    out, state = af.attention(query, key, value, causal=True, initial_state=state, return_state=True, **options)
    out.sum().backward()
    doubled: Any = [
        torch.randn(2, length, 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    options["rotary"] = rotary_1d(length, 64, device=DEVICE)
    af.attention(*doubled, mechanism="nala_released", **options).sum().backward()
    image = torch.randn(2, 9, 9, 64, device=DEVICE, requires_grad=True)
    weight = torch.randn(64, 1, 3, 3, device=DEVICE, requires_grad=True)
    depthwise(image, weight, weight[:, 0, 0, 0], itself=True, backend="triton").sum().backward()
    total, normed = add_norm(image, image, weight[:, 0, 0, 0], weight[:, 0, 0, 1], backend="triton")
    (total + normed).sum().backward()
    options["rotary"] = rotary_1d(1, 40, device=DEVICE)
    with torch.no_grad():
        one: Any = (x[:, :1] for x in (query, key, value))
        af.attention(*one, causal=True, initial_state=state, return_state=True, **options)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"kernels": sorted(found), "ran": sorted(ran)}))  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]))
