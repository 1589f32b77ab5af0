"""Compare tight accounting with its peers: tightness and speed.

    python benchmarks/accounting.py

Every ε is an upper bound; a gap is its distance above our certified one. Times are CPU time: set
OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1 so that no thread counts twice. A peer that is not installed is
reported and left out. No figure is recorded except the reference digits, which are known independently.
"""

import contextlib
import io
import statistics
import sys
import time
import warnings
from collections.abc import Callable

from farthing.accounting import calibrate, inversion, pld
from farthing.accounting.filters import GdpFilter
from farthing.accounting.menu import Menu
from farthing.budget import Budget
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent

# rate, noise, steps, ε at δ = 1e-5, ε at δ = 1e-8
GRID = [
    (0.01, 4.0, 10_000, 0.946867, 1.322944),
    (0.01, 1.0, 10_000, 6.187712, 8.185123),
    (256 / 60_000, 1.1, 14_000, 2.375838, 3.243063),
    (0.001, 0.6, 100_000, 6.112825, 8.584754),
    (0.1, 2.0, 500, 5.555468, 7.390074),
    (1.0, 50.0, 1000, 2.594383, 3.491255),
]
Bound = Callable[[float, float, int, float], float]


def cold() -> None:
    """Clear everything cached between calls, in every module of accounting."""
    inversion._KERNELS.clear()
    for module in [module for name, module in sys.modules.items() if name.startswith("farthing.accounting.")]:
        for found in vars(module).values():
            if hasattr(found, "cache_clear") and not isinstance(found, type):
                found.cache_clear()


def cpu(function: Callable[[], object], times: int = 1, prepare: Callable[[], None] = lambda: None) -> float:
    """Return the median CPU seconds of a call."""
    taken = []
    for _ in range(times):
        prepare()
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def poisson(rate: float, noise: float) -> PoissonEvent:
    return PoissonEvent(rate, GaussianEvent(noise))


def ours(rate: float, noise: float, steps: int, delta: float) -> float:
    return pld.epsilon(RepeatedEvent(poisson(rate, noise), steps), delta)


def dp_accounting_pld(rate: float, noise: float, steps: int, delta: float) -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    gaussian = dp_accounting.GaussianDpEvent(noise)
    event = dp_accounting.PoissonSampledDpEvent(rate, gaussian) if rate < 1 else gaussian
    accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


def prv_accountant(rate: float, noise: float, steps: int, delta: float) -> float:
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    accountant = PRVAccountant(
        prvs=[PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=noise)],
        max_self_compositions=[steps],
        eps_error=0.01,
        delta_error=delta / 1000,
    )
    return float(accountant.compute_epsilon(delta=delta, num_self_compositions=[steps])[2])


def opacus_prv(rate: float, noise: float, steps: int, delta: float) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise, rate, steps)]
    return float(accountant.get_epsilon(delta=delta, delta_error=delta / 1000, eps_error=0.01))


PEERS: dict[str, Bound] = {
    "dp-accounting PLD": dp_accounting_pld,
    "prv-accountant": prv_accountant,
    "Opacus PRV": opacus_prv,
}


def installed(name: str) -> bool:
    """Return whether a peer runs; print why if not."""
    try:
        with quiet():
            PEERS[name](0.5, 5.0, 3, 1e-3)
    except ImportError as error:
        print(f"{name} is left out: {error}")
        return False
    except Exception as error:
        print(f"{name} is left out, it fails on a small case: {type(error).__name__}: {error}")
        return False
    return True


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def tightness() -> None:
    """Print ε and CPU time on the grid."""
    peers = [name for name in PEERS if installed(name)]
    print("\nε upper bounds; gap = relative to ours; ×time = CPU time over ours from a cold cache")
    for rate, noise, steps, *references in GRID:
        for delta, reference in zip((1e-5, 1e-8), references, strict=True):
            certified = ours(rate, noise, steps, delta)
            taken = cpu(lambda: ours(rate, noise, steps, delta), 5, cold)  # noqa: B023
            print(f"\nq={rate:.6g} σ={noise:g} T={steps} δ={delta:g}")
            print(f"  ours {certified:.7f} in {1e3 * taken:.2f} ms; reference {reference:.6f}, ", end="")
            print(f"off by {certified / reference - 1:+.1e}")
            for name in peers:
                try:
                    with quiet():
                        start = time.process_time()
                        bound = PEERS[name](rate, noise, steps, delta)
                        peer_taken = time.process_time() - start
                except Exception as error:
                    print(f"  {name:18} fails: {type(error).__name__}: {str(error)[:80]}")
                    continue
                gap = bound / certified - 1
                print(f"  {name:18} {bound:.7f}  gap {gap:+.1e}  ×time {peer_taken / taken:.0f}")


def queries() -> None:
    """Time the two interactive queries."""
    plan = RepeatedEvent(poisson(0.01, 4.0), 10_000)
    budget = Budget(1.0, 1e-5)

    def noise() -> float:
        return calibrate.noise(lambda sigma: RepeatedEvent(poisson(0.01, sigma), 10_000), budget)

    from_cold = cpu(lambda: pld.epsilon(plan, 1e-5), 25, cold)
    pld.epsilon(plan, 1e-5)
    warm = cpu(lambda: pld.epsilon(plan, 1e-5), 25)
    calibrating = cpu(noise, 15, cold)
    print("\nmedian CPU ms")
    print(f"  ε, cold {1e3 * from_cold:.2f}, warm {1e3 * warm:.2f} (aim: 1)")
    print(
        f"  noise for a budget, cold {1e3 * calibrating:.2f} (aim: 15); σ = {noise():.6f}, reference 3.812817"
    )


# rate, noise, ε: what is asked next may follow from the answers
ADAPTIVE = [(1.0, 50.0, 1.0), (1.0, 400.0, 0.1), (1.0, 8.0, 10.0), (0.01, 4.0, 1.0), (0.05, 2.0, 3.0)]


def opendp_answers(noise: float, budget: Budget) -> int:
    """Return how many answers of everybody fit OpenDP's zCDP, which composes adaptively."""
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=1), dp.l2_distance(T=float)

    def fits(count: int) -> bool:
        all_of_them = dp.m.make_gaussian(*space, scale=noise / count**0.5)  # ρ adds up: the same ρ
        spent = dp.c.make_zCDP_to_approxDP(all_of_them).map(1.0)
        return bool(spent.epsilon(budget.delta) <= budget.epsilon)

    return most(fits)


def dp_accounting_answers(rate: float, noise: float, budget: Budget) -> int:
    """Return how many fit dp-accounting's Rényi curve: a filter that fixes the best order ahead."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    event = PoissonSampledDpEvent(rate, GaussianDpEvent(noise))

    def fits(count: int) -> bool:
        return bool(RdpAccountant().compose(event, count).get_epsilon(budget.delta) <= budget.epsilon)

    return most(fits)


def most(fits: Callable[[int], bool]) -> int:
    """Return the largest count that fits, by bisection."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def adaptive() -> None:
    """Print how many answers each library allows where every price may follow from the answers."""
    print("\nanswers whose prices may be chosen on the way; δ = 1e-5; a promise is fixed ahead")
    for rate, noise, epsilon in ADAPTIVE:
        budget = Budget(epsilon, 1e-5)
        event = GaussianEvent(noise) if rate == 1 else poisson(rate, noise)
        fixed = calibrate.steps(event, budget)
        rule = GdpFilter(budget) if rate == 1 else Menu([event, poisson(rate, 2 * noise)])(budget)
        own = most(lambda count, rule=rule, event=event: rule.fits(rule.add(rule.start(), event, count)))
        print(f"  rate {rate:g}, noise {noise:g}, ε {epsilon:g}: promise {fixed}, ours {own}", end="")
        print(f", dp-accounting RDP {dp_accounting_answers(rate, noise, budget)}", end="")
        try:
            print(f", OpenDP {opendp_answers(noise, budget) if rate == 1 else 'has none'}")
        except ImportError as error:
            print(f", OpenDP is left out: {error}")


def main() -> None:
    tightness()
    queries()
    adaptive()


if __name__ == "__main__":
    main()
