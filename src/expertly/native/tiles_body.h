/* Products with quantised matrices, for one instruction set. Included by products_body.h, whose macros it uses, and
 *   SHUFFLE(t, codes)   table lookup: each byte of `codes`, 0 to 15, becomes that byte of the 16 at t
 * and where V is 8 or 16
 *   LOOKUP_IN(a, codes) table lookup: each lane becomes the float of `a` that its lowest three or four bits number
 *   HAS_ZERO(bytes)     whether one of the 4 V bytes is 0
 * and where the processor multiplies bytes
 *   ADD_BYTES(sums, codes, inputs)  adds products of bytes; `inputs` are signed, `codes` not
 *   ADDED_BYTES(sums)   of such sums that began with 0 those of each four bytes
 *   MOST_ADDED(code)    how often codes up to this one may be added before, 1, 2, 4 or 8
 *   BYTES_HAVE_SIGNS    where `codes` have a sign there, too
 *   ADD_SCALED(sums, numbers, p, scales)  adds products of bytes, those at p with a sign, `numbers` 0 to 127, times scales
 *   SCALES_AT(p)        such scales, of each 16 numbers a whole one
 *   LESS_STARTS(sums, scales, p)  sums less 64 times products of 16 scales and the 16 numbers at p
 *   LESS_WHERE(bits, no, yes, by)  where V is 8 or 16: less_where
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
 * Weights are decoded in registers. Sums are float32, but for sums of a unit, a group or a block in integers, and
 * their order depends on the sizes alone.
 *
 * Formats of CODE_FORMATS and INT4_FORMATS (products.h) are in codes.h and int4.h, what reads those of BLOCK_FORMATS in
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

#ifndef SHUFFLE
#define SHUFFLE(t, codes) NAME(shuffle)(t, codes)
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

#include "blocks.h"
#include "fp8.h"
#include "codes.h"
#include "int4.h"
#include "halves.h"

/* -- blocks ------------------------------------------------------------------------------------------------------------ */

typedef uint64_t NAME(v64) __attribute__((vector_size(4 * V)));

#if V == 16
#define EIGHT_LANES(of) {of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)}
#define FOUR_LANES(of) \
    {of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10), of(11), of(12), of(13), of(14), of(15)}
#elif V == 8
#define EIGHT_LANES(of) {of(0), of(1), of(2), of(3)}
#define FOUR_LANES(of) {of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)}
#else
#define EIGHT_LANES(of) {of(0), of(1)}
#define FOUR_LANES(of) {of(0), of(1), of(2), of(3)}
#endif

#define UNROLLED _Pragma("GCC unroll 8") /* so that places are known as code is made */

INLINE void NAME(read_block)(int format, const uint8_t *block, block_parts *to) {
    to->block = block;
    switch (format) {
#define EACH(F, f, group, nbytes) \
    case F: f##_read(block, to); break;
        BLOCK_FORMATS(EACH)
#undef EACH
    }
}

INLINE float NAME(factor_of)(int format, const block_parts *of) {
#if HAS_HALF
    return HALF_VALUE((const char *)&of->half) * block_factor(format);
#else
    return half_number(&of->half) * block_factor(format);
#endif
}

/* Rows of a grid of 8 or of 4 numbers, from row `first` of the block's on. */
INLINE vu NAME(eights)(int format, const uint8_t (*grid)[8], const uint8_t *block, int first) {
#define LANE(i) eight_at(grid[row_at(format, block, first + i)])
    return (vu)(NAME(v64))EIGHT_LANES(LANE);
#undef LANE
}

INLINE vu NAME(fours)(int format, const uint8_t (*grid)[4], const uint8_t *block, int first) {
#define LANE(i) word_at(grid[row_at(format, block, first + i)])
    return (vu)FOUR_LANES(LANE);
#undef LANE
}

/* `no`, but where a bit is set `yes` less `by`. */
INLINE vu NAME(less_where)(const uint8_t *bits, vu no, vu yes, vu by) {
#ifdef LESS_WHERE
    return LESS_WHERE(bits, no, yes, by);
#else
#define LANE(i) SIGNS[bits[i]]
    const vu mask = (vu)(NAME(v64))EIGHT_LANES(LANE);
    return (no & ~mask) | ((vu)((NAME(vbu))yes - (NAME(vbu))by) & mask);
#undef LANE
#endif
}

/* Vector `k` of a block's numbers, 4 V of them, with BLOCK_OFFSET added. */
INLINE vu NAME(block_numbers)(int format, const block_parts *of, int k) {
    const int first = k * V / 2;
    const uint8_t *signs = of->signs + first;
    if (format == IQ1_S || format == IQ1_M) {
        const vu rows = NAME(eights)(format, GRIDS.iq1_s, of->block, first);
        return NAME(less_where)(signs, rows, rows, (vu){0} + 0x02020202u);
    }
    const vu rows = format == IQ2_XXS   ? NAME(eights)(format, GRIDS.iq2_xxs, of->block, first)
                    : format == IQ2_XS  ? NAME(eights)(format, GRIDS.iq2_xs, of->block, first)
                    : format == IQ2_S   ? NAME(eights)(format, GRIDS.iq2_s, of->block, first)
                    : format == IQ3_XXS ? NAME(fours)(format, GRIDS.iq3_xxs, of->block, 2 * first)
                                        : NAME(fours)(format, GRIDS.iq3_s, of->block, 2 * first);
    return NAME(less_where)(signs, rows, (vu){0} + 0x80808080u, rows); /* 64 + size, or 64 - size */
}

/* The totals of four vectors of whole numbers. */
INLINE NAME(four) NAME(four_wholes)(vi a, vi b, vi c, vi d) {
    typedef int32_t wholes __attribute__((vector_size(16)));
    union {
        vi whole[4];
        wholes parts[4][V / 4];
    } of = {{a, b, c, d}};
    for (int k = 0; k < 4; k++)
        for (int i = 1; i < V / 4; i++) of.parts[k][0] += of.parts[k][i];
    const wholes first = LOW_PAIRS(of.parts[0][0], of.parts[1][0]) + HIGH_PAIRS(of.parts[0][0], of.parts[1][0]);
    const wholes last = LOW_PAIRS(of.parts[2][0], of.parts[3][0]) + HIGH_PAIRS(of.parts[2][0], of.parts[3][0]);
    return __builtin_convertvector(PICK(first, last, 0, 1, 4, 5) + PICK(first, last, 2, 3, 6, 7), NAME(four));
}

/* Adds a tile times a group of inputs of N tokens to 16 sums of each. Whole numbers are summed over a block, and an offset is
 * taken off at its end: exact sums, as in codes.h.
 */
INLINE void NAME(blocks_add)(int format, int N, const char *p, const unit *x, int64_t x_stride, float *sums, int64_t stride) {
    const int64_t nbytes = tile_nbytes(format) / 16;
    for (int first = 0; first < 16; first += 4) {
        NAME(four) factors;
#ifdef ADD_BYTES
        vi wholes[MAX_TOKENS][3][4];
#else
        vf products[MAX_TOKENS][4];
#endif
        NAME(fetch)(p + AHEAD, 4 * nbytes);
        for (int row = 0; row < 4; row++, p += nbytes) {
            block_parts of __attribute__((aligned(64)));
            NAME(read_block)(format, (const uint8_t *)p, &of);
            factors[row] = NAME(factor_of)(format, &of);
#ifdef ADD_BYTES
            vi added[MAX_TOKENS][3];
            for (int t = 0; t < N; t++)
                for (int d = 0; d < 3; d++) added[t][d] = (vi){0};
            UNROLLED for (int k = 0; k < MAX_GROUP / (4 * V); k++) {
                const vu numbers = NAME(block_numbers)(format, &of, k);
                for (int t = 0; t < N; t++)
                    for (int d = 0; d < 3; d++) {
                        const int8_t *digits = ((const block_inputs *)(x + t * x_stride))->digits[d] + k * 4 * V;
                        added[t][d] = ADD_SCALED(added[t][d], numbers, digits, SCALES_AT(of.scales + k * V / 4));
                        KEEP(added[t][d]);
                    }
            }
            for (int t = 0; t < N; t++)
                for (int d = 0; d < 3; d++) {
                    const block_inputs *inputs = (const block_inputs *)(x + t * x_stride);
                    wholes[t][d][row] = LESS_STARTS(added[t][d], of.scales, inputs->sums[d]);
                }
#else
            for (int t = 0; t < N; t++) products[t][row] = (vf){0};
            for (int k = 0; k < MAX_GROUP / (4 * V); k++) {
                const vu numbers = NAME(block_numbers)(format, &of, k);
                const float scale = (float)of.scales[k * V / 4];
                for (int b = 0; b < 4; b++) {
                    const vf values = NAME(code_values)(BLOCK_OFFSET, numbers, b) * (scale * 0x1p-24f);
                    for (int t = 0; t < N; t++)
                        for (int i = 0; i < V; i++) {
                            const int place = 4 * (k * V + i) + b;
                            products[t][row][i] += values[i] * x[t * x_stride + place / UNIT].x[place % UNIT];
                        }
                }
            }
#endif
        }
        for (int t = 0; t < N; t++) {
#ifdef ADD_BYTES
            const block_inputs *inputs = (const block_inputs *)(x + t * x_stride);
            NAME(four) total = {0};
            for (int d = 2; d >= 0; d--)
                total = total * 256.f + NAME(four_wholes)(wholes[t][d][0], wholes[t][d][1], wholes[t][d][2], wholes[t][d][3]);
            total *= inputs->scale;
#else
            const NAME(four) total = NAME(four_totals)(products[t][0], products[t][1], products[t][2], products[t][3]);
#endif
            *(NAME(four) *)(sums + t * stride + first) += total * factors;
        }
    }
}

INLINE void NAME(blocks_decode)(int format, const char *p, float (*out)[16]) {
    for (int row = 0; row < 16; row++) {
        block_parts of __attribute__((aligned(64)));
        NAME(read_block)(format, (const uint8_t *)p + row * (tile_nbytes(format) / 16), &of);
        const float factor = NAME(factor_of)(format, &of);
        for (int k = 0; k < MAX_GROUP / (4 * V); k++) {
            const vu numbers = NAME(block_numbers)(format, &of, k);
            uint8_t bytes[4 * V];
            memcpy(bytes, &numbers, sizeof bytes);
            for (int i = 0; i < 4 * V; i++) {
                const int place = k * 4 * V + i;
                const float scale = factor * (float)of.scales[place / 16];
                out[place][row] = (float)(bytes[i] - BLOCK_OFFSET) * scale;
            }
        }
    }
}
#undef UNROLLED
#undef EIGHT_LANES
#undef FOUR_LANES

/* -- any format ------------------------------------------------------------------------------------------------------ */

/* A row of inputs as units, for tiles of a format. */
static void NAME(tile_prepare)(int format, int dtype, const char *x, int64_t width, void *out) {
    if (format == MANY) NAME(many_prepare)(dtype, x, width, out, 1);
#ifdef ADD_BYTES
    else if (has_blocks(format)) NAME(prepare_blocks)(dtype == PAIRS ? BFLOAT16 : dtype, x, width, out);
#endif
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
        for (; num; num--, p += tile_nbytes(F), x += x_step, sums += step) { one; } \
    }
#define CODES(F, f, N)                                                                    \
    ADD(F, f, N, if (!is_rounded(F, dtype)) NAME(codes_add)(F, N, p, x, x_stride, sums, stride); \
        else if (dtype == FLOAT16) NAME(rounded_add)(FLOAT16, N, p, x, x_stride, sums, stride);  \
        else NAME(rounded_add)(BFLOAT16, N, p, x, x_stride, sums, stride))
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
