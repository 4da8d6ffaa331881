/* Types and constants that the interface (products.c) and the arithmetic (products_body.h, compiled once for each
 * instruction set) share.
 *
 * A task is some tokens that need the same weights: one expert's, or one matrix's. Shapes: n tokens of a task, r neurons,
 * H width of a row, M matrices that are multiplied with the same inputs (gate and up: 2).
 */
#ifndef EXPERTLY_PRODUCTS_H
#define EXPERTLY_PRODUCTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define SHARED extern __attribute__((visibility("hidden"))) /* by the files of the library */

/* Where products of bytes are known to be there, or the system can say so. */
#if defined(__aarch64__) && (defined(__ARM_FEATURE_DOTPROD) || (defined(__linux__) && !defined(__clang__)))
#define HAS_DOTS
#endif

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define HAS_PAIRS /* the compiler knows AVX512-BF16 */
#endif

/* Hides from the compiler where the vector `v` came from, so that it keeps it in a register. */
#if defined(__x86_64__)
#define KEEP(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define KEEP(v) __asm__("" : "+w"(v))
#else
#define KEEP(v) __asm__("" : "+m"(v))
#endif

/* Places 0 to 3 of `a` and 4 to 7 of `b`, in this order. */
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t four_places __attribute__((vector_size(16)));
#define PICK(a, b, ...) __builtin_shuffle(a, b, (four_places){__VA_ARGS__})
#endif
#define LOW_PAIRS(a, b) PICK(a, b, 0, 4, 1, 5)
#define HIGH_PAIRS(a, b) PICK(a, b, 2, 6, 3, 7)

enum { BFLOAT16, FLOAT16, FLOAT32 };
enum { PAIRS = 3 }; /* a dtype within the library: bfloat16 that AVX512-BF16 multiplies in pairs (pairs_body.h) */
enum { CODES = 5 }; /* of keys and values alone: numbers of a row in steps, plus 128, and behind them the step in bfloat16 */
enum { STEP_NBYTES = 2 };
enum { MAX_TOKENS = 4 };   /* multiplied at a time: so many sums fit in the registers */
enum { ROWS_STEP_NBYTES = 32 << 10 }; /* of neurons whose down rows follow at once */
enum { TASK_TOKENS = 16 }; /* most tokens of a task; weights are read again, from the cache, for each MAX_TOKENS */
enum { NO_DOWN = -1 };   /* instead of down's format: one matrix alone, whose blocks are 16 outputs by all inputs */
enum { ROWS = -1 };      /* instead of a format: plain rows of numbers, no tiles */
enum { MANY = -2 };      /* instead of a format: inputs for more than TASK_TOKENS tokens (many_body.h) */
enum { MANY_TOKENS = 48 };   /* there, tokens that share one decoding of a tile */
enum { MANY_OUTPUTS = 64 };  /* there, outputs of a chunk */

typedef struct {
    const char *weights; /* the first row */
    int64_t x_row;       /* first of its n input rows */
    int64_t num_tokens;  /* n */
    int64_t out_row;     /* first of its n output rows */
} task;

/* How products of gate and up become the inputs of down, for some neurons at a time: h = f(gate) g(up), each factor
 * rounded, or f(up) where there is no gate. h overwrites the first product; `h` receives it in the form that the next
 * product reads.
 */
typedef struct {
    const uint16_t *f, *g;  /* [65536] results by the input's 16 bits; g NULL: g(up) = up. With float32: f is a `curve` */
    const int64_t *experts; /* the expert of each task */
    const char *bias[2];    /* [experts, bias_width] for each matrix, added to the rounded product; or NULL */
    int64_t bias_width, bias_at; /* bias_at: the first neuron's place in a bias row */
    char *h;
    int64_t h_row_nbytes;
    int32_t format, dtype;  /* of down (or ROWS), and of its inputs */
} activation;

/* Of float32: with z = x (linear + cubic x x), f(x) = x sigmoid(z), squared or not, and g(up) = up + offset. Before, x is
 * at most `limit`, and |up| too.
 */
typedef struct {
    float linear, cubic, limit, offset, is_squared;
} curve;

enum { MAX_PARTS = 64 };

/* The chunks of a job, divided into one part for each thread. A thread takes the chunks of its own part in order, so
 * that what it prefetches is what it needs next; then it helps with other parts.
 */
typedef struct {
    int64_t num, num_parts, num_joined, next[MAX_PARTS];
} chunks;

INLINE int64_t end_of_part(const chunks *c, int64_t part) { return c->num * (part + 1) / c->num_parts; }

/* Takes the next chunk; -1: none is left. `part` is the caller's place in the parts, -1 before its first chunk. */
INLINE int64_t next_chunk(chunks *c, int64_t *part) {
    if (*part < 0) *part = __atomic_fetch_add(&c->num_joined, 1, __ATOMIC_RELAXED) % c->num_parts;
    for (int64_t i = 0; i < c->num_parts; i++, *part = (*part + 1) % c->num_parts) {
        if (__atomic_load_n(c->next + *part, __ATOMIC_RELAXED) >= end_of_part(c, *part)) continue;
        const int64_t chunk = __atomic_fetch_add(c->next + *part, 1, __ATOMIC_RELAXED);
        if (chunk < end_of_part(c, *part)) return chunk;
    }
    return -1;
}

#define FOR_CHUNKS(c, of) for (int64_t part = -1, c; (c = next_chunk(of, &part)) >= 0;)

/* The part of a task from token t on, at most `most` tokens. */
INLINE task some_tokens(const task *one, int64_t t, int64_t most) {
    const int64_t left = one->num_tokens - t;
    return (task){one->weights, one->x_row + t, left < most ? left : most, one->out_row + t};
}

/* Products with rows (gate, up, or one matrix with a bias): out[m, out_row + t, i] = row i of matrix m . x[x_row + t]
 * + bias[i].
 */
typedef struct {
    const activation *then; /* what follows at once; or NULL */
    int32_t format, dtype, num_matrices;
    int32_t up_format; /* with tiles, of the second matrix */
    int64_t num_neurons, width, padded_width;
    int64_t block_size;                /* neurons of a block of tiles */
    int64_t row_nbytes, matrix_nbytes; /* distance of two neurons (with tiles, of two blocks), and of two matrices */
    const float *x, *up_x;             /* [*, padded_width], in the order that the kernel reads (place, place_in_unit) */
    const char *bias;                  /* [r] in dtype, or NULL */
    char *out;                         /* [M, out_rows, r] */
    int64_t out_rows;
    const task *tasks;
    int64_t num_chunks, chunk; /* chunks of a task; neurons of a chunk, an even number */
    chunks chunks;             /* of all tasks, task after task */
} dots;

/* Weighted sums of rows (down): out[out_rows[out_row + t]] = sum over i of h[x_row + t, i] * row i, rounded to dtype; with
 * `is_added` it is added to float32 `out` instead. With `bias`, bias[the task's expert] is added after rounding.
 */
typedef struct {
    const int64_t *out_rows, *experts;
    const char *bias; /* [experts, width] in dtype */
    int32_t format, dtype, is_added;
    int64_t num_neurons, width, padded_width;
    int64_t row_nbytes; /* distance of two neurons (with tiles, of two blocks) */
    const float *h;     /* [*, r], or with tiles rows of tile_row_nbytes */
    float *partial;     /* sums of each chunk: for each task [chunks, n, padded_width] */
    int64_t *left, *rows_before; /* for each task: chunks that are not done, and rows of all tasks before it */
    char *out;       /* [*, H] in dtype; float32 with `is_added` */
    const task *tasks;
    int64_t num_chunks, chunk;
    chunks chunks;
} sums;

/* The partial sums of a chunk of task `number`. */
INLINE float *partial_at(const sums *s, int64_t number, int64_t chunk) {
    return s->partial + (s->rows_before[number] * s->num_chunks + chunk * s->tasks[number].num_tokens) * s->padded_width;
}

/* Whole experts: `inner`, whose `then` makes the h of `down`. Both have the same tasks and chunks. */
typedef struct {
    dots inner;
    sums down;
} expert_rows;

/* -- quantised matrices, which lie in tiles (tiles_body.h) -------------------------------------------------------------- */

/* X(number, prefix of its functions, inputs of a tile, bytes of a tile). A format in Python names the number as `kernel`.
 * Functions of CODE_FORMATS are in codes.h, those of BLOCK_FORMATS in blocks.h, those of INT4_FORMATS in int4.h, those of
 * WEIGHT_FORMATS in fp8.h and halves.h.
 */
#define CODE_FORMATS(X) \
    X(MXFP4, mxfp4, 32, 16 + 16 * 32 / 2) \
    X(Q8_0, q8_0, 32, 16 * 34) \
    X(Q4_0, q4_0, 32, 16 * 18) \
    X(Q4_K, q4_k, 256, 16 * 144) \
    X(Q5_K, q5_k, 256, 16 * 176) \
    X(Q6_K, q6_k, 256, 16 * 210) \
    X(Q4_1, q4_1, 32, 16 * 20) \
    X(Q5_0, q5_0, 32, 16 * 22) \
    X(Q5_1, q5_1, 32, 16 * 24) \
    X(Q2_K, q2_k, 256, 16 * 84) \
    X(Q3_K, q3_k, 256, 16 * 110) \
    X(IQ4_NL, iq4_nl, 32, 16 * 18) \
    X(IQ4_XS, iq4_xs, 256, 16 * 136) \
    X(NVFP4, nvfp4, 64, 16 * (64 / 2 + 64 / 16) + 4) \
    X(TQ1_0, tq1_0, 256, 16 * 54) \
    X(TQ2_0, tq2_0, 256, 16 * 66)
#define BLOCK_FORMATS(X) \
    X(IQ2_XXS, iq2_xxs, 256, 16 * 66) \
    X(IQ2_XS, iq2_xs, 256, 16 * 74) \
    X(IQ2_S, iq2_s, 256, 16 * 82) \
    X(IQ3_XXS, iq3_xxs, 256, 16 * 98) \
    X(IQ3_S, iq3_s, 256, 16 * 110) \
    X(IQ1_S, iq1_s, 256, 16 * 50) \
    X(IQ1_M, iq1_m, 256, 16 * 56)
#define WEIGHT_FORMATS(X) \
    X(FP8, fp8, 128, 16 * 128 + 4) \
    X(FP8_ROWS, fp8_rows, 128, 16 * 128 + 16 * 4) \
    X(BF16, bf16, 32, 16 * 64) \
    X(F16, f16, 32, 16 * 64)
#define INT4_FORMATS(X) \
    X(INT4_G32, int4_g32, 32, 16 * (32 / 2 + 2)) \
    X(INT4_G128, int4_g128, 128, 16 * (128 / 2 + 2)) \
    X(INT4_G32_F16, int4_g32_f16, 32, 16 * (32 / 2 + 2)) \
    X(INT4_G128_F16, int4_g128_f16, 128, 16 * (128 / 2 + 2)) \
    X(INT4_G32_ZEROS, int4_g32_zeros, 32, 16 * (32 / 2 + 2) + 8) \
    X(INT4_G128_ZEROS, int4_g128_zeros, 128, 16 * (128 / 2 + 2) + 8) \
    X(INT4_G32_ZEROS_F16, int4_g32_zeros_f16, 32, 16 * (32 / 2 + 2) + 8) \
    X(INT4_G128_ZEROS_F16, int4_g128_zeros_f16, 128, 16 * (128 / 2 + 2) + 8)
#define TILE_FORMATS(X) CODE_FORMATS(X) BLOCK_FORMATS(X) WEIGHT_FORMATS(X) INT4_FORMATS(X)

/* X(number, prefix of its functions, prefix of the function that decodes it): formats whose decoded weights fit bfloat16,
 * so that AVX512-BF16 can multiply them. GGUF's are not among them: their models are computed in float32.
 */
#define PAIRS_FORMATS(X) \
    X(MXFP4, mxfp4, mxfp4) X(NVFP4, nvfp4, nvfp4) X(FP8, fp8, fp8) X(INT4_G32, int4_g32, int4) X(INT4_G128, int4_g128, int4) \
    X(INT4_G32_ZEROS, int4_g32_zeros, int4) X(INT4_G128_ZEROS, int4_g128_zeros, int4)

#define X(F, f, group, nbytes) F,
enum { TILE_FORMATS(X) NUM_FORMATS };
#undef X

enum { MAX_GROUP = 256 }; /* the largest tile_group */

/* Whether it is one of WEIGHT_FORMATS, whose inputs are float32 in their own order. */
INLINE int has_weights(int format) { return format >= FP8 && format < INT4_G32; }

/* Whether its tiles are blocks as they are in a file. */
INLINE int has_blocks(int format) { return format >= IQ2_XXS && format < FP8; }

#define X(F, f, group, nbytes) \
    case F: return group;
INLINE int tile_group(int format) {
    switch (format) { TILE_FORMATS(X) }
    return 1;
}
#undef X
#define X(F, f, group, nbytes) \
    case F: return nbytes;
INLINE int64_t tile_nbytes(int format) {
    switch (format) { TILE_FORMATS(X) }
    return 0;
}
#undef X

#define X(F, f, decoder) \
    case F: return 1;
INLINE int takes_pairs(int format) {
    switch (format) { PAIRS_FORMATS(X) }
    return 0;
}
#undef X

enum { UNIT = 32 };        /* inputs that are prepared together (unit) */
enum { AHEAD = 12 << 10 }; /* bytes between what is multiplied and what is prefetched meanwhile */

/* 32 inputs of a token, in the order in which a format's weights are decoded (place_in_unit in codes.h), in one of four
 * forms: float32, bfloat16, or fixed point in three 8-bit digits, fixed.scale * (digits[0] + 256 digits[1] + 65536
 * digits[2]), or in two digits of 12 bits, wide.scale * (digits[0] + 4096 digits[1]). Codes are multiplied as stored, so
 * each digit's sum starts at `start`, which takes the codes' offset off: one start for the unit, or one for each half where
 * a half has its own scale. `sums` are those of the inputs, likewise.
 */
typedef struct {
    union {
        float x[UNIT];
        uint16_t halves[UNIT];
        struct {
            int8_t digits[3][UNIT];
            int32_t start[2][3];
            float scale;
        } fixed;
        struct {
            int16_t digits[2][UNIT];
            float scale;
        } wide;
    };
    float sums[2];
} unit;

/* 256 inputs of a token for BLOCK_FORMATS, at the place of their units: digits as `unit.fixed` has them, and of each the sums
 * of 16.
 */
typedef struct {
    int8_t digits[3][MAX_GROUP];
    int16_t sums[3][MAX_GROUP / 16];
    float scale;
} block_inputs;
_Static_assert(sizeof(block_inputs) <= MAX_GROUP / UNIT * sizeof(unit), "they have the place of their units");

/* Bytes of a row of inputs as units. */
INLINE int64_t tile_row_nbytes(int64_t width) { return width / UNIT * (int64_t)sizeof(unit); }

/* -- a layer's experts ------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *weights; /* its first neuron */
    int64_t num_tokens, expert;
} expert_task;

/* out[out_rows[i]] = down(f(gate(x[x_rows[i]])) g(up(x[x_rows[i]]))). Rows i are those of the first task, then of the
 * second, and so on: num_tokens of each.
 */
typedef struct {
    int64_t gate, up, down;                 /* formats; where there is no gate, up has gate's; or all ROWS */
    int64_t num_inner, num_neurons, hidden; /* num_inner: 2 (gate and up) or 1 (up); num_neurons: of a task */
    int64_t row_nbytes, matrix_nbytes;      /* with ROWS: distance of two neurons, and of two matrices */
    const uint16_t *f, *g;                  /* as in `activation` */
    const char *inner_bias[2], *down_bias;  /* [experts, bias_width] each, and [experts, H]; or NULL */
    int64_t bias_width, bias_at;
    const expert_task *tasks;
    int64_t num_tasks;
    const int64_t *x_rows, *out_rows;
    const char *x;
    int64_t x_nbytes;
    char *out;
    int64_t is_added; /* outputs are added to float32 `out`, unrounded and without bias */
} experts_call;

/* -- attention and norms (attention_body.h) ----------------------------------------------------------------------------- */

enum { BOOLEAN = 3, NO_MASK = 4 };               /* of mask_dtype; a mask of any other dtype is added to scores */
enum { KEYS_CHUNK = 256 };                       /* keys of a chunk */
enum { NORM_LANES = 16 };                        /* sums of a norm side by side */
enum { UNSEEN = -60000 }; /* a mask's value below this hides the key; masks use their dtype's least, float16's is -65504 */
enum { ROUNDED, WEIGHED, ONE_MORE, NUM_STYLES }; /* norms: rounded, then times weight; times weight; times 1 + weight */

/* out[b, t, h] = sum over s of softmax(q[b, h, t] . k[b, h / group, s]) v[b, h / group, s], where `group` query heads share
 * a key head. The rows of a key head are (token, query head) pairs, token by token. Strides are in bytes: from sequence to
 * sequence, head to head, token to token.
 */
typedef struct {
    int32_t dtype, mask_dtype;
    int64_t num_kv_heads, num_rows, num_tokens, num_keys;
    int64_t key_width, padded_key_width, value_width, padded_value_width;
    const char *k, *v, *mask;
    const int64_t *positions; /* of keys and values; NULL: one after the other */
    int64_t are_codes;        /* keys and values are CODES, not of `dtype` */
    int64_t k_strides[3], v_strides[3], mask_strides[3];
    const float *q;     /* scaled, [B, key heads, rows, padded_key_width], in the order of `place` */
    const float *sinks; /* [heads]: a score in each softmax that has no value; or NULL */
    float softcap;      /* bound of the scores; 0: none */
    float *partial;     /* [B, key heads, chunks, rows, 2 + padded_value_width]: largest score, sum of weights, values */
    int64_t partial_width;
    int64_t *left; /* for each key head, chunks that are not done */
    char *out;     /* [B, n, heads, value_width] */
    int64_t num_chunks;
    chunks chunks;
} attention;

/* Queries, keys and values of tokens x[n, H], in this order in each array: linear layers; queries and keys are then
 * normed and rotated.
 */
typedef struct {
    int64_t num_tokens, x_nbytes;
    const char *x;
    int64_t num_angles, num_positions;
    const char *cos, *sin;   /* [positions, angles] in dtype: an angle for each rotated number, or for each pair */
    char *out[3];            /* [n, rows] */
    int64_t hidden, head_width, rotated_width, norm_width[2], norm_style[2];
    const char *norms[2];    /* [norm_width] each, or NULL */
    const char *weights[3];  /* [rows, H], or in a format blocks of 16 rows */
    const char *bias[3];     /* [rows], or NULL */
    int64_t num_rows[3], formats[3], row_nbytes[3]; /* ROWS or a format; from row to row, or from block to block */
    const float *factors;    /* [key heads, head_width]: places take CODES, of keys over these; or NULL */
    char *places[2];         /* the KV cache's room for these keys and values, [B, heads, n / B, head_width]; or NULL */
    int64_t num_sequences, place_strides[2][2]; /* bytes from sequence to sequence and from head to head, of each */
} projections;

/* Logits x[n, H] W^T + bias [n, E], and the K highest of each token: their ids, and their weights, which are the softmax
 * over all experts, with `is_normalised` divided by the sum of the chosen ones.
 */
enum { MOST_CHOSEN = 17 }; /* largest K: torch's std::sort sorts so few by insertion, which is repeated here */

typedef struct {
    int64_t num_tokens, hidden, num_experts, top_k, is_normalised, weights_dtype;
    const char *x, *weight, *bias;
    char *logits, *weights; /* [n, E], [n, K] */
    int64_t *ids;           /* [n, K] */
    float *scores;          /* [n, E]: the softmax; or NULL */
} router;

typedef struct {
    const char *name;
    int64_t block; /* elements of a row that are multiplied at a time */
    int has_half, has_pairs;
    void (*prepare)(int dtype, const char *x, int64_t width, float *out); /* one row, padded with zeros */
    void (*widen)(int dtype, const char *values, int64_t num, float *out);
    void (*narrow)(int dtype, const float *values, int64_t num, char *out);
    int (*softmax)(int64_t num, float *values);
    void (*tile_prepare)(int format, int dtype, const char *x, int64_t width, void *out); /* one row, as units */
    void (*many_prepare)(int dtype, const char *x, int64_t width, unit *out, int64_t step);
    void (*combine)(int dtype, int weights_dtype, int64_t num, int64_t top_k, int64_t width, const char *rows,
                    const char *weights, char *out);
    void (*dots)(void *);
    void (*many_sums)(void *);
    void (*experts)(void *);
    void (*decode_rows)(int format, int dtype, const char *p, int64_t num_rows, int64_t width, char *out);
    void (*attention)(void *);
    void (*encode)(int dtype, const char *x, int64_t width, const float *factors, char *out); /* one row */
    void (*rotate)(int dtype, const projections *p, int64_t width, char *values);
    int (*norm)(int dtype, int style, int64_t num, int64_t width, const char *x, int64_t x_nbytes, const char *weight,
                float epsilon, char *out);
} instruction_set;

/* Those that are compiled, each in a file of its own. */
SHARED const instruction_set set_generic, set_neon, set_avx2, set_avx512, pairs_set_avx512;

/* -- tables ------------------------------------------------------------------------------------------------------------ */

/* Grids of 4 or 8 neighbouring numbers, more by 64; and for IQ4_NL and IQ4_XS the 16 values of a code, more by 128. */
typedef struct {
    uint8_t iq2_xxs[256][8], iq2_xs[512][8], iq2_s[1024][8], iq3_xxs[256][4], iq3_s[512][4];
    uint8_t iq1_s[2048][8]; /* times 8, and 1 more */
    uint8_t iq4_nl[16];
} grids;

SHARED grids GRIDS;
SHARED uint64_t SIGNS[256]; /* of eight bits, a byte of ones for each that is set */
SHARED uint8_t INT4_ERRORS[2048][32], INT4_ERRORS_BFLOAT16[256][32]; /* 8 + e at [m][q + 16]: see int4.h */

INLINE float bfloat16_value(const char *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* To nearest, ties to even; a NaN stays one. */
INLINE void put_bfloat16(float value, char *p) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits += 0x7fff + ((bits >> 16) & 1);
    uint16_t half = value != value ? 0x7fc0 : (uint16_t)(bits >> 16);
    memcpy(p, &half, 2);
}

#endif
