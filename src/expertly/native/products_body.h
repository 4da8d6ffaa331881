/* The arithmetic for one instruction set: included by a file for each, with
 *   V             floats of a vector
 *   NAME(f)       f with the set's suffix
 *   LABEL         its name as users read it
 *   PAIRS_LABEL   where it has AVX512-BF16, too: the name of the set that multiplies bfloat16 with it
 * and, where it has better than portable C,
 *   BYTES(p)      V bytes, widened to a vector
 *   HAS_HALF      1 with LOAD_HALF(p, v), HALF_VALUE(p) and PUT_HALF(value, p), which convert float16
 *   what tiles_body.h names
 *
 * Weights are used as they lie. A block is 2 V elements: of bfloat16, those at even places (shifted up) and those at odd
 * places (masked) are a vector each, so inputs and sums of bfloat16 lie in that order, too. Products and sums are
 * float32. Order of summation depends on the sizes alone, not on the threads nor on what else a call computes.
 */

typedef float NAME(vf) __attribute__((vector_size(4 * V), aligned(4), may_alias));
typedef uint32_t NAME(vu) __attribute__((vector_size(4 * V), aligned(1), may_alias));
typedef int32_t NAME(vi) __attribute__((vector_size(4 * V)));
typedef uint16_t NAME(vh) __attribute__((vector_size(2 * V), aligned(1), may_alias));
typedef int8_t NAME(vs) __attribute__((vector_size(V), aligned(1), may_alias));
typedef float NAME(four) __attribute__((vector_size(16), aligned(4), may_alias));
#define vf NAME(vf)
#define vu NAME(vu)
#define vi NAME(vi)
#define vh NAME(vh)
#define BLOCK (2 * V)

#ifndef BYTES
typedef uint8_t NAME(bytes) __attribute__((vector_size(V), aligned(1), may_alias));
#define BYTES(p) __builtin_convertvector(*(const NAME(bytes) *)(p), vu)
#endif
#ifndef HAS_HALF
#define HAS_HALF 0
#define LOAD_HALF(p, v) ((v) = (vf){0})
#define HALF_VALUE(p) 0
#define PUT_HALF(value, p) (void)(value)
#endif

INLINE int64_t NAME(itemsize)(int dtype) { return dtype == FLOAT32 ? 4 : dtype == CODES ? 1 : 2; }

INLINE void NAME(load)(int dtype, const char *p, vf *a, vf *b) {
    if (dtype == BFLOAT16) {
        vu w = *(const vu *)p;
        *a = (vf)(w << 16);
        *b = (vf)(w & 0xffff0000u);
    } else if (dtype == FLOAT32) {
        *a = *(const vf *)p;
        *b = *(const vf *)(p + 4 * V);
    } else if (dtype == CODES) {
        *a = __builtin_convertvector((vi)BYTES(p) - 128, vf);
        *b = __builtin_convertvector((vi)BYTES(p + V) - 128, vf);
    } else {
        LOAD_HALF(p, *a);
        LOAD_HALF(p + 2 * V, *b);
    }
}

INLINE float NAME(value)(int dtype, const char *p) {
    if (dtype == BFLOAT16 || dtype == PAIRS) return bfloat16_value(p);
    if (dtype == FLOAT16) return HALF_VALUE(p);
    float value;
    memcpy(&value, p, 4);
    return value;
}

INLINE void NAME(put)(int dtype, float value, char *p) {
    if (dtype == BFLOAT16 || dtype == PAIRS) put_bfloat16(value, p);
    else if (dtype == FLOAT16) PUT_HALF(value, p);
    else memcpy(p, &value, 4);
}

/* Side by side. */
INLINE void NAME(put_all)(int dtype, const float *values, int64_t num, char *out) {
    int64_t i = 0;
    for (; (dtype == BFLOAT16 || dtype == PAIRS) && i + V <= num; i += V) { /* as put_bfloat16 */
        const vf own = *(const vf *)(values + i);
        const vu bits = (vu)own, half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, is_nan = (vu)(own != own);
        *(vh *)(out + i * 2) = __builtin_convertvector((half & ~is_nan) | (is_nan & 0x7fc0), vh);
    }
    for (; i < num; i++) NAME(put)(dtype, values[i], out + i * NAME(itemsize)(dtype));
}

/* Where element j of a row is in a row of vectors. */
INLINE int64_t NAME(place)(int dtype, int64_t j) {
    if (dtype == PAIRS) return j / BLOCK * BLOCK + j / 4 % 2 * V + j % BLOCK / 8 * 4 + j % 4; /* see sum_pairs */
    if (dtype != BFLOAT16) return j;
    return j / BLOCK * BLOCK + j % 2 * V + j % BLOCK / 2;
}

static void NAME(prepare)(int dtype, const char *x, int64_t width, float *out) {
    int64_t padded = (width + BLOCK - 1) / BLOCK * BLOCK;
    if (dtype == PAIRS) { /* as they are */
        memcpy(out, x, (size_t)width * 2);
        memset((char *)out + width * 2, 0, (size_t)(padded - width) * 2);
        return;
    }
    memset(out + padded - BLOCK, 0, BLOCK * sizeof(float));
    for (int64_t j = 0; j < width; j++)
        out[NAME(place)(dtype, j)] = NAME(value)(dtype, x + j * NAME(itemsize)(dtype));
}

static void NAME(widen)(int dtype, const char *values, int64_t num, float *out) {
    for (int64_t j = 0; j < num; j++) out[j] = NAME(value)(dtype, values + j * NAME(itemsize)(dtype));
}

static void NAME(narrow)(int dtype, const float *values, int64_t num, char *out) {
    NAME(put_all)(dtype, values, num, out);
}

INLINE float NAME(total)(vf v) {
    float s[V];
    memcpy(s, &v, sizeof s);
    for (int w = V / 2; w; w /= 2)
        for (int i = 0; i < w; i++) s[i] += s[i + w];
    return s[0];
}

/* The totals of four vectors, as `total` has them. */
INLINE NAME(four) NAME(four_totals)(vf a, vf b, vf c, vf d) {
    union {
        vf whole[4];
        NAME(four) parts[4][V / 4];
    } of = {{a, b, c, d}};
    for (int k = 0; k < 4; k++)
        for (int w = V / 8; w; w /= 2)
            for (int i = 0; i < w; i++) of.parts[k][i] += of.parts[k][i + w];
    const NAME(four) first = LOW_PAIRS(of.parts[0][0], of.parts[1][0]) + HIGH_PAIRS(of.parts[0][0], of.parts[1][0]);
    const NAME(four) last = LOW_PAIRS(of.parts[2][0], of.parts[3][0]) + HIGH_PAIRS(of.parts[2][0], of.parts[3][0]);
    return PICK(first, last, 0, 1, 4, 5) + PICK(first, last, 2, 3, 6, 7);
}

INLINE vf NAME(choose)(vi where, vf yes, vf no) {
    return (vf)(((vi)yes & where) | ((vi)no & ~where));
}

/* e^x for x <= 0, or NaN; nothing below -87. Cody and Waite's reduction, Cephes' polynomial: 2 units in the last place. */
INLINE vf NAME(exp)(vf x) {
    const vf shift = (vf){0} + 12582912.f, least = (vf){0} - 87.f;
    const vf bounded = NAME(choose)((vi)(x < least), least, x);
    const vf whole = bounded * 1.44269504088896341f + shift, n = whole - shift;
    const vf r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = (vf){0} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    const vf power = (vf)(((vu)whole - 0x4b400000u + 127u) << 23);
    return NAME(choose)((vi)(x < least), (vf){0}, p * power);
}

INLINE float NAME(exp_one)(float x) {
    const vf result = NAME(exp)((vf){0} + x);
    return result[0];
}

/* In place, with room behind the `num` values for a vector: whether they are numbers. */
static int NAME(softmax)(int64_t num, float *values) {
    float most = values[0];
    for (int64_t j = 1; j < num; j++) most = values[j] > most ? values[j] : most;
    for (int64_t j = num; j % V; j++) values[j] = -__builtin_inff();
    vf sum = {0};
    for (int64_t j = 0; j < num; j += V) sum += *(vf *)(values + j) = NAME(exp)(*(vf *)(values + j) - most);
    const float all = NAME(total)(sum);
    for (int64_t j = 0; j < num; j += V) *(vf *)(values + j) /= all;
    return all == all;
}

/* Rows to ask memory for ahead of those in use: as many again, and of narrow rows as many as make 4 KiB. */
INLINE int64_t NAME(rows_ahead)(int64_t num_rows, int64_t row_nbytes) {
    int64_t groups = 4096 / (num_rows * row_nbytes);
    return num_rows * (groups < 1 ? 1 : groups);
}

/* Into the second cache: the first has no room for what is asked for so far ahead. */
INLINE void NAME(fetch)(const char *p, int64_t nbytes) {
    for (int64_t q = 0; q < nbytes; q += 64) __builtin_prefetch(p + q, 0, 2);
}

static void NAME(tile_prepare)(int format, int dtype, const char *x, int64_t width, void *out);
static void NAME(many_prepare)(int dtype, const char *x, int64_t width, unit *out, int64_t step);

#ifdef PAIRS_LABEL
#include "pairs_body.h"
#else
#define dot_pairs(d, one, first, end) ((void)0)
#define sum_pairs(s, one, first, end, sum) ((void)0)
#endif

/* -- between two products ----------------------------------------------------------------------------------------- */

/* To the `num` rounded numbers at `out`, those of a bias. */
INLINE void NAME(add_bias)(int dtype, const char *bias, int64_t num, char *out) {
    const int64_t itemsize = NAME(itemsize)(dtype);
    for (int64_t i = 0; i < num; i++)
        NAME(put)(dtype, NAME(value)(dtype, out + i * itemsize) + NAME(value)(dtype, bias + i * itemsize),
                  out + i * itemsize);
}

/* `num` neurons from `first` on of a task: their products are at the same places of inner[matrix, row, neuron]. */
INLINE void NAME(activate_typed)(int dtype, const activation *a, int64_t number, const task *one, int num_inner,
                                 char *inner, int64_t num_rows, int64_t num_neurons, int64_t first, int64_t num) {
    const int64_t itemsize = NAME(itemsize)(dtype), last = num_inner - 1;
    for (int64_t t = 0; t < one->num_tokens; t++) {
        const int64_t row = one->out_row + t;
        char *values[2] = {NULL, NULL};
        for (int64_t m = 0; m <= last; m++) {
            values[m] = inner + ((m * num_rows + row) * num_neurons + first) * itemsize;
            if (a->bias[m] == NULL) continue;
            const int64_t place = a->experts[number] * a->bias_width + a->bias_at + first;
            NAME(add_bias)(dtype, a->bias[m] + place * itemsize, num, values[m]);
        }
        if (dtype == FLOAT32) {
            const curve of = *(const curve *)a->f;
            float *h = (float *)values[0], *up = (float *)values[last];
            for (int64_t i = 0; i < num; i += V) {
                vf x = {0}, y = {0};
                const size_t nbytes = (size_t)(num - i < V ? num - i : V) * sizeof(float);
                memcpy(&x, h + i, nbytes);
                memcpy(&y, up + i, nbytes);
                x = NAME(choose)((vi)(x > of.limit), (vf){0} + of.limit, x);
                y = NAME(choose)((vi)(y > of.limit), (vf){0} + of.limit, y);
                y = NAME(choose)((vi)(y < -of.limit), (vf){0} - of.limit, y) + of.offset;
                const vf z = of.cubic == 0 ? x * of.linear : x * (of.linear + of.cubic * x * x);
                const vf e = NAME(exp)((vf)((vu)z | 0x80000000u)); /* of -|z|, which is at most 1 */
                x *= NAME(choose)((vi)(z < 0), e, (vf){0} + 1.f) / (e + 1.f);
                if (of.is_squared) x *= x;
                if (last) x *= y;
                memcpy(h + i, &x, nbytes);
            }
#ifdef PAIRS_LABEL
        } else if (dtype == BFLOAT16 && a->format == ROWS) {
            NAME(activate_pairs)(a->f, a->g, values[0], values[1], num, (float *)(a->h + row * a->h_row_nbytes) + first);
            continue;
#endif
        } else {
            uint16_t *h = (uint16_t *)values[0];
            const uint16_t *up = (const uint16_t *)values[1];
            for (int64_t i = 0; i < num; i++) {
                h[i] = a->f[h[i]];
                if (!last) continue;
                const uint16_t weight = a->g == NULL ? up[i] : a->g[up[i]];
                NAME(put)(dtype, NAME(value)(dtype, (char *)(h + i)) * NAME(value)(dtype, (const char *)&weight),
                          (char *)(h + i));
            }
        }
        char *h = a->h + row * a->h_row_nbytes;
        if (a->format == ROWS) NAME(widen)(dtype, values[0], num, (float *)h + first);
        else NAME(tile_prepare)(a->format, a->dtype, values[0], num, h + tile_row_nbytes(first));
    }
}

static void NAME(activate)(int dtype, const activation *a, int64_t number, const task *one, int num_inner, char *inner,
                           int64_t num_rows, int64_t num_neurons, int64_t first, int64_t num) {
#define TYPED(type) \
    NAME(activate_typed)(type, a, number, one, num_inner, inner, num_rows, num_neurons, first, num)
    if (dtype == BFLOAT16 || dtype == PAIRS) TYPED(BFLOAT16);
    else if (dtype == FLOAT32) TYPED(FLOAT32);
#if HAS_HALF
    else TYPED(FLOAT16);
#endif
#undef TYPED
}

/* out[t] = the sum of top_k rows times their weights, from the first on; products and sum are what torch makes of them. */
INLINE void NAME(combine_typed)(int dtype, int weights_dtype, int64_t num, int64_t top_k, int64_t width, const char *rows,
                                const char *weights, char *out) {
    const int64_t itemsize = NAME(itemsize)(dtype);
    for (int64_t t = 0; t < num; t++)
        for (int64_t first = 0; first < width; first += 64) {
            float sums[64] = {0}, products[64];
            const int64_t n = width - first < 64 ? width - first : 64;
            for (int64_t k = 0; k < top_k; k++) {
                const float weight = NAME(value)(weights_dtype, weights + (t * top_k + k) * NAME(itemsize)(weights_dtype));
                const char *row = rows + ((t * top_k + k) * width + first) * itemsize;
                for (int64_t j = 0; j < n; j++) {
                    products[j] = NAME(value)(dtype, row + j * itemsize) * weight;
                    if (dtype == FLOAT32 || dtype != weights_dtype) continue;
                    char rounded[4];
                    NAME(put)(dtype, products[j], rounded);
                    products[j] = NAME(value)(dtype, rounded);
                }
                __asm__ volatile("" : "+m"(products)); /* rounded before they are added, as torch has them */
                for (int64_t j = 0; j < n; j++) sums[j] += products[j];
            }
            for (int64_t j = 0; j < n; j++) NAME(put)(dtype, sums[j], out + (t * width + first + j) * itemsize);
        }
}

static void NAME(combine)(int dtype, int weights_dtype, int64_t num, int64_t top_k, int64_t width, const char *rows,
                          const char *weights, char *out) {
#define TYPED(type, of_weights) \
    if (dtype == type && weights_dtype == of_weights) \
        NAME(combine_typed)(type, of_weights, num, top_k, width, rows, weights, out);
    TYPED(BFLOAT16, BFLOAT16)
    TYPED(BFLOAT16, FLOAT32)
    TYPED(FLOAT32, FLOAT32)
#if HAS_HALF
    TYPED(FLOAT16, FLOAT16)
    TYPED(FLOAT16, FLOAT32)
#endif
#undef TYPED
}

#include "tiles_body.h"

/* -- rows times vectors ------------------------------------------------------------------------------------------- */

INLINE void NAME(dot_block)(int dtype, int N, const char *p, const float *const *x, int64_t j, vf *a, vf *b) {
    vf w0, w1;
    NAME(load)(dtype, p, &w0, &w1);
    for (int t = 0; t < N; t++) {
        a[t] += w0 * *(const vf *)(x[t] + j);
        b[t] += w1 * *(const vf *)(x[t] + j + V);
    }
}

/* result[t, k] of R rows, of which there is room for four. */
INLINE void NAME(dot_rows)(int dtype, int R, int N, const char *const *rows, int64_t ahead, const float *const *x,
                           int64_t width, float *result) {
    const int64_t itemsize = NAME(itemsize)(dtype), full = width / BLOCK * BLOCK;
    vf a[4][MAX_TOKENS], b[4][MAX_TOKENS];
    for (int k = 0; k < R; k++)
        for (int t = 0; t < N; t++) a[k][t] = b[k][t] = (vf){0};
    for (int64_t j = 0; j < full; j += BLOCK)
        for (int k = 0; k < R; k++) {
            const char *p = rows[k] + j * itemsize;
            NAME(fetch)(p + ahead, BLOCK * itemsize);
            NAME(dot_block)(dtype, N, p, x, j, a[k], b[k]);
        }
    if (full < width)
        for (int k = 0; k < R; k++) {
            char tail[BLOCK * 4] = {0};
            memcpy(tail, rows[k] + full * itemsize, (size_t)((width - full) * itemsize));
            NAME(dot_block)(dtype, N, tail, x, full, a[k], b[k]);
        }
    for (int t = 0; t < N; t++) {
        vf all[4] = {{0}};
        for (int k = 0; k < R; k++) all[k] = a[k][t] + b[k][t];
        if (R == 1) result[t * 4] = NAME(total)(all[0]);
        else *(NAME(four) *)(result + t * 4) = NAME(four_totals)(all[0], all[1], all[2], all[3]);
    }
}

/* Rows `first` to `end` of a task, counted over its matrices in the order in which they lie. */
INLINE void NAME(dot_range)(int dtype, int R, int N, const dots *d, const task *one, int64_t first, int64_t end) {
    const int64_t itemsize = NAME(itemsize)(dtype), mask = d->num_matrices - 1; /* of one matrix or two */
    const float *x[MAX_TOKENS];
    for (int t = 0; t < N; t++) x[t] = d->x + (one->x_row + t) * d->padded_width;
    const int64_t ahead = NAME(rows_ahead)(R < 2 ? 2 : R, d->width * itemsize) / (mask + 1) * d->row_nbytes;
    for (int64_t i = first; i < end; i += R) {
        const char *rows[4];
        float result[4 * MAX_TOKENS];
        for (int k = 0; k < R; k++)
            rows[k] = one->weights + ((i + k) >> mask) * d->row_nbytes + ((i + k) & mask) * d->matrix_nbytes;
        NAME(dot_rows)(dtype, R, N, rows, ahead, x, d->width, result);
        for (int k = 0; k < R; k++) {
            const float bias = d->bias == NULL ? 0 : NAME(value)(dtype, d->bias + (i + k) * itemsize);
            for (int t = 0; t < N; t++) {
                int64_t place = (((i + k) & mask) * d->out_rows + one->out_row + t) * d->num_neurons + ((i + k) >> mask);
                NAME(put)(dtype, result[t * 4 + k] + bias, d->out + place * itemsize);
            }
        }
    }
}

INLINE void NAME(dot_typed)(int dtype, const dots *d, const task *one, int64_t first, int64_t end) {
    /* Memory gives most to one row after the other, which vectors this long keep up with; shorter ones need four
     * rows side by side, which hide each other's latency. */
    const int in_turn = V >= 16 && d->num_matrices == 1;
    int64_t fours = in_turn ? first : first + (end - first) / 4 * 4, twos = first + (end - first) / 2 * 2;
    switch (one->num_tokens) {
#define CASE(N, R, whole)                                   \
    case N:                                                 \
        NAME(dot_range)(dtype, R, N, d, one, first, whole); \
        NAME(dot_range)(dtype, 1, N, d, one, whole, end);   \
        break;
        CASE(1, 4, fours)
        CASE(2, 4, fours)
        CASE(3, 2, twos)
        CASE(4, 2, twos)
#undef CASE
    }
}

/* Neurons `begin` to `end` of a task. */
static void NAME(dot_part)(const dots *d, const task *one, int64_t begin, int64_t end) {
    if (d->format != ROWS && one->num_tokens > TASK_TOKENS) {
        NAME(many_dots)(d, one, begin, end);
        return;
    }
    const int64_t first = begin * d->num_matrices, last = end * d->num_matrices;
    const int most = d->format == ROWS ? MAX_TOKENS : MOST_TILE_TOKENS;
    for (int64_t t = 0; t < one->num_tokens; t += most) {
        const task some = some_tokens(one, t, most);
        if (d->format != ROWS) NAME(tile_dots)(d, &some, begin, end);
        else if (d->dtype == PAIRS) dot_pairs(d, &some, first, last);
        else if (d->dtype == BFLOAT16) NAME(dot_typed)(BFLOAT16, d, &some, first, last);
        else if (d->dtype == FLOAT32) NAME(dot_typed)(FLOAT32, d, &some, first, last);
#if HAS_HALF
        else NAME(dot_typed)(FLOAT16, d, &some, first, last);
#endif
    }
    if (d->then != NULL)
        NAME(activate)(d->dtype, d->then, one - d->tasks, one, d->num_matrices, d->out, d->out_rows, d->num_neurons,
                       begin, end - begin);
}

INLINE int64_t NAME(least)(int64_t a, int64_t b) { return a < b ? a : b; }

static void NAME(run_dots)(void *argument) {
    dots *d = argument;
    FOR_CHUNKS(c, &d->chunks) {
        const int64_t begin = c % d->num_chunks * d->chunk;
        NAME(dot_part)(d, d->tasks + c / d->num_chunks, begin, NAME(least)(begin + d->chunk, d->num_neurons));
    }
}

/* -- rows weighed and summed -------------------------------------------------------------------------------------- */

INLINE void NAME(sum_block)(int dtype, int R, int N, const char *const *rows, int64_t offset, int64_t ahead,
                            const float *h, int64_t stride, float *sum, int64_t padded) {
    vf a[MAX_TOKENS], b[MAX_TOKENS];
    for (int t = 0; t < N; t++) a[t] = *(vf *)(sum + t * padded), b[t] = *(vf *)(sum + t * padded + V);
    for (int k = 0; k < R; k++) {
        vf w0, w1;
        if (ahead) NAME(fetch)(rows[k] + offset + ahead, BLOCK * NAME(itemsize)(dtype));
        NAME(load)(dtype, rows[k] + offset, &w0, &w1);
        for (int t = 0; t < N; t++) a[t] += w0 * h[t * stride + k], b[t] += w1 * h[t * stride + k];
    }
    for (int t = 0; t < N; t++) *(vf *)(sum + t * padded) = a[t], *(vf *)(sum + t * padded + V) = b[t];
}

INLINE void NAME(sum_range)(int dtype, int R, int N, const sums *s, const task *one, int64_t first, int64_t end,
                            float *sum) {
    const int64_t itemsize = NAME(itemsize)(dtype), full = s->width / BLOCK * BLOCK;
    const int64_t ahead = NAME(rows_ahead)(R < 4 ? 4 : R, s->width * itemsize) * s->row_nbytes;
    for (int64_t i = first; i < end; i += R) {
        const char *rows[8], *tails[8];
        char copies[8][BLOCK * 4];
        const float *h = s->h + one->x_row * s->num_neurons + i;
        for (int k = 0; k < R; k++) rows[k] = one->weights + (i + k) * s->row_nbytes;
        for (int64_t j = 0; j < full; j += BLOCK)
            NAME(sum_block)(dtype, R, N, rows, j * itemsize, ahead, h, s->num_neurons, sum + j, s->padded_width);
        if (full == s->width) continue;
        for (int k = 0; k < R; k++) {
            memset(copies[k], 0, sizeof copies[k]);
            memcpy(copies[k], rows[k] + full * itemsize, (size_t)((s->width - full) * itemsize));
            tails[k] = copies[k];
        }
        NAME(sum_block)(dtype, R, N, tails, 0, 0, h, s->num_neurons, sum + full, s->padded_width);
    }
}

/* The chunks of a task have been summed: their sum, in their order, to where it belongs. */
INLINE void NAME(finish_typed)(int dtype, int order, const sums *s, int64_t number) {
    const task *one = s->tasks + number;
    const int64_t stride = one->num_tokens * s->padded_width;
    for (int64_t t = 0; t < one->num_tokens; t++) {
        float *total = partial_at(s, number, 0) + t * s->padded_width;
        const int64_t row = s->out_rows[one->out_row + t];
        for (int64_t c = 1; c < s->num_chunks; c++)
            for (int64_t j = 0; j < s->padded_width; j += V) *(vf *)(total + j) += *(vf *)(total + c * stride + j);
        if (s->is_added) {
            float *out = (float *)s->out + row * s->width;
            for (int64_t j = 0; j < s->width; j++) out[j] += total[NAME(place)(order, j)];
        } else {
            const int64_t itemsize = NAME(itemsize)(dtype);
            char *out = s->out + row * s->width * itemsize;
            if (order == FLOAT32) NAME(put_all)(dtype, total, s->width, out);
            else
                for (int64_t j = 0; j < s->width; j++)
                    NAME(put)(dtype, total[NAME(place)(order, j)], out + j * itemsize);
            if (s->bias != NULL) NAME(add_bias)(dtype, s->bias + s->experts[number] * s->width * itemsize, s->width, out);
        }
    }
}

static void NAME(finish)(const sums *s, int64_t number) {
#define TYPED(dtype)                                                                       \
    do {                                                                                   \
        if (s->format == ROWS) NAME(finish_typed)(dtype, dtype, s, number);                \
        else NAME(finish_typed)(dtype, FLOAT32, s, number);                                \
    } while (0)
    if (s->dtype == PAIRS) TYPED(PAIRS);
    else if (s->dtype == BFLOAT16) TYPED(BFLOAT16);
    else if (s->dtype == FLOAT32) TYPED(FLOAT32);
#if HAS_HALF
    else TYPED(FLOAT16);
#endif
#undef TYPED
}

INLINE void NAME(sum_typed)(int dtype, const sums *s, const task *one, int64_t first, int64_t end, float *sum) {
    const int64_t eights = first + (end - first) / 8 * 8, fours = first + (end - first) / 4 * 4;
    switch (one->num_tokens) {
#define CASE(N, R, whole)                                        \
    case N:                                                      \
        NAME(sum_range)(dtype, R, N, s, one, first, whole, sum); \
        NAME(sum_range)(dtype, 1, N, s, one, whole, end, sum);   \
        break;
        CASE(1, 8, eights)
        CASE(2, 4, fours)
        CASE(3, 4, fours)
        CASE(4, 4, fours)
#undef CASE
    }
}

/* Chunk c, `step` neurons after the other, of which `inner` is computed first. */
static void NAME(sums_chunk)(const dots *inner, const sums *s, int64_t c, int64_t step) {
    const int64_t number = c / s->num_chunks, begin = c % s->num_chunks * s->chunk;
    const int64_t end = NAME(least)(begin + s->chunk, s->num_neurons);
    const task *one = s->tasks + number;
    const int most = s->format == ROWS ? MAX_TOKENS : MOST_TILE_TOKENS;
    float *sum = partial_at(s, number, c % s->num_chunks);
    memset(sum, 0, (size_t)(one->num_tokens * s->padded_width) * sizeof(float));
    for (int64_t first = begin; first < end; first += step) {
        const int64_t last = NAME(least)(first + step, end);
        NAME(dot_part)(inner, inner->tasks + number, first, last);
        for (int64_t t = 0; t < one->num_tokens; t += most) {
            const task some = some_tokens(one, t, most);
            float *own = sum + t * s->padded_width;
            if (s->format != ROWS) NAME(tile_sums)(s, &some, first, last, own);
            else if (s->dtype == PAIRS) sum_pairs(s, &some, first, last, own);
            else if (s->dtype == BFLOAT16) NAME(sum_typed)(BFLOAT16, s, &some, first, last, own);
            else if (s->dtype == FLOAT32) NAME(sum_typed)(FLOAT32, s, &some, first, last, own);
#if HAS_HALF
            else NAME(sum_typed)(FLOAT16, s, &some, first, last, own);
#endif
        }
    }
    if (__atomic_sub_fetch(s->left + number, 1, __ATOMIC_ACQ_REL) == 0) NAME(finish)(s, number);
}

/* Down rows follow the gate and up rows beside which they lie: a chunk's, or a block's. */
static void NAME(run_experts)(void *argument) {
    expert_rows *e = argument;
    int64_t step = e->inner.block_size;
    if (e->inner.format == ROWS) { /* so few that memory is read as it lies: rows of a few hundred bytes are no stream */
        const int64_t most = ROWS_STEP_NBYTES / e->inner.row_nbytes / 8 * 8;
        step = most < 8 ? 8 : most;
    }
    FOR_CHUNKS(c, &e->inner.chunks) NAME(sums_chunk)(&e->inner, &e->down, c, step);
}

#include "attention_body.h"

#define SET(label, has_pairs)                                                                                       \
    {                                                                                                               \
        label, BLOCK, HAS_HALF, has_pairs, NAME(prepare), NAME(widen), NAME(narrow), NAME(softmax), NAME(tile_prepare), \
            NAME(many_prepare), NAME(combine), NAME(run_dots), NAME(run_many_sums), NAME(run_experts),   \
            NAME(decode_rows),                                                                                      \
            NAME(run_attention), NAME(encode), NAME(rotate), NAME(norm),                                                          \
    }
const instruction_set NAME(set) = SET(LABEL, 0);
#ifdef PAIRS_LABEL
const instruction_set NAME(pairs_set) = SET(PAIRS_LABEL, 1);
#endif
