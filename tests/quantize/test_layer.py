"""quantize_linear: what it stores decodes to what it promises."""

import pytest
import torch
from expecttest import assert_expected_inline

import trellis_ops
from trellis_ops.quantize import layer, ldlq
from trellis_ops.quantize.regularize import regularize

# Mean squared error of the tail-biting search on N(0, 1) at the best scale, as a share of the
# variance: the figures the format's users know.
GAUSSIAN_MSE = {
    ("mul1", 2): 0.0688,
    ("mul1", 3): 0.01752,
    ("mul1", 4): 0.00447,
    ("mcg", 4): 0.00454,
}


def gaussian(rows: int, columns: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * std


def correlated_rows(count: int, features: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=generator) / features**0.5
    spread = torch.logspace(-1, 1, features)
    return torch.randn(count, features, generator=generator) @ mix * spread


def relative(error: torch.Tensor, whole: torch.Tensor) -> float:
    return float(error.double().square().sum() / whole.double().square().sum())


@pytest.mark.parametrize(("codebook", "bits"), GAUSSIAN_MSE)
def test_white_noise_loses_what_the_codebook_must(codebook, bits):
    weight = gaussian(256, 256)
    made = trellis_ops.quantize_linear(weight, bits, codebook=codebook)
    loss = relative(made.dequantize(torch.float32) - weight, weight)
    assert abs(loss / GAUSSIAN_MSE[codebook, bits] - 1) < 0.03
    # Rotations keep lengths and the channels are alike, so both bases see the same loss.
    assert abs(made.proxy_error / loss - 1) < 0.03


@pytest.mark.parametrize("codebook", trellis_ops.CODEBOOKS)
def test_every_codebook_meets_its_rate(codebook):
    weight = gaussian(128, 128)
    made = trellis_ops.quantize_linear(weight, 5, codebook=codebook)
    loss = relative(made.dequantize(torch.float32) - weight, weight)
    # 2^-10 is the rate-distortion bound; these codebooks stay within a third of it.
    assert 2.0**-10 < loss < 1.5 * 2.0**-10


def test_half_rate():
    weight = gaussian(128, 128)
    made = trellis_ops.quantize_linear(weight, 2.5, codebook="mul1")
    assert made.bits == 2.5 and made.trellis.shape == (8, 8, 40)
    assert 0.03 < relative(made.dequantize(torch.float32) - weight, weight) < 0.037


def test_hessian_lowers_the_error_of_the_output():
    weight, x = gaussian(128, 256), correlated_rows(2048, 256)
    plain = trellis_ops.quantize_linear(weight, 3)
    fed = trellis_ops.quantize_linear(weight, 3, hessian=x.T @ x)
    fresh = correlated_rows(2048, 256)[1024:]

    def output_loss(made):
        return relative(fresh @ (made.dequantize(torch.float32) - weight).T, fresh @ weight.T)

    assert output_loss(fed) < 0.5 * output_loss(plain)
    # The damping is all that sets the proxy apart from the loss on the calibration rows.
    loss = relative(x @ (fed.dequantize(torch.float32) - weight).T, x @ weight.T)
    assert 0.7 < fed.proxy_error / loss < 1.5


def test_hessian_factor_does_not_matter():
    weight, x = gaussian(128, 128), correlated_rows(512, 128)
    one = trellis_ops.quantize_linear(weight, 4, hessian=x.T @ x)
    other = trellis_ops.quantize_linear(weight, 4, hessian=x.T @ x / 512)
    assert torch.equal(one.trellis, other.trellis)


@pytest.mark.parametrize(
    ("out_features", "in_features"), [(300, 200), (128, 72), (1, 1), (257, 129)]
)
def test_padding(out_features, in_features):
    weight, bias = gaussian(out_features, in_features), gaussian(1, out_features)[0]
    made = trellis_ops.quantize_linear(weight, 6, bias=bias)
    assert (made.out_features, made.in_features) == (out_features, in_features)
    assert made.dequantize(torch.float32).shape == weight.shape
    assert relative(made.dequantize(torch.float32) - weight, weight) < 1e-3
    assert torch.equal(made.bias[:out_features], bias.half())


@pytest.mark.parametrize("std", [1e-9, 1e-5, 1.0, 1e4])
def test_any_weight_scale(std):
    weight = gaussian(128, 128, std=std)
    made = trellis_ops.quantize_linear(weight, 4)
    loss = relative(made.dequantize(torch.float32) - weight, weight)
    assert abs(loss / GAUSSIAN_MSE["mul1", 4] - 1) < 0.05


def test_dead_channels_come_back_as_exact_zeros():
    weight = gaussian(256, 256)
    weight[17], weight[:, 200] = 0, 0
    got = trellis_ops.quantize_linear(weight, 4).dequantize(torch.float32)
    assert not got[17].any() and not got[:, 200].any()
    assert relative(got - weight, weight) < 1.05 * GAUSSIAN_MSE["mul1", 4]
    zero = trellis_ops.quantize_linear(torch.zeros(128, 128), 4)
    assert not zero.dequantize(torch.float32).any()


def test_unequal_channels_keep_their_own_precision():
    weight = gaussian(256, 256)
    weight[3] *= 1e-3
    weight[:, 9] *= 100
    got = trellis_ops.quantize_linear(weight, 4).dequantize(torch.float32)
    assert relative(got[3] - weight[3], weight[3]) < 0.02
    assert relative(got[:, 9] - weight[:, 9], weight[:, 9]) < 0.02


def test_repeatable_and_seeded():
    weight = gaussian(128, 128)
    one, same = (trellis_ops.quantize_linear(weight, 3, seed=5) for _ in range(2))
    other = trellis_ops.quantize_linear(weight, 3, seed=6)
    assert torch.equal(one.trellis, same.trellis) and torch.equal(one.suh, same.suh)
    assert not torch.equal(one.suh.sign(), other.suh.sign())


def test_regularised_basis_is_exact():
    """Scales and rotations alone lose nothing: the uncoded target maps back to the weight."""
    weight = gaussian(300, 200).double()
    regular = regularize(weight, seed=3)
    suh, target = regular.at_scale(0.9)
    rotated = trellis_ops.reference.gemm._transform(target.double().T).T * suh.double()[:, None]
    back = trellis_ops.reference.gemm._transform(rotated) * regular.svh.double()
    assert relative(back[:200, :300].T - weight, weight) < 1e-12
    block_rms = target.square().mean(1).unflatten(0, (-1, 128)).mean(1).sqrt()
    torch.testing.assert_close(block_rms, torch.full((2,), 0.9), rtol=2e-3, atol=0)


def test_block_factor_is_the_block_ldl():
    x = correlated_rows(400, 128).double()
    hessian = x.T @ x
    factor = ldlq.block_factor(hessian)
    blocks = factor.unflatten(0, (8, 16)).unflatten(2, (8, 16)).permute(0, 2, 1, 3)
    for i in range(8):
        torch.testing.assert_close(blocks[i, i], torch.eye(16, dtype=torch.float64))
        for j in range(i + 1, 8):
            assert not blocks[i, j].any()
    inverse = torch.linalg.inv(factor)
    middle = (inverse @ hessian @ inverse.T).unflatten(0, (8, 16)).unflatten(2, (8, 16))
    for i in range(8):
        for j in range(8):
            if i != j:
                assert middle[i, :, j].norm() < 1e-9 * hessian.norm()


def test_rank_deficient_hessian():
    weight, x = gaussian(128, 128), correlated_rows(10, 128)
    made = trellis_ops.quantize_linear(weight, 4, hessian=x.T @ x)
    got = made.dequantize(torch.float32)
    assert relative(x @ (got - weight).T, x @ weight.T) < 0.5 * GAUSSIAN_MSE["mul1", 4]


def test_indefinite_hessian_raises():
    with pytest.raises(ValueError, match="hessian is not positive definite"):
        trellis_ops.quantize_linear(gaussian(128, 128), 4, hessian=torch.eye(128) * -1 + 1.1)


def test_sample_is_spread_and_fixed():
    unit = gaussian(256, 512)
    sample = layer._sample(unit)
    assert sample.shape == (64, 256)
    assert torch.equal(sample, layer._sample(unit))


def message(*args, **kwargs) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        trellis_ops.quantize_linear(*args, **kwargs)
    return f"{caught.type.__name__}: {caught.value}"


def test_errors():
    weight = gaussian(128, 128)
    assert_expected_inline(
        message(weight.int(), 4),
        """TypeError: quantize_linear: weight is torch.int32, expected a float Tensor""",
    )
    assert_expected_inline(
        message(weight[0], 4),
        """ValueError: quantize_linear: weight has shape [128], expected [out, in]""",
    )
    assert_expected_inline(
        message(weight * float("nan"), 4),
        """ValueError: quantize_linear: weight has NaN or infinite elements, expected finite ones""",
    )
    assert_expected_inline(
        message(weight, 4, hessian=torch.eye(64)),
        """ValueError: quantize_linear: hessian has shape [64, 64], expected [128, 128]""",
    )
    assert_expected_inline(
        message(weight, 4, bias=torch.zeros(3)),
        """ValueError: quantize_linear: bias has shape [3], expected [128]""",
    )
    assert_expected_inline(
        message(weight, 9),
        """ValueError: bits is 9, expected an integer from 1 to 8, or 1.5, 2.5 or 3.5""",
    )
    assert_expected_inline(
        message(weight, 2.5, codebook="mcg"),
        """ValueError: codebook mcg at 2.5 bits per weight: expected bits in (1, 2, 3, 4, 5, 6, 7, 8)""",
    )
    assert_expected_inline(
        message(weight, 4, codebook="mgc"),
        """ValueError: codebook is 'mgc', expected one of ('3inst', 'mcg', 'mul1', 'sqg_e4m3', 'sqg_fp16')""",
    )
    assert "hessian is not finite or has no positive diagonal" in message(
        weight, 4, hessian=torch.zeros(128, 128)
    )
    assert "weight's largest magnitude is 1e+30" in message(weight * 0 + 1e30, 4)
