/* Products of bfloat16 by AVX512-BF16: an instruction multiplies 32 numbers by 32 and adds neighbours to 16 sums of float32.
 *
 * Inputs are bfloat16 as they came. Included by products_body.h.
 */

INLINE __m512bh NAME(load_pairs)(const char *p, int64_t num) {
    if (num >= BLOCK) return (__m512bh)_mm512_loadu_si512(p);
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1u << num) - 1), p);
}

/* The sums of the 16 numbers of each of four vectors, in an order that does not depend on the other three. */
INLINE __m128 NAME(totals_of_pairs)(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512d ab = _mm512_castps_pd((__m512)FOLD(a, b)), cd = _mm512_castps_pd((__m512)FOLD(c, d));
    const __m512 lanes =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    const __m512 halves = _mm512_add_ps(lanes, _mm512_shuffle_f32x4(lanes, lanes, 0x4e));
    return _mm_add_ps(_mm512_castps512_ps128(halves), _mm512_extractf32x4_ps(halves, 1));
}

enum { NEAR = 4 << 10 }; /* bytes between what is multiplied and what is prefetched meanwhile, of rows in order */

/* Reads what lies between rows as they are read: memory is fastest where it is read in order. */
INLINE void NAME(touch)(const char *p, int64_t nbytes) {
    for (int64_t q = 0; q < nbytes; q += 64) {
        NAME(fetch)(p + q + NEAR, 1);
        (void)*(const volatile char *)(p + q);
    }
}

enum { ROWS_AT_ONCE = 64, TOTALS = ROWS_AT_ONCE + 4 };

/* Totals of `num` times four rows, those of token t from totals[t * TOTALS] on: of rows p, p + a, p + b and p + c, and
 * `step` bytes on. Behind each `between`th row (0: none) lie `gap` bytes that are wanted soon, and read with them. A
 * function of its own: within another there are too few registers, and an address that waits in one of the vectors' waits
 * for their arithmetic.
 */
INLINE void NAME(dot_fours)(int N, const char *p, int64_t a, int64_t b, int64_t c, int64_t step, int64_t num, int between,
                            int64_t gap, const char *x, int64_t x_nbytes, int64_t width, float *totals) {
    const int64_t full = width / BLOCK * BLOCK * 2, rest = width % BLOCK;
    for (; num; num--, p += step, totals += 4) {
        __m512 all[4][MAX_TOKENS];
        const char *rows[4] = {p, p + a, p + b, p + c};
        for (int k = 0; k < 4; k++) {
            __m512 sums[4][MAX_TOKENS]; /* which do not wait for each other */
            for (int i = 0; i < 4; i++)
                for (int t = 0; t < N; t++) sums[i][t] = _mm512_setzero_ps();
            int64_t j = 0;
            for (; j + 256 <= full; j += 256)
                for (int i = 0; i < 4; i++) {
                    NAME(fetch)(rows[k] + j + i * 64 + NEAR, 1);
                    const __m512bh row = NAME(load_pairs)(rows[k] + j + i * 64, BLOCK);
                    for (int t = 0; t < N; t++)
                        sums[i][t] = _mm512_dpbf16_ps(sums[i][t], row, NAME(load_pairs)(x + t * x_nbytes + j + i * 64, BLOCK));
                }
            for (; j < full + (rest > 0); j += 64) {
                const __m512bh row = NAME(load_pairs)(rows[k] + j, j < full ? BLOCK : rest);
                for (int t = 0; t < N; t++)
                    sums[0][t] = _mm512_dpbf16_ps(sums[0][t], row, NAME(load_pairs)(x + t * x_nbytes + j, BLOCK));
            }
            for (int t = 0; t < N; t++)
                all[k][t] = _mm512_add_ps(_mm512_add_ps(sums[0][t], sums[1][t]), _mm512_add_ps(sums[2][t], sums[3][t]));
            if (between && k % between == between - 1) NAME(touch)(rows[k] + width * 2, gap);
        }
        for (int t = 0; t < N; t++)
            _mm_storeu_ps(totals + t * TOTALS, NAME(totals_of_pairs)(all[0][t], all[1][t], all[2][t], all[3][t]));
    }
}

#define FOURS(N)                                                                                                          \
    static __attribute__((noinline)) void NAME(dot_fours_##N)(const char *p, int64_t a, int64_t b, int64_t c, int64_t step, \
                                                              int64_t num, int between, int64_t gap, const char *x,       \
                                                              int64_t x_nbytes, int64_t width, float *totals) {           \
        NAME(dot_fours)(N, p, a, b, c, step, num, between, gap, x, x_nbytes, width, totals);                              \
    }
FOURS(1)
FOURS(2)
FOURS(3)
FOURS(4)
#undef FOURS

/* Rounded as put_bfloat16 rounds, each in the low half of a word. */
INLINE __m512i NAME(as_halves)(__m512 values) {
    const __m512i bits = (__m512i)values, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    return _mm512_mask_mov_epi32(half, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}

/* Entries of a table of 65536 numbers of 16 bits: the word of two is gathered, so that none beyond the table is read. */
INLINE __m512i NAME(entries)(const uint16_t *table, __m512i numbers) {
    const __m512i words = _mm512_i32gather_epi32(_mm512_srli_epi32(numbers, 1), table, 4);
    const __m512i places = _mm512_slli_epi32(_mm512_and_si512(numbers, _mm512_set1_epi32(1)), 4);
    return _mm512_and_si512(_mm512_srlv_epi32(words, places), _mm512_set1_epi32(0xffff));
}

/* h = f(gate) g(up), or f(gate) where `up` is NULL, of `num` numbers, rounded and wide. */
static void NAME(activate_pairs)(const uint16_t *f, const uint16_t *g, const char *gate, const char *up, int64_t num, float *h) {
    for (int64_t i = 0; i < num; i += V) {
        const __mmask16 there = (__mmask16)(num - i < V ? (1u << (num - i)) - 1 : 0xffff);
        __m512i bits = NAME(entries)(f, _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, gate + i * 2)));
        if (up != NULL) {
            __m512i more = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, up + i * 2));
            if (g != NULL) more = NAME(entries)(g, more);
            bits = NAME(as_halves)(_mm512_mul_ps((__m512)_mm512_slli_epi32(bits, 16), (__m512)_mm512_slli_epi32(more, 16)));
        }
        _mm512_mask_storeu_ps(h + i, there, (__m512)_mm512_slli_epi32(bits, 16));
    }
}

/* Every total, or of two matrices' totals those of one, rounded as put_bfloat16 does. */
INLINE void NAME(put_totals)(const float *totals, int matrix, int mask, int num, const char *bias, char *out) {
    const __m512i which = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    for (int i = 0; i < num; i += V) {
        const __mmask16 there = (__mmask16)(num - i < V ? (1u << (num - i)) - 1 : 0xffff);
        const float *from = totals + (i << mask);
        __m512 values = _mm512_loadu_ps(from);
        if (mask) {
            const __m512i own = _mm512_add_epi32(which, _mm512_set1_epi32(matrix));
            values = _mm512_permutex2var_ps(values, own, _mm512_loadu_ps(from + V));
        }
        if (bias != NULL) {
            const __m512i more = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, bias + i * 2));
            values = _mm512_add_ps(values, (__m512)_mm512_slli_epi32(more, 16));
        }
        _mm256_mask_storeu_epi16(out + i * 2, there, _mm512_cvtepi32_epi16(NAME(as_halves)(values)));
    }
}

/* dot_range for bfloat16, of all rows and in one call. Totals are rounded and stored ROWS_AT_ONCE at a time. */
static void NAME(dot_pairs)(const dots *d, const task *one, int64_t first, int64_t end) {
    const int N = (int)one->num_tokens;
    void (*const fours)(const char *, int64_t, int64_t, int64_t, int64_t, int64_t, int, int64_t, const char *, int64_t, int64_t,
                        float *) =
        N == 1 ? NAME(dot_fours_1) : N == 2 ? NAME(dot_fours_2) : N == 3 ? NAME(dot_fours_3) : NAME(dot_fours_4);
    const int mask = d->num_matrices - 1;
    const int64_t row = d->row_nbytes, matrix = d->matrix_nbytes, x_nbytes = d->padded_width * (int64_t)sizeof(float);
    const char *x = (const char *)(d->x + one->x_row * d->padded_width);
    const int64_t gap = d->row_nbytes - d->num_matrices * d->width * 2;
    const int between = d->then != NULL && gap > 0 ? (int)d->num_matrices : 0;
    for (int64_t begin = first; begin < end; begin += ROWS_AT_ONCE) {
        const int64_t num = end - begin < ROWS_AT_ONCE ? end - begin : ROWS_AT_ONCE;
        const char *p = one->weights + (begin >> mask) * row;
        float totals[MAX_TOKENS * TOTALS + 2 * V];
        if (mask) fours(p, matrix, row, row + matrix, 2 * row, num / 4, between, gap, x, x_nbytes, d->width, totals);
        else fours(p, row, 2 * row, 3 * row, 4 * row, num / 4, between, gap, x, x_nbytes, d->width, totals);
        for (int64_t i = num / 4 * 4; i < num; i++) /* each four times */
            fours(p + (i >> mask) * row + (i & mask) * matrix, 0, 0, 0, 0, 1, 0, 0, x, x_nbytes, d->width, totals + i);
        for (int t = 0; t < N; t++)
            for (int m = 0; m <= mask; m++) {
                const int64_t neuron = begin >> mask, out_row = m * d->out_rows + one->out_row + t;
                const char *bias = d->bias == NULL ? NULL : d->bias + neuron * 2;
                char *out = d->out + (out_row * d->num_neurons + neuron) * 2;
                NAME(put_totals)(totals + t * TOTALS, m, mask, (int)(num >> mask), bias, out);
            }
    }
}

INLINE uint32_t NAME(high_half)(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits >> 16;
}

/* As sum_range, of `num` rows, at most eight: two of them are a pair, of which the first four of eight numbers are added to
 * the first vector of a block, the last four to the second.
 */
INLINE void NAME(sum_pairs_of)(int R, int N, const char *rows, int64_t row_nbytes, const float *h, int64_t stride, float *sum,
                               int64_t padded, int64_t width) {
    __m512i weights[4][MAX_TOKENS];
    for (int k = 0; k < R; k += 2)
        for (int t = 0; t < N; t++) {
            const float *own = h + t * stride + k;
            const uint32_t second = k + 1 < R ? NAME(high_half)(own[1]) << 16 : 0;
            weights[k / 2][t] = _mm512_set1_epi32((int32_t)(NAME(high_half)(own[0]) | second));
        }
    for (int64_t left = width; left > 0; left -= BLOCK, rows += 64, sum += BLOCK) {
        __m512 low[MAX_TOKENS], high[MAX_TOKENS];
        for (int t = 0; t < N; t++)
            low[t] = _mm512_load_ps(sum + t * padded), high[t] = _mm512_load_ps(sum + t * padded + V);
        for (int k = 0; k < R; k += 2) {
            const __m512i a = (__m512i)NAME(load_pairs)(rows + k * row_nbytes, left);
            __m512i b = _mm512_setzero_si512();
            if (k + 1 < R) b = (__m512i)NAME(load_pairs)(rows + (k + 1) * row_nbytes, left);
            const __m512bh first = (__m512bh)_mm512_unpacklo_epi16(a, b), last = (__m512bh)_mm512_unpackhi_epi16(a, b);
            for (int t = 0; t < N; t++) {
                low[t] = _mm512_dpbf16_ps(low[t], first, (__m512bh)weights[k / 2][t]);
                high[t] = _mm512_dpbf16_ps(high[t], last, (__m512bh)weights[k / 2][t]);
            }
        }
        for (int t = 0; t < N; t++)
            _mm512_store_ps(sum + t * padded, low[t]), _mm512_store_ps(sum + t * padded + V, high[t]);
    }
}

#define SUMS(N)                                                                                                           \
    static __attribute__((noinline)) void NAME(sum_pairs_##N)(int64_t num, const char *rows, int64_t row_nbytes,          \
                                                              const float *h, int64_t stride, float *sum, int64_t padded, \
                                                              int64_t width) {                                            \
        for (; num >= 8; num -= 8, rows += 8 * row_nbytes, h += 8)                                                        \
            NAME(sum_pairs_of)(8, N, rows, row_nbytes, h, stride, sum, padded, width);                                    \
        for (; num > 0; num--, rows += row_nbytes, h++)                                                                   \
            NAME(sum_pairs_of)(1, N, rows, row_nbytes, h, stride, sum, padded, width);                                    \
    }
SUMS(1)
SUMS(2)
SUMS(3)
SUMS(4)
#undef SUMS

/* sum_range for bfloat16, of all rows and in one call. */
static void NAME(sum_pairs)(const sums *s, const task *one, int64_t first, int64_t end, float *sum) {
    const int N = (int)one->num_tokens;
    void (*const pairs)(int64_t, const char *, int64_t, const float *, int64_t, float *, int64_t, int64_t) =
        N == 1 ? NAME(sum_pairs_1) : N == 2 ? NAME(sum_pairs_2) : N == 3 ? NAME(sum_pairs_3) : NAME(sum_pairs_4);
    pairs(end - first, one->weights + first * s->row_nbytes, s->row_nbytes, s->h + one->x_row * s->num_neurons + first,
          s->num_neurons, sum, s->padded_width, s->width);
}

#define dot_pairs NAME(dot_pairs)
#define sum_pairs NAME(sum_pairs)
