"""The Triton kernels, on a GPU or interpreted, against references that share no code with them."""

import struct
from collections import deque

import mpmath as mp
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from farthing.noise import lattice
from farthing.noise.lattice import SeededStream
from farthing.queries import correlated
from farthing.torch.gradients import convolution, outers
from farthing.torch.gradients.terms import Factor, Route, RowTerms
from farthing.torch.kernels import gradient_tiles, grams, lattice_noise, layer_sums
from farthing.torch.kernels import lattice_noise as updates
from farthing.torch.kernels import noise as noise_pool

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
KEY = bytes(range(32))


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """Triton's interpreter counts loops by arrays of one number, which new versions of numpy refuse.

    And it multiplies the bits of bfloat16 numbers, not the numbers.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wide(part):
        narrow = part.dtype.scalar == tl.bfloat16
        return (part.data.astype(np.uint32) << 16).view(np.float32) if narrow else part.data

    def dot(self, a, b, c, input_precision, max_num_imprecise_acc):
        found = np.matmul(wide(a), wide(b), dtype=c.data.dtype) + c.data
        return interpreter.TensorHandle(found, c.dtype.scalar)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang_tensor", mended)
        patches.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield


def keystream(key, counter, nonce, blocks):
    return (
        Cipher(algorithms.ChaCha20(key, struct.pack("<I", counter) + nonce), None)
        .encryptor()
        .update(bytes(64 * blocks))
    )


def words_of(key, size):
    """The word of every sample, in order, by another ChaCha20."""
    programs = -(-size // (8 * lattice_noise.LANES))
    words = np.frombuffer(keystream(key, 0, bytes(12), programs * lattice_noise.LANES), "<u8")
    return words.reshape(programs, lattice_noise.LANES, 8).transpose(0, 2, 1).reshape(-1)[:size]


def drawn(key, size, bits):
    cells, places = lattice_noise.gaussian(key, size, bits, DEVICE)
    count, *places = places.tolist()
    assert count <= len(places)
    return cells.cpu().numpy().astype(np.int64), sorted(places[:count])


def test_the_block_function_is_that_of_rfc_8439():
    nonce = bytes.fromhex("000000090000004a00000000")  # section 2.3.2
    block = lattice_noise.blocks(KEY, 1, nonce, 1, DEVICE).cpu().numpy().tobytes()
    assert block.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@pytest.mark.parametrize(("counter", "seed"), [(0, 1), (7, 2), (2**32 - 8, 3)])
def test_blocks_are_those_of_another_implementation(counter, seed):
    random = np.random.default_rng(seed)
    key, nonce = random.bytes(32), random.bytes(12)
    found = lattice_noise.blocks(key, counter, nonce, 8, DEVICE).cpu().numpy().tobytes()
    assert found == keystream(key, counter, nonce, 8)


def test_places_tell_their_words():
    words = words_of(KEY, 5000)
    for place in (0, 1, lattice_noise.LANES - 1, lattice_noise.LANES, 8 * lattice_noise.LANES, 4999):
        assert noise_pool._word(KEY, *lattice_noise.block_of(place)) == words[place]


@pytest.mark.parametrize("bits", [20, 26, 27, 40])
def test_samples_are_exact(bits):
    """Every sample is that of its word in exact arithmetic, or is left open."""
    size = 3000
    cells, places = drawn(KEY, size, bits)
    words = words_of(KEY, size).view(np.int64)
    wanted = lattice._cells(SeededStream(0), lattice._HALF_NORMAL, words & (2**63 - 1), bits)
    wanted = np.where(words < 0, -wanted, wanted)
    assert set(np.flatnonzero(cells != wanted)) <= set(places)
    assert len(places) <= size * 2.0 ** (bits - 46)  # 2^(bits - 49) · E|Z| · 2 are expected
    settled = noise_pool.settle(SeededStream(0), KEY, places, bits, lattice_noise.block_of)
    assert (settled == wanted[places]).all()


def test_what_is_open_is_decided():
    noise, places = lattice_noise.gaussian(KEY, 3000, 40, DEVICE)
    assert int(places[0]) > 0
    noise_pool.decide(noise, places.cpu(), SeededStream(0), KEY, 40, lattice_noise.block_of)
    words = words_of(KEY, 3000).view(np.int64)
    wanted = lattice._cells(SeededStream(0), lattice._HALF_NORMAL, words & (2**63 - 1), 40)
    assert (noise.cpu().numpy() == np.where(words < 0, -wanted, wanted)).all()
    with pytest.raises(ArithmeticError, match="7 roundings are open where at most 2"):
        noise_pool.decide(noise, torch.tensor([7, 1, 2]), SeededStream(0), KEY, 40, lattice_noise.block_of)


def test_noise_may_take_the_place_of_used_noise():
    noise, _ = lattice_noise.gaussian(KEY, 700, 20, DEVICE)
    first = noise.clone()
    again, _ = lattice_noise.gaussian(bytes(32), 700, 20, DEVICE, noise)
    assert again is noise
    assert not torch.equal(first, again)
    assert lattice_noise.gaussian(KEY, 700, 30, DEVICE, noise)[0].dtype == torch.int64  # which does not fit


def test_at_many_bits_some_are_open_and_noted_once():
    cells, places = drawn(KEY, 4096, 40)
    assert 1 <= len(places) == len(set(places))
    assert max(places) < 4096
    assert cells.dtype == np.int64


@triton.jit
def quantile_kernel(odd, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    x, _ = lattice_noise._half_normal(tl.load(odd + place).to(tl.uint64, bitcast=True))
    tl.store(out + place, x)


def quantiles(words):
    """The kernel's own quantile, of words without sign."""
    odd = torch.from_numpy((2 * words.astype(np.uint64) + 1).view(np.int64)).to(DEVICE)
    out = torch.empty(len(words), dtype=torch.float64, device=DEVICE)
    quantile_kernel[(1,)](odd, out, SIZE=len(words))
    return out.cpu().numpy()


def exact_quantile(word):
    with mp.workdps(40):
        u = mp.mpf(2 * word + 1) / 2**64
        if u > 0.2:
            return mp.sqrt(2) * mp.erfinv(1 - u)
        x = mp.sqrt(-2 * mp.log(u))
        while True:
            tail = mp.erfc(x / mp.sqrt(2))
            step = mp.log(tail / u) * tail / (mp.sqrt(2 / mp.pi) * mp.exp(-x * x / 2))
            x += step
            if abs(step) < x * mp.mpf(10) ** -30:
                return x


def test_the_quantile_keeps_to_less_than_half_of_its_error():
    random = np.random.default_rng(5)
    words = np.concatenate(
        [
            random.integers(0, 2**63, 700),
            (2.0 ** random.uniform(0, 63, 800)).astype(np.int64),  # tails
            2**63 - 1 - (2.0 ** random.uniform(0, 62, 500)).astype(np.int64),  # near zero
            np.arange(44),
            [2**63 - 1, 2**63 - 2, int(0.2 * 2**63), int(0.2 * 2**63) + 1],
        ]
    )
    assert len(words) == 2048
    found = quantiles(words)
    worst = max(abs(mp.mpf(float(x)) / exact_quantile(int(w)) - 1) for x, w in zip(found, words, strict=True))
    assert worst < lattice_noise.ERROR / 2


def test_a_release_rounds_adds_and_scales():
    draw = torch.Generator(DEVICE).manual_seed(3)
    total = torch.randn(2500, generator=draw, device=DEVICE)
    added = torch.randint(-(2**23), 2**23, (2500,), generator=draw, device=DEVICE)
    scale = torch.rand(2500, generator=draw, device=DEVICE) + 0.1
    cell = 1.37 * 2.0**-22
    for each in (None, scale):
        units = 1.0 if each is None else each.double()
        wanted = (torch.round(total.double() / units / cell) + added) * cell * units
        found = lattice_noise.release(total, added, each, cell)
        assert found.dtype == torch.float32
        assert torch.allclose(found.double(), wanted, rtol=2.0**-23, atol=2 * cell)


def test_a_release_of_what_is_not_finite_is_bounded():
    total = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38], device=DEVICE)
    found = lattice_noise.release(total, torch.zeros(4, dtype=torch.int32, device=DEVICE), None, 2.0**-20)
    assert found.tolist() == [0.0, 2.0**32, -(2.0**32), 2.0**32]


def reference(delta, a, limit):
    gradients = torch.einsum("bto,bti->boi", delta.double(), a.double())
    return torch.minimum(torch.maximum(gradients, -limit.double()), limit.double()).sum(0)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (9, 1, 70, 90), (33, 1, 16, 200), (3, 5, 70, 20), (2, 40, 5, 90)]
)
@pytest.mark.parametrize("matrix", [False, True])
def test_clamped_sums(shape, matrix):
    batch, length, rows, columns = shape
    draw = torch.Generator(DEVICE).manual_seed(4)
    delta = torch.randn(batch, length, rows, generator=draw, device=DEVICE)
    a = torch.randn(batch, length, columns, generator=draw, device=DEVICE)
    limits = torch.rand(rows, columns, generator=draw, device=DEVICE) + 0.01
    limit = limits if matrix else torch.tensor(0.7, device=DEVICE)
    found = (
        layer_sums.clamped_outer(delta[:, 0], a[:, 0], limit)
        if length == 1
        else layer_sums.clamped_dots(delta, a, limit)
    )
    assert torch.allclose(found.double(), reference(delta, a, limit), rtol=1e-5, atol=1e-6 * batch)


@pytest.mark.parametrize("vector", [False, True])
def test_clamped_rows(vector):
    draw = torch.Generator(DEVICE).manual_seed(6)
    rows = torch.randn(41, 300, generator=draw, device=DEVICE)
    limit = torch.rand(300, generator=draw, device=DEVICE) if vector else torch.tensor(0.7, device=DEVICE)
    wanted = torch.minimum(torch.maximum(rows.double(), -limit.double()), limit.double()).sum(0)
    assert torch.allclose(layer_sums.clamped_rows(rows, limit).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
def test_what_overflows_is_bounded():
    delta, a = torch.full((3, 2, 4), 1e30, device=DEVICE), torch.full((3, 2, 5), 1e30, device=DEVICE)
    a[0, 1] *= -1  # ∞ - ∞, or ∞ where products are not rounded before they are added
    limit = torch.tensor(0.5, device=DEVICE)
    assert set(layer_sums.clamped_dots(delta, a, limit).flatten().tolist()) <= {0.5, 1.0, 1.5}
    first = delta[:, 0].contiguous(), a[:, 0].contiguous()
    assert layer_sums.clamped_outer(*first, limit).flatten().tolist() == [1.5] * 20
    rows = torch.tensor([[float("nan"), float("inf"), -1e38]], device=DEVICE)
    assert layer_sums.clamped_rows(rows, limit).tolist() == [0.0, 0.5, -0.5]


@pytest.mark.parametrize("slots", [1, 7, 132, 528])
def test_work_is_shared_without_losing_an_example(slots):
    for examples in (1, 7, 8, 9, 64, 600):
        for tiles in (1, 3, 208, 5000):
            shares, part = layer_sums._shares(examples, tiles, slots)
            assert (shares - 1) * part < examples <= shares * part
    assert layer_sums._shares(600, 208, 4 * 132)[0] == 5  # two waves that are full, and not one and a bit
    assert layer_sums._shares(600, 1, 132)[0] > 30


def factors(shape, seed=9):
    examples, positions, height, width = shape
    draw = torch.Generator(DEVICE).manual_seed(seed)
    sides = ((examples, positions, n) for n in (height, width))
    return [torch.randn(side, generator=draw, device=DEVICE) for side in sides]


def norms_of(u, v):
    return torch.einsum("btp,btq->bpq", u.double(), v.double()).flatten(1).norm(dim=1)


@pytest.mark.parametrize("shape", [(3, 2, 7, 9), (2, 70, 40, 33), (1, 17, 500, 3), (1, 130, 5, 20)])
def test_norms_from_gram_matrices(shape):
    u, v = factors(shape)
    wanted = norms_of(u, v)
    assert torch.allclose(grams.norms(u, v, coarse=False).double(), wanted, rtol=2e-6)
    coarse, most = grams.norms(u, v, coarse=True).double(), (u.norm(dim=2) * v.norm(dim=2)).sum(1).double()
    assert (coarse >= wanted).all()
    assert (coarse <= wanted + 2 * grams.COARSE * most).all()


def test_norms_of_parts_that_are_not_whole_tensors():
    u, v = (side.transpose(0, 1) for side in factors((6, 3, 10, 20)))
    assert torch.allclose(grams.norms(u, v, coarse=False).double(), norms_of(u, v), rtol=2e-6)
    u, v = u[:, 1:5, 2:9], v[:, 1:5, ::2]
    assert torch.allclose(grams.norms(u, v, coarse=False).double(), norms_of(u, v), rtol=2e-6)


@pytest.mark.parametrize("coarse", [False, True])
def test_norms_of_what_cancels_or_underflows_are_not_too_small(coarse):
    u, v = factors((4, 6, 8, 8))
    u[0, 3:], v[0, 3:] = -u[0, :3], v[0, :3]  # all of it
    u[1], v[1] = 1e-21, 1e18
    u[2], v[2] = 0.0, 1.0
    found, wanted = grams.norms(u, v, coarse=coarse).double(), norms_of(u, v)
    assert (found >= wanted * (1 - 2.0**-11)).all()
    assert found[2] < 1e-15
    assert found[0] < 0.05 * (u[0].norm(dim=1) * v[0].norm(dim=1)).sum()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_norms_of_what_is_not_finite_are_not():
    u, v = factors((4, 5, 6, 7))
    u[0, 1, 2], v[1, 0, 0], v[2] = float("nan"), float("inf"), 1e30
    for coarse in (False, True):
        assert grams.norms(u, v, coarse=coarse).isfinite().tolist() == [False, False, False, True]


def test_norms_of_rows_of_a_table():
    ids = torch.randint(0, 6, (3, 40), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    v = factors((3, 40, 1, 30))[1]
    wanted = norms_of(torch.nn.functional.one_hot(ids, 6), v)
    assert torch.allclose(grams.norms(ids, v, coarse=False).double(), wanted, rtol=2e-6)


def test_sums_of_a_norm_layer():
    x, delta = factors((3, 37, 50, 50))
    x = 3 * x + 1
    hat = torch.nn.functional.layer_norm(x.double(), (50,), eps=1e-5)
    scale, shift = grams.norm_sums(x, delta, 1e-5)
    assert torch.allclose(scale.double(), (hat * delta).sum(1), rtol=1e-5, atol=1e-4)
    assert torch.allclose(shift.double(), delta.double().sum(1), rtol=1e-5, atol=1e-5)


def test_examples_that_are_not_good_are_blanked_and_others_left():
    x = factors((4, 30, 70, 1))[0]
    x[1], before = float("nan"), x.clone()
    grams.blank(x, torch.tensor([True, False, True, True], device=DEVICE))
    before[1] = 0.0
    assert torch.equal(x, before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_factor_of_zero_makes_zeros():
    x = factors((3, 10, 500, 1))[0]
    x[1] = float("inf")
    found = grams.weighted(x, torch.tensor([0.5, 0.0, 2.0], device=DEVICE))
    assert torch.equal(found[0], x[0] * 0.5)
    assert torch.equal(found[2], x[2] * 2)
    assert found[1].abs().max() == 0


@pytest.mark.parametrize("held", [("signal", "square"), ("mean", "signal"), ("mean", "square"), ()])
def test_a_step_of_adadp(held):
    """Three batches by the recursion in float64; states that are not held are not touched."""
    size = 1500
    random = np.random.default_rng(4)
    states = {name: random.random(size) for name in held}
    given = {name: torch.tensor(states[name], dtype=torch.float32, device=DEVICE) for name in held}
    for _ in range(3):
        released, variance = random.normal(size=size), random.random(size)
        step = released
        if "signal" in held:
            states["signal"] += 0.1 * (released**2 - variance - states["signal"])
        if "mean" in held:
            states["mean"] = step = 0.7 * states["mean"] + released
        if "square" in held:
            states["square"] += 0.2 * (released**2 - states["square"])
            step = step / np.sqrt(states["square"] + 1e-3)
        tensors = (torch.tensor(x, dtype=torch.float32, device=DEVICE) for x in (released, variance))
        kept = (given.get(name) for name in ("mean", "signal", "square"))
        moved = updates.adapted(*tensors, *kept, (0.7, 0.1, 0.2, 1e-3))
        assert np.allclose(moved.cpu(), step, rtol=1e-5, atol=1e-5)
        for name in held:
            assert np.allclose(given[name].cpu(), states[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [20, 40])
@pytest.mark.parametrize("units", [False, True])
def test_noise_added_in_place_is_the_noise_that_would_be_drawn(bits, units):
    total, cell = torch.randn(3000, device=DEVICE), 1.7 * 2.0**-bits
    total[5] = torch.nan
    scale = torch.rand(3000, device=DEVICE) + 0.5 if units else None
    cells, places = lattice_noise.gaussian(KEY, 3000, bits, DEVICE)
    wanted = lattice_noise.release(total, cells, scale, cell)
    found = total.clone()
    open_ones = noise_pool.open_places(lattice_noise.noisy(KEY, found, scale, cell, bits).cpu())
    assert open_ones == noise_pool.open_places(places.cpu())
    decided = torch.ones(3000, dtype=torch.bool)
    decided[open_ones] = False
    assert torch.equal(found[decided], wanted[decided])
    assert torch.equal(found[~decided], total[~decided])  # their sum is still there, to be settled


def each_gradient(module, x, delta, records=1):
    """The gradients of every example, by autograd in float64."""
    found = []
    for n in range(len(x) // records):
        part = slice(n * records, (n + 1) * records)
        weight = module.weight.detach().double().requires_grad_()
        out = torch.func.functional_call(module.double(), {"weight": weight}, (x[part].double(),))
        found += torch.autograd.grad((out * delta[part].double()).sum(), weight)
    return torch.stack(found)


def apart(found, wanted):
    """How far tensors are apart, relative to their length."""
    return float((found - wanted).norm() / wanted.norm())


ERRORS = {torch.float32: 5e-5, torch.bfloat16: 2e-6}  # the interpreter cuts where a GPU rounds


@pytest.mark.parametrize("dtype", list(ERRORS))
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("channels", "filters", "records", "options"),
    [
        (5, 7, 1, {"kernel_size": 3, "padding": 1}),
        (16, 20, 1, {"kernel_size": 3, "padding": 1, "stride": 2}),
        (8, 12, 2, {"kernel_size": (3, 2), "dilation": (1, 2), "groups": 4}),
        (8, 12, 3, {"kernel_size": 1}),
        (8, 140, 1, {"kernel_size": 1, "stride": 2}),
    ],
)
def test_rows_of_convolutions_are_those_of_autograd(channels, filters, records, options, last, dtype):
    torch.manual_seed(0)
    module = torch.nn.Conv2d(channels, filters, bias=False, **options).to(DEVICE)
    x = torch.randn(3 * records, channels, 9, 7, device=DEVICE).to(dtype)
    delta = torch.randn_like(module(x.float())).to(dtype)
    if last:
        x, delta = (part.contiguous(memory_format=torch.channels_last) for part in (x, delta))
    wanted = each_gradient(module, x, delta, records).flatten(1)
    shape = layer_sums.ConvolutionShape(module, padded=False)
    layer = gradient_tiles.TileGeometry.convolution(shape, tuple(x.shape[2:]), tuple(delta.shape[2:]))
    sides = [gradient_tiles.Halves.channels_last(part, 3) for part in (delta, x)]
    made = torch.empty(3, layer.size, device=DEVICE)
    found = gradient_tiles.measured(*sides, layer, made)
    taps = layer.columns // layer.channels
    rows = made.view(3, filters, taps, -1).transpose(2, 3).flatten(1)
    assert apart(rows, wanted) < ERRORS[dtype]
    assert torch.allclose(found.double(), wanted.norm(dim=1), rtol=ERRORS[dtype])
    assert torch.equal(found, gradient_tiles.measured(*sides, layer, None))
    for n in range(3):  # what is added is what was measured, to the last bit
        factors, total = torch.zeros(3, device=DEVICE), torch.zeros(layer.size, device=DEVICE)
        factors[n] = 1.0
        gradient_tiles.add_sum(*sides, layer, factors, 100, total)
        assert torch.equal(total, rows[n])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", list(ERRORS))
@pytest.mark.parametrize(("positions", "height", "width"), [(2, 5, 3), (65, 20, 40), (130, 3, 140)])
def test_sums_of_rows_of_linear_layers_are_weighted_and_leave_others_out(positions, height, width, dtype):
    torch.manual_seed(0)
    u, v = (torch.randn(7, positions, size, device=DEVICE).to(dtype) for size in (height, width))
    wanted = torch.einsum("ntp,ntq->npq", u.double(), v.double())
    u[3], v[5, 0, 0] = float("nan"), float("inf")
    factors = torch.tensor([0.5, 0.0, 2.0, 0.0, 1.0, 0.0, 0.25], device=DEVICE)
    layer = gradient_tiles.TileGeometry.linear(height, width, positions)
    sides = [gradient_tiles.Halves.of(part, (7, 1, *part.shape[1:])) for part in (u, v)]
    found = gradient_tiles.measured(*sides, layer, None)
    good = torch.tensor([0, 1, 2, 4, 6], device=DEVICE)
    assert torch.allclose(found[good].double(), wanted[good].flatten(1).norm(dim=1), rtol=ERRORS[dtype])
    assert not found[[3, 5]].isfinite().any()
    for most in (1, 3, 100):
        total = torch.ones(height * width, device=DEVICE)  # added to what is there
        gradient_tiles.add_sum(*sides, layer, factors, most, total)
        expected = 1 + (factors.double()[:, None, None] * wanted).sum(0).flatten()
        assert apart(total, expected) < ERRORS[dtype]


def whole_numbers(*shape, most=15):
    """Numbers whose products and sums are exact in whatever order they are made."""
    return torch.randint(-most, most + 1, shape, device=DEVICE).float()


def made_by_tiles(module, x, delta, examples):
    """The layer, δ and x as kernels take them, all rows in the order of weights, and their norms."""
    shape = layer_sums.ConvolutionShape(module, padded=False)
    layer = gradient_tiles.TileGeometry.convolution(shape, tuple(x.shape[2:]), tuple(delta.shape[2:]))
    sides = [gradient_tiles.Halves.channels_last(part, examples) for part in (delta, x)]
    made = torch.empty(examples, layer.size, device=DEVICE)
    norms = gradient_tiles.measured(*sides, layer, made)
    taps = layer.columns // layer.channels
    return layer, sides, made.view(examples, -1, taps, layer.channels).transpose(2, 3).flatten(1), norms


@pytest.mark.parametrize("dtype", list(ERRORS))
@pytest.mark.parametrize(
    ("module", "sides", "examples", "records"),
    [
        (torch.nn.Conv2d(3, 5, 3, padding=2, stride=2, dilation=2), (9, 8), 2, 1),
        (torch.nn.Conv2d(6, 4, (2, 3), padding=(1, 0), stride=(1, 3), groups=2), (5, 11), 2, 2),
        (torch.nn.Conv1d(3, 17, 5, padding=4, dilation=3), (23,), 1, 1),
        (torch.nn.Conv1d(2, 2, 1), (1,), 3, 1),
        (torch.nn.Conv2d(2, 130, 1, padding=1), (3, 3), 2, 1),  # every window is one position, some outside
        (torch.nn.Conv2d(33, 2, 3), (3, 3), 1, 3),
    ],
    ids=lambda one: type(one).__name__,
)
def test_rows_and_sums_of_whole_numbers_are_exact(module, sides, examples, records, dtype):
    torch.manual_seed(1)
    module = type(module)(
        *(module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding),
        *(module.dilation, module.groups, False),
    ).to(DEVICE)
    x = whole_numbers(examples * records, module.in_channels, *sides)
    delta = whole_numbers(*module(x).shape)
    wanted = each_gradient(module, x, delta, records).flatten(1)
    layer, both, rows, norms = made_by_tiles(module, x.to(dtype), delta.to(dtype), examples)
    assert torch.equal(rows.double(), wanted)
    assert torch.allclose(norms.double(), wanted.norm(dim=1), rtol=1e-6)
    factors, total = whole_numbers(examples), whole_numbers(layer.size)
    expected = total.double() + factors.double() @ wanted
    for most in (1, 2):
        found = total.clone()
        gradient_tiles.add_sum(*both, layer, factors, most, found)
        assert torch.equal(found.double(), expected)


@pytest.mark.parametrize(("examples", "held"), [(7, 2), (7, 3), (8, 100)])
def test_shares_of_a_large_batch_are_made_some_at_a_time(examples, held, monkeypatch):
    u, v = whole_numbers(examples, 3, 5), whole_numbers(examples, 3, 7)
    layer = gradient_tiles.TileGeometry.linear(5, 7, 3)
    sides = [gradient_tiles.Halves.of(part, (examples, 1, *part.shape[1:])) for part in (u, v)]
    shares, run = [], gradient_tiles.add_ordered
    monkeypatch.setattr(gradient_tiles, "_ROOM", held * layer.size)
    monkeypatch.setattr(gradient_tiles, "add_ordered", lambda *a: shares.append(len(a[0])) or run(*a))
    factors, out = whole_numbers(examples), whole_numbers(layer.size)
    wanted = out.double() + torch.einsum("n,ntp,ntq->pq", factors, u, v).flatten().double()
    gradient_tiles.add_sum(*sides, layer, factors, 1, out)
    assert torch.equal(out.double(), wanted)
    assert max(shares) <= held
    assert sum(shares) == examples


def test_no_examples_add_nothing():
    layer = gradient_tiles.TileGeometry.linear(5, 7, 3)
    sides = [
        gradient_tiles.Halves.of(torch.empty(0, 3, size, device=DEVICE), (0, 1, 3, size)) for size in (5, 7)
    ]
    assert gradient_tiles.measured(*sides, layer, None).shape == (0,)
    out = torch.ones(35, device=DEVICE)
    gradient_tiles.add_sum(*sides, layer, torch.empty(0, device=DEVICE), 5, out)
    assert torch.equal(out, torch.ones(35, device=DEVICE))
    nothing = gradient_tiles.Halves.channels_last(torch.empty(0, 3, 4, 4, device=DEVICE), 0)
    assert nothing.whole.numel() == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_an_example_that_is_not_finite_touches_no_other(bad):
    torch.manual_seed(2)
    module = torch.nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False).to(DEVICE)
    depthwise = torch.nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False).to(DEVICE)
    x, delta = (whole_numbers(3, size, 5, 6) for size in (4, 8))
    x[1, 2, 3, 4], delta[1, 0, 0, 0] = bad, bad
    alone = [made_by_tiles(module, x[n : n + 1], delta[n : n + 1], 1) for n in (0, 2)]
    layer, both, rows, norms = made_by_tiles(module, x, delta, 3)
    assert norms.isfinite().tolist() == [True, False, True]
    for n, (_, _, row, norm) in zip((0, 2), alone, strict=True):
        assert torch.equal(rows[n], row[0])
        assert torch.equal(norms[n], norm[0])
    total = torch.zeros(layer.size, device=DEVICE)
    gradient_tiles.add_sum(*both, layer, torch.tensor([1.0, 0.0, 2.0], device=DEVICE), 9, total)
    assert torch.equal(total, rows[0] + 2 * rows[2])
    shape = layer_sums.ConvolutionShape(depthwise, padded=False)
    found = layer_sums.depthwise(shape, delta, x)
    for n in (0, 2):
        assert torch.equal(found[n], layer_sums.depthwise(shape, delta[n : n + 1], x[n : n + 1])[0])
        for sums in (
            lambda part: layer_sums.group_sums(x[part], delta[part][:, :4], 2, 1e-5),
            lambda part: grams.norm_sums(x[part].flatten(2), delta[part][:, :4].flatten(2), 1e-5),
        ):
            for whole, one in zip(sums(slice(0, 3)), sums(slice(n, n + 1)), strict=True):
                assert torch.allclose(whole[n], one[0])  # by another number of shares


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", list(ERRORS))
def test_what_is_added_is_never_longer_than_what_was_measured(dtype):
    """Of magnitudes near both ends of float32, and of positions that cancel but for rounding."""
    torch.manual_seed(3)
    u, v = (torch.randn(8, 6, size, device=DEVICE) for size in (9, 20))
    scales = torch.tensor([1e-30, 1e-18, 1e-9, 1.0, 1e9, 1e13, 1e25, 1.0], device=DEVICE)
    u, v = u * scales[:, None, None], v * torch.where(scales < 1, 1.0, scales.clamp_max(1e3))[:, None, None]
    u[7, 3:], v[7, 3:] = -u[7, :3], v[7, :3] * (1 + 2.0**-12)
    u, v = u.to(dtype), v.to(dtype)
    layer = gradient_tiles.TileGeometry.linear(9, 20, 6)
    sides = [gradient_tiles.Halves.of(part, (8, 1, *part.shape[1:])) for part in (u, v)]
    norms = gradient_tiles.measured(*sides, layer, None).double()
    for n in range(8):
        factors, total = torch.zeros(8, device=DEVICE), torch.zeros(layer.size, device=DEVICE)
        factors[n] = 1.0
        gradient_tiles.add_sum(*sides, layer, factors, 9, total)
        length = float(total.double().norm())
        assert length <= norms[n] * (1 + 2.0**-11) + 1e-20 or not norms[n].isfinite()
        assert norms[n] <= length * (1 + 2.0**-11) or not norms[n].isfinite()
    assert norms[:6].isfinite().all()
    assert not norms[6].isfinite()  # a square of it is beyond float32


def test_examples_lie_along_the_first_axis_of_every_grid(monkeypatch):
    """The other two axes of a grid end at 65,535, and a batch may be larger than that."""
    grids, launch = [], triton.runtime.jit.KernelInterface.__getitem__
    module = torch.nn.Conv2d(3, 4, 3).to(DEVICE)
    depthwise = torch.nn.Conv2d(3, 6, 3, groups=3).to(DEVICE)

    def noted(self, grid):
        grids.append((self.__name__, *grid[1:]))
        return launch(self, grid)

    def of(examples):
        grids.clear()
        x, delta = torch.ones(examples, 3, 5, 5, device=DEVICE), torch.ones(examples, 4, 3, 3, device=DEVICE)
        layer, both, _, norms = made_by_tiles(module, x, delta, examples)
        gradient_tiles.add_sum(*both, layer, norms, 1, torch.zeros(layer.size, device=DEVICE))
        shape = layer_sums.ConvolutionShape(depthwise, padded=False)
        layer_sums.depthwise(shape, torch.ones(examples, 6, 3, 3, device=DEVICE), x)
        layer_sums.group_sums(x, x, 1, 1e-5)
        u, v = factors((examples, 3, 4, 5))
        for coarse in (False, True):
            grams.norms(u, v, coarse=coarse)
        grams.norms(torch.ones(examples, 3, dtype=torch.int64, device=DEVICE), v, coarse=False)
        grams.blank(u, torch.ones(examples, dtype=torch.bool, device=DEVICE))
        grams.weighted(u, norms)
        limit = torch.tensor(0.5, device=DEVICE)
        layer_sums.clamped_outer(u[:, 0].contiguous(), v[:, 0].contiguous(), limit, 1)
        layer_sums.clamped_dots(u, v, limit, 1)
        layer_sums.clamped_rows(u[:, 0].contiguous(), limit, 1)
        return list(grids)

    monkeypatch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", noted)
    few = of(2)
    assert len({name for name, *_ in few}) >= 14
    assert of(5) == few


CONVOLUTIONS = [
    (torch.nn.Conv2d(4, 6, 3, padding=1, stride=2), (9, 8)),
    (torch.nn.Conv1d(4, 6, 3, dilation=2), (11,)),
    (torch.nn.Conv2d(4, 6, 3, padding="same"), (5, 5)),
    (torch.nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (5, 5)),
    (torch.nn.Conv2d(4, 6, (1, 2), groups=2), (5, 5)),
    (torch.nn.Conv2d(4, 4, 3, groups=4, padding=1), (5, 5)),
    (torch.nn.Conv1d(4, 4, 65, groups=4, padding=32), (9,)),
    (torch.nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (5, 4)),
]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("records", [1, 2])
@pytest.mark.parametrize(("module", "sides"), CONVOLUTIONS, ids=lambda one: type(one).__name__)
def test_terms_of_convolutions_are_made_by_kernels(module, sides, records, keeps, monkeypatch):
    monkeypatch.setattr(convolution, "fused", lambda *_: True)
    module = module.to(DEVICE)
    x = torch.randn(3 * records, 4, *sides, device=DEVICE)
    delta = torch.randn_like(module(x))
    parts = [slice(n * records, (n + 1) * records) for n in range(3)]
    wanted = [torch.autograd.grad((module(x[p]) * delta[p]).sum(), module.weight)[0].flatten() for p in parts]
    wanted = torch.stack(wanted)
    given = (convolution.Turned(module), x, delta) if "Transpose" in str(module) else (module, delta, x)
    term = convolution.windows(*given, 3, True)
    term.keeps = keeps
    term.route = term.routes()[0]
    assert isinstance(term, RowTerms) == (
        1 < module.groups == module.in_channels and module.kernel_size[0] < 65
    )
    assert apart(term.rows(slice(1, 3)), wanted[1:]) < ERRORS[torch.float32]
    assert bool((term.largest() >= 0.9999 * wanted.norm(dim=1)).all())
    assert torch.allclose(term.norms(), wanted.norm(dim=1), rtol=ERRORS[torch.float32])
    out = torch.zeros(wanted.shape[1], device=DEVICE)
    term.only(torch.tensor([True, False, True], device=DEVICE))
    factors = torch.tensor([0.5, 0.0, 2.0], device=DEVICE)
    term.add(factors, out)
    assert apart(out, factors @ wanted) < ERRORS[torch.float32]


def test_a_linear_layers_rows_are_made_twice(monkeypatch):
    monkeypatch.setattr(outers, "fused", lambda *_: True)
    u, v = torch.randn(4, 9, 5, device=DEVICE), torch.randn(4, 9, 7, device=DEVICE)
    wanted = torch.einsum("ntp,ntq->npq", u, v).flatten(1)
    term = outers.Outer(Factor(u.clone()), Factor(v.clone()))
    term.route = Route.AGAIN
    assert torch.allclose(term.norms(), wanted.norm(dim=1), rtol=ERRORS[torch.float32])
    term.only(torch.tensor([True, True, False, True], device=DEVICE))
    factors, out = torch.tensor([1.0, 2.0, 0.0, 0.5], device=DEVICE), torch.zeros(35, device=DEVICE)
    term.add(factors, out)
    assert apart(out, factors @ wanted) < ERRORS[torch.float32]


def test_halves_leave_little_of_float32():
    values = torch.randn(2, 3, 4, 5, device=DEVICE) * 10.0 ** torch.arange(-9, 9, 0.15, device=DEVICE).view(
        2, 3, 4, 5
    )
    for halves in (
        gradient_tiles.Halves.of(values, values.shape),
        gradient_tiles.Halves.channels_last(values.movedim(3, 1).contiguous(), 2),
    ):
        both = halves.whole.double() + halves.low.double()
        assert torch.allclose(both.view(2, 3, 4, 5), values.double(), rtol=2.0**-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("channels", "filters", "stride", "dilation"), [(6, 6, 1, 1), (3, 6, 2, 1), (4, 4, 1, 2)]
)
def test_depthwise_gradients_are_those_of_autograd(channels, filters, stride, dilation, dtype):
    module = torch.nn.Conv2d(
        channels, filters, (3, 2), stride, 1, dilation, groups=channels, bias=False
    ).double()
    x = torch.randn(2, channels, 9, 7, device=DEVICE).to(dtype)
    module = module.to(DEVICE)
    delta = torch.randn_like(module(x.double())).to(dtype)
    wanted = each_gradient(module, x, delta).flatten(1)
    found = layer_sums.depthwise(layer_sums.ConvolutionShape(module, padded=False), delta, x)
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("channels", "groups", "sites"), [(12, 4, 20), (6, 6, 5), (5, 1, 1030)])
def test_sums_of_group_norms_are_those_of_autograd(channels, groups, sites):
    x, delta = (torch.randn(3, channels, sites, device=DEVICE) for _ in range(2))
    x = x + 3.0
    normed = torch.nn.functional.group_norm(x.double(), groups, eps=1e-5)
    scale, shift = layer_sums.group_sums(x, delta, groups, 1e-5)
    assert torch.allclose(scale.double(), (normed * delta).sum(2), rtol=1e-4, atol=1e-4)
    assert torch.allclose(shift.double(), delta.double().sum(2), rtol=1e-5, atol=1e-4)


def test_sums_of_rms_norms_are_those_of_autograd():
    x, delta = (torch.randn(3, 7, 20, device=DEVICE) for _ in range(2))
    normed = torch.nn.functional.rms_norm(x.double(), (20,), eps=1e-5)
    scale, _ = grams.norm_sums(x, delta, 1e-5, centred=False)
    assert torch.allclose(scale.double(), (normed * delta).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "bands"), [(1, 2), (1500, 2), (1500, 5)])
def test_noise_of_earlier_turns_is_taken_off_in_one_pass(size, bands):
    """A ring of the last turns, over more turns than it has rows, against integers in numpy."""
    from farthing.torch.kernels.banded_noise import _Ring

    column, bits, rng = correlated.coefficients(bands, 0.7), 20, np.random.default_rng(size)
    ring, before = _Ring(size, column, bits, DEVICE), deque(maxlen=bands - 1)
    for turn in range(2 * bands + 1):
        drawn = np.rint(rng.normal(size=size) * 2.0**bits).astype(np.int64)
        if turn == 1:
            drawn[0] = 2**40  # beyond what is kept
        own = torch.from_numpy(drawn.copy()).to(DEVICE)
        ring.less(own)
        wanted = drawn - correlated.correction(before, column, bits, (size,))
        assert np.abs(own.cpu().numpy() - wanted).max() <= 1  # a fused product may decide a tie otherwise
        before.appendleft(own.cpu().numpy())
