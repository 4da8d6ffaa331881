/* Joins byte planes to words in one pass over them. Called through ctypes: plain C, no Python in it. Everything lies in
 * the caller's memory.
 */

#include <stddef.h>
#include <stdint.h>

/* Of the interface: whoever calls it knows the same number. */
int expertly_join_version(void) { return 1; }

/* out[i] = high[i] << 8 | low[i]; `out` overlaps neither. */
void expertly_join_two(const uint8_t *restrict high, const uint8_t *restrict low, uint16_t *restrict out, size_t count) {
    for (size_t i = 0; i < count; i++) out[i] = (uint16_t)(high[i] << 8 | low[i]);
}

/* The same of four planes, the highest first. */
void expertly_join_four(const uint8_t *restrict p3, const uint8_t *restrict p2, const uint8_t *restrict p1,
                        const uint8_t *restrict p0, uint32_t *restrict out, size_t count) {
    for (size_t i = 0; i < count; i++)
        out[i] = (uint32_t)p3[i] << 24 | (uint32_t)p2[i] << 16 | (uint32_t)p1[i] << 8 | p0[i];
}
