/* INT4 (formats/int4.py): a tile is, for every 8 inputs, 16 words of a nibble an input, the first in the lowest bits, each a
 * number of -8 to 7; then 16 scales of 2 bytes. Included by tiles_body.h, once an instruction set.
 *
 * A weight is number * scale, rounded to the scale's dtype, bfloat16 or float16. With n the bits of
 * float32 that the dtype lacks (16, 13), s the scale and q the number, in float32
 *     fl(q * (2^n + 1) s) - q * 2^n s
 * is q s rounded to nearest, ties to even: (2^n + 1) s and 2^n s are no longer than 24 bits; the product is rounded where
 * the dtype ends, as 2^n q s lies n bits higher; and what is subtracted is exact and even there.
 */

#ifndef EXPERTLY_INT4
#define EXPERTLY_INT4
static const float INT4_VALUES[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};

/* A value that the compiler must not look through: a product of which more than float32 has would go into a sum. */
#if defined(__x86_64__)
#define KEEP(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define KEEP(v) __asm__("" : "+w"(v))
#else
#define KEEP(v) __asm__("" : "+m"(v))
#endif
#endif

/* The numbers of 8 inputs for V outputs, from their words. Three bytes behind them are read, too. */
#if V == 16
INLINE void NAME(int4)(const char *p, vf *values) {
    for (int i = 0; i < 8; i++) { /* as in mxfp4.h */
        vu codes = *(const vu *)(p + i / 2);
        values[i] = LOOKUP(INT4_VALUES, i % 2 ? codes >> 4 : codes);
    }
}
#else
INLINE void NAME(int4)(const char *p, vf *values) {
    const vu codes = *(const vu *)p;
    for (int i = 0; i < 8; i++) values[i] = __builtin_convertvector((vi)(codes << (28 - i * 4)) >> 28, vf);
}
#endif

typedef uint16_t NAME(int4_halves) __attribute__((vector_size(2 * V), aligned(1), may_alias));

/* Of V outputs: what rounds a product. */
typedef struct {
    vf high, low;
} NAME(int4_scales);

INLINE NAME(int4_scales) NAME(int4_read)(int has_half, int group, const char *p, int w) {
    const vu bits = __builtin_convertvector(*(const NAME(int4_halves) *)(p + group * 8 + w * V * 2), vu);
    vf scale = (vf)(bits << 16);
    if (has_half) scale = (vf)((vu)((vf)((bits & 0x7fffu) << 13) * 0x1p112f) | (bits & 0x8000u) << 16);
    const float beyond = has_half ? 0x1p13f : 0x1p16f;
    return (NAME(int4_scales)){scale * (beyond + 1), scale * -beyond};
}

INLINE vf NAME(int4_weight)(vf value, const NAME(int4_scales) *scales) {
    vf high = value * scales->high;
    KEEP(high);
    return high + value * scales->low;
}

INLINE void NAME(int4_add)(int has_half, int group, int N, const char *p, const float *const *x,
                           vf (*sums)[W]) {
    const int A = N == 1 ? 4 : N == 2 ? 2 : 1; /* chains of sums, as one waits for the sum before it */
#pragma GCC unroll 1 /* long enough as it is */
    for (int w = 0; w < W; w++) {
        const NAME(int4_scales) scales = NAME(int4_read)(has_half, group, p, w);
        vf a[MAX_TOKENS][4];
        for (int t = 0; t < N; t++)
            for (int k = 0; k < A; k++) a[t][k] = (vf){0};
#pragma GCC unroll 1
        for (int word = 0; word < group / 8; word++) {
            vf values[8];
            NAME(int4)(p + word * 64 + w * V * 4, values);
            for (int i = 0; i < 8; i++) {
                const vf weight = NAME(int4_weight)(values[i], &scales);
                for (int t = 0; t < N; t++) a[t][i % A] += weight * x[t][word * 8 + i];
            }
        }
        for (int t = 0; t < N; t++) {
            for (int k = 1; k < A; k++) a[t][0] += a[t][k];
            sums[t][w] += a[t][0];
        }
    }
}

INLINE void NAME(int4_decode)(int has_half, int group, const char *p, float (*out)[16]) {
#pragma GCC unroll 1 /* long enough as it is */
    for (int w = 0; w < W; w++) {
        const NAME(int4_scales) scales = NAME(int4_read)(has_half, group, p, w);
#pragma GCC unroll 1
        for (int word = 0; word < group / 8; word++) {
            vf values[8];
            NAME(int4)(p + word * 64 + w * V * 4, values);
            for (int i = 0; i < 8; i++)
                *(vf *)(out[word * 8 + i] + w * V) = NAME(int4_weight)(values[i], &scales);
        }
    }
}

#define INT4(f, has_half, group)                                                                       \
    INLINE void NAME(f##_add)(int dtype, int N, const char *p, const float *const *x, vf (*sums)[W]) { \
        (void)dtype; /* the scales' or float32 */                                                      \
        NAME(int4_add)(has_half, group, N, p, x, sums);                                                \
    }                                                                                                  \
    INLINE void NAME(f##_decode)(const char *p, float (*out)[16]) { NAME(int4_decode)(has_half, group, p, out); }
INT4(int4_g32, 0, 32)
INT4(int4_g128, 0, 128)
INT4(int4_g32_f16, 1, 32)
INT4(int4_g128_f16, 1, 128)
#undef INT4
