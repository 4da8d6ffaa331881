/* Products of quantised matrices with more tokens than TASK_TOKENS, for one instruction set: included by tiles_body.h.
 *
 * Weights of 16 outputs and MANY_UNITS * UNIT inputs are decoded into the first cache, rounded to the dtype, and multiplied
 * with MOST_SUMS tokens at a time, whose sums stay in registers: float32, with AVX512-BF16 of pairs of bfloat16. Inputs are
 * units in the order of the inputs: of each unit first those of all tokens.
 */

enum { MANY_UNITS = 8 }; /* at least the units of any tile */

/* Registers hold the sums, a vector's weights and what they are multiplied with. */
#if V == 16
#define MOST_SUMS 24
#define UP_TO_MOST(X) \
    X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) \
    X(21) X(22) X(23) X(24)
#elif V == 8
#define MOST_SUMS 6
#define UP_TO_MOST(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
#define MOST_SUMS 4
#define UP_TO_MOST(X) X(1) X(2) X(3) X(4)
#endif

/* A row of inputs, as every format's decoded weights take it; its units lie `step` apart. */
static void NAME(many_prepare)(int dtype, const char *x, int64_t width, unit *out, int64_t step) {
    for (; width > 0; width -= UNIT, out += step, x += UNIT * NAME(itemsize)(dtype))
        if (dtype == PAIRS) memcpy(out->halves, x, sizeof out->halves);
        else
            for (int i = 0; i < UNIT; i++) out->x[i] = NAME(value)(dtype, x + i * NAME(itemsize)(dtype));
}

/* Adds weights[UNIT * num_units][16] times units of N tokens side by side to sums[N][16]. */
#define MANY_SUMS(name, ...) void name(__VA_ARGS__ int64_t num_units, const float *weights, const unit *x, int64_t step, float *sums)
#define EACH_TOKEN _Pragma("GCC unroll 24") for (int t = 0; t < N; t++) /* else sums of more than 16 are in memory */
typedef MANY_SUMS(NAME(many_add), );

INLINE MANY_SUMS(NAME(many_add_of), int N, ) {
    vf a[MOST_SUMS][W];
    EACH_TOKEN
        for (int w = 0; w < W; w++) a[t][w] = *(const vf *)(sums + t * 16 + w * V);
    for (; num_units; num_units--, x += step)
        for (int i = 0; i < UNIT; i++, weights += 16) {
            vf own[W];
            for (int w = 0; w < W; w++) own[w] = *(const vf *)(weights + w * V);
            EACH_TOKEN
                for (int w = 0; w < W; w++) a[t][w] += own[w] * x[t].x[i];
        }
    EACH_TOKEN
        for (int w = 0; w < W; w++) *(vf *)(sums + t * 16 + w * V) = a[t][w];
}

#ifdef PAIRS_LABEL
INLINE MANY_SUMS(NAME(many_add_pairs_of), int N, ) {
    __m512 a[MOST_SUMS];
    EACH_TOKEN a[t] = _mm512_loadu_ps(sums + t * 16);
    for (; num_units; num_units--, x += step)
        for (int i = 0; i < UNIT; i += 2, weights += 16) {
            const __m512i own = _mm512_loadu_si512(weights);
            EACH_TOKEN a[t] = ADD_PAIRS(a[t], own, x[t].halves + i);
        }
    EACH_TOKEN _mm512_storeu_ps(sums + t * 16, a[t]);
}
#define ADD_MANY(N)                                                                                                     \
    static MANY_SUMS(NAME(many_##N), ) { NAME(many_add_of)(N, num_units, weights, x, step, sums); }                     \
    static MANY_SUMS(NAME(many_pairs_##N), ) { NAME(many_add_pairs_of)(N, num_units, weights, x, step, sums); }
#else
#define ADD_MANY(N) \
    static MANY_SUMS(NAME(many_##N), ) { NAME(many_add_of)(N, num_units, weights, x, step, sums); }
#endif
UP_TO_MOST(ADD_MANY)
#undef ADD_MANY

/* By whether inputs are pairs, and by tokens. */
static NAME(many_add) *const NAME(many_adds)[][MOST_SUMS] = {
#define PLACE(N) NAME(many_##N),
    {UP_TO_MOST(PLACE)},
#undef PLACE
#ifdef PAIRS_LABEL
#define PLACE(N) NAME(many_pairs_##N),
    {UP_TO_MOST(PLACE)},
#undef PLACE
#endif
};
#undef MANY_SUMS
#undef EACH_TOKEN
#undef UP_TO_MOST

/* The weights of a tile, rounded to `dtype`; as pairs of it, [group / 2][16]. Where the next are. */
static float *NAME(many_decode)(int format, int dtype, const char *p, float *weights) {
    const int group = tile_group(format);
    float (*out)[16] = (float (*)[16])weights;
    NAME(tile_decode)(format, p, out);
    for (int i = 0; dtype != FLOAT32 && dtype != PAIRS && i < group; i++)
        for (int w = 0; w < W; w++) *(vf *)(out[i] + w * V) = NAME(rounded)(dtype, *(const vf *)(out[i] + w * V));
    if (dtype != PAIRS) return weights + group * 16;
    for (int i = 0; i < group / 2; i++)
        for (int w = 0; w < W; w++) {
            const vu low = (vu)NAME(rounded)(dtype, *(const vf *)(out[2 * i] + w * V));
            const vu high = (vu)NAME(rounded)(dtype, *(const vf *)(out[2 * i + 1] + w * V));
            *(vu *)(out[i] + w * V) = low >> 16 | high;
        }
    return weights + group / 2 * 16;
}

/* Adds `num_tiles` tiles, `nbytes` apart, times the units of n tokens to sums[n][16]. */
static void NAME(many_tiles)(int format, int dtype, int64_t num_tiles, const char *p, int64_t nbytes, int64_t n, const unit *x,
                             float *sums) {
    float weights[MANY_UNITS * UNIT * 16] __attribute__((aligned(64))), *next = weights;
    for (int64_t i = 0; i < num_tiles; i++) next = NAME(many_decode)(format, dtype, p + i * nbytes, next);
    const int64_t num_units = num_tiles * tile_group(format) / UNIT;
    for (int64_t t = 0, num, pieces = (n + MOST_SUMS - 1) / MOST_SUMS; t < n; t += num, pieces--) {
        num = (n - t + pieces - 1) / pieces;
        NAME(many_adds)[dtype == PAIRS][num - 1](num_units, weights, x + t, n, sums + t * 16);
    }
}

/* The inner products of neurons `first` to `end` of the only task, and what is done with them. */
static void NAME(many_dots)(const dots *d, const task *one, int64_t first, int64_t end) {
    const int64_t itemsize = NAME(itemsize)(d->dtype), n = one->num_tokens;
    const int64_t size = d->block_size < UNIT ? d->block_size : UNIT, of_matrix = size / 16;
    for (; first < end; first += size) {
        const char *block = one->weights + first / d->block_size * d->row_nbytes;
        float sums[2 * UNIT / 16][MANY_TOKENS][16] __attribute__((aligned(64)));
        char products[2 * MANY_TOKENS * UNIT * 4] __attribute__((aligned(64)));
        const unit *x = (const unit *)d->x;
        memset(sums, 0, sizeof sums);
        for (int64_t j = 0, some; j < d->width; j += some, x += some / UNIT * n) {
            some = d->width - j < MANY_UNITS * UNIT ? d->width - j : MANY_UNITS * UNIT;
            for (int64_t k = 0; k < d->num_matrices * of_matrix; k++) {
                const int64_t m = k / of_matrix, row = first % d->block_size / 16 + k % of_matrix;
                const int format = m ? d->up_format : d->format;
                const int64_t group = tile_group(format), nbytes = tile_nbytes(format);
                const char *matrix = block + m * (d->block_size / 16) * (d->width / tile_group(d->format)) * tile_nbytes(d->format);
                NAME(many_tiles)(format, d->dtype, some / group, matrix + (row * (d->width / group) + j / group) * nbytes, nbytes,
                                 n, x, sums[k][0]);
            }
        }
        for (int64_t k = 0; k < d->num_matrices * of_matrix; k++)
            for (int64_t t = 0; t < n; t++) {
                const int64_t m = k / of_matrix, at = k % of_matrix * 16, row = m * d->out_rows + one->out_row + t;
                char *out = d->out + (row * d->num_neurons + first + at) * itemsize;
                if (d->then != NULL) out = products + ((m * n + t) * size + at) * itemsize;
                for (int i = 0; i < 16 && d->bias != NULL; i++)
                    sums[k][t][i] += NAME(value)(d->dtype, d->bias + (first + at + i) * itemsize);
                NAME(put_all)(d->dtype, sums[k][t], 16, out);
            }
        if (d->then == NULL) continue;
        activation then = *d->then;
        then.bias_at += first;
        then.h += first / UNIT * n * (int64_t)sizeof(unit);
        const task all = {NULL, 0, n, 0};
        NAME(activate)(d->dtype, &then, 0, &all, d->num_matrices, products, n, size, 0, size);
    }
}

/* Outputs of the only task. */
static void NAME(run_many_sums)(void *argument) {
    sums *s = argument;
    const task *one = s->tasks;
    const int64_t group = tile_group(s->format), nbytes = tile_nbytes(s->format), n = one->num_tokens;
    const int64_t num_blocks = s->num_neurons / group, most = MANY_UNITS * UNIT / group;
    const int64_t itemsize = NAME(itemsize)(s->dtype);
    FOR_CHUNKS(c, &s->chunks) {
        const int64_t first = c * MANY_OUTPUTS, left = (s->width - first) / 16;
        const int64_t num_rows = left < MANY_OUTPUTS / 16 ? left : MANY_OUTPUTS / 16;
        float sums[MANY_OUTPUTS / 16][MANY_TOKENS][16] __attribute__((aligned(64)));
        const unit *x = (const unit *)s->h;
        memset(sums, 0, sizeof sums);
        for (int64_t j = 0, some; j < num_blocks; j += some, x += some * group / UNIT * n) {
            some = num_blocks - j < most ? num_blocks - j : most;
            for (int64_t k = 0; k < num_rows; k++)
                NAME(many_tiles)(s->format, s->dtype, some, one->weights + j * s->row_nbytes + (first / 16 + k) * nbytes,
                                 s->row_nbytes, n, x, sums[k][0]);
        }
        for (int64_t t = 0; t < n; t++) {
            const int64_t row = s->out_rows[one->out_row + t];
            for (int64_t k = 0; k < num_rows; k++) {
                const int64_t at = row * s->width + first + k * 16;
                if (s->is_added) {
                    for (int i = 0; i < 16; i++) ((float *)s->out)[at + i] += sums[k][t][i];
                    continue;
                }
                NAME(put_all)(s->dtype, sums[k][t], 16, s->out + at * itemsize);
                if (s->bias == NULL) continue;
                const char *bias = s->bias + (s->experts[0] * s->width + first + k * 16) * itemsize;
                NAME(add_bias)(s->dtype, bias, 16, s->out + at * itemsize);
            }
        }
    }
}
#undef MOST_SUMS
