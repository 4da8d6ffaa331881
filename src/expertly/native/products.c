/* Products of a few tokens with matrices in memory, at the speed of the memory. Called through ctypes: plain C, no
 * Python in it. Everything lies in the caller's memory; functions are re-entrant and return 0, or -1 where the request is
 * not one of theirs (the caller has another way) or memory is short.
 */

#include "products.h"

#include "team.h"

#include <stdlib.h>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(HAS_DOTS) && !defined(__ARM_FEATURE_DOTPROD)
#include <sys/auxv.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "which half of a word is a bfloat16 at an even place depends on the order of bytes"
#endif

/* -- instruction sets ------------------------------------------------------------------------------------------------ */

enum { NUM_SETS = 4 };

/* From the slowest to the fastest; NULL: does not run here. */
static const instruction_set *sets[NUM_SETS] = {&set_generic};

/* Once: `cpuid` leaves a virtual machine, which takes longer than a small layer's products. */
__attribute__((constructor)) static void find_sets(void) {
#if defined(__ARM_FEATURE_DOTPROD) && defined(HAS_DOTS)
    sets[1] = &set_neon;
#elif defined(HAS_DOTS)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) sets[1] = &set_neon;
#endif
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return;
    sets[1] = &set_avx2; /* with f16c, which clang 14 cannot name */
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return;
    if (!__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512vnni")) return;
    sets[2] = &set_avx512;
#ifdef HAS_PAIRS
    unsigned a, b, c, d; /* clang 14 does not know AVX512-BF16 by name */
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1) sets[3] = &pairs_set_avx512;
#endif
#endif
}

static const instruction_set *set_at(int level) { return level < 0 || level >= NUM_SETS ? NULL : sets[level]; }

/* Of the interface: whoever calls it knows the same number. */
int expertly_products_version(void) { return 39; }

const char *expertly_products_name(int level) {
    const instruction_set *set = set_at(level);
    return set == NULL ? NULL : set->name;
}

int expertly_products_has_half(int level) {
    const instruction_set *set = set_at(level);
    return set != NULL && set->has_half;
}

/* -- tables ---------------------------------------------------------------------------------------------------------- */

grids GRIDS;
uint64_t SIGNS[256];
uint8_t INT4_ERRORS[2048][32], INT4_ERRORS_BFLOAT16[256][32];

/* Tables to decode with, as GRIDS has them, before anything is decoded. */
int expertly_products_grids(const char *bytes, int64_t nbytes) {
    if (nbytes != sizeof GRIDS) return -1;
    memcpy(&GRIDS, bytes, sizeof GRIDS);
    return 0;
}

static __attribute__((constructor)) void signs_begin(void) {
    for (uint32_t i = 0; i < 256; i++)
        for (int k = 0; k < 8; k++) SIGNS[i] |= i >> k & 1 ? (uint64_t)255 << 8 * k : 0;
}

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

/* -- threads --------------------------------------------------------------------------------------------------------- */

/* Of the OpenMP that the process has, which is torch's. */
extern void GOMP_parallel(void (*function)(void *), void *data, unsigned num_threads, unsigned flags)
    __attribute__((weak));

enum { THREAD_NBYTES = 128 << 10 }; /* for each of two threads: fewer are not worth waking one for */

static int takes_openmp;

/* Whether jobs run on OpenMP's threads where there are any: those that spin long would fight the team's. */
void expertly_products_take_openmp(int takes) { takes_openmp = takes && GOMP_parallel != NULL; }

/* `function(job)` on threads that share its `all` chunks out, or on this one alone where they are `nbytes` of too few. */
static void run(void (*function)(void *), void *job, chunks *all, int num_threads, int64_t nbytes) {
    all->num_parts = num_threads < 1 ? 1 : num_threads < MAX_PARTS ? num_threads : MAX_PARTS;
    all->num_joined = 0;
    for (int64_t i = 0; i < all->num_parts; i++) all->next[i] = i ? end_of_part(all, i - 1) : 0;
    if (all->num < 2 || nbytes < 2 * THREAD_NBYTES || num_threads < 2) function(job);
    else if (takes_openmp) GOMP_parallel(function, job, (unsigned)num_threads, 0);
    else run_on_team(function, job, num_threads);
}

/* -- interface ------------------------------------------------------------------------------------------------------- */

enum { CHUNK_NBYTES = 128 << 10, EXPERTS_CHUNK_NBYTES = 256 << 10, MANY_CHUNK_NBYTES = 16 << 10, ROWS_BLOCK = 8 };

/* Neurons of a chunk: whole blocks of so many. */
static int64_t chunk_of(int64_t chunk_nbytes, int64_t num_neurons, int64_t neuron_nbytes, int64_t least, int64_t block) {
    int64_t chunk = (chunk_nbytes / neuron_nbytes + block - 1) / block * block;
    if (chunk < least) chunk = least;
    return chunk > num_neurons ? num_neurons : chunk;
}

static void *allocate(int64_t num_floats) {
    return aligned_alloc(64, ((size_t)num_floats * sizeof(float) + 63) / 64 * 64);
}

static int64_t itemsize_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

static int takes(const instruction_set *set, int dtype) {
    return set != NULL && dtype >= BFLOAT16 && dtype <= FLOAT32 && (dtype != FLOAT16 || set->has_half);
}

/* As `set` multiplies inputs of `dtype`. */
static int32_t taken_as(const instruction_set *set, int dtype) {
    return dtype == BFLOAT16 && set->has_pairs ? PAIRS : dtype;
}

/* Neurons of a block, the last matrix of which is in format `down`: outputs of its inner matrices. */
static int64_t block_size(int down) { return down == NO_DOWN ? 16 : tile_group(down); }

/* Of a block: its inner matrices, then down. */
static int64_t inner_nbytes(int gate, int up, int down, int64_t num_inner, int64_t hidden) {
    const int64_t of_up = hidden / tile_group(up) * tile_nbytes(up), of_gate = hidden / tile_group(gate) * tile_nbytes(gate);
    return block_size(down) / 16 * (of_gate + (num_inner > 1 ? of_up : 0));
}

static int64_t down_nbytes(int down, int64_t hidden) {
    return down == NO_DOWN ? 0 : hidden / 16 * tile_nbytes(down);
}

/* About those of one neuron in one matrix. */
static int64_t neuron_nbytes(int format, int dtype, int64_t width) {
    return format == ROWS ? width * itemsize_of(dtype) : width * tile_nbytes(format) / (16 * tile_group(format));
}

static int has_tiles(const instruction_set *set, int gate, int up, int down, int dtype, int64_t num_inner,
                     int64_t num_neurons, int64_t hidden, int64_t block_nbytes) {
    if (!takes(set, dtype) || gate < 0 || gate >= NUM_FORMATS || up < 0 || up >= NUM_FORMATS) return 0;
    if (down < NO_DOWN || down >= NUM_FORMATS || (down == NO_DOWN && num_inner != 1)) return 0;
    if (num_inner < 1 || num_inner > 2 || num_neurons < 1 || hidden < 1) return 0;
    if (num_neurons % block_size(down) || hidden % tile_group(gate)) return 0;
    if (num_inner == 2 && hidden % tile_group(up)) return 0;
    return inner_nbytes(gate, up, down, num_inner, hidden) + down_nbytes(down, hidden) <= block_nbytes;
}

/* The same in all that are multiplied with its inputs. */
static int64_t inner_neuron_nbytes(const dots *d) {
    const int64_t first = neuron_nbytes(d->format, d->dtype, d->width);
    if (d->num_matrices == 1 || d->format == ROWS) return d->num_matrices * first;
    return first + neuron_nbytes(d->up_format, d->dtype, d->width);
}

static int can_do(const instruction_set *set, int dtype, const task *tasks, int64_t num_tasks,
                  int64_t num_neurons, int64_t width) {
    if (!takes(set, dtype) || num_tasks < 1 || num_neurons < 1 || width < 1) return 0;
    for (int64_t i = 0; i < num_tasks; i++)
        if (tasks[i].num_tokens < 1 || tasks[i].num_tokens > TASK_TOKENS) return 0;
    return 1;
}

/* Rows of x[*, H], `x_nbytes` apart: the first `num`, or those that `rows` says. */
typedef struct {
    const char *x;
    int64_t nbytes, num;
    const int64_t *rows;
} inputs;

static const char *input_at(const inputs *from, int64_t t) {
    return from->x + (from->rows == NULL ? t : from->rows[t]) * from->nbytes;
}

static int is_many(int format, const task *tasks) { return format != ROWS && tasks->num_tokens > TASK_TOKENS; }

/* Of one task with more than TASK_TOKENS tokens, some at a time: `inner`, and `down` where it is not NULL. */
static int run_many(const instruction_set *set, dots *inner, sums *down, inputs from, int num_threads) {
    const task all = *inner->tasks;
    const char *down_weights = down != NULL ? down->tasks->weights : NULL;
    const int dtype = taken_as(set, inner->dtype);
    const int64_t width = inner->width, nbytes = inner_neuron_nbytes(inner);
    unit *x = (unit *)allocate((MANY_TOKENS < all.num_tokens ? MANY_TOKENS : all.num_tokens) * tile_row_nbytes(width) / 4);
    if (x == NULL) return -1;
    for (int64_t t = 0, num; t < all.num_tokens; t += num) {
        const int64_t left = all.num_tokens - t, parts = (left + MANY_TOKENS - 1) / MANY_TOKENS;
        num = (left + parts - 1) / parts;
        task some = some_tokens(&all, t, num);
        for (int64_t i = 0; i < num; i++) set->many_prepare(dtype, input_at(&from, some.x_row + i), width, x + i, num);
        inner->tasks = &some;
        inner->dtype = dtype;
        inner->x = (const float *)x;
        inner->chunk = chunk_of(MANY_CHUNK_NBYTES, inner->num_neurons, nbytes, 1, inner->block_size);
        inner->num_chunks = (inner->num_neurons + inner->chunk - 1) / inner->chunk;
        inner->chunks.num = inner->num_chunks;
        run(set->dots, inner, &inner->chunks, num_threads, inner->num_neurons * nbytes);
        if (down == NULL) continue;
        some.weights = down_weights;
        down->tasks = &some;
        down->dtype = dtype;
        down->h = (const float *)inner->then->h;
        down->chunks.num = (down->width + MANY_OUTPUTS - 1) / MANY_OUTPUTS;
        run(set->many_sums, down, &down->chunks, num_threads, down->num_neurons * neuron_nbytes(down->format, dtype, down->width));
    }
    free(x);
    return 0;
}

/* `job` with its inputs, in memory to be freed, and `chunk` neurons a chunk: whether it can be done. */
static int begin_dots(const instruction_set *set, dots *job, int64_t num_tasks, inputs from, int64_t chunk) {
    if (!can_do(set, job->dtype, job->tasks, num_tasks, job->num_neurons, job->width)) return 0;
    if (job->num_matrices < 1 || job->num_matrices > 2 || (job->bias != NULL && job->num_matrices != 1)) return 0;
    const int format = job->format;
    job->dtype = taken_as(set, job->dtype);
    job->padded_width = format == ROWS ? (job->width + set->block - 1) / set->block * set->block
                                       : tile_row_nbytes(job->width) / (int64_t)sizeof(float);
    job->chunk = chunk;
    job->num_chunks = (job->num_neurons + chunk - 1) / chunk;
    job->chunks.num = num_tasks * job->num_chunks;
    const int is_twice = format != ROWS && job->num_matrices > 1 && job->up_format != format;
    float *prepared = allocate((1 + is_twice) * from.num * job->padded_width);
    if (prepared == NULL) return 0;
    job->x = prepared;
    job->up_x = prepared + is_twice * from.num * job->padded_width;
    for (int64_t t = 0; t < from.num; t++, prepared += job->padded_width) {
        const char *x = input_at(&from, t);
        if (format == ROWS) set->prepare(job->dtype, x, job->width, prepared);
        else set->tile_prepare(format, job->dtype, x, job->width, prepared);
        if (is_twice) set->tile_prepare(job->up_format, job->dtype, x, job->width, prepared + (job->up_x - job->x));
    }
    return 1;
}

/* The products of `job` but for its inputs and chunks. */
static int run_dots(const instruction_set *set, dots job, int64_t num_tasks, inputs from, int num_threads) {
    if (num_tasks == 1 && is_many(job.format, job.tasks)) return run_many(set, &job, NULL, from, num_threads);
    const int64_t nbytes = inner_neuron_nbytes(&job);
    const int64_t block = job.format == ROWS ? ROWS_BLOCK : job.block_size;
    const int64_t chunk = chunk_of(CHUNK_NBYTES, job.num_neurons, nbytes, 8, block);
    if (!begin_dots(set, &job, num_tasks, from, chunk)) return -1;
    run(set->dots, &job, &job.chunks, num_threads, num_tasks * job.num_neurons * nbytes);
    free((void *)job.x);
    return 0;
}

/* out[M, out_rows, r] from rows of x[num_x, H], `x_nbytes` apart. `bias` is NULL, or [r] where M is 1. */
int expertly_products_dots(int level, int dtype, int num_threads, const task *tasks, int64_t num_tasks,
                           int64_t num_matrices, int64_t num_neurons, int64_t width, int64_t row_nbytes,
                           int64_t matrix_nbytes, const char *x, int64_t num_x, int64_t x_nbytes,
                           const char *bias, char *out, int64_t out_rows) {
    const dots job = {
        .format = ROWS, .dtype = dtype, .num_matrices = (int32_t)num_matrices, .num_neurons = num_neurons, .width = width,
        .row_nbytes = row_nbytes, .matrix_nbytes = matrix_nbytes, .bias = bias, .out = out, .out_rows = out_rows,
        .tasks = tasks,
    };
    return run_dots(set_at(level), job, num_tasks, (inputs){x, x_nbytes, num_x, NULL}, num_threads);
}

/* `job` with memory to be freed, and `chunk` neurons a chunk: whether it can be done. */
static int begin_sums(const instruction_set *set, sums *job, int64_t num_tasks, int64_t chunk) {
    if (!can_do(set, job->dtype, job->tasks, num_tasks, job->num_neurons, job->width)) return 0;
    job->dtype = taken_as(set, job->dtype);
    job->padded_width = (job->width + set->block - 1) / set->block * set->block;
    job->chunk = chunk;
    job->num_chunks = (job->num_neurons + chunk - 1) / chunk;
    job->left = malloc(2 * (size_t)num_tasks * sizeof(int64_t));
    if (job->left == NULL) return 0;
    job->rows_before = job->left + num_tasks;
    int64_t num_rows = 0;
    for (int64_t i = 0; i < num_tasks; num_rows += job->tasks[i++].num_tokens) {
        job->left[i] = job->num_chunks;
        job->rows_before[i] = num_rows;
    }
    job->partial = allocate(num_rows * job->num_chunks * job->padded_width);
    return job->partial != NULL;
}

static void end_sums(const sums *job) {
    free(job->partial);
    free(job->left);
}

/* As expertly_products_dots, of quantised matrices: a task's weights are the first of its blocks. */
int expertly_tiles_dots(int level, int gate, int up, int down, int dtype, int num_threads, const task *tasks,
                        int64_t num_tasks, int64_t num_inner, int64_t num_neurons, int64_t hidden, int64_t block_nbytes, const char *x,
                        int64_t num_x, int64_t x_nbytes, const char *bias, char *out, int64_t out_rows) {
    const instruction_set *set = set_at(level);
    if (!has_tiles(set, gate, up, down, dtype, num_inner, num_neurons, hidden, block_nbytes)) return -1;
    const dots job = {
        .format = gate, .up_format = up, .dtype = dtype, .num_matrices = (int32_t)num_inner, .num_neurons = num_neurons, .width = hidden,
        .block_size = block_size(down), .row_nbytes = block_nbytes, .bias = bias, .out = out, .out_rows = out_rows,
        .tasks = tasks,
    };
    return run_dots(set, job, num_tasks, (inputs){x, x_nbytes, num_x, NULL}, num_threads);
}

/* -- a layer's experts ----------------------------------------------------------------------------------------------- */

/* Both products of each task and what is between them, chunk by chunk. */
int expertly_experts(int level, int dtype, int num_threads, const experts_call *call) {
    const instruction_set *set = set_at(level);
    const int gate = (int)call->gate, up = (int)call->up, down = (int)call->down, is_tiled = gate != ROWS;
    const int64_t r = call->num_neurons, hidden = call->hidden, num_inner = call->num_inner, num_tasks = call->num_tasks;
    if (set == NULL || num_inner < 1 || num_inner > 2 || call->f == NULL) return -1;
    if (num_tasks < 1) return -1;
    const int64_t row_nbytes = call->row_nbytes;
    if (is_tiled && (down == NO_DOWN || !has_tiles(set, gate, up, down, dtype, num_inner, r, hidden, row_nbytes))) return -1;
    int64_t num_rows = 0;
    for (int64_t i = 0; i < num_tasks; i++) {
        if (call->tasks[i].num_tokens < 1) return -1;
        num_rows += call->tasks[i].num_tokens;
    }
    const int64_t at = is_tiled ? inner_nbytes(gate, up, down, num_inner, hidden) : num_inner * call->matrix_nbytes;
    const int64_t block = is_tiled ? block_size(down) : ROWS_BLOCK;
    const int64_t h_row_nbytes = is_tiled ? tile_row_nbytes(r) : r * (int64_t)sizeof(float);
    const int is_one = num_tasks == 1 && is_many(gate, &(task){NULL, 0, num_rows, 0});
    const int64_t h_rows = is_one && num_rows > MANY_TOKENS ? MANY_TOKENS : num_rows;
    const int64_t h_nbytes = (h_rows * h_row_nbytes + 63) / 64 * 64;
    const int64_t inner_out_nbytes = is_one ? 0 : num_inner * num_rows * r * itemsize_of(dtype);
    char *memory = allocate((h_nbytes + inner_out_nbytes + 3) / (int64_t)sizeof(float));
    task *tasks = malloc(2 * (size_t)num_tasks * sizeof(task)), *of_sums = tasks + num_tasks;
    int64_t *experts = malloc((size_t)(num_tasks + num_rows) * sizeof(int64_t)), *x_rows = experts + num_tasks, num_x = 0;
    int can = memory != NULL && tasks != NULL && experts != NULL;
    for (int64_t i = 0, row = 0; can && i < num_tasks; i++) {
        const expert_task one = call->tasks[i];
        const int64_t *of_x = call->x_rows + row, num = one.num_tokens;
        if (i && num == call->tasks[i - 1].num_tokens && !memcmp(of_x, of_x - num, (size_t)num * sizeof(int64_t)))
            num_x -= num; /* those of the task before */
        memcpy(x_rows + num_x, of_x, (size_t)num * sizeof(int64_t));
        tasks[i] = (task){one.weights, num_x, num, row};
        num_x += num;
        of_sums[i] = (task){one.weights + at, row, one.num_tokens, row};
        experts[i] = one.expert;
        row += one.num_tokens;
    }
    const activation then = {
        .f = call->f, .g = call->g, .experts = experts, .bias = {call->inner_bias[0], call->inner_bias[1]},
        .bias_width = call->bias_width, .bias_at = call->bias_at, .h = memory,
        .h_row_nbytes = is_one ? (int64_t)sizeof(unit) : h_row_nbytes, .format = is_one ? MANY : down,
        .dtype = taken_as(set, dtype),
    };
    expert_rows job = {
        .inner = {
            .then = &then, .format = gate, .up_format = up, .dtype = dtype, .num_matrices = (int32_t)num_inner, .num_neurons = r,
            .width = hidden, .block_size = block, .row_nbytes = row_nbytes, .matrix_nbytes = call->matrix_nbytes,
            .out = memory + h_nbytes, .out_rows = num_rows, .tasks = tasks,
        },
        .down = {
            .out_rows = call->out_rows, .experts = experts, .bias = call->is_added ? NULL : call->down_bias,
            .format = down, .dtype = dtype, .is_added = (int32_t)call->is_added, .num_neurons = r, .width = hidden,
            .row_nbytes = row_nbytes, .h = (const float *)memory, .out = call->out, .tasks = of_sums,
        },
    };
    const int64_t nbytes = inner_neuron_nbytes(&job.inner) + neuron_nbytes(down, dtype, hidden);
    const int64_t chunk = chunk_of(EXPERTS_CHUNK_NBYTES, r, nbytes, 32, block);
    const inputs from = {call->x, call->x_nbytes, num_x, x_rows};
    if (is_one) can = can && !run_many(set, &job.inner, &job.down, from, num_threads);
    else {
        can = can && begin_dots(set, &job.inner, num_tasks, from, chunk) && begin_sums(set, &job.down, num_tasks, chunk);
        if (can) run(set->experts, &job, &job.inner.chunks, num_threads, num_tasks * r * nbytes);
        free((void *)job.inner.x);
        end_sums(&job.down);
    }
    free(memory);
    free(tasks);
    free(experts);
    return can ? 0 : -1;
}

/* out[num, width] = the sums of rows[num, top_k, width] times weights[num, top_k], in dtype or float32. */
int expertly_combine(int level, int dtype, int weights_dtype, int64_t num, int64_t top_k, int64_t width, const char *rows,
                     const char *weights, char *out) {
    const instruction_set *set = set_at(level);
    if (!takes(set, dtype) || (weights_dtype != FLOAT32 && weights_dtype != dtype)) return -1;
    set->combine(dtype, weights_dtype, num, top_k, width, rows, weights, out);
    return 0;
}

/* out[rows, width] in dtype, from the blocks of a matrix alone. */
int expertly_tiles_decode(int level, int format, int dtype, const char *weights, int64_t num_rows, int64_t width, char *out) {
    const instruction_set *set = set_at(level);
    if (!has_tiles(set, format, format, NO_DOWN, dtype, 1, num_rows, width, INT64_MAX)) return -1;
    set->decode_rows(format, dtype, weights, num_rows, width, out);
    return 0;
}

/* -- attention and norms --------------------------------------------------------------------------------------------- */

/* What a caller says of an attention, in this order. */
typedef struct {
    int64_t num_batches, num_heads, num_kv_heads, num_tokens, num_keys, key_width, value_width;
    const char *q, *k, *v, *mask, *sinks; /* mask and sinks: or NULL */
    char *out;
    int64_t q_strides[3], k_strides[3], v_strides[3]; /* in numbers */
    int64_t mask_strides[3];                          /* in bytes */
    int64_t mask_dtype, sinks_dtype;
    const int64_t *positions; /* [num_keys], of one sequence's keys and values, each below num_positions; or NULL */
    int64_t num_positions;
    const float *factors;     /* [num_kv_heads, key_width]: keys, which were divided by these, and values are CODES; or NULL */
    const char *then_weight, *then_bias; /* [then_rows, heads * value_width], [then_rows]: of a linear layer, or NULL */
    int64_t then_rows;
    char *then_out; /* [B * n, then_rows] */
} attention_call;

/* out[B, n, heads, value width], contiguous, and what a linear layer makes of it; values of a token lie side by side in
   all tensors. */
int expertly_attention(int level, int dtype, int num_threads, const attention_call *call, double scale,
                       double softcap) {
    const instruction_set *set = set_at(level);
    const int64_t num_batches = call->num_batches, heads = call->num_heads, kv_heads = call->num_kv_heads;
    if (!takes(set, dtype)) return -1;
    if (num_batches < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads || call->num_tokens < 1) return -1;
    if (call->num_keys < 1 || call->key_width < 1 || call->value_width < 1) return -1;
    for (int64_t s = 0; call->positions != NULL && s < call->num_keys; s++)
        if (num_batches > 1 || call->positions[s] < 0 || call->positions[s] >= call->num_positions) return -1;
    const int64_t rows = heads / kv_heads * call->num_tokens, block = set->block;
    const int64_t padded_key = (call->key_width + block - 1) / block * block;
    const int64_t padded_value = (call->value_width + block - 1) / block * block;
    const int64_t kv_itemsize = call->factors == NULL ? itemsize_of(dtype) : 1;
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
        const int64_t batch = row / (kv_heads * rows), groups = heads / kv_heads, token = row % rows / groups;
        const int64_t head = row / rows % kv_heads * groups + row % groups;
        const int64_t *strides = call->q_strides, at = batch * strides[0] + head * strides[1] + token * strides[2];
        float *to = memory + row * padded_key;
        const char *from = call->q + at * itemsize_of(dtype);
        if (call->factors == NULL) {
            set->prepare(dtype, from, call->key_width, to);
            for (int64_t j = 0; j < padded_key; j++) to[j] *= (float)scale;
            continue;
        }
        const float *factors = call->factors + row / rows % kv_heads * call->key_width;
        set->widen(dtype, from, call->key_width, to);
        memset(to + call->key_width, 0, (size_t)(padded_key - call->key_width) * sizeof(float));
        for (int64_t j = 0; j < call->key_width; j++) to[j] *= (float)scale * factors[j];
    }
    for (int64_t i = 0; i < jobs; i++) left[i] = num_chunks;
    float *sinks = memory + q_floats + jobs * num_chunks * rows * partial_width;
    if (call->sinks != NULL) set->widen((int)call->sinks_dtype, call->sinks, heads, sinks);
    attention job = {
        .dtype = dtype, .mask_dtype = (int32_t)(call->mask == NULL ? NO_MASK : call->mask_dtype),
        .num_kv_heads = kv_heads, .num_rows = rows,
        .num_tokens = call->num_tokens, .num_keys = call->num_keys, .key_width = call->key_width,
        .padded_key_width = padded_key, .value_width = call->value_width, .padded_value_width = padded_value,
        .k = call->k, .v = call->v, .positions = call->positions, .are_codes = call->factors != NULL, .mask = call->mask, .q = memory, .sinks = call->sinks == NULL ? NULL : sinks,
        .softcap = (float)softcap, .partial = memory + q_floats, .partial_width = partial_width, .left = left,
        .out = call->out, .num_chunks = num_chunks, .chunks = {.num = jobs * num_chunks},
    };
    for (int i = 0; i < 3; i++) {
        job.k_strides[i] = call->k_strides[i] * kv_itemsize;
        job.v_strides[i] = call->v_strides[i] * kv_itemsize;
    }
    memcpy(job.mask_strides, call->mask_strides, sizeof job.mask_strides);
    run(set->attention, &job, &job.chunks, num_threads,
        jobs * call->num_keys * (call->key_width + call->value_width) * kv_itemsize);
    free(memory);
    free(left);
    if (call->then_weight == NULL) return 0;
    const int64_t num_tokens = num_batches * call->num_tokens, width = heads * call->value_width;
    const int64_t row_nbytes = width * itemsize_of(dtype);
    const task all = {call->then_weight, 0, num_tokens, 0};
    const dots then = {
        .format = ROWS, .dtype = dtype, .num_matrices = 1, .num_neurons = call->then_rows, .width = width,
        .row_nbytes = row_nbytes, .bias = call->then_bias, .out = call->then_out, .out_rows = num_tokens, .tasks = &all,
    };
    return run_dots(set, then, 1, (inputs){call->out, row_nbytes, num_tokens, NULL}, num_threads);
}

/* out[num, width]: rows of x over the root of their mean square and `epsilon`; weight [width], or NULL. */
int expertly_norm(int level, int dtype, int style, int64_t num, int64_t width, const char *x, int64_t x_nbytes,
                  const char *weight, double epsilon, char *out) {
    const instruction_set *set = set_at(level);
    if (!takes(set, dtype)) return -1;
    if (style < 0 || style >= NUM_STYLES || num < 0 || width < 1) return -1;
    return set->norm(dtype, style, num, width, x, x_nbytes, weight, (float)epsilon, out);
}

int expertly_projections(int level, int dtype, int num_threads, const projections *p, double first_epsilon,
                         double second_epsilon) {
    const instruction_set *set = set_at(level);
    if (!takes(set, dtype)) return -1;
    if (p->rotated_width < 0 || p->rotated_width % 2 || p->rotated_width > 1024 || p->num_positions < 1) return -1;
    const double epsilons[2] = {first_epsilon, second_epsilon};
    const task all = {NULL, 0, p->num_tokens, 0};
    for (int i = 0; i < 3; i++) {
        task one = all;
        one.weights = p->weights[i];
        const int format = (int)p->formats[i];
        if (format != ROWS && !has_tiles(set, format, format, NO_DOWN, dtype, 1, p->num_rows[i], p->hidden, p->row_nbytes[i])) return -1;
        const dots job = {
            .format = format, .up_format = format, .dtype = dtype, .num_matrices = 1, .num_neurons = p->num_rows[i],
            .width = p->hidden, .block_size = block_size(NO_DOWN), .row_nbytes = p->row_nbytes[i], .bias = p->bias[i],
            .out = p->out[i], .out_rows = p->num_tokens, .tasks = &one,
        };
        if (run_dots(set, job, 1, (inputs){p->x, p->x_nbytes, p->num_tokens, NULL}, num_threads)) return -1;
        if (i == 2) break;
        if (p->norms[i] != NULL)
            set->norm(dtype, (int)p->norm_style[i], p->num_tokens * p->num_rows[i] / p->norm_width[i], p->norm_width[i],
                      p->out[i], p->norm_width[i] * itemsize_of(dtype), p->norms[i], (float)epsilons[i], p->out[i]);
        if (p->rotated_width) set->rotate(dtype, p, p->num_rows[i], p->out[i]);
    }
    const int64_t nbytes = p->head_width * itemsize_of(dtype);
    for (int i = 1; i < 3 && p->places[i - 1] != NULL; i++)
        for (int64_t t = 0, length = p->num_tokens / p->num_sequences; t < p->num_tokens; t++)
            for (int64_t head = 0, heads = p->num_rows[i] / p->head_width; head < heads; head++) {
                const int64_t *strides = p->place_strides[i - 1];
                char *place = p->places[i - 1] + t / length * strides[0] + head * strides[1];
                const char *row = p->out[i] + (t * heads + head) * nbytes;
                if (p->factors == NULL) {
                    memcpy(place + t % length * nbytes, row, (size_t)nbytes);
                    continue;
                }
                const float *factors = i == 1 ? p->factors + head * p->head_width : NULL;
                set->encode(dtype, row, p->head_width, factors, place + t % length * (p->head_width + STEP_NBYTES));
            }
    return 0;
}

/* out[B, heads, n, width + STEP_NBYTES]: rows of x[B, heads, n, width] as CODES, of keys over factors[heads, width]. */
int expertly_encode(int level, int dtype, int64_t num_batches, int64_t num_heads, int64_t num_tokens, int64_t width,
                    const char *x, const float *factors, char *out) {
    const instruction_set *set = set_at(level);
    if (!takes(set, dtype) || num_batches < 0 || num_heads < 0 || num_tokens < 0 || width < 1) return -1;
    for (int64_t row = 0; row < num_batches * num_heads * num_tokens; row++)
        set->encode(dtype, x + row * width * itemsize_of(dtype), width,
                    factors == NULL ? NULL : factors + row / num_tokens % num_heads * width,
                    out + row * (width + STEP_NBYTES));
    return 0;
}

/* -- routers --------------------------------------------------------------------------------------------------------- */

typedef struct {
    float score;
    int64_t id;
} scored;

static void exchange(scored *a, scored *b) {
    const scored one = *a;
    *a = *b;
    *b = one;
}

static void sort_few(scored *first, scored *end) {
    for (scored *i = first; i < end; i++) {
        const scored one = *i;
        scored *to = i;
        for (; to > first && one.score > to[-1].score; to--) *to = to[-1];
        *to = one;
    }
}

/* The `num` highest first, in order. Of equal scores those that torch chooses: by std::nth_element and std::sort as GNU has
 * them, but for what they do when that takes long: 0.
 */
static int choose(scored *all, int64_t num_all, int64_t num) {
    scored *first = all, *end = all + num_all, *const last = all + num - 1;
    for (int depth = 2 * (63 - __builtin_clzll((unsigned long long)num_all)); end - first > 3; depth--) {
        if (depth == 0) return 0;
        scored *a = first + 1, *b = first + (end - first) / 2, *c = end - 1;
        scored *median = a->score > b->score   ? b->score > c->score ? b : a->score > c->score ? c : a
                         : a->score > c->score ? a
                         : b->score > c->score ? c
                                               : b;
        exchange(first, median);
        for (b = end;; a++) {
            while (a->score > first->score) a++;
            for (b--; first->score > b->score;) b--;
            if (a >= b) break;
            exchange(a, b);
        }
        if (a <= last) first = a;
        else end = a;
    }
    sort_few(first, end);
    sort_few(all, last);
    return 1;
}

/* Shares of all scores that differ, but by less than another exp may: torch may have them in another order. */
static int is_unsure(const scored *all, int64_t num_all, int64_t num) {
    float next = 0;
    for (int64_t i = num; i < num_all; i++) next = all[i].score > next ? all[i].score : next;
    for (int64_t i = 0; i < num; i++) {
        const float one = all[i].score, other = i + 1 < num ? all[i + 1].score : num < num_all ? next : -1;
        if (one != other && one - other < 1e-5f * one) return 1;
    }
    return 0;
}

/* 1: torch is to choose. */
int expertly_router(int level, int dtype, int num_threads, const router *r) {
    const instruction_set *set = set_at(level);
    const int64_t num = r->num_experts, top_k = r->top_k;
    if (top_k < 1 || top_k > num || top_k > MOST_CHOSEN || top_k * 64 <= num) return 1; /* another of torch's ways */
    const task all_rows = {r->weight, 0, r->num_tokens, 0};
    const dots job = {
        .format = ROWS, .dtype = dtype, .num_matrices = 1, .num_neurons = num, .width = r->hidden,
        .row_nbytes = r->hidden * itemsize_of(dtype), .bias = r->bias, .out = r->logits, .out_rows = r->num_tokens,
        .tasks = &all_rows,
    };
    const inputs from = {r->x, r->hidden * itemsize_of(dtype), r->num_tokens, NULL};
    if (run_dots(set, job, 1, from, num_threads)) return -1;
    float *scores = allocate(num + 64), chosen[MOST_CHOSEN];
    scored *all = malloc((size_t)num * sizeof(scored));
    int failed = scores == NULL || all == NULL ? -1 : 0;
    for (int64_t t = 0; failed >= 0 && t < r->num_tokens; t++) { /* all, whose scores may be asked for */
        set->widen(dtype, r->logits + t * num * itemsize_of(dtype), num, scores);
        int can = set->softmax(num, scores);
        if (r->scores) memcpy(r->scores + t * num, scores, (size_t)num * sizeof *scores);
        for (int64_t i = 0; i < num; i++) all[i] = (scored){scores[i], i};
        can = can && choose(all, num, top_k) && !is_unsure(all, num, top_k);
        float sum = 0;
        for (int64_t i = 0; i < top_k; i++) {
            sum += chosen[i] = all[i].score;
            r->ids[t * top_k + i] = all[i].id;
        }
        for (int64_t i = 0; i < top_k && r->is_normalised; i++) chosen[i] /= sum;
        const int weights_dtype = (int)r->weights_dtype;
        set->narrow(weights_dtype, chosen, top_k, r->weights + t * top_k * itemsize_of(weights_dtype));
        if (!can) failed = 1;
    }
    free(scores);
    free(all);
    return failed;
}

#include "program.h"
