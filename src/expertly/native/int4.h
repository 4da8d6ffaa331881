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
 * Where there is DOT_BYTES, sums are of whole numbers (codes.h). Be m the digits of s, u their last place, so s = m u: a
 * weight is q m + e times u, where e, of -8 to 8, is what rounding adds, and which m and q say, for there is a table of
 * them. So a sum is s times that of q and inputs, and u times that of e and inputs.
 */

#ifndef EXPERTLY_INT4
#define EXPERTLY_INT4
typedef struct {
    int has_half, has_zeros, group;
} int4_kind;

INLINE int4_kind int4_kind_of(int format) {
    return (int4_kind){(format - INT4_G32) >> 1 & 1, (format - INT4_G32) >> 2, tile_group(format)};
}

/* 8 + e at [m][q + 16]. */
static uint8_t INT4_ERRORS[2048][32], INT4_ERRORS_BFLOAT16[256][32];

static void int4_fill(int num_bits, uint8_t (*errors)[32]) {
    for (int m = 0; m < 1 << num_bits; m++)
        for (int q = -15; q < 16; q++) {
            const int product = (q < 0 ? -q : q) * m;
            int unit = 1;
            while (product / unit >> num_bits) unit *= 2;
            const int rest = product % unit, is_odd = product / unit % 2;
            const int error = (2 * rest > unit || (2 * rest == unit && is_odd)) ? unit - rest : -rest;
            errors[m][q + 16] = (uint8_t)(8 + (q < 0 ? -error : error));
        }
}

static __attribute__((constructor)) void int4_begin(void) {
    int4_fill(11, INT4_ERRORS);
    int4_fill(8, INT4_ERRORS_BFLOAT16);
}

/* A value that the compiler must not look through: a product of which more than float32 has would go into a sum. */
#if defined(__x86_64__)
#define KEEP(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define KEEP(v) __asm__("" : "+w"(v))
#else
#define KEEP(v) __asm__("" : "+m"(v))
#endif
#endif

typedef uint16_t NAME(int4_halves) __attribute__((vector_size(2 * V), aligned(1), may_alias));

/* The bits of V scales. */
INLINE vu NAME(int4_bits)(const int4_kind *kind, const char *p, int w) {
    return __builtin_convertvector(*(const NAME(int4_halves) *)(p + kind->group * 8 + w * V * 2), vu);
}

INLINE vf NAME(int4_scale)(const int4_kind *kind, vu bits) {
    if (!kind->has_half) return (vf)(bits << 16);
    return (vf)((vu)((vf)((bits & 0x7fffu) << 13) * 0x1p112f) | (bits & 0x8000u) << 16);
}

/* The zero points of V outputs. */
INLINE vu NAME(int4_zeros)(const int4_kind *kind, const char *p, int w) {
    vu zeros = (vu){0} + 8;
    if (kind->has_zeros) {
        uint64_t nibbles;
        memcpy(&nibbles, p + kind->group * 8 + 32, 8);
        for (int i = 0; i < V; i++) zeros[i] = nibbles >> (w * V + i) * 4 & 15;
    }
    return zeros;
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

#ifdef DOT_BYTES
#define ROWS (V / 4) /* of a vector: four bytes each of four words */

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

/* Two rows of `num` tiles times one token's inputs, as pair_add of tiles_body.h has it. */
INLINE void NAME(int4_add)(int format, int64_t num, const char *p, int64_t stride, const char *next, const unit *x,
                           vf (*sums)[MAX_TOKENS][W]) {
    const int4_kind kind = int4_kind_of(format);
    const uint8_t *table = kind.has_half ? INT4_ERRORS[0] : INT4_ERRORS_BFLOAT16[0];
    const int64_t nbytes = tile_nbytes(format), num_groups = 16 / ROWS, part = nbytes / num_groups;
    vf found[2][16 / ROWS];
    for (int r = 0; r < 2; r++)
        for (int g = 0; g < num_groups; g++) found[r][g] = (vf){0};
    for (; num; num--, p += nbytes, next += 2 * nbytes, x += kind.group / UNIT) {
        NAME(int4_rows) rows[2];
        for (int r = 0; r < 2; r++) rows[r] = NAME(int4_read)(&kind, p + r * stride, x->fixed.scale);
        int32_t start[3] = {0};
        float sum = 0;
        for (int j = 0; j < kind.group / UNIT; j++) {
            for (int d = 0; d < 3; d++) start[d] += x[j].fixed.start[0][d];
            sum += x[j].sum;
        }
#pragma GCC unroll 1 /* long enough as it is */
        for (int g = 0; g < num_groups; g++) {
            vu errors[2];
            vi numbers[2][3], rounded[2][2];
            for (int r = 0; r < 2; r++) {
                NAME(fetch)(next + (2 * g + r) * part, part);
                errors[r] = (vu)JOIN(table, rows[r].errors + g * ROWS);
                for (int d = 0; d < 3; d++) numbers[r][d] = (vi){0} + start[d];
                for (int d = 0; d < 2; d++) rounded[r][d] = (vi){0} + start[d + 1];
            }
            for (int j = 0; j < kind.group / UNIT; j++)
                for (int half = 0; half < 2; half++) {
                    vu digits[3];
                    for (int d = 0; d < 3; d++) digits[d] = (vu)REPEAT(x[j].fixed.digits[d] + half * 16);
                    for (int r = 0; r < 2; r++) {
                        const vu both = *(const vu *)(p + r * stride + j * 256 + g * 4 * V);
                        const vu codes = (half ? both >> 4 : both) & 0x0f0f0f0fu;
                        const vu added = SHUFFLE_EACH(errors[r], codes);
                        for (int d = 0; d < 3; d++) numbers[r][d] = DOT_BYTES(numbers[r][d], codes, digits[d]);
                        for (int d = 0; d < 2; d++) rounded[r][d] = DOT_BYTES(rounded[r][d], added, digits[d + 1]);
                    }
                }
            for (int r = 0; r < 2; r++) {
                vu spread;
                for (int i = 0; i < V; i++) spread[i] = (uint32_t)(i / 4);
                spread += (uint32_t)(g * ROWS);
                const int w = g * ROWS / V;
                const vf low = __builtin_convertvector((numbers[r][1] << 8) + numbers[r][0], vf);
                const vf high = __builtin_convertvector(numbers[r][2], vf);
                const vf errors_sum = __builtin_convertvector((rounded[r][1] << 8) + rounded[r][0], vf);
                found[r][g] += (high * 65536.f + low) * LOOKUP_IN(rows[r].scales[w], spread);
                found[r][g] += errors_sum * LOOKUP_IN(rows[r].lasts[w], spread);
            }
        }
        if (kind.has_zeros)
            for (int r = 0; r < 2; r++)
                for (int w = 0; w < W; w++) sums[r][0][w] -= rows[r].minima[w] * sum;
    }
    vu order; /* from that of FOLD */
    for (int i = 0; i < V; i++) order[i] = (uint32_t)(i % ROWS * 4 + i / ROWS);
    for (int r = 0; r < 2; r++)
        for (int w = 0; w < W; w++) {
            const vf *four = found[r] + w * 4;
            const vf folded = FOLD(FOLD(four[0], four[2]), FOLD(four[1], four[3]));
            sums[r][0][w] += LOOKUP_IN(folded, order);
        }
}
#undef ROWS
#else
INLINE void NAME(int4_add)(int format, int64_t num, const char *p, int64_t stride, const char *next, const unit *x,
                           vf (*sums)[MAX_TOKENS][W]) {
    const int4_kind kind = int4_kind_of(format);
    for (; num; num--, p += tile_nbytes(format), x += kind.group / UNIT)
        for (int r = 0; r < 2; r++, next += tile_nbytes(format)) {
            NAME(int4_rounding) rounding;
            NAME(fetch)(next, tile_nbytes(format));
            for (int row = 0; row < 16; row++) {
                if (row % V == 0) rounding = NAME(int4_round)(&kind, p + r * stride, row / V);
                const vf zeros = (vf){0} + rounding.zeros[row % V];
                const vf high = (vf){0} + rounding.high[row % V], low = (vf){0} + rounding.low[row % V];
                vf even = {0}, odd = {0};
                for (int i = 0; i < kind.group / 2; i += V) {
                    const vu both = BYTES(p + r * stride + i / 16 * 256 + row * 16 + i % 16);
                    const float *inputs = x[i / 16].x + i % 16;
                    even += NAME(int4_weight)(both & 15u, zeros, high, low) * *(const vf *)inputs;
                    odd += NAME(int4_weight)(both >> 4, zeros, high, low) * *(const vf *)(inputs + 16);
                }
                sums[r][0][row / V][row % V] += NAME(total)(even + odd);
            }
        }
}
#endif
