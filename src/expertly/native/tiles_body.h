/* Products with quantised matrices, for one instruction set: included by products_body.h, whose macros it uses, and
 *   SHUFFLE(t, codes)   which of 16 bytes each byte of `codes`, up to 15, says
 *   BYTES(p)            a vector of V bytes
 * and where V is 8 or 16
 *   LOOKUP_IN(a, codes) for each lane, which float of `a` its lowest three or four bits say
 *   HAS_ZERO(bytes)     whether one of the 4 V bytes is 0
 * and where there are products of bytes
 *   MOST_CODE           the largest factor
 *   DOT_BYTES(sums, codes, inputs)  adds to each of V sums the products of four bytes, those of `inputs` with a sign
 *   REPEAT(p)           16 bytes in each 16 bytes of a vector
 *   SHUFFLE_EACH(t, codes)  which of the 16 bytes of t at the same place each byte says
 *   JOIN(p, at)         16 bytes each from p + at[0], p + at[1] and so on
 *   FOLD(a, b)          in each four lanes a0 + a2, b0 + b2, a1 + a3, b1 + b3
 *
 * A tile is 16 outputs by a group of inputs, that of its format. An expert is blocks of as many neurons as down's group,
 * each of which is the tiles of its inner matrices (gate and up, or up: for 16 outputs after the other, those over all
 * inputs), then those of down (16 outputs after the other, each over the block's neurons). Values are decoded in
 * registers; products and sums are float32, and their order depends on the sizes alone.
 *
 * A format is a header of two functions for WEIGHT_FORMATS (products.h), or is among those of codes.h or int4.h:
 *   NAME(f_add)(dtype, N, p, next, x, sums)  adds the tile at `p` times a group's inputs of N tokens to 16 sums of each;
 *                                            `dtype` is what the weights are to be rounded to; as many bytes at `next`
 *                                            are asked of memory, bit by bit, as a processor awaits few lines at a time
 *   NAME(f_decode)(p, out)                    its weights in float32, out[group][16]
 */

#define W (16 / V) /* vectors of a tile's outputs */

#if V == 4 /* more tokens at a time are no faster (docs/log.md), and as much again to compile */
#define MOST_TILE_TOKENS 1
#define FOR_TOKENS(X, ...) X(__VA_ARGS__, 1)
#else
#define MOST_TILE_TOKENS MAX_TOKENS
#define FOR_TOKENS(X, ...) X(__VA_ARGS__, 1) X(__VA_ARGS__, 2) X(__VA_ARGS__, 3) X(__VA_ARGS__, 4)
#endif

#if V == 4 && !defined(__aarch64__)
INLINE vu NAME(shuffle)(const uint8_t *values, vu codes) {
    uint8_t bytes[16];
    memcpy(bytes, &codes, 16);
    for (int i = 0; i < 16; i++) bytes[i] = values[bytes[i]];
    memcpy(&codes, bytes, 16);
    return codes;
}
#endif

/* To what `dtype` has of such values, none of which is NaN. */
INLINE vf NAME(rounded)(int dtype, vf values) {
    if (dtype == BFLOAT16) {
        vu bits = (vu)values;
        bits += 0x7fff + (bits >> 16 & 1);
        return (vf)(bits & 0xffff0000u);
    }
    if (dtype == FLOAT16)
        for (int i = 0; i < V; i++) {
            char bytes[2] = {0};
            NAME(put)(FLOAT16, values[i], bytes);
            values[i] = NAME(value)(FLOAT16, bytes);
        }
    return values;
}

#include "codes.h"
#include "fp8.h"
#include "int4.h"

/* -- any format ------------------------------------------------------------------------------------------------------ */

/* A row of inputs as tiles of a format take it. */
static void NAME(tile_prepare)(int format, int dtype, const char *x, int64_t width, char *out) {
    if (!has_units(format)) NAME(widen)(dtype, x, width, (float *)out);
    else if (dtype == BFLOAT16) NAME(prepare_units)(format, BFLOAT16, x, width, (unit *)out);
    else if (dtype == FLOAT32) NAME(prepare_units)(format, FLOAT32, x, width, (unit *)out);
#if HAS_HALF
    else NAME(prepare_units)(format, FLOAT16, x, width, (unit *)out);
#endif
}

/* Adds two rows of `num` tiles, the second `stride` bytes on, times the inputs at x[t]: what is done with inputs is done once
 * for both, and neither waits for the other's sums. As many bytes at `next` are asked of memory in the order in which they
 * lie, which is faster than two places in turns.
 */
typedef void NAME(pair_add)(int dtype, int64_t num, const char *p, int64_t stride, const char *next, const char *const *x,
                            vf (*sums)[MAX_TOKENS][W]);

#define CODES(F, f, group, nbytes, N)                                                                                  \
    static void NAME(f##_##N)(int dtype, int64_t num, const char *p, int64_t stride, const char *next,                  \
                              const char *const *x, vf (*sums)[MAX_TOKENS][W]) {                                       \
        const unit *units[N];                                                                                          \
        (void)dtype;                                                                                                   \
        for (int t = 0; t < N; t++) units[t] = (const unit *)x[t];                                                     \
        for (; num; num--, p += nbytes, next += 2 * (nbytes)) {                                                        \
            NAME(codes_add)(F, N, p, stride, next, units, sums);                                                       \
            for (int t = 0; t < N; t++) units[t] += group / UNIT;                                                      \
        }                                                                                                              \
    }
#define WEIGHTS(F, f, group, nbytes, N)                                                                                \
    static void NAME(f##_##N)(int dtype, int64_t num, const char *p, int64_t stride, const char *next,                  \
                              const char *const *x, vf (*sums)[MAX_TOKENS][W]) {                                       \
        const float *rows[N];                                                                                          \
        for (int t = 0; t < N; t++) rows[t] = (const float *)x[t];                                                     \
        for (; num; num--, p += nbytes, next += 2 * (nbytes)) {                                                        \
            _Pragma("GCC unroll 1") for (int r = 0; r < 2; r++)                                                        \
                NAME(f##_add)(dtype, N, p + r * stride, next + r * (nbytes), rows, sums[r]);                           \
            for (int t = 0; t < N; t++) rows[t] += group;                                                              \
        }                                                                                                              \
    }
#define NUMBERS(F, f, group, nbytes, N)                                                                                \
    static void NAME(f##_##N)(int dtype, int64_t num, const char *p, int64_t stride, const char *next,                  \
                              const char *const *x, vf (*sums)[MAX_TOKENS][W]) {                                       \
        (void)dtype;                                                                                                   \
        for (int t = 0; t < N; t++)                                                                                    \
            NAME(f)(num, p, stride, next, (const unit *)x[t], (vf(*)[MAX_TOKENS][W])(sums[0] + t));                   \
    }
#define EACH(F, f, group, nbytes)                                                                                      \
    static __attribute__((noinline)) void NAME(f)(int64_t num, const char *p, int64_t stride, const char *next,         \
                                                  const unit *x, vf (*sums)[MAX_TOKENS][W]) {                          \
        NAME(int4_add)(F, num, p, stride, next, x, sums);                                                              \
    }                                                                                                                  \
    FOR_TOKENS(NUMBERS, F, f, group, nbytes)
INT4_FORMATS(EACH)
#undef EACH
#define EACH(F, f, group, nbytes) FOR_TOKENS(CODES, F, f, group, nbytes)
CODE_FORMATS(EACH)
#undef EACH
#define EACH(F, f, group, nbytes) FOR_TOKENS(WEIGHTS, F, f, group, nbytes)
WEIGHT_FORMATS(EACH)
#undef EACH

/* By format and number of tokens. */
static NAME(pair_add) *const NAME(pair_adds)[NUM_FORMATS][MAX_TOKENS] = {
#define PLACE(F, f, group, nbytes, N) NAME(f##_##N),
#define EACH(F, f, group, nbytes) {FOR_TOKENS(PLACE, F, f, group, nbytes)},
    TILE_FORMATS(EACH)
#undef EACH
#undef PLACE
};
#undef NUMBERS
#undef CODES
#undef WEIGHTS

INLINE void NAME(tile_decode)(int format, const char *p, float (*out)[16]) {
    switch (format) {
#define CASE(F, f, group, nbytes) \
    case F: NAME(f##_decode)(p, out); break;
        WEIGHT_FORMATS(CASE)
#undef CASE
#define CASE(F, f, group, nbytes) \
    case F: NAME(int4_decode)(F, p, out); break;
        INT4_FORMATS(CASE)
#undef CASE
    default: NAME(codes_decode)(format, p, out);
    }
}

/* Block `number` of all tasks: its inner matrices, 32 outputs after the other. */
static void NAME(tile_dots_block)(const tile_dots *d, int64_t number) {
    const int64_t num_blocks = d->end / d->num_tasks, block = number % num_blocks, after = number + 1;
    const task *one = d->tasks + number / num_blocks;
    const int format = d->format, group = tile_group(format), N = (int)one->num_tokens;
    NAME(pair_add) *const add = NAME(pair_adds)[format][N - 1];
    const int64_t itemsize = NAME(itemsize)(d->dtype);
    const int64_t stride = d->hidden / group * tile_nbytes(format), row_nbytes = tile_row_nbytes(format, d->hidden);
    const int64_t end = d->num_inner * d->block_size;
    const char *p = one->weights + block * d->block_nbytes, *next;
    for (int64_t v = 0; v < end; v += 32, p = next) {
        next = p + 2 * stride;
        if (v + 32 >= end && after < d->end)
            next = d->tasks[after / num_blocks].weights + after % num_blocks * d->block_nbytes;
        vf sums[2][MAX_TOKENS][W];
        for (int t = 0; t < N; t++)
            for (int w = 0; w < W; w++) sums[0][t][w] = sums[1][t][w] = (vf){0};
        const char *x[MAX_TOKENS];
        for (int t = 0; t < N; t++) x[t] = d->x + (one->x_row + t) * row_nbytes;
        const int64_t matrix = v / d->block_size, neuron = block * d->block_size + v % d->block_size;
        const int num = neuron + 16 < d->num_neurons ? 32 : 16; /* the last of a matrix by itself may lack the other */
        add(d->dtype, d->hidden / group, p, num == 32 ? stride : 0, next, x, sums);
        for (int t = 0; t < N; t++) {
            float results[32];
            for (int r = 0; r < 2; r++) memcpy(results + r * 16, sums[r][t], 16 * sizeof(float));
            if (d->bias != NULL)
                for (int i = 0; i < num; i++) results[i] += NAME(value)(d->dtype, d->bias + (neuron + i) * itemsize);
            char *out = d->out + ((matrix * d->out_rows + one->out_row + t) * d->num_neurons + neuron) * itemsize;
            NAME(put_all)(d->dtype, results, num, out);
        }
    }
    if (d->then != NULL)
        NAME(activate)(d->dtype, d->then, one - d->tasks, one, (int)d->num_inner, d->out, d->out_rows, d->num_neurons,
                       block * d->block_size, d->block_size);
}

/* Where chunk `number` of all tasks begins in the first block. */
INLINE const char *NAME(tile_sums_at)(const tile_sums *s, int64_t number) {
    return s->tasks[number / s->num_chunks].weights + s->down_at +
           number % s->num_chunks * s->chunk * 2 * tile_nbytes(s->format);
}

/* Chunk `number` of all tasks: some outputs of down, over all blocks. */
static void NAME(tile_sums_chunk)(const tile_sums *s, int64_t number) {
    const task *one = s->tasks + number / s->num_chunks;
    const int64_t first = number % s->num_chunks * s->chunk, most = s->hidden / 32;
    const int64_t end = first + s->chunk < most ? first + s->chunk : most;
    const int format = s->format, group = tile_group(format), N = (int)one->num_tokens;
    NAME(pair_add) *const add = NAME(pair_adds)[format][N - 1];
    const int64_t nbytes = tile_nbytes(format), itemsize = NAME(itemsize)(s->dtype);
    const int64_t row_nbytes = tile_row_nbytes(format, s->num_neurons);
    vf sums[PAIRS_CHUNK][2][MAX_TOKENS][W];
    for (int64_t v = 0; v < end - first; v++)
        for (int t = 0; t < N; t++)
            for (int w = 0; w < W; w++) sums[v][0][t][w] = sums[v][1][t][w] = (vf){0};
    const char *begin = NAME(tile_sums_at)(s, number);
    for (int64_t block = 0; block < s->num_neurons / group; block++, begin += s->block_nbytes) {
        const char *p = begin, *next = begin + s->block_nbytes;
        if (block + 1 == s->num_neurons / group && number + 1 < s->end) next = NAME(tile_sums_at)(s, number + 1);
        const char *x[MAX_TOKENS];
        for (int t = 0; t < N; t++)
            x[t] = s->h + (one->x_row + t) * row_nbytes + tile_row_nbytes(format, block * group);
        for (int64_t v = 0; v < end - first; v++, p += 2 * nbytes, next += 2 * nbytes)
            add(s->dtype, 1, p, nbytes, next, x, sums[v]);
    }
    for (int64_t v = first; v < end; v++)
        for (int t = 0; t < N; t++) {
            float results[32];
            for (int r = 0; r < 2; r++) memcpy(results + r * 16, sums[v - first][r][t], 16 * sizeof(float));
            const int64_t row = s->out_rows == NULL ? one->out_row + t : s->out_rows[one->out_row + t];
            const int64_t place = row * s->hidden + v * 32;
            if (s->is_added)
                for (int i = 0; i < 32; i++) ((float *)s->out)[place + i] += results[i];
            else
                NAME(put_all)(s->dtype, results, 32, s->out + place * itemsize);
            if (s->bias != NULL)
                NAME(add_bias)(s->dtype, s->bias + (s->experts[one - s->tasks] * s->hidden + v * 32) * itemsize, 32,
                               s->out + place * itemsize);
        }
}

static void NAME(run_tile_dots)(void *argument) {
    tile_dots *d = argument;
    for (int64_t c, end; (c = take(&d->next, d->end, d->num_threads, &end)) < d->end;)
        for (; c < end; c++) NAME(tile_dots_block)(d, c);
}

static void NAME(run_tile_sums)(void *argument) {
    tile_sums *s = argument;
    for (int64_t c, end; (c = take(&s->next, s->end, s->num_threads, &end)) < s->end;)
        for (; c < end; c++) NAME(tile_sums_chunk)(s, c);
}

/* out[neuron, matrix, H], the last matrix being down, transposed. */
static void NAME(run_tile_decode)(void *argument) {
    tile_decode *d = argument;
    const int group = tile_group(d->inner);
    const int64_t itemsize = NAME(itemsize)(d->dtype), size = d->block_size, num_rows = size / 16;
    const int64_t M = d->num_inner + (d->down != NO_DOWN);
    const int64_t inner_nbytes = tile_nbytes(d->inner), down_nbytes = tile_nbytes(d->down);
    float tile[MAX_GROUP][16];
    for (int64_t block; (block = __atomic_fetch_add(&d->next, 1, __ATOMIC_RELAXED)) < d->end;) {
        const char *p = d->weights + block * d->block_nbytes;
        char *out = d->out + block * size * M * d->hidden * itemsize;
        for (int64_t v = 0; v < d->num_inner * num_rows; v++)
            for (int64_t j = 0; j < d->hidden; j += group, p += inner_nbytes) {
                NAME(tile_decode)(d->inner, p, tile);
                const int64_t matrix = v / num_rows, neuron = v % num_rows * 16;
                for (int64_t i = 0; i < 16; i++) {
                    char *row = out + (((neuron + i) * M + matrix) * d->hidden + j) * itemsize;
                    for (int64_t k = 0; k < group; k++) NAME(put)(d->dtype, tile[k][i], row + k * itemsize);
                }
            }
        for (int64_t h = 0; d->down != NO_DOWN && h < d->hidden; h += 16, p += down_nbytes) {
            NAME(tile_decode)(d->down, p, tile);
            for (int64_t k = 0; k < size; k++) {
                char *row = out + ((k * M + M - 1) * d->hidden + h) * itemsize;
                for (int64_t i = 0; i < 16; i++) NAME(put)(d->dtype, tile[k][i], row + i * itemsize);
            }
        }
    }
}

#undef W
#undef FOR_TOKENS
