/* Memory that the interpreter and the emulated process have at the same address, and what one asks of the other. */

#include <stdint.h>

#define SHARED ((char *)0x100000000000)
#define SHARED_NBYTES ((size_t)64 << 30) /* sparse */
#define SHARED_FD 900                    /* the interpreter's */

enum { NUM_INTEGERS = 20, NUM_DOUBLES = 2 };

typedef struct {
    char name[64];
    int64_t integers[NUM_INTEGERS];
    double doubles[NUM_DOUBLES];
} call_t;
