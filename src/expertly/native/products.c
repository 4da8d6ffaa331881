/* Products of a few tokens with matrices in memory, at the speed of the memory. Called through ctypes: plain C, no
 * Python in it. Everything lies in the caller's memory; functions are re-entrant and return 0, or -1 where the request is
 * not one of theirs (the caller has another way) or memory is short.
 */

#include "products.h"

#include <stdlib.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "which half of a word is a bfloat16 at an even place depends on the order of bytes"
#endif

#define NAME_(f, suffix) f##_##suffix

/* -- instruction sets ------------------------------------------------------------------------------------------------ */

#define V 4
#define NAME(f) NAME_(f, generic)
#if defined(__aarch64__)
#include <arm_neon.h>
#define SHUFFLE(t, codes) ((vu)vqtbl1q_u8(vld1q_u8((const uint8_t *)(t)), (uint8x16_t)(codes)))
#else
#define SHUFFLE(t, codes) NAME(shuffle)(t, codes)
#endif
#define BYTES(p) ((vu){(uint8_t)(p)[0], (uint8_t)(p)[1], (uint8_t)(p)[2], (uint8_t)(p)[3]})
#define LABEL "generic"
#if defined(__ARM_FP16_FORMAT_IEEE) && defined(__aarch64__)
#define HAS_HALF 1
INLINE float half_value(const char *p) {
    __fp16 half;
    memcpy(&half, p, 2);
    return half;
}
INLINE void put_half(float value, char *p) {
    __fp16 half = (__fp16)value;
    memcpy(p, &half, 2);
}
#define LOAD_HALF(p, v) \
    for (int i = 0; i < V; i++) (v)[i] = half_value((p) + 2 * i)
#define HALF_VALUE(p) half_value(p)
#define PUT_HALF(value, p) put_half(value, p)
#else
#define HAS_HALF 0
#define LOAD_HALF(p, v) ((v) = (vf){0})
#define HALF_VALUE(p) 0
#define PUT_HALF(value, p) (void)(value)
#endif
#include "products_body.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define PUT_HALF_X86(value, p)                                     \
    do {                                                           \
        uint16_t half = (uint16_t)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); \
        memcpy(p, &half, 2);                                       \
    } while (0)
#define HALF_VALUE_X86(p) _cvtsh_ss((unsigned short)((uint8_t)(p)[0] | (uint8_t)(p)[1] << 8))

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define V 8
#define NAME(f) NAME_(f, avx2)
#define SHUFFLE(t, codes) \
    ((vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(t))), (__m256i)(codes)))
#define BYTES(p) ((vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define LOOKUP_EITHER(a, b, codes, choice)                                                     \
    ((vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps((__m256)(a), (__m256i)(codes)),              \
                          _mm256_permutevar8x32_ps((__m256)(b), (__m256i)(codes)),              \
                          (__m256)((choice) == 0)))
#define LABEL "avx2"
#define HAS_HALF 1
#define LOAD_HALF(p, v) ((v) = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#define HALF_VALUE(p) HALF_VALUE_X86(p)
#define PUT_HALF(value, p) PUT_HALF_X86(value, p)
#include "products_body.h"
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define V 16
#define NAME(f) NAME_(f, avx512)
#define LOOKUP(t, codes) ((vf)_mm512_permutexvar_ps((__m512i)(codes), _mm512_loadu_ps(t)))
#define BYTES(p) ((vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define LOOKUP_EITHER(a, b, codes, choice)                                                             \
    ((vf)_mm512_mask_permutexvar_ps(_mm512_permutexvar_ps((__m512i)(codes), (__m512)(a)),               \
                                    _mm512_testn_epi32_mask((__m512i)(choice), (__m512i)(choice)),      \
                                    (__m512i)(codes), (__m512)(b)))
#define LABEL "avx512"
#define HAS_HALF 1
#define LOAD_HALF(p, v) ((v) = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p))))
#define HALF_VALUE(p) HALF_VALUE_X86(p)
#define PUT_HALF(value, p) PUT_HALF_X86(value, p)
#include "products_body.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

/* From the slowest to the fastest; NULL where number `level` does not run here. */
static const instruction_set *set_at(int level) {
    if (level == 0) return &set_generic;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (level == 1 && has_avx2) return &set_avx2;
    if (level == 2 && has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return &set_avx512;
#endif
    return NULL;
}

/* Of the interface: whoever calls it knows the same number. */
int expertly_products_version(void) { return 8; }

const char *expertly_products_name(int level) {
    const instruction_set *set = set_at(level);
    return set == NULL ? NULL : set->name;
}

int expertly_products_has_half(int level) {
    const instruction_set *set = set_at(level);
    return set != NULL && set->has_half;
}

/* -- threads --------------------------------------------------------------------------------------------------------- */

/* Of the OpenMP that the process has, which is torch's: its threads wait spinning, and a second set would fight them. */
extern void GOMP_parallel(void (*function)(void *), void *data, unsigned num_threads, unsigned flags)
    __attribute__((weak));

enum { THREAD_NBYTES = 128 << 10 }; /* for each of two threads: fewer are not worth waking one for */

int expertly_products_has_threads(void) { return GOMP_parallel != NULL; }

/* On all threads or one: libgomp ends the threads that a smaller team than the last has no use for, and a larger one
 * starts them anew.
 */
static void run(void (*function)(void *), void *job, int num_threads, int64_t num_chunks, int64_t nbytes) {
    if (num_threads > 1 && num_chunks > 1 && nbytes >= 2 * THREAD_NBYTES && GOMP_parallel != NULL)
        GOMP_parallel(function, job, (unsigned)num_threads, 0);
    else function(job);
}

/* -- interface ------------------------------------------------------------------------------------------------------- */

enum { CHUNK_NBYTES = 128 << 10 };

static int64_t chunk_of(int64_t num_neurons, int64_t neuron_nbytes, int64_t least) {
    int64_t chunk = (CHUNK_NBYTES / neuron_nbytes + 7) / 8 * 8;
    if (chunk < least) chunk = least;
    return chunk > num_neurons ? num_neurons : chunk;
}

static void *allocate(int64_t num_floats) {
    return aligned_alloc(64, ((size_t)num_floats * sizeof(float) + 63) / 64 * 64);
}

static int can_do(const instruction_set *set, int dtype, const task *tasks, int64_t num_tasks, int64_t num_neurons,
                  int64_t width) {
    if (set == NULL || dtype < BFLOAT16 || dtype > FLOAT32 || (dtype == FLOAT16 && !set->has_half)) return 0;
    if (num_tasks < 1 || num_neurons < 1 || width < 1) return 0;
    for (int64_t i = 0; i < num_tasks; i++)
        if (tasks[i].num_tokens < 1 || tasks[i].num_tokens > MAX_TOKENS) return 0;
    return 1;
}

/* out[M, out_rows, r] from rows of x[num_x, H], `x_nbytes` apart. `bias` is NULL, or [r] where M is 1. */
int expertly_products_dots(int level, int dtype, int num_threads, const task *tasks, int64_t num_tasks,
                           int64_t num_matrices, int64_t num_neurons, int64_t width, int64_t row_nbytes,
                           int64_t matrix_nbytes, const char *x, int64_t num_x, int64_t x_nbytes,
                           const char *bias, char *out, int64_t out_rows) {
    const instruction_set *set = set_at(level);
    if (!can_do(set, dtype, tasks, num_tasks, num_neurons, width) || num_matrices < 1 || num_matrices > 2) return -1;
    if (bias != NULL && num_matrices != 1) return -1;
    int64_t padded = (width + set->block - 1) / set->block * set->block, itemsize = dtype == FLOAT32 ? 4 : 2;
    float *prepared = allocate(num_x * padded);
    if (prepared == NULL) return -1;
    for (int64_t t = 0; t < num_x; t++) set->prepare(dtype, x + t * x_nbytes, width, prepared + t * padded);
    int64_t neuron_nbytes = num_matrices * width * itemsize, chunk = chunk_of(num_neurons, neuron_nbytes, 8);
    int64_t num_chunks = (num_neurons + chunk - 1) / chunk;
    dots job = {
        .dtype = dtype, .num_matrices = (int32_t)num_matrices, .num_neurons = num_neurons, .width = width,
        .padded_width = padded, .row_nbytes = row_nbytes, .matrix_nbytes = matrix_nbytes, .x = prepared, .bias = bias,
        .out = out, .out_rows = out_rows, .tasks = tasks, .num_chunks = num_chunks, .chunk = chunk,
        .end = num_tasks * num_chunks,
    };
    run(set->dots, &job, num_threads, job.end, num_tasks * num_neurons * neuron_nbytes);
    free(prepared);
    return 0;
}

/* out[*, H] from activations h[num_h, r]; with `is_added`, added to out, which is float32. */
int expertly_products_sums(int level, int dtype, int num_threads, const task *tasks, int64_t num_tasks,
                           int64_t num_neurons, int64_t width, int64_t row_nbytes, const char *h, int64_t num_h,
                           char *out, int is_added) {
    const instruction_set *set = set_at(level);
    if (!can_do(set, dtype, tasks, num_tasks, num_neurons, width)) return -1;
    int64_t padded = (width + set->block - 1) / set->block * set->block, itemsize = dtype == FLOAT32 ? 4 : 2;
    int64_t chunk = chunk_of(num_neurons, width * itemsize, 64), num_chunks = (num_neurons + chunk - 1) / chunk;
    int64_t most = 1;
    for (int64_t i = 0; i < num_tasks; i++) most = tasks[i].num_tokens > most ? tasks[i].num_tokens : most;
    int64_t num_partial = num_tasks * num_chunks * most * padded;
    float *memory = allocate(num_partial + num_h * num_neurons);
    int64_t *left = malloc((size_t)num_tasks * sizeof(int64_t));
    if (memory == NULL || left == NULL) {
        free(memory);
        free(left);
        return -1;
    }
    float *wide = memory + num_partial;
    set->widen(dtype, h, num_h * num_neurons, wide);
    for (int64_t i = 0; i < num_tasks; i++) left[i] = num_chunks;
    sums job = {
        .dtype = dtype, .is_added = is_added, .num_neurons = num_neurons, .width = width, .padded_width = padded,
        .row_nbytes = row_nbytes, .h = wide, .partial = memory, .partial_stride = most * padded, .left = left,
        .out = out, .tasks = tasks, .num_chunks = num_chunks, .chunk = chunk, .end = num_tasks * num_chunks,
    };
    run(set->sums, &job, num_threads, job.end, num_tasks * num_neurons * width * itemsize);
    free(memory);
    free(left);
    return 0;
}

/* -- quantised matrices ---------------------------------------------------------------------------------------------- */

/* Of a block: its inner matrices, then down. */
static int64_t inner_nbytes(int inner, int down, int64_t num_inner, int64_t hidden) {
    return num_inner * (tile_group(down) / 16) * (hidden / tile_group(inner)) * tile_nbytes(inner);
}

static int64_t down_nbytes(int down, int64_t hidden) { return hidden / 16 * tile_nbytes(down); }

static int has_tiles(const instruction_set *set, int inner, int down, int dtype, int64_t num_inner, int64_t num_neurons,
                     int64_t hidden) {
    if (set == NULL || inner < 0 || inner >= NUM_FORMATS || down < 0 || down >= NUM_FORMATS) return 0;
    if (dtype < BFLOAT16 || dtype > FLOAT32 || (dtype == FLOAT16 && !set->has_half)) return 0;
    if (num_inner < 1 || num_inner > 2 || num_neurons < 1 || hidden < 1) return 0;
    return num_neurons % tile_group(down) == 0 && hidden % tile_group(inner) == 0 && hidden % 16 == 0;
}

/* out[M - 1, out_rows, r] from rows of x[num_x, H], `x_nbytes` apart. A task's weights are the first of its blocks. */
int expertly_tiles_dots(int level, int inner, int down, int dtype, int num_threads, const task *tasks, int64_t num_tasks,
                        int64_t num_inner, int64_t num_neurons, int64_t hidden, const char *x, int64_t num_x,
                        int64_t x_nbytes, char *out, int64_t out_rows) {
    const instruction_set *set = set_at(level);
    if (!has_tiles(set, inner, down, dtype, num_inner, num_neurons, hidden)) return -1;
    if (!can_do(set, dtype, tasks, num_tasks, num_neurons, hidden)) return -1;
    for (int64_t i = 0; i < num_tasks; i++)
        if (tasks[i].num_tokens > set->max_tile_tokens) return -1;
    float *wide = allocate(num_x * hidden);
    if (wide == NULL) return -1;
    for (int64_t t = 0; t < num_x; t++) set->widen(dtype, x + t * x_nbytes, hidden, wide + t * hidden);
    const int64_t nbytes = inner_nbytes(inner, down, num_inner, hidden);
    tile_dots job = {
        .format = inner, .dtype = dtype, .num_inner = num_inner, .num_neurons = num_neurons, .hidden = hidden,
        .block_size = tile_group(down), .block_nbytes = nbytes + down_nbytes(down, hidden), .x = wide, .out = out,
        .out_rows = out_rows, .tasks = tasks, .num_tasks = num_tasks,
        .end = num_tasks * (num_neurons / tile_group(down)),
    };
    run(set->tile_dots, &job, num_threads, job.end, job.end * nbytes);
    free(wide);
    return 0;
}

/* out[*, H] from activations h[num_h, r]; with `is_added`, added to out, which is float32. */
int expertly_tiles_sums(int level, int inner, int down, int dtype, int num_threads, const task *tasks, int64_t num_tasks,
                        int64_t num_inner, int64_t num_neurons, int64_t hidden, const char *h, int64_t num_h, char *out,
                        int is_added) {
    const instruction_set *set = set_at(level);
    if (!has_tiles(set, inner, down, dtype, num_inner, num_neurons, hidden)) return -1;
    if (!can_do(set, dtype, tasks, num_tasks, num_neurons, hidden)) return -1;
    for (int64_t i = 0; i < num_tasks; i++)
        if (tasks[i].num_tokens > set->max_tile_tokens) return -1;
    float *wide = allocate(num_h * num_neurons);
    if (wide == NULL) return -1;
    set->widen(dtype, h, num_h * num_neurons, wide);
    const int64_t num_tiles = hidden / 16, least = num_threads > 1 && num_tasks == 1 ? 2 : 1;
    int64_t num_chunks = (num_tiles + TILES_CHUNK - 1) / TILES_CHUNK;
    if (num_chunks < least) num_chunks = num_tiles < least ? num_tiles : least;
    const int64_t chunk = (num_tiles + num_chunks - 1) / num_chunks, nbytes = down_nbytes(down, hidden);
    const int64_t at = inner_nbytes(inner, down, num_inner, hidden);
    tile_sums job = {
        .format = down, .dtype = dtype, .is_added = is_added, .num_neurons = num_neurons, .hidden = hidden,
        .block_nbytes = at + nbytes, .down_at = at, .h = wide, .out = out, .tasks = tasks, .num_chunks = num_chunks,
        .chunk = chunk, .end = num_tasks * num_chunks,
    };
    run(set->tile_sums, &job, num_threads, job.end, num_tasks * (num_neurons / tile_group(down)) * nbytes);
    free(wide);
    return 0;
}

/* out[r, M, H] in dtype, from the blocks of r neurons. */
int expertly_tiles_decode(int level, int inner, int down, int dtype, int num_threads, const char *weights, int64_t num_inner,
                          int64_t num_neurons, int64_t hidden, char *out) {
    const instruction_set *set = set_at(level);
    if (!has_tiles(set, inner, down, dtype, num_inner, num_neurons, hidden)) return -1;
    tile_decode job = {
        .inner = inner, .down = down, .dtype = dtype, .num_inner = num_inner, .hidden = hidden,
        .block_size = tile_group(down),
        .block_nbytes = inner_nbytes(inner, down, num_inner, hidden) + down_nbytes(down, hidden), .weights = weights,
        .out = out, .end = num_neurons / tile_group(down),
    };
    run(set->tile_decode, &job, num_threads, job.end, job.end * job.block_nbytes);
    return 0;
}

/* -- attention and norms --------------------------------------------------------------------------------------------- */

/* What a caller says of an attention, in this order. */
typedef struct {
    int64_t num_batches, num_heads, num_kv_heads, num_tokens, num_keys, key_width, value_width;
    const char *q, *k, *v, *mask, *sinks; /* mask and sinks: or NULL */
    char *out;
    int64_t q_strides[3], k_strides[3], v_strides[3], mask_strides[3];
    int64_t mask_dtype, sinks_dtype;
} attention_call;

/* out[B, n, heads, value width], contiguous; values of a token lie side by side in all tensors. */
int expertly_attention(int level, int dtype, int num_threads, const attention_call *call, double scale,
                       double softcap) {
    const instruction_set *set = set_at(level);
    const int64_t num_batches = call->num_batches, heads = call->num_heads, kv_heads = call->num_kv_heads;
    if (set == NULL || (dtype != BFLOAT16 && (dtype != FLOAT16 || !set->has_half))) return -1;
    if (num_batches < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads || call->num_tokens < 1) return -1;
    if (call->num_keys < 1 || call->key_width < 1 || call->value_width < 1) return -1;
    const int64_t rows = heads / kv_heads * call->num_tokens, block = set->block;
    const int64_t padded_key = (call->key_width + block - 1) / block * block;
    const int64_t padded_value = (call->value_width + block - 1) / block * block;
    const int64_t num_chunks = (call->num_keys + KEYS_CHUNK - 1) / KEYS_CHUNK, jobs = num_batches * kv_heads;
    const int64_t q_floats = jobs * rows * padded_key, partial_width = 2 + padded_value;
    float *memory = allocate(q_floats + jobs * num_chunks * rows * partial_width + heads);
    int64_t *left = malloc((size_t)jobs * sizeof(int64_t));
    if (memory == NULL || left == NULL) {
        free(memory);
        free(left);
        return -1;
    }
    for (int64_t row = 0; row < jobs * rows; row++) {
        const int64_t batch = row / (kv_heads * rows), head = row % (kv_heads * rows) / call->num_tokens;
        const int64_t token = row % call->num_tokens;
        const char *q = call->q + batch * call->q_strides[0] + head * call->q_strides[1] + token * call->q_strides[2];
        float *to = memory + row * padded_key;
        set->prepare(dtype, q, call->key_width, to);
        for (int64_t j = 0; j < padded_key; j++) to[j] *= (float)scale;
    }
    for (int64_t i = 0; i < jobs; i++) left[i] = num_chunks;
    float *sinks = memory + q_floats + jobs * num_chunks * rows * partial_width;
    if (call->sinks != NULL) set->widen((int)call->sinks_dtype, call->sinks, heads, sinks);
    attention job = {
        .dtype = dtype, .mask_dtype = (int32_t)(call->mask == NULL ? NO_MASK : call->mask_dtype),
        .num_kv_heads = kv_heads, .num_rows = rows,
        .num_tokens = call->num_tokens, .num_keys = call->num_keys, .key_width = call->key_width,
        .padded_key_width = padded_key, .value_width = call->value_width, .padded_value_width = padded_value,
        .k = call->k, .v = call->v, .mask = call->mask, .q = memory, .sinks = call->sinks == NULL ? NULL : sinks,
        .softcap = (float)softcap, .partial = memory + q_floats, .partial_width = partial_width, .left = left,
        .out = call->out, .num_chunks = num_chunks, .end = jobs * num_chunks,
    };
    memcpy(job.k_strides, call->k_strides, sizeof job.k_strides);
    memcpy(job.v_strides, call->v_strides, sizeof job.v_strides);
    memcpy(job.mask_strides, call->mask_strides, sizeof job.mask_strides);
    run(set->attention, &job, num_threads, job.end,
        jobs * call->num_keys * (call->key_width + call->value_width) * 2);
    free(memory);
    free(left);
    return 0;
}

/* out[num, width]: rows of x over the root of their mean square and `epsilon`; weight [width], or NULL. */
int expertly_norm(int level, int dtype, int style, int64_t num, int64_t width, const char *x, int64_t x_nbytes,
                  const char *weight, double epsilon, char *out) {
    const instruction_set *set = set_at(level);
    if (set == NULL || (dtype != BFLOAT16 && (dtype != FLOAT16 || !set->has_half))) return -1;
    if (style < 0 || style >= NUM_STYLES || num < 0 || width < 1) return -1;
    return set->norm(dtype, style, num, width, x, x_nbytes, weight, (float)epsilon, out);
}
