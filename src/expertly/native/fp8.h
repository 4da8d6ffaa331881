/* FP8 (formats/fp8.py): a tile is, for every 4 inputs, 16 words of a byte an input, the first in the lowest bits; then
 * its scale, a float. A byte is exponent (4 bits), sign, mantissa (3), from the top. Included by tiles_body.h, once an
 * instruction set.
 *
 * A weight is to be rounded after it has been scaled. For one scale there are but 16 weights of an exponent, and those of
 * another are these with that added to theirs: so 16 are rounded once a tile and looked up. Not so for a scale that brings
 * them near an end of float32, and in words with a small one, below 2^-6, whose exponent is 0: there, they are rounded one
 * by one.
 */

#ifndef EXPERTLY_FP8
#define EXPERTLY_FP8
static const float FP8_NORMAL[16] = { /* with exponent 0, if that were not special */
    0x8p-10f, 0x9p-10f, 0xap-10f, 0xbp-10f, 0xcp-10f, 0xdp-10f, 0xep-10f, 0xfp-10f,
    -0x8p-10f, -0x9p-10f, -0xap-10f, -0xbp-10f, -0xcp-10f, -0xdp-10f, -0xep-10f, -0xfp-10f,
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
INLINE uint32_t NAME(fp8_most)(int N, const char *p, const char *next, int w, vf normal,
                              const float *const *x, vf (*sums)[W]) {
    const int A = N == 1 ? 4 : N == 2 ? 2 : 1; /* chains of sums, as one waits for the sum before it */
    uint32_t left = 0;
    vf a[MAX_TOKENS][4];
    for (int t = 0; t < N; t++)
        for (int k = 0; k < A; k++) a[t][k] = (vf){0};
    for (int word = 0; word < 32; word++) {
        const char *q = p + word * 64 + w * V * 4;
        if (w == 0) __builtin_prefetch(next + word * 64);
        if (__builtin_expect(HAS_ZERO(*(const vu *)q & 0xf0f0f0f0u) != 0, 0)) {
            left |= 1u << word;
            continue;
        }
        for (int i = 0; i < 4; i++) { /* what lies 8 bits up is one byte further; behind the words is the scale */
            const vf weights = NAME(fp8_usual)(*(const vu *)(q + i), normal);
            for (int t = 0; t < N; t++) a[t][i % A] += weights * x[t][word * 4 + i];
        }
    }
    for (int t = 0; t < N; t++) {
        for (int k = 1; k < A; k++) a[t][0] += a[t][k];
        sums[t][w] += a[t][0];
    }
    return left;
}
#endif

/* Adds words `which` of a tile for V outputs, whose weights are rounded one by one. */
static __attribute__((noinline)) void NAME(fp8_words)(int dtype, int N, uint32_t which, const char *p, int w,
                                                      const float *const *x, vf (*sums)[W]) {
    const float scale = NAME(fp8_scale)(p);
    for (; which; which &= which - 1)
        for (int i = 0, word = __builtin_ctz(which); i < 4; i++) {
            const vf weights = NAME(fp8_any)(dtype, *(const vu *)(p + word * 64 + w * V * 4) >> 8 * i, scale);
            for (int t = 0; t < N; t++) sums[t][w] += weights * x[t][word * 4 + i];
        }
}

INLINE void NAME(fp8_add)(int dtype, int N, const char *p, const char *next, const float *const *x, vf (*sums)[W]) {
    for (int w = 0; w < W; w++) {
        uint32_t left = ~0u;
#ifdef LOOKUP_IN
        const float scale = NAME(fp8_scale)(p), size = scale < 0 ? -scale : scale;
        if (dtype != FLOAT16 && size > 0x1p-100f && size < 0x1p100f) {
            const vf normal = NAME(rounded)(dtype, *(const vf *)FP8_NORMAL * scale);
            left = NAME(fp8_most)(N, p, next, w, normal, x, sums);
        }
#endif
        if (left) NAME(fp8_words)(dtype, N, left, p, w, x, sums);
    }
}

INLINE void NAME(fp8_decode)(const char *p, float (*out)[16]) {
    for (int w = 0; w < W; w++)
        for (int k = 0; k < 128; k++)
            *(vf *)(out[k] + w * V) =
                NAME(fp8_any)(FLOAT32, *(const vu *)(p + k / 4 * 64 + w * V * 4 + k % 4), NAME(fp8_scale)(p));
}
