/* Attention of a few tokens and root-mean-square norms, for one instruction set: included by products_body.h, whose
 * macros it uses. Both read the model's tensors as they lie, compute in float32 and round once where the result is put.
 */

/* What is added to a row's score with key s: -infinity where it does not see it, however the mask says so. */
INLINE float NAME(seen)(const attention *a, const char *mask, int64_t s) {
    if (a->mask_dtype == NO_MASK) return 0;
    if (a->mask_dtype == BOOLEAN) return mask[s] ? 0 : -__builtin_inff();
    const float added = NAME(value)(a->mask_dtype, mask + s * NAME(itemsize)(a->mask_dtype));
    return added <= UNSEEN ? -__builtin_inff() : added;
}

/* The mask of a row's token. */
INLINE const char *NAME(mask_of)(const attention *a, int64_t batch, int64_t head, int64_t row) {
    const int64_t groups = a->num_rows / a->num_tokens;
    return a->mask + batch * a->mask_strides[0] + (head * groups + row % groups) * a->mask_strides[1] +
           row / groups * a->mask_strides[2];
}

/* Leaves out keys that none of the rows sees, at both ends: those of other sequences, where several lie side by side. */
INLINE void NAME(leave_out)(int N, const attention *a, int64_t batch, int64_t head, int64_t row, int64_t *begin, int64_t *end) {
    const char *masks[4];
    int64_t first = *begin, last = *end - 1;
    int is_seen = 0;
    if (a->mask_dtype == NO_MASK) return;
    for (int t = 0; t < N; t++) masks[t] = NAME(mask_of)(a, batch, head, row + t);
    for (; first <= last; first++) {
        for (int t = 0; t < N && !is_seen; t++) is_seen = NAME(seen)(a, masks[t], first) > -__builtin_inff();
        if (is_seen) break;
    }
    for (is_seen = 0; last > first; last--) {
        for (int t = 0; t < N && !is_seen; t++) is_seen = NAME(seen)(a, masks[t], last) > -__builtin_inff();
        if (is_seen) break;
    }
    *begin += (first - *begin) / V * V; /* sums of weights are of the same vectors as without */
    *end = last + 1;
    if (first == *end) *begin = first;
}

/* Rows `first` to `first + N` of a key head with the keys from `begin` to `end`: their sums, and their largest scores. */
INLINE void NAME(attend_rows)(int dtype, int N, const attention *a, int64_t batch, int64_t head, int64_t first,
                              int64_t begin, int64_t end, float *partial) {
    NAME(leave_out)(N, a, batch, head, first, &begin, &end);
    const int64_t itemsize = NAME(itemsize)(dtype), num = end - begin;
    const int64_t key_full = a->key_width / BLOCK * BLOCK, value_full = a->value_width / BLOCK * BLOCK;
    const char *keys = a->k + batch * a->k_strides[0] + head * a->k_strides[1];
    const char *values = a->v + batch * a->v_strides[0] + head * a->v_strides[1];
    const int64_t *positions = a->positions;
    float scores[4][KEYS_CHUNK];
    const float *q[4];
    for (int t = 0; t < N; t++)
        q[t] = a->q + ((batch * a->num_kv_heads + head) * a->num_rows + first + t) * a->padded_key_width;
    for (int64_t s = 0; s < num; s++) {
        const char *p = keys + (positions == NULL ? begin + s : positions[begin + s]) * a->k_strides[2];
        vf even[4], odd[4];
        for (int t = 0; t < N; t++) even[t] = odd[t] = (vf){0};
        for (int64_t j = 0; j < key_full; j += BLOCK) NAME(dot_block)(dtype, N, p + j * itemsize, q, j, even, odd);
        if (key_full < a->key_width) {
            char tail[BLOCK * 4] = {0};
            memcpy(tail, p + key_full * itemsize, (size_t)((a->key_width - key_full) * itemsize));
            NAME(dot_block)(dtype, N, tail, q, key_full, even, odd);
        }
        const float step = dtype == CODES ? bfloat16_value(p + a->key_width) : 1;
        for (int t = 0; t < N; t++) scores[t][s] = NAME(total)(even[t] + odd[t]) * step;
    }
    const int64_t padded = (num + V - 1) / V * V;
    for (int t = 0; t < N; t++) {
        const char *mask = a->mask_dtype == NO_MASK ? NULL : NAME(mask_of)(a, batch, head, first + t);
        if (a->softcap > 0)
            for (int64_t s = 0; s < num; s++) {
                const float y = NAME(exp_one)(-2 * __builtin_fabsf(scores[t][s]) / a->softcap);
                scores[t][s] = __builtin_copysignf(a->softcap * (1 - y) / (1 + y), scores[t][s]);
            }
        float most = -__builtin_inff();
        for (int64_t s = 0; s < num; s++) {
            scores[t][s] += NAME(seen)(a, mask, begin + s);
            most = scores[t][s] > most ? scores[t][s] : most;
        }
        const vf shift = (vf){0} + (most == -__builtin_inff() ? 0 : most);
        for (int64_t s = num; s < padded; s++) scores[t][s] = -__builtin_inff();
        vf sum = {0};
        for (int64_t s = 0; s < padded; s += V) {
            const vf weights = NAME(exp)(*(vf *)(scores[t] + s) - shift);
            *(vf *)(scores[t] + s) = weights;
            sum += weights;
        }
        float *to = partial + (first + t) * a->partial_width;
        to[0] = most, to[1] = NAME(total)(sum);
    }
    for (int64_t s = 0; dtype == CODES && s < num; s++) {
        const char *p = values + (positions == NULL ? begin + s : positions[begin + s]) * a->v_strides[2];
        for (int t = 0; t < N; t++) scores[t][s] *= bfloat16_value(p + a->value_width);
    }
    for (int64_t j = 0; j < a->padded_value_width; j += BLOCK) {
        vf even[4], odd[4];
        for (int t = 0; t < N; t++) even[t] = odd[t] = (vf){0};
        for (int64_t s = 0; s < num; s++) {
            const char *p = values + (positions == NULL ? begin + s : positions[begin + s]) * a->v_strides[2] + j * itemsize;
            char tail[BLOCK * 4] = {0};
            if (j >= value_full) {
                memcpy(tail, p, (size_t)((a->value_width - value_full) * itemsize));
                p = tail;
            }
            vf w0, w1;
            NAME(load)(dtype, p, &w0, &w1);
            for (int t = 0; t < N; t++) even[t] += w0 * scores[t][s], odd[t] += w1 * scores[t][s];
        }
        for (int t = 0; t < N; t++) {
            float *to = partial + (first + t) * a->partial_width + 2 + j;
            *(vf *)to = even[t], *(vf *)(to + V) = odd[t];
        }
    }
}

/* The chunks of a key head are done: join them, and put the outputs. */
INLINE void NAME(join_chunks)(int dtype, int kv_dtype, const attention *a, int64_t batch, int64_t head) {
    const int64_t itemsize = NAME(itemsize)(dtype), num_groups = a->num_rows / a->num_tokens;
    const int64_t stride = a->num_rows * a->partial_width;
    float *partial = a->partial + (batch * a->num_kv_heads + head) * a->num_chunks * stride;
    for (int64_t row = 0; row < a->num_rows; row++) {
        const int64_t query_head = head * num_groups + row % num_groups;
        float *first = partial + row * a->partial_width;
        float most = a->sinks == NULL ? -__builtin_inff() : a->sinks[query_head], sum = 0;
        for (int64_t c = 0; c < a->num_chunks; c++) most = first[c * stride] > most ? first[c * stride] : most;
        if (most == -__builtin_inff()) most = 0;
        if (a->sinks != NULL) sum = NAME(exp_one)(a->sinks[query_head] - most);
        for (int64_t c = 0; c < a->num_chunks; c++) {
            float *one = first + c * stride;
            const float factor = NAME(exp_one)(one[0] - most);
            sum += one[1] * factor;
            for (int64_t j = 0; j < a->padded_value_width; j += V) {
                vf values = *(vf *)(one + 2 + j) * factor;
                if (c) values += *(vf *)(first + 2 + j);
                *(vf *)(first + 2 + j) = values;
            }
        }
        const int64_t num_heads = a->num_kv_heads * num_groups, token = row / num_groups;
        char *out = a->out + ((batch * a->num_tokens + token) * num_heads + query_head) * a->value_width * itemsize;
        const float scale = sum == 0 ? 0 : 1 / sum; /* a row that sees nothing is zero */
        for (int64_t j = 0; j < a->value_width; j++)
            NAME(put)(dtype, first[2 + NAME(place)(kv_dtype, j)] * scale, out + j * itemsize);
    }
}

INLINE void NAME(attend_typed)(int dtype, int kv_dtype, attention *a) {
    FOR_CHUNKS(c, &a->chunks) {
        const int64_t number = c / a->num_chunks, batch = number / a->num_kv_heads, head = number % a->num_kv_heads;
        const int64_t begin = c % a->num_chunks * KEYS_CHUNK;
        const int64_t end = begin + KEYS_CHUNK < a->num_keys ? begin + KEYS_CHUNK : a->num_keys;
        float *partial = a->partial + c * a->num_rows * a->partial_width;
        int64_t row = 0;
        for (; row + 4 <= a->num_rows; row += 4) NAME(attend_rows)(kv_dtype, 4, a, batch, head, row, begin, end, partial);
        for (; row < a->num_rows; row++) NAME(attend_rows)(kv_dtype, 1, a, batch, head, row, begin, end, partial);
        if (__atomic_sub_fetch(a->left + number, 1, __ATOMIC_ACQ_REL) == 0)
            NAME(join_chunks)(dtype, kv_dtype, a, batch, head);
    }
}

static void NAME(run_attention)(void *argument) {
    attention *a = argument;
    if (a->are_codes) NAME(attend_typed)(a->dtype, CODES, a);
    else if (a->dtype == BFLOAT16) NAME(attend_typed)(BFLOAT16, BFLOAT16, a);
    else if (a->dtype == FLOAT32) NAME(attend_typed)(FLOAT32, FLOAT32, a);
#if HAS_HALF
    else NAME(attend_typed)(FLOAT16, FLOAT16, a);
#endif
}

/* A row of keys, over `factors`, or of values (NULL) as CODES, a step being a 127th of the largest. Where that is not
 * finite, no number of the row is.
 */
INLINE void NAME(encode_typed)(int dtype, const char *x, int64_t width, const float *factors, char *out) {
    const int64_t itemsize = NAME(itemsize)(dtype);
    int32_t most = 0; /* bits of what is not negative are in its order */
    for (int64_t j = 0; j < width; j++) {
        const float value = NAME(value)(dtype, x + j * itemsize) / (factors == NULL ? 1 : factors[j]);
        int32_t bits;
        memcpy(&bits, &value, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, 4);
    put_bfloat16(largest / 127, out + width);
    const float step = bfloat16_value(out + width), inverse = step >= 1.17549435e-38f ? 1 / step : 0;
    if (!(step < __builtin_inff())) {
        memset(out, 129, (size_t)width);
        return;
    }
    for (int64_t j = 0; j < width; j++) {
        const float value = NAME(value)(dtype, x + j * itemsize) / (factors == NULL ? 1 : factors[j]);
        out[j] = (char)(uint8_t)(__builtin_rintf(value * inverse) + 128);
    }
}

static void NAME(encode)(int dtype, const char *x, int64_t width, const float *factors, char *out) {
    if (dtype == BFLOAT16) NAME(encode_typed)(BFLOAT16, x, width, factors, out);
    else if (dtype == FLOAT32) NAME(encode_typed)(FLOAT32, x, width, factors, out);
#if HAS_HALF
    else NAME(encode_typed)(FLOAT16, x, width, factors, out);
#endif
}

/* Rows [num, width] times 1 / root of their mean square, times `weight` as `style` says. Every instruction set has as
 * many sums side by side, so that bfloat16's and float16's norms are the same bits with all of them.
 */
INLINE void NAME(norm_typed)(int dtype, int style, int64_t num, int64_t width, const char *x, int64_t x_nbytes,
                             const char *weight, float epsilon, char *out) {
    const int64_t itemsize = NAME(itemsize)(dtype);
    for (int64_t row = 0; row < num; row++, x += x_nbytes, out += width * itemsize) {
        vf sums[NORM_LANES / V] = {0};
        float rest = 0;
        int64_t j = 0;
        for (; j + NORM_LANES <= width; j += NORM_LANES)
            for (int k = 0; k < NORM_LANES / V; k++) {
                float values[V];
                for (int i = 0; i < V; i++) values[i] = NAME(value)(dtype, x + (j + k * V + i) * itemsize);
                const vf some = *(vf *)values;
                sums[k] += some * some;
            }
        for (int num = NORM_LANES / V; num > 1; num /= 2)
            for (int k = 0; k < num / 2; k++) sums[k] += sums[k + num / 2];
        for (; j < width; j++) {
            const float value = NAME(value)(dtype, x + j * itemsize);
            rest += value * value;
        }
        const float factor = 1 / __builtin_sqrtf((NAME(total)(sums[0]) + rest) / (float)width + epsilon);
        for (j = 0; j < width; j++) {
            float value = NAME(value)(dtype, x + j * itemsize) * factor, w = 1;
            if (style == ROUNDED) {
                char rounded[4];
                NAME(put)(dtype, value, rounded);
                value = NAME(value)(dtype, rounded);
            }
            if (weight != NULL) w = NAME(value)(dtype, weight + j * itemsize);
            NAME(put)(dtype, value * (style == ONE_MORE ? 1 + w : w), out + j * itemsize);
        }
    }
}

static int NAME(norm)(int dtype, int style, int64_t num, int64_t width, const char *x, int64_t x_nbytes,
                      const char *weight, float epsilon, char *out) {
#define CASE(T, S) \
    if (dtype == T && style == S) NAME(norm_typed)(T, S, num, width, x, x_nbytes, weight, epsilon, out);
    CASE(BFLOAT16, ROUNDED) CASE(BFLOAT16, WEIGHED) CASE(BFLOAT16, ONE_MORE)
    CASE(FLOAT32, ROUNDED) CASE(FLOAT32, WEIGHED) CASE(FLOAT32, ONE_MORE)
#if HAS_HALF
    CASE(FLOAT16, ROUNDED) CASE(FLOAT16, WEIGHED) CASE(FLOAT16, ONE_MORE)
#endif
#undef CASE
    return 0;
}

/* Heads of values[n, width] by the angles of their position: each half of what is rotated is the other's partner. Products
 * and sums are rounded as torch rounds them.
 */
INLINE void NAME(rotate_typed)(int dtype, const projections *p, int64_t width, char *values) {
    const int64_t itemsize = NAME(itemsize)(dtype), half = p->rotated_width / 2, at = p->num_angles > half ? half : 0;
    float cos[2][512], sin[2][512];
    for (int64_t t = 0; t < p->num_tokens; t++) {
        const int64_t row = t % p->num_positions * p->num_angles;
        for (int64_t j = 0; j < half; j++)
            for (int s = 0; s < 2; s++) {
                cos[s][j] = NAME(value)(dtype, p->cos + (row + s * at + j) * itemsize);
                sin[s][j] = NAME(value)(dtype, p->sin + (row + s * at + j) * itemsize);
            }
        for (int64_t head = 0; head < width; head += p->head_width) {
            char *first = values + (t * width + head) * itemsize, *second = first + half * itemsize;
            for (int64_t j = 0; j < half; j++) {
                const float a = NAME(value)(dtype, first + j * itemsize), b = NAME(value)(dtype, second + j * itemsize);
                char products[4][4];
                NAME(put)(dtype, a * cos[0][j], products[0]);
                NAME(put)(dtype, -b * sin[0][j], products[1]);
                NAME(put)(dtype, b * cos[1][j], products[2]);
                NAME(put)(dtype, a * sin[1][j], products[3]);
                __asm__ volatile("" : "+m"(products)); /* else float32's are added unrounded */
                NAME(put)(dtype, NAME(value)(dtype, products[0]) + NAME(value)(dtype, products[1]), first + j * itemsize);
                NAME(put)(dtype, NAME(value)(dtype, products[2]) + NAME(value)(dtype, products[3]), second + j * itemsize);
            }
        }
    }
}

static void NAME(rotate)(int dtype, const projections *p, int64_t width, char *values) {
    if (dtype == BFLOAT16) NAME(rotate_typed)(BFLOAT16, p, width, values);
    else if (dtype == FLOAT32) NAME(rotate_typed)(FLOAT32, p, width, values);
#if HAS_HALF
    else NAME(rotate_typed)(FLOAT16, p, width, values);
#endif
}
