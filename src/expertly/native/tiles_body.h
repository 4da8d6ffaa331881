/* Products with quantised matrices, for one instruction set: included by products_body.h, whose macros it uses, and
 *   LOOKUP(t, codes)  where V is 16: for each lane of `codes`, which of 16 floats its low four bits say; else
 *   SHUFFLE(t, codes) which of 16 bytes each byte of `codes`, up to 15, says
 *   BYTES(p)          a vector of V bytes
 *   LOOKUP_EITHER(a, b, codes, choice)  where V is 16 or 8: for each lane, which float of `a`, or where `choice` is 0 of
 *                     `b`, its lowest four or three bits say
 *
 * A tile is 16 outputs by a group of inputs, that of its format. An expert is blocks of as many neurons as down's group,
 * each of which is the tiles of its inner matrices (gate and up, or up: for 16 outputs after the other, those over all
 * inputs), then those of down (16 outputs after the other, each over the block's neurons). Values are decoded in
 * registers; products and sums are float32, and their order depends on the sizes alone.
 *
 * A format is a header of two functions for TILE_FORMATS (products.h):
 *   NAME(f_add)(dtype, N, p, x, sums)  adds the tile at `p` times a group's inputs of N tokens to 16 sums of each; `dtype`
 *                                      is what the weights are to be rounded to
 *   NAME(f_decode)(p, out)             its weights in float32, out[group][16]
 */

#define W (16 / V) /* vectors of a tile's outputs */

#if V == 4 /* more tokens at a time are no faster (docs/log.md), and as much again to compile */
#define MOST_TILE_TOKENS 1
#define SEVERAL(CASES)
#else
#define MOST_TILE_TOKENS MAX_TOKENS
#define SEVERAL(CASES) CASES
#endif

#if V == 4 && !defined(__aarch64__)
INLINE vu NAME(shuffle)(const int8_t *values, vu codes) {
    uint8_t bytes[16];
    memcpy(bytes, &codes, 16);
    for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)values[bytes[i]];
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

#include "mxfp4.h"
#include "fp8.h"
#include "gguf.h"
#include "int4.h"

/* -- any format ------------------------------------------------------------------------------------------------------ */

INLINE void NAME(tile_add)(int format, int dtype, int N, const char *p, const float *const *x, vf (*sums)[W]) {
    switch (format) {
#define CASE(F, f, group, nbytes) \
    case F: NAME(f##_add)(dtype, N, p, x, sums); break;
        TILE_FORMATS(CASE)
#undef CASE
    }
}

INLINE void NAME(tile_decode)(int format, const char *p, float (*out)[16]) {
    switch (format) {
#define CASE(F, f, group, nbytes) \
    case F: NAME(f##_decode)(p, out); break;
        TILE_FORMATS(CASE)
#undef CASE
    }
}

/* A block's inner matrices. */
INLINE void NAME(tile_dots_block)(int format, int N, const tile_dots *d, const task *one, int64_t block) {
    const int group = tile_group(format);
    const int64_t nbytes = tile_nbytes(format), itemsize = NAME(itemsize)(d->dtype);
    const int64_t num_rows = d->block_size / 16;
    const char *p = one->weights + block * d->block_nbytes;
    for (int64_t v = 0; v < d->num_inner * num_rows; v++) {
        vf sums[MAX_TOKENS][W];
        for (int t = 0; t < N; t++)
            for (int w = 0; w < W; w++) sums[t][w] = (vf){0};
        for (int64_t j = 0; j < d->hidden; j += group, p += nbytes) {
            const float *x[MAX_TOKENS];
            for (int t = 0; t < N; t++) x[t] = d->x + (one->x_row + t) * d->hidden + j;
            if (!fetches_itself(format)) NAME(fetch)(p + TILES_AHEAD_NBYTES, nbytes);
            NAME(tile_add)(format, d->dtype, N, p, x, sums);
        }
        const int64_t matrix = v / num_rows, neuron = block * d->block_size + v % num_rows * 16;
        for (int t = 0; t < N; t++) {
            float results[16];
            memcpy(results, sums[t], sizeof results);
            char *out = d->out + ((matrix * d->out_rows + one->out_row + t) * d->num_neurons + neuron) * itemsize;
            for (int i = 0; i < 16; i++) NAME(put)(d->dtype, results[i], out + i * itemsize);
        }
    }
}

/* Some outputs of down, over all blocks. */
INLINE void NAME(tile_sums_chunk)(int format, int N, const tile_sums *s, const task *one, int64_t first, int64_t end) {
    const int group = tile_group(format);
    const int64_t nbytes = tile_nbytes(format), itemsize = NAME(itemsize)(s->dtype);
    vf sums[TILES_CHUNK][MAX_TOKENS][W];
    for (int64_t v = first; v < end; v++)
        for (int t = 0; t < N; t++)
            for (int w = 0; w < W; w++) sums[v - first][t][w] = (vf){0};
    for (int64_t block = 0; block < s->num_neurons / group; block++) {
        const char *p = one->weights + block * s->block_nbytes + s->down_at + first * nbytes;
        const int64_t ahead = block + 1 < s->num_neurons / group ? s->block_nbytes : 0;
        const float *x[MAX_TOKENS];
        for (int t = 0; t < N; t++) x[t] = s->h + (one->x_row + t) * s->num_neurons + block * group;
        for (int64_t v = first; v < end; v++, p += nbytes) {
            if (!fetches_itself(format)) NAME(fetch)(p + ahead, nbytes);
            NAME(tile_add)(format, s->dtype, N, p, x, sums[v - first]);
        }
    }
    for (int64_t v = first; v < end; v++)
        for (int t = 0; t < N; t++) {
            float results[16];
            memcpy(results, sums[v - first][t], sizeof results);
            const int64_t place = (one->out_row + t) * s->hidden + v * 16;
            if (s->is_added)
                for (int i = 0; i < 16; i++) ((float *)s->out)[place + i] += results[i];
            else
                for (int i = 0; i < 16; i++) NAME(put)(s->dtype, results[i], s->out + (place + i) * itemsize);
        }
}

INLINE void NAME(tile_dots_typed)(int format, tile_dots *d) {
    for (int64_t c; (c = __atomic_fetch_add(&d->next, 1, __ATOMIC_RELAXED)) < d->end;) {
        const int64_t num_blocks = d->end / d->num_tasks;
        const task *one = d->tasks + c / num_blocks;
        switch (one->num_tokens) {
#define CASE(N) \
    case N: NAME(tile_dots_block)(format, N, d, one, c % num_blocks); break;
            CASE(1) SEVERAL(CASE(2) CASE(3) CASE(4))
#undef CASE
        }
    }
}

static void NAME(run_tile_dots)(void *argument) {
    tile_dots *d = argument;
    switch (d->format) {
#define CASE(F, f, group, nbytes) \
    case F: NAME(tile_dots_typed)(F, d); break;
        TILE_FORMATS(CASE)
#undef CASE
    }
}

INLINE void NAME(tile_sums_typed)(int format, tile_sums *s) {
    for (int64_t c; (c = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->end;) {
        const task *one = s->tasks + c / s->num_chunks;
        const int64_t first = c % s->num_chunks * s->chunk, last = first + s->chunk;
        const int64_t end = last < s->hidden / 16 ? last : s->hidden / 16;
        switch (one->num_tokens) {
#define CASE(N) \
    case N: NAME(tile_sums_chunk)(format, N, s, one, first, end); break;
            CASE(1) SEVERAL(CASE(2) CASE(3) CASE(4))
#undef CASE
        }
    }
}

static void NAME(run_tile_sums)(void *argument) {
    tile_sums *s = argument;
    switch (s->format) {
#define CASE(F, f, group, nbytes) \
    case F: NAME(tile_sums_typed)(F, s); break;
        TILE_FORMATS(CASE)
#undef CASE
    }
}

/* out[neuron, matrix, H], the last matrix being down, transposed. */
static void NAME(run_tile_decode)(void *argument) {
    tile_decode *d = argument;
    const int group = tile_group(d->inner);
    const int64_t itemsize = NAME(itemsize)(d->dtype), M = d->num_inner + 1, size = d->block_size, num_rows = size / 16;
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
        for (int64_t h = 0; h < d->hidden; h += 16, p += down_nbytes) {
            NAME(tile_decode)(d->down, p, tile);
            for (int64_t k = 0; k < size; k++) {
                char *row = out + ((k * M + M - 1) * d->hidden + h) * itemsize;
                for (int64_t i = 0; i < 16; i++) NAME(put)(d->dtype, tile[k][i], row + i * itemsize);
            }
        }
    }
}

#undef W
#undef SEVERAL
