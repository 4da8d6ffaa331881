/* NVFP4 with a scale for the whole matrix (formats/nvfp4.py): a tile is, for every 8 inputs, 16 words of a nibble an input,
 * the first in the lowest bits; then, for every 16 inputs, 16 scales, bytes as fp8.h has them; then the float by which these
 * are multiplied, or where it is negative divided. A weight is rounded after it has been scaled. Included by tiles_body.h,
 * once an instruction set.
 */

/* Numbers of E2M1: sign, exponent (2 bits), mantissa, in the lowest bits of `codes`. */
INLINE vf NAME(e2m1)(vu codes) {
    const vu is_small = (vu)((codes & 6) == 0);
    const vu bits = ((codes & 7) << 22) + (126u << 23) + (is_small & 1u << 23);
    const vf magnitude = (vf)bits - (vf)(is_small & 127u << 23); /* the small ones are (1 + m / 2) - 1 */
    return (vf)((vu)magnitude | (codes & 8) << 28);
}

/* Of V outputs, for inputs 16 * part to 16 * part + 15. */
INLINE vf NAME(nvfp4_scales)(const char *p, int w, int part) {
    float whole;
    memcpy(&whole, p + 1152, 4);
    const vf scales = NAME(fp8_any)(FLOAT32, BYTES(p + 1024 + part * 16 + w * V), (vf){0} + 1.f);
    return whole < 0 ? scales / -whole : scales * whole;
}

INLINE void NAME(nvfp4_global_of)(int dtype, int N, const char *p, const unit *x, int64_t x_stride, float *sums,
                                  int64_t stride) {
    for (int w = 0; w < W; w++) {
        vf a[MAX_TOKENS][2];
        for (int t = 0; t < N; t++) a[t][0] = a[t][1] = (vf){0};
        for (int part = 0; part < 8; part++) {
            const vf scales = NAME(nvfp4_scales)(p, w, part);
            for (int word = part * 2; word < part * 2 + 2; word++) {
                const char *q = p + word * 64 + w * V * 4;
                if (w == 0) NAME(fetch)(q + AHEAD, 1);
                for (int i = 0; i < 8; i++) {
                    const vf weights = NAME(rounded)(dtype, NAME(e2m1)(*(const vu *)q >> 4 * i) * scales);
                    for (int t = 0; t < N; t++) a[t][i % 2] += weights * x[t * x_stride + word / 4].x[word % 4 * 8 + i];
                }
            }
        }
        for (int t = 0; t < N; t++) ((vf *)(sums + t * stride))[w] += a[t][0] + a[t][1];
    }
}

INLINE void NAME(nvfp4_global_add)(int dtype, int N, const char *p, const unit *x, int64_t x_stride, float *sums,
                                   int64_t stride) {
    if (dtype == FLOAT32) NAME(nvfp4_global_of)(FLOAT32, N, p, x, x_stride, sums, stride);
    else if (dtype == FLOAT16) NAME(nvfp4_global_of)(FLOAT16, N, p, x, x_stride, sums, stride);
    else NAME(nvfp4_global_of)(BFLOAT16, N, p, x, x_stride, sums, stride);
}

INLINE void NAME(nvfp4_global_decode)(const char *p, float (*out)[16]) {
    for (int w = 0; w < W; w++)
        for (int k = 0; k < 128; k++)
            *(vf *)(out[k] + w * V) = NAME(e2m1)(*(const vu *)(p + k / 8 * 64 + w * V * 4) >> k % 8 * 4) *
                                      NAME(nvfp4_scales)(p, w, k / 16);
}
