/* Products with quantised matrices, for one instruction set. Included by products_body.h, whose macros it uses, and
 *   SHUFFLE(t, codes)   table lookup: each byte of `codes`, 0 to 15, becomes that byte of the 16 at t
 *   BYTES(p)            V bytes, widened to a vector
 * and where V is 8 or 16
 *   LOOKUP_IN(a, codes) table lookup: each lane becomes the float of `a` that its lowest three or four bits number
 *   HAS_ZERO(bytes)     whether one of the 4 V bytes is 0
 * and where the processor multiplies bytes
 *   ADD_BYTES(sums, codes, inputs)  adds products of bytes; `inputs` are signed, `codes` not
 *   ADDED_BYTES(sums)   of such sums that began with 0 those of each four bytes
 *   MOST_ADDED(code)    how often codes up to this one may be added before, 1, 2, 4 or 8
 *   BYTES_HAVE_SIGNS    where `codes` have a sign there, too
 *   DOT_SIGNED(numbers, inputs)  sums of each four products of bytes with a sign; numbers are -127 to 127
 *   NUMBERS_AT(p, step) 4 V bytes at p, where V is 16 half of them `step` bytes further on
 *   SPREAD_SCALES(p)    each of the floats at p four times
 *   ADD_WORDS(sums, codes, even, odd)  where codes above 127 are not for ADD_BYTES: adds to each of V sums the products of
 *                       four bytes with a sign; of those at even places the inputs are the words of `even`
 *   REPEAT(p)           the 16 bytes at p, repeated to fill a vector
 *   SHUFFLE_EACH(t, codes)  as SHUFFLE, with a table of its own for each 16 bytes: those of t at the same place
 *   JOIN(p, at)         a vector of 16 bytes from p + at[0], then 16 from p + at[1], and so on
 *   FOLD(a, b)          in each four lanes a0 + a2, b0 + b2, a1 + a3, b1 + b3
 * and where there is PAIRS_LABEL
 *   SPREAD(p)           the two bfloat16 numbers at p, repeated to fill a vector
 *   ADD_PAIRS(sums, weights, p)  adds to each of 16 sums its two weights times the two inputs at p
 *   TWICE(halves)       the 16 bfloat16 numbers of `halves`, twice
 *
 * A tile is 16 outputs by a group of inputs; its format says how many. An expert is a row of blocks. A block has as many
 * neurons as a group of down's format. First come the tiles of its inner matrices (gate and up, or up): for each 16
 * outputs, the tiles over all inputs. Then come the tiles of down: for each 16 outputs, the tile over the block's neurons.
 * Tiles are read in this order, which is that of memory: any other is slower (docs/log/).
 *
 * Weights are decoded in registers. Sums are float32, but for sums of a unit or a group in integers (codes.h, int4.h), and
 * their order depends on the sizes alone.
 *
 * Formats of CODE_FORMATS and INT4_FORMATS (products.h) are in codes.h and int4.h, what unpacks those of BLOCK_FORMATS in
 * blocks.h. Each of WEIGHT_FORMATS is a header with
 *   NAME(f_add)(dtype, N, p, x, x_stride, sums, stride)  multiplies the tile at `p`, its weights rounded to `dtype`, with
 *                              a group of inputs of N tokens, which lie x_stride units apart, and adds the products to
 *                              16 sums for each token, which lie `stride` floats apart
 *   NAME(f_decode)(p, out)     the tile's weights in float32, out[group][16]
 */

#define W (16 / V) /* vectors for a tile's 16 outputs */

#if V == 4 /* several tokens at a time are no faster here (docs/log/), and take long to compile */
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

/* Rounds to `dtype`'s precision, ties to even. No value may be NaN. */
INLINE vf NAME(rounded)(int dtype, vf values) {
    if (dtype == BFLOAT16 || dtype == PAIRS) {
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
#include "nvfp4.h"
#include "int4.h"

/* -- blocks ------------------------------------------------------------------------------------------------------------ */

/* An output's block: numbers[group], and scales[group / 16]. */
typedef void NAME(unpacker)(const uint8_t *restrict block, int8_t *restrict numbers, float *restrict scales);
#define EACH(F, f, group, nbytes)                                                                                         \
    static __attribute__((noinline)) void NAME(f##_unpack)(const uint8_t *restrict block, int8_t *restrict numbers,       \
                                                           float *restrict scales) {                                      \
        for (int j = 0; j < group / UNIT; j++) f##_unit(block, j, numbers + j * UNIT, scales + 2 * j);                    \
    }
BLOCK_FORMATS(EACH)
#undef EACH
#define EACH(F, f, group, nbytes) [F] = NAME(f##_unpack),
static NAME(unpacker) *const NAME(unpackers)[NUM_FORMATS] = {BLOCK_FORMATS(EACH)};
#undef EACH

/* The numbers of an output's block times those of N tokens, and their scales: a vector of sums for each. */
INLINE void NAME(add_numbers)(int N, int num_units, const int8_t *numbers, const float *scales, const unit *x,
                              int64_t x_stride, vf *sums) {
    for (int t = 0; t < N; t++) {
        const unit *one = x + t * x_stride;
        vf low = {0}, high = {0};
#ifdef ADD_BYTES
        for (int j = 0, num = V == 16 ? 2 : 1; j < num_units; j += num)
            for (int half = 0; half < (V == 4 ? 2 : 1); half++) {
                const vu of = *(const vu *)(numbers + j * UNIT + half * 16);
                vi products[3];
                for (int d = 0; d < 3; d++) products[d] = DOT_SIGNED(of, NUMBERS_AT(one[j].fixed.digits[d] + half * 16, sizeof(unit)));
                const vf scale = SPREAD_SCALES(scales + 2 * j + half);
                low += __builtin_convertvector(products[0] + (products[1] << 8), vf) * scale;
                high += __builtin_convertvector(products[2], vf) * scale;
            }
        sums[t] = (high * 65536.f + low) * one->fixed.scale;
#else
        for (int i = 0; i < num_units * UNIT; i += V)
            low += __builtin_convertvector(*(const NAME(vs) *)(numbers + i), vf) * *(const vf *)(one[i / UNIT].x + i % UNIT) *
                   scales[i / 16];
        sums[t] = low + high;
#endif
    }
}

/* Adds a tile times a group of inputs of N tokens to 16 sums of each. */
INLINE void NAME(blocks_add)(int format, int N, const char *p, const unit *x, int64_t x_stride, float *sums, int64_t stride) {
    const int64_t nbytes = tile_nbytes(format) / 16;
    for (int i = 0; i < 16; i += 4) {
        vf four[4][MAX_TOKENS];
        NAME(fetch)(p + AHEAD, 4 * nbytes);
        for (int k = 0; k < 4; k++, p += nbytes) {
            int8_t numbers[MAX_GROUP] __attribute__((aligned(64)));
            float scales[MAX_GROUP / 16];
            NAME(unpackers)[format]((const uint8_t *)p, numbers, scales);
            NAME(add_numbers)(N, tile_group(format) / UNIT, numbers, scales, x, x_stride, four[k]);
        }
        for (int t = 0; t < N; t++)
            *(NAME(four) *)(sums + t * stride + i) += NAME(four_totals)(four[0][t], four[1][t], four[2][t], four[3][t]);
    }
}

static void NAME(blocks_decode)(int format, const char *p, float (*out)[16]) {
    const int group = tile_group(format);
    int8_t numbers[16][MAX_GROUP];
    float scales[16][MAX_GROUP / 16];
    for (int i = 0; i < 16; i++) NAME(unpackers)[format]((const uint8_t *)p + i * (tile_nbytes(format) / 16), numbers[i], scales[i]);
    for (int w = 0; w < W; w++)
        for (int k = 0; k < group; k += 4) {
            vu words;
            vf scale;
            for (int i = 0; i < V; i++) {
                uint32_t word;
                memcpy(&word, numbers[w * V + i] + k, 4);
                words[i] = word;
                scale[i] = scales[w * V + i][k / 16];
            }
            for (int b = 0; b < 4; b++) *(vf *)(out[k + b] + w * V) = NAME(code_values)(0, words, b) * 0x1p-24f * scale;
        }
}

/* -- any format ------------------------------------------------------------------------------------------------------ */

/* A row of inputs as units, for tiles of a format. */
static void NAME(tile_prepare)(int format, int dtype, const char *x, int64_t width, void *out) {
    if (format == MANY) NAME(many_prepare)(dtype, x, width, out, 1);
    else if (dtype == PAIRS && takes_pairs(format)) NAME(prepare_pairs)(format, x, width, out);
    else if (dtype == BFLOAT16 || dtype == PAIRS) NAME(prepare_units)(format, BFLOAT16, x, width, out);
    else if (dtype == FLOAT32) NAME(prepare_units)(format, FLOAT32, x, width, out);
#if HAS_HALF
    else NAME(prepare_units)(format, FLOAT16, x, width, out);
#endif
}

/* A function for each format and number of tokens N: multiplies each of `num` consecutive tiles with its inputs of N
 * tokens, x[t * x_stride], and adds to 16 sums of each, sums[t * stride]. From one tile to the next, inputs are x_step
 * units and sums `step` floats further on. Not inlined: within another function there are too few registers.
 */
#define TILES(name)                                                                                                    \
    void name(int dtype, int64_t num, const char *p, const unit *x, int64_t x_stride, int64_t x_step, float *sums,     \
              int64_t stride, int64_t step)
typedef TILES(NAME(tiles_add));

#define ADD(F, f, N, one)                                                       \
    static __attribute__((noinline)) TILES(NAME(f##_##N)) {                     \
        (void)dtype, (void)x_stride, (void)stride;                              \
        for (; num; num--, p += tile_nbytes(F), x += x_step, sums += step) one; \
    }
#define CODES(F, f, N) ADD(F, f, N, NAME(codes_add)(F, N, p, x, x_stride, sums, stride))
#define WEIGHTS(F, f, N) ADD(F, f, N, NAME(f##_add)(dtype, N, p, x, x_stride, sums, stride))
#define NUMBERS(F, f, N)                                                                             \
    static TILES(NAME(f##_##N)) {                                                                    \
        for (int t = 0; t < N; t++)                                                                  \
            NAME(f##_alone)(dtype, num, p, x + t * x_stride, x_stride, x_step, sums + t * stride, stride, step); \
    }
#define EACH(F, f, group, nbytes)             \
    ADD(F, f, alone, NAME(int4_add)(F, p, x, sums)) \
    FOR_TOKENS(NUMBERS, F, f)
INT4_FORMATS(EACH)
#undef EACH
#define EACH(F, f, group, nbytes) FOR_TOKENS(CODES, F, f)
CODE_FORMATS(EACH)
#undef EACH

#define BLOCKS(F, f, N) ADD(F, f, N, NAME(blocks_add)(F, N, p, x, x_stride, sums, stride))
#define EACH(F, f, group, nbytes) FOR_TOKENS(BLOCKS, F, f)
BLOCK_FORMATS(EACH)
#undef EACH
#undef BLOCKS
#define EACH(F, f, group, nbytes) FOR_TOKENS(WEIGHTS, F, f)
WEIGHT_FORMATS(EACH)
#undef EACH
#undef NUMBERS
#undef CODES
#undef WEIGHTS
#undef ADD

/* tiles_add by format and number of tokens. */
static NAME(tiles_add) *const NAME(adds)[NUM_FORMATS][MAX_TOKENS] = {
#define PLACE(F, f, N) NAME(f##_##N),
#define EACH(F, f, group, nbytes) [F] = {FOR_TOKENS(PLACE, F, f)},
    TILE_FORMATS(EACH)
#undef EACH
#undef PLACE
};

#ifdef PAIRS_LABEL
#define PAIRS_OF(F, f, decoder, N)                                                         \
    static __attribute__((noinline)) TILES(NAME(f##_pairs_##N)) {                          \
        (void)dtype;                                                                       \
        NAME(decoder##_pairs)(F, N, num, p, x, x_stride, x_step, sums, stride, step);      \
    }
#define EACH(F, f, decoder) FOR_TOKENS(PAIRS_OF, F, f, decoder)
PAIRS_FORMATS(EACH)
#undef EACH
#undef PAIRS_OF

static NAME(tiles_add) *const NAME(adds_of_pairs)[NUM_FORMATS][MAX_TOKENS] = {
#define PLACE(F, f, N) NAME(f##_pairs_##N),
#define EACH(F, f, decoder) [F] = {FOR_TOKENS(PLACE, F, f)},
    PAIRS_FORMATS(EACH)
#undef EACH
#undef PLACE
};
#endif
#undef TILES

INLINE NAME(tiles_add) *NAME(add_of)(int dtype, int format, int64_t num_tokens) {
    (void)dtype;
#ifdef PAIRS_LABEL
    if (dtype == PAIRS && takes_pairs(format)) return NAME(adds_of_pairs)[format][num_tokens - 1];
#endif
    return NAME(adds)[format][num_tokens - 1];
}

/* `dots` with tiles, for neurons `first` to `end` of a task, block after block. */
static void NAME(tile_dots)(const dots *d, const task *one, int64_t first, int64_t end) {
    const int64_t itemsize = NAME(itemsize)(d->dtype);
    const int N = (int)one->num_tokens;
    for (; first < end; first += d->block_size) {
        const char *p = one->weights + first / d->block_size * d->row_nbytes;
        for (int64_t m = 0; m < d->num_matrices; m++) {
            const int format = m ? d->up_format : d->format;
            const int64_t group = tile_group(format), num_tiles = d->width / group;
            const unit *x = (const unit *)((m ? d->up_x : d->x) + one->x_row * d->padded_width);
            NAME(tiles_add) *const add = NAME(add_of)(d->dtype, format, N);
            for (int64_t i = first; i < first + d->block_size; i += 16, p += num_tiles * tile_nbytes(format)) {
                float results[MAX_TOKENS][16] __attribute__((aligned(64))) = {0};
                add(d->dtype, num_tiles, p, x, d->width / UNIT, group / UNIT, results[0], 16, 0);
                for (int t = 0; t < N; t++) {
                    for (int k = 0; k < 16 && d->bias != NULL; k++)
                        results[t][k] += NAME(value)(d->dtype, d->bias + (i + k) * itemsize);
                    const int64_t row = m * d->out_rows + one->out_row + t;
                    NAME(put_all)(d->dtype, results[t], 16, d->out + (row * d->num_neurons + i) * itemsize);
                }
            }
        }
    }
}

/* `sums` with tiles, for neurons `first` to `end` of a task, added to sum[n, H], block after block. */
static void NAME(tile_sums)(const sums *s, const task *one, int64_t first, int64_t end, float *sum) {
    const int64_t group = tile_group(s->format), x_stride = s->num_neurons / UNIT;
    const unit *x = (const unit *)s->h + one->x_row * x_stride;
    NAME(tiles_add) *const add = NAME(add_of)(s->dtype, s->format, one->num_tokens);
    for (; first < end; first += group)
        add(s->dtype, s->width / 16, one->weights + first / group * s->row_nbytes, x + first / UNIT, x_stride, 0, sum,
            s->padded_width, 16);
}

static __attribute__((noinline)) void NAME(tile_decode)(int format, const char *p, float (*out)[16]) {
    switch (format) {
#define CASE(F, f, group, nbytes) \
    case F: NAME(f##_decode)(p, out); break;
        WEIGHT_FORMATS(CASE)
#undef CASE
#define CASE(F, f, group, nbytes) \
    case F: NAME(int4_decode)(F, p, out); break;
        INT4_FORMATS(CASE)
#undef CASE
#define CASE(F, f, group, nbytes) \
    case F: NAME(codes_decode)(F, p, out); break;
        CODE_FORMATS(CASE)
#undef CASE
#define CASE(F, f, group, nbytes) \
    case F: NAME(blocks_decode)(F, p, out); break;
        BLOCK_FORMATS(CASE)
#undef CASE
    }
}

/* The weights of one matrix without down (NO_DOWN), out[rows, width] in dtype. */
static void NAME(decode_rows)(int format, int dtype, const char *p, int64_t num_rows, int64_t width, char *out) {
    const int group = tile_group(format);
    const int64_t itemsize = NAME(itemsize)(dtype);
    float tile[MAX_GROUP][16];
    for (int64_t first = 0; first < num_rows; first += 16)
        for (int64_t j = 0; j < width; j += group, p += tile_nbytes(format)) {
            NAME(tile_decode)(format, p, tile);
            for (int64_t i = 0; i < 16; i++) {
                char *row = out + ((first + i) * width + j) * itemsize;
                for (int64_t k = 0; k < group; k++) NAME(put)(dtype, tile[k][i], row + k * itemsize);
            }
        }
}

#include "many_body.h"

#undef W
#undef FOR_TOKENS
