/* Weights of 16 bits beside quantised ones (formats/halves.py), whose inputs are float32. Of BF16 a tile is, for every 2
 * inputs, 16 words, one for each output, the first input in the lower half; of F16, for each input 16 numbers. Included by
 * tiles_body.h, once for each instruction set.
 */

/* Of V outputs from output w * V on, input `i` of a tile. */
INLINE vf NAME(half_weights)(int format, const char *p, int w, int i) {
    if (format == F16) return NAME(halves)(p + i * 32 + w * V * 2);
    const vu words = *(const vu *)(p + i / 2 * 64 + w * V * 4);
    return i % 2 ? (vf)(words & 0xffff0000u) : (vf)(words << 16);
}

INLINE void NAME(halves_of)(int format, int dtype, int N, const char *p, const unit *x, int64_t x_stride, float *sums,
                            int64_t stride) {
    const int A = N == 1 ? 4 : 2; /* chains of sums, as one waits for the sum before it */
    for (int w = 0; w < W; w++) {
        vf a[MAX_TOKENS][4];
        for (int t = 0; t < N; t++)
            for (int k = 0; k < A; k++) a[t][k] = (vf){0};
        for (int i = 0; i < UNIT; i += 4) {
            if (w == 0) NAME(fetch)(p + i * 32 + AHEAD, 128);
            for (int k = 0; k < 4; k++) {
                const vf weights = NAME(rounded)(dtype, NAME(half_weights)(format, p, w, i + k));
                for (int t = 0; t < N; t++) a[t][k % A] += weights * x[t * x_stride].x[i + k];
            }
        }
        for (int t = 0; t < N; t++) {
            for (int k = 1; k < A; k++) a[t][0] += a[t][k];
            ((vf *)(sums + t * stride))[w] += a[t][0];
        }
    }
}

INLINE void NAME(halves_decode)(int format, const char *p, float (*out)[16]) {
    for (int w = 0; w < W; w++)
        for (int i = 0; i < UNIT; i++) *(vf *)(out[i] + w * V) = NAME(half_weights)(format, p, w, i);
}

#define HALVES(F, f, of)                                                                                                     \
    INLINE void NAME(f##_add)(int dtype, int N, const char *p, const unit *x, int64_t x_stride, float *sums, int64_t stride) { \
        const int is_exact = dtype == FLOAT32 || (dtype == PAIRS ? BFLOAT16 : dtype) == of;                                  \
        if (is_exact) NAME(halves_of)(F, FLOAT32, N, p, x, x_stride, sums, stride);                                          \
        else NAME(halves_of)(F, of == FLOAT16 ? BFLOAT16 : FLOAT16, N, p, x, x_stride, sums, stride);                        \
    }                                                                                                                        \
    INLINE void NAME(f##_decode)(const char *p, float (*out)[16]) { NAME(halves_decode)(F, p, out); }
HALVES(BF16, bf16, BFLOAT16)
HALVES(F16, f16, FLOAT16)
#undef HALVES
