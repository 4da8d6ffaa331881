/* GGUF's types whose blocks stay as they are: a tile is the blocks of 16 outputs, one after the other, 256 inputs each.
 * For each type there is a function that reads a block: which rows of a grid its numbers are, which of them are turned
 * around, and whole scales of each 16. tiles_body.h makes vectors of the numbers.
 *
 * Numbers are kept with BLOCK_OFFSET added, 2 to 126. Factor, scales and numbers multiply exactly in float32. The reference
 * is the package gguf (quants.py), whose grids are used.
 */

/* A block as it is read. */
typedef struct {
    const uint8_t *block;
    uint8_t signs[32];   /* a bit for each number: it is less than 0; of IQ1, an eighth less instead of more */
    int16_t scales[16];  /* of each 16 numbers */
    uint16_t half;       /* float16: `block_factor` of it is what scales are multiples of */
} block_parts;

INLINE float block_factor(int format) {
    return format == IQ3_XXS ? .25f : format == IQ3_S ? 1.f : .125f;
}

enum { BLOCK_OFFSET = 64 };

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

INLINE uint64_t eight_at(const void *p) {
    uint64_t numbers;
    memcpy(&numbers, p, 8);
    return numbers;
}

/* Vectors of a word for each of eight units, of a long for each of four, and of what these are read from. */
typedef uint32_t units_8 __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint64_t units_4 __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint8_t bytes_8 __attribute__((vector_size(8), aligned(1), may_alias));
typedef uint16_t pairs_8 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t pairs_4 __attribute__((vector_size(8), aligned(1), may_alias));
typedef uint8_t bytes_16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t pairs_16 __attribute__((vector_size(32), aligned(1), may_alias));

#ifdef __clang__
#define ODD_LANES(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#else
#define ODD_LANES(a, b) __builtin_shuffle(a, b, (units_8){1, 3, 5, 7, 9, 11, 13, 15})
#endif
#define WIDE(from, to, p) __builtin_convertvector(*(const from *)(p), to)
#define TWO_TIMES(numbers) ((numbers) | (numbers) << 16)

/* Words of 28 bits of signs, 7 for each 8 numbers, of which an eighth makes an even number, and a scale above them. */
INLINE void read_signs(const units_8 *words, block_parts *to) {
    const units_8 w = *words;
    const units_8 sevens = (w & 0x7f) | (w << 1 & 0x7f00) | (w << 2 & 0x7f0000) | (w << 3 & 0x7f000000);
    const units_8 four = sevens ^ sevens >> 4, two = four ^ four >> 2;
    *(units_8 *)to->signs = sevens | ((two ^ two >> 1) & 0x01010101) << 7;
    *(units_8 *)to->scales = TWO_TIMES(w >> 27 | 1);
}

/* 2 s + 1 for 16 scales s of 4 bits. */
INLINE void read_nibbles(const uint8_t *bytes, block_parts *to) {
    const units_8 pairs = WIDE(bytes_8, units_8, bytes);
    *(units_8 *)to->scales = (pairs << 1 & 0x1e) | (pairs << 13 & 0x1e0000) | 0x00010001;
}

#define READ(f) INLINE void f##_read(const uint8_t *block, block_parts *to)

READ(iq2_xxs) {
    const units_8 words = ODD_LANES(*(const units_8 *)(block + 2), *(const units_8 *)(block + 34));
    read_signs(&words, to);
    to->half = (uint16_t)pair_at(block);
}

READ(iq2_xs) {
    for (int i = 0; i < 32; i += 16) {
        const pairs_16 pairs = *(const pairs_16 *)(block + 2 + 2 * i), sevens = pairs >> 9;
        const pairs_16 four = sevens ^ sevens >> 4, two = four ^ four >> 2;
        *(bytes_16 *)(to->signs + i) = __builtin_convertvector(sevens | (two ^ two >> 1) << 7, bytes_16);
    }
    read_nibbles(block + 66, to);
    to->half = (uint16_t)pair_at(block);
}

READ(iq2_s) {
    memcpy(to->signs, block + 34, 32);
    read_nibbles(block + 74, to);
    to->half = (uint16_t)pair_at(block);
}

READ(iq3_xxs) {
    read_signs((const units_8 *)(block + 66), to);
    to->half = (uint16_t)pair_at(block);
}

READ(iq3_s) {
    memcpy(to->signs, block + 74, 32);
    const units_8 nibbles = ((units_8){0} + word_at(block + 106)) >> (units_8){0, 4, 8, 12, 16, 20, 24, 28};
    *(units_8 *)to->scales = TWO_TIMES((nibbles << 1 & 0x1e) | 1);
    to->half = (uint16_t)pair_at(block);
}

READ(iq1_s) {
    const units_8 high = WIDE(pairs_8, units_8, block + 34);
    *(units_8 *)to->signs = -(high >> 15);
    *(units_8 *)to->scales = TWO_TIMES((high >> 11 & 14) | 1);
    to->half = (uint16_t)pair_at(block);
}

READ(iq1_m) {
    const uint8_t *packed = block + 48; /* of 16 bits: 4 of the block's scale, then 4 scales of 3 */
    to->half = (uint16_t)(packed[1] >> 4 | (packed[3] & 0xf0) | (packed[5] & 0xf0) << 4 | (packed[7] & 0xf0) << 8);
    const units_8 high = WIDE(pairs_8, units_8, block + 32);
    const units_4 scales = WIDE(pairs_4, units_4, packed);
    const units_8 less = (high >> 3 & 1) | (high << 1 & 0x100) | (high << 5 & 0x10000) | (high << 9 & 0x1000000);
    *(units_8 *)to->signs = (less << 8) - less;
    *(units_4 *)to->scales = (scales << 1 & 0xe) | (scales << 14 & 0xe0000) | (scales << 27 & 0xe00000000) |
                             (scales << 40 & 0xe000000000000) | 0x0001000100010001;
}
#undef READ
#undef ODD_LANES
#undef WIDE
#undef TWO_TIMES

/* Which row of the grid numbers 8 i to 8 i + 7 are, of IQ3 4 i to 4 i + 3. */
INLINE uint32_t row_at(int format, const uint8_t *block, int i) {
    switch (format) {
    case IQ2_XXS: return block[2 + i / 4 * 8 + i % 4];
    case IQ2_XS: return pair_at(block + 2 + 2 * i) & 511;
    case IQ2_S: return block[2 + i] | (block[66 + i / 4] << (8 - i % 4 * 2) & 0x300u);
    case IQ3_S: return block[2 + i] | (block[66 + i / 8] << (8 - i % 8) & 0x100u);
    case IQ1_S: return block[2 + i] | (pair_at(block + 34 + i / 4 * 2) >> i % 4 * 3 & 7) << 8;
    case IQ1_M: return block[i] | (block[32 + i / 2] << (8 - i % 2 * 4) & 0x700u);
    default: return block[2 + i]; /* IQ3_XXS */
    }
}
