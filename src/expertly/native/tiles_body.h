/* Products with quantised matrices, for one instruction set: included by products_body.h, whose macros it uses, and
 *   LOOKUP(t, codes)  where V is 16: for each lane of `codes`, which of 16 floats its low four bits say; else
 *   SHUFFLE(t, codes) which of 16 bytes each byte of `codes`, up to 15, says
 *   BYTES(p)          a vector of V bytes
 *
 * A tile is 16 outputs by a group of inputs, that of its format. An expert is blocks of as many neurons as down's group,
 * each of which is the tiles of its inner matrices (gate and up, or up: for 16 outputs after the other, those over all
 * inputs), then those of down (16 outputs after the other, each over the block's neurons). A format is a function that adds one
 * tile's products to 16 sums, and one that decodes it. Values are decoded in registers; products and sums are float32,
 * and their order depends on the sizes alone.
 */

#define W (16 / V) /* vectors of a tile's outputs */

/* -- mxfp4: for every 8 inputs 16 words of a nibble an input, the first in the lowest bits; then 16 bytes of scales -- */

#if V == 4 && !defined(__aarch64__)
INLINE vu NAME(shuffle)(const int8_t *values, vu codes) {
    uint8_t bytes[16];
    memcpy(bytes, &codes, 16);
    for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)values[bytes[i]];
    memcpy(&codes, bytes, 16);
    return codes;
}
#endif

/* The E2M1 numbers of 8 inputs for V outputs, over E2M1_UNIT, from their words. Three bytes behind them are read, too. */
#if V == 16
#define E2M1_UNIT 1.f
INLINE void NAME(e2m1)(const char *p, vf *values) {
    for (int i = 0; i < 8; i++) { /* a lookup sees the lowest bits alone: what lies 8 bits up is one byte further */
        vu codes = *(const vu *)(p + i / 2);
        values[i] = LOOKUP(E2M1_VALUES, i % 2 ? codes >> 4 : codes);
    }
}
#else
#define E2M1_UNIT 0x1p-25f
INLINE void NAME(e2m1)(const char *p, vf *values) {
    const vu codes = *(const vu *)p, top = (vu){0} + 0xff000000u;
    const vu even = SHUFFLE(E2M1_HALVES, codes & 0x0f0f0f0fu), odd = SHUFFLE(E2M1_HALVES, codes >> 4 & 0x0f0f0f0fu);
    for (int i = 0; i < 8; i++) {
        const vu bytes = i % 2 ? odd : even;
        values[i] = __builtin_convertvector((vi)(bytes << (24 - i / 2 * 8) & top), vf);
    }
}
#endif

/* 2^(byte - 127) of V bytes. */
INLINE vf NAME(e8m0)(const char *p) {
    vu bits = BYTES(p);
    return (vf)((bits << 23) | ((vu)(bits == 0) & 0x00400000u));
}

INLINE void NAME(mxfp4_add)(int N, const char *p, const float *const *x, vf (*sums)[W]) {
    const int A = N == 1 ? 4 : N == 2 ? 2 : 1; /* chains of sums, as one waits for the sum before it */
    for (int w = 0; w < W; w++) {
        vf a[MAX_TOKENS][4];
        for (int t = 0; t < N; t++)
            for (int k = 0; k < A; k++) a[t][k] = (vf){0};
        for (int word = 0; word < 4; word++) {
            vf values[8];
            NAME(e2m1)(p + word * 64 + w * V * 4, values);
            for (int i = 0; i < 8; i++)
                for (int t = 0; t < N; t++) a[t][i % A] += values[i] * x[t][word * 8 + i];
        }
        const vf scale = NAME(e8m0)(p + 256 + w * V);
        for (int t = 0; t < N; t++) {
            for (int k = 1; k < A; k++) a[t][0] += a[t][k];
            sums[t][w] += a[t][0] * E2M1_UNIT * scale;
        }
    }
}

INLINE void NAME(mxfp4_decode)(const char *p, float (*out)[16]) {
    for (int w = 0; w < W; w++) {
        const vf scale = NAME(e8m0)(p + 256 + w * V);
        for (int word = 0; word < 4; word++) {
            vf values[8];
            NAME(e2m1)(p + word * 64 + w * V * 4, values);
            for (int i = 0; i < 8; i++) *(vf *)(out[word * 8 + i] + w * V) = values[i] * E2M1_UNIT * scale;
        }
    }
}

#undef E2M1_UNIT

/* -- any format ------------------------------------------------------------------------------------------------------ */

INLINE void NAME(tile_add)(int format, int N, const char *p, const float *const *x, vf (*sums)[W]) {
    (void)format;
    NAME(mxfp4_add)(N, p, x, sums);
}

INLINE void NAME(tile_decode)(int format, const char *p, float (*out)[16]) {
    (void)format;
    NAME(mxfp4_decode)(p, out);
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
            NAME(fetch)(p + TILES_AHEAD_NBYTES, nbytes);
            NAME(tile_add)(format, N, p, x, sums);
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
            NAME(fetch)(p + ahead, nbytes);
            NAME(tile_add)(format, N, p, x, sums[v - first]);
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

static void NAME(run_tile_dots)(void *argument) {
    tile_dots *d = argument;
    for (int64_t c; (c = __atomic_fetch_add(&d->next, 1, __ATOMIC_RELAXED)) < d->end;) {
        const int64_t num_blocks = d->end / d->num_tasks;
        const task *one = d->tasks + c / num_blocks;
        switch (one->num_tokens) {
#define CASE(N) \
    case N: NAME(tile_dots_block)(MXFP4, N, d, one, c % num_blocks); break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
    }
}

static void NAME(run_tile_sums)(void *argument) {
    tile_sums *s = argument;
    for (int64_t c; (c = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->end;) {
        const task *one = s->tasks + c / s->num_chunks;
        const int64_t first = c % s->num_chunks * s->chunk, last = first + s->chunk;
        const int64_t end = last < s->hidden / 16 ? last : s->hidden / 16;
        switch (one->num_tokens) {
#define CASE(N) \
    case N: NAME(tile_sums_chunk)(MXFP4, N, s, one, first, end); break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
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
