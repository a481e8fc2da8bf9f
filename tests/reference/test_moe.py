"""The formulas of the experts' reference that no other test reaches alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from experts import ACTIVATIONS

from trellis_ops import reference


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_of_the_activations(name):
    """Against autograd, with limits and without."""
    gate, up = (torch.randn(500, dtype=torch.float64) * 3 for _ in range(2))
    gate[:3] = torch.tensor([0.0, -30.0, 30.0])
    code = ACTIVATIONS.index(name)
    grad = torch.randn(500, dtype=torch.float64)
    for limit, after in itertools.product((0.0, 1.5), (False, True)):
        inputs = [t.clone().requires_grad_() for t in (gate, up)]
        y = reference.moe.activate(*inputs, code, limit, after)
        want = torch.autograd.grad(y, inputs, grad, allow_unused=True)
        got = reference.moe.activation_grad(grad, gate, up, code, limit, after)
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12)
