/* The arithmetic with AVX-512 and VNNI; and, in a second set, products of bfloat16 in pairs. */

#include "products.h"

#ifdef __x86_64__
#include "x86.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c"))), apply_to = function)
#elif defined(HAS_PAIRS)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define V 16
#define NAME(f) f##_avx512
#define LABEL "avx512" /* which uses nothing of bf16 itself */
#define SHUFFLE(t, codes) \
    ((vu)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(t))), (__m512i)(codes)))
#define MOST_ADDED(code) 8
#define ADD_BYTES(sums, codes, inputs) ((vi)_mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(codes), (__m512i)(inputs)))
#define ADDED_BYTES(sums) (sums)
#define ADD_SCALED(sums, numbers, p, scales)                                                                            \
    ((vi)_mm512_dpwssd_epi32((__m512i)(sums), _mm512_maddubs_epi16((__m512i)(numbers), _mm512_loadu_si512(p)), scales))
#define SCALES_AT(p)                                                                                                    \
    _mm512_shuffle_epi8(_mm512_set1_epi64((long long)eight_at(p)),                                                      \
                        _mm512_setr_epi64(0x0100010001000100, 0x0100010001000100, 0x0302030203020302,                   \
                                          0x0302030203020302, 0x0504050405040504, 0x0504050405040504,                   \
                                          0x0706070607060706, 0x0706070607060706))
#define LESS_STARTS(sums, scales, p)                                                                                    \
    ((vi)_mm512_sub_epi32((__m512i)(sums), _mm512_zextsi256_si512(TIMES_STARTS(scales, p))))
#define LESS_WHERE(bits, no, yes, by)                                                                                   \
    ((vu)_mm512_mask_sub_epi8((__m512i)(no), (__mmask64)eight_at(bits), (__m512i)(yes), (__m512i)(by)))
#define LOAD_LANE(p) _mm_loadu_si128((const __m128i *)(p))
#define REPEAT(p) _mm512_broadcast_i32x4(LOAD_LANE(p))
#define SHUFFLE_EACH(t, codes) ((vu)_mm512_shuffle_epi8((__m512i)(t), (__m512i)(codes)))
#define JOIN(p, at)                                                                                                 \
    _mm512_inserti32x4(                                                                                             \
        _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(LOAD_LANE((p) + (at)[0])),                     \
                                              LOAD_LANE((p) + (at)[1]), 1),                                         \
                           LOAD_LANE((p) + (at)[2]), 2),                                                            \
        LOAD_LANE((p) + (at)[3]), 3)
#define FOLD(a, b) \
    ((vf)_mm512_add_ps(_mm512_unpacklo_ps((__m512)(a), (__m512)(b)), _mm512_unpackhi_ps((__m512)(a), (__m512)(b))))
#define BYTES(p) ((vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define LOOKUP_IN(a, codes) ((vf)_mm512_permutexvar_ps((__m512i)(codes), (__m512)(a)))
#define HAS_ZERO(bytes) _mm512_testn_epi8_mask((__m512i)(bytes), (__m512i)(bytes))
#ifdef HAS_PAIRS
#define PAIRS_LABEL "avx512_bf16"
typedef int32_t two_halves __attribute__((aligned(2), may_alias));
#define SPREAD(p) _mm512_set1_epi32(*(const two_halves *)(p))
#define ADD_PAIRS(sums, weights, p) _mm512_dpbf16_ps(sums, (__m512bh)(weights), (__m512bh)SPREAD(p))
#define TWICE(halves) _mm512_broadcast_i64x4((__m256i)(halves))
#endif
#define LOAD_HALF(p, v) ((v) = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p))))
#include "products_body.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
