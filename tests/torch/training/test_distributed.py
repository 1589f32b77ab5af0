"""Two processes, one batch: the same weights as one process, one noise vector, and what a failure costs."""

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.noise.lattice import SeededStream
from farthing.torch.training.loop import train
from farthing.torch.training.schedules import Quantile

pytestmark = pytest.mark.slow

LOSS = nn.CrossEntropyLoss(reduction="none")


def alone(**options):
    made = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=made)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5), stream=SeededStream(7), block=1)
    options = {"sampling_rate": 0.1, "noise_multiplier": 3.0, "steps": 6} | options
    steps = list(train(model, LOSS, (x, (x[:, 0] > 0).long()), ledger, **options))
    return torch.cat([p.detach().flatten() for p in model.parameters()]), [step.clip_norm for step in steps]


def test_two_ranks_are_one_process_and_fail_together(two, tmp_path):
    """Each part in turn, in one pair of processes."""
    found, codes, errors = two(
        tmp_path,
        """
        model = network()
        options = {"sampling_rate": 0.1, "noise_multiplier": 3.0, "steps": 6}
        training = ft.torch.train(model, LOSS, (x, y), ledger(), physical_batch_size=5, **options)
        steps = list(training)
        told(weights=flat(model), receipts=[len(step.receipts) for step in steps], left=steps[-1].left)

        model = network()
        clip = ft.torch.Quantile(0.5, start=0.3)
        steps = list(ft.torch.train(model, LOSS, (x, y), ledger(), clip_norm=clip, **options))
        told(weights=flat(model), clips=[step.clip_norm for step in steps])

        # noise, rate and steps follow from rank 0's budget
        training = ft.torch.train(network(), LOSS, (x, y), ledger(), steps=3)
        plan = training.plan
        told(noise=plan.noise_multipliers, rate=plan.sampling_rate, steps=len(list(training)))

        # a schedule whose first noise is used up: both skip alike
        book = ledger()
        options = {"sampling_rate": 0.1, "noise_multiplier": [3.0, 4.0, 3.0, 4.0]}
        ft.run(ft.torch.train(network(), LOSS, (x, y), book, **options), stop=lambda step: step.t == 2)
        again = ft.torch.train(network(), LOSS, (x, y), book, **options)
        told(noises=[step.noise_multiplier for step in again])

        # rank 1's loss breaks in the second batch: charged, not released, and both know
        ill = []
        def broken(outputs, targets):
            if ill:
                raise RuntimeError("this rank has a fault")
            return LOSS(outputs, targets)
        model, book = network(), ledger()
        options = {"sampling_rate": 0.1, "noise_multiplier": 3.0, "steps": 6}
        training = ft.torch.train(model, broken, (x, y), book, **options)
        next(training)
        ill += [1] * rank
        before = flat(model)
        try:
            next(training)
        except NotReleased as error:
            told(error=str(error), moved=flat(model) != before, share=book.share if book else None)

        # rank 0's mechanism breaks
        class Broken(ft.torch.TensorGaussian):
            def release(self, total, bound, stream, turn=0):
                raise RuntimeError("no noise today")
        book = ledger()
        try:
            options = {"sampling_rate": 0.1, "noise_multiplier": 3.0, "steps": 4, "mechanism": Broken}
            next(ft.torch.train(network(), LOSS, (x, y), book, **options))
        except (NotReleased, RuntimeError) as error:
            told(error=type(error).__name__, share=book.share if book else None)
        dist.barrier()
        """,
    )
    assert codes == [0, 0], errors
    weights, _ = alone()
    assert found[0][0]["weights"] == found[1][0]["weights"]
    assert torch.allclose(torch.tensor(found[0][0]["weights"]), weights, atol=1e-5)
    assert [row[0]["receipts"] for row in found] == [[1] * 6, [0] * 6]
    assert [row[0]["left"] for row in found] == [0, 0]

    weights, clips = alone(clip_norm=Quantile(0.5, start=0.3))
    assert found[0][1] == found[1][1]
    assert torch.allclose(torch.tensor(found[0][1]["weights"]), weights, atol=1e-5)
    assert found[0][1]["clips"] == pytest.approx(clips, rel=1e-5)

    assert found[0][2] == found[1][2]
    assert found[0][2]["steps"] == 3
    assert found[0][3] == found[1][3] == {"noises": [3.0, 4.0]}

    for rank in range(2):
        assert "1 of 2 ranks failed" in found[rank][4]["error"]
        assert not found[rank][4]["moved"]
    assert found[0][4]["share"] == pytest.approx(2 / 6)  # the batch that failed stays charged
    assert [row[5]["error"] for row in found] == ["RuntimeError", "NotReleased"]
    assert found[0][5]["share"] == 0.25


def test_rank_0_decides_how_terms_change_and_a_rule_that_fails_ends_both(two, tmp_path):
    found, codes, errors = two(
        tmp_path,
        """
        def menu():
            filter = ft.torch.menu(BUDGET, 300, sampling_rate=(0.1, 0.2), noise_multiplier=(9.0, 6.0))
            return ft.Ledger(BUDGET, filter=filter, stream=SeededStream(7), block=1) if rank == 0 else None
        def rule(step):
            assert rank == 0
            if step.t == 2:
                return ft.torch.Change(noise_multiplier=6.0)
            return ft.torch.Change(sampling_rate=0.2, clip_norm=0.5) if step.t == 4 else None
        model = network()
        training = ft.torch.train(model, LOSS, (x, y), menu(), steps=6, adapt=rule)
        steps = [(s.noise_multiplier, s.expected_batch_size, s.clip_norm, s.share, s.left) for s in training]
        told(weights=flat(model), steps=steps)

        def breaks(step):
            raise ZeroDivisionError
        training = ft.torch.train(network(), LOSS, (x, y), menu(), steps=6, adapt=breaks)
        try:
            next(training)
        except (NotReleased, ZeroDivisionError) as error:
            told(error=type(error).__name__)
        dist.barrier()
        """,
    )
    assert codes == [0, 0], errors
    assert found[0][0] == found[1][0]
    assert [step[:3] for step in found[0][0]["steps"]] == [
        *[[9.0, 30.0, 1.0]] * 2,
        *[[6.0, 30.0, 1.0]] * 2,
        *[[6.0, 60.0, 0.5]] * 2,
    ]
    assert [row[1]["error"] for row in found] == ["ZeroDivisionError", "NotReleased"]


def test_ranks_with_shards_of_their_own_are_refused_before_any_charge(two, tmp_path):
    found, codes, errors = two(
        tmp_path,
        """
        book = ledger()
        for part in (slice(150 * rank, 150 * rank + 150), slice(0, 300 - rank)):
            try:
                ft.torch.train(network(), LOSS, (x[part], y[part]), book, sampling_rate=0.1,
                noise_multiplier=3.0, steps=6)
            except InvalidValue as error:
                told(error=str(error), share=book.share if book else 0)
        dist.barrier()
        """,
    )
    assert codes == [0, 0], errors
    for rank in range(2):
        assert [("not a shard" in row["error"], row["share"]) for row in found[rank]] == [(True, 0)] * 2


def test_a_rank_that_dies_ends_it_charged_and_not_released(two, tmp_path):
    found, codes, errors = two(
        tmp_path,
        """
        ill = []
        def loss(outputs, targets):
            if ill:
                os._exit(9)
            return LOSS(outputs, targets)
        model, book = network(), ledger()
        training = ft.torch.train(model, loss, (x, y), book, sampling_rate=0.1, noise_multiplier=3.0, steps=8)
        next(training), next(training)
        ill += [1] * rank
        before = flat(model)
        try:
            next(training)
        except NotReleased as error:
            told(error=str(error), moved=flat(model) != before, share=book.share)
        """,
    )
    assert codes == [0, 9], errors
    assert "a rank is gone" in found[0][0]["error"]
    assert not found[0][0]["moved"]
    assert found[0][0]["share"] == 3 / 8


def test_two_ranks_draw_by_personal_rates_and_every_level_is_spent(two, tmp_path):
    found, codes, errors = two(
        tmp_path,
        """
        model, own = network(), np.repeat([1.0, 3.0], 150)
        run = ft.torch.train(model, LOSS, (x, y), delta=1e-5, budgets=own, steps=3)
        count = sum(1 for _ in run)
        said = [] if rank else [one.epsilon for one in run.ledger.guarantees.values()]
        told(count=count, weights=flat(model), levels=said, size=run.plan.expected_batch_size)
        """,
    )
    assert codes == [0, 0], errors
    (first,), (second,) = found
    assert first["count"] == second["count"] == 3
    assert first["weights"] == second["weights"]
    assert first["size"] == second["size"]
    assert first["levels"] == pytest.approx([1.0, 3.0], rel=1e-4)


def test_two_ranks_draw_balanced_and_truncated_batches_as_one_process_does(two, tmp_path):
    found, codes, errors = two(
        tmp_path,
        """
        # rank 0 assigns; after a restart both wait for the next pass
        book, options = ledger(), {"sampling_rate": 0.25, "noise_multiplier": 3.0, "steps": 12}
        next(ft.torch.train(network(), LOSS, (x, y), book, sampling="balanced", **options))
        model = network()
        again = ft.torch.train(model, LOSS, (x, y), book, sampling="balanced", **options)
        told(updates=len(list(again)), weights=flat(model), bins=again.plan.bins)

        # each rank fills up its part
        model = network()
        options = {"sampling_rate": 0.1, "noise_multiplier": 3.0, "steps": 6, "max_batch_size": 32}
        ft.run(ft.torch.train(model, LOSS, (x, y), ledger(), **options))
        told(weights=flat(model))
        """,
    )
    assert codes == [0, 0], errors
    assert found[0] == found[1]
    assert (found[0][0]["updates"], found[0][0]["bins"]) == (8, 4)
    weights, _ = alone(max_batch_size=32)
    assert torch.allclose(torch.tensor(found[0][1]["weights"]), weights, atol=1e-5)
