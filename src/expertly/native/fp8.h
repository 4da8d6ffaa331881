/* FP8 (formats/fp8.py): a tile is, for every 4 inputs, 16 words of a byte an input, the first in the lowest bits; then
 * its scale, a float. A byte is exponent (4 bits), sign, mantissa (3), from the top. Included by tiles_body.h, once an
 * instruction set.
 *
 * A weight is to be rounded after it has been scaled. For one scale there are but 16 weights of an exponent, and those of
 * another are these with that added to theirs: so 16 are rounded once a tile and looked up, as the 16 below 2^-6 are,
 * whose exponent is 0. That holds where neither end of float32 is near; for other scales, weights are rounded one by one.
 */

#ifndef EXPERTLY_FP8
#define EXPERTLY_FP8
static const float FP8_NORMAL[16] = { /* with exponent 0, if that were not special */
    0x8p-10f, 0x9p-10f, 0xap-10f, 0xbp-10f, 0xcp-10f, 0xdp-10f, 0xep-10f, 0xfp-10f,
    -0x8p-10f, -0x9p-10f, -0xap-10f, -0xbp-10f, -0xcp-10f, -0xdp-10f, -0xep-10f, -0xfp-10f,
};
static const float FP8_SMALL[16] = {
    0x0p-9f, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f,
    -0x0p-9f, -0x1p-9f, -0x2p-9f, -0x3p-9f, -0x4p-9f, -0x5p-9f, -0x6p-9f, -0x7p-9f,
};
#endif

/* Of V outputs for an input: the lowest byte of each of `codes` is its own. */
INLINE vf NAME(fp8_any)(int dtype, vu codes, float scale) {
    const vu is_small = (vu)((codes & 0xf0) == 0);
    /* the small ones are (8 + m) 2^-9 - 2^-6 */
    const vu bits = ((codes & 0xf0) << 19) + ((codes & 7) << 20) + (120u << 23) + (is_small & 1u << 23);
    const vf magnitude = (vf)bits - (vf)(is_small & 121u << 23);
    return NAME(rounded)(dtype, (vf)((vu)magnitude | (codes & 8) << 28) * scale);
}

/* The same by the tables of a scale. */
INLINE vf NAME(fp8_usual)(int dtype, vu codes, float scale, vf normal, vf small) {
#ifdef LOOKUP_EITHER
    (void)dtype, (void)scale;
    const vu exponents = codes << 19 & 0x07800000u;
    vu bits = (vu)LOOKUP_EITHER(normal, small, codes, exponents) + exponents;
    if (V == 8) bits ^= codes << 28 & 0x80000000u; /* a table of 8 has no signs */
    return (vf)bits;
#else
    (void)normal, (void)small;
    return NAME(fp8_any)(dtype, codes, scale);
#endif
}

INLINE float NAME(fp8_scale)(const char *p) {
    float scale;
    memcpy(&scale, p + 2048, 4);
    return scale;
}

INLINE void NAME(fp8_sum)(int is_usual, int dtype, int N, const char *p, const float *const *x, vf (*sums)[W]) {
    const int A = N == 1 ? 4 : N == 2 ? 2 : 1; /* chains of sums, as one waits for the sum before it */
    const float scale = NAME(fp8_scale)(p);
    const vf normal = NAME(rounded)(dtype, *(const vf *)FP8_NORMAL * scale);
    const vf small = NAME(rounded)(dtype, *(const vf *)FP8_SMALL * scale);
    for (int w = 0; w < W; w++) {
        vf a[MAX_TOKENS][4];
        for (int t = 0; t < N; t++)
            for (int k = 0; k < A; k++) a[t][k] = (vf){0};
        for (int word = 0; word < 32; word++) {
            if (w == 0) __builtin_prefetch(p + TILES_AHEAD_NBYTES + word * 64);
            for (int i = 0; i < 4; i++) { /* what lies 8 bits up is one byte further; behind the words is the scale */
                const vu codes = *(const vu *)(p + word * 64 + w * V * 4 + i);
                const vf value = is_usual ? NAME(fp8_usual)(dtype, codes, scale, normal, small)
                                          : NAME(fp8_any)(dtype, codes, scale);
                for (int t = 0; t < N; t++) a[t][i % A] += value * x[t][word * 4 + i];
            }
        }
        for (int t = 0; t < N; t++) {
            for (int k = 1; k < A; k++) a[t][0] += a[t][k];
            sums[t][w] += a[t][0];
        }
    }
}

static __attribute__((noinline)) void NAME(fp8_sum_any)(int dtype, int N, const char *p, const float *const *x,
                                                        vf (*sums)[W]) {
    NAME(fp8_sum)(0, dtype, N, p, x, sums);
}

INLINE void NAME(fp8_add)(int dtype, int N, const char *p, const float *const *x, vf (*sums)[W]) {
    const float scale = NAME(fp8_scale)(p), size = scale < 0 ? -scale : scale;
    if (dtype != FLOAT16 && size > 0x1p-100f && size < 0x1p100f) NAME(fp8_sum)(1, dtype, N, p, x, sums);
    else NAME(fp8_sum_any)(dtype, N, p, x, sums);
}

INLINE void NAME(fp8_decode)(const char *p, float (*out)[16]) {
    for (int w = 0; w < W; w++)
        for (int k = 0; k < 128; k++)
            *(vf *)(out[k] + w * V) =
                NAME(fp8_any)(FLOAT32, *(const vu *)(p + k / 4 * 64 + w * V * 4 + k % 4), NAME(fp8_scale)(p));
}
