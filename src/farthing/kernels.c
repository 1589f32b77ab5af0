/* Hot loops of farthing. Built on first use by native.py; every loop has a twin in numpy that gives the same
   answer, and where there is no compiler the twin runs. Nothing here allocates, locks or keeps state. */

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

/* ---- Gaussian noise on the lattice: see halfnormal.py for the table and its error bound ---- */

#define CHUNK 128 /* samples at a time, so that the steps between table look-ups vectorise */
#define ROUNDER 6755399441055744.0 /* 1.5 * 2**52: adding it rounds to an integer, in the low bits */
#define OPEN INT64_MIN             /* the floating-point quantile does not decide this cell */
#define MANTISSA ((1LL << 46) - 1) /* what is left of it after six bits of the segment */

static inline i64 gaussian_chunk(const u64 *restrict words, i64 n, double scale,
                                 const double *restrict table, i64 *restrict cells)
{
    double at[CHUNK], x[CHUNK], error[CHUNK];
    i64 row[CHUNK], open = 0;
    for (i64 i = 0; i < n; i++) {
        double u = ((double)(i64)(words[i] & INT64_MAX) + 0.5) * 0x1p-63;
        u = u < 1.0 - 0x1p-53 ? u : 1.0 - 0x1p-53;
        i64 bits = as_bits(u);
        row[i] = ((bits >> 46) - (959LL << 6)) << 3; /* the first segment begins at 2**-64 */
        at[i] = as_double((bits & MANTISSA) | (1023LL << 52)) - (1.0 + 0x1p-7);
    }
    for (i64 i = 0; i < n; i++) {
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
            released[start + i] = (double)((i64)rint(place) + noise[i]) * cell * by;
        }
        if (strange)
            return -1;
    }
    return open;
}

/* ---- Poisson draws: a byte a coin ---- */

static inline i64 *coins_of(u64 mask, u64 equal, i64 first, i64 *out)
{
    for (; mask; mask &= mask - 1) {
        i64 bit = __builtin_ctzll(mask), place = first + bit;
        *out++ = equal >> bit & 1 ? ~place : place;
    }
    return out;
}

/* Places of the coins at most `head`, ascending; ~place where a coin equals it, which more bits decide.
   `places` has room for n. Returns how many places; *undecided says how many of them are open. */
i64 heads(const uint8_t *restrict coins, i64 n, i64 head, i64 first, i64 *restrict places, i64 *undecided)
{
    i64 *out = places, i = 0, open = 0;
#if defined(__AVX2__)
    const __m256i limit = _mm256_set1_epi8((char)head);
    for (; i + 64 <= n; i += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(coins + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(coins + i + 32));
        u64 mask = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(a, limit), a)) |
                   (u64)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(b, limit), b)) << 32;
        if (!mask)
            continue;
        u64 equal = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, limit)) |
                    (u64)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(b, limit)) << 32;
        open += __builtin_popcountll(equal);
        out = coins_of(mask, equal, first + i, out);
    }
#endif
    for (; i < n; i++) {
        i64 same = coins[i] == head;
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

/* ---- Rows of a table by their places: products in float64, without a copy of the rows ---- */

#define LANES 16
#define AHEAD 6

static inline void prefetch(const void *row, i64 bytes)
{
    for (i64 at = 0; at < bytes; at += 64)
        __builtin_prefetch((const char *)row + at);
}

#define ROWS(NAME, TYPE)                                                                                      \
    /* out[i] = x[places[i]] . u */                                                                           \
    i64 margins_##NAME(const TYPE *restrict x, i64 stride, const i64 *restrict places, i64 n, i64 d,         \
                        const double *restrict u, double *restrict out)                                       \
    {                                                                                                         \
        for (i64 i = 0; i < n; i++) {                                                                         \
            const TYPE *restrict row = x + places[i] * stride;                                                \
            if (i + AHEAD < n)                                                                                \
                prefetch(x + places[i + AHEAD] * stride, d * (i64)sizeof(TYPE));                              \
            double sum[LANES] = {0}, rest = 0;                                                                \
            i64 j = 0;                                                                                        \
            for (; j + LANES <= d; j += LANES)                                                                \
                for (int k = 0; k < LANES; k++)                                                               \
                    sum[k] += (double)row[j + k] * u[j + k];                                                  \
            for (; j < d; j++)                                                                                \
                rest += (double)row[j] * u[j];                                                                \
            for (int k = 0; k < LANES; k++)                                                                   \
                rest += sum[k];                                                                               \
            out[i] = rest;                                                                                    \
        }                                                                                                     \
        return 0;                                                                                             \
    }                                                                                                         \
    /* total += sum v[i] x[places[i]] */                                                                      \
    i64 weighted_##NAME(const TYPE *restrict x, i64 stride, const i64 *restrict places, i64 n, i64 d,        \
                         const double *restrict v, double *restrict total)                                    \
    {                                                                                                         \
        i64 i = 0;                                                                                            \
        for (; i + 4 <= n; i += 4) {                                                                          \
            const TYPE *restrict a = x + places[i] * stride, *restrict b = x + places[i + 1] * stride;        \
            const TYPE *restrict c = x + places[i + 2] * stride, *restrict e = x + places[i + 3] * stride;    \
            double p = v[i], q = v[i + 1], r = v[i + 2], s = v[i + 3];                                        \
            for (i64 j = 0; j < d; j++)                                                                       \
                total[j] += (p * (double)a[j] + q * (double)b[j]) + (r * (double)c[j] + s * (double)e[j]);    \
        }                                                                                                     \
        for (; i < n; i++) {                                                                                  \
            const TYPE *restrict a = x + places[i] * stride;                                                  \
            for (i64 j = 0; j < d; j++)                                                                       \
                total[j] += v[i] * (double)a[j];                                                              \
        }                                                                                                     \
        return 0;                                                                                             \
    }

ROWS(f8, double)
ROWS(f4, float)
ROWS(u1, uint8_t)

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
    i64 clamped_outer_##NAME(const float *delta, const float *a, const float *s, SUM *out, i64 batch,        \
                              i64 steps, i64 outs, i64 ins, i64 first, i64 last)                              \
    {                                                                                                         \
        if (batch == 0 || steps == 0)                                                                         \
            return 0;                                                                                         \
        for (i64 i = 0; i < ins; i += TILE)                                                                   \
            for (i64 o = first; o < last; o++) {                                                              \
                const float *limit = s + o * ins + i;                                                         \
                SUM *to = out + o * ins + i;                                                                  \
                if (ins - i >= TILE)                                                                          \
                    tile_##NAME(delta + o, a + i, limit, to, batch, steps, outs, ins, TILE);                  \
                else                                                                                          \
                    tile_##NAME(delta + o, a + i, limit, to, batch, steps, outs, ins, ins - i);               \
            }                                                                                                 \
        return 0;                                                                                             \
    }

OUTER(f4, float)
OUTER(f8, double)
