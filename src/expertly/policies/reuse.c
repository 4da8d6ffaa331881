/* The arithmetic of ReuseModel (reuse.py, which explains the constants), in one call a layer. Called through ctypes:
 * plain C, no Python in it. Everything lies in the caller's memory.
 *
 * Every instruction set and compiler gives the same bits: the order of sums is written down, no product is fused with a
 * sum (-ffp-contract=off), and nothing comes from a mathematical library.
 *
 * L layers, E experts of a layer, S experts that it sees. Weights are [S, E] here: sums over S then are sums of rows.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef FASTEST
#elif defined(__x86_64__) && defined(__GLIBC__)
#define FASTEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FASTEST
#endif

enum { BATCH = 4, HORIZON = 8, KEPT = BATCH + HORIZON, LANES = 8, ROWS = 16 };

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define AT(pointer) ((vector *)(pointer))

#define TO_WHOLE 12582912.0f /* added, it rounds to a whole number, which is in the lowest bits */
#define NEGLIGIBLE 1e-10f /* of shares, whose sum is 5 */
#define LEAST_INPUT 1e-20f /* lower ones are 0: some processors take a hundred times as long for the lowest numbers */

/* Of the interface: whoever calls it knows the same number. */
int expertly_reuse_version(void) { return 1; }

/* In the order in which ReuseModel packs them. */
struct given {
    int64_t batch, horizon, num_layers, num_steps, num_ages, num_age_classes, num_rates;
    const int64_t *layers;      /* [L, 5]: its first expert, their number; the same of those it sees; its weights */
    float *mean, *values;       /* of all experts */
    const int64_t *age_classes; /* [num_ages] */
    const float *rates;         /* [num_rates - 1]: the least of each class but the first */
    const double *first_said;   /* [num_rates, num_age_classes] */
    const double *first_weights;
    const float *targets, *near; /* [HORIZON]: the worth of a use after 1, 2, ... steps */
    double fading, rate, least_norm, mean_rate, sum_of_discounts, sharpness, carried;
    double ridge, first_seen, fading_of_rates, fading_of_weights, fading_of_said;
};

struct layer {
    int64_t first, num, first_seen, num_seen;
    int64_t width;    /* E, rounded up to whole vectors */
    int64_t from, to; /* the layers that it sees */
    float *weights;   /* [S, width] */
    float *base;      /* [E] */
    float *product;   /* [E], of weights and inputs as they were after `known` changes of each layer that it sees */
    int64_t *known;
    int64_t num_changes; /* of its own experts' inputs. The last one: inputs fade, and some grow */
    float left;
    int64_t num_changed;
    int32_t *changed;
    float *growth;
    float *inputs; /* [KEPT, S]: a ring of rows, from `oldest` on, as the next four */
    float *values, *similar, *used;
    int32_t *classes; /* [KEPT, E] */
    int64_t oldest, num_kept, num_followed;
    int32_t *age, *rate_class;
    float *served, num_served;
    uint64_t *chosen; /* [num_steps, words]: a bit an expert */
    int64_t words;
};

struct reuse {
    struct given given;
    struct layer *layers;
    float *recent, *needed, *errors, *centred;
    /* similar steps */
    float *alike, *is_followed, *likeness, *shares;
    uint64_t *now;
    int64_t layer, at, num;
    /* own past */
    double *sums, *nums, products[3][4];
    float *said, weights[3];
};

/* -- memory --------------------------------------------------------------------------------------------------------- */

struct arena {
    char *memory;
    size_t used;
};

static void *take(struct arena *arena, size_t count, size_t size) {
    void *found = arena->memory + arena->used;
    arena->used += (count * size + 63) / 64 * 64;
    return found;
}

#define TAKE(pointer, count) ((pointer) = take(arena, (size_t)(count), sizeof *(pointer)))

static void lay_out_layer(struct layer *l, const struct given *given, int64_t number, struct arena *arena) {
    const int64_t *place = given->layers + 5 * number;
    l->first = place[0], l->num = place[1], l->first_seen = place[2], l->num_seen = place[3];
    for (l->from = 0; given->layers[5 * l->from] < l->first_seen;) l->from++;
    for (l->to = number; l->to < given->num_layers && given->layers[5 * l->to] < l->first_seen + l->num_seen;) l->to++;
    l->width = (l->num + LANES - 1) / LANES * LANES;
    l->words = (l->num + 63) / 64;
    l->weights = (float *)(intptr_t)place[4];
    l->num_served = 1;
    TAKE(l->base, l->width);
    TAKE(l->product, l->width);
    TAKE(l->known, l->to - l->from);
    TAKE(l->changed, l->width);
    TAKE(l->growth, l->width);
    TAKE(l->inputs, KEPT * l->num_seen);
    TAKE(l->values, KEPT * l->width);
    TAKE(l->similar, KEPT * l->width);
    TAKE(l->used, KEPT * l->width);
    TAKE(l->classes, KEPT * l->width);
    TAKE(l->age, l->width);
    TAKE(l->rate_class, l->width);
    TAKE(l->served, l->width);
    TAKE(l->chosen, given->num_steps * l->words);
}

/* Bytes of a model's state; 0 where `given` has another batch or horizon. Where `memory` is not NULL it is that many
 * zeros, at a multiple of 64, and becomes the state of a model that has seen nothing. It keeps the pointers in `given`,
 * all but `layers`.
 */
size_t expertly_reuse_begin(char *memory, const struct given *given) {
    struct arena space = {memory, 0}, *arena = &space;
    struct reuse counted, *r;
    struct layer one;
    int64_t most = 0, most_seen = 0, num_experts = 0, num_classes = given->num_rates * given->num_age_classes;
    if (given->batch != BATCH || given->horizon != HORIZON) return 0;
    TAKE(r, 1);
    if (!memory) r = &counted;
    r->given = *given;
    TAKE(r->layers, given->num_layers);
    for (int64_t number = 0; number < given->num_layers; number++) {
        struct layer *l = memory ? &r->layers[number] : &one;
        lay_out_layer(l, given, number, arena);
        for (int64_t e = 0; memory && e < l->num; e++) l->age[e] = (int32_t)given->num_ages;
        most = l->width > most ? l->width : most;
        most_seen = l->num_seen > most_seen ? l->num_seen : most_seen;
        num_experts += l->num;
    }
    TAKE(r->recent, num_experts);
    TAKE(r->needed, BATCH * most);
    TAKE(r->errors, BATCH * most);
    TAKE(r->centred, BATCH * most_seen);
    TAKE(r->alike, given->num_steps);
    TAKE(r->is_followed, given->num_steps);
    TAKE(r->likeness, given->num_steps + HORIZON);
    TAKE(r->shares, given->num_steps);
    TAKE(r->now, (most + 63) / 64);
    TAKE(r->sums, num_classes);
    TAKE(r->nums, num_classes);
    TAKE(r->said, num_classes);
    if (memory) {
        r->layer = given->num_layers;
        for (int64_t i = 0; i < num_classes; i++) r->said[i] = (float)given->first_said[i];
        for (int i = 0; i < 3; i++) r->weights[i] = (float)given->first_weights[i];
    }
    return arena->used;
}

/* -- similar steps -------------------------------------------------------------------------------------------------- */

/* What the last num_steps steps of decode chose, and how alike each is to the running step: by the share of its experts
 * that both chose, in its layers so far, and less in those of the step before. They are not part of a file.
 */

INLINE float dot(const float *a, const float *b, int64_t n) {
    float lanes[LANES] = {0};
    int64_t p = 0;
    for (; p + LANES <= n; p += LANES)
        for (int i = 0; i < LANES; i++) lanes[i] += a[p + i] * b[p + i];
    for (; p < n; p++) lanes[0] += a[p] * b[p];
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

/* For -87 <= x <= 0; to within 2 units of the last place. */
INLINE float exponential(float x) {
    union {
        float value;
        int32_t bits;
    } power = {.value = x * 1.44269504f + TO_WHOLE};
    float whole = power.value - TO_WHOLE, rest = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * (rest * rest) + rest + 1;
    power.bits = (power.bits - 0x4b400000 + 127) << 23; /* 0x4b400000: the bits of TO_WHOLE */
    return sum * power.value;
}

INLINE uint64_t num_bits(uint64_t x) {
    x -= x >> 1 & 0x5555555555555555u;
    x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
    x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu;
    x += x >> 8;
    x += x >> 16;
    return (x + (x >> 32)) & 127;
}

INLINE void add_common(float *alike, const uint64_t *chosen, const uint64_t *now, int64_t words, int64_t n,
                       float each) {
    for (int64_t p = 0; p < n; p++) {
        uint64_t common = 0;
        for (int64_t i = 0; i < words; i++) common += num_bits(chosen[p * words + i] & now[i]);
        alike[p] += (float)(int32_t)common * each;
    }
}

INLINE void begin_step(struct reuse *r) {
    int64_t n = r->given.num_steps;
    float last = r->alike[n - 1];
    r->at = (r->at + 1) % n;
    r->is_followed[r->at] = 0;
    if (++r->num > HORIZON) r->is_followed[(r->at - HORIZON + n) % n] = 1;
    memmove(r->alike + 1, r->alike, (size_t)(n - 1) * sizeof *r->alike);
    r->alike[0] = last;
    for (int64_t p = 0; p < n; p++) r->alike[p] *= (float)r->given.carried;
}

/* What the layer needed after similar steps. */
INLINE void followed_by(struct reuse *r, int64_t number, const int32_t *experts, int64_t num, float *needed) {
    struct layer *l = &r->layers[number];
    int64_t n = r->given.num_steps, words = l->words;
    uint64_t *now = r->now;
    float *alike = r->alike, *likeness = r->likeness + HORIZON, lanes[LANES], most, total;
    float each = (float)(r->given.sharpness / (double)(r->given.num_layers * (num ? num : 1)));

    if (number <= r->layer) begin_step(r);
    r->layer = number;
    memset(now, 0, (size_t)words * sizeof *now);
    for (int64_t i = 0; i < num; i++) now[experts[i] / 64] |= (uint64_t)1 << experts[i] % 64;
    if (words == 1) /* known when it is compiled */
        add_common(alike, l->chosen, now, 1, n, each);
    else if (words == 2)
        add_common(alike, l->chosen, now, 2, n, each);
    else
        add_common(alike, l->chosen, now, words, n, each);
    memcpy(l->chosen + r->at * words, now, (size_t)words * sizeof *now);
    memset(needed, 0, (size_t)l->num * sizeof *needed);

    for (int i = 0; i < LANES; i++) lanes[i] = alike[0];
    for (int64_t p = 0; p + LANES <= n; p += LANES)
        for (int i = 0; i < LANES; i++) lanes[i] = alike[p + i] > lanes[i] ? alike[p + i] : lanes[i];
    for (int64_t p = n / LANES * LANES; p < n; p++) lanes[0] = alike[p] > lanes[0] ? alike[p] : lanes[0];
    most = lanes[0];
    for (int i = 1; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;

    for (int64_t p = 0; p < n; p++) {
        float x = alike[p] - most;
        likeness[p] = exponential(x < -87 ? -87 : x) * r->is_followed[p];
    }
    total = dot(likeness, r->is_followed, n);
    if (!(total > 0)) return;
    memcpy(r->likeness, likeness + n - HORIZON, HORIZON * sizeof *likeness);
    for (int64_t p = 0; p < n; p++) {
        float share = 0;
        for (int k = 0; k < HORIZON; k++) share += likeness[p - 1 - k] * r->given.near[k];
        r->shares[p] = share / total;
    }
    for (int64_t p = 0; p < n; p++) {
        float share = r->shares[p];
        if (share < NEGLIGIBLE) continue;
        for (int64_t i = 0; i < words; i++)
            for (uint64_t bits = l->chosen[p * words + i]; bits; bits &= bits - 1)
                needed[64 * i + __builtin_ctzll(bits)] += share;
    }
}

/* -- own past ------------------------------------------------------------------------------------------------------- */

/* What experts of all layers turned out to be worth, by how long ago and how often they had been used, weighed against
 * the other predictions by a regression on what was then needed. A class is a pair of an age and a rate of use (two
 * classes an octave).
 */

/* x[3] = a[3, 3] ** -1 * b[3], of a symmetric, positive definite matrix. */
INLINE void solve(double a[3][3], double *b, float *x) {
    double found[3];
    for (int i = 0; i < 3; i++)
        for (int j = i + 1; j < 3; j++) {
            double times = a[j][i] / a[i][i];
            for (int k = i; k < 3; k++) a[j][k] -= times * a[i][k];
            b[j] -= times * b[i];
        }
    for (int i = 2; i >= 0; i--) {
        found[i] = b[i];
        for (int k = i + 1; k < 3; k++) found[i] -= a[i][k] * found[k];
        found[i] /= a[i][i];
        x[i] = (float)found[i];
    }
}

/* A row of a ring: the one so many steps after the oldest. */
#define ROW(array, after, width) ((array) + (l->oldest + (after)) % KEPT * (width))

INLINE void learn_past(struct reuse *r, struct layer *l) {
    int64_t num_classes = r->given.num_rates * r->given.num_age_classes;
    double vv = 0, vs = 0, vo = 0, vn = 0, ss = 0, so = 0, sn = 0, oo = 0, on = 0, a[3][3], b[3];
    for (int64_t i = 0; i < num_classes; i++) r->sums[i] *= r->given.fading_of_said;
    for (int64_t i = 0; i < num_classes; i++) r->nums[i] *= r->given.fading_of_said;
    for (int row = 0; row < BATCH; row++) {
        const float *values = ROW(l->values, row, l->width), *similar = ROW(l->similar, row, l->width);
        const int32_t *classes = ROW(l->classes, row, l->width);
        for (int64_t e = 0; e < l->num; e++) {
            double v = values[e], s = similar[e], o = r->said[classes[e]], n = r->needed[row * l->width + e];
            vv += v * v, vs += v * s, vo += v * o, vn += v * n, ss += s * s, so += s * o, sn += s * n;
            oo += o * o, on += o * n;
            r->sums[classes[e]] += n;
            r->nums[classes[e]] += 1;
        }
    }
    double added[3][4] = {{vv, vs, vo, vn}, {vs, ss, so, sn}, {vo, so, oo, on}};
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 4; j++) r->products[i][j] = r->products[i][j] * r->given.fading_of_weights + added[i][j];
        for (int j = 0; j < 3; j++) a[i][j] = r->products[i][j] + (i == j ? r->given.ridge : 0);
        b[i] = r->products[i][3] + r->given.ridge * r->given.first_weights[i];
    }
    solve(a, b, r->weights);
    for (int64_t i = 0; i < num_classes; i++)
        r->said[i] = (float)((r->sums[i] + r->given.first_seen * r->given.first_said[i]) /
                             (r->nums[i] + r->given.first_seen));
}

/* -- a layer -------------------------------------------------------------------------------------------------------- */

INLINE double power(double base, int64_t exponent) {
    double found = 1;
    for (; exponent; exponent >>= 1, base *= base)
        if (exponent & 1) found *= base;
    return found;
}

INLINE void rate(struct reuse *r, struct layer *l) {
    for (int64_t e = 0; e < l->num; e++) {
        float ratio = l->served[e] / l->num_served;
        int32_t above = 0;
        for (int64_t i = 0; i < r->given.num_rates - 1; i++) above += ratio >= r->given.rates[i];
        l->rate_class[e] = above * (int32_t)r->given.num_age_classes;
    }
}

INLINE void follow(struct reuse *r, struct layer *l, const float *recent, int64_t num_tokens) {
    double slow = 1 - power(1 - r->given.mean_rate, num_tokens);
    double fast = (double)num_tokens / (double)(num_tokens > l->num_followed ? num_tokens : l->num_followed);
    float *mean = r->given.mean + l->first, share = (float)(slow > fast ? slow : fast);
    for (int64_t e = 0; e < l->num; e++) mean[e] += (recent[e] - mean[e]) * share;
}

/* Makes the product anew, and the base if the means that count for it are those of now, in one pass over the weights,
 * which first change by `errors` [BATCH, E] times `centred` [BATCH, S] if there are any.
 */
INLINE void pass(struct reuse *r, struct layer *l, int has_base, const float *errors, const float *centred) {
    int64_t num = l->num, width = l->width, num_seen = l->num_seen;
    const float *recent = r->recent + l->first_seen, *mean = r->given.mean + l->first_seen;
    vector e0 = {0}, e1 = {0}, e2 = {0}, e3 = {0};
    memset(l->product, 0, (size_t)width * sizeof(float));
    if (has_base) memset(l->base, 0, (size_t)width * sizeof(float));
    for (int64_t begin = 0; begin < num_seen; begin += ROWS) { /* they stay in the first cache */
        int64_t end = begin + ROWS < num_seen ? begin + ROWS : num_seen;
        for (int64_t e = 0; e < width; e += LANES) {
            vector product = *AT(l->product + e), base = *AT(l->base + e);
            if (errors) {
                e0 = *AT(errors + e), e1 = *AT(errors + width + e);
                e2 = *AT(errors + 2 * width + e), e3 = *AT(errors + 3 * width + e);
            }
            for (int64_t s = begin; s < end; s++) {
                vector *place = AT(l->weights + s * width + e), weights = *place;
                __builtin_prefetch(l->weights + (s + ROWS) * width + e); /* from memory, twice as fast */
                if (errors)
                    *place = weights += (e0 * centred[s] + e1 * centred[num_seen + s]) +
                                        (e2 * centred[2 * num_seen + s] + e3 * centred[3 * num_seen + s]);
                product += weights * recent[s];
                if (has_base) base += weights * mean[s];
            }
            *AT(l->product + e) = product;
            if (has_base) *AT(l->base + e) = base;
        }
    }
    mean = r->given.mean + l->first;
    for (int64_t e = 0; has_base && e < num; e++)
        l->base[e] = mean[e] * (float)r->given.sum_of_discounts - l->base[e];
    for (int64_t m = l->from; m < l->to; m++) l->known[m - l->from] = r->layers[m].num_changes;
}

/* Updates the product. Most often each input has faded once since, and a few have grown: then the rows of these few
 * weights are all that is read.
 */
INLINE void multiply(struct reuse *r, struct layer *l) {
    int64_t width = l->width;
    float left = l->left;
    for (int64_t m = l->from; m < l->to; m++)
        if (r->layers[m].num_changes != l->known[m - l->from] + 1 || r->layers[m].left != left) {
            pass(r, l, 0, NULL, NULL);
            return;
        }
    for (int64_t e = 0; e < width; e++) l->product[e] *= left;
    for (int64_t m = l->from; m < l->to; m++) {
        const struct layer *seen = &r->layers[m];
        const float *weights = l->weights + (seen->first - l->first_seen) * width;
        for (int64_t e = 0; e < width; e += LANES) {
            vector product = *AT(l->product + e);
            for (int64_t i = 0; i < seen->num_changed; i++)
                product += *AT(weights + seen->changed[i] * width + e) * seen->growth[i];
            *AT(l->product + e) = product;
        }
        l->known[m - l->from]++;
    }
}

/* Learn from the oldest steps and drop them. */
INLINE void learn(struct reuse *r, struct layer *l) {
    int64_t num = l->num, width = l->width, num_seen = l->num_seen;
    const float *mean = r->given.mean + l->first_seen;
    for (int row = 0; row < BATCH; row++) {
        const float *inputs = ROW(l->inputs, row, num_seen), *values = ROW(l->values, row, width);
        float *needed = r->needed + row * width, *errors = r->errors + row * width;
        float *centred = r->centred + row * num_seen;
        for (int64_t s = 0; s < num_seen; s++) centred[s] = inputs[s] - mean[s];
        float share = (float)r->given.rate / ((float)r->given.least_norm + dot(centred, centred, num_seen));
        memset(needed, 0, (size_t)width * sizeof *needed);
        memset(errors, 0, (size_t)width * sizeof *errors);
        for (int k = 0; k < HORIZON; k++) {
            const float *used = ROW(l->used, row + 1 + k, width), near = r->given.near[k], far = r->given.targets[k];
            for (int64_t e = 0; e < width; e++) {
                needed[e] += used[e] * near;
                errors[e] += used[e] * far;
            }
        }
        for (int64_t e = 0; e < width; e++) errors[e] = (errors[e] - values[e]) * share;
    }
    learn_past(r, l);
    int64_t own = l->first - l->first_seen;
    const float *i0 = ROW(l->inputs, 0, num_seen) + own, *i1 = ROW(l->inputs, 1, num_seen) + own;
    const float *i2 = ROW(l->inputs, 2, num_seen) + own, *i3 = ROW(l->inputs, 3, num_seen) + own;
    float *recent = r->needed;
    for (int64_t e = 0; e < num; e++) recent[e] = (i0[e] + i1[e] + i2[e] + i3[e]) / BATCH;
    follow(r, l, recent, BATCH);
    pass(r, l, 1, r->errors, r->centred);
    for (int64_t e = 0; e < num; e++) l->served[e] *= (float)r->given.fading_of_rates;
    l->num_served *= (float)r->given.fading_of_rates;
    rate(r, l);
    l->oldest = (l->oldest + BATCH) % KEPT;
    l->num_kept = HORIZON;
}

/* A layer is about to run `batch_tokens` tokens with `num` experts: `numbers` are these, by number in the layer, then
 * the tokens of each. Writes the values of the layer's experts.
 */
FASTEST void expertly_reuse_observe(struct reuse *r, int number, int num, const int32_t *numbers, int64_t batch_tokens,
                                    int is_decode) {
    struct layer *l = &r->layers[number];
    double left = power(r->given.fading, batch_tokens), share = (1 - left) / (double)batch_tokens;
    float *recent = r->recent + l->first;
    int32_t *used = l->changed; /* all that real tokens chose */
    int64_t num_used = 0, experts = l->num, width = l->width;

    l->left = (float)left;
    l->num_changes++;
    for (int64_t e = 0; e < experts; e++) {
        recent[e] *= l->left;
        if (recent[e] < LEAST_INPUT) recent[e] = 0;
    }
    for (int i = 0; i < num; i++)
        if (numbers[num + i]) {
            l->growth[num_used] = (float)(numbers[num + i] * share);
            recent[numbers[i]] += l->growth[num_used];
            used[num_used++] = numbers[i];
        }
    l->num_changed = num_used;

    int has_learned = l->num_kept == KEPT;
    if (has_learned) learn(r, l);
    if (!is_decode) {
        l->num_kept = 0;
        follow(r, l, recent, batch_tokens);
        pass(r, l, 1, NULL, NULL);
    } else if (!has_learned)
        multiply(r, l);

    float *values = ROW(l->values, l->num_kept, width), *similar = ROW(l->similar, l->num_kept, width);
    float *uses = ROW(l->used, l->num_kept, width);
    int32_t *classes = ROW(l->classes, l->num_kept, width);
    memcpy(ROW(l->inputs, l->num_kept, l->num_seen), r->recent + l->first_seen, (size_t)l->num_seen * sizeof(float));
    for (int64_t e = 0; e < width; e++) values[e] = l->product[e] + l->base[e];
    memset(uses, 0, (size_t)width * sizeof *uses);
    for (int64_t e = 0; e < experts; e++) l->age[e] += l->age[e] < r->given.num_ages;
    for (int64_t i = 0; i < num_used; i++) uses[used[i]] = 1, l->age[used[i]] = 0;
    if (is_decode) {
        followed_by(r, number, used, num_used, similar);
        for (int64_t e = 0; e < experts; e++) l->served[e] += uses[e];
        l->num_served += 1;
    } else { /* what follows a prompt does not follow the last steps; its experts' tokens were spread evenly over it */
        r->num = 0;
        r->layer = r->given.num_layers;
        memset(r->alike, 0, (size_t)r->given.num_steps * sizeof *r->alike);
        memset(similar, 0, (size_t)width * sizeof *similar);
        for (int64_t i = 0; i < num_used; i++) {
            float least = 1.0f / (float)batch_tokens, own = recent[used[i]] > least ? recent[used[i]] : least;
            float between = 1 / own, most = (float)r->given.num_ages;
            l->age[used[i]] = (int32_t)((between < most ? between : most) + TO_WHOLE - TO_WHOLE);
        }
        for (int64_t e = 0; e < experts; e++) l->served[e] += recent[e] * (float)batch_tokens;
        l->num_served += (float)batch_tokens;
        rate(r, l);
    }
    float *worth = r->given.values + l->first;
    for (int64_t e = 0; e < experts; e++) {
        int64_t age = l->age[e] < r->given.num_ages ? l->age[e] : r->given.num_ages - 1;
        classes[e] = (int32_t)r->given.age_classes[age] + l->rate_class[e];
        worth[e] = r->said[classes[e]] * r->weights[2] + values[e] * r->weights[0] + similar[e] * r->weights[1];
    }
    l->num_kept++;
    l->num_followed += batch_tokens;
}

/* Weights and means were written; the means of each layer rest on so many tokens. */
void expertly_reuse_restored(struct reuse *r, const int64_t *num_followed) {
    for (int64_t number = 0; number < r->given.num_layers; number++) {
        struct layer *l = &r->layers[number];
        l->num_followed = num_followed[number];
        l->num_kept = 0;
        pass(r, l, 1, NULL, NULL);
    }
}
