/* GGUF's block types (formats/gguf.py has what a tile is made of). Included by tiles_body.h, once an instruction set. */

#ifndef EXPERTLY_GGUF
#define EXPERTLY_GGUF
static const float NIBBLES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const float NIBBLES_8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const int8_t BYTES_8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const float NIBBLES_32[16] = {-32, -31, -30, -29, -28, -27, -26, -25, -24, -23, -22, -21, -20, -19, -18, -17};
static const float BIT_16[16] = {0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16};
static const float BITS_16[16] = {0, 16, 32, 48, 0, 16, 32, 48, 0, 16, 32, 48, 0, 16, 32, 48};

/* Of a float16, where the processor has no instruction for it. */
INLINE float half_number(const char *p) {
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
#endif

typedef int8_t NAME(vc) __attribute__((vector_size(V), aligned(1), may_alias));

INLINE vf NAME(halves)(const char *p) {
    vf values;
#if HAS_HALF
    LOAD_HALF(p, values);
#else
    for (int i = 0; i < V; i++) values[i] = half_number(p + 2 * i);
#endif
    return values;
}

INLINE vf NAME(int8s)(const char *p) {
    return __builtin_convertvector(__builtin_convertvector(*(const NAME(vc) *)p, vi), vf);
}

/* Codes of 4 bits of 8 inputs for V outputs, over NIBBLE_UNIT, from their words: what `table` has for each, or `bytes`,
 * which is NULL for the codes themselves. Three bytes behind the words are read, too.
 */
#if V == 16
#define NIBBLE_UNIT 1.f
INLINE void NAME(nibbles)(const char *p, const float *table, const int8_t *bytes, vf *values) {
    (void)bytes;
    for (int i = 0; i < 8; i++) {
        vu codes = *(const vu *)(p + i / 2);
        values[i] = LOOKUP(table, i % 2 ? codes >> 4 : codes);
    }
}
#else
#define NIBBLE_UNIT 0x1p-24f
INLINE void NAME(nibbles)(const char *p, const float *table, const int8_t *bytes, vf *values) {
    (void)table;
    const vu codes = *(const vu *)p, top = (vu){0} + 0xff000000u;
    vu even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
    if (bytes != NULL) {
        even = SHUFFLE(bytes, even);
        odd = SHUFFLE(bytes, odd);
    }
    for (int i = 0; i < 8; i++)
        values[i] = __builtin_convertvector((vi)((i % 2 ? odd : even) << (24 - i / 2 * 8) & top), vf);
}
#endif

/* Chains of sums, as one waits for the sum before it. */
#define CHAINS(N) ((N) == 1 ? 4 : (N) == 2 ? 2 : 1)

#define ZERO(a, N)              \
    for (int t = 0; t < N; t++) \
        for (int k = 0; k < CHAINS(N); k++) (a)[t][k] = (vf){0}

/* sums[t][w] += the chains of t, times scale */
#define GATHER(a, N, scale)                                     \
    for (int t = 0; t < N; t++) {                               \
        for (int k = 1; k < CHAINS(N); k++) (a)[t][0] += (a)[t][k]; \
        sums[t][w] += (a)[t][0] * (scale);                      \
    }

/* -- q8_0: 16 codes for every input; 16 scales ------------------------------------------------------------------------- */

INLINE void NAME(q8_0_add)(int dtype, int N, const char *p, const float *const *x, vf (*sums)[W]) {
    (void)dtype;
    for (int w = 0; w < W; w++) {
        vf a[MAX_TOKENS][4];
        ZERO(a, N);
        for (int i = 0; i < 32; i++) {
            const vf value = NAME(int8s)(p + i * 16 + w * V);
            for (int t = 0; t < N; t++) a[t][i % CHAINS(N)] += value * x[t][i];
        }
        const vf scale = NAME(halves)(p + 512 + w * V * 2);
        GATHER(a, N, scale)
    }
}

INLINE void NAME(q8_0_decode)(const char *p, float (*out)[16]) {
    for (int w = 0; w < W; w++) {
        const vf scale = NAME(halves)(p + 512 + w * V * 2);
        for (int i = 0; i < 32; i++) *(vf *)(out[i] + w * V) = NAME(int8s)(p + i * 16 + w * V) * scale;
    }
}

/* -- q4_0: 16 words for every 8 inputs; 16 scales ---------------------------------------------------------------------- */

INLINE void NAME(q4_0_add)(int dtype, int N, const char *p, const float *const *x, vf (*sums)[W]) {
    (void)dtype;
    for (int w = 0; w < W; w++) {
        vf a[MAX_TOKENS][4];
        ZERO(a, N);
        for (int word = 0; word < 4; word++) {
            vf values[8];
            NAME(nibbles)(p + word * 64 + w * V * 4, NIBBLES_8, BYTES_8, values);
            for (int i = 0; i < 8; i++)
                for (int t = 0; t < N; t++) a[t][i % CHAINS(N)] += values[i] * x[t][word * 8 + i];
        }
        const vf scale = NAME(halves)(p + 256 + w * V * 2) * NIBBLE_UNIT;
        GATHER(a, N, scale)
    }
}

INLINE void NAME(q4_0_decode)(const char *p, float (*out)[16]) {
    for (int w = 0; w < W; w++) {
        const vf scale = NAME(halves)(p + 256 + w * V * 2);
        for (int word = 0; word < 4; word++) {
            vf values[8];
            NAME(nibbles)(p + word * 64 + w * V * 4, NIBBLES_8, BYTES_8, values);
            for (int i = 0; i < 8; i++) *(vf *)(out[word * 8 + i] + w * V) = values[i] * NIBBLE_UNIT * scale;
        }
    }
}

/* -- q4_k, q5_k: codes; of q5_k a fifth bit, 16 words for every 32 inputs; scales and minima of 32 inputs, 6 bits in 3
 * words an output; 16 scales, 16 minima of the tile ---------------------------------------------------------------------- */

/* The scale and minimum of 32 inputs, number j of 8, from what begins at p. Products with them and a code are exact. */
INLINE void NAME(scales_k)(const char *p, int w, int j, vf *scale, vf *minimum) {
    const vu low = *(const vu *)(p + w * V * 4), high = *(const vu *)(p + 64 + w * V * 4);
    const vu both = *(const vu *)(p + 128 + w * V * 4);
    const int shift = j % 4 * 8;
    const vu s = j < 4 ? low >> shift & 63u : (both >> shift & 15u) | (low >> (shift + 6) & 3u) << 4;
    const vu m = j < 4 ? high >> shift & 63u : (both >> (shift + 4) & 15u) | (high >> (shift + 6) & 3u) << 4;
    *scale = __builtin_convertvector((vi)s, vf) * NAME(halves)(p + 192 + w * V * 2);
    *minimum = __builtin_convertvector((vi)m, vf) * NAME(halves)(p + 224 + w * V * 2);
}

/* Codes of 8 inputs, over NIBBLE_UNIT: word number `word` of 32. */
INLINE void NAME(codes_k)(int has_fifth, const char *p, int w, int word, vf *values) {
    NAME(nibbles)(p + word * 64 + w * V * 4, NIBBLES, NULL, values);
    if (!has_fifth) return;
    const vu bits = *(const vu *)(p + 2048 + word / 4 * 64 + w * V * 4) >> (word % 4 * 8);
#if V == 16
    for (int i = 0; i < 8; i++) values[i] += LOOKUP(BIT_16, bits >> i);
#else
    for (int i = 0; i < 8; i++) values[i] += __builtin_convertvector((vi)((bits >> i & 1u) << 28), vf);
#endif
}

INLINE void NAME(k_add)(int has_fifth, int N, const char *p, const float *const *x, vf (*sums)[W]) {
    const char *scales = p + (has_fifth ? 2560 : 2048);
    for (int w = 0; w < W; w++) {
        vf a[MAX_TOKENS][4];
        ZERO(a, N);
        for (int j = 0; j < 8; j++) {
            vf scale, minimum;
            NAME(scales_k)(scales, w, j, &scale, &minimum);
            scale *= NIBBLE_UNIT;
            for (int word = j * 4; word < j * 4 + 4; word++) {
                vf values[8];
                NAME(codes_k)(has_fifth, p, w, word, values);
                for (int i = 0; i < 8; i++) {
                    const vf value = values[i] * scale - minimum;
                    for (int t = 0; t < N; t++) a[t][i % CHAINS(N)] += value * x[t][word * 8 + i];
                }
            }
        }
        GATHER(a, N, 1.f)
    }
}

INLINE void NAME(k_decode)(int has_fifth, const char *p, float (*out)[16]) {
    const char *scales = p + (has_fifth ? 2560 : 2048);
    for (int w = 0; w < W; w++)
        for (int word = 0; word < 32; word++) {
            vf scale, minimum, values[8];
            NAME(scales_k)(scales, w, word / 4, &scale, &minimum);
            NAME(codes_k)(has_fifth, p, w, word, values);
            for (int i = 0; i < 8; i++)
                *(vf *)(out[word * 8 + i] + w * V) = values[i] * (scale * NIBBLE_UNIT) - minimum;
        }
}

INLINE void NAME(q4_k_add)(int dtype, int N, const char *p, const float *const *x, vf (*sums)[W]) {
    (void)dtype;
    NAME(k_add)(0, N, p, x, sums);
}

INLINE void NAME(q4_k_decode)(const char *p, float (*out)[16]) { NAME(k_decode)(0, p, out); }

INLINE void NAME(q5_k_add)(int dtype, int N, const char *p, const float *const *x, vf (*sums)[W]) {
    (void)dtype;
    NAME(k_add)(1, N, p, x, sums);
}

INLINE void NAME(q5_k_decode)(const char *p, float (*out)[16]) { NAME(k_decode)(1, p, out); }

/* -- q6_k: the low 4 bits of codes; the others, 16 words for every 16 inputs; 16 scales of 8 bits for every 16 inputs; 16
 * of the tile ------------------------------------------------------------------------------------------------------------ */

/* Codes less 32 of 8 inputs: word number `word` of 32. */
INLINE void NAME(codes_q6)(const char *p, int w, int word, vf *values) {
    const vu bits = *(const vu *)(p + 2048 + word / 2 * 64 + w * V * 4) >> (word % 2 * 16);
#if V == 16
    NAME(nibbles)(p + word * 64, NIBBLES_32, NULL, values);
    for (int i = 0; i < 8; i++) values[i] += LOOKUP(BITS_16, bits >> (2 * i));
#else
    const vu low = *(const vu *)(p + word * 64 + w * V * 4);
    for (int i = 0; i < 8; i++) {
        const vi code = (vi)((low >> (4 * i) & 15u) | (bits >> (2 * i) & 3u) << 4);
        values[i] = __builtin_convertvector(code - 32, vf);
    }
#endif
}

INLINE vf NAME(scale_q6)(const char *p, int w, int word) {
    return NAME(int8s)(p + 3072 + word / 2 * 16 + w * V) * NAME(halves)(p + 3328 + w * V * 2);
}

INLINE void NAME(q6_k_add)(int dtype, int N, const char *p, const float *const *x, vf (*sums)[W]) {
    (void)dtype;
    for (int w = 0; w < W; w++)
        for (int group = 0; group < 16; group++) {
            vf a[MAX_TOKENS][4];
            ZERO(a, N);
            for (int word = group * 2; word < group * 2 + 2; word++) {
                vf values[8];
                NAME(codes_q6)(p, w, word, values);
                for (int i = 0; i < 8; i++)
                    for (int t = 0; t < N; t++) a[t][i % CHAINS(N)] += values[i] * x[t][word * 8 + i];
            }
            const vf scale = NAME(scale_q6)(p, w, group * 2);
            GATHER(a, N, scale)
        }
}

INLINE void NAME(q6_k_decode)(const char *p, float (*out)[16]) {
    for (int w = 0; w < W; w++)
        for (int word = 0; word < 32; word++) {
            vf values[8];
            NAME(codes_q6)(p, w, word, values);
            const vf scale = NAME(scale_q6)(p, w, word);
            for (int i = 0; i < 8; i++) *(vf *)(out[word * 8 + i] + w * V) = values[i] * scale;
        }
}

#undef NIBBLE_UNIT
#undef CHAINS
#undef ZERO
#undef GATHER
