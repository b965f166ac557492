"""Maps brought to one size."""

import pytest
import torch
from torch.nn import functional as F

from affinear.models.heads.parts import by_products, enlarge


@pytest.mark.parametrize("factor", [(1, 2), (2, 2), (4, 8), (16, 1)])
def test_products_along_each_side_are_bilinear_enlargement(factor: tuple[int, int]) -> None:
    height, width = (int(torch.randint(1, 9, ())) for _ in range(2))
    x = torch.randn(2, 5, height, width, dtype=torch.float64, requires_grad=True)
    size = (height * factor[0], width * factor[1])
    expected = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    torch.testing.assert_close(by_products(x, size), expected, rtol=0, atol=1e-12)
    wanted = torch.randn_like(expected)
    (found,) = torch.autograd.grad(by_products(x, size), x, wanted)
    (gradient,) = torch.autograd.grad(expected, x, wanted)
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12)


def test_products_keep_the_dtype_under_autocast() -> None:
    x = torch.randn(1, 3, 4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        large = by_products(x, (8, 24))
    torch.testing.assert_close(large, enlarge(x, (8, 24)))


def test_a_map_of_the_size_asked_for_is_left_alone() -> None:
    x = torch.randn(1, 3, 4, 6)
    assert enlarge(x, (4, 6)) is x
