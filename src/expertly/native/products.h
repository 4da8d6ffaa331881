/* What the interface (products.c) and the arithmetic (products_body.h, once an instruction set) share.
 *
 * Shapes: n tokens of a task, r neurons, M matrices whose rows take turns (gate and up: 2), H width of a row.
 */
#ifndef EXPERTLY_PRODUCTS_H
#define EXPERTLY_PRODUCTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* A vector that the compiler must not look through. */
#if defined(__x86_64__)
#define KEEP(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define KEEP(v) __asm__("" : "+w"(v))
#else
#define KEEP(v) __asm__("" : "+m"(v))
#endif

enum { BFLOAT16, FLOAT16, FLOAT32 };
enum { PAIRS = 3 }; /* bfloat16 where the processor multiplies it by pairs (pairs_body.h): within the library */
enum { MAX_TOKENS = 4 };   /* whose sums fit in the registers */
enum { TASK_TOKENS = 16 }; /* of a task, whose chunks are read again from the cache for every MAX_TOKENS */
enum { NO_DOWN = -1 };   /* in place of down's format: blocks of one matrix alone, 16 outputs by all inputs */
enum { ROWS = -1 };      /* in place of a format: rows of numbers */
enum { MANY = -2 };      /* the same: inputs of more than TASK_TOKENS tokens (many_body.h) */
enum { MANY_TOKENS = 48 };   /* for so many of them a tile is decoded once */
enum { MANY_OUTPUTS = 64 };  /* outputs that a thread then takes at a time */

typedef struct {
    const char *weights; /* the first row */
    int64_t x_row;       /* the first of its n rows of the input */
    int64_t num_tokens;  /* n */
    int64_t out_row;     /* the first of its n rows of the output */
} task;

/* What is done with the products of some neurons as soon as they are there: h = f(gate) g(up), each rounded, or f(up) where
 * there is no gate. h takes the place of the first product and goes to `h` as the next product takes it.
 */
typedef struct {
    const uint16_t *f, *g;  /* of every number of 16 bits, as bits; g NULL: up itself. Of float32: NULL, f is silu */
    const int64_t *experts; /* of each task */
    const char *bias[2];    /* [experts, bias_width] of each matrix, added to the rounded product; or NULL */
    int64_t bias_width, bias_at; /* the first neuron's place in a row of it */
    char *h;
    int64_t h_row_nbytes;
    int32_t format, dtype;  /* of the next matrix, or ROWS; of its inputs */
} activation;

enum { MAX_PARTS = 64 };

/* Chunks of a job, in as many parts as threads may come. A thread takes its part's in their order, so that what it asks
 * memory for ahead is its own, then what others have left.
 */
typedef struct {
    int64_t num, num_parts, num_joined, next[MAX_PARTS];
} chunks;

INLINE int64_t end_of_part(const chunks *c, int64_t part) { return c->num * (part + 1) / c->num_parts; }

/* The next chunk for who is at `part`, which is -1 at first; -1: there is none. */
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

/* The tokens of a task from t on, at most so many. */
INLINE task some_tokens(const task *one, int64_t t, int64_t most) {
    const int64_t left = one->num_tokens - t;
    return (task){one->weights, one->x_row + t, left < most ? left : most, one->out_row + t};
}

/* out[m, out_row + t, i] = row (i, m) . x[x_row + t], of one matrix + bias[i] where there is one */
typedef struct {
    const activation *then; /* or NULL */
    int32_t format, dtype, num_matrices;
    int64_t num_neurons, width, padded_width;
    int64_t block_size;                /* neurons of a block, where there is a format */
    int64_t row_nbytes, matrix_nbytes; /* from neuron to neuron, or from block to block; from matrix to matrix */
    const float *x;                    /* [*, padded_width] as vectors or tiles take it */
    const char *bias;                  /* [r] in dtype, or NULL */
    char *out;                         /* [M, out_rows, r] */
    int64_t out_rows;
    const task *tasks;
    int64_t num_chunks, chunk; /* of a task; neurons of one, even */
    chunks chunks;             /* of all tasks, in their order */
} dots;

/* out[out_row + t] = sum over i of h[x_row + t, i] * row i, rounded; or added to `out`, which is float32. Where `experts` says
 * each task's, bias[expert] is added to what was rounded; where there are `out_rows`, it is out[out_rows[out_row + t]].
 */
typedef struct {
    const int64_t *out_rows, *experts;
    const char *bias; /* [experts, width] in dtype */
    int32_t format, dtype, is_added;
    int64_t num_neurons, width, padded_width;
    int64_t row_nbytes; /* from neuron to neuron, or from block to block */
    const float *h;     /* [*, r], or rows of tile_row_nbytes */
    float *partial;     /* of each task [chunks, n, padded_width] */
    int64_t *left, *rows_before; /* of each task: chunks that are not done, rows of the tasks before */
    char *out;       /* [*, H] in dtype, or float32 where it is added */
    const task *tasks;
    int64_t num_chunks, chunk;
    chunks chunks;
} sums;

/* Where a chunk of task `number` is summed. */
INLINE float *partial_at(const sums *s, int64_t number, int64_t chunk) {
    return s->partial + (s->rows_before[number] * s->num_chunks + chunk * s->tasks[number].num_tokens) * s->padded_width;
}

/* Experts of a layer: `inner` with `then`, whose h is `down`'s, both in the same chunks of the same tasks. */
typedef struct {
    dots inner;
    sums down;
} expert_rows;

/* -- quantised matrices, which lie in tiles (tiles_body.h) -------------------------------------------------------------- */

/* X(number, name of its functions, inputs of a tile, bytes of one). Numbers are `kernel` of the formats in Python. Those
 * of CODE_FORMATS have their functions in codes.h, those of INT4_FORMATS in int4.h, others in a header of their own.
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
    X(Q5_1, q5_1, 32, 16 * 24)
#define WEIGHT_FORMATS(X) \
    X(FP8, fp8, 128, 16 * 128 + 4)
#define INT4_FORMATS(X) \
    X(INT4_G32, int4_g32, 32, 16 * (32 / 2 + 2)) \
    X(INT4_G128, int4_g128, 128, 16 * (128 / 2 + 2)) \
    X(INT4_G32_F16, int4_g32_f16, 32, 16 * (32 / 2 + 2)) \
    X(INT4_G128_F16, int4_g128_f16, 128, 16 * (128 / 2 + 2)) \
    X(INT4_G32_ZEROS, int4_g32_zeros, 32, 16 * (32 / 2 + 2) + 8) \
    X(INT4_G128_ZEROS, int4_g128_zeros, 128, 16 * (128 / 2 + 2) + 8) \
    X(INT4_G32_ZEROS_F16, int4_g32_zeros_f16, 32, 16 * (32 / 2 + 2) + 8) \
    X(INT4_G128_ZEROS_F16, int4_g128_zeros_f16, 128, 16 * (128 / 2 + 2) + 8)
#define TILE_FORMATS(X) CODE_FORMATS(X) WEIGHT_FORMATS(X) INT4_FORMATS(X)

/* Those whose weights, or codes, are bfloat16, which AVX512-BF16 multiplies as such; and who decodes them. Formats of GGUF
 * are not: their models are computed in float32.
 */
#define PAIRS_FORMATS(X) \
    X(MXFP4, mxfp4, mxfp4) X(FP8, fp8, fp8) X(INT4_G32, int4_g32, int4) X(INT4_G128, int4_g128, int4) \
    X(INT4_G32_ZEROS, int4_g32_zeros, int4) X(INT4_G128_ZEROS, int4_g128_zeros, int4)

#define X(F, f, group, nbytes) F,
enum { TILE_FORMATS(X) NUM_FORMATS };
#undef X

enum { MAX_GROUP = 256 }; /* most inputs of a tile */

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

enum { UNIT = 32 };
enum { AHEAD = 12 << 10 }; /* bytes: while a tile is multiplied, memory is asked for what lies so much further */

/* Inputs of a token, in the order of place_in_unit (codes.h): as numbers, as bfloat16, or in three digits, fixed.scale *
 * (digits[0] + 256 digits[1] + 65536 digits[2]); sums begin with `start`, of the first and the last 16 inputs, or of all.
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
    };
    float sum;
} unit;

/* A row of inputs as tiles take it. */
INLINE int64_t tile_row_nbytes(int64_t width) { return width / UNIT * (int64_t)sizeof(unit); }

/* -- a layer's experts ------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *weights; /* of the first of its neurons */
    int64_t num_tokens, expert;
} expert_task;

/* out[out_rows[i]] = down(f(gate(x[x_rows[i]])) g(up(x[x_rows[i]]))), by one task after the other, so many tokens each. */
typedef struct {
    int64_t inner, down;                    /* formats; or ROWS both */
    int64_t num_inner, num_neurons, hidden; /* gate and up, or up; neurons of a task */
    int64_t row_nbytes, matrix_nbytes;      /* of rows of numbers: from neuron to neuron, from matrix to matrix */
    const uint16_t *f, *g;                  /* see activation */
    const char *inner_bias[2], *down_bias;  /* [experts, bias_width] each, [experts, H]; or NULL */
    int64_t bias_width, bias_at;
    const expert_task *tasks;
    int64_t num_tasks;
    const int64_t *x_rows, *out_rows;
    const char *x;
    int64_t x_nbytes;
    char *out;
    int64_t is_added; /* to `out`, which is float32, unrounded and without bias */
} experts_call;

/* -- attention and norms (attention_body.h) ----------------------------------------------------------------------------- */

enum { BOOLEAN = 3, NO_MASK = 4 };               /* kinds of mask beside those of the dtypes, which are added */
enum { KEYS_CHUNK = 256 };                       /* keys that a thread takes at a time */
enum { UNSEEN = -60000 }; /* masks add less to hide a key: the least number of their dtype, float16's is -65504 */
enum { ROUNDED, WEIGHED, ONE_MORE, NUM_STYLES }; /* norms: rounded, then weighed; weighed; weighed by 1 + weight */

/* out[b, t, h] = sum over s of softmax(q[b, h, t] . k[b, h / group, s]) v[b, h / group, s]. Rows of a key head are
 * tokens, each of all its query heads. Strides are bytes: of batch, head, token.
 */
typedef struct {
    int32_t dtype, mask_dtype;
    int64_t num_kv_heads, num_rows, num_tokens, num_keys;
    int64_t key_width, padded_key_width, value_width, padded_value_width;
    const char *k, *v, *mask;
    int64_t k_strides[3], v_strides[3], mask_strides[3];
    const float *q;     /* scaled, [B, key heads, rows, padded_key_width] as vectors take it */
    const float *sinks; /* [heads], a score each that no value has; or NULL */
    float softcap;      /* scores are bounded by it; 0: not at all */
    float *partial;     /* [B, key heads, chunks, rows, 2 + padded_value_width]: largest score, sum of weights, values */
    int64_t partial_width;
    int64_t *left; /* chunks of each key head that are not done */
    char *out;     /* [B, n, heads, value_width] */
    int64_t num_chunks;
    chunks chunks;
} attention;

/* What attention asks with, asks and is given, of tokens x[n, H]: linear layers, of the first two a norm and rotation. */
typedef struct {
    int64_t num_tokens, x_nbytes;
    const char *x;
    int64_t num_angles, num_positions;
    const char *cos, *sin;   /* [positions, angles] in dtype: of each rotated number, or of each pair of them */
    char *out[3];            /* [n, rows] */
    int64_t hidden, head_width, rotated_width, norm_width[2], norm_style[2];
    const char *norms[2];    /* [norm_width] each, or NULL */
    const char *weights[3];  /* [rows, H] */
    const char *bias[3];     /* [rows], or NULL */
    int64_t num_rows[3];
    char *places[2];         /* where keys and values [B, heads, n / B, head_width] go then; or NULL */
    int64_t num_sequences, place_strides[2][2]; /* bytes of a sequence, and of a head, of each of the two */
} projections;

/* Logits x[n, H] W^T + bias [n, E], and the K highest of each token: their ids, and their weights, which are shares of all
 * scores, or where they are normalised of those of the chosen.
 */
enum { MOST_CHOSEN = 17 }; /* which std::sort of GNU sorts by insertion */

typedef struct {
    int64_t num_tokens, hidden, num_experts, top_k, is_normalised, weights_dtype;
    const char *x, *weight, *bias;
    char *logits, *weights; /* [n, E], [n, K] */
    int64_t *ids;           /* [n, K] */
} router;

typedef struct {
    const char *name;
    int64_t block; /* rows are taken so many elements at a time */
    int has_half, has_pairs;
    void (*prepare)(int dtype, const char *x, int64_t width, float *out); /* one row, padded with zeros */
    void (*widen)(int dtype, const char *values, int64_t num, float *out);
    void (*narrow)(int dtype, const float *values, int64_t num, char *out);
    int (*softmax)(int64_t num, float *values);
    void (*tile_prepare)(int format, int dtype, const char *x, int64_t width, void *out); /* one row */
    void (*many_prepare)(int dtype, const char *x, int64_t width, unit *out, int64_t step);
    void (*combine)(int dtype, int weights_dtype, int64_t num, int64_t top_k, int64_t width, const char *rows,
                    const char *weights, char *out);
    void (*dots)(void *);
    void (*sums)(void *);
    void (*many_sums)(void *);
    void (*experts)(void *);
    void (*decode_rows)(int format, int dtype, const char *p, int64_t num_rows, int64_t width, char *out);
    void (*attention)(void *);
    void (*rotate)(int dtype, const projections *p, int64_t width, char *values);
    int (*norm)(int dtype, int style, int64_t num, int64_t width, const char *x, int64_t x_nbytes, const char *weight,
                float epsilon, char *out);
} instruction_set;

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
