/* GGUF's types whose blocks stay as they are: a tile is the blocks of 16 outputs, one after the other. For each type there
 * is a function that decodes a unit of a block, UNIT inputs in their order: whole numbers of -62 to 62, and a scale of each
 * half. tiles_body.h multiplies a block of an output once it lies unpacked in the first cache.
 *
 * Scales times numbers are exact in float32. The reference is the package gguf (quants.py), whose grids are used.
 */

/* Grids of 4 or 8 neighbouring numbers, and for IQ4_NL and IQ4_XS the 16 values of a code, more by 128. */
static struct {
    int8_t iq2_xxs[256][8], iq2_xs[512][8], iq2_s[1024][8], iq3_xxs[256][4], iq3_s[512][4], iq1_s[2048][8];
    uint8_t iq4_nl[16];
} GRIDS;

/* A float16's value, where the processor cannot convert it. */
INLINE float half_number(const void *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f;
    memcpy(&bits, &value, 4);
    if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
    bits |= (uint32_t)(half & 0x8000) << 16;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t pair_at(const uint8_t *p) { return (uint32_t)(p[0] | p[1] << 8); }

INLINE uint32_t word_at(const uint8_t *p) { return pair_at(p) | pair_at(p + 2) << 16; }

/* Eight numbers are the bytes of a word. */
#define EACH_BYTE(byte) (0x0101010101010101u * (byte))

INLINE void add_to_each(int is_less, uint64_t numbers, int8_t *to) { /* of small numbers, one more or less */
    numbers ^= EACH_BYTE(128);
    numbers = (is_less ? numbers - EACH_BYTE(1) : numbers + EACH_BYTE(1)) ^ EACH_BYTE(128);
    memcpy(to, &numbers, 8);
}

/* Of eight bits, or of seven and as many as make an even number: a byte of ones for each bit. */
static uint64_t SIGNS[256], EVEN_SIGNS[128];

static __attribute__((constructor)) void signs_begin(void) {
    for (uint32_t i = 0; i < 256; i++)
        for (int k = 0; k < 8; k++) SIGNS[i] |= i >> k & 1 ? (uint64_t)255 << 8 * k : 0;
    for (uint32_t i = 0; i < 128; i++) EVEN_SIGNS[i] = SIGNS[i | (uint32_t)__builtin_parity(i) << 7];
}

/* Eight numbers of which none is 0, negated where `signs` has ones. */
INLINE void put_signed(uint64_t numbers, uint64_t signs, int8_t *to) {
    numbers = (numbers ^ signs) + (signs & EACH_BYTE(1));
    memcpy(to, &numbers, 8);
}

INLINE uint64_t eight_at(const void *p) {
    uint64_t numbers;
    memcpy(&numbers, p, 8);
    return numbers;
}

INLINE uint64_t fours_at(const int8_t *first, const int8_t *second) {
    uint32_t numbers[2];
    memcpy(numbers, first, 4);
    memcpy(numbers + 1, second, 4);
    return numbers[0] | (uint64_t)numbers[1] << 32;
}

/* A grid's numbers, each more or less by an eighth, times 8. */
INLINE void put_shifted(const int8_t *grid, int is_less, int8_t *to) {
    add_to_each(is_less, eight_at(grid) << 3 & EACH_BYTE(0xf8), to);
}

/* numbers[UNIT] and scales[2] of unit j of a block. */
#define UNIT_OF(f) INLINE void f##_unit(const uint8_t *block, int j, int8_t *numbers, float *scales)

UNIT_OF(iq2_xxs) {
    const uint8_t *places = block + 2 + j * 8;
    const uint32_t signs = word_at(places + 4);
    for (int i = 0; i < 4; i++) put_signed(eight_at(GRIDS.iq2_xxs[places[i]]), EVEN_SIGNS[signs >> 7 * i & 127], numbers + 8 * i);
    scales[0] = scales[1] = half_number(block) * (.5f + (float)(signs >> 28)) * .25f;
}

UNIT_OF(iq2_xs) {
    for (int i = 0; i < 4; i++) {
        const uint32_t place = pair_at(block + 2 + j * 8 + i * 2);
        put_signed(eight_at(GRIDS.iq2_xs[place & 511]), EVEN_SIGNS[place >> 9 & 127], numbers + 8 * i);
    }
    for (int i = 0; i < 2; i++) scales[i] = half_number(block) * (.5f + (float)(block[66 + j] >> 4 * i & 15)) * .25f;
}

UNIT_OF(iq2_s) {
    for (int i = 0; i < 4; i++) {
        const int place = block[2 + j * 4 + i] | (block[66 + j] >> 2 * i & 3) << 8;
        put_signed(eight_at(GRIDS.iq2_s[place]), SIGNS[block[34 + j * 4 + i]], numbers + 8 * i);
    }
    for (int i = 0; i < 2; i++) scales[i] = half_number(block) * (.5f + (float)(block[74 + j] >> 4 * i & 15)) * .25f;
}

UNIT_OF(iq3_xxs) {
    const uint8_t *places = block + 2 + j * 8;
    const uint32_t signs = word_at(block + 66 + j * 4);
    for (int i = 0; i < 4; i++)
        put_signed(fours_at(GRIDS.iq3_xxs[places[2 * i]], GRIDS.iq3_xxs[places[2 * i + 1]]), EVEN_SIGNS[signs >> 7 * i & 127],
                   numbers + 8 * i);
    scales[0] = scales[1] = half_number(block) * (.5f + (float)(signs >> 28)) * .5f;
}

UNIT_OF(iq3_s) {
    const uint8_t *places = block + 2 + j * 8;
    const int high = block[66 + j] << 8;
    for (int i = 0; i < 4; i++)
        put_signed(fours_at(GRIDS.iq3_s[places[2 * i] | (high >> 2 * i & 256)],
                            GRIDS.iq3_s[places[2 * i + 1] | (high >> (2 * i + 1) & 256)]),
                   SIGNS[block[74 + j * 4 + i]], numbers + 8 * i);
    scales[0] = scales[1] = half_number(block) * (float)(1 + 2 * (block[106 + j / 2] >> j % 2 * 4 & 15));
}

UNIT_OF(iq1_s) {
    const uint32_t high = pair_at(block + 34 + j * 2);
    for (int i = 0; i < 4; i++)
        put_shifted(GRIDS.iq1_s[block[2 + j * 4 + i] | (high >> 3 * i & 7) << 8], high >> 15 != 0, numbers + 8 * i);
    scales[0] = scales[1] = half_number(block) * (float)(2 * (high >> 12 & 7) + 1) * .125f;
}

UNIT_OF(iq1_m) {
    const uint8_t *packed = block + 48; /* of 16 bits: 4 of the block's scale, then 4 scales of 3 */
    const uint16_t scale = (uint16_t)(packed[1] >> 4 | (packed[3] & 0xf0) | (packed[5] & 0xf0) << 4 | (packed[7] & 0xf0) << 8);
    const float factor = half_number(&scale) * .125f;
    for (int i = 0; i < 4; i++) {
        const int high = block[32 + j * 2 + i / 2] >> i % 2 * 4;
        put_shifted(GRIDS.iq1_s[block[j * 4 + i] | (high & 7) << 8], high >> 3 & 1, numbers + 8 * i);
    }
    for (int i = 0; i < 2; i++) {
        const uint32_t own = pair_at(packed + j / 2 * 2) >> (j % 2 * 2 + i) * 3 & 7;
        scales[i] = factor * (float)(2 * own + 1);
    }
}

/* Digit `place` of `num` numbers to base 3, of which a byte has five, less 1. */
INLINE void put_digits(const uint8_t *bytes, int place, int num, int8_t *to) {
    static const uint8_t POWERS[] = {1, 3, 9, 27, 81};
    for (int i = 0; i < num; i += 8) { /* every second byte has 16 bits to be multiplied in */
        const uint64_t eight = num < 8 ? word_at(bytes) : eight_at(bytes + i);
        uint64_t digits = 0;
        for (int odd = 0; odd < 2; odd++) {
            const uint64_t moved = (eight >> 8 * odd & 0x00ff00ff00ff00ffu) * POWERS[place] & 0x00ff00ff00ff00ffu;
            digits |= (moved * 3 >> 8 & 0x0003000300030003u) << 8 * odd;
        }
        int8_t less[8];
        add_to_each(1, digits, less);
        memcpy(to + i, less, num < 8 ? 4 : 8);
    }
}

UNIT_OF(tq1_0) {
    if (j < 5) put_digits(block, j, 32, numbers);
    for (int i = 0; i < 2 && j >= 5 && j + i < 8; i++) put_digits(block + 32, (j - 5) * 2 + i, 16, numbers + 16 * i);
    for (int i = 0; i < 4 && j == 7; i++) put_digits(block + 48, i, 4, numbers + 16 + 4 * i);
    scales[0] = scales[1] = half_number(block + 52);
}

UNIT_OF(tq2_0) {
    for (int i = 0; i < UNIT; i += 8)
        add_to_each(1, eight_at(block + j / 4 * 32 + i) >> j % 4 * 2 & EACH_BYTE(3), numbers + i);
    scales[0] = scales[1] = half_number(block + 64);
}

/* E2M1 numbers, doubled, with half a scale in E4M3 for each 16. */
UNIT_OF(nvfp4) {
    static const int8_t VALUES[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    for (int i = 0; i < 2; i++) {
        const uint8_t *codes = block + 4 + (j * 2 + i) * 8, byte = block[j * 2 + i];
        const uint32_t exponent = byte >> 3 & 15, bits = (exponent + 116 + (exponent == 0)) << 23;
        for (int k = 0; k < 8; k++) numbers[i * 16 + k] = VALUES[codes[k] & 15], numbers[i * 16 + 8 + k] = VALUES[codes[k] >> 4];
        memcpy(scales + i, &bits, 4);
        scales[i] *= byte == 0x7f ? 0 : (float)((byte & 7) + (exponent ? 8 : 0));
    }
}
#undef UNIT_OF
#undef EACH_BYTE
