/* Formats whose weights are code * scale - minimum, where a code is a whole number of up to 8 bits: MXFP4, NVFP4 and those
 * of GGUF. formats/mxfp4.py, nvfp4.py and gguf.py say how the bytes of a tile are laid out. Included by tiles_body.h, once for
 * each instruction set.
 *
 * Products of codes and inputs are summed over a unit of 32 inputs, and the sum is scaled. There are three ways:
 * - integers, where the processor multiplies bytes (ADD_BYTES). The inputs of a unit become whole numbers of 23 bits times
 *   one power of two, cut into three digits of 8 bits that are multiplied separately; where codes of 8 bits are too large
 *   to be multiplied by bytes (ADD_WORDS), into two digits of 12 bits. Sums are exact; an input loses what is below 2^-23
 *   of the unit's largest input, as it would in a float32 sum;
 * - pairs of bfloat16, with AVX512-BF16 and MXFP4 or NVFP4 (mxfp4_pairs): values are looked up as bfloat16, sums are float32;
 * - float32 otherwise, and else where NVFP4's weights are to be rounded to 16 bits once they are scaled (rounded_add).
 *
 * In registers, codes of V outputs are 8 words for a unit; a word has 4 bytes for each output, one input each. Of every 8
 * inputs, one word has those at even places and the next those at odd places, since two codes share a stored byte.
 */

static const uint8_t E2M1_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}; /* 2 * value + 12 */

static const uint16_t E2M1_HALVES[16] = { /* 2 * value, as bfloat16 */
    0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140,
    0x8000, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140,
};

/* The place of a unit's input i in the order in which codes are multiplied: byte place % 4 of word place / 4. */
INLINE int place_in_unit(int format, int i) {
    return format >= INT4_G32 ? i % 2 * 16 + i / 2
         : format == FP8      ? i / 4 * 4 + i % 2 * 2 + i % 4 / 2
         : has_weights(format) || has_blocks(format) || format == TQ1_0 ? i
         : i / 8 * 8 + i % 2 * 4 + i % 8 / 2;
}

/* The same for pairs of bfloat16: the two inputs of a pair are neighbours. */
INLINE int place_in_pairs(int format, int i) {
    return format >= INT4_G32 ? i % 4 * 8 + i / 4
         : format == FP8      ? i / 4 * 4 + i % 2 * 2 + i % 4 / 2
                              : i / 8 * 8 + i % 4 * 2 + i % 8 / 4;
}

/* Subtracted from each code as it is stored. INT4's offset is 8, in four sums that subtract 2 each. */
INLINE int code_offset(int format) {
    return format >= INT4_G32 ? 2
         : format == MXFP4 || format == NVFP4 ? 12
         : format == Q8_0 || format == IQ4_NL || format == IQ4_XS ? 128
         : format == Q4_0     ? 8
         : format == Q5_0     ? 16
         : format == Q6_K     ? 32
         : format == Q3_K     ? 4
         : format == TQ1_0 || format == TQ2_0 ? 1
                              : 0;
}

/* The largest code as it is stored. */
INLINE int largest_code(int format) {
    return format == TQ1_0                     ? 2
         : format == Q2_K || format == TQ2_0   ? 3
         : format == Q3_K                      ? 7
         : format == MXFP4 || format == NVFP4  ? 24
         : format == Q5_K || format == Q5_0 || format == Q5_1 ? 31
         : format == Q6_K                      ? 63
         : code_offset(format) == 128          ? 255
                                               : 15;
}

/* Scales of a unit, for each output. */
INLINE int scales_of_unit(int format) {
    return format == Q6_K || format == Q2_K || format == Q3_K || format == NVFP4 ? 2 : 1;
}

/* Whether a weight is rounded after it has been scaled: such are multiplied as floats. */
INLINE int is_rounded(int format, int dtype) { return format == NVFP4 && dtype != FLOAT32; }

static const float E2M1_VALUES[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

/* The powers of two in numbers of FP8, by exponent; then, of those with exponent 0, by sign and mantissa, those powers and what
 * the mantissa is beside them, 8 times and in both halves of a word.
 */
static const float FP8_POWERS[16] = {0, 0x1p-6f, 0x1p-5f, 0x1p-4f, 0x1p-3f, 0x1p-2f, .5f, 1, 2, 4, 8, 16, 32, 64, 128, 256};
static const float FP8_SMALL_POWERS[16] = {
    0, 0x1p-9f, 0x1p-8f, 0x1p-8f, 0x1p-7f, 0x1p-7f, 0x1p-7f, 0x1p-7f,
    0, -0x1p-9f, -0x1p-8f, -0x1p-8f, -0x1p-7f, -0x1p-7f, -0x1p-7f, -0x1p-7f,
};
static const uint32_t FP8_SMALL_MANTISSAS[16] = {
    0, 0, 0, 0x200020, 0, 0x100010, 0x200020, 0x300030, 0, 0, 0, 0x200020, 0, 0x100010, 0x200020, 0x300030,
};

INLINE int has_minimum(int format) {
    return format == Q4_K || format == Q5_K || format == Q4_1 || format == Q5_1 || format == Q2_K;
}

typedef uint8_t NAME(vbu) __attribute__((vector_size(4 * V)));
typedef uint16_t NAME(v16) __attribute__((vector_size(4 * V), aligned(1), may_alias));

INLINE vf NAME(halves)(const char *p) {
    vf values;
#if HAS_HALF
    LOAD_HALF(p, values);
#else
    for (int i = 0; i < V; i++) values[i] = half_number(p + 2 * i);
#endif
    return values;
}

/* Numbers of E2M1, from the lowest bits of `codes`. */
INLINE vf NAME(e2m1)(vu codes) {
#ifdef LOOKUP_IN
    const vf values = LOOKUP_IN(*(const vf *)E2M1_VALUES, codes);
    return V == 16 ? values : (vf)((vu)values | (codes & 8) << 28); /* a table of 8 has no signs */
#else
    vf values;
    for (int i = 0; i < V; i++) values[i] = E2M1_VALUES[codes[i] & 15];
    return values;
#endif
}

INLINE vf NAME(float_of)(vu numbers) { return __builtin_convertvector((vi)numbers, vf); }

/* -- codes and scales of a format -------------------------------------------------------------------------------------- */

/* Two bits of each of the two words: those of word k of a unit begin at bit 2 (k % 4) of these bytes. */
INLINE void NAME(two_bits)(const char *p, int j, int i, int at, vu *codes) {
    for (int k = 0; k < 2; k++) codes[k] = *(const vu *)(p + (2 * j + i / 2) * 64 + at) >> (i % 2 * 4 + k * 2) & 0x03030303u;
}

/* Of TQ1_0: digits to base 3, of which a byte has five. Those of the first eight words' bytes are five units, those of four
 * more words' bytes the next two and a half; the last word has four for the rest.
 */
INLINE vu NAME(digits)(const char *p, int j, int k) {
    static const uint16_t POWERS[] = {1, 3, 9, 27, 81};
    const int word = j < 5 ? k : j < 7 || k < 4 ? 8 + k % 4 : 12, digit = j < 5 ? j : j < 7 || k < 4 ? (j - 5) * 2 + k / 4 : k - 4;
    const NAME(v16) bytes = *(const NAME(v16) *)(p + word * 64), power = (NAME(v16)){0} + POWERS[digit];
    const NAME(v16) low = (bytes & 255) * power & 255, high = (bytes >> 8) * power & 255; /* the digit is the highest now */
    return (vu)(low * 3 >> 8 | (high * 3 & 0xff00));
}

/* Words 2 i and 2 i + 1 of unit j of a tile, for outputs w * V to w * V + V - 1. */
INLINE void NAME(codes)(int format, const char *p, int w, int j, int i, vu *codes) {
    const int at = w * V * 4;
    if (format == Q8_0) { /* which is stored with a sign: add 128 */
        for (int k = 0; k < 2; k++) codes[k] = *(const vu *)(p + (2 * i + k) * 64 + at) ^ 0x80808080u;
        return;
    }
    if (format == TQ1_0) {
        for (int k = 0; k < 2; k++) codes[k] = NAME(digits)(p + at, j, 2 * i + k);
        return;
    }
    if (format == Q2_K || format == Q3_K || format == TQ2_0) {
        NAME(two_bits)(p, j, i, at, codes);
        for (int k = 0; k < 2 && format == Q3_K; k++)
            codes[k] |= (*(const vu *)(p + 1024 + j * 64 + at) >> (2 * i + k) & 0x01010101u) << 2;
        return;
    }
    const vu word = *(const vu *)(p + (j * 4 + i) * 64 + at);
    codes[0] = word & 0x0f0f0f0fu;
    codes[1] = word >> 4 & 0x0f0f0f0fu;
    if (format == MXFP4 || format == NVFP4 || format == IQ4_NL || format == IQ4_XS)
        for (int k = 0; k < 2; k++)
            codes[k] = SHUFFLE(format == IQ4_NL || format == IQ4_XS ? GRIDS.iq4_nl : E2M1_CODES, codes[k]);
    if (format == Q5_K || format == Q5_0 || format == Q5_1) { /* the fifth bits of word k are bit k of these bytes */
        const vu bits = *(const vu *)(p + (format == Q5_K ? 2048 : 256) + j * 64 + at);
        for (int k = 0; k < 2; k++) codes[k] |= (bits >> (2 * i + k) & 0x01010101u) << 4;
    }
    if (format == Q6_K) {
        vu upper[2];
        NAME(two_bits)(p + 2048, j, i, at, upper);
        for (int k = 0; k < 2; k++) codes[k] |= upper[k] << 4;
    }
}

/* Of NVFP4, for 16 inputs: bytes as fp8.h has them, times the matrix's scale or, where that is negative, divided by it. */
INLINE vf NAME(nvfp4_scale)(const char *p, int w, int part) {
    float whole;
    memcpy(&whole, p + 576, 4);
    const vf scales = NAME(fp8_any)(FLOAT32, BYTES(p + 512 + part * 16 + w * V), (vf){0} + 1.f);
    return whole < 0 ? scales / -whole : scales * whole;
}

/* The scale of unit j, of its half `half` where each has one, and the minimum. */
INLINE vf NAME(code_scale)(int format, const char *p, int w, int j, int half, vf *minimum) {
    *minimum = (vf){0};
    if (format == MXFP4) { /* 2^(byte - 127), halved because E2M1_CODES are doubled */
        const vu bits = BYTES(p + 256 + w * V);
        return (vf)((bits << 23) | ((vu)(bits == 0) & 0x00400000u)) * .5f;
    }
    if (format == NVFP4) return NAME(nvfp4_scale)(p, w, 2 * j + half) * .5f;
    if (format == Q4_0 || format == IQ4_NL) return NAME(halves)(p + 256 + w * V * 2);
    if (format == TQ1_0 || format == TQ2_0) return NAME(halves)(p + (format == TQ1_0 ? 832 : 1024) + w * V * 2);
    if (format == Q8_0) return NAME(halves)(p + 512 + w * V * 2);
    if (format == Q4_1 || format == Q5_0 || format == Q5_1) {
        p += (format == Q4_1 ? 256 : 320) + w * V * 2;
        if (has_minimum(format)) *minimum = -NAME(halves)(p + 32);
        return NAME(halves)(p);
    }
    if (format == Q6_K) {
        const vi number = ((vi)BYTES(p + 3072 + (2 * j + half) * 16 + w * V) ^ 128) - 128;
        return __builtin_convertvector(number, vf) * NAME(halves)(p + 3328 + w * V * 2);
    }
    if (format == Q2_K) { /* 4 bits each of a scale and a minimum */
        const vu both = BYTES(p + 1024 + (2 * j + half) * 16 + w * V);
        *minimum = NAME(float_of)(both >> 4) * NAME(halves)(p + 1312 + w * V * 2);
        return NAME(float_of)(both & 15u) * NAME(halves)(p + 1280 + w * V * 2);
    }
    if (format == Q3_K) { /* 16 scales of 4 bits in two words, and 2 bits more of each in the next */
        const int number = 2 * j + half, byte = number % 4 * 8;
        const vu low = *(const vu *)(p + 1536 + number % 8 / 4 * 64 + w * V * 4) >> (byte + number / 8 * 4) & 15u;
        const vu high = *(const vu *)(p + 1664 + w * V * 4) >> (byte + number / 4 * 2) & 3u;
        return NAME(float_of)((low | high << 4) - 32u) * NAME(halves)(p + 1728 + w * V * 2);
    }
    if (format == IQ4_XS) { /* 8 scales of 4 bits in a word, and 2 bits more of each in the next half of a word */
        const vu low = *(const vu *)(p + 2048 + w * V * 4) >> 4 * j & 15u;
        const vu high = __builtin_convertvector(*(const vh *)(p + 2112 + w * V * 2), vu) >> 2 * j & 3u;
        return NAME(float_of)((low | high << 4) - 32u) * NAME(halves)(p + 2144 + w * V * 2);
    }
    p += format == Q5_K ? 2560 : 2048; /* 8 scales and 8 minima of 6 bits in 3 words, then a factor of each */
    const vu low = *(const vu *)(p + w * V * 4), high = *(const vu *)(p + 64 + w * V * 4);
    const vu both = *(const vu *)(p + 128 + w * V * 4);
    const int shift = j % 4 * 8;
    const vu s = j < 4 ? low >> shift & 63u : (both >> shift & 15u) | (low >> (shift + 6) & 3u) << 4;
    const vu m = j < 4 ? high >> shift & 63u : (both >> (shift + 4) & 15u) | (high >> (shift + 6) & 3u) << 4;
    *minimum = NAME(float_of)(m) * NAME(halves)(p + 224 + w * V * 2);
    return NAME(float_of)(s) * NAME(halves)(p + 192 + w * V * 2);
}

/* -- the same for all ------------------------------------------------------------------------------------------------- */

/* Byte b of each output's word less the offset, times 2^24: shifting it to the top keeps its sign. */
INLINE vf NAME(code_values)(int offset, vu codes, int b) {
    const vu numbers = (vu)((NAME(vbu))codes - (uint8_t)offset);
    return NAME(float_of)(numbers << (24 - b * 8) & 0xff000000u);
}

INLINE uint32_t NAME(largest_of)(const float *values, uint32_t largest) {
    for (int i = 0; i < UNIT; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        largest = (bits & 0x7fffffffu) > largest ? bits & 0x7fffffffu : largest;
    }
    return largest;
}

#ifdef ADD_BYTES
/* Whether codes of a format are multiplied by words. */
#ifdef ADD_WORDS
INLINE int NAME(is_wide)(int format) { return largest_code(format) > 127; }
#else
INLINE int NAME(is_wide)(int format) { return (void)format, 0; }
#endif

/* Whether they are multiplied with a sign. */
#if defined(ADD_WORDS) || defined(BYTES_HAVE_SIGNS)
INLINE int NAME(is_signed)(int format) { return largest_code(format) > 127; }
#else
INLINE int NAME(is_signed)(int format) { return (void)format, 0; }
#endif

/* Numbers as whole ones less than 2^22, times the result. `largest`: the bits of the largest absolute number of all that
 * share a scale. The loops here are simple so that compilers vectorise them.
 */
INLINE float NAME(whole_numbers)(uint32_t largest, const float *values, int32_t *numbers) {
    const uint32_t exponent = largest >> 23 < 30 ? 30 : largest >> 23; /* a largest below 2^-97 counts as that */
    const uint32_t factor_bits = (275 - exponent) << 23;               /* makes the largest less than 2^22 */
    const uint32_t scale_bits = exponent == 255 ? 0x7fc00000u : (exponent - 21) << 23; /* not finite: all NaN */
    float factor, scale, rounded[UNIT];
    memcpy(&factor, &factor_bits, 4);
    memcpy(&scale, &scale_bits, 4);
    for (int i = 0; i < UNIT; i++) rounded[i] = values[i] * factor + 0x1.8p23f; /* rounds to a whole number */
    memcpy(numbers, rounded, sizeof rounded);
    for (int i = 0; i < UNIT; i++) numbers[i] -= 0x4b400000;
    return scale;
}

/* The lowest digit of each, which is taken from it. */
INLINE void NAME(take_digit)(int32_t *numbers, int8_t *digits) {
    for (int i = 0; i < UNIT; i++) {
        const int32_t digit = ((numbers[i] & 255) ^ 128) - 128;
        digits[i] = (int8_t)digit;
        numbers[i] = (numbers[i] - digit) >> 8;
    }
}

/* Writes a unit's inputs, which are in the order of their places, as fixed point. */
INLINE void NAME(fix)(int format, uint32_t largest, const float *values, unit *to) {
    const int num = UNIT / scales_of_unit(format);
    int32_t numbers[UNIT];
    const float scale = NAME(whole_numbers)(largest, values, numbers);
    if (NAME(is_wide)(format)) {
        for (int i = 0; i < UNIT; i++) { /* of four, those at even places first */
            const int32_t digit = ((numbers[i] & 4095) ^ 2048) - 2048;
            const int place = i / 4 * 4 + i % 2 * 2 + i % 4 / 2;
            to->wide.digits[0][place] = (int16_t)digit;
            to->wide.digits[1][place] = (int16_t)((numbers[i] - digit) >> 12);
        }
        to->wide.scale = scale;
        return;
    }
    for (int d = 0; d < 3; d++) {
        int8_t digits[UNIT];
        NAME(take_digit)(numbers, digits);
        memcpy(to->fixed.digits[d], digits, sizeof digits);
        for (int first = 0; first < UNIT; first += num) {
            int32_t sum = 0;
            for (int i = first; i < first + num; i++) sum += digits[i];
            to->fixed.start[first / num][d] = NAME(is_signed)(format) ? 0 : -code_offset(format) * sum;
        }
    }
    to->fixed.scale = scale;
}

/* A row of inputs for BLOCK_FORMATS. */
static void NAME(prepare_blocks)(int dtype, const char *x, int64_t width, unit *out) {
    const int64_t itemsize = NAME(itemsize)(dtype);
    for (; width; width -= MAX_GROUP, x += MAX_GROUP * itemsize, out += MAX_GROUP / UNIT) {
        block_inputs *to = (block_inputs *)out;
        float values[MAX_GROUP / UNIT][UNIT];
        uint32_t largest = 0;
        NAME(widen)(dtype, x, MAX_GROUP, values[0]);
        for (int j = 0; j < MAX_GROUP / UNIT; j++) largest = NAME(largest_of)(values[j], largest);
        for (int j = 0; j < MAX_GROUP / UNIT; j++) {
            int32_t numbers[UNIT];
            to->scale = NAME(whole_numbers)(largest, values[j], numbers);
            for (int d = 0; d < 3; d++) {
                int8_t *digits = to->digits[d] + j * UNIT;
                NAME(take_digit)(numbers, digits);
                for (int half = 0; half < 2; half++) {
                    int sum = 0;
                    for (int i = half * 16; i < half * 16 + 16; i++) sum += digits[i];
                    to->sums[d][2 * j + half] = (int16_t)sum;
                }
            }
        }
    }
}
#endif

/* A row of inputs as bfloat16 units, for `mxfp4_pairs` and its like. */
INLINE void NAME(prepare_pairs)(int format, const char *x, int64_t width, unit *out) {
    int places[UNIT];
    for (int i = 0; i < UNIT; i++) places[i] = place_in_pairs(format, i);
    for (; width; width -= UNIT, x += 2 * UNIT, out++)
        for (int i = 0; i < UNIT; i++) memcpy(out->halves + places[i], x + 2 * i, 2);
}

/* A row of inputs as units in fixed point or float32, for tiles of a format. */
INLINE void NAME(prepare_units)(int format, int dtype, const char *x, int64_t width, unit *out) {
    const int num = format >= INT4_G32 ? tile_group(format) / UNIT : 1; /* that share a scale */
    for (int64_t j = 0; j < width; j += num * UNIT, out += num) {
        float values[MAX_GROUP / UNIT][UNIT];
        uint32_t largest = 0;
        for (int k = 0; k < num; k++) {
            for (int i = 0; i < UNIT; i++)
                values[k][place_in_unit(format, i)] =
                    NAME(value)(dtype, x + (j + k * UNIT + i) * NAME(itemsize)(dtype));
            out[k].sums[0] = out[k].sums[1] = 0;
            for (int i = 0; i < UNIT; i++) out[k].sums[i * scales_of_unit(format) / UNIT] += values[k][i];
            largest = NAME(largest_of)(values[k], largest);
        }
        for (int k = 0; k < num; k++) {
#ifdef ADD_BYTES
            if (!has_weights(format) && !is_rounded(format, dtype)) {
                NAME(fix)(format, largest, values[k], out + k);
                continue;
            }
#endif
            memcpy(out[k].x, values[k], sizeof values[k]);
        }
    }
}

#define TOGETHER (V == 16 ? 1 : 2) /* vectors of outputs that are multiplied with an input once it is loaded */

#define UNROLLED _Pragma("GCC unroll 8") /* else words lie in memory */

/* Words of a unit, from those of vector w of outputs on: once for all tokens, or for a single token as they are multiplied,
 * since registers do not hold all.
 */
typedef struct {
    const char *p;
    int w, j;
    vu words[2][8];
} NAME(unit_codes);

INLINE void NAME(read_codes)(int format, NAME(unit_codes) *codes, int i) {
    for (int v = 0; v < TOGETHER; v++) {
        NAME(codes)(format, codes->p, codes->w + v, codes->j, i, codes->words[v] + 2 * i);
#ifdef ADD_BYTES
        for (int k = 2 * i; k < 2 * i + 2 && NAME(is_signed)(format); k++) codes->words[v][k] ^= 0x80808080u;
#endif
    }
}

/* For TOGETHER vectors of outputs and N tokens: dots[v][t] = the sum of products over `num` words from word `first` on. */
#ifdef ADD_BYTES
INLINE void NAME(dot_whole)(int format, NAME(unit_codes) *codes, int first, int num, int N, const unit *x, int64_t x_stride,
                            vf (*dots)[MAX_TOKENS]) {
    const int most = MOST_ADDED(largest_code(format)), step = most < num ? most : num;
    for (int t = 0; t < N; t++) {
        const unit *one = x + t * x_stride;
        vi sums[2][3];
        for (int d = 0; d < 3; d++) sums[0][d] = sums[1][d] = (vi){0} + one->fixed.start[first != 0][d];
        UNROLLED for (int begin = first; begin < first + num; begin += step) {
            vi added[2][3] = {0};
            UNROLLED for (int k = begin; k < begin + step; k++) {
                if (N == 1 && k % 2 == 0) NAME(read_codes)(format, codes, k / 2);
                for (int d = 0; d < 3; d++) {
                    uint32_t four;
                    memcpy(&four, one->fixed.digits[d] + 4 * k, 4);
                    for (int v = 0; v < TOGETHER; v++) {
                        added[v][d] = ADD_BYTES(added[v][d], codes->words[v][k], (vu){0} + four);
                        KEEP(added[v][d]); /* else all products are made, and wait in memory, before they are added */
                    }
                }
            }
            for (int v = 0; v < TOGETHER; v++)
                for (int d = 0; d < 3; d++) sums[v][d] += ADDED_BYTES(added[v][d]);
        }
        for (int v = 0; v < TOGETHER; v++) {
            const vf low = __builtin_convertvector((sums[v][1] << 8) + sums[v][0], vf);
            const vf high = __builtin_convertvector(sums[v][2], vf);
            dots[v][t] = (high * 65536.f + low) * one->fixed.scale;
        }
    }
}
#endif

#ifdef ADD_WORDS
/* The same of codes of 8 bits with a sign, all words. */
INLINE void NAME(dot_wide)(int format, NAME(unit_codes) *codes, int N, const unit *x, int64_t x_stride, vf (*dots)[MAX_TOKENS]) {
    for (int t = 0; t < N; t++) {
        const unit *one = x + t * x_stride;
        vi sums[2][2] = {0};
        UNROLLED for (int k = 0; k < 8; k++) {
            if (N == 1 && k % 2 == 0) NAME(read_codes)(format, codes, k / 2);
            for (int d = 0; d < 2; d++) {
                uint32_t even, odd;
                memcpy(&even, one->wide.digits[d] + 4 * k, 4);
                memcpy(&odd, one->wide.digits[d] + 4 * k + 2, 4);
                for (int v = 0; v < TOGETHER; v++) {
                    sums[v][d] = ADD_WORDS(sums[v][d], codes->words[v][k], (vu){0} + even, (vu){0} + odd);
                    KEEP(sums[v][d]);
                }
            }
        }
        for (int v = 0; v < TOGETHER; v++) {
            const vf low = __builtin_convertvector(sums[v][0], vf), high = __builtin_convertvector(sums[v][1], vf);
            dots[v][t] = (high * 4096.f + low) * one->wide.scale;
        }
    }
}
#endif

INLINE void NAME(dot_codes)(int format, NAME(unit_codes) *codes, int first, int num, int N, const unit *x, int64_t x_stride,
                            vf (*dots)[MAX_TOKENS]) {
#ifdef ADD_WORDS
    if (NAME(is_wide)(format)) {
        NAME(dot_wide)(format, codes, N, x, x_stride, dots);
        return;
    }
#endif
#ifdef ADD_BYTES
    NAME(dot_whole)(format, codes, first, num, N, x, x_stride, dots);
#else
    const int A = N == 1 ? 4 : N == 2 ? 2 : 1; /* independent sums, because an addition waits for the one before it */
    for (int v = 0; v < TOGETHER; v++) {
        vf a[MAX_TOKENS][4];
        for (int t = 0; t < N; t++)
            for (int k = 0; k < A; k++) a[t][k] = (vf){0};
        UNROLLED for (int k = first; k < first + num; k++) {
            if (N == 1 && v == 0 && k % 2 == 0) NAME(read_codes)(format, codes, k / 2);
            for (int b = 0; b < 4; b++) {
                const vf value = NAME(code_values)(code_offset(format), codes->words[v][k], b);
                for (int t = 0; t < N; t++) a[t][b % A] += value * x[t * x_stride].x[4 * k + b];
            }
        }
        for (int t = 0; t < N; t++) {
            for (int k = 1; k < A; k++) a[t][0] += a[t][k];
            dots[v][t] = a[t][0] * 0x1p-24f;
        }
    }
#endif
}

INLINE void NAME(codes_add)(int format, int N, const char *p, const unit *x, int64_t x_stride, float *sums,
                            int64_t stride) {
    const int num = 8 / scales_of_unit(format);
    const int64_t unit_nbytes = tile_nbytes(format) / (tile_group(format) / UNIT);
    for (int j = 0; j < tile_group(format) / UNIT; j++) {
        NAME(fetch)(p + AHEAD + j * unit_nbytes, unit_nbytes);
        for (int w = 0; w < W; w += TOGETHER) {
            NAME(unit_codes) codes = {.p = p, .w = w, .j = j};
            for (int i = 0; i < 4 && N > 1; i++) NAME(read_codes)(format, &codes, i);
            UNROLLED for (int first = 0; first < 8; first += num) {
                vf dots[2][MAX_TOKENS];
                NAME(dot_codes)(format, &codes, first, num, N, x + j, x_stride, dots);
                for (int v = 0; v < TOGETHER; v++) {
                    vf minimum;
                    const vf scale = NAME(code_scale)(format, p, w + v, j, first / num, &minimum);
                    for (int t = 0; t < N; t++) {
                        vf *sum = (vf *)(sums + t * stride) + w + v;
                        *sum += dots[v][t] * scale;
                        if (has_minimum(format)) *sum -= minimum * x[t * x_stride + j].sums[first / num];
                    }
                }
            }
        }
    }
}

/* As codes_add, for weights that are rounded. */
INLINE void NAME(rounded_add)(int dtype, int N, const char *p, const unit *x, int64_t x_stride, float *sums, int64_t stride) {
    for (int w = 0; w < W; w++) {
        vf a[MAX_TOKENS][2];
        for (int t = 0; t < N; t++) a[t][0] = a[t][1] = (vf){0};
        for (int part = 0; part < 4; part++) {
            const vf scale = NAME(nvfp4_scale)(p, w, part);
            for (int word = part * 2; word < part * 2 + 2; word++) {
                const char *q = p + word * 64 + w * V * 4;
                if (w == 0) NAME(fetch)(q + AHEAD, 1);
                UNROLLED for (int i = 0; i < 8; i++) {
                    const vf weights = NAME(rounded)(dtype, NAME(e2m1)(*(const vu *)q >> 4 * i) * scale);
                    for (int t = 0; t < N; t++)
                        a[t][i % 2] += weights * x[t * x_stride + word / 4].x[word % 4 * 8 + i % 2 * 4 + i / 2];
                }
            }
        }
        for (int t = 0; t < N; t++) ((vf *)(sums + t * stride))[w] += a[t][0] + a[t][1];
    }
}
#undef TOGETHER
#undef UNROLLED

#ifdef PAIRS_LABEL
/* As tiles_add of tiles_body.h, for MXFP4 and inputs in bfloat16. */
INLINE void NAME(mxfp4_pairs)(int format, int N, int64_t num, const char *p, const unit *x, int64_t x_stride, int64_t x_step,
                              float *sums, int64_t stride, int64_t step) {
    const __m512i table = TWICE(_mm256_loadu_si256((const __m256i *)E2M1_HALVES));
    for (; num; num--, p += tile_nbytes(format), x += x_step, sums += step) {
        NAME(fetch)(p + AHEAD, tile_nbytes(format));
        __m512 a[MAX_TOKENS][4];
        for (int t = 0; t < N; t++)
            for (int k = 0; k < 4; k++) a[t][k] = _mm512_setzero_ps();
        for (int word = 0; word < 4; word++) {
            __m512i codes = _mm512_loadu_si512(p + word * 64);
            KEEP(codes); /* else the compiler loads it four times */
            for (int k = 0; k < 4; k++) {
                const __m512i weights = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * k), table);
                for (int t = 0; t < N; t++)
                    a[t][k] = ADD_PAIRS(a[t][k], weights, x[t * x_stride].halves + word * 8 + k * 2);
            }
        }
        vf minimum;
        const vf scale = NAME(code_scale)(format, p, 0, 0, 0, &minimum);
        for (int t = 0; t < N; t++)
            *(vf *)(sums + t * stride) += ((vf)a[t][0] + (vf)a[t][1] + ((vf)a[t][2] + (vf)a[t][3])) * scale;
    }
}

/* The same for NVFP4: a table has the rounded weights of the 8 mantissas that a scale may have, without signs, by mantissa
 * and code. Sums of 16 inputs are scaled by the rest, a power of two.
 */
INLINE void NAME(nvfp4_pairs)(int format, int N, int64_t num, const char *p, const unit *x, int64_t x_stride, int64_t x_step,
                              float *sums, int64_t stride, int64_t step) {
    const __m512i seven = _mm512_set1_epi16(7), sign = _mm512_set1_epi16(INT16_MIN);
    const __m512i twice = (__m512i)((vu){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001u | 0x80008000u);
    __m512i table[2] = {seven, seven};
    for (float last = 0; num; num--, p += tile_nbytes(format), x += x_step, sums += step) {
        NAME(fetch)(p + AHEAD + 512, 68);
        float whole;
        memcpy(&whole, p + 576, 4);
        if (whole != last) {
            float weights[64];
            for (int i = 0; i < 64; i++) {
                const float mantissa = 1 + (float)(i / 8) / 8;
                weights[i] = (whole < 0 ? mantissa / -whole : mantissa * whole) * E2M1_VALUES[i % 8];
            }
            for (int i = 0; i < 2; i++) {
                const __m512 *from = (const __m512 *)(weights + i * 32);
                table[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 1), _mm512_loadu_ps(from));
            }
            last = whole;
        }
        for (int part = 0; part < 4; part++) {
            const __m512i scales = _mm512_shuffle_epi8(REPEAT(p + 512 + part * 16), twice); /* in both halves of a word */
            const __mmask16 is_small = _mm512_testn_epi32_mask(scales, _mm512_set1_epi32(0xf0));
            const vu powers = (vu)LOOKUP_IN(*(const vf *)FP8_POWERS, _mm512_srli_epi32(scales, 4));
            const __m512 usual = (__m512)(powers | ((vu)scales << 28 & 0x80000000u));
            const vf power = (vf)_mm512_mask_permutexvar_ps(usual, is_small, scales, *(const __m512_u *)FP8_SMALL_POWERS);
            const __m512i mantissas = _mm512_mask_permutexvar_epi32(
                _mm512_slli_epi32(scales, 3), is_small, scales, *(const __m512i_u *)FP8_SMALL_MANTISSAS);
            __m512 a[MAX_TOKENS][4];
            for (int t = 0; t < N; t++)
                for (int k = 0; k < 4; k++) a[t][k] = _mm512_setzero_ps();
            for (int i = 0; i < 2; i++) {
                NAME(fetch)(p + AHEAD + part * 128 + i * 64, 1);
                __m512i codes = _mm512_loadu_si512(p + part * 128 + i * 64);
                KEEP(codes);
                for (int k = 0; k < 4; k++) { /* mantissas | codes & 7, then table | codes & 8 */
                    const __m512i shifted = _mm512_srli_epi16(codes, 4 * k);
                    const __m512i place = _mm512_ternarylogic_epi32(shifted, seven, mantissas, 0xea);
                    const __m512i sizes = _mm512_permutex2var_epi16(table[0], place, table[1]);
                    const __m512i weights =
                        _mm512_ternarylogic_epi32(sizes, _mm512_slli_epi16(codes, 12 - 4 * k), sign, 0xf8);
                    for (int t = 0; t < N; t++)
                        a[t][k] = ADD_PAIRS(a[t][k], weights, x[t * x_stride + part / 2].halves + part % 2 * 16 + i * 8 + k * 2);
                }
            }
            for (int t = 0; t < N; t++)
                *(vf *)(sums + t * stride) += ((vf)a[t][0] + (vf)a[t][1] + ((vf)a[t][2] + (vf)a[t][3])) * power;
        }
    }
}
#endif

INLINE void NAME(codes_decode)(int format, const char *p, float (*out)[16]) {
    const int num = 8 / scales_of_unit(format);
    for (int j = 0; j < tile_group(format) / UNIT; j++)
        for (int w = 0; w < W; w++) {
            vu codes[8];
            for (int i = 0; i < 4; i++) NAME(codes)(format, p, w, j, i, codes + 2 * i);
            for (int k = 0; k < 8; k++) {
                vf minimum;
                const vf scale = NAME(code_scale)(format, p, w, j, k / num, &minimum);
                for (int b = 0; b < 4; b++) {
                    const vf value = NAME(code_values)(code_offset(format), codes[k], b);
                    const int i = format == TQ1_0 ? 4 * k + b : k / 2 * 8 + k % 2 + 2 * b;
                    vf *weights = (vf *)(out[j * UNIT + i] + w * V);
                    if (format == MXFP4 || format == NVFP4) *weights = value * 0x1p-24f * scale; /* scale * 2^-24 may underflow */
                    else *weights = value * (scale * 0x1p-24f) - minimum;
                }
            }
        }
}
