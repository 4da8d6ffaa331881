/* FP8 (formats/fp8.py): a tile is, for every 4 inputs, 16 words of a byte an input, the first in the lowest bits; then
 * its scale, a float. A byte is exponent (4 bits), sign, mantissa (3), from the top. Included by tiles_body.h, once an
 * instruction set.
 *
 * A weight is to be rounded after it has been scaled. For one scale there are but 16 weights of an exponent, and those of
 * another are these with that added to theirs: so 16 are rounded once a tile and looked up. Not so for a scale that brings
 * them near an end of float32, and in words with a small one, below 2^-6, whose exponent is 0: there, they are rounded one
 * by one.
 */

static const float FP8_NORMAL[16] = { /* with exponent 0, if that were not special */
    0x8p-10f, 0x9p-10f, 0xap-10f, 0xbp-10f, 0xcp-10f, 0xdp-10f, 0xep-10f, 0xfp-10f,
    -0x8p-10f, -0x9p-10f, -0xap-10f, -0xbp-10f, -0xcp-10f, -0xdp-10f, -0xep-10f, -0xfp-10f,
};

/* Of V outputs for an input: the lowest byte of each of `codes` is its own. */
INLINE vf NAME(fp8_any)(int dtype, vu codes, vf scale) {
    const vu is_small = (vu)((codes & 0xf0) == 0);
    /* the small ones are (8 + m) 2^-9 - 2^-6 */
    const vu bits = ((codes & 0xf0) << 19) + ((codes & 7) << 20) + (120u << 23) + (is_small & 1u << 23);
    const vf magnitude = (vf)bits - (vf)(is_small & 121u << 23);
    return NAME(rounded)(dtype, (vf)((vu)magnitude | (codes & 8) << 28) * scale);
}

INLINE float NAME(fp8_scale)(const char *p) {
    float scale;
    memcpy(&scale, p + 2048, 4);
    return scale;
}

#ifdef LOOKUP_IN
/* The same by the table of its scale, but where a weight is small. */
INLINE vf NAME(fp8_usual)(vu codes, vf normal) {
    vu bits = (vu)LOOKUP_IN(normal, codes) + (codes << 19 & 0x07800000u);
    if (V == 8) bits ^= codes << 28 & 0x80000000u; /* a table of 8 has no signs */
    return (vf)bits;
}

/* Adds a tile for V outputs, but not its words that have a small weight: those it returns, a bit each. */
INLINE uint32_t NAME(fp8_most)(int N, const char *p, int w, vf normal, const unit *x,
                              int64_t x_stride, float *sums, int64_t stride) {
    const int A = N == 1 ? 4 : N == 2 ? 2 : 1; /* chains of sums, as one waits for the sum before it */
    uint32_t left = 0;
    vf a[MAX_TOKENS][4];
    for (int t = 0; t < N; t++)
        for (int k = 0; k < A; k++) a[t][k] = (vf){0};
    for (int word = 0; word < 32; word++) {
        const char *q = p + word * 64 + w * V * 4;
        if (w == 0) NAME(fetch)(q + AHEAD, 1);
        if (__builtin_expect(HAS_ZERO(*(const vu *)q & 0xf0f0f0f0u) != 0, 0)) {
            left |= 1u << word;
            continue;
        }
        for (int i = 0; i < 4; i++) { /* what lies 8 bits up is one byte further; behind the words is the scale */
            const vf weights = NAME(fp8_usual)(*(const vu *)(q + i), normal);
            const int at = word % 8 * 4 + i % 2 * 2 + i / 2;
            for (int t = 0; t < N; t++) a[t][i % A] += weights * x[t * x_stride + word / 8].x[at];
        }
    }
    for (int t = 0; t < N; t++) {
        for (int k = 1; k < A; k++) a[t][0] += a[t][k];
        ((vf *)(sums + t * stride))[w] += a[t][0];
    }
    return left;
}
#endif

#if V == 8
/* The two bytes of 16 numbers that are rounded to bfloat16, of which the last eight are the first with the other sign. */
typedef struct {
    __m256i low, high;
} NAME(fp8_bytes);

INLINE NAME(fp8_bytes) NAME(fp8_bytes_of)(vf numbers) {
    const __m256i bits = _mm256_srli_epi32((__m256i)NAME(rounded)(BFLOAT16, numbers), 16);
    const __m256i all = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x88);
    const __m256i low = _mm256_and_si256(all, _mm256_set1_epi16(255)), high = _mm256_srli_epi16(all, 8);
    return (NAME(fp8_bytes)){_mm256_packus_epi16(low, low),
                             _mm256_packus_epi16(high, _mm256_xor_si256(high, _mm256_set1_epi16(128)))};
}

/* The weights of 32 codes as bfloat16: `usual` looked up byte by byte and their exponents added, but where they are small. */
INLINE void NAME(fp8_halves_of)(__m256i codes, const NAME(fp8_bytes) *usual, float scale, __m256i *halves) {
    KEEP(codes); /* loaded once */
    const __m256i powers = _mm256_and_si256(codes, _mm256_set1_epi8((char)0xf0)), zero = _mm256_setzero_si256();
    const __m256i places = _mm256_and_si256(codes, _mm256_set1_epi8(15)), are_small = _mm256_cmpeq_epi8(powers, zero);
    __m256i low = _mm256_shuffle_epi8(usual->low, places), high = _mm256_shuffle_epi8(usual->high, places);
    if (__builtin_expect(_mm256_movemask_epi8(are_small) != 0, 0)) {
        const NAME(fp8_bytes) small = NAME(fp8_bytes_of)((*(const vf *)FP8_NORMAL - 0x8p-10f) * (2 * scale));
        low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(small.low, places), are_small);
        high = _mm256_blendv_epi8(high, _mm256_shuffle_epi8(small.high, places), are_small);
    }
    const __m256i first = _mm256_slli_epi16(_mm256_unpacklo_epi8(powers, zero), 3);
    const __m256i last = _mm256_slli_epi16(_mm256_unpackhi_epi8(powers, zero), 3);
    halves[0] = _mm256_add_epi16(first, _mm256_unpacklo_epi8(low, high));
    halves[1] = _mm256_add_epi16(last, _mm256_unpackhi_epi8(low, high));
}

typedef double two_floats __attribute__((aligned(4), may_alias));

/* Adds a tile whose weights are rounded to bfloat16. Of a word, inputs 0 and 2 come first. */
INLINE void NAME(fp8_halves)(int N, const char *p, float scale, const unit *x, int64_t x_stride, float *sums, int64_t stride) {
    const NAME(fp8_bytes) usual = NAME(fp8_bytes_of)(*(const vf *)FP8_NORMAL * scale);
    const __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000u);
    for (int w = 0; w < 2; w++) {
        __m256 a[MAX_TOKENS][2][2]; /* of outputs 0, 1, 4 and 5 or of the others; chains of sums, as in fp8_most */
        for (int t = 0; t < N; t++) a[t][0][0] = a[t][0][1] = a[t][1][0] = a[t][1][1] = _mm256_setzero_ps();
        for (int j = 0; j < 4; j++)
#pragma GCC unroll 8 /* so that places are known as code is made */
            for (int word = 0; word < 8; word++) {
                const char *q = p + (j * 8 + word) * 64 + w * 32;
                __m256i halves[2];
                if (w == 0) NAME(fetch)(q + AHEAD, 1);
                NAME(fp8_halves_of)(_mm256_loadu_si256((const __m256i *)q), &usual, scale, halves);
                for (int t = 0; t < N; t++) {
                    const two_floats *inputs = (const two_floats *)(x[t * x_stride + j].x + word * 4);
                    const __m256 even = (__m256)_mm256_set1_pd(inputs[0]), odd = (__m256)_mm256_set1_pd(inputs[1]);
                    for (int k = 0; k < 2; k++) {
                        __m256 *sum = a[t][k], *other = sum + (N == 1);
                        *sum = _mm256_fmadd_ps((__m256)_mm256_slli_epi32(halves[k], 16), even, *sum);
                        *other = _mm256_fmadd_ps((__m256)_mm256_and_si256(halves[k], upper), odd, *other);
                    }
                }
            }
        for (int t = 0; t < N; t++)
            ((vf *)(sums + t * stride))[w] +=
                (vf)_mm256_hadd_ps(_mm256_add_ps(a[t][0][0], a[t][0][1]), _mm256_add_ps(a[t][1][0], a[t][1][1]));
    }
}
#endif

/* Adds words `which` of a tile for V outputs, whose weights are rounded one by one. */
static __attribute__((noinline)) void NAME(fp8_words)(int dtype, int N, uint32_t which, const char *p, int w,
                                                      const unit *x, int64_t x_stride, float *sums, int64_t stride) {
    const vf scale = (vf){0} + NAME(fp8_scale)(p);
    for (; which; which &= which - 1)
        for (int i = 0, word = __builtin_ctz(which); i < 4; i++) {
            const vf weights = NAME(fp8_any)(dtype, *(const vu *)(p + word * 64 + w * V * 4) >> 8 * i, scale);
            for (int t = 0; t < N; t++) {
                const unit *one = x + t * x_stride + word / 8;
                const int at = word % 8 * 4 + i % 2 * 2 + i / 2;
                const float input = dtype == PAIRS ? bfloat16_value((const char *)(one->halves + at)) : one->x[at];
                ((vf *)(sums + t * stride))[w] += weights * input;
            }
        }
}

INLINE void NAME(fp8_add)(int dtype, int N, const char *p, const unit *x, int64_t x_stride, float *sums, int64_t stride) {
    uint32_t left[W];
    for (int w = 0; w < W; w++) left[w] = ~0u;
#ifdef LOOKUP_IN
    const float scale = NAME(fp8_scale)(p), size = scale < 0 ? -scale : scale;
    if (dtype != FLOAT16 && size > 0x1p-100f && size < 0x1p100f) {
#if V == 8
        if (dtype == BFLOAT16) {
            NAME(fp8_halves)(N, p, scale, x, x_stride, sums, stride);
            return;
        }
#endif
        const vf normal = NAME(rounded)(dtype, *(const vf *)FP8_NORMAL * scale);
        for (int w = 0; w < W; w++) left[w] = NAME(fp8_most)(N, p, w, normal, x, x_stride, sums, stride);
    }
#endif
    for (int w = 0; w < W; w++)
        if (left[w]) NAME(fp8_words)(dtype, N, left[w], p, w, x, x_stride, sums, stride);
}

#ifdef PAIRS_LABEL
/* Tiles times inputs of bfloat16, as tiles_add of tiles_body.h has it; of a word, those are 0 and 2, then 1 and 3. Small
 * weights have a table, too.
 */
INLINE void NAME(fp8_pairs)(int format, int N, int64_t num, const char *p, const unit *x, int64_t x_stride, int64_t x_step,
                            float *sums, int64_t stride, int64_t step) {
    const vf normal = *(const vf *)FP8_NORMAL;
    const vf small = (vf)((vu)((vf)((vu)normal & 0x7fffffffu) - 0x8p-10f) | ((vu)normal & 0x80000000u)) * 2.f;
    const __m512i exponents = _mm512_set1_epi16(0x780);
    const __m512i lower = _mm512_set1_epi16(0xf0), both = _mm512_set1_epi16((short)0xf0f0);
    for (; num; num--, p += tile_nbytes(format), x += x_step, sums += step) {
        const float scale = NAME(fp8_scale)(p), size = scale < 0 ? -scale : scale;
        if (!(size > 0x1p-100f && size < 0x1p100f)) {
            NAME(fp8_words)(PAIRS, N, ~0u, p, 0, x, x_stride, sums, stride);
            continue;
        }
        const __m512i usual = TWICE(_mm512_cvtneps_pbh((__m512)(normal * scale)));
        const __m512i least = TWICE(_mm512_cvtneps_pbh((__m512)(small * scale)));
        __m512 a[MAX_TOKENS][4];
        for (int t = 0; t < N; t++)
            for (int k = 0; k < 4; k++) a[t][k] = _mm512_setzero_ps();
        for (int j = 0; j < 4; j++)
#pragma GCC unroll 8 /* so that sums stay in registers */
            for (int word = 0; word < 8; word++) {
                const char *q = p + (j * 8 + word) * 64;
                NAME(fetch)(q + AHEAD, 1);
                const __m512i codes = _mm512_loadu_si512(q), upper = _mm512_srli_epi16(codes, 8);
                __m512i even = _mm512_and_si512(_mm512_slli_epi16(codes, 3), exponents);
                __m512i odd = _mm512_and_si512(_mm512_srli_epi16(codes, 5), exponents);
                even = _mm512_add_epi16(even, _mm512_permutexvar_epi16(codes, usual));
                odd = _mm512_add_epi16(odd, _mm512_permutexvar_epi16(upper, usual));
                if (__builtin_expect(_mm512_testn_epi8_mask(codes, both) != 0, 0)) {
                    even = _mm512_mask_permutexvar_epi16(even, _mm512_testn_epi16_mask(codes, lower), codes, least);
                    odd = _mm512_mask_permutexvar_epi16(odd, _mm512_testn_epi16_mask(upper, lower), upper, least);
                }
                for (int t = 0; t < N; t++) {
                    const uint16_t *inputs = x[t * x_stride + j].halves + word * 4;
                    __m512 *two = a[t] + word % 2 * 2;
                    two[0] = ADD_PAIRS(two[0], even, inputs);
                    two[1] = ADD_PAIRS(two[1], odd, inputs + 2);
                }
            }
        for (int t = 0; t < N; t++)
            *(vf *)(sums + t * stride) += (vf)a[t][0] + (vf)a[t][1] + ((vf)a[t][2] + (vf)a[t][3]);
    }
}
#endif

INLINE void NAME(fp8_decode)(const char *p, float (*out)[16]) {
    for (int w = 0; w < W; w++)
        for (int k = 0; k < 128; k++)
            *(vf *)(out[k] + w * V) = NAME(fp8_any)(FLOAT32, *(const vu *)(p + k / 4 * 64 + w * V * 4 + k % 4),
                                                    (vf){0} + NAME(fp8_scale)(p));
}

/* -- with a scale for each of 16 outputs, which are 16 floats behind the words ------------------------------------------- */

INLINE void NAME(fp8_rows_of)(int dtype, int N, const char *p, const unit *x, int64_t x_stride, float *sums, int64_t stride) {
    for (int w = 0; w < W; w++) {
        const vf scales = *(const vf *)(p + 2048 + w * V * 4);
        vf a[MAX_TOKENS][2];
        for (int t = 0; t < N; t++) a[t][0] = a[t][1] = (vf){0};
        for (int word = 0; word < 32; word++) {
            const char *q = p + word * 64 + w * V * 4;
            if (w == 0) NAME(fetch)(q + AHEAD, 1);
            for (int i = 0; i < 4; i++) {
                const vf weights = NAME(fp8_any)(dtype, *(const vu *)q >> 8 * i, scales);
                for (int t = 0; t < N; t++) a[t][i % 2] += weights * x[t * x_stride + word / 8].x[word % 8 * 4 + i];
            }
        }
        for (int t = 0; t < N; t++) ((vf *)(sums + t * stride))[w] += a[t][0] + a[t][1];
    }
}

INLINE void NAME(fp8_rows_add)(int dtype, int N, const char *p, const unit *x, int64_t x_stride, float *sums, int64_t stride) {
    if (dtype == FLOAT32) NAME(fp8_rows_of)(FLOAT32, N, p, x, x_stride, sums, stride);
    else if (dtype == FLOAT16) NAME(fp8_rows_of)(FLOAT16, N, p, x, x_stride, sums, stride);
    else NAME(fp8_rows_of)(BFLOAT16, N, p, x, x_stride, sums, stride);
}

INLINE void NAME(fp8_rows_decode)(const char *p, float (*out)[16]) {
    for (int w = 0; w < W; w++)
        for (int k = 0; k < 128; k++)
            *(vf *)(out[k] + w * V) = NAME(fp8_any)(FLOAT32, *(const vu *)(p + k / 4 * 64 + w * V * 4 + k % 4),
                                                    *(const vf *)(p + 2048 + w * V * 4));
}
