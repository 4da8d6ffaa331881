/* What all processors of aarch64 have: a table of 16 bytes in a register, and float16. */

#include <arm_neon.h>

#define SHUFFLE(t, codes) ((vu)vqtbl1q_u8(vld1q_u8((const uint8_t *)(t)), (uint8x16_t)(codes)))
#define HAS_HALF 1
#define LOAD_HALF(p, v) ((v) = (vf)vcvt_f32_f16((float16x4_t)vld1_u16((const uint16_t *)(p))))
#define HALF_VALUE(p) half_value(p)
#define PUT_HALF(value, p) put_half(value, p)

INLINE float half_value(const char *p) {
    __fp16 half;
    memcpy(&half, p, 2);
    return half;
}

INLINE void put_half(float value, char *p) {
    __fp16 half = (__fp16)value;
    memcpy(p, &half, 2);
}
