/* The arithmetic with AVX2, FMA and F16C. */

#include "products.h"

#ifdef __x86_64__
#include "x86.h"

typedef int32_t two_numbers __attribute__((aligned(1), may_alias));

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define V 8
#define NAME(f) f##_avx2
#define LABEL "avx2"
#define SHUFFLE(t, codes) \
    ((vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(t))), (__m256i)(codes)))
#define BYTES(p) ((vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define LOOKUP_IN(a, codes) ((vf)_mm256_permutevar8x32_ps((__m256)(a), (__m256i)(codes)))
#define HAS_ZERO(bytes) _mm256_movemask_epi8(_mm256_cmpeq_epi8((__m256i)(bytes), _mm256_setzero_si256()))
#define MOST_ADDED(code) (128 / (code) < 8 ? 128 / (code) < 4 ? 128 / (code) < 2 ? 1 : 2 : 4 : 8) /* of 16 bits */
#define ADD_BYTES(sums, codes, inputs) \
    ((vi)_mm256_add_epi16((__m256i)(sums), _mm256_maddubs_epi16((__m256i)(codes), (__m256i)(inputs))))
#define ADDED_BYTES(sums) ((vi)_mm256_madd_epi16((__m256i)(sums), _mm256_set1_epi16(1)))
#define ADD_WORDS(sums, codes, even, odd)                                                                              \
    ((sums) + (vi)_mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16((__m256i)(codes), 8), 8), (__m256i)(even)) +   \
     (vi)_mm256_madd_epi16(_mm256_srai_epi16((__m256i)(codes), 8), (__m256i)(odd)))
#define ADD_SCALED(sums, numbers, p, scales)                                                                            \
    ((sums) + (vi)_mm256_madd_epi16(                                                                                    \
                  _mm256_maddubs_epi16((__m256i)(numbers), _mm256_loadu_si256((const __m256i_u *)(p))), scales))
#define SCALES_AT(p)                                                                                                    \
    _mm256_shuffle_epi8(_mm256_set1_epi32(*(const two_numbers *)(p)),                                                   \
                        _mm256_setr_epi64x(0x0100010001000100, 0x0100010001000100, 0x0302030203020302, 0x0302030203020302))
#define LESS_STARTS(sums, scales, p) ((vi)_mm256_sub_epi32((__m256i)(sums), TIMES_STARTS(scales, p)))
#define EACH_BIT _mm256_set1_epi64x((long long)0x8040201008040201)
#define LESS_WHERE(bits, no, yes, by)                                                                                   \
    ((vu)_mm256_blendv_epi8(                                                                                            \
        (__m256i)(no), _mm256_sub_epi8((__m256i)(yes), (__m256i)(by)),                                                  \
        _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(*(const two_numbers *)(bits)),         \
                                                               _mm256_setr_epi64x(0, 0x0101010101010101,                \
                                                                                  0x0202020202020202,                   \
                                                                                  0x0303030303030303)),                 \
                                           EACH_BIT),                                                                   \
                          EACH_BIT)))
#define REPEAT(p) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p)))
#define SHUFFLE_EACH(t, codes) ((vu)_mm256_shuffle_epi8((__m256i)(t), (__m256i)(codes)))
#define JOIN(p, at) \
    _mm256_loadu2_m128i((const __m128i_u *)((p) + (at)[1]), (const __m128i_u *)((p) + (at)[0]))
#define FOLD(a, b) \
    ((vf)_mm256_add_ps(_mm256_unpacklo_ps((__m256)(a), (__m256)(b)), _mm256_unpackhi_ps((__m256)(a), (__m256)(b))))
#define LOAD_HALF(p, v) ((v) = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#include "products_body.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
