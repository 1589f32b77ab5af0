/* Kernels of farthing, built on first use by native.py. Each has a numpy version that gives the same answer and
   runs where there is no compiler. Nothing here allocates, locks or keeps state. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef int64_t i64;
typedef uint64_t u64;

static inline double as_double(i64 bits) { double value; memcpy(&value, &bits, 8); return value; }
static inline i64 as_bits(double value) { i64 bits; memcpy(&bits, &value, 8); return bits; }

/* Conversions between doubles and 64-bit integers, exact or rounded once like the language's own. AVX-512 has
   them for whole vectors; elsewhere they are made of halves, which compilers vectorise: 32 bits stand exactly
   behind the exponents of 2**84 and 2**52. */
#if defined(__AVX512DQ__)
static inline double from_i64(i64 value) { return (double)value; }
static inline i64 to_i64(double whole) { return (i64)whole; }
#else
static inline double from_i64(i64 value)
{
    double high = as_double((i64)(((u64)value >> 32) ^ 0x4530000080000000));
    double low = as_double((value & UINT32_MAX) | 0x4330000000000000);
    return (high - (0x1p84 + 0x1p63 + 0x1p52)) + low;
}

static inline i64 to_i64(double whole) /* a whole number of less than 2**63 */
{
    const double rounder = 0x1.8p52;
    double high = whole * 0x1p-32 + rounder, low = whole - (high - rounder) * 0x1p32 + rounder;
    return (i64)((u64)as_bits(high) << 32) + (as_bits(low) - as_bits(rounder));
}
#endif

/* ---- Gaussian noise on the lattice: see native.py for the table and its error bound ---- */

#define CHUNK 128 /* samples at a time, so that the steps between table look-ups vectorise */
#define ROUNDER 6755399441055744.0 /* 1.5 * 2**52: adding it rounds to an integer, in the low bits */
#define OPEN INT64_MIN             /* the floating-point quantile does not decide this cell */
#define MANTISSA ((1LL << 46) - 1) /* the bits of the mantissa below the six of the segment */

static inline i64 gaussian_chunk(const u64 *restrict words, i64 n, double scale,
                                 const double *restrict table, i64 *restrict cells)
{
    double at[CHUNK], x[CHUNK], error[CHUNK];
    i64 row[CHUNK], open = 0;
    for (i64 i = 0; i < n; i++) {
        double u = (from_i64(words[i] & INT64_MAX) + 0.5) * 0x1p-63;
        u = u < 1.0 - 0x1p-53 ? u : 1.0 - 0x1p-53;
        i64 bits = as_bits(u);
        row[i] = ((bits >> 46) - (959LL << 6)) << 3; /* the first segment begins at 2**-64 */
        at[i] = as_double((bits & MANTISSA) | (1023LL << 52)) - (1.0 + 0x1p-7);
    }
    i64 i = 0;
#if defined(__AVX512F__)
    for (; i + 8 <= n; i += 8) { /* eight rows, turned into columns */
        __m512d r[8], p[8], c[8];
        for (int k = 0; k < 8; k++)
            r[k] = _mm512_loadu_pd(table + row[i + k]);
        for (int k = 0; k < 8; k += 2) {
            p[k] = _mm512_unpacklo_pd(r[k], r[k + 1]);
            p[k + 1] = _mm512_unpackhi_pd(r[k], r[k + 1]);
        }
        for (int k = 0; k < 2; k++) {
            __m512d a = _mm512_shuffle_f64x2(p[k], p[k + 2], 0x88), b = _mm512_shuffle_f64x2(p[k], p[k + 2], 0xdd);
            __m512d e = _mm512_shuffle_f64x2(p[k + 4], p[k + 6], 0x88), f = _mm512_shuffle_f64x2(p[k + 4], p[k + 6], 0xdd);
            c[k] = _mm512_shuffle_f64x2(a, e, 0x88);
            c[k + 4] = _mm512_shuffle_f64x2(a, e, 0xdd);
            c[k + 2] = _mm512_shuffle_f64x2(b, f, 0x88);
            c[k + 6] = _mm512_shuffle_f64x2(b, f, 0xdd);
        }
        __m512d t = _mm512_loadu_pd(at + i), sum = c[5];
        for (int k = 4; k >= 0; k--)
            sum = _mm512_fmadd_pd(t, sum, c[k]);
        _mm512_storeu_pd(x + i, sum);
        _mm512_storeu_pd(error + i, c[6]);
    }
#elif defined(__AVX2__) && defined(__FMA__)
    for (; i + 4 <= n; i += 4) { /* four rows, turned into columns half by half */
        __m256d c[8], t = _mm256_loadu_pd(at + i);
        for (int half = 0; half < 8; half += 4) {
            __m256d r[4];
            for (int k = 0; k < 4; k++)
                r[k] = _mm256_loadu_pd(table + row[i + k] + half);
            __m256d p = _mm256_unpacklo_pd(r[0], r[1]), q = _mm256_unpackhi_pd(r[0], r[1]);
            __m256d v = _mm256_unpacklo_pd(r[2], r[3]), w = _mm256_unpackhi_pd(r[2], r[3]);
            c[half] = _mm256_permute2f128_pd(p, v, 0x20);
            c[half + 1] = _mm256_permute2f128_pd(q, w, 0x20);
            c[half + 2] = _mm256_permute2f128_pd(p, v, 0x31);
            c[half + 3] = _mm256_permute2f128_pd(q, w, 0x31);
        }
        __m256d sum = c[5];
        for (int k = 4; k >= 0; k--)
            sum = _mm256_fmadd_pd(t, sum, c[k]);
        _mm256_storeu_pd(x + i, sum);
        _mm256_storeu_pd(error + i, c[6]);
    }
#endif
    for (; i < n; i++) {
        const double *c = table + row[i];
        double t = at[i];
        x[i] = c[0] + t * (c[1] + t * (c[2] + t * (c[3] + t * (c[4] + t * c[5]))));
        error[i] = c[6];
    }
    for (i64 i = 0; i < n; i++) {
        i64 sign = (i64)words[i] >> 63;
        double scaled = x[i] * scale, rounded = scaled + ROUNDER;
        i64 cell = as_bits(rounded) - as_bits(ROUNDER);
        i64 doubt = !(fabs(scaled - (rounded - ROUNDER)) + error[i] * scale < 0.5);
        open += doubt;
        cells[i] = doubt ? OPEN : (cell ^ sign) - sign;
    }
    return open;
}

/* round(scale Z) of n words; OPEN where it is not certain. Returns how many are open. */
i64 gaussian(const u64 *words, i64 n, double scale, const double *table, i64 *cells)
{
    i64 open = 0, i = 0;
    for (; i + CHUNK <= n; i += CHUNK)
        open += gaussian_chunk(words + i, CHUNK, scale, table, cells + i);
    return open + gaussian_chunk(words + i, n - i, scale, table, cells + i);
}

/* total / unit / cell, rounded to integers with Gaussian noise added, times cell and unit. `units` is one
   number a coordinate, or NULL for `unit`. Returns open samples, or -1 where a total is not finite; in both
   cases `released` holds nothing to be used. */
i64 release(const u64 *words, i64 n, double scale, const double *table, const double *restrict total,
            const double *restrict units, double unit, double cell, double *restrict released)
{
    const double most = 0x1p61;
    i64 open = 0;
    for (i64 start = 0; start < n; start += CHUNK) {
        i64 noise[CHUNK], size = n - start < CHUNK ? n - start : CHUNK, strange = 0;
        const double *restrict from = total + start;
        open += gaussian_chunk(words + start, size, scale, table, noise);
        for (i64 i = 0; i < size; i++) {
            double by = units ? units[start + i] : unit, place = from[i] / by / cell;
            strange += !(fabs(from[i]) <= 0x1.fffffffffffffp1023);
            place = place < most ? place : most;
            place = place > -most ? place : -most;
            released[start + i] = from_i64(to_i64(rint(place)) + noise[i]) * cell * by;
        }
        if (strange)
            return -1;
    }
    return open;
}

/* Release float32 sums with noise that was drawn before: (round(total / (unit cell)) + noise) unit cell,
   where whole numbers up to 2**52 are held exactly. Returns how many totals are not finite. */
#define RELEASE_DRAWN(NAME, WHOLE) \
    i64 NAME(const float *restrict total, i64 n, const WHOLE *restrict noise, const float *restrict units, \
             double cell, float *restrict released) \
    { \
        const double most = 0x1p52; \
        i64 strange = 0; \
        for (i64 i = 0; i < n; i++) { \
            double by = units ? (double)units[i] * cell : cell, place = rint((double)total[i] / by); \
            strange += !(fabsf(total[i]) <= 0x1.fffffep127f); \
            place = place < most ? place : most; \
            place = place > -most ? place : -most; \
            released[i] = (float)((place + (double)noise[i]) * by); \
        } \
        return strange; \
    }

RELEASE_DRAWN(release_drawn_i8, i64)
RELEASE_DRAWN(release_drawn_i4, int32_t)

/* ---- Poisson draws: a byte a coin ---- */

/* Indices of the coins at most `head`, ascending; ~index where a coin equals it, which more bits decide.
   Returns how many indices, or -1 where they may not fit into `room` (64 above their number always do);
   *undecided says how many of them are open. */
i64 heads(const uint8_t *restrict coins, i64 n, i64 head, i64 first, i64 *restrict places, i64 room,
          i64 *restrict undecided)
{
    i64 *out = places, *last = places + room - 64, i = 0, open = 0;
#if defined(__AVX2__)
    const __m256i limit = _mm256_set1_epi8((char)head);
    for (; i + 64 <= n; i += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(coins + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(coins + i + 32));
        u64 mask = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(a, limit), a)) |
                   (u64)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(b, limit), b)) << 32;
        if (!mask)
            continue;
        if (out > last)
            return -1;
        u64 equal = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, limit)) |
                    (u64)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(b, limit)) << 32;
        open += __builtin_popcountll(equal);
        for (; mask; mask &= mask - 1) {
            i64 bit = __builtin_ctzll(mask);
            *out++ = (first + i + bit) ^ -(i64)(equal >> bit & 1);
        }
    }
#endif
    for (; i < n; i++) {
        i64 same = coins[i] == head;
        if (out >= last + 64)
            return -1;
        *out = (first + i) ^ -same;
        out += coins[i] <= head;
        open += same;
    }
    *undecided = open;
    return out - places;
}

/* Keeps the open places whose next word, less its low byte, is below `tail`. Returns how many are left. */
i64 settle(i64 *places, i64 n, const u64 *restrict words, u64 tail)
{
    i64 kept = 0;
    for (i64 i = 0; i < n; i++) {
        i64 place = places[i], open = place < 0;
        places[kept] = place ^ -open;
        kept += !open || *words >> 8 < tail;
        words += open;
    }
    return kept;
}

/* One head per word: table[k - 1] is 2**64 times the chance of k tails, falling, with `length` entries, a
   power of two. Places below n go to `places`; *last is that of the last coin decided, before and after. Returns how
   many, or -1 where a word equals an entry, which more bits must decide: then nothing is done. */
i64 leaps(const u64 *restrict words, i64 m, const u64 *restrict table, i64 length, i64 n, i64 *restrict places,
          i64 *restrict last)
{
    i64 count = 0, place = *last;
    for (i64 i = 0; i < m; i++) {
        u64 word = words[i];
        i64 tails = 0;
        for (i64 half = length / 2; half; half /= 2)
            tails += table[tails + half - 1] > word ? half : 0;
        tails += table[tails] > word;
        i64 head = tails < length;
        if (head && table[tails] == word)
            return -1;
        place += tails + head;
        places[count] = place;
        count += head && place < n;
    }
    *last = place;
    return count;
}

/* ---- Sums over the rows of linear models: a row is read once, in place ---- */

#define TOGETHER 8 /* rows whose products are made at once */
#define GROUP 32   /* rows that stay in the cache between their products and their sum */

/* Doubles of one vector register. Wider vectors than the processor has go through memory with some compilers,
   and so do conversions that are left to them. */
#if defined(__AVX512F__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
typedef double wide __attribute__((vector_size(8 * WIDTH)));
typedef i64 signs __attribute__((vector_size(8 * WIDTH)));

static inline wide load_f8(const double *from)
{
    wide found;
    memcpy(&found, from, sizeof found);
    return found;
}

static inline wide load_f4(const float *from)
{
#if defined(__AVX512F__)
    return (wide)_mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif defined(__AVX2__)
    return (wide)_mm256_cvtps_pd(_mm_loadu_ps(from));
#else
    return (wide){from[0], from[1], from[2], from[3]};
#endif
}

static inline wide load_u1(const uint8_t *from)
{
#if defined(__AVX512F__)
    return (wide)_mm512_cvtepi32_pd(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#elif defined(__AVX2__)
    int four;
    memcpy(&four, from, sizeof four);
    return (wide)_mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four)));
#else
    return (wide){from[0], from[1], from[2], from[3]};
#endif
}

static inline void store(double *to, wide values) { memcpy(to, &values, sizeof values); }
static inline wide splat(double value) { return value - (wide){0}; }
static inline wide choose(signs where, wide yes, wide no) { return (wide)((where & (signs)yes) | (~where & (signs)no)); }
static inline wide larger(wide a, wide b) { return choose((signs)(a < b), b, a); } /* a, where a is not a number */
static inline wide absolute(wide a) { return (wide)((signs)a & INT64_MAX); }

static inline wide roots(wide values)
{
#if defined(__AVX512F__)
    return (wide)_mm512_sqrt_pd((__m512d)values);
#elif defined(__AVX2__)
    return (wide)_mm256_sqrt_pd((__m256d)values);
#else
    return (wide){sqrt(values[0]), sqrt(values[1]), sqrt(values[2]), sqrt(values[3])};
#endif
}

#if defined(__AVX2__)
static inline __m256d halves(wide x)
{
#if defined(__AVX512F__)
    return _mm256_add_pd(_mm512_castpd512_pd256((__m512d)x), _mm512_extractf64x4_pd((__m512d)x, 1));
#else
    return (__m256d)x;
#endif
}
#endif

/* out[0 .. 3] = the sums of four vectors. A number goes through WIDTH - 1 roundings at most. */
static inline void four_sums(wide a, wide b, wide c, wide e, double *out)
{
#if defined(__AVX2__)
    __m256d ab = _mm256_hadd_pd(halves(a), halves(b)), ce = _mm256_hadd_pd(halves(c), halves(e));
    _mm256_storeu_pd(out, _mm256_add_pd(_mm256_permute2f128_pd(ab, ce, 0x21), _mm256_blend_pd(ab, ce, 12)));
#else
    for (int k = 0; k < 4; k++)
        out[k] = 0;
    for (int k = 0; k < WIDTH; k++)
        out[0] += a[k], out[1] += b[k], out[2] += c[k], out[3] += e[k];
#endif
}

static inline double across(wide sums)
{
    for (int k = WIDTH / 2; k > 0; k /= 2)
        for (int j = 0; j < k; j++)
            sums[j] += sums[j + k];
    return sums[0];
}

/* e^x, to two units in the last place; of x beyond 708 on either side that of 708. NaN stays. */
static inline wide wide_exponential(wide x)
{
    x = choose((signs)(x < splat(-708)), splat(-708), x);
    x = choose((signs)(x > splat(708)), splat(708), x);
    wide shifted = x * splat(0x1.71547652b82fep0) + splat(ROUNDER), n = shifted - splat(ROUNDER);
    wide r = x - n * splat(0x1.62e42fee00000p-1) - n * splat(0x1.a39ef35793c76p-33);
    wide sum = splat(1.0 / 479001600);
    sum = sum * r + splat(1.0 / 39916800);
    sum = sum * r + splat(1.0 / 3628800);
    sum = sum * r + splat(1.0 / 362880);
    sum = sum * r + splat(1.0 / 40320);
    sum = sum * r + splat(1.0 / 5040);
    sum = sum * r + splat(1.0 / 720);
    sum = sum * r + splat(1.0 / 120);
    sum = sum * r + splat(1.0 / 24);
    sum = sum * r + splat(1.0 / 6);
    sum = sum * r + splat(0.5);
    sum = sum * r + splat(1);
    sum = sum * r + splat(1);
    return sum * (wide)(((signs)shifted + 1023) << 52);
}

enum { LOGISTIC, HUBER_HINGE, SQUARED };

/* The terms of residuals, one number per row of the table; `unit` and `shrink` may be NULL for ones. Where `rms`
   is positive, min(|residual| norm / 2 rms, 1)^2 - 1/2 is summed as well. */
struct terms {
    const double *y, *norm, *unit, *shrink;
    double constant, clip, width, rms;
    i64 loss;
};

static inline wide residuals(i64 loss, double width, wide margin, wide y)
{
    if (loss == LOGISTIC)
        return 1 / (1 + wide_exponential(-margin)) - y;
    if (loss == SQUARED)
        return margin - y;
    wide sign = 2 * y - 1, below = (1 + width - sign * margin) / splat(2 * width);
    below = choose((signs)(below < splat(0)), splat(0), below);
    return -sign * choose((signs)(below > splat(1)), splat(1), below);
}

/* Replaces x[p] . u of some rows, v[0 .. count-1], by their factors: residuals, clipped; 0 where that is not a
   number. Adds to weight[0], the sum of the factors of z, and to weight[1], that of squares; a row that counts for
   nothing (shrink 0) does not. Rows are those at `places` or, if that is NULL, from `first` on. */
static inline void multiples(const struct terms *with, const i64 *places, i64 first, i64 count, double *v,
                             double *weight)
{
    const double *given[4] = {with->y, with->norm, with->unit, with->shrink};
    double mine[4][GROUP];
    const int whole = !places && count % WIDTH == 0;
    for (int k = 0; k < 4; k++)
        if (!given[k] || whole)
            given[k] += given[k] ? first : 0;
        else {
            for (i64 r = 0; r < count; r++)
                mine[k][r] = given[k][places ? places[r] : first + r];
            for (i64 r = count; r < count + WIDTH && r < GROUP; r++)
                mine[k][r] = k == 1 ? INFINITY : 0; /* nobody's row */
            given[k] = mine[k];
        }
    for (i64 r = count; r % WIDTH; r++)
        v[r] = 0;
    wide sum = {0}, squares = {0};
    for (i64 r = 0; r < count; r += WIDTH) {
        wide unit = given[2] ? load_f8(given[2] + r) : splat(1), shrink = given[3] ? load_f8(given[3] + r) : splat(1);
        wide margin = (load_f8(v + r) * unit + with->constant) * shrink;
        wide residual = residuals(with->loss, with->width, margin, load_f8(given[0] + r));
        wide size = absolute(residual) * load_f8(given[1] + r);
        wide factor = with->clip / choose((signs)(size < splat(with->clip)), splat(with->clip), size);
        signs counts = (signs)(factor > splat(1e-290));
        wide value = choose(counts, residual * factor * shrink, splat(0));
        sum += value;
        if (with->rms > 0) {
            wide share = size / splat(2 * with->rms);
            share = choose((signs)(share < splat(1)), share * share, splat(1)) - 0.5;
            squares += choose(counts & (signs)(shrink > splat(0)), share, splat(0));
        }
        store(v + r, value * unit);
    }
    weight[0] += across(sum);
    weight[1] += across(squares);
}

static inline void ahead(const void *row, i64 bytes)
{
    for (i64 at = 0; at < bytes; at += 64)
        __builtin_prefetch((const char *)row + at);
    __builtin_prefetch((const char *)row + bytes - 1);
}

static inline void prefetch(const struct terms *with, i64 p, const void *row, i64 bytes)
{
    __builtin_prefetch(with->y + p);
    __builtin_prefetch(with->norm + p);
    ahead(row, bytes);
}

/* Moves part[0 .. d-1] into the sum high + low: Knuth's two-sum, and the sum of its errors. */
static void move(double *restrict high, double *restrict low, double *restrict part, i64 d)
{
    for (i64 j = 0; j < d; j++) {
        double sum = high[j] + part[j], back = sum - high[j];
        low[j] += (high[j] - (sum - back)) + (part[j] - back);
        high[j] = sum;
        part[j] = 0;
    }
}

/* Columns that fill no vector are read with those before them, which count 0 (or, in sums, are left out): `tail` has
   the last WIDTH columns. Rows with fewer are read number by number. */
static inline void set_tail(const double *from, i64 d, double *tail)
{
    for (i64 k = 0; k < WIDTH && d >= WIDTH; k++)
        tail[k] = k < WIDTH - d % WIDTH ? 0 : from[d - WIDTH + k];
}

static inline void take_tail(double *part, i64 d, double *tail)
{
    for (i64 k = WIDTH - d % WIDTH; k < WIDTH && d >= WIDTH; k++)
        part[d - WIDTH + k] = tail[k];
    memset(tail, 0, WIDTH * sizeof *tail);
}

/* How rows are measured: base + |scale (x - centre)|^2 is a square of |z|, which is raised to (|scale x| + length) by
   and to `least`, and shrunk to `radius`; a blank row counts for nothing. See tables.py. */
struct measure {
    double base, length, by, least, radius;
    const uint8_t *blank;
    double *shrink, *norm;
};

/* Writes norms (and factors that shrink, if asked for) of `count` rows from `first` on. Returns how many are blank or
   not finite. */
static inline i64 measured(const struct measure *how, const double *near, const double *far, i64 first, i64 count)
{
    i64 bad = 0;
    for (i64 r = 0; r < count; r += WIDTH) {
        double blank[WIDTH] = {0}, out[2][WIDTH];
        wide size = roots(load_f8(near + r) + how->base), norm = size;
        if (how->by > 0)
            norm = larger(norm, (roots(load_f8(far + r)) + how->length) * how->by);
        norm = larger(norm, splat(how->least));
        for (i64 k = 0; how->blank && k < WIDTH && r + k < count; k++)
            blank[k] = how->blank[first + r + k];
        signs counts = (signs)(norm < splat(INFINITY)) & (signs)(load_f8(blank) < splat(0.5));
        wide shrink = choose((signs)(splat(how->radius) < size), how->radius / size, splat(1));
        shrink = choose(counts, shrink, splat(0));
        if (how->shrink)
            norm = choose((signs)(shrink > splat(0)), norm * shrink, splat(0));
        store(out[0], norm);
        store(out[1], shrink);
        for (i64 k = 0; k < WIDTH && r + k < count; k++) {
            how->norm[first + r + k] = out[0][k];
            if (how->shrink)
                how->shrink[first + r + k] = out[1][k];
            bad += !(out[1][k] > 0);
        }
    }
    return bad;
}

/* ---- Outer products, and products with a matrix, of rows of doubles in a small room ---- */

#define BLOCK 64 /* rows at a time */

/* out[j, k] += sum over n rows of z[j] z[k], for WIDTH j and `count` vectors of k */
static inline __attribute__((always_inline)) void outer_tile(const double *restrict z, i64 n, i64 pitch, i64 j, i64 k,
                                                             double *restrict out, const int count)
{
    wide sum[WIDTH][3];
    for (int i = 0; i < WIDTH; i++)
        for (int v = 0; v < count; v++)
            sum[i][v] = (wide){0};
    for (i64 r = 0; r < n; r++, z += pitch) {
        wide by[3];
        for (int v = 0; v < count; v++)
            by[v] = load_f8(z + k + v * WIDTH);
        for (int i = 0; i < WIDTH; i++)
            for (int v = 0; v < count; v++)
                sum[i][v] += z[j + i] * by[v];
    }
    for (int i = 0; i < WIDTH; i++)
        for (int v = 0; v < count; v++) {
            double *to = out + (j + i) * pitch + k + v * WIDTH;
            store(to, load_f8(to) + sum[i][v]);
        }
}

/* The same for all k from j's vector on: the upper triangle. `pitch` is a multiple of WIDTH. */
static void outer_sum(const double *restrict z, i64 n, i64 pitch, double *restrict out)
{
    for (i64 j = 0; j < pitch; j += WIDTH) {
        i64 k = j;
        for (; k + 3 * WIDTH <= pitch; k += 3 * WIDTH)
            outer_tile(z, n, pitch, j, k, out, 3);
        for (; k < pitch; k += WIDTH)
            outer_tile(z, n, pitch, j, k, out, 1);
    }
}

/* squares[r] += |sum over j of z[r, j] matrix[j, k]|^2 for WIDTH rows and `count` vectors of k, j from `first` on */
static inline __attribute__((always_inline)) void mixed_tile(const double *restrict z, i64 height, i64 first, i64 d,
                                                             i64 pitch, i64 k, const double *restrict matrix,
                                                             wide *squares, const int count)
{
    wide sum[WIDTH][3];
    for (int r = 0; r < WIDTH; r++)
        for (int v = 0; v < count; v++)
            sum[r][v] = (wide){0};
    for (i64 j = first; j < d; j++) {
        wide by[3];
        for (int v = 0; v < count; v++)
            by[v] = load_f8(matrix + j * pitch + k + v * WIDTH);
        for (int r = 0; r < WIDTH; r++)
            for (int v = 0; v < count; v++)
                sum[r][v] += z[r * height + j] * by[v];
    }
    for (int r = 0; r < WIDTH; r++)
        for (int v = 0; v < count; v++)
            squares[r] += sum[r][v] * sum[r][v];
}

/* squares[0 .. WIDTH-1] = |z matrix|^2 of WIDTH rows of room for `pitch`; with `upper`, matrix[j, k] = 0 for k > j. */
static void mixed_squares(const double *restrict z, i64 d, i64 pitch, const double *restrict matrix, i64 upper,
                          double *squares)
{
    wide sums[WIDTH];
    for (int r = 0; r < WIDTH; r++)
        sums[r] = (wide){0};
    i64 k = 0;
    const int tile = WIDTH == 8 ? 2 : 3; /* enough sums to keep a processor busy; with fewer, more zeros are skipped */
    for (; k + tile * WIDTH <= pitch; k += tile * WIDTH)
        mixed_tile(z, pitch, upper ? k : 0, d, pitch, k, matrix, sums, tile);
    for (; k < pitch; k += WIDTH)
        mixed_tile(z, pitch, upper ? k : 0, d, pitch, k, matrix, sums, 1);
    for (int r = 0; r < WIDTH; r += 4)
        four_sums(sums[r], sums[r + 1], sums[r + 2], sums[r + 3], squares + r);
}

/* The factor that clips a row of this norm: 0 for NaN, infinity and what would be less than 1e-290. */
static inline double clip_factor(double norm, double clip)
{
    double factor = norm <= clip ? 1 : clip / norm;
    return factor > 1e-290 ? factor : 0;
}

static inline void scale_row(double *z, i64 n, double factor)
{
    if (factor == 0)
        memset(z, 0, n * sizeof *z); /* whatever it holds */
    else if (factor != 1)
        for (i64 j = 0; j < n; j++)
            z[j] *= factor;
}

/* total[0 .. d+1] + total[d+2 .. 2d+3] = sum v x (of `centred` v (x - centre)), that of v before `unit`, and
   that of squares, over the
   rows at `places` (NULL: the first n); total has room for 3 (d + 2). At most `chain` rows are added up before
   they go into the two sums, and no term takes part in more roundings than that: see summing.py. Returns -1,
   and does nothing, where a place is no row. */
#define GRADIENT(NAME, TYPE)                                                                                  \
    static inline double dot_##NAME(const TYPE *row, const double *u, const double *tail, i64 d)              \
    {                                                                                                         \
        wide sum = {0};                                                                                       \
        double found;                                                                                         \
        i64 j = 0;                                                                                            \
        for (; j + WIDTH <= d; j += WIDTH)                                                                    \
            sum += load_##NAME(row + j) * load_f8(u + j);                                                     \
        if (j < d && d >= WIDTH)                                                                              \
            sum += load_##NAME(row + d - WIDTH) * load_f8(tail), j = d;                                       \
        for (found = across(sum); j < d; j++)                                                                 \
            found += (double)row[j] * u[j];                                                                   \
        return found;                                                                                         \
    }                                                                                                         \
    /* Of eight rows at once. Sums have names of their own: some compilers keep an array of them in memory. */\
    static inline void dots_##NAME(const TYPE *const *row, const double *u, const double *tail, i64 d,        \
                                   double *out)                                                               \
    {                                                                                                         \
        const TYPE *a = row[0], *b = row[1], *c = row[2], *e = row[3], *f = row[4], *g = row[5], *h = row[6], \
                   *k = row[7];                                                                               \
        wide A = {0}, B = {0}, C = {0}, E = {0}, F = {0}, G = {0}, H = {0}, K = {0};                          \
        i64 j = 0;                                                                                            \
        for (; j < d && d >= WIDTH; j += WIDTH) {                                                             \
            const i64 last = j + WIDTH > d, at = last ? d - WIDTH : j;                                        \
            wide factor = load_f8(last ? tail : u + j);                                                       \
            A += load_##NAME(a + at) * factor;                                                                \
            B += load_##NAME(b + at) * factor;                                                                \
            C += load_##NAME(c + at) * factor;                                                                \
            E += load_##NAME(e + at) * factor;                                                                \
            F += load_##NAME(f + at) * factor;                                                                \
            G += load_##NAME(g + at) * factor;                                                                \
            H += load_##NAME(h + at) * factor;                                                                \
            K += load_##NAME(k + at) * factor;                                                                \
        }                                                                                                     \
        four_sums(A, B, C, E, out);                                                                           \
        four_sums(F, G, H, K, out + 4);                                                                       \
        for (; j < d; j++)                                                                                    \
            for (int r = 0; r < TOGETHER; r++)                                                                \
                out[r] += (double)row[r][j] * u[j];                                                           \
    }                                                                                                         \
    /* part += v x, or v (x - centre) if `centred` is 1 */                                                         \
    static inline __attribute__((always_inline)) void add_one_##NAME(                                                 \
        const TYPE *row, double v, const double *centre, i64 d, double *part, double *tail, const int centred)        \
    {                                                                                                                 \
        i64 j = 0;                                                                                                    \
        for (; j < d && d >= WIDTH; j += WIDTH) {                                                                     \
            const i64 last = j + WIDTH > d, at = last ? d - WIDTH : j;                                                \
            double *to = last ? tail : part + j;                                                                      \
            wide value = load_##NAME(row + at);                                                                       \
            if (centred)                                                                                              \
                value -= load_f8(centre + at);                                                                        \
            store(to, load_f8(to) + v * value);                                                                       \
        }                                                                                                             \
        for (; j < d; j++)                                                                                            \
            part[j] += v * ((double)row[j] - (centred ? centre[j] : 0));                                              \
    }                                                                                                                 \
    static inline __attribute__((always_inline)) void add_##NAME(                                                     \
        const TYPE *const *row, const double *v, const double *centre, i64 d, double *part, double *tail,             \
        const int centred)                                                                                            \
    {                                                                                                                 \
        const TYPE *a = row[0], *b = row[1], *c = row[2], *e = row[3], *f = row[4], *g = row[5], *h = row[6],         \
                   *k = row[7];                                                                                       \
        const double va = v[0], vb = v[1], vc = v[2], ve = v[3], vf = v[4], vg = v[5], vh = v[6], vk = v[7];          \
        i64 j = 0;                                                                                                    \
        for (; j < d && d >= WIDTH; j += WIDTH) {                                                                     \
            const i64 last = j + WIDTH > d, at = last ? d - WIDTH : j;                                                \
            double *to = last ? tail : part + j;                                                                      \
            const wide from = centred ? load_f8(centre + at) : splat(0);                                              \
            wide first = load_f8(to) + va * (load_##NAME(a + at) - from), second = vb * (load_##NAME(b + at) - from); \
            first += vc * (load_##NAME(c + at) - from);                                                               \
            second += ve * (load_##NAME(e + at) - from);                                                              \
            first += vf * (load_##NAME(f + at) - from);                                                               \
            second += vg * (load_##NAME(g + at) - from);                                                              \
            first += vh * (load_##NAME(h + at) - from);                                                               \
            second += vk * (load_##NAME(k + at) - from);                                                              \
            store(to, first + second);                                                                                \
        }                                                                                                             \
        for (; j < d; j++)                                                                                            \
            for (int r = 0; r < TOGETHER; r++)                                                                        \
                part[j] += v[r] * ((double)row[r][j] - (centred ? centre[j] : 0));                                    \
    }                                                                                                                 \
    /* out[i] = x[i] . u of the first n rows */                                                               \
    i64 products_##NAME(const TYPE *restrict x, i64 stride, i64 n, i64 d, const double *restrict u,           \
                        double *restrict out)                                                                 \
    {                                                                                                         \
        i64 i = 0;                                                                                            \
        double tail[WIDTH];                                                                                   \
        set_tail(u, d, tail);                                                                                 \
        for (; i + TOGETHER <= n; i += TOGETHER) {                                                            \
            const TYPE *row[TOGETHER];                                                                        \
            for (int r = 0; r < TOGETHER; r++)                                                                \
                row[r] = x + (i + r) * stride;                                                                \
            dots_##NAME(row, u, tail, d, out + i);                                                            \
        }                                                                                                     \
        for (; i < n; i++)                                                                                    \
            out[i] = dot_##NAME(x + i * stride, u, tail, d);                                                  \
        return 0;                                                                                             \
    }                                                                                                         \
    /* near[0 .. 3] = |scale (x - centre)|^2 and, if asked for, far = |scale x|^2 of four rows */             \
    static inline __attribute__((always_inline)) void squares_##NAME(                                         \
        const TYPE *const *row, const double *centre, const double *scale, const double *tails, i64 d,        \
        double *near, double *far, const int both)                                                            \
    {                                                                                                         \
        wide A = {0}, B = {0}, C = {0}, E = {0}, F = {0}, G = {0}, H = {0}, K = {0};                          \
        i64 j = 0;                                                                                            \
        for (; j < d && d >= WIDTH; j += WIDTH) {                                                             \
            const i64 last = j + WIDTH > d, at = last ? d - WIDTH : j;                                        \
            wide from = load_f8(last ? tails : centre + j), by = load_f8(last ? tails + WIDTH : scale + j);   \
            wide a = load_##NAME(row[0] + at) * by, b = load_##NAME(row[1] + at) * by;                        \
            wide c = load_##NAME(row[2] + at) * by, e = load_##NAME(row[3] + at) * by;                        \
            if (both) {                                                                                       \
                F += a * a, G += b * b, H += c * c, K += e * e;                                               \
                a = (load_##NAME(row[0] + at) - from) * by, b = (load_##NAME(row[1] + at) - from) * by;       \
                c = (load_##NAME(row[2] + at) - from) * by, e = (load_##NAME(row[3] + at) - from) * by;       \
            }                                                                                                 \
            A += a * a, B += b * b, C += c * c, E += e * e;                                                   \
        }                                                                                                     \
        four_sums(A, B, C, E, near);                                                                          \
        if (both)                                                                                             \
            four_sums(F, G, H, K, far);                                                                       \
        for (; j < d; j++)                                                                                    \
            for (int r = 0; r < 4; r++) {                                                                     \
                double value = (double)row[r][j] * scale[j], off = ((double)row[r][j] - centre[j]) * scale[j]; \
                near[r] += off * off;                                                                         \
                if (both)                                                                                     \
                    far[r] += value * value;                                                                  \
            }                                                                                                 \
    }                                                                                                         \
    /* Measures the first n rows; where nothing is raised (by 0), centre is taken for 0. */                   \
    i64 measure_##NAME(const TYPE *restrict x, i64 stride, i64 n, i64 d, const double *centre,                \
                       const double *scale, double base, double length, double by, double least,              \
                       double radius, const uint8_t *blank, double *shrink, double *norm)                     \
    {                                                                                                         \
        const struct measure how = {base, length, by, least, radius, blank, shrink, norm};                    \
        double tails[2 * WIDTH], near[GROUP] = {0}, far[GROUP] = {0};                                         \
        i64 bad = 0;                                                                                          \
        set_tail(centre, d, tails);                                                                           \
        set_tail(scale, d, tails + WIDTH);                                                                    \
        for (i64 i = 0; i < n; i += GROUP) {                                                                  \
            const i64 count = n - i < GROUP ? n - i : GROUP;                                                  \
            for (i64 r = 0; r < count; r += 4) {                                                              \
                const TYPE *row[4];                                                                           \
                for (i64 k = 0; k < 4; k++) /* the last row again, where there is none */                     \
                    row[k] = x + (i + (r + k < count ? r + k : count - 1)) * stride;                          \
                if (by > 0)                                                                                   \
                    squares_##NAME(row, centre, scale, tails, d, near + r, far + r, 1);                       \
                else                                                                                          \
                    squares_##NAME(row, centre, scale, tails, d, near + r, far + r, 0);                       \
            }                                                                                                 \
            bad += measured(&how, near, far, i, count);                                                       \
        }                                                                                                     \
        return bad;                                                                                           \
    }                                                                                                         \
    /* z[0 .. d-1] = (unit x - centre) scale; returns the sum of its squares, and in `far` that of unit x scale */    \
    static inline double shaped_##NAME(const TYPE *row, double unit, const double *centre, const double *scale, i64 d,\
                                       double *z, double *far)                                                        \
    {                                                                                                                 \
        wide squares = {0}, others = {0};                                                                             \
        double rest = 0, other = 0;                                                                                   \
        i64 j = 0;                                                                                                    \
        for (; j + WIDTH <= d; j += WIDTH) {                                                                          \
            wide value = load_##NAME(row + j) * unit, by = load_f8(scale + j);                                        \
            wide off = (value - load_f8(centre + j)) * by;                                                            \
            value *= by;                                                                                              \
            squares += off * off;                                                                                     \
            others += value * value;                                                                                  \
            store(z + j, off);                                                                                        \
        }                                                                                                             \
        for (; j < d; j++) {                                                                                          \
            double value = (double)row[j] * unit;                                                                     \
            z[j] = (value - centre[j]) * scale[j];                                                                    \
            value *= scale[j];                                                                                        \
            rest += z[j] * z[j];                                                                                      \
            other += value * value;                                                                                   \
        }                                                                                                             \
        if (far)                                                                                                      \
            *far = other + across(others);                                                                            \
        return rest + across(squares);                                                                                \
    }                                                                                                                 \
    /* Measures the first n rows by a matrix: |z|^2 = base + |(x - centre) matrix|^2, beside |x|. `room` holds        \
       WIDTH * pitch. */                                                                                              \
    i64 mixed_##NAME(const TYPE *restrict x, i64 stride, i64 n, i64 d, const double *centre,                          \
                     const double *ones, const double *matrix, i64 pitch, i64 upper, double *restrict room, double base,\
                     double length, double by, double least, double radius, const uint8_t *blank, double *shrink,     \
                     double *norm)                                                                                    \
    {                                                                                                                 \
        const struct measure how = {base, length, by, least, radius, blank, shrink, norm};                            \
        double near[WIDTH] = {0}, far[WIDTH] = {0};                                                                   \
        i64 bad = 0;                                                                                                  \
        memset(room, 0, WIDTH * pitch * sizeof *room);                                                                \
        for (i64 i = 0; i < n; i += WIDTH) {                                                                          \
            const i64 count = n - i < WIDTH ? n - i : WIDTH;                                                          \
            for (i64 r = 0; r < count; r++)                                                                           \
                shaped_##NAME(x + (i + r) * stride, 1, centre, ones, d, room + r * pitch, far + r);                   \
            mixed_squares(room, d, pitch, matrix, upper, near);                                                       \
            bad += measured(&how, near, far, i, count);                                                               \
        }                                                                                                             \
        return bad;                                                                                                   \
    }                                                                                                                 \
    /* first[j] += sum of z[j] and out[j, k] += that of z[j] z[k] (k from j's vector on) over the first n rows, where z =\
       shrink [(unit x - centre) scale; constant], clipped. `room` holds BLOCK * pitch. */                            \
    i64 moments_##NAME(const TYPE *restrict x, i64 stride, i64 n, i64 d, const double *unit, const double *shrink,    \
                       const double *centre, const double *scale, double constant, double clip, i64 pitch,            \
                       double *restrict room, double *restrict first, double *restrict out)                           \
    {                                                                                                                 \
        memset(room, 0, BLOCK * pitch * sizeof *room);                                                                \
        for (i64 i = 0; i < n; i += BLOCK) {                                                                          \
            const i64 count = n - i < BLOCK ? n - i : BLOCK;                                                          \
            for (i64 r = 0; r < count; r++) {                                                                         \
                double *z = room + r * pitch, g = unit ? unit[i + r] : 1, h = shrink ? shrink[i + r] : 1;             \
                ahead(x + (i + r + BLOCK < n ? i + r + BLOCK : i + r) * stride, d * (i64)sizeof(TYPE));               \
                double square = shaped_##NAME(x + (i + r) * stride, g, centre, scale, d, z, NULL);                    \
                if (constant > 0)                                                                                     \
                    z[d] = constant;                                                                                  \
                scale_row(z, d + (constant > 0), h * clip_factor(h * sqrt(square + constant * constant), clip));      \
            }                                                                                                         \
            for (i64 j = 0; j < pitch; j += WIDTH) {                                                                  \
                wide sum = load_f8(first + j);                                                                        \
                for (i64 r = 0; r < count; r++)                                                                       \
                    sum += load_f8(room + r * pitch + j);                                                             \
                store(first + j, sum);                                                                                \
            }                                                                                                         \
            outer_sum(room, count, pitch, out);                                                                       \
        }                                                                                                             \
        return 0;                                                                                                     \
    }                                                                                                                 \
    /* first[j] += sum of z[j] and first[d + j] += that of z[j]^2 over the first n rows, where z = (unit x - centre) scale, and\
       the row of both is clipped, and counts for nothing if shrink is 0. */                                          \
    i64 powers_##NAME(const TYPE *restrict x, i64 stride, i64 n, i64 d, const double *unit, const double *shrink,     \
                      const double *centre, const double *scale, double clip, double *restrict first)                 \
    {                                                                                                                 \
        double tail[WIDTH], *second = first + d;                                                                      \
        set_tail(scale, d, tail);                                                                                     \
        for (i64 i = 0; i < n; i += 4) {                                                                              \
            const TYPE *row[4];                                                                                       \
            double g[4], f[4], squares[4];                                                                            \
            wide sums[4] = {{0}, {0}, {0}, {0}};                                                                      \
            for (int r = 0; r < 4; r++) { /* the last row again, where there is none: it counts 0 */                  \
                const i64 at = i + r < n ? i + r : n - 1;                                                             \
                row[r] = x + at * stride, g[r] = unit ? unit[at] : 1;                                                 \
                f[r] = i + r < n && !(shrink && shrink[at] == 0);                                                     \
            }                                                                                                         \
            i64 j = 0;                                                                                                \
            if (clip < INFINITY) {                                                                                    \
                for (; j < d && d >= WIDTH; j += WIDTH) {                                                             \
                    const i64 last = j + WIDTH > d, at = last ? d - WIDTH : j;                                        \
                    const wide from = load_f8(centre + at), by = load_f8(last ? tail : scale + j);                    \
                    for (int r = 0; r < 4; r++) {                                                                     \
                        wide z = (load_##NAME(row[r] + at) * g[r] - from) * by, two = z * z;                          \
                        sums[r] += two + two * two;                                                                   \
                    }                                                                                                 \
                }                                                                                                     \
                four_sums(sums[0], sums[1], sums[2], sums[3], squares);                                               \
                for (; j < d; j++)                                                                                    \
                    for (int r = 0; r < 4; r++) {                                                                     \
                        double z = ((double)row[r][j] * g[r] - centre[j]) * scale[j], two = z * z;                    \
                        squares[r] += two + two * two;                                                                \
                    }                                                                                                 \
                for (int r = 0; r < 4; r++)                                                                           \
                    f[r] = f[r] == 0 ? 0 : clip_factor(sqrt(squares[r]), clip);                                       \
            }                                                                                                         \
            for (int r = 0; r < 4; r++)                                                                               \
                g[r] = f[r] == 0 ? 0 : g[r]; /* what it holds may be beyond all numbers */                            \
            for (j = 0; j < d && d >= WIDTH; j += WIDTH) {                                                            \
                const i64 last = j + WIDTH > d, at = last ? d - WIDTH : j;                                            \
                const wide from = load_f8(centre + at), by = load_f8(last ? tail : scale + j);                        \
                wide one = load_f8(first + at), two = load_f8(second + at);                                           \
                for (int r = 0; r < 4; r++) {                                                                         \
                    wide z = (load_##NAME(row[r] + at) * g[r] - from) * by, part = z * f[r];                          \
                    one += part;                                                                                      \
                    two += part * z;                                                                                  \
                }                                                                                                     \
                store(first + at, one);                                                                               \
                store(second + at, two);                                                                              \
            }                                                                                                         \
            for (; j < d; j++)                                                                                        \
                for (int r = 0; r < 4; r++) {                                                                         \
                    double z = ((double)row[r][j] * g[r] - centre[j]) * scale[j];                                     \
                    first[j] += z * f[r];                                                                             \
                    second[j] += z * f[r] * z;                                                                        \
                }                                                                                                     \
        }                                                                                                             \
        return 0;                                                                                                     \
    }                                                                                                                 \
    static inline __attribute__((always_inline)) i64 summed_##NAME(                                                   \
        const TYPE *restrict x, i64 rows, i64 stride, const i64 *restrict places, i64 n, i64 d,                       \
        const double *restrict u, double constant, const double *y, const double *norm, const double *unit,           \
        const double *shrink, i64 loss, double width, double clip, double rms, i64 chain, const double *centre,       \
        double *restrict total, const int centred)                                                                    \
    {                                                                                                                 \
        const struct terms with = {y, norm, unit, shrink, constant, clip, width, rms, loss};                          \
        double *high = total, *low = total + d + 2, *part = total + 2 * (d + 2), ends[2][WIDTH] = {{0}};              \
        i64 bad = places ? 0 : n > rows, since = 0;                                                                   \
        for (i64 i = 0; places && i < n; i++)                                                                         \
            bad |= (u64)places[i] >= (u64)rows;                                                                       \
        if (bad || chain < 2 * TOGETHER)                                                                              \
            return -1;                                                                                                \
        const i64 most = chain < 2 * GROUP || GROUP * d * (i64)sizeof(TYPE) > 1 << 15 ? TOGETHER : GROUP;             \
        memset(total, 0, 3 * (d + 2) * sizeof *total);                                                                \
        set_tail(u, d, ends[0]);                                                                                      \
        for (i64 i = 0; i < n; i += most) {                                                                           \
            const i64 count = n - i < most ? n - i : most;                                                            \
            const TYPE *row[GROUP];                                                                                   \
            double v[GROUP];                                                                                          \
            i64 r = 0;                                                                                                \
            for (r = 0; r < count; r++)                                                                               \
                row[r] = x + (places ? places[i + r] : i + r) * stride;                                               \
            for (r = i + most; r < n && r < i + 2 * most; r++)                                                        \
            prefetch(&with, places ? places[r] : r, x + (places ? places[r] : r) * stride,                            \
                     d * (i64)sizeof(TYPE));                                                                          \
            for (r = 0; r + TOGETHER <= count; r += TOGETHER)                                                         \
                dots_##NAME(row + r, u, ends[0], d, v + r);                                                           \
            for (; r < count; r++)                                                                                    \
                v[r] = dot_##NAME(row[r], u, ends[0], d);                                                             \
            multiples(&with, places ? places + i : NULL, i, count, v, part + d);                                      \
            for (r = 0; r + TOGETHER <= count; r += TOGETHER)                                                         \
                add_##NAME(row + r, v + r, centre, d, part, ends[1], centred);                                        \
            for (; r < count; r++)                                                                                    \
                add_one_##NAME(row[r], v[r], centre, d, part, ends[1], centred);                                      \
            since += count;                                                                                           \
            if (since + most > chain)                                                                                 \
                take_tail(part, d, ends[1]), move(high, low, part, d + 2), since = 0;                                 \
        }                                                                                                             \
        take_tail(part, d, ends[1]);                                                                                  \
        move(high, low, part, d + 2);                                                                                 \
        return 0;                                                                                                     \
    }                                                                                                                 \
    i64 gradient_##NAME(const TYPE *restrict x, i64 rows, i64 stride, const i64 *restrict places, i64 n, i64 d,       \
                        const double *restrict u, double constant, const double *y, const double *norm,               \
                        const double *unit, const double *shrink, i64 loss, double width, double clip, double rms,    \
                        i64 chain, double *restrict total)                                                            \
    {                                                                                                                 \
        return summed_##NAME(x, rows, stride, places, n, d, u, constant, y, norm, unit, shrink, loss, width, clip, rms,\
                             chain, NULL, total, 0);                                                                  \
    }                                                                                                                 \
    i64 centred_##NAME(const TYPE *restrict x, i64 rows, i64 stride, const i64 *restrict places, i64 n, i64 d,        \
                       const double *restrict u, double constant, const double *y, const double *norm,                \
                       const double *unit, const double *shrink, i64 loss, double width, double clip, double rms,     \
                       i64 chain, double *restrict total, const double *centre)                                       \
    {                                                                                                                 \
        return summed_##NAME(x, rows, stride, places, n, d, u, constant, y, norm, unit, shrink, loss, width, clip, rms,\
                             chain, centre, total, 1);                                                                \
    }

GRADIENT(f8, double)
GRADIENT(f4, float)
GRADIENT(u1, uint8_t)

/* ---- The same of sparse rows ---- */

/* Rows lie one after the other as in CSR (`lanes` 1), or by eight in slices: number k of row i is at (starts[i / lanes]
   + k) lanes + i % lanes, and shorter rows of a slice end in zeros. No column is stored twice in a row otherwise.
   Rows from `first`, the first of a slice, to `last` are read. */
#define SPARSE                                                                                                \
    const double *restrict data, const int32_t *restrict columns, const int32_t *restrict starts, i64 lanes,  \
        i64 first, i64 last
#define LANES 8

/* Writes n rows of CSR, in the order given, into slices. */
i64 slice_rows(const double *restrict data, const int32_t *restrict columns, const int32_t *restrict starts,
               const i64 *restrict order, i64 n, const int32_t *restrict to, double *restrict values,
               int32_t *restrict places)
{
    for (i64 i = 0; i < n; i += LANES) {
        const i64 at = to[i / LANES] * (i64)LANES, most = to[i / LANES + 1] - to[i / LANES];
        for (i64 l = 0; l < LANES; l++) {
            const i64 from = i + l < n ? starts[order[i + l]] : 0;
            const i64 count = i + l < n ? starts[order[i + l] + 1] - from : 0;
            for (i64 k = 0; k < count; k++)
                values[at + k * LANES + l] = data[from + k], places[at + k * LANES + l] = columns[from + k];
            for (i64 k = count; k < most; k++)
                values[at + k * LANES + l] = 0, places[at + k * LANES + l] = 0;
        }
    }
    return 0;
}

static inline __attribute__((always_inline)) void sparse_dots(const double *restrict data,
                                                              const int32_t *restrict columns,
                                                              const int32_t *restrict starts, i64 first, i64 count,
                                                              const double *restrict u, double *restrict out,
                                                              const int lanes)
{
    for (i64 r = 0; r < count; r += lanes) {
        double sum[LANES] = {0};
        for (i64 k = starts[(first + r) / lanes] * (i64)lanes; k < starts[(first + r) / lanes + 1] * (i64)lanes; k += lanes)
            for (int l = 0; l < lanes; l++)
                sum[l] += data[k + l] * u[columns[k + l]];
        for (int l = 0; l < lanes; l++)
            out[r + l] = sum[l];
    }
}

/* out[i - first] = x[i] . u; there is room for whole slices. */
i64 products_csr(SPARSE, const double *restrict u, double *restrict out)
{
    if (lanes == 1)
        sparse_dots(data, columns, starts, first, last - first, u, out, 1);
    else
        sparse_dots(data, columns, starts, first, last - first, u, out, LANES);
    return 0;
}

static inline __attribute__((always_inline)) void sparse_sums(const double *restrict data,
                                                              const int32_t *restrict columns,
                                                              const int32_t *restrict starts, i64 first, i64 count,
                                                              const double *restrict v, double *part, const int lanes)
{
    for (i64 r = 0; r < count; r += lanes)
        for (i64 k = starts[(first + r) / lanes] * (i64)lanes; k < starts[(first + r) / lanes + 1] * (i64)lanes; k += lanes)
            for (int l = 0; l < lanes; l++)
                part[columns[k + l]] += v[r + l] * data[k + l];
}

i64 gradient_csr(SPARSE, i64 d, const double *restrict u, double constant, const double *y, const double *norm,
                 const double *unit, const double *shrink, i64 loss, double width, double clip, double rms, i64 chain,
                 double *restrict total)
{
    const struct terms with = {y, norm, unit, shrink, constant, clip, width, rms, loss};
    double *high = total, *low = total + d + 2, *part = total + 2 * (d + 2);
    if (chain < 2 * GROUP)
        return -1;
    memset(total, 0, 3 * (d + 2) * sizeof *total);
    for (i64 i = first, since = 0; i < last; i += GROUP) {
        const i64 count = last - i < GROUP ? last - i : GROUP;
        double v[GROUP];
        products_csr(data, columns, starts, lanes, i, i + count, u, v);
        multiples(&with, NULL, i, count, v, part + d);
        for (i64 r = count; r % LANES; r++)
            v[r] = 0;
        if (lanes == 1)
            sparse_sums(data, columns, starts, i, count, v, part, 1);
        else
            sparse_sums(data, columns, starts, i, count, v, part, LANES);
        since += count;
        if (since + GROUP > chain)
            move(high, low, part, d + 2), since = 0;
    }
    move(high, low, part, d + 2);
    return 0;
}

/* As measure_f8, but from stored values alone: |scale (x - centre)|^2 is `origin`, that of a row of zeros, and x (x -
   twice) square of stored ones, twice = 2 centre and square = scale^2. It is rounded upwards by 2^-30 of what is
   added up, which covers the roundings of 2^22 terms. */
i64 measure_csr(SPARSE, const double *restrict twice, const double *restrict square, double origin, double length,
                double by, double least, double radius, const uint8_t *blank, double *shrink, double *norm)
{
    const struct measure how = {0, length, by, least, radius, blank, shrink, norm};
    double near[GROUP] = {0}, far[GROUP] = {0};
    i64 bad = 0;
    for (i64 i = first; i < last; i += GROUP) {
        const i64 count = last - i < GROUP ? last - i : GROUP;
        for (i64 r = 0; r < count; r += lanes) {
            double sum[LANES] = {0}, size[LANES] = {0}, outer[LANES] = {0};
            for (i64 k = starts[(i + r) / lanes] * lanes; k < starts[(i + r) / lanes + 1] * lanes; k += lanes)
                for (i64 l = 0; l < lanes; l++) {
                    const double x = data[k + l], by_square = x * square[columns[k + l]];
                    const double term = by_square * (x - twice[columns[k + l]]);
                    sum[l] += term, size[l] += fabs(term), outer[l] += by_square * x;
                }
            for (i64 l = 0; l < lanes; l++) {
                near[r + l] = (origin + sum[l] < 0 ? 0 : origin + sum[l]) + 0x1p-30 * (origin + size[l]);
                far[r + l] = outer[l];
            }
        }
        bad += measured(&how, near, far, i, count);
    }
    return bad;
}

/* sums[j] += that of z[j] and sums[d + j] += that of z[j]^2, where z = shrink unit x scale */
i64 powers_csr(SPARSE, i64 d, const double *unit, const double *shrink, const double *restrict scale,
               double *restrict sums)
{
    double *squares = sums + d;
    for (i64 i = first; i < last; i += lanes) {
        double factor[LANES];
        for (i64 l = 0; l < lanes; l++)
            factor[l] = i + l < last ? (unit ? unit[i + l] : 1) * (shrink ? shrink[i + l] : 1) : 0;
        for (i64 k = starts[i / lanes] * lanes; k < starts[i / lanes + 1] * lanes; k += lanes)
            for (i64 l = 0; l < lanes; l++) {
                const double z = factor[l] * data[k + l] * scale[columns[k + l]];
                sums[columns[k + l]] += z;
                squares[columns[k + l]] += z * z;
            }
    }
    return 0;
}

/* ---- Sums over margins, and tables mapped by public bounds ---- */

/* total[0] + total[1] = the sum of residual * margin, clamped to `clip` on both sides, over n rows with x . u in
   `products`; what is not a number counts as 0. total has room for 3. */
i64 stretch(const double *restrict products, i64 n, double constant, const double *y, const double *unit,
            const double *shrink, i64 loss, double width, double clip, i64 chain, double *total)
{
    memset(total, 0, 3 * sizeof *total);
    for (i64 i = 0, since = 0; i < n; i += WIDTH) {
        const i64 count = n - i < WIDTH ? n - i : WIDTH;
        double mine[4][WIDTH] = {{0}};
        const double *given[4] = {products + i, y + i, unit ? unit + i : NULL, shrink ? shrink + i : NULL};
        for (int k = 0; k < 4 && count < WIDTH; k++)
            if (given[k])
                given[k] = memcpy(mine[k], given[k], count * sizeof(double));
        wide margin = load_f8(given[0]) * (given[2] ? load_f8(given[2]) : splat(1)) + constant;
        margin *= given[3] ? load_f8(given[3]) : splat(1);
        wide moved = residuals(loss, width, margin, load_f8(given[1])) * margin;
        moved = choose((signs)(absolute(moved) < splat(INFINITY)), moved, splat(0));
        moved = choose((signs)(moved > splat(clip)), splat(clip), moved);
        moved = choose((signs)(moved < splat(-clip)), splat(-clip), moved);
        for (i64 k = count; k < WIDTH; k++)
            moved[k] = 0;
        total[2] += across(moved);
        since += WIDTH;
        if (since + WIDTH > chain)
            move(total, total + 1, total + 2, 1), since = 0;
    }
    move(total, total + 1, total + 2, 1);
    return 0;
}

static inline void store_f4(float *to, wide values)
{
#if defined(__AVX512F__)
    _mm256_storeu_ps(to, _mm512_cvtpd_ps((__m512d)values));
#elif defined(__AVX2__)
    _mm_storeu_ps(to, _mm256_cvtpd_ps((__m256d)values));
#else
    for (int k = 0; k < WIDTH; k++)
        to[k] = (float)values[k];
#endif
}

/* out = (x - low) scale, clamped to [0, 1]; NaN where x is not finite. */
#define MAPPED(NAME, TYPE)                                                                            \
    i64 mapped_##NAME(const TYPE *restrict x, i64 stride, i64 n, i64 d, const double *restrict low,   \
                      const double *restrict scale, float *restrict out)                              \
    {                                                                                                 \
        for (i64 i = 0; i < n; i++) {                                                                 \
            const TYPE *row = x + i * stride;                                                         \
            float *to = out + i * d;                                                                  \
            i64 j = 0;                                                                                \
            for (; j < d && d >= WIDTH; j += WIDTH) {                                                 \
                const i64 at = j + WIDTH > d ? d - WIDTH : j;                                         \
                wide value = load_##NAME(row + at), share = (value - load_f8(low + at)) * load_f8(scale + at);\
                share = choose((signs)(share > splat(0)), share, splat(0));                           \
                share = choose((signs)(share < splat(1)), share, splat(1));                           \
                store_f4(to + at, share + (value - value));                                           \
            }                                                                                         \
            for (; j < d; j++) {                                                                      \
                double value = (double)row[j], share = (value - low[j]) * scale[j];                   \
                share = share > 0 ? share : 0;                                                        \
                share = share < 1 ? share : 1;                                                        \
                to[j] = (float)(share + (value - value));                                             \
            }                                                                                         \
        }                                                                                             \
        return 0;                                                                                     \
    }

MAPPED(f8, double)
MAPPED(f4, float)

/* Returns 1 if a number lies beyond its bounds, plus 2 if one is not finite. */
#define OUTSIDE(NAME, TYPE)                                                                                   \
    i64 outside_##NAME(const TYPE *restrict x, i64 stride, i64 n, i64 d, const double *restrict low,          \
                       const double *restrict high)                                                           \
    {                                                                                                         \
        signs beyond = {0}, odd = {0};                                                                        \
        i64 found = 0;                                                                                        \
        for (i64 i = 0; i < n; i++) {                                                                         \
            const TYPE *row = x + i * stride;                                                                 \
            i64 j = 0;                                                                                        \
            for (; j < d && d >= WIDTH; j += WIDTH) {                                                         \
                const i64 at = j + WIDTH > d ? d - WIDTH : j;                                                 \
                wide value = load_##NAME(row + at);                                                           \
                beyond |= (signs)(value < load_f8(low + at)) | (signs)(value > load_f8(high + at));           \
                odd |= ~(signs)(absolute(value) < splat(INFINITY));                                           \
            }                                                                                                 \
            for (; j < d; j++)                                                                                \
                found |= (row[j] < low[j] || row[j] > high[j]) | !(fabs((double)row[j]) < INFINITY) << 1;     \
        }                                                                                                     \
        for (int k = 0; k < WIDTH; k++)                                                                       \
            found |= (beyond[k] & 1) | (odd[k] & 2);                                                          \
        return found;                                                                                         \
    }

OUTSIDE(f8, double)
OUTSIDE(f4, float)

/* ---- Norms of a linear layer's per-example gradients, and the factors that follow ---- */

/* The squared norm of a row: neither tiny nor huge entries are lost in float64. */
static inline double square_of(const float *restrict row, i64 n)
{
    wide first = {0}, second = {0};
    double found = 0;
    i64 j = 0;
    for (; j + 2 * WIDTH <= n; j += 2 * WIDTH) {
        wide x = load_f4(row + j), y = load_f4(row + j + WIDTH);
        first += x * x;
        second += y * y;
    }
    for (; j < n; j++)
        found += (double)row[j] * row[j];
    return found + across(first + second);
}

/* squares[b] += |u[b]|^2 (weight |v[b]|^2 + bias), for u [n, height] and v [n, width], contiguous. Before that
   u is zeroed where `gate`, if there is one, is not above zero: the way back through a ReLU whose output it is. */
i64 add_squares(float *restrict u, const float *restrict gate, const float *restrict v, i64 n, i64 height,
                i64 width, double weight, double bias, double *restrict squares)
{
    for (i64 b = 0; b < n; b++) {
        float *restrict row = u + b * height;
        for (i64 j = 0; gate && j < height; j++)
            row[j] = gate[b * height + j] <= 0.0f ? 0.0f : row[j];
        squares[b] += square_of(row, height) * (weight ? weight * square_of(v + b * width, width) + bias : bias);
    }
    return 0;
}

/* The clipping factors of gradients with these squared norms: min(1, clip / norm), or clip / (norm + gamma) where
   gamma is not 0; 0 where a norm is not finite, as a float. Returns how many are not. */
i64 factors(const double *restrict squares, i64 n, double clip, double gamma, float *restrict out)
{
    i64 strange = 0;
    for (i64 b = 0; b < n; b++) {
        double norm = sqrt(squares[b]), most = norm > clip ? norm : clip;
        i64 finite = norm <= 0x1.fffffep127;
        out[b] = finite ? (float)(clip / (gamma ? norm + gamma : most)) : 0.0f;
        strange += !finite;
    }
    return strange;
}

/* out = sum over b of factor[b] row[b], for rows [n, d], added in float64. */
i64 weighted_rows(const float *restrict rows, const float *restrict factor, i64 n, i64 d, float *restrict out)
{
    enum { PIECE = 512 };
    for (i64 j = 0; j < d; j += PIECE) {
        i64 width = d - j < PIECE ? d - j : PIECE, b = 0, k;
        double sum[PIECE] = {0};
        for (; b + 4 <= n; b += 4) {
            const float *row[4];
            for (int r = 0; r < 4; r++)
                row[r] = rows + (b + r) * d + j;
            for (k = 0; k + WIDTH <= width; k += WIDTH) {
                wide first = load_f8(sum + k);
                for (int r = 0; r < 4; r++)
                    first += (double)factor[b + r] * load_f4(row[r] + k);
                memcpy(sum + k, &first, sizeof first);
            }
            for (; k < width; k++)
                for (int r = 0; r < 4; r++)
                    sum[k] += (double)factor[b + r] * row[r][k];
        }
        for (; b < n; b++)
            for (k = 0; k < width; k++)
                sum[k] += (double)factor[b] * rows[b * d + j + k];
        for (k = 0; k < width; k++)
            out[j + k] = (float)sum[k];
    }
    return 0;
}

/* out [p, q] = sum over b of u[b] (x) v[b], for u [n, p], p <= 16, and v [n, q], contiguous, added in float64 in
   `total`, which is room for p times q numbers, p rounded up to a multiple of four. */
i64 narrow_product(const float *restrict u, const float *restrict v, i64 n, i64 p, i64 q, double *restrict total,
                   float *restrict out)
{
    enum { TALL = 4, ROWS = 64 };
    double side[ROWS][16];
    i64 height = (p + TALL - 1) / TALL * TALL, end = q - q % (2 * WIDTH);
    memset(total, 0, sizeof(double) * height * q);
    for (i64 first = 0; first < n; first += ROWS) {
        i64 rows = n - first < ROWS ? n - first : ROWS;
        const float *restrict some = v + first * q;
        for (i64 b = 0; b < rows; b++)
            for (i64 o = 0; o < height; o++)
                side[b][o] = o < p ? u[(first + b) * p + o] : 0;
        for (i64 j = 0; j < end; j += 2 * WIDTH)
            for (i64 o = 0; o < height; o += TALL) {
                wide sum[TALL][2];
                for (int r = 0; r < TALL; r++)
                    memcpy(sum[r], total + (o + r) * q + j, sizeof sum[r]);
                for (i64 b = 0; b < rows; b++) {
                    wide left = load_f4(some + b * q + j), right = load_f4(some + b * q + j + WIDTH);
                    for (int r = 0; r < TALL; r++) {
                        sum[r][0] += side[b][o + r] * left;
                        sum[r][1] += side[b][o + r] * right;
                    }
                }
                for (int r = 0; r < TALL; r++)
                    memcpy(total + (o + r) * q + j, sum[r], sizeof sum[r]);
            }
        for (i64 b = 0; b < rows; b++)
            for (i64 o = 0; o < p; o++)
                for (i64 j = end; j < q; j++)
                    total[o * q + j] += side[b][o] * some[b * q + j];
    }
    for (i64 j = 0; j < p * q; j++)
        out[j] = (float)total[j];
    return 0;
}

/* The sum of out [n], of `count` parts [count, n] and, unless it is the first, of total, added in float64: written
   to out in float32 if it is the last, else to total. */
i64 add_parts(float *restrict out, const float *restrict parts, i64 count, i64 n, i64 first, i64 last,
              double *restrict total)
{
    i64 j = 0;
    for (; j + WIDTH <= n; j += WIDTH) {
        wide sum = load_f4(out + j);
        if (!first)
            sum += load_f8(total + j);
        for (i64 k = 0; k < count; k++)
            sum += load_f4(parts + k * n + j);
        if (!last)
            memcpy(total + j, &sum, sizeof sum);
        else
            for (int k = 0; k < WIDTH; k++)
                out[j + k] = (float)sum[k];
    }
    for (; j < n; j++) {
        double sum = out[j] + (first ? 0 : total[j]);
        for (i64 k = 0; k < count; k++)
            sum += parts[k * n + j];
        if (last)
            out[j] = (float)sum;
        else
            total[j] = sum;
    }
    return 0;
}

/* ---- Per-coordinate clipping of a layer's per-example gradients ---- */

#define TILE 64

static inline float clamped(float value, float limit)
{
    value = value == value ? value : 0.0f; /* NaN counts as zero */
    value = value < limit ? value : limit;
    return value > -limit ? value : -limit;
}

/* out[o, i] += sum_b clamp(sum_t delta[b, t, o] a[b, t, i], -s[o, i], s[o, i]) for o in first .. last - 1.
   `steps` is T, `outs` is O and `ins` is I; all arrays are contiguous. */
#define OUTER(NAME, SUM)                                                                                      \
    static inline void tile_##NAME(const float *restrict delta, const float *restrict a,                      \
                                   const float *restrict s, SUM *restrict out, i64 batch, i64 steps,          \
                                   i64 outs, i64 ins, i64 width)                                              \
    {                                                                                                         \
        SUM sum[TILE] = {0};                                                                                  \
        for (i64 b = 0; b < batch; b++) {                                                                     \
            float term[TILE];                                                                                 \
            for (i64 k = 0; k < width; k++)                                                                   \
                term[k] = *delta * a[k];                                                                      \
            delta += outs, a += ins;                                                                          \
            for (i64 t = 1; t < steps; t++, delta += outs, a += ins)                                          \
                for (i64 k = 0; k < width; k++)                                                               \
                    term[k] += *delta * a[k];                                                                 \
            for (i64 k = 0; k < width; k++)                                                                   \
                sum[k] += (SUM)clamped(term[k], s[k]);                                                        \
        }                                                                                                     \
        for (i64 k = 0; k < width; k++)                                                                       \
            out[k] += sum[k];                                                                                 \
    }                                                                                                         \
    static inline void outer_##NAME(const float *delta, const float *a, const float *s, SUM *out, i64 batch,   \
                                    i64 steps, i64 outs, i64 ins, i64 first, i64 last)                        \
    {                                                                                                         \
        for (i64 i = 0; i < ins; i += TILE)                                                                   \
            for (i64 o = first; o < last; o++) {                                                              \
                const float *limit = s + o * ins + i;                                                         \
                SUM *to = out + o * ins + i;                                                                  \
                if (ins - i >= TILE)                                                                          \
                    tile_##NAME(delta + o, a + i, limit, to, batch, steps, outs, ins, TILE);                  \
                else                                                                                          \
                    tile_##NAME(delta + o, a + i, limit, to, batch, steps, outs, ins, ins - i);               \
            }                                                                                                 \
    }

OUTER(f4, float)
OUTER(f8, double)

#if defined(__AVX512F__) && defined(__AVX512DQ__)
/* The sum above for `count` rows of 32 columns, of which `width` are used: sums, limits and terms stay in
   registers. range(x, y, 2) is the smaller of |x| and |y| with the sign of x. */
static inline __attribute__((always_inline)) void block(const float *restrict delta, const float *restrict a,
                                                        const float *restrict s, float *restrict out, i64 batch,
                                                        i64 steps, i64 outs, i64 ins, i64 width, const int count)
{
    const uint32_t there = width < 32 ? (1u << width) - 1 : ~0u;
    const __mmask16 mask[2] = {(__mmask16)there, (__mmask16)(there >> 16)};
    __m512 sum[4][2], limit[4][2];
    for (int o = 0; o < count; o++)
        for (int k = 0; k < 2; k++) {
            sum[o][k] = _mm512_setzero_ps();
            limit[o][k] = _mm512_maskz_loadu_ps(mask[k], s + o * ins + 16 * k);
        }
    for (i64 b = 0; b < batch; b++) {
        __m512 term[4][2];
        for (int o = 0; o < count; o++)
            term[o][0] = term[o][1] = _mm512_setzero_ps();
        for (i64 t = 0; t < steps; t++, delta += outs, a += ins)
            for (int k = 0; k < 2; k++) {
                __m512 x = _mm512_maskz_loadu_ps(mask[k], a + 16 * k);
                for (int o = 0; o < count; o++)
                    term[o][k] = _mm512_fmadd_ps(_mm512_set1_ps(delta[o]), x, term[o][k]);
            }
        for (int o = 0; o < count; o++)
            for (int k = 0; k < 2; k++) {
                __mmask16 number = _mm512_cmp_ps_mask(term[o][k], term[o][k], _CMP_ORD_Q);
                __m512 clamped = _mm512_range_ps(term[o][k], limit[o][k], 2);
                sum[o][k] = _mm512_mask_add_ps(sum[o][k], number, sum[o][k], clamped);
            }
    }
    for (int o = 0; o < count; o++)
        for (int k = 0; k < 2; k++) {
            float *to = out + o * ins + 16 * k;
            _mm512_mask_storeu_ps(to, mask[k], _mm512_add_ps(sum[o][k], _mm512_maskz_loadu_ps(mask[k], to)));
        }
}
#endif

i64 clamped_outer_f4(const float *delta, const float *a, const float *s, float *out, i64 batch, i64 steps,
                     i64 outs, i64 ins, i64 first, i64 last)
{
    if (batch == 0 || steps == 0)
        return 0;
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    for (i64 i = 0; i < ins; i += 32) {
        i64 o = first, width = ins - i;
        for (; o + 4 <= last; o += 4)
            block(delta + o, a + i, s + o * ins + i, out + o * ins + i, batch, steps, outs, ins, width, 4);
        for (; o < last; o++)
            block(delta + o, a + i, s + o * ins + i, out + o * ins + i, batch, steps, outs, ins, width, 1);
    }
#else
    outer_f4(delta, a, s, out, batch, steps, outs, ins, first, last);
#endif
    return 0;
}

i64 clamped_outer_f8(const float *delta, const float *a, const float *s, double *out, i64 batch, i64 steps,
                     i64 outs, i64 ins, i64 first, i64 last)
{
    if (batch && steps)
        outer_f8(delta, a, s, out, batch, steps, outs, ins, first, last);
    return 0;
}

/* ---- Per-example gradients of a convolution, or of a linear layer at several positions ---- */

/* Weights of a filter at a time, over two lanes of filters: their sums stay in registers. */
#define LANES 2
#if defined(__AVX512F__)
#define LANE 16
#define TAPS 8
#else
#define LANE 8
#define TAPS 6
#endif
#define REMADE (2 * TAPS) /* weights of a filter whose gradients are made again at a time */
typedef float lane __attribute__((vector_size(4 * LANE)));

static inline __attribute__((always_inline)) void taps(const float *restrict x, const float *restrict delta,
                                                       const i64 *restrict base, const i64 *restrict off,
                                                       i64 spots, i64 pitch, i64 filters, float *restrict row,
                                                       i64 height, lane *square, const int count,
                                                       const int lanes)
{
    lane sum[TAPS][LANES];
    for (int j = 0; j < count; j++)
        for (int k = 0; k < lanes; k++)
            sum[j][k] = (lane){0};
    const float *at[TAPS];
    for (int j = 0; j < count; j++)
        at[j] = x + off[j];
    for (i64 t = 0; t < spots; t++) {
        lane d[LANES];
        for (int k = 0; k < lanes; k++)
            memcpy(&d[k], delta + t * pitch + LANE * k, sizeof(lane));
        for (int j = 0; j < count; j++) {
            float value = at[j][base[t]];
            for (int k = 0; k < lanes; k++)
                sum[j][k] += d[k] * value;
        }
    }
    for (int j = 0; j < count; j++)
        for (int k = 0; k < lanes; k++) {
            i64 left = filters - LANE * k;
            *square += sum[j][k] * sum[j][k];
            if (left >= LANE)
                memcpy(row + j * height + LANE * k, &sum[j][k], sizeof(lane));
            else if (left > 0)
                memcpy(row + j * height + LANE * k, &sum[j][k], 4 * left);
        }
}

/* row[j, k] = sum over spots t of x[base[t] + off[j] + k] delta[t] for k < run, and *square += its squares: a filter
   that sees one channel, whose weights are `runs` runs of neighbours. Nothing is read at or after `end`. */
static inline __attribute__((always_inline)) void tap_runs(const float *restrict x, const float *end,
                                                           const float *restrict delta, const i64 *restrict base,
                                                           const i64 *restrict off, i64 spots, i64 run,
                                                           float *restrict row, float *square, const int runs)
{
    lane sum[8] = {{0}};
    i64 t = 0, safe = spots;
    while (safe > 0 && x + base[safe - 1] + off[(runs - 1) * run] + LANE > end)
        safe--;
    for (; t < safe; t++)
        for (int j = 0; j < runs; j++) {
            lane value;
            memcpy(&value, x + base[t] + off[j * run], sizeof(lane));
            sum[j] += value * delta[t];
        }
    for (; t < spots; t++)
        for (int j = 0; j < runs; j++)
            for (i64 k = 0; k < run; k++)
                sum[j][k] += x[base[t] + off[j * run] + k] * delta[t];
    for (int j = 0; j < runs; j++)
        for (i64 k = 0; k < run; k++) {
            row[j * run + k] = sum[j][k];
            *square += sum[j][k] * sum[j][k];
        }
}

/* The length of the runs of neighbours that the places `off` are made of, at most a lane. */
static i64 run_length(const i64 *restrict off, i64 width)
{
    i64 run = 1;
    while (run < width && run < LANE && off[run] == off[run - 1] + 1)
        run++;
    for (i64 q = 0; q < width; q++)
        if (width % run || off[q] != off[q - q % run] + q % run)
            return 1;
    return run;
}

/* A layer whose examples are `size` numbers: `planes` planes [high, across], put at (top, left) into planes of zeros
   [tall, broad] (tall 0: they are taken as they are, with `apart` numbers between groups either way). A group has
   `width` weights a filter and `height` filters; with `sites` 0 delta is [b, t, g, p], else [b, r, g, p, s]. */
typedef struct {
    i64 size, spots, sites, groups, height, width, apart, planes, high, across, top, left, tall, broad;
} layer;

/* An example with its padding, in `frame`, whose border is zeros. */
static const float *framed(const float *restrict x, const layer *s, float *restrict frame)
{
    if (!s->tall)
        return x;
    for (i64 n = 0; n < s->planes * s->high; n++) {
        const i64 plane = n / s->high, line = n % s->high;
        memcpy(frame + (plane * s->tall + s->top + line) * s->broad + s->left, x + n * s->across,
               s->across * sizeof(float));
    }
    return frame;
}

/* block[t, f] = delta of filters p .. p + filters - 1 of a group, `pitch` numbers a spot. */
static void turned(const float *restrict delta, const layer *s, i64 b, i64 g, i64 p, i64 filters, i64 pitch,
                   float *restrict block)
{
    if (!s->sites) {
        for (i64 t = 0; t < s->spots; t++)
            memcpy(block + t * pitch, delta + ((b * s->spots + t) * s->groups + g) * s->height + p,
                   filters * sizeof(float));
        return;
    }
    for (i64 r = 0; r < s->spots / s->sites; r++)
        for (i64 f = 0; f < filters; f++) {
            const i64 records = s->spots / s->sites;
            const float *restrict from = delta + (((b * records + r) * s->groups + g) * s->height + p + f) * s->sites;
            for (i64 at = 0; at < s->sites; at++)
                block[(r * s->sites + at) * pitch + f] = from[at];
        }
}

/* rows[b, g, q, p] = sum over spots t of x[b, g, base[t] + off[q]] delta[b, r, g, p, s], t = (r, s), for
   examples first .. last - 1, and the sum of their squares. `room` holds spots * (height rounded up to 32) floats
   and a frame. */
i64 windows(const float *restrict x, const float *restrict delta, const i64 *restrict base,
            const i64 *restrict off, const i64 *restrict shape, i64 first, i64 last, float *restrict room,
            float *restrict rows, float *restrict squares)
{
    const layer s = *(const layer *)shape;
    const i64 height = s.height, width = s.width, spots = s.spots;
    const i64 pitch = height > LANE ? LANE * LANES : LANE;
    const i64 blocks = spots * ((height + pitch - 1) / pitch) * pitch, numbers = s.planes * s.tall * s.broad;
    float *restrict frame = room + blocks;
    memset(room, 0, (blocks + numbers) * sizeof(float));
    const i64 run = height == 1 && s.sites == spots ? run_length(off, width) : 1;
    for (i64 b = first; b < last; b++) {
        lane square = {0};
        const float *restrict all = framed(x + b * s.size, &s, frame);
        for (i64 g = 0; g < s.groups; g++) {
            const float *restrict in = all + g * s.apart;
            float *restrict out = rows + (b * s.groups + g) * width * height;
            if (run > 1) {
                const float *restrict from = delta + (b * s.groups + g) * s.sites;
                const float *end = s.tall ? frame + numbers : x + last * s.size;
                float more = 0;
                i64 q = 0;
#define RUNS(COUNT)                                                                                           \
    for (; q + COUNT * run <= width; q += COUNT * run)                                                        \
        tap_runs(in, end, from, base, off + q, spots, run, out + q, &more, COUNT)
                RUNS(7);
                RUNS(5);
                RUNS(3);
                RUNS(1);
#undef RUNS
                square[0] += more;
                continue;
            }
            for (i64 p = 0; p < height; p += pitch) {
                i64 filters = height - p < pitch ? height - p : pitch, q = 0;
                float *restrict block = room + spots * p;
                turned(delta, &s, b, g, p, filters, pitch, block);
#define ALL(COUNT, N)                                                                                         \
    for (; q + COUNT <= width; q += COUNT)                                                                    \
        taps(in, block, base, off + q, spots, pitch, filters, out + q * height + p, height, &square, COUNT, N)
                if (pitch == LANE) {
                    ALL(TAPS, 1);
                    ALL(2, 1);
                    ALL(1, 1);
                } else {
                    ALL(TAPS, LANES);
                    ALL(4, LANES);
                    ALL(2, LANES);
                    ALL(1, LANES);
                }
#undef ALL
            }
        }
        float sum = 0;
        for (int k = 0; k < LANE; k++)
            sum += square[k];
        squares[b] = sum;
    }
    return 0;
}

/* tile[j, k] = sum over spots t of x[base[t] + off[j]] delta[t, k], j < count and k < LANE * LANES. Never
   inlined: what is measured and what is summed are the same numbers to the last bit. */
static __attribute__((noinline)) void row_tile(const float *restrict x, const float *restrict delta,
                                               const i64 *restrict base, const i64 *restrict off, i64 spots,
                                               i64 count, float *restrict tile)
{
    lane square = {0};
    i64 j = 0;
    for (; j + TAPS <= count; j += TAPS)
        taps(x, delta, base, off + j, spots, LANE * LANES, LANE * LANES, tile + j * LANE * LANES, LANE * LANES,
             &square, TAPS, LANES);
    for (; j < count; j++)
        taps(x, delta, base, off + j, spots, LANE * LANES, LANE * LANES, tile + j * LANE * LANES, LANE * LANES,
             &square, 1, LANES);
}

/* The sums of squares of what `windows` calls rows, which are not kept; arguments as there. */
i64 window_squares(const float *restrict x, const float *restrict delta, const i64 *restrict base,
                   const i64 *restrict off, const i64 *restrict shape, i64 first, i64 last, float *restrict room,
                   float *restrict squares)
{
    const layer s = *(const layer *)shape;
    const i64 pitch = LANE * LANES, numbers = s.planes * s.tall * s.broad;
    float *restrict frame = room, *restrict block = room + numbers;
    memset(frame, 0, numbers * sizeof(float));
    for (i64 b = first; b < last; b++) {
        lane square = {0}, tile[REMADE * LANES];
        const float *restrict all = framed(x + b * s.size, &s, frame);
        for (i64 g = 0; g < s.groups; g++)
            for (i64 p = 0; p < s.height; p += pitch) {
                const i64 filters = s.height - p < pitch ? s.height - p : pitch;
                if (filters < pitch)
                    memset(block, 0, s.spots * pitch * sizeof(float));
                turned(delta, &s, b, g, p, filters, pitch, block);
                for (i64 q = 0; q < s.width; q += REMADE) {
                    const i64 count = s.width - q < REMADE ? s.width - q : REMADE;
                    row_tile(all + g * s.apart, block, base, off + q, s.spots, count, (float *)tile);
                    for (i64 k = 0; k < count * LANES; k++)
                        square += tile[k] * tile[k];
                }
            }
        float sum = 0;
        for (int k = 0; k < LANE; k++)
            sum += square[k];
        squares[b] = sum;
    }
    return 0;
}

/* out[g, p, q] += sum over n examples of factor[b] rows[b, g, q, p], for from <= q < to: rows are made again, in
   float32, and added in float64 in `total`, of as many numbers as out. `room` holds, for 16 examples, a frame
   and spots * (height rounded up to 32) floats each. */
i64 window_sums(const float *restrict x, const float *restrict delta, const i64 *restrict base,
                const i64 *restrict off, const i64 *restrict shape, const float *restrict factor, i64 n, i64 from,
                i64 to, float *restrict room, double *restrict total, float *restrict out)
{
    enum { FEW = 16 };
    const layer s = *(const layer *)shape;
    const i64 pitch = LANE * LANES, numbers = s.planes * s.tall * s.broad, tall = (s.height + pitch - 1) / pitch;
    float *restrict turn = room + FEW * numbers;
    memset(room, 0, FEW * (numbers + s.spots * tall * pitch) * sizeof(float));
    for (i64 g = 0; g < s.groups; g++)
        memset(total + (g * s.width + from) * s.height, 0, (to - from) * s.height * sizeof(double));
    for (i64 first = 0; first < n; first += FEW) {
        const i64 some = n - first < FEW ? n - first : FEW;
        const float *all[FEW];
        for (i64 c = 0; c < some; c++)
            all[c] = framed(x + (first + c) * s.size, &s, room + c * numbers);
        for (i64 g = 0; g < s.groups; g++) {
            for (i64 c = 0; c < some; c++)
                for (i64 p = 0; p < s.height; p += pitch)
                    turned(delta, &s, first + c, g, p, s.height - p < pitch ? s.height - p : pitch, pitch,
                           turn + (c * tall * pitch + p) * s.spots);
            for (i64 p = 0; p < s.height; p += pitch)
                for (i64 q = from; q < to; q += REMADE) {
                    const i64 count = to - q < REMADE ? to - q : REMADE;
                    const i64 filters = s.height - p < pitch ? s.height - p : pitch;
                    lane tile[REMADE * LANES];
                    wide sum[REMADE * LANES * LANE / WIDTH] = {{0}};
                    float *row = (float *)tile;
                    for (i64 c = 0; c < some; c++) {
                        const double by = factor[first + c];
                        row_tile(all[c] + g * s.apart, turn + (c * tall * pitch + p) * s.spots, base, off + q,
                                 s.spots, count, row);
                        for (i64 k = 0; k < count * pitch / WIDTH; k++)
                            sum[k] += by * load_f4(row + k * WIDTH);
                    }
                    for (i64 j = 0; j < count; j++) {
                        double *restrict into = total + (g * s.width + q + j) * s.height + p;
                        const double *restrict more = (const double *)sum + j * pitch;
                        for (i64 f = 0; f < filters; f++)
                            into[f] += more[f];
                    }
                }
        }
    }
    for (i64 g = 0; g < s.groups; g++)
        for (i64 p = 0; p < s.height; p += 8) /* some lines of memory at a time, for both orders */
            for (i64 q = from; q < to; q++)
                for (i64 k = p; k < p + 8 && k < s.height; k++)
                    out[(g * s.height + k) * s.width + q] += (float)total[(g * s.width + q) * s.height + k];
    return 0;
}

/* ---- Per-example gradients of norms: sums of delta times the normalised input, and of delta ---- */

/* scale[b, c] = sum over sites of delta * x normalised over its group, shift[b, c] = sum of delta, for x and delta
   [n, groups * each, sites], contiguous. Sums are made in float64, so that a mean takes nothing away. Unless `back_x`
   is null, it is the gradient of x, where delta is that of the normalised x times gamma [groups * each]. */
i64 group_sums(const float *restrict x, const float *restrict delta, const float *restrict gamma, i64 n, i64 groups,
               i64 each, i64 sites, double eps, float *restrict scale, float *restrict shift, float *restrict back_x)
{
    for (i64 g = 0; g < n * groups; g++) {
        const i64 count = each * sites;
        const float *restrict in = x + g * count, *restrict back = delta + g * count;
        wide s = {0}, ss = {0};
        double sum = 0, square = 0;
        i64 k = 0;
        for (; k + WIDTH <= count; k += WIDTH) {
            wide a = load_f4(in + k);
            s += a, ss += a * a;
        }
        for (; k < count; k++)
            sum += in[k], square += (double)in[k] * in[k];
        const double mean = (sum + across(s)) / count, spread = (square + across(ss)) / count - mean * mean;
        const double by = 1 / sqrt((spread > 0 ? spread : 0) + eps);
        double middle = 0, slope = 0;
        for (i64 c = 0; c < each; c++, in += sites, back += sites) {
            wide d = {0}, ds = {0};
            double one = 0, other = 0;
            for (k = 0; k + WIDTH <= sites; k += WIDTH) {
                wide b = load_f4(back + k);
                d += b, ds += b * (load_f4(in + k) - mean);
            }
            for (; k < sites; k++)
                one += back[k], other += back[k] * (in[k] - mean);
            one += across(d), other = by * (other + across(ds));
            shift[g * each + c] = (float)one;
            scale[g * each + c] = (float)other;
            if (back_x)
                middle += gamma[g % groups * each + c] * one, slope += gamma[g % groups * each + c] * other;
        }
        if (!back_x)
            continue;
        const float centre = (float)mean, less = (float)(by * middle / count), tilt = (float)(by * by * slope / count);
        for (i64 c = 0; c < each; c++) {
            const float times = (float)(by * gamma[g % groups * each + c]);
            const i64 at = (g * each + c) * sites;
            for (k = at; k < at + sites; k++)
                back_x[k] = times * delta[k] - less - tilt * (x[k] - centre);
        }
    }
    return 0;
}

/* scale[b, j] = sum over positions of delta * x normalised over its width, shift[b, j] = sum of delta, for x and
   delta [n, positions, width], contiguous; not `centred` for RMS norms. */
i64 layer_sums(const float *restrict x, const float *restrict delta, i64 n, i64 positions, i64 width, double eps,
               i64 centred, float *restrict scale, float *restrict shift)
{
    memset(scale, 0, n * width * sizeof(float));
    memset(shift, 0, n * width * sizeof(float));
    for (i64 b = 0; b < n; b++) {
        float *restrict to = scale + b * width, *restrict and = shift + b * width;
        for (i64 t = 0; t < positions; t++) {
            const float *restrict in = x + (b * positions + t) * width;
            const float *restrict back = delta + (b * positions + t) * width;
            wide s = {0}, ss = {0};
            double sum = 0, square = 0;
            i64 k = 0;
            for (; k + WIDTH <= width; k += WIDTH) {
                wide a = load_f4(in + k);
                s += a, ss += a * a;
            }
            for (; k < width; k++)
                sum += in[k], square += (double)in[k] * in[k];
            sum += across(s), square += across(ss);
            const double mean = centred ? sum / width : 0, spread = square / width - mean * mean;
            const float by = (float)(1 / sqrt((spread > 0 ? spread : 0) + eps)), middle = (float)mean;
            for (k = 0; k < width; k++) {
                to[k] += back[k] * ((in[k] - middle) * by);
                and[k] += back[k];
            }
        }
    }
    return 0;
}

/* squares[b] = |sum over t of e(ids[b, t]) x v[b, t]|^2, for ids [n, positions] and v [n, positions, width]: rows of one
   table that were looked up together are added up first. `room` holds positions * width doubles. */
i64 lookup_squares(const i64 *restrict ids, const float *restrict v, i64 n, i64 positions, i64 width,
                   double *restrict room, double *restrict squares)
{
    for (i64 b = 0; b < n; b++, ids += positions) {
        double square = 0;
        for (i64 t = 0; t < positions; t++, v += width) {
            i64 first = 0;
            while (ids[first] != ids[t])
                first++;
            double *restrict to = room + first * width;
            if (first == t)
                for (i64 j = 0; j < width; j++)
                    to[j] = v[j];
            else
                for (i64 j = 0; j < width; j++)
                    to[j] += v[j];
        }
        for (i64 t = 0; t < positions; t++) {
            i64 first = 0;
            while (ids[first] != ids[t])
                first++;
            if (first < t)
                continue;
            const double *restrict from = room + t * width;
            wide sum = {0};
            i64 j = 0;
            for (; j + WIDTH <= width; j += WIDTH) {
                wide a;
                memcpy(&a, from + j, sizeof a);
                sum += a * a;
            }
            for (; j < width; j++)
                square += from[j] * from[j];
            square += across(sum);
        }
        squares[b] = square;
    }
    return 0;
}

/* ---- All steps of an LSTM: gates by unit, so that a step's products end in registers where its gates begin ---- */

#if defined(__AVX512F__)
#define CREW 6 /* records at a time: their sums stay in registers */
#else
#define CREW 2
#endif
#define GATES 4
typedef int32_t whole __attribute__((vector_size(4 * LANE)));

static inline lane picked(whole mask, lane yes, lane no) { return (lane)((mask & (whole)yes) | (~mask & (whole)no)); }

static inline lane part_lane(const float *from, i64 left)
{
    lane value = {0};
    memcpy(&value, from, left < LANE ? (left > 0 ? 4 * left : 0) : (i64)sizeof(lane));
    return value;
}

static inline void put_lane(float *to, lane value, i64 left)
{
    memcpy(to, &value, left < LANE ? (left > 0 ? 4 * left : 0) : (i64)sizeof(lane));
}

/* e^x to 2 units in the last place, for x cut to [-87, 88]; NaN for NaN (Cephes, expf). */
static inline lane exp_lane(lane x)
{
    x = picked(x > 88.0f, (lane){0} + 88.0f, x);
    x = picked(x < -87.0f, (lane){0} - 87.0f, x);
    lane near = x * 1.44269504f + 12582912.0f, n = near - 12582912.0f;
    whole power = ((whole)near - 0x4b400000 + 127) << 23;
    x -= n * 0.693359375f;
    x += n * 2.12194440e-4f;
    lane sum = x * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * x + 8.3334519073e-3f;
    sum = sum * x + 4.1665795894e-2f;
    sum = sum * x + 1.6666665459e-1f;
    sum = sum * x + 5.0000001201e-1f;
    return (sum * x * x + x + 1.0f) * (lane)power;
}

static inline lane logistic_lane(lane x) { return 1.0f / (1.0f + exp_lane(-x)); }

/* tanh x: of small x by its series, so that it keeps its digits (Cephes, tanhf). */
static inline lane tanh_lane(lane x)
{
    lane square = x * x, sum = square * -5.70498872745e-3f + 2.06390887954e-2f;
    sum = sum * square - 5.37397155531e-2f;
    sum = sum * square + 1.33314422036e-1f;
    sum = sum * square - 3.33332819422e-1f;
    return picked(square < 0.390625f, sum * square * x + x, 1.0f - 2.0f / (exp_lane(x + x) + 1.0f));
}

/* sum[r][g] += Σ_k a[r, k] panel[k, g], for rows of `a` that are `pitch` apart. */
static inline __attribute__((always_inline)) void multiply(const float *restrict a, i64 pitch,
                                                           const float *restrict panel, i64 depth,
                                                           lane sum[CREW][GATES], const int rows)
{
    lane own[CREW][GATES]; /* of this function alone, so that compilers leave it in registers */
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int g = 0; g < GATES; g++)
            own[r][g] = sum[r][g];
    for (i64 k = 0; k < depth; k++) {
        lane weight[GATES];
#pragma GCC unroll 8
        for (int g = 0; g < GATES; g++)
            memcpy(&weight[g], panel + (k * GATES + g) * LANE, sizeof(lane));
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int g = 0; g < GATES; g++)
                own[r][g] += weight[g] * a[r * pitch + k];
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int g = 0; g < GATES; g++)
            sum[r][g] = own[r][g];
}

typedef struct {
    const float *x, *bias, *other, *panel, *before, *cell;
    float *gates, *cells, *tanhs, *states;
    i64 steps, depth, first, width, unit; /* `first` floats lie between two records of the states before */
} step_of;

/* A step of some records, and of the units of one lane. */
static inline __attribute__((always_inline)) void lstm_crew(const step_of *s, const int rows)
{
    const i64 width = s->width, left = width - s->unit, apart = s->steps * width;
    lane sum[CREW][GATES];
    for (int g = 0; g < GATES; g++) {
        lane start = s->bias ? part_lane(s->bias + g * width, left) : (lane){0};
        if (s->other)
            start += part_lane(s->other + g * width, left);
        for (int r = 0; r < rows; r++)
            sum[r][g] = start;
    }
    multiply(s->x, s->steps * s->depth, s->panel, s->depth, sum, rows);
    multiply(s->before, s->first, s->panel + s->depth * GATES * LANE, width, sum, rows);
    for (int r = 0; r < rows; r++) {
        lane in = logistic_lane(sum[r][0]), keep = logistic_lane(sum[r][1]), new = tanh_lane(sum[r][2]);
        lane out = logistic_lane(sum[r][3]);
        lane cell = keep * part_lane(s->cell + r * s->first, left) + in * new, curved = tanh_lane(cell);
        float *to = s->gates + r * apart * GATES;
        put_lane(to, in, left);
        put_lane(to + width, keep, left);
        put_lane(to + 2 * width, new, left);
        put_lane(to + 3 * width, out, left);
        put_lane(s->cells + r * apart, cell, left);
        put_lane(s->tanhs + r * apart, curved, left);
        put_lane(s->states + r * apart, out * curved, left);
    }
}

/* States, cells and their tanh [records, steps, width], and gates [records, steps, 4 width], of an LSTM over
   x [records, steps, depth], from h and c [records, width]; weights `input` [4 width, depth] and `weight`
   [4 width, width], biases [4 width] or nothing. `room` holds 4 (depth + width) * (width rounded up to 16) floats. */
i64 lstm_forward(const float *x, const float *h, const float *c, const float *restrict input,
                 const float *restrict weight, const float *bias, const float *other, i64 records, i64 steps, i64 depth,
                 i64 width, float *restrict room, float *gates, float *cells, float *tanhs, float *states)
{
    const i64 panels = (width + LANE - 1) / LANE, apart = steps * width, all = depth + width;
    memset(room, 0, panels * all * GATES * LANE * sizeof(float));
    for (i64 g = 0; g < GATES; g++)
        for (i64 j = 0; j < width; j++) {
            float *to = room + (j / LANE * all * GATES + g) * LANE + j % LANE;
            for (i64 k = 0; k < depth; k++)
                to[k * GATES * LANE] = input[(g * width + j) * depth + k];
            for (i64 k = 0; k < width; k++)
                to[(depth + k) * GATES * LANE] = weight[(g * width + j) * width + k];
        }
    for (i64 t = 0; t < steps; t++)
        for (i64 p = 0; p < panels; p++) {
            const i64 unit = p * LANE, first = t ? apart : width;
            const float *before = t ? states + (t - 1) * width : h, *cell = t ? cells + (t - 1) * width : c;
            i64 r = 0;
#define SOME(COUNT)                                                                                           \
    for (; r + COUNT <= records; r += COUNT) {                                                                \
        const i64 at = r * apart + t * width + unit;                                                          \
        step_of now = {x + (r * steps + t) * depth, bias ? bias + unit : 0, other ? other + unit : 0,          \
                       room + unit * GATES * all, before + r * first, cell + r * first + unit,                 \
                       gates + (r * steps + t) * GATES * width + unit, cells + at, tanhs + at, states + at,    \
                       steps, depth, first, width, unit};                                                     \
        lstm_crew(&now, COUNT);                                                                               \
    }
            SOME(CREW);
            SOME(1);
#undef SOME
        }
    return 0;
}

/* to[r, :] = sum over k of found[r, k] weight[k, :], of some records and four lanes of columns, of which `left` exist. */
static inline __attribute__((always_inline)) void back_crew(const float *restrict found, i64 pitch,
                                                            const float *restrict panel, i64 depth, float *restrict to,
                                                            i64 apart, i64 left, const int rows)
{
    lane sum[CREW][GATES];
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < GATES; g++)
            sum[r][g] = (lane){0};
    multiply(found, pitch, panel, depth, sum, rows);
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < GATES; g++)
            put_lane(to + r * apart + g * LANE, sum[r][g], left - g * LANE);
}

/* The same for all records and columns; rows of `found` are `pitch` apart, those of `to` `apart`. */
static void back(const float *found, i64 pitch, const float *panels, i64 depth, float *to, i64 apart, i64 columns,
                 i64 records)
{
    for (i64 p = 0; p < columns; p += GATES * LANE) {
        i64 r = 0;
        for (; r + CREW <= records; r += CREW)
            back_crew(found + r * pitch, pitch, panels + p * depth, depth, to + r * apart + p, apart, columns - p, CREW);
        for (; r < records; r++)
            back_crew(found + r * pitch, pitch, panels + p * depth, depth, to + r * apart + p, apart, columns - p, 1);
    }
}

/* weight [depth, columns] in panels of four lanes of columns, the last one filled up with zeros; returns their end. */
static float *in_panels(const float *restrict weight, i64 depth, i64 columns, float *restrict room)
{
    for (i64 p = 0; p < columns; p += GATES * LANE)
        for (i64 k = 0; k < depth; k++)
            for (i64 j = 0; j < GATES * LANE; j++)
                *room++ = p + j < columns ? weight[k * columns + p + j] : 0;
    return room;
}

/* Gradients of the gates' input, in place of the gates [records, steps, 4 width], and of x (`dx`, or nothing), from
   those of all states (`deltas`) and of the last cell (in c, which ends as that of the first, `start`, as h does).
   `room` holds 4 width * (width and depth, each rounded up to 64) floats. */
i64 lstm_backward(const float *restrict deltas, const float *restrict cells, const float *restrict tanhs,
                  const float *restrict start, const float *restrict input, const float *restrict weight, i64 records,
                  i64 steps, i64 depth, i64 width, float *restrict room, float *restrict gates, float *restrict h,
                  float *restrict c, float *restrict dx)
{
    const i64 pitch = steps * GATES * width;
    const float *panels = in_panels(weight, GATES * width, width, room);
    if (dx)
        in_panels(input, GATES * width, depth, (float *)panels);
    memset(h, 0, records * width * sizeof(float));
    for (i64 t = steps - 1; t >= 0; t--) {
        float *restrict now = gates + t * GATES * width;
        for (i64 r = 0; r < records; r++) {
            const i64 at = (r * steps + t) * width;
            float *restrict in = now + r * pitch, *restrict keep = in + width, *restrict new = keep + width;
            float *restrict out = new + width, *restrict dh = h + r * width, *restrict dc = c + r * width;
            const float *restrict curved = tanhs + at, *restrict more = deltas + at;
            const float *restrict before = t ? cells + at - width : start + r * width;
            for (i64 j = 0; j < width; j++) {
                const float state = dh[j] + more[j], o = out[j], i = in[j], f = keep[j], n = new[j], s = curved[j];
                const float cell = dc[j] + state * o * (1 - s * s);
                in[j] = cell * n * i * (1 - i);
                keep[j] = cell * before[j] * f * (1 - f);
                new[j] = cell * i * (1 - n * n);
                out[j] = state * s * o * (1 - o);
                dc[j] = cell * f;
            }
        }
        back(now, pitch, room, GATES * width, h, width, width, records);
        if (dx)
            back(now, pitch, panels, GATES * width, dx + t * depth, steps * depth, depth, records);
    }
    return 0;
}

/* ---- Noise that is correlated over turns: several turns in one pass over the noise of earlier ones ---- */

#define TURNS 8 /* at most, in one pass */
#if defined(__AVX512F__)
#define ABREAST 2 /* vectors of coordinates at once: as many sums as registers hold */
#else
#define ABREAST 1
#endif

static inline wide load_i4(const int32_t *from)
{
#if defined(__AVX512F__)
    return (wide)_mm512_cvtepi32_pd(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    return (wide)_mm256_cvtepi32_pd(_mm_loadu_si128((const __m128i *)from));
#else
    return (wide){from[0], from[1], from[2], from[3]};
#endif
}

static inline wide load_i8(const i64 *from) /* whole numbers below 2**51 */
{
    signs found;
    memcpy(&found, from, sizeof found);
    return (wide)(found + as_bits(ROUNDER)) - ROUNDER;
}

static inline void store_i4(int32_t *to, wide values) /* whole numbers below 2**31 */
{
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtpd_epi32((__m512d)values));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i *)to, _mm256_cvtpd_epi32((__m256d)values));
#else
    for (i64 i = 0; i < WIDTH; i++)
        to[i] = (int32_t)values[i];
#endif
}

static inline wide within(wide values, double most)
{
    values = choose((signs)(values < most), values, splat(most));
    return choose((signs)(values > -most), values, splat(-most));
}

/* K of each of `turns` turns is round(sum of column[j] times the noise j turns before), noise beyond `far`
   counting as `far`; its noise is drawn - K, from rows of `drawn`, n apart. Rows lie `pitch` apart in a ring of
   `count`, of which slot `head` is the oldest and the first to be written; column[0 .. count + TURNS - 1] ends in
   zeros. Returns how many numbers do not fit into 32 bits. */
i64 mixed_ahead(const i64 *restrict drawn, i64 n, int32_t *restrict rows, i64 pitch, i64 count, i64 head,
                const double *restrict column, i64 turns, double far)
{
    const double most = 0x1.fffffffcp30;
    const i64 abreast = ABREAST * WIDTH;
    i64 start = 0, strange = 0;
    for (; start + abreast <= n; start += abreast) {
        wide sum[TURNS][ABREAST];
        signs beyond = {0};
        for (int i = 0; i < TURNS; i++)
            for (int v = 0; v < ABREAST; v++)
                sum[i][v] = splat(0.0);
        for (i64 age = count; age > 0; age--) {
            const i64 slot = head - age < 0 ? head - age + count : head - age;
            for (int v = 0; v < ABREAST; v++) {
                wide earlier = within(load_i4(rows + slot * pitch + start + v * WIDTH), far);
                for (int i = 0; i < TURNS; i++)
                    sum[i][v] += column[age + i] * earlier;
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < TURNS; i++) {
            if (i == turns)
                break;
            const i64 slot = head + i < count ? head + i : head + i - count;
            for (int v = 0; v < ABREAST; v++) {
                wide taken = (sum[i][v] + ROUNDER) - ROUNDER;
                wide own = load_i8(drawn + i * n + start + v * WIDTH) - taken;
                beyond |= (signs)(absolute(own) > most);
                store_i4(rows + slot * pitch + start + v * WIDTH, own);
                own = within(own, far);
#pragma GCC unroll 8
                for (int k = i + 1; k < TURNS; k++)
                    sum[k][v] += column[k - i] * own;
            }
        }
        for (int k = 0; k < WIDTH; k++)
            strange -= beyond[k];
    }
    for (; start < n; start++) {
        double sum[TURNS] = {0};
        for (i64 age = count; age > 0; age--) {
            const i64 slot = head - age < 0 ? head - age + count : head - age;
            const double earlier = fmax(-far, fmin((double)rows[slot * pitch + start], far));
            for (int i = 0; i < TURNS; i++)
                sum[i] += column[age + i] * earlier;
        }
        for (i64 i = 0; i < turns; i++) {
            const i64 slot = head + i < count ? head + i : head + i - count;
            double own = (double)drawn[i * n + start] - rint(sum[i]);
            strange += fabs(own) > most;
            rows[slot * pitch + start] = fabs(own) > most ? 0 : (int32_t)own;
            own = fmax(-far, fmin(own, far));
            for (i64 k = i + 1; k < turns; k++)
                sum[k] += column[k - i] * own;
        }
    }
    return strange;
}

/* ---- Rows as whole numbers of a public grid, whose products are added up without rounding: see rounded.py ---- */

#define FURTHEST 2047 /* of the numbers: the products of 256 pairs of them fit into 32 bits */
#define PAIRS 64      /* pairs of rows whose products are added up in 32 bits */

/* Numbers of 32 bits in a vector register, and rows of a tile of as many sums as registers hold. */
#if defined(__AVX512BW__)
#define SPAN 16
#define HIGH 8
#define BROAD 3
#else
#define SPAN 8
#define HIGH 4
#define BROAD 2
#endif
#define PITCH 16 /* rows of room are as long as a multiple of this */
typedef int32_t ints __attribute__((vector_size(4 * SPAN)));
typedef float floats __attribute__((vector_size(4 * SPAN)));

static inline ints load_ints(const void *from) { ints found; memcpy(&found, from, sizeof found); return found; }

/* The first `left` of SPAN numbers in float32, and zeros. */
static inline floats some_f4(const float *from, i64 left)
{
#if defined(__AVX512BW__)
    return (floats)_mm512_maskz_loadu_ps((__mmask16)(left < SPAN ? (1 << left) - 1 : 0xffff), from);
#elif defined(__AVX2__)
    const __m256i at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (floats)_mm256_maskload_ps(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(left < SPAN ? (int)left : SPAN), at));
#else
    floats found = {0};
    memcpy(&found, from, (left < SPAN ? left : SPAN) * sizeof *from);
    return found;
#endif
}

static inline floats some_f8(const double *from, i64 left)
{
    floats found;
    double some[SPAN] = {0};
    memcpy(some, from, (left < SPAN ? left : SPAN) * sizeof *from);
    for (int k = 0; k < SPAN; k++)
        found[k] = (float)some[k];
    return found;
}

static inline floats some_u1(const uint8_t *from, i64 left)
{
    floats found;
    uint8_t some[SPAN] = {0};
    memcpy(some, from, left < SPAN ? left : SPAN);
    for (int k = 0; k < SPAN; k++)
        found[k] = (float)some[k];
    return found;
}

/* sum + the products of the low and of the high 16 bits of every lane */
static inline ints dot_pairs(ints sum, ints a, ints b)
{
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
    return (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sum + (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return sum + (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* The nearest whole numbers (of two, the even one), at most FURTHEST on either side; any number for NaN. */
static inline ints nearest(floats x)
{
#if defined(__AVX512BW__)
    __m512 low = _mm512_max_ps((__m512)x, _mm512_set1_ps(-FURTHEST));
    return (ints)_mm512_cvtps_epi32(_mm512_min_ps(low, _mm512_set1_ps(FURTHEST)));
#elif defined(__AVX2__)
    __m256 low = _mm256_max_ps((__m256)x, _mm256_set1_ps(-FURTHEST));
    return (ints)_mm256_cvtps_epi32(_mm256_min_ps(low, _mm256_set1_ps(FURTHEST)));
#else
    ints found;
    for (int k = 0; k < SPAN; k++) {
        float low = x[k] > -FURTHEST ? x[k] : -FURTHEST;
        found[k] = (int32_t)rintf(low < FURTHEST ? low : FURTHEST);
    }
    return found;
#endif
}

/* squares += |q weight|^2 */
static inline void add_squares_of(ints q, const double *weight, wide *squares)
{
    int32_t found[SPAN];
    memcpy(found, &q, sizeof found);
    for (int l = 0; l < SPAN; l += WIDTH) {
        wide value = load_i4(found + l) * load_f8(weight + l);
        *squares += value * value;
    }
}

/* Multiplies one of a pair of rows, that of the high 16 bits or the other, and rounds towards 0. */
static void shrink_one(int32_t *pairs, i64 pitch, int high, double by)
{
    for (i64 j = 0; j < pitch; j++) {
        int32_t low = (int16_t)(pairs[j] & 0xffff), other = pairs[j] >> 16;
        low = high ? low : (int32_t)(low * by);
        other = high ? (int32_t)(other * by) : other;
        pairs[j] = (low & 0xffff) | (int32_t)((uint32_t)other << 16);
    }
}

/* Sixteen bits of every number. */
static inline void store_halves(int16_t *to, ints q)
{
#if defined(__AVX512BW__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)q));
#elif defined(__AVX2__)
    __m128i high = _mm256_extracti128_si256((__m256i)q, 1);
    _mm_storeu_si128((__m128i *)to, _mm_packs_epi32(_mm256_castsi256_si128((__m256i)q), high));
#else
    for (int k = 0; k < SPAN; k++)
        to[k] = (int16_t)q[k];
#endif
}

/* out[j, k] += the products of HIGH columns j with `count` vectors of columns k, over pairs of rows */
static inline __attribute__((always_inline)) void whole_tile(const int32_t *restrict z, i64 pairs, i64 pitch, i64 j,
                                                             i64 k, double *restrict out, const int count)
{
    ints sum[HIGH][BROAD];
    for (int i = 0; i < HIGH; i++)
        for (int v = 0; v < count; v++)
            sum[i][v] = (ints){0};
    for (i64 p = 0; p < pairs; p++, z += pitch) {
        ints by[BROAD];
        for (int v = 0; v < count; v++)
            by[v] = load_ints(z + k + v * SPAN);
        for (int i = 0; i < HIGH; i++)
            for (int v = 0; v < count; v++)
                sum[i][v] = dot_pairs(sum[i][v], z[j + i] - (ints){0}, by[v]);
    }
    for (int i = 0; i < HIGH; i++)
        for (int v = 0; v < count; v++) {
            int32_t found[SPAN];
            double *to = out + (j + i) * pitch + k + v * SPAN;
            memcpy(found, &sum[i][v], sizeof found);
            for (int l = 0; l < SPAN; l += WIDTH)
                store(to + l, load_f8(to + l) + load_i4(found + l));
        }
}

/* squares[r] += |sum over j of q[r, j] matrix[j, k] >> shift|^2 of HIGH rows and `count` vectors of k */
static inline __attribute__((always_inline)) void length_tile(const int16_t *restrict q, i64 pitch, i64 first, i64 last,
                                                              i64 k, const int32_t *restrict matrix, int shift,
                                                              wide *squares, const int count)
{
    ints sum[HIGH][2];
    for (int r = 0; r < HIGH; r++)
        for (int v = 0; v < count; v++)
            sum[r][v] = (ints){0};
    for (i64 j = first; j < last; j += 2) {
        ints by[2];
        for (int v = 0; v < count; v++)
            by[v] = load_ints(matrix + j / 2 * pitch + k + v * SPAN);
        for (int r = 0; r < HIGH; r++) {
            int32_t pair;
            memcpy(&pair, q + r * pitch + j, sizeof pair);
            for (int v = 0; v < count; v++)
                sum[r][v] = dot_pairs(sum[r][v], pair - (ints){0}, by[v]);
        }
    }
    for (int r = 0; r < HIGH; r++)
        for (int v = 0; v < count; v++) {
            int32_t found[SPAN];
            ints shifted = sum[r][v] >> shift;
            memcpy(found, &shifted, sizeof found);
            for (int l = 0; l < SPAN; l += WIDTH) {
                wide value = load_i4(found + l);
                squares[r] += value * value;
            }
        }
}

/* Rows of d numbers become whole ones: (x - centre) factor; x is 0 from d on. */
#define WHOLE(NAME, TYPE)                                                                                             \
    static inline ints whole_##NAME(const TYPE *row, i64 left, const float *centre, const float *factor)              \
    {                                                                                                                 \
        floats from, by;                                                                                              \
        memcpy(&from, centre, sizeof from);                                                                           \
        memcpy(&by, factor, sizeof by);                                                                               \
        return nearest((some_##NAME(row, left) - from) * by);                                                         \
    }                                                                                                                 \
    /* out[j, k] += the sum of q[j] q[k] (k from j's vector on) over the first n rows; those whose squares, times     \
       weight^2, add up to more than `limit` are shrunk to it, and blank ones count for nothing. There is room for PAIRS\
       rows. */                                                                                                       \
    i64 scatter_##NAME(const TYPE *restrict x, i64 stride, i64 n, i64 d, const uint8_t *blank,                        \
                       const float *restrict centre, const float *restrict factor, const double *restrict weight,     \
                       double limit, i64 pitch, int32_t *restrict room, double *restrict out)                         \
    {                                                                                                                 \
        for (i64 i = 0; i < n; i += 2 * PAIRS) {                                                                      \
            const i64 count = n - i < 2 * PAIRS ? n - i : 2 * PAIRS, pairs = (count + 1) / 2;                         \
            for (i64 r = 0; r < count; r += 2) {                                                                      \
                const int alone = r + 1 == count; /* the row is read twice, and does not count the second time */     \
                const TYPE *one = x + (i + r) * stride, *two = one + (alone ? 0 : stride);                            \
                int32_t *to = room + r / 2 * pitch;                                                                   \
                wide squares[2] = {{0}, {0}};                                                                         \
                if (i + r + 2 * PAIRS + 1 < n)                                                                        \
                    ahead(one + 2 * PAIRS * stride, d * (i64)sizeof *one), ahead(two + 2 * PAIRS * stride, d * (i64)sizeof *one);\
                for (i64 j = 0; j < pitch; j += SPAN) {                                                               \
                    const ints a = whole_##NAME(one + (j < d ? j : 0), j < d ? d - j : 0, centre + j, factor + j);    \
                    const ints b = whole_##NAME(two + (j < d ? j : 0), j < d ? d - j : 0, centre + j, factor + j);    \
                    const ints both = (a & 0xffff) | b << 16;                                                         \
                    memcpy(to + j, &both, sizeof both);                                                               \
                    if (limit < INFINITY)                                                                             \
                        add_squares_of(a, weight + j, squares), add_squares_of(b, weight + j, squares + 1);           \
                }                                                                                                     \
                for (int k = 0; k < 2; k++) {                                                                         \
                    const double size = limit < INFINITY ? across(squares[k]) : 0;                                    \
                    if ((k && alone) || (blank && blank[i + r + k]))                                                  \
                        shrink_one(to, pitch, k, 0);                                                                  \
                    else if (size > limit)                                                                            \
                        shrink_one(to, pitch, k, sqrt(limit / size));                                                 \
                }                                                                                                     \
            }                                                                                                         \
            for (i64 j = 0; j < pitch; j += HIGH) {                                                                   \
                i64 k = j / SPAN * SPAN;                                                                              \
                for (; k + BROAD * SPAN <= pitch; k += BROAD * SPAN)                                                  \
                    whole_tile(room, pairs, pitch, j, k, out, BROAD);                                                 \
                for (; k < pitch; k += SPAN)                                                                          \
                    whole_tile(room, pairs, pitch, j, k, out, 1);                                                     \
            }                                                                                                         \
        }                                                                                                             \
        return 0;                                                                                                     \
    }                                                                                                                 \
    /* Norms of the first n rows: max(sqrt(base + |sum over j of q[j] matrix[j, k] >> shift|^2) unit + slack, least); \
       of blank ones (shrink 0) 0. The matrix is stored by pairs of j; with `upper`, it is 0 for k > j. There is room \
       for HIGH rows. */                                                                                              \
    i64 lengths_##NAME(const TYPE *restrict x, i64 stride, i64 n, i64 d, const uint8_t *blank,                        \
                       const float *restrict centre, const float *restrict factor, const int32_t *restrict matrix,    \
                       i64 pitch, i64 upper, i64 shift, double base, double unit, double slack, double least,         \
                       int16_t *restrict room, double *restrict shrink, double *restrict norm)                        \
    {                                                                                                                 \
        memset(room, 0, HIGH * pitch * sizeof *room);                                                                 \
        for (i64 i = 0; i < n; i += HIGH) {                                                                           \
            const i64 count = n - i < HIGH ? n - i : HIGH;                                                            \
            wide squares[HIGH];                                                                                       \
            for (i64 r = 0; r < count; r++) {                                                                         \
                const TYPE *row = x + (i + r) * stride;                                                               \
                ahead(i + r + 4 * HIGH < n ? row + 4 * HIGH * stride : row, d * (i64)sizeof *row);                    \
                for (i64 j = 0; j < d; j += SPAN)                                                                     \
                    store_halves(room + r * pitch + j, whole_##NAME(row + j, d - j, centre + j, factor + j));         \
            }                                                                                                         \
            for (int r = 0; r < HIGH; r++)                                                                            \
                squares[r] = (wide){0};                                                                               \
            i64 k = 0;                                                                                                \
            for (; k + 2 * SPAN <= pitch; k += 2 * SPAN)                                                              \
                length_tile(room, pitch, upper ? k : 0, d, k, matrix, (int)shift, squares, 2);                        \
            for (; k < pitch; k += SPAN)                                                                              \
                length_tile(room, pitch, upper ? k : 0, d, k, matrix, (int)shift, squares, 1);                        \
            for (i64 r = 0; r < count; r++) {                                                                         \
                const double size = sqrt(across(squares[r]) + base) * unit + slack;                                   \
                const int gone = blank && blank[i + r];                                                               \
                norm[i + r] = gone ? 0 : size > least ? size : least;                                                 \
                if (shrink)                                                                                           \
                    shrink[i + r] = gone ? 0 : 1;                                                                     \
            }                                                                                                         \
        }                                                                                                             \
        return 0;                                                                                                     \
    }

WHOLE(f8, double)
WHOLE(f4, float)
WHOLE(u1, uint8_t)

/* ---- Cells of CSV files ---- */

#define LONGEST_CELL (1 << 24) /* bytes, as `csv_files` has it */

/* Splits whole lines, each with a line feed at its end, into `columns` cells between `mark`. Cell c of a row is
   wanted as the one of number slots[c], unless that is negative: ends[(row * wanted + number) * 2] is where it begins,
   and the next entry where it ends. Spaces before a cell do not count, nor do empty lines and a carriage return before
   a line feed; a cell may stand in quotes. Returns how many rows there are, or -1 for what is written in another way
   (a quote or a line feed within quotes, another number of cells, a byte 0), which Python's module reads or refuses. */
i64 cells(const uint8_t *restrict text, i64 bytes, i64 mark, i64 columns, const int32_t *restrict slots, i64 wanted,
          i64 most, int32_t *restrict ends)
{
    i64 row = 0, at = 0;
    while (at < bytes) {
        if (text[at] == '\n' || (text[at] == '\r' && at + 1 < bytes && text[at + 1] == '\n')) {
            at += text[at] == '\r' ? 2 : 1;
            continue;
        }
        if (row >= most)
            return -1;
        for (i64 c = 0;; c++) {
            while (text[at] == ' ' && mark != ' ')
                at++; /* the line feed at the end stops it */
            i64 begin = at, end;
            if (text[at] == '"') {
                begin = ++at;
                while (text[at] != '"' && text[at] != '\n' && text[at] != '\r' && text[at])
                    at++;
                if (text[at] != '"')
                    return -1;
                end = at++;
            } else {
                while (text[at] != mark && text[at] != '\n' && text[at] != '\r' && text[at])
                    at++;
                end = at;
            }
            if (c >= columns || end - begin > LONGEST_CELL)
                return -1;
            if (slots[c] >= 0) {
                int32_t *own = ends + (row * wanted + slots[c]) * 2;
                own[0] = (int32_t)begin, own[1] = (int32_t)end;
            }
            if (text[at] == mark) {
                at++;
                continue;
            }
            at += text[at] == '\r';
            if (text[at] != '\n' || c + 1 != columns)
                return -1;
            at++;
            break;
        }
        row++;
    }
    return row;
}

/* out[i] = the number in a cell, whose ends are at ends[i * stride]; NaN where it is empty. A comma may stand in place
   of the point if `comma` is 1, and must if it is 2. Only numbers that are read without rounding (less than 2^53, times
   a power of ten up to 10^22) are: odd[i] = 1 and NaN for every other cell. Returns how many those are. */
i64 cell_numbers(const uint8_t *restrict text, const int32_t *restrict ends, i64 rows, i64 stride, i64 comma,
                 double *restrict out, uint8_t *restrict odd)
{
    static const double tens[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                  1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    i64 strange = 0;
    for (i64 i = 0; i < rows; i++) {
        const uint8_t *p = text + ends[i * stride], *end = text + ends[i * stride + 1];
        while (p < end && end[-1] == ' ')
            end--;
        while (p < end && *p == ' ')
            p++;
        out[i] = NAN, odd[i] = 0;
        if (p == end)
            continue;
        const int minus = *p == '-';
        p += minus || *p == '+';
        u64 whole = 0;
        i64 digits = 0, power = 0, seen = 0;
        for (; p < end; p++) {
            const unsigned figure = *p - '0';
            if (figure <= 9) {
                whole = whole * 10 + figure;
                digits += whole > 0 || !seen;
                power -= seen;
            } else if (!seen && ((*p == '.' && comma < 2) || (*p == ',' && comma > 0)))
                seen = 1;
            else
                break;
            if (digits > 18)
                break;
        }
        int fits = digits > 0 || power < 0;
        if (p < end && fits && (*p | 32) == 'e') {
            i64 lifted = 0, down = ++p < end && *p == '-';
            p += p < end && (*p == '-' || *p == '+');
            fits = p < end;
            for (; p < end && (unsigned)(*p - '0') <= 9 && lifted < 1000; p++)
                lifted = lifted * 10 + (*p - '0');
            power += down ? -lifted : lifted;
        }
        if (p == end && fits && whole < (1ull << 53) && power >= -22 && power <= 22) {
            const double value = power < 0 ? (double)whole / tens[-power] : (double)whole * tens[power];
            out[i] = minus ? -value : value;
        } else
            odd[i] = 1, strange++;
    }
    return strange;
}

/* Joins wanted cells of every row, by the numbers in `order`, with a byte 31 between; stops[row] is where they end. */
i64 joined_cells(const uint8_t *restrict text, const int32_t *restrict ends, i64 rows, i64 wanted,
                 const int32_t *restrict order, i64 count, uint8_t *restrict out, i64 *restrict stops)
{
    i64 at = 0;
    for (i64 row = 0; row < rows; row++) {
        for (i64 c = 0; c < count; c++) {
            const int32_t *own = ends + (row * wanted + order[c]) * 2;
            if (c)
                out[at++] = 31;
            memcpy(out + at, text + own[0], own[1] - own[0]);
            at += own[1] - own[0];
        }
        stops[row] = at;
    }
    return at;
}
