/* INT4 (formats/int4.py): a tile is, for every 32 inputs, 16 bytes of each of 16 outputs, a nibble an input, the first in the
 * lower bits, each a number of 0 to 15; then 16 scales of 2 bytes; then, where it has zero points, a nibble for each of 16
 * outputs. Included by tiles_body.h, once an instruction set.
 *
 * A weight is (number - zero point) * scale, rounded to the scale's dtype, bfloat16 or float16; the zero point is 8 where a
 * tile has none. With n the bits of float32 that the dtype lacks (16, 13), s the scale and q the difference, in float32
 *     fl(q * (2^n + 1) s) - q * 2^n s
 * is q s rounded to nearest, ties to even: (2^n + 1) s and 2^n s are no longer than 24 bits; the product is rounded where
 * the dtype ends, as 2^n q s lies n bits higher; and what is subtracted is exact and even there.
 *
 * Where there is ADD_BYTES, sums are of whole numbers (codes.h). Be m the digits of s, u their last place, so s = m u: a
 * weight is q m + e times u, where e, of -8 to 8, is what rounding adds, and which m and q say, for there is a table of
 * them. So a sum is s times that of q and inputs, and u times that of e and inputs.
 *
 * With AVX512-BF16 (int4_pairs), the 16 weights of a scale are computed, rounded to bfloat16, and looked up.
 */

typedef struct {
    int has_half, has_zeros, group;
} int4_kind;

INLINE int4_kind int4_kind_of(int format) {
    return (int4_kind){(format - INT4_G32) >> 1 & 1, (format - INT4_G32) >> 2, tile_group(format)};
}

/* The bits of V scales. */
INLINE vu NAME(int4_bits)(const int4_kind *kind, const char *p, int w) {
    return __builtin_convertvector(*(const vh *)(p + kind->group * 8 + w * V * 2), vu);
}

INLINE vf NAME(int4_scale)(const int4_kind *kind, vu bits) {
    if (!kind->has_half) return (vf)(bits << 16);
    return (vf)((vu)((vf)((bits & 0x7fffu) << 13) * 0x1p112f) | (bits & 0x8000u) << 16);
}

/* The zero points of V outputs. */
INLINE vu NAME(int4_zeros)(const int4_kind *kind, const char *p, int w) {
    if (!kind->has_zeros) return (vu){0} + 8;
    uint32_t nibbles[2];
    memcpy(nibbles, p + kind->group * 8 + 32, 8);
    vu number;
    for (int i = 0; i < V; i++) number[i] = (uint32_t)(w * V + i);
    const vu is_late = (vu)(number > 7u);
    const vu words = (((vu){0} + nibbles[0]) & ~is_late) | (((vu){0} + nibbles[1]) & is_late);
    return words >> (number % 8 * 4) & 15u;
}

/* -- weight by weight -------------------------------------------------------------------------------------------------- */

/* Of V outputs: zero points and what rounds a product. */
typedef struct {
    vf zeros, high, low;
} NAME(int4_rounding);

INLINE NAME(int4_rounding) NAME(int4_round)(const int4_kind *kind, const char *p, int w) {
    const vf scale = NAME(int4_scale)(kind, NAME(int4_bits)(kind, p, w));
    const vf zeros = __builtin_convertvector((vi)NAME(int4_zeros)(kind, p, w), vf);
    const float beyond = kind->has_half ? 0x1p13f : 0x1p16f;
    return (NAME(int4_rounding)){zeros, scale * (beyond + 1), scale * -beyond};
}

INLINE vf NAME(int4_weight)(vu numbers, vf zeros, vf high, vf low) {
    const vf difference = __builtin_convertvector((vi)numbers, vf) - zeros;
    vf product = difference * high;
    KEEP(product);
    return product + difference * low;
}

static __attribute__((noinline)) void NAME(int4_decode)(int format, const char *p, float (*out)[16]) {
    const int4_kind kind = int4_kind_of(format);
    for (int w = 0; w < W; w++) {
        const NAME(int4_rounding) rounding = NAME(int4_round)(&kind, p, w);
        for (int i = 0; i < kind.group; i += 8) {
            vu words;
            for (int row = 0; row < V; row++) {
                uint32_t word;
                memcpy(&word, p + i / 32 * 256 + (w * V + row) * 16 + i % 32 / 2, 4);
                words[row] = word;
            }
            for (int k = 0; k < 8; k++)
                *(vf *)(out[i + k] + w * V) =
                    NAME(int4_weight)(words >> 4 * k & 15u, rounding.zeros, rounding.high, rounding.low);
        }
    }
}

/* -- tiles times inputs ------------------------------------------------------------------------------------------------ */

#ifdef ADD_BYTES
#define AT_ONCE (V / 4) /* of a vector: four bytes each of four words */
#define ABREAST (V == 8 ? 1 : 2) /* vectors that share the digits, where there are registers for two */

INLINE vf NAME(lanes)(vf values, vu numbers) {
#ifdef LOOKUP_IN
    return LOOKUP_IN(values, numbers);
#else
    vf lanes;
    for (int i = 0; i < V; i++) lanes[i] = values[numbers[i] % V];
    return lanes;
#endif
}

/* What sums over the rows of a tile are multiplied with, and where a row's errors are in the table, for number 0. */
typedef struct {
    vf scales[W], lasts[W], minima[W];
    int32_t errors[16];
} NAME(int4_rows);

INLINE NAME(int4_rows) NAME(int4_read)(const int4_kind *kind, const char *p, float factor) {
    NAME(int4_rows) rows;
    for (int w = 0; w < W; w++) {
        const vu bits = NAME(int4_bits)(kind, p, w), zeros = NAME(int4_zeros)(kind, p, w);
        const vf scales = NAME(int4_scale)(kind, bits);
        vu digits, errors;
        vf lasts;
        if (kind->has_half) {
            const vu exponents = bits >> 10 & 31u, is_small = (vu)(exponents == 0); /* -1 */
            digits = (bits & 0x3ffu) | (~is_small & 0x400u);
            lasts = (vf)((exponents - is_small + 102u) << 23 | (bits & 0x8000u) << 16);
        } else { /* of the smallest, below 2^-126, no errors are added, which no sum shows */
            digits = (bits & 0x7fu) | 0x80u;
            lasts = (vf)((vu)scales & 0xff800000u) * 0x1p-7f;
        }
        errors = digits * 32 + 16 - zeros;
        memcpy(rows.errors + w * V, &errors, sizeof errors);
        rows.scales[w] = scales * factor;
        rows.lasts[w] = lasts * (factor * 256.f);
        rows.minima[w] = scales * __builtin_convertvector((vi)(zeros - 8), vf);
    }
    return rows;
}

/* Adds a tile times one token's inputs to 16 sums. */
INLINE void NAME(int4_add)(int format, const char *p, const unit *x, float *sums) {
    const int4_kind kind = int4_kind_of(format);
    const uint8_t *table = kind.has_half ? INT4_ERRORS[0] : INT4_ERRORS_BFLOAT16[0];
    const NAME(int4_rows) rows = NAME(int4_read)(&kind, p, x->fixed.scale);
    vf found[16 / AT_ONCE];
    int32_t start[3] = {0};
    float sum = 0;
    for (int j = 0; j < kind.group / UNIT; j++) {
        for (int d = 0; d < 3; d++) start[d] += x[j].fixed.start[0][d];
        sum += x[j].sums[0];
    }
    const int64_t part = tile_nbytes(format) / (16 / AT_ONCE / ABREAST);
    for (int g = 0; g < 16 / AT_ONCE; g += ABREAST) {
        NAME(fetch)(p + AHEAD + g / ABREAST * part, part);
        vu errors[ABREAST];
        vi numbers[ABREAST][3] = {0}, rounded[ABREAST][2] = {0}; /* of 4 * 2 times at most 16, which MOST_ADDED allows */
        for (int r = 0; r < ABREAST; r++) errors[r] = (vu)JOIN(table, rows.errors + (g + r) * AT_ONCE);
        for (int j = 0; j < kind.group / UNIT; j++)
            for (int half = 0; half < 2; half++) {
                vu digits[3];
                for (int d = 0; d < 3; d++) digits[d] = (vu)REPEAT(x[j].fixed.digits[d] + half * 16);
                for (int r = 0; r < ABREAST; r++) {
                    const vu both = *(const vu *)(p + j * 256 + (g + r) * 4 * V);
                    const vu codes = (half ? both >> 4 : both) & 0x0f0f0f0fu;
                    const vu added = SHUFFLE_EACH(errors[r], codes);
                    for (int d = 0; d < 3; d++) {
                        numbers[r][d] = ADD_BYTES(numbers[r][d], codes, digits[d]);
                        KEEP(numbers[r][d]);
                    }
                    for (int d = 0; d < 2; d++) {
                        rounded[r][d] = ADD_BYTES(rounded[r][d], added, digits[d + 1]);
                        KEEP(rounded[r][d]);
                    }
                }
            }
        for (int r = 0; r < ABREAST; r++) {
            for (int d = 0; d < 3; d++) numbers[r][d] = ADDED_BYTES(numbers[r][d]) + start[d];
            for (int d = 0; d < 2; d++) rounded[r][d] = ADDED_BYTES(rounded[r][d]) + start[d + 1];
            vu spread;
            for (int i = 0; i < V; i++) spread[i] = (uint32_t)(i / 4);
            spread += (uint32_t)((g + r) * AT_ONCE);
            const int w = (g + r) * AT_ONCE / V;
            const vf low = __builtin_convertvector((numbers[r][1] << 8) + numbers[r][0], vf);
            const vf high = __builtin_convertvector(numbers[r][2], vf);
            const vf errors_sum = __builtin_convertvector((rounded[r][1] << 8) + rounded[r][0], vf);
            found[g + r] = (high * 65536.f + low) * NAME(lanes)(rows.scales[w], spread);
            found[g + r] += errors_sum * NAME(lanes)(rows.lasts[w], spread);
        }
    }
    vu order; /* from that of FOLD */
    for (int i = 0; i < V; i++) order[i] = (uint32_t)(i % AT_ONCE * 4 + i / AT_ONCE);
    for (int w = 0; w < W; w++) {
        const vf *four = found + w * 4;
        vf folded = NAME(lanes)(FOLD(FOLD(four[0], four[2]), FOLD(four[1], four[3])), order);
        if (kind.has_zeros) folded -= rows.minima[w] * sum;
        ((vf *)sums)[w] += folded;
    }
}
#undef AT_ONCE
#undef ABREAST
#else
INLINE void NAME(int4_add)(int format, const char *p, const unit *x, float *sums) {
    const int4_kind kind = int4_kind_of(format);
    NAME(int4_rounding) rounding;
    NAME(fetch)(p + AHEAD, tile_nbytes(format));
    for (int row = 0; row < 16; row++) {
        if (row % V == 0) rounding = NAME(int4_round)(&kind, p, row / V);
        const vf zeros = (vf){0} + rounding.zeros[row % V];
        const vf high = (vf){0} + rounding.high[row % V], low = (vf){0} + rounding.low[row % V];
        vf even = {0}, odd = {0};
        for (int i = 0; i < kind.group / 2; i += V) {
            const vu both = BYTES(p + i / 16 * 256 + row * 16 + i % 16);
            const float *inputs = x[i / 16].x + i % 16;
            even += NAME(int4_weight)(both & 15u, zeros, high, low) * *(const vf *)inputs;
            odd += NAME(int4_weight)(both >> 4, zeros, high, low) * *(const vf *)(inputs + 16);
        }
        sums[row] += NAME(total)(even + odd);
    }
}
#endif

#ifdef PAIRS_LABEL
/* Tiles times inputs of bfloat16, as tiles_add of tiles_body.h has it: two vectors are the tables of four outputs. */
INLINE void NAME(int4_pairs)(int format, int N, int64_t num, const char *p, const unit *x, int64_t x_stride, int64_t x_step,
                             float *sums, int64_t stride, int64_t step) {
    const int4_kind kind = int4_kind_of(format);
    const int has_two = N == 1 && kind.group > UNIT; /* sums, as one waits for the sum before it */
    const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000u);
    const __m512i nibble = _mm512_set1_epi16(15);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); /* from FOLD's */
    const __m512i tables = _mm512_set_epi64(0x30003000300030, 0x30003000300030, 0x20002000200020, 0x20002000200020,
                                            0x10001000100010, 0x10001000100010, 0, 0);
    __m512 found[4][MAX_TOKENS][2];
    for (int g = 0; g < 4; g++)
        for (int t = 0; t < N; t++) found[g][t][0] = found[g][t][1] = _mm512_setzero_ps();
    for (; num; num--, p += tile_nbytes(format), x += x_step) {
        NAME(fetch)(p + AHEAD + kind.group * 8, 1);
        const char *scales = p + kind.group * 8 - 2;
        float zeros[16];
        *(vf *)zeros = NAME(float_of)(NAME(int4_zeros)(&kind, p, 0));
        if (kind.has_zeros) __asm__("" : "+m"(zeros)); /* to be spread as it is loaded */
        __m512i first[4], last[4];
        for (int g = 0; g < 4; g++) {
            __m512 weights[4];
            for (int i = 0; i < 4; i++) {
                /* the upper half of a word is the scale, the lower what lies before it */
                const __m512i scale = _mm512_and_si512(SPREAD(scales + (g * 4 + i) * 2), upper);
                weights[i] = _mm512_mul_ps(_mm512_sub_ps(all, _mm512_set1_ps(zeros[g * 4 + i])), (__m512)scale);
            }
            first[g] = (__m512i)_mm512_cvtne2ps_pbh(weights[1], weights[0]);
            last[g] = (__m512i)_mm512_cvtne2ps_pbh(weights[3], weights[2]);
        }
        for (int j = 0; j < kind.group / UNIT; j++)
            for (int g = 0; g < 4; g++) {
                NAME(fetch)(p + AHEAD + j * 256 + g * 64, 1);
                __m512i numbers = _mm512_loadu_si512(p + j * 256 + g * 64);
                KEEP(numbers);
                for (int k = 0; k < 4; k++) { /* tables | numbers & 15 */
                    const __m512i shifted = _mm512_srli_epi16(numbers, 4 * k);
                    const __m512i place = _mm512_ternarylogic_epi32(shifted, nibble, tables, 0xea);
                    const __m512bh values = (__m512bh)_mm512_permutex2var_epi16(first[g], place, last[g]);
                    for (int t = 0; t < N; t++) {
                        __m512 *sum = &found[g][t][has_two ? k % 2 : 0];
                        *sum = _mm512_dpbf16_ps(*sum, values, (__m512bh)REPEAT(x[t * x_stride + j].halves + k * 8));
                    }
                }
            }
        if (num > 1 && !step) continue;
        for (int t = 0; t < N; t++) {
            vf four[4];
            for (int g = 0; g < 4; g++) {
                four[g] = (vf)(has_two ? _mm512_add_ps(found[g][t][0], found[g][t][1]) : found[g][t][0]);
                found[g][t][0] = found[g][t][1] = _mm512_setzero_ps();
            }
            *(vf *)(sums + t * stride) += LOOKUP_IN(FOLD(FOLD(four[0], four[2]), FOLD(four[1], four[3])), order);
        }
        sums += step;
    }
}
#endif
