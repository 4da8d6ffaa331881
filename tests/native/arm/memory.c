/* malloc and its kin over memory that another process maps at the same address: preloaded into the interpreter whose
 * tests call code of another processor (caller.c). Blocks have the size of a power of two; those that were freed are
 * used again.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shared.h"

typedef struct block {
    uint32_t size_class, from_base; /* of what `base` begins; bytes from there to what the caller has */
    struct block *next;             /* of the free ones */
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *unused;
static block *freed[48];

static void *take(size_t nbytes, size_t alignment) {
    if (alignment < sizeof(block)) alignment = sizeof(block);
    size_t all = nbytes + alignment + sizeof(block);
    if (all < nbytes || all > SHARED_NBYTES) return NULL;
    uint32_t size_class = all <= 64 ? 6 : 64 - (uint32_t)__builtin_clzll(all - 1);
    pthread_mutex_lock(&lock);
    if (!unused) {
        int fd = memfd_create("shared", 0);
        if (fd < 0 || ftruncate(fd, SHARED_NBYTES) || dup2(fd, SHARED_FD) < 0) _exit(70);
        close(fd);
        unused = mmap(SHARED, SHARED_NBYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE,
                      SHARED_FD, 0);
        if (unused != SHARED) _exit(71);
    }
    char *base = (char *)freed[size_class];
    if (base) freed[size_class] = freed[size_class]->next;
    else if (unused + ((size_t)1 << size_class) <= SHARED + SHARED_NBYTES) base = unused, unused += (size_t)1 << size_class;
    pthread_mutex_unlock(&lock);
    if (!base) return NULL;
    char *own = (char *)(((uintptr_t)base + sizeof(block) + alignment - 1) / alignment * alignment);
    ((block *)own)[-1] = (block){size_class, (uint32_t)(own - base), NULL};
    return own;
}

size_t malloc_usable_size(void *p) {
    return p ? ((size_t)1 << ((block *)p)[-1].size_class) - ((block *)p)[-1].from_base : 0;
}

void *malloc(size_t nbytes) {
    void *p = take(nbytes, 16);
    if (!p) errno = ENOMEM;
    return p;
}

void free(void *p) {
    if (!p) return;
    block of = ((block *)p)[-1], *base = (block *)((char *)p - of.from_base);
    pthread_mutex_lock(&lock);
    base->next = freed[of.size_class];
    freed[of.size_class] = base;
    pthread_mutex_unlock(&lock);
}

void *calloc(size_t num, size_t nbytes) {
    size_t all;
    void *p = __builtin_mul_overflow(num, nbytes, &all) ? NULL : take(all, 16);
    return p ? memset(p, 0, all) : NULL;
}

void *realloc(void *p, size_t nbytes) {
    size_t had = malloc_usable_size(p);
    if (p && nbytes <= had) return p;
    void *larger = malloc(nbytes);
    if (larger && p) memcpy(larger, p, had), free(p);
    return larger;
}

int posix_memalign(void **p, size_t alignment, size_t nbytes) { return (*p = take(nbytes, alignment)) ? 0 : ENOMEM; }
void *aligned_alloc(size_t alignment, size_t nbytes) { return take(nbytes, alignment); }
void *memalign(size_t alignment, size_t nbytes) { return take(nbytes, alignment); }
void *valloc(size_t nbytes) { return take(nbytes, 4096); }

/* Pages that nobody else has: slots of experts. */
void *mmap64(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    if (fd >= 0 || at || !(flags & MAP_ANONYMOUS)) return (void *)syscall(SYS_mmap, at, nbytes, protection, flags, fd, offset);
    void *p = take(nbytes, 4096);
    return p ? memset(p, 0, nbytes) : MAP_FAILED;
}

void *mmap(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    return mmap64(at, nbytes, protection, flags, fd, offset);
}

int munmap(void *p, size_t nbytes) {
    if ((char *)p < SHARED || (char *)p >= SHARED + SHARED_NBYTES) return (int)syscall(SYS_munmap, p, nbytes);
    free(p);
    return 0;
}
