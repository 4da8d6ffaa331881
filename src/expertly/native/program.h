/* A program: what a decoder layer does with a few tokens, step by step in one call, on memory that stays where it is.
 * model/programs.py notes the steps while the layer's own forward runs.
 */

#include <time.h>

enum { NORM, PROJECTIONS, ATTENTION, ROUTER, DOTS, TILES, EXPERTS, ADD, MULTIPLY, LOOKED_UP, FOLLOWING };

/* `at`: the arguments of the function of this kind, in order, numbers as int64_t, addresses and doubles as their bits. */
typedef struct {
    int64_t kind, is_ready; /* 0: the caller takes this step, and goes on behind it */
    int64_t at[14];
} step;

/* A layer's chosen experts, one token's: their outputs, weighed, [H]. */
typedef struct {
    experts_call call; /* whose tasks and rows are made here */
    const int64_t *ids, *slots; /* [K]; of each expert the slot of its first part, or -1 where it is not wholly there */
    const char *base;           /* slot 0 */
    int64_t slot_nbytes, num_chosen, num_experts, weights_dtype;
    const char *weights; /* [K] */
    char *outputs, *out; /* [K, H], [H] */
    const float *early;  /* [num_next], or NULL: what the next layer's router says early */
    const int64_t *next_slots; /* as `slots` */
    int64_t num_next, num_named; /* so many of its best experts will be named */
    int64_t begin_ns, end_ns;
} chosen_experts;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static double as_double(int64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Whether an expert that will be named of the next layer is not there: of the best by scores in float16, as who names them
 * sees these, of equal ones the lowest ids; none whose score is 0.
 */
static int lacks_next(const instruction_set *set, const chosen_experts *chosen) {
    enum { SOME = 256 };
    uint16_t scores[SOME], best = 0;
    int64_t best_id = -1, num_better = 0;
    for (int is_counting = 0; is_counting < 2; is_counting++)
        for (int64_t first = 0; first < chosen->num_next; first += SOME) {
            const int64_t num = chosen->num_next - first < SOME ? chosen->num_next - first : SOME;
            set->narrow(FLOAT16, chosen->early + first, num, (char *)scores);
            for (int64_t i = 0; i < num; i++) {
                if (scores[i] > 0x7c00) return 1; /* below 0, or NaN */
                if (is_counting) num_better += scores[i] > best || (scores[i] == best && first + i < best_id);
                else if (chosen->next_slots[first + i] < 0 && scores[i] > best) best = scores[i], best_id = first + i;
            }
        }
    return best && num_better < chosen->num_named;
}

/* 1: not all of them are there, or not all that will be named. */
static int run_experts(int level, int dtype, int num_threads, chosen_experts *chosen) {
    expert_task tasks[MOST_CHOSEN];
    int64_t zeros[MOST_CHOSEN] = {0}, rows[MOST_CHOSEN];
    const int64_t num = chosen->num_chosen;
    if (num < 1 || num > MOST_CHOSEN) return 1;
    for (int64_t i = 0; i < num; i++) {
        const int64_t id = chosen->ids[i];
        if (id < 0 || id >= chosen->num_experts || chosen->slots[id] < 0) return 1;
        tasks[i] = (expert_task){chosen->base + chosen->slots[id] * chosen->slot_nbytes, 1, id};
        rows[i] = i;
    }
    if (chosen->early && lacks_next(set_at(level), chosen)) return 1;
    chosen->begin_ns = now_ns();
    experts_call call = chosen->call;
    call.tasks = tasks;
    call.num_tasks = num;
    call.x_rows = zeros;
    call.out_rows = rows;
    call.out = chosen->outputs;
    if (expertly_experts(level, dtype, num_threads, &call)) return -1;
    const int failed = expertly_combine(level, dtype, (int)chosen->weights_dtype, 1, num, call.hidden, chosen->outputs,
                                        chosen->weights, chosen->out);
    chosen->end_ns = now_ns();
    return failed;
}

enum { EACH, ONE, CONSTANT }; /* the second operand: as many numbers, one of the dtype, or a double's bits */

/* out[n] = a + b or a b, in float32 and rounded once. */
static int run_elementwise(const instruction_set *set, int kind, int dtype, int64_t num, const char *a, int64_t b,
                           int64_t what, char *out) {
    float x[256], y[256];
    const int64_t size = itemsize_of(dtype);
    for (int64_t begin = 0; begin < num; begin += 256) {
        const int64_t some = num - begin < 256 ? num - begin : 256;
        set->widen(dtype, a + begin * size, some, x);
        if (what == EACH) set->widen(dtype, (const char *)b + begin * size, some, y);
        else {
            if (what == ONE) set->widen(dtype, (const char *)b, 1, y);
            else y[0] = (float)as_double(b);
            for (int64_t i = 1; i < some; i++) y[i] = y[0];
        }
        if (kind == ADD)
            for (int64_t i = 0; i < some; i++) x[i] += y[i];
        else
            for (int64_t i = 0; i < some; i++) x[i] *= y[i];
        set->narrow(dtype, x, some, out + begin * size);
    }
    return 0;
}

/* out[n] = what a table has for each 16-bit number. */
static int look_up(int64_t num, const uint16_t *x, const uint16_t *table, uint16_t *out) {
    for (int64_t i = 0; i < num; i++) out[i] = table[x[i]];
    return 0;
}

/* Steps from `begin` on, to the first that is not ready, as the last one of a program may be: it goes on with the program
 * that follows, up to `most` times. Returns the number of the step that did not run, and how many programs further it is,
 * times 2^32; or -1 where a step failed.
 */
int64_t expertly_program(int level, int num_threads, const step *steps, int64_t begin, int64_t most) {
    const instruction_set *set = set_at(level);
    for (int64_t i = begin, num_further = 0;; i++) {
        const int64_t *at = steps[i].at;
        const int64_t here = num_further << 32 | i;
        if (!steps[i].is_ready || (steps[i].kind == FOLLOWING && num_further == most)) return here;
        int result = -1;
#define P(n) ((char *)at[n])
        const int dtype = (int)at[0];
        switch (steps[i].kind) {
        case NORM:
            result = expertly_norm(level, dtype, (int)at[1], at[2], at[3], P(4), at[5], P(6), as_double(at[7]), P(8));
            break;
        case PROJECTIONS:
            result = expertly_projections(level, dtype, num_threads, (const projections *)at[1], as_double(at[2]), as_double(at[3]));
            break;
        case ATTENTION:
            result = expertly_attention(level, dtype, num_threads, (const attention_call *)at[1], as_double(at[2]), as_double(at[3]));
            break;
        case ROUTER: result = expertly_router(level, dtype, num_threads, (const router *)at[1]); break;
        case DOTS:
            result = expertly_products_dots(level, dtype, num_threads, (const task *)at[1], at[2], at[3], at[4], at[5], at[6],
                                            at[7], P(8), at[9], at[10], P(11), P(12), at[13]);
            break;
        case TILES:
            result = expertly_tiles_dots(level, (int)at[1], (int)at[1], NO_DOWN, dtype, num_threads, (const task *)at[2], 1, 1, at[3],
                                         at[4], at[5], P(6), at[7], at[8], P(9), P(10), at[11]);
            break;
        case EXPERTS: result = run_experts(level, dtype, num_threads, (chosen_experts *)at[1]); break;
        case ADD:
        case MULTIPLY: result = run_elementwise(set, (int)steps[i].kind, dtype, at[1], P(2), at[3], at[4], P(5)); break;
        case LOOKED_UP: result = look_up(at[1], (const uint16_t *)at[2], (const uint16_t *)at[3], (uint16_t *)at[4]); break;
        case FOLLOWING:
            memcpy(P(2), P(1), at[0]);
            steps = (const step *)at[3];
            num_further++;
            i = -1;
            result = 0;
            break;
        default: break;
        }
#undef P
        if (result > 0) return here; /* the caller decides */
        if (result < 0) return -1;
    }
}
