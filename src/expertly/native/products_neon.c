/* The arithmetic for processors of aarch64 that have products of bytes. */

#include "products.h"

#ifdef HAS_DOTS
#include "arm.h"

#ifndef __clang__
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define V 4
#define NAME(f) f##_neon
#define LABEL "neon"
#define MOST_ADDED(code) 8
#define BYTES_HAVE_SIGNS
#define ADD_BYTES(sums, codes, inputs) ((vi)vdotq_s32((int32x4_t)(sums), (int8x16_t)(codes), (int8x16_t)(inputs)))
#define ADDED_BYTES(sums) (sums)
#define ADD_SCALED(sums, numbers, p, scales) \
    ((sums) + (vi)vdotq_s32(vdupq_n_s32(0), (int8x16_t)(numbers), vld1q_s8(p)) * (scales))
#define SCALES_AT(p) ((int32_t)(p)[0])
INLINE int32x4_t less_starts(int32x4_t sums, const int16_t *scales, const int16_t *p) {
    for (int i = 0; i < 16; i += 4) sums = vmlsq_s32(sums, vmovl_s16(vld1_s16(scales + i)), vshll_n_s16(vld1_s16(p + i), 6));
    return sums;
}
#define LESS_STARTS(sums, scales, p) ((vi)less_starts((int32x4_t)(sums), scales, p))
#define REPEAT(p) vld1q_u8((const uint8_t *)(p))
#define SHUFFLE_EACH(t, codes) ((vu)vqtbl1q_u8((uint8x16_t)(t), (uint8x16_t)(codes)))
#define JOIN(p, at) vld1q_u8((const uint8_t *)(p) + (at)[0])
#define FOLD(a, b) (LOW_PAIRS(a, b) + HIGH_PAIRS(a, b))
#include "products_body.h"
#endif
