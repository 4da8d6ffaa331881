/* MXFP4 (formats/mxfp4.py): a tile is, for every 8 inputs, 16 words of a nibble an input, the first in the lowest bits;
 * then 16 bytes of scales. Included by tiles_body.h, once an instruction set.
 */

#ifndef EXPERTLY_E2M1
#define EXPERTLY_E2M1
static const float E2M1_VALUES[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
static const int8_t E2M1_HALVES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
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

INLINE void NAME(mxfp4_add)(int dtype, int N, const char *p, const float *const *x, vf (*sums)[W]) {
    (void)dtype; /* every value is a number of each */
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

