"""Clamped sums against plain ones in float64, with the C kernel and without it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from farthing.errors import InvalidValue  # noqa: E402
from farthing.noise import native  # noqa: E402
from farthing.torch.kernels import clamping  # noqa: E402
from farthing.torch.kernels.clamping import clamped_rows, clamped_sum  # noqa: E402

SHAPES = [(1, 1, 1, 1), (7, 1, 33, 20), (5, 4, 3, 41), (2, 3, 700, 500), (40, 1, 2, 1)]


@pytest.fixture(params=["kernel", "pieces"])
def way(request, monkeypatch):
    """With the C kernel where there is a compiler; and without, in small pieces."""
    if request.param == "pieces":
        monkeypatch.setattr(native, "clamped_outer_sum", lambda *args, **options: False)
        monkeypatch.setattr(clamping, "_PIECE", 64)
    return request.param


def drawn(shape, seed=0):
    batch, length, rows, columns = shape
    draw = torch.Generator().manual_seed(seed)
    delta, a = (
        torch.randn(batch, length, rows, generator=draw),
        torch.randn(batch, length, columns, generator=draw),
    )
    return delta, a, torch.rand(rows, columns, generator=draw) + 0.01


def plain(delta, a, limit):
    gradients = torch.einsum("bto,bti->boi", delta.double(), a.double())
    limit = torch.as_tensor(limit, dtype=torch.float64)
    return torch.minimum(torch.maximum(gradients, -limit), limit).sum(0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("matrix", [False, True])
def test_sums(shape, matrix, way):
    delta, a, limits = drawn(shape)
    limit = limits if matrix else 0.6
    start = torch.randn(shape[2:], generator=torch.Generator().manual_seed(9))
    out = start.clone()
    assert clamped_sum(delta, a, limit, out) is out
    assert torch.allclose((out - start).double(), plain(delta, a, limit), rtol=1e-5, atol=2e-6 * shape[0])


def test_one_position_may_be_left_out(way):
    delta, a, limit = drawn((6, 1, 5, 4))
    with_it = clamped_sum(delta, a, limit, torch.zeros(5, 4))
    assert torch.equal(with_it, clamped_sum(delta[:, 0], a[:, 0], limit, torch.zeros(5, 4)))


def test_many_examples_at_once_and_one_by_one_agree(way):
    delta, a, limit = drawn((9, 3, 6, 7))
    out = torch.zeros(6, 7)
    for d, x in zip(delta.split(1), a.split(1), strict=True):
        clamped_sum(d, x, limit, out)
    assert torch.allclose(out, clamped_sum(delta, a, limit, torch.zeros(6, 7)), rtol=1e-5, atol=1e-5)


def test_an_example_moves_a_sum_by_the_limit_at_most(way):
    delta, a, limit = drawn((8, 2, 6, 7))
    delta[0] *= 1e30
    a[0] *= 1e30  # its products overflow
    whole = clamped_sum(delta, a, limit, torch.zeros(6, 7))
    rest = clamped_sum(delta[1:], a[1:], limit, torch.zeros(6, 7))
    assert ((whole - rest).abs() <= limit * (1 + 1e-5) + 1e-5).all()


def test_strange_layouts(way):
    delta, a, limit = drawn((4, 3, 6, 7))
    wanted = plain(delta, a, limit)
    flat = torch.zeros(60)
    view = flat[9 : 9 + 42].view(6, 7)  # a layer's part of a flat sum
    clamped_sum(delta.transpose(0, 1).contiguous().transpose(0, 1), a.double(), limit.T.contiguous().T, view)
    assert torch.allclose(view.double(), wanted, rtol=1e-5, atol=1e-5)
    assert flat[:9].abs().sum() == flat[51:].abs().sum() == 0
    turned = torch.zeros(7, 6).T
    clamped_sum(delta, a, limit, turned)
    assert torch.allclose(turned.double(), wanted, rtol=1e-5, atol=1e-5)


def test_nobody(way):
    out = torch.ones(6, 7)
    assert torch.equal(clamped_sum(torch.zeros(0, 3, 6), torch.zeros(0, 3, 7), 1.0, out), torch.ones(6, 7))
    assert torch.equal(clamped_rows(torch.zeros(0, 3), 1.0, torch.ones(3)), torch.ones(3))


@pytest.mark.parametrize("limit", [0.5, "vector"])
def test_rows(limit, way):
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(50, 30, generator=draw)
    limit = torch.rand(30, generator=draw) if limit == "vector" else limit
    most = torch.as_tensor(limit, dtype=torch.float64)
    wanted = 1 + torch.minimum(torch.maximum(rows.double(), -most), most).sum(0)
    assert torch.allclose(clamped_rows(rows, limit, torch.ones(30)).double(), wanted, rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InvalidValue, match="must fit each other"):
        clamped_sum(torch.zeros(2, 3, 4), torch.zeros(2, 2, 5), 1.0, torch.zeros(4, 5))
    with pytest.raises(InvalidValue, match="must fit each other"):
        clamped_sum(torch.zeros(2, 4), torch.zeros(2, 5), 1.0, torch.zeros(5, 4))
    with pytest.raises(InvalidValue, match=r"got \(3,\)"):
        clamped_sum(torch.zeros(2, 4), torch.zeros(2, 5), torch.ones(3), torch.zeros(4, 5))
    with pytest.raises(InvalidValue, match="must fit each other"):
        clamped_rows(torch.zeros(2, 4), 1.0, torch.zeros(5))


def test_numpy_limits_are_taken():
    delta, a, limit = drawn((3, 2, 4, 5))
    wanted = clamped_sum(delta, a, limit, torch.zeros(4, 5))
    assert torch.equal(wanted, clamped_sum(delta, a, limit.numpy().astype(np.float64), torch.zeros(4, 5)))
