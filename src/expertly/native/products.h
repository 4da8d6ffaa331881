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

enum { BFLOAT16, FLOAT16, FLOAT32 };
enum { MAX_TOKENS = 4 }; /* of one task: more have enough arithmetic for other methods */

typedef struct {
    const char *weights; /* the first row */
    int64_t x_row;       /* the first of its n rows of the input */
    int64_t num_tokens;  /* n */
    int64_t out_row;     /* the first of its n rows of the output */
} task;

/* out[m, out_row + t, i] = row (i, m) . x[x_row + t], of one matrix + bias[i] where there is one */
typedef struct {
    int32_t dtype, num_matrices;
    int64_t num_neurons, width, padded_width;
    int64_t row_nbytes, matrix_nbytes; /* from neuron to neuron, from matrix to matrix */
    const float *x;                    /* [*, padded_width] as vectors take it */
    const char *bias;                  /* [r] in dtype, or NULL */
    char *out;                         /* [M, out_rows, r] */
    int64_t out_rows;
    const task *tasks;
    int64_t num_chunks, chunk; /* of a task; neurons of one, even */
    int64_t next, end;         /* chunks of all tasks, in their order */
} dots;

/* out[out_row + t] = sum over i of h[x_row + t, i] * row i, rounded; or added to `sum`, which is float32 */
typedef struct {
    int32_t dtype, is_added;
    int64_t num_neurons, width, padded_width;
    int64_t row_nbytes;
    const float *h;  /* [*, r] */
    float *partial;  /* [chunks of all tasks, the most n of a task, padded_width] */
    int64_t partial_stride;
    int64_t *left;   /* chunks of each task that are not done */
    char *out;       /* [*, H] in dtype, or float32 where it is added */
    const task *tasks;
    int64_t num_chunks, chunk;
    int64_t next, end;
} sums;

/* -- quantised matrices, which lie in tiles (tiles_body.h) -------------------------------------------------------------- */

/* X(number, name of its functions, inputs of a tile, bytes of one), which are in a header of their own. Numbers are
 * `kernel` of the formats in Python.
 */
#define TILE_FORMATS(X) \
    X(MXFP4, mxfp4, 32, 16 + 16 * 32 / 2) \
    X(FP8, fp8, 128, 16 * 128 + 4) \
    X(Q8_0, q8_0, 32, 16 * 34) \
    X(Q4_0, q4_0, 32, 16 * 18) \
    X(Q4_K, q4_k, 256, 16 * 144) \
    X(Q5_K, q5_k, 256, 16 * 176) \
    X(Q6_K, q6_k, 256, 16 * 210) \
    X(INT4_G32, int4_g32, 32, 16 * (32 / 2 + 2)) \
    X(INT4_G128, int4_g128, 128, 16 * (128 / 2 + 2)) \
    X(INT4_G32_F16, int4_g32_f16, 32, 16 * (32 / 2 + 2)) \
    X(INT4_G128_F16, int4_g128_f16, 128, 16 * (128 / 2 + 2))

#define X(F, f, group, nbytes) F,
enum { TILE_FORMATS(X) NUM_FORMATS };
#undef X

enum { MAX_GROUP = 256 };          /* most inputs of a tile */
enum { TILES_CHUNK = 32 };         /* tiles side by side, 16 outputs each, that a thread sums at a time */
enum { TILES_AHEAD_NBYTES = 4096 }; /* asked of memory before they are used */

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

/* Whether a format asks memory for the tiles to come line by line between its arithmetic: a large tile asked for at once
 * is more lines than a processor awaits at a time, which keeps it from those that are here.
 */
INLINE int fetches_itself(int format) { return format == FP8; }

/* out[m, out_row + t, i] = row i of inner matrix m . x[x_row + t] */
typedef struct {
    int32_t format, dtype; /* of the inner matrices, of `out` */
    int64_t num_inner, num_neurons, hidden, block_size, block_nbytes;
    const float *x; /* [*, H] */
    char *out;      /* [M - 1, out_rows, r] */
    int64_t out_rows;
    const task *tasks;
    int64_t num_tasks;
    int64_t next, end; /* blocks of all tasks */
} tile_dots;

/* out[out_row + t] = down . h[x_row + t], rounded; or added to `out`, which is float32 */
typedef struct {
    int32_t format, dtype, is_added; /* of down, of `out` */
    int64_t num_neurons, hidden, block_nbytes, down_at; /* where down begins in a block */
    const float *h; /* [*, r] */
    char *out;      /* [*, H] */
    const task *tasks;
    int64_t num_chunks, chunk; /* of a task; tiles of one */
    int64_t next, end;
} tile_sums;

typedef struct {
    int32_t inner, down, dtype;
    int64_t num_inner, hidden, block_size, block_nbytes;
    const char *weights;
    char *out; /* [r, M, H] */
    int64_t next, end; /* blocks */
} tile_decode;

/* -- attention and norms (attention_body.h) ----------------------------------------------------------------------------- */

enum { BOOLEAN = 3, NO_MASK = 4 };               /* kinds of mask beside those of the dtypes, which are added */
enum { KEYS_CHUNK = 256 };                       /* keys that a thread takes at a time */
enum { ROUNDED, WEIGHED, ONE_MORE, NUM_STYLES }; /* norms: rounded, then weighed; weighed; weighed by 1 + weight */

/* out[b, t, h] = sum over s of softmax(q[b, h, t] . k[b, h / group, s]) v[b, h / group, s]. Rows of a key head are
 * those of its query heads, one head's tokens after the other's. Strides are bytes: of batch, head, token.
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
    int64_t next, end;
} attention;

typedef struct {
    const char *name;
    int64_t block; /* rows are taken so many elements at a time */
    int has_half, max_tile_tokens; /* of a task with tiles */
    void (*prepare)(int dtype, const char *x, int64_t width, float *out); /* one row, padded with zeros */
    void (*widen)(int dtype, const char *values, int64_t num, float *out);
    void (*dots)(void *);
    void (*sums)(void *);
    void (*tile_dots)(void *);
    void (*tile_sums)(void *);
    void (*tile_decode)(void *);
    void (*attention)(void *);
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
