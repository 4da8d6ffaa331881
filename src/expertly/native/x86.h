/* What the instruction sets of x86 from AVX2 on have alike: conversions of one float16, and TIMES_STARTS of 256 bits. */

#include <immintrin.h>

#define HAS_HALF 1
#define PUT_HALF(value, p) \
    do { \
        uint16_t half = (uint16_t)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); \
        memcpy(p, &half, 2); \
    } while (0)
#define HALF_VALUE(p) _cvtsh_ss((unsigned short)((uint8_t)(p)[0] | (uint8_t)(p)[1] << 8))
#define TIMES_STARTS(scales, p)                                                                                         \
    _mm256_madd_epi16(_mm256_slli_epi16(_mm256_loadu_si256((const __m256i_u *)(scales)), 6),                            \
                      _mm256_loadu_si256((const __m256i_u *)(p)))
