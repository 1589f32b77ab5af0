"""Lattice noise: the stream, the laws against scipy and mpmath, and the attacks it must withstand."""

import copy
import itertools
import math
import os
import pickle
import signal
import threading

import mpmath
import numpy as np
import pytest
from scipy import stats

from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.noise import lattice as noise
from farthing.noise import native, streams
from farthing.noise.lattice import SeededStream, Stream, gaussian, gumbel, laplace

LAWS = [(gaussian, stats.norm), (laplace, stats.laplace), (gumbel, stats.gumbel_r)]
SAMPLERS = [gaussian, laplace, gumbel]
QUANTILES = [noise._HALF_NORMAL, noise._EXPONENTIAL, noise._NEGATIVE_GUMBEL]
SIGN = 2**63


class Script(Stream):
    """Hands out the given words, then those of a seeded stream; counts what was asked for."""

    def __init__(self, *words):
        super().__init__()
        self.words, self.drawn, self.rest = list(words), 0, SeededStream(1)

    def integers(self, n):
        self.drawn += n
        head, self.words = self.words[:n], self.words[n:]
        return np.concatenate([np.array(head, np.uint64), self.rest.integers(n - len(head))])


def survival(sampler, x, digits=80):
    """P(X > x) for the non-negative part (gaussian, laplace) or for minus the variable (gumbel)."""
    with mpmath.workdps(digits):
        x = mpmath.mpf(x)
        if sampler is gaussian:
            return mpmath.erfc(x / mpmath.sqrt(2))
        return mpmath.exp(-x) if sampler is laplace else mpmath.exp(-mpmath.exp(x))


def exact(sampler, uniform, bits):
    """round(2**bits X) where survival(X) = uniform, by bisection over cells in high precision."""
    low, high = -(2 ** (bits + 8)), 2 ** (bits + 8)
    while high - low > 1:
        middle = (low + high) // 2
        if survival(sampler, mpmath.ldexp(2 * middle + 1, -bits - 1)) > uniform:
            low = middle
        else:
            high = middle
    return high


def expected(sampler, words, bits):
    """The cell of the uniform with these bits: sign and 63 bits, then 64 bits a word, then a half."""
    numerator, denominator = words[0] % SIGN, 2**63
    for word in words[1:]:
        numerator, denominator = numerator << 64 | word, denominator << 64
    with mpmath.workdps(80):
        cell = exact(sampler, (mpmath.mpf(numerator) + 0.5) / denominator, bits)
    return -cell if sampler is gumbel or words[0] >= SIGN else cell


def chi_square(observed, probabilities):
    """The p-value; cells expected less than 10 times are pooled."""
    expectation = observed.sum() * np.asarray(probabilities)
    rare = expectation < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    expectation = np.append(expectation[~rare], expectation[rare].sum())
    if expectation[-1] == 0:
        observed, expectation = observed[:-1], expectation[:-1]
    return stats.chi2.sf(((observed - expectation) ** 2 / expectation).sum(), len(observed) - 1)


class TestStream:
    def test_words_are_not_repeated_between_streams_or_calls(self):
        first, second = Stream(), Stream()
        words = np.concatenate([first.integers(50_000), first.integers(7), second.integers(50_000)])
        assert len(np.unique(words)) == len(words)

    def test_sound_only_as_itself(self):
        assert Stream().sound
        assert not SeededStream(0).sound
        assert not Script().sound
        with pytest.raises(AttributeError):
            SeededStream(0).sound = True

    def test_seeded_is_reproducible_however_it_is_cut(self):
        whole = SeededStream(5).integers(100_000)
        stream = SeededStream(5)
        parts = [stream.integers(n) for n in (0, 1, 32_766, 2, 60_000, 7_231)]
        assert np.array_equal(whole, np.concatenate(parts))
        assert not np.array_equal(whole[:10], SeededStream(6).integers(10))

    def test_words_can_be_written_without_touching_the_stream(self):
        stream = SeededStream(5)
        stream.integers(3)[:] = 0
        assert np.array_equal(stream.integers(3), SeededStream(5).integers(6)[3:])

    def test_bits_are_balanced(self):
        words = SeededStream(0).integers(20_000)
        ones = np.unpackbits(words.view(np.uint8).reshape(-1, 8), axis=1).sum(axis=0, dtype=np.int64)
        assert np.all(np.abs(ones - 10_000) < 5 * math.sqrt(5_000))

    @pytest.mark.parametrize("make", [Stream, lambda: SeededStream(3)])
    def test_copies_are_the_stream_itself(self, make):
        stream = make()
        assert copy.copy(stream) is stream
        assert copy.deepcopy({"a": [stream]})["a"][0] is stream

    def test_pickle_carries_no_state(self):
        stream = Stream()
        stream.integers(10)
        payload = pickle.dumps(stream)
        ahead = stream.integers(1000)
        for other in (pickle.loads(payload), pickle.loads(payload)):
            assert other.sound
            assert not np.isin(other.integers(1000), ahead).any()
            ahead = np.concatenate([ahead, other.integers(1000)])
        with pytest.raises(Unsupported, match="seed"):
            pickle.dumps(SeededStream(0))

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    @pytest.mark.parametrize("make", [Stream, lambda: SeededStream(3)])
    @pytest.mark.parametrize("same_process_id", [False, True])
    @pytest.mark.parametrize("locked", [False, True])
    def test_fork_never_repeats(self, make, locked, same_process_id, monkeypatch):
        if same_process_id:  # numbers come round again: then the hook alone must do
            monkeypatch.setattr(os, "getpid", lambda: 1)
        stream = make()
        stream.integers(10)  # the buffer holds words that the child must not hand out
        if locked:  # as when another thread of the parent is drawing
            stream._lock.acquire()
        children = [words_of_a_child(stream) for _ in range(2)]
        if locked:
            stream._lock.release()
        ours = stream.integers(100_000)
        assert all(len(words) == 1000 and not np.isin(words, ours).any() for words in children)
        if stream.sound:
            assert not np.isin(*children).any()

    def test_a_change_of_process_unseen_by_the_hook(self, monkeypatch):
        stream, twin = SeededStream(3), SeededStream(3)
        stream.integers(10), twin.integers(10)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        words = stream.integers(1000)
        monkeypatch.undo()
        assert not np.isin(words, twin.integers(100_000)).any()

    def test_threads_share_without_repeats_or_gaps(self):
        stream, drawn = SeededStream(9), []
        threads = [
            threading.Thread(target=lambda: drawn.extend(stream.integers(97) for _ in range(200)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert np.array_equal(np.sort(np.concatenate(drawn)), np.sort(SeededStream(9).integers(4 * 200 * 97)))


def words_of_a_child(stream):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # rather than wait for ever on a lock that nobody holds
        try:
            os.write(write, stream.integers(1000).tobytes())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        words = np.frombuffer(pipe.read(), np.uint64)
    os.waitpid(child, 0)
    return words


class TestChoices:
    @pytest.mark.parametrize("bound", [1, 2, 3, 10, 1000])
    def test_uniform_below_is_uniform(self, bound):
        drawn = SeededStream(bound).uniform_below(bound, 50_000)
        assert drawn.dtype == np.int64
        counts = np.bincount(drawn, minlength=bound)
        assert len(counts) == bound
        assert bound == 1 or chi_square(counts, np.full(bound, 1 / bound)) > 1e-3

    def test_uniform_below_rejects_the_incomplete_cycle(self):
        bound = 3 * 2**60  # 2**64 is 5 * bound + 2**60
        stream = Script(5 * bound, 2**64 - 1, 5 * bound - 1, 4)
        assert stream.uniform_below(bound, 3).tolist()[2] == bound - 1
        assert stream.drawn >= 5  # the first two again
        low = SeededStream(0).uniform_below(bound, 30_000) < bound // 3
        assert abs(low.mean() - 1 / 3) < 5 * math.sqrt(2 / 9 / 30_000)  # 3/8 if it merely wrapped

    @pytest.mark.parametrize("rate", [1.0, 0.5, 0.3, 1e-3, 1 - 2**-20])
    def test_bernoulli_rate(self, rate):
        n = 400_000
        count = SeededStream(2).bernoulli(rate, n).sum()
        assert abs(count - rate * n) <= 5 * math.sqrt(n * rate * (1 - rate))

    @pytest.mark.parametrize("rate", [0.3, 2.0**-16, 1e-17, 3e-20, 5e-324])
    def test_bernoulli_threshold_is_exact_and_never_above_the_rate(self, rate):
        threshold = int(mpmath.floor(mpmath.mpf(rate) * 2**64))
        head, tail = threshold >> 56, threshold % 2**56
        assert Script(head, (tail << 8) - 1 if tail else 0).bernoulli(rate, 1)[0] == (tail > 0)
        assert not Script(head, tail << 8).bernoulli(rate, 1)[0]
        assert not Script(head + 1).bernoulli(rate, 1)[0]
        assert head == 0 or Script(head - 1).bernoulli(rate, 1)[0]

    @pytest.mark.parametrize("rate", [1.0, 0.2, 1e-4])
    def test_poisson_indices(self, rate):
        n = 2**21 + 3
        kept = SeededStream(4).poisson_indices(rate, n)
        assert kept.dtype == np.int64
        assert np.all(np.diff(kept) > 0)
        assert kept[0] >= 0
        assert kept[-1] < n
        assert abs(len(kept) - rate * n) <= 5 * math.sqrt(n * rate * (1 - rate))
        thirds = np.bincount(kept // (n // 3 + 1))
        assert chi_square(thirds, np.full(3, 1 / 3)) > 1e-3

    @pytest.mark.parametrize("rate", [2.0**-6, 0.005, 1e-5])
    def test_gaps_between_rare_heads_are_geometric(self, rate):
        kept = SeededStream(6).poisson_indices(rate, round(4e4 / rate))
        gaps = np.diff(kept, prepend=-1) - 1
        cut = np.append(np.unique((np.arange(1, 40) / 20 / rate).astype(int)), 2**62)  # past the longest leap
        counts = np.bincount(np.searchsorted(cut, gaps, side="right"), minlength=len(cut))
        law = -np.diff(np.exp(np.append(0, cut) * math.log1p(-rate)), append=0)[: len(cut)]
        assert chi_square(counts, law) > 1e-3
        early, late = gaps[:-1] < 0.5 / rate, gaps[1:] < 0.5 / rate
        share = early.mean()
        assert abs((early & late).mean() - share**2) < 5 * math.sqrt(share / len(gaps))

    @pytest.mark.parametrize("rate", [2.0**-6, 0.005, 1e-5, 1e-17, 2.0**-64])
    def test_chances_of_tails_are_exact(self, rate):
        table, keep = streams._tails(rate), 2**64 - int(mpmath.floor(mpmath.mpf(rate) * 2**64))
        for k in (1, 2, 3, 100, 511, 512):
            assert int(table[k - 1]) == keep**k // 2 ** (64 * (k - 1))

    @pytest.mark.parametrize("rate", [2.0**-6, 0.005, 1e-17, 2.0**-64])
    @pytest.mark.parametrize("k", [1, 2, 7, 512])
    def test_a_word_too_short_for_a_leap_takes_more_bits(self, rate, k):
        """U beside (1 - p)**k, to 192 bits: below it there are k tails at least, else fewer."""
        keep = 2**64 - int(mpmath.floor(mpmath.mpf(rate) * 2**64))
        edge = keep**k * 2**192 // 2 ** (64 * k)
        for u in (edge - 1, edge + 1):
            words = [u >> 128, u >> 64 & 2**64 - 1, u & 2**64 - 1]
            stream = Script(*words[1:])
            start = int((streams._tails(rate) > np.uint64(words[0])).sum())
            tails = stream._long_leap(rate, words[0], start)
            assert u * 2 ** (64 * tails) < keep**tails * 2**192
            assert tails == 512 or u * 2 ** (64 * (tails + 1)) >= keep ** (tails + 1) * 2**192
            assert (tails >= k) == (u < edge)

    def test_a_short_word_among_others(self, monkeypatch):
        """With kernels and without, the batch is read alike and the further bits come after it."""
        table = streams._tails(0.005)
        for found in (native.kernels(), None):
            monkeypatch.setattr(native, "_loaded", found)
            stream = Script(int(table[9]), *[2**63] * 500)
            first = int(stream.poisson_indices(0.005, 2**14)[0])
            taken = stream.drawn
            plain = Script(int(table[9]) + 1, *[2**63] * 500)
            assert int(plain.poisson_indices(0.005, 2**14)[0]) == 9
            assert first in (9, 10)
            assert taken == plain.drawn + 1

    def test_poisson_indices_are_independent(self):
        stream, counts = SeededStream(8), np.zeros(8)
        for _ in range(20_000):
            counts[int((1 << stream.poisson_indices(0.3, 3)).sum())] += 1
        law = [0.3 ** bin(s).count("1") * 0.7 ** (3 - bin(s).count("1")) for s in range(8)]
        assert chi_square(counts, law) > 1e-3

    @pytest.mark.parametrize(("size", "of"), [(1, 5), (2, 5), (4, 5), (3, 6), (1, 17), (2, 33)])
    def test_choose_is_uniform_over_subsets(self, size, of):
        stream = SeededStream(100 * of + size)
        place = {subset: i for i, subset in enumerate(itertools.combinations(range(of), size))}
        counts = np.zeros(len(place))
        for _ in range(40 * len(place)):
            counts[place[tuple(stream.choose(size, of).tolist())]] += 1
        assert chi_square(counts, np.full(len(place), 1 / len(place))) > 1e-3

    @pytest.mark.parametrize(
        ("size", "of"), [(0, 3), (3, 3), (1000, 2**61), (1000, 16_000), (40_000, 50_000), (10_000, 500_000)]
    )
    def test_choose_gives_distinct_indices(self, size, of):
        chosen = SeededStream(0).choose(size, of)
        assert chosen.dtype == np.int64
        assert len(np.unique(chosen)) == len(chosen) == size
        assert size == 0 or (chosen.min() >= 0 and chosen.max() < of)

    def test_choose_draws_again_where_keys_tie(self):
        assert Script(5, 5, 9, 7, 1, 8).choose(1, 3).tolist() == [1]


class TestLaws:
    @pytest.mark.parametrize(("sampler", "law"), LAWS)
    @pytest.mark.parametrize("bits", [0, 1, 2])
    def test_cell_probabilities(self, sampler, law, bits):
        cells = np.arange(-(40 << bits), (40 << bits) + 1)
        drawn = sampler(SeededStream(10 + bits), 300_000, bits)
        counts = np.bincount(drawn - cells[0], minlength=len(cells))
        lower, upper = (cells - 0.5) / 2**bits, (cells + 0.5) / 2**bits
        mass = np.where(cells > 0, law.sf(lower) - law.sf(upper), law.cdf(upper) - law.cdf(lower))
        assert chi_square(counts, mass) > 1e-3

    @pytest.mark.parametrize(("sampler", "law"), LAWS)
    @pytest.mark.parametrize("bits", [12, 20, 40])
    def test_goodness_of_fit(self, sampler, law, bits):
        stream = SeededStream(bits)
        drawn = sampler(stream, 20_000, bits) + stream.integers(20_000) * 2.0**-64 - 0.5
        assert stats.kstest(drawn / 2**bits, law.cdf).pvalue > 1e-3

    @pytest.mark.slow
    @pytest.mark.parametrize(("sampler", "law"), LAWS)
    def test_goodness_of_fit_on_many(self, sampler, law):
        drawn = sampler(SeededStream(1), 10_000_000, 20) / 2**20
        edges = law.ppf(np.arange(1, 10_000) / 10_000)
        edges = (np.floor(edges * 2**20) + 0.5) / 2**20  # between cells
        counts = np.bincount(np.searchsorted(edges, drawn), minlength=10_000)
        assert chi_square(counts, np.diff(law.cdf(edges), prepend=0, append=1)) > 1e-3

    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_samples_are_integers_of_the_asked_size(self, sampler):
        for size in (0, 1, 32_769):
            drawn = sampler(Stream(), size, 20)
            assert drawn.dtype == np.int64
            assert drawn.shape == (size,)

    def test_signs_and_neighbours_are_uncorrelated(self):
        drawn = gaussian(SeededStream(3), 200_000, 20) / 2**20
        assert abs((drawn > 0).mean() - 0.5) < 5 * 0.5 / math.sqrt(len(drawn))
        assert abs((drawn[1:] * drawn[:-1]).mean()) < 5 / math.sqrt(len(drawn))


class TestExactness:
    @pytest.mark.parametrize("sampler", SAMPLERS)
    @pytest.mark.parametrize("bits", [0, 3, 20, 40])
    def test_random_words_against_mpmath(self, sampler, bits):
        words = SeededStream(bits).integers(25)
        tails = words >> np.arange(1, 51, 2).astype(np.uint64)  # small: far from 0; large: near 0
        for word in [int(w) for w in (*words, *tails, *(tails ^ np.uint64(SIGN - 1)))]:
            stream = Script(word, 2**63)
            result = int(sampler(stream, 1, bits)[0])
            assert result == expected(sampler, [word, 2**63][: stream.drawn], bits)

    @pytest.mark.parametrize("sampler", SAMPLERS)
    @pytest.mark.parametrize("bits", [0, 20, 40])
    @pytest.mark.parametrize(
        "words",
        [
            [0, 2**63],
            [SIGN, 2**63],
            [0, 5, 2**62],
            [0, 0, 0, 12345],
            [1, 2**63],
            [2**64 - 1, 2**63],
            [SIGN - 1, 2**63],
            [SIGN - 1, 2**64 - 1, 2**64 - 77],
        ],
    )
    def test_extreme_words_are_refined(self, sampler, bits, words):
        stream = Script(*words, *[2**63] * 4)
        result = int(sampler(stream, 1, bits)[0])
        assert result == expected(sampler, [*words, *[2**63] * 4][: stream.drawn], bits)
        if words[0] % SIGN == 0 and bits > 0:
            assert stream.drawn > 1

    @pytest.mark.parametrize("sampler", SAMPLERS)
    @pytest.mark.parametrize("edge", [0.5, 1.5, 123_456.5, 2**20 + 0.5, 2**21 + 0.5])
    def test_word_on_a_cell_boundary_takes_more_bits(self, sampler, edge):
        """u = survival(edge) to 191 bits: a bit more or less decides on which side of the edge it falls."""
        with mpmath.workdps(80):
            u = int(mpmath.floor(survival(sampler, mpmath.ldexp(edge, -20)) * mpmath.ldexp(1, 191)))
        cells = []
        for numerator in (u - 5, u + 5):
            words = [numerator >> 128, numerator >> 64 & 2**64 - 1, numerator & 2**64 - 1]
            stream = Script(*words)
            cells.append(abs(int(sampler(stream, 1, 20)[0])))
            assert stream.drawn == 3
        assert cells == [edge + 0.5, edge - 0.5]

    @pytest.mark.parametrize("sampler", [gaussian, laplace])
    @pytest.mark.parametrize("deviations", [0.1, 1, 3, 6, 7, 8, 9])
    @pytest.mark.parametrize("bits", [0, 20])
    def test_tail_mass(self, sampler, deviations, bits):
        """Exactly the words below 2**63 P(|X| > edge) lie beyond the edge."""
        cell = math.ceil(deviations * 2**bits)
        with mpmath.workdps(60):
            words = int(mpmath.floor(survival(sampler, mpmath.ldexp(2 * cell - 1, -bits - 1)) * 2**63))
        beyond = [int(sampler(Script(w), 1, bits)[0]) >= cell for w in (words - 1, words + 1)]
        assert beyond == [True, False]
        assert int(sampler(Script(SIGN + words - 1), 1, bits)[0]) <= -cell

    @pytest.mark.parametrize(("law", "sampler"), list(zip(QUANTILES, SAMPLERS, strict=True)))
    def test_float_quantiles_keep_half_their_error_bound(self, law, sampler):
        """survival(x - bound / 2) > u > survival(x + bound / 2), u the middle of the word's interval."""
        generator = np.random.default_rng(0)
        spread = (2.0 ** generator.uniform(5, 62.9, 800)).astype(np.int64)
        words = np.concatenate([generator.integers(0, 2**63 - 1, 800), spread, 2**63 - 1 - spread])
        u = (words.astype(np.float64) + 0.5) * 2.0**-63
        words, u = words[u < 1], u[u < 1]
        x, slope = law.quantile(u)
        bound = noise._FLOAT_ERROR * (np.abs(x) + 1 + slope)
        with mpmath.workdps(50):
            for word, value, half in zip(words, x, bound / 2, strict=True):
                if half < 0.1:  # else refined whatever x is
                    middle = (int(word) + mpmath.mpf(0.5)) / 2**63
                    assert survival(sampler, mpmath.mpf(value) - half, 50) > middle
                    assert survival(sampler, mpmath.mpf(value) + half, 50) < middle

    @pytest.mark.parametrize("law", QUANTILES)
    def test_survival_is_right_to_its_precision(self, law):
        from mpmath import libmp

        for cell in (0, 1, 2**19, 2**20, 3 * 2**20, 9 * 2**20, 20 * 2**20):
            edge = libmp.from_man_exp(2 * cell + 1, -21)
            short = libmp.to_fixed(law.survival(libmp, edge, 127), 63)
            long = libmp.to_fixed(law.survival(libmp, edge, 2000), 1000)
            assert abs((short << 937) - long) <= 1 << 937

    def test_refinement_is_rare_at_20_bits(self):
        stream = Script()
        gaussian(stream, 500_000, 20)
        assert stream.drawn <= 500_002


needs_kernels = pytest.mark.skipif(native.kernels() is None, reason="no kernels here")


def both(monkeypatch, draw):
    """What ``draw`` makes of one seeded stream, with kernels and without; the words left must agree too."""
    drawn = []
    for found in (native.kernels(), None):
        with monkeypatch.context() as patched:
            patched.setattr(native, "_loaded", found)
            stream = SeededStream(11)
            drawn.append(draw(stream))
            drawn.append(stream.integers(2))
    assert np.array_equal(drawn[1], drawn[3])
    return drawn[0], drawn[2]


@needs_kernels
class TestKernels:
    @pytest.mark.parametrize("bits", range(41))
    def test_samples_are_the_same(self, monkeypatch, bits):
        quick, plain = both(monkeypatch, lambda stream: gaussian(stream, 40_000 if bits < 30 else 1500, bits))
        assert np.array_equal(quick, plain)

    @pytest.mark.slow
    def test_millions_of_samples_are_the_same(self, monkeypatch):
        quick, plain = both(monkeypatch, lambda stream: gaussian(stream, 6_000_000, 24))
        assert np.array_equal(quick, plain)

    @pytest.mark.parametrize("bits", [0, 1, 20, 30, 40])
    def test_words_at_every_edge_of_a_segment(self, monkeypatch, bits):
        step = 7 if bits == 20 else 21
        edges = [round(2.0**e * (64 + k)) for e in range(-6, 57) for k in range(0, 64, step)]
        near = sorted({w for e in edges for w in (e - 1, e, e + 1) if w >= 0} | {0, 1, 2, SIGN - 1, SIGN - 2})
        assert max(near) == SIGN - 1
        certain = [w for w in near if w < SIGN]

        def draw(_):
            stream = Script(*[w ^ (SIGN if i % 3 == 0 else 0) for i, w in enumerate(certain)])
            return np.append(gaussian(stream, len(certain), bits), stream.drawn)

        quick, plain = both(monkeypatch, draw)
        assert np.array_equal(quick, plain)

    def test_words_at_a_cell_boundary_take_the_same_further_bits(self, monkeypatch):
        with mpmath.workdps(60):
            places = [survival(gaussian, mpmath.ldexp(2 * k + 1, -21)) for k in range(1, 2**23, 2**19 + 77)]
            words = [int(mpmath.floor(u * 2**63)) + step for u in places for step in range(-4, 5)]

        def draw(_):
            stream = Script(*words)
            return np.append(gaussian(stream, len(words), 20), stream.drawn)

        quick, plain = both(monkeypatch, draw)
        assert quick[-1] > len(words)
        assert np.array_equal(quick, plain)

    def test_polynomials_keep_half_their_error_bound_in_every_segment(self):
        """By mpmath at the ends, the middle and a point between, with the arithmetic of the kernel."""
        rows = native.table()
        place = np.arange(len(rows))
        assert len(rows) == native.OCTAVES * native.SEGMENTS
        exponent, segment = place // native.SEGMENTS - native.OCTAVES, place % native.SEGMENTS
        between = np.rint(np.random.default_rng(0).uniform(-1, 1, len(rows)) * 2**45) * 2.0**-52
        bound = native._FLOAT_ERROR * (rows[:, 0] + 1 + native._SLOPE) / 2
        assert np.all(bound < rows[:, 6] / 2)
        for t in (-(2.0**-7), 0.0, 2.0**-7 - 2.0**-52, between):
            u = np.ldexp(1 + (segment + 0.5) / native.SEGMENTS + t, exponent)
            x = rows[:, 5]
            for column in range(4, -1, -1):
                x = rows[:, column] + t * x
            with mpmath.workdps(40):
                for value, middle, half in zip(x, u, bound, strict=True):
                    # the survival function is convex beyond 0: its slope there bounds the distance in x
                    off = survival(gaussian, mpmath.mpf(value), 40) - mpmath.mpf(middle)
                    far = max(mpmath.mpf(value), 0) + mpmath.mpf(half)
                    density = mpmath.sqrt(2 / mpmath.pi) * mpmath.exp(-far * far / 2)
                    assert abs(off) < half * density

    def test_nothing_is_certain_beyond_the_range_of_the_words(self):
        assert native.table()[0, 6] > 0.5

    @pytest.mark.parametrize("shape", [(), (1,), (124,), (3, 50), (40_000,), (0,)])
    @pytest.mark.parametrize("each", [False, True])
    def test_noisy_sums_are_the_same(self, monkeypatch, shape, each):
        total = np.random.default_rng(0).normal(0, 100, shape)
        unit = np.abs(np.random.default_rng(1).normal(1, 0.1, shape)) if each else 0.7
        quick, plain = both(monkeypatch, lambda stream: noise.noisy(stream, total, unit, 2.0**-19, 20))
        assert type(quick) is type(plain)
        assert np.array_equal(quick, plain)

    def test_noisy_sums_with_open_samples(self, monkeypatch):
        total = np.random.default_rng(0).normal(0, 100, 700)
        quick, plain = both(monkeypatch, lambda stream: noise.noisy(stream, total, 2.0, 2.0**-38, 38))
        assert np.array_equal(quick, plain)

    def test_noisy_sums_are_clamped_and_finite(self, monkeypatch):
        quick, plain = both(monkeypatch, lambda s: noise.noisy(s, np.array([1e300, -1e300]), 1.0, 0.5, 20))
        assert np.array_equal(quick, plain)
        assert np.abs(quick - [2.0**60, -(2.0**60)]).max() < 10 * 2**20
        for bad in (np.nan, np.inf, -np.inf):
            with pytest.raises(InvalidValue, match="not finite"):
                noise.noisy(SeededStream(0), np.array([1.0, bad]), 1.0, 0.5, 20)

    @pytest.mark.parametrize("rate", [1.0, 0.9999, 0.3, 0.005, 2.0**-16, 1e-17])
    @pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 5000, 2**20 + 77])
    def test_draws_are_the_same(self, monkeypatch, rate, n):
        quick, plain = both(monkeypatch, lambda stream: stream.poisson_indices(rate, n))
        assert quick.dtype == plain.dtype
        assert np.array_equal(quick, plain)

    def test_threads_share_a_stream_without_repeats_or_gaps(self):
        stream, drawn = SeededStream(9), []
        threads = [
            threading.Thread(target=lambda: drawn.extend(gaussian(stream, 97, 20) for _ in range(200)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        alone = gaussian(SeededStream(9), 4 * 200 * 97, 20)
        assert np.array_equal(np.sort(np.concatenate(drawn)), np.sort(alone))


def explains(released, value):
    """Whether some noise can have turned the value into the released one."""
    return value + (released - value) == released


class TestAttacks:
    def test_float_noise_is_told_apart(self):
        """The harness has teeth: float64 normals around 0 often cannot have come from around 1."""
        generator = np.random.default_rng(0)
        around_0, around_1 = generator.standard_normal((2, 100_000)) + np.array([[0.0], [1.0]])
        assert explains(around_0, 0.0).all()
        assert explains(around_1, 1.0).all()
        assert (~explains(around_0, 1.0)).mean() > 0.1

    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_lattice_noise_is_not(self, sampler):
        bits, n = 20, 100_000
        stream = SeededStream(0)
        around_0, around_1 = sampler(stream, n, bits), 2**bits + sampler(stream, n, bits)
        for released in (around_0, around_1):
            assert explains(released, 0).all()
            assert explains(released, 2**bits).all()
            assert explains(released * 2.0**-bits, 1.0).all()
            for low_bits in (1, 2, 4):  # what the rest of the low bits could tell
                counts = np.bincount(released % 2**low_bits)
                assert chi_square(counts, np.full(2**low_bits, 2.0**-low_bits)) > 1e-3

    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_neighbours_reach_the_same_cells(self, sampler):
        bits, window = 6, np.arange(-64, 129)
        stream = SeededStream(1)
        reached = [np.isin(window, x + sampler(stream, 300_000, bits)) for x in (0, 1, 2**bits)]
        assert all(cells.all() for cells in reached)


class TestArguments:
    @pytest.mark.parametrize(
        ("call", "name"),
        [
            (lambda s: gaussian(s, -1, 20), "size"),
            (lambda s: gaussian(s, 1.0, 20), "size"),
            (lambda s: laplace(s, 1, 41), "bits"),
            (lambda s: gumbel(s, 1, -1), "bits"),
            (lambda s: gaussian(s, 1, True), "bits"),
            (lambda s: gaussian(np.random.default_rng(), 1, 20), "stream"),
            (lambda s: s.integers(-1), "n"),
            (lambda s: s.uniform_below(0, 1), "bound"),
            (lambda s: s.bernoulli(1.1, 1), "rate"),
            (lambda s: s.bernoulli(math.nan, 1), "rate"),
            (lambda s: s.poisson_indices(0, 0), "rate"),
            (lambda s: s.choose(4, 3), "size"),
            (lambda s: s.choose(1, "3"), "of"),
            (lambda s: SeededStream("seed"), "seed"),
            (lambda s: SeededStream(None), "seed"),
        ],
    )
    def test_refused_with_the_name_of_the_argument(self, call, name):
        with pytest.raises(InvalidValue, match=f"^{name} must be") as caught:
            call(SeededStream(0))
        assert isinstance(caught.value, FarthingError)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sum_that_is_not_finite_is_never_put_on_the_grid(bad):
    with pytest.raises(InvalidValue):
        noise.on_grid(np.array([1.0, bad]), 1.0, 2.0**-20)
