/* Threads that read experts from their files into slots.
 *
 * Who computes submits spans and takes them back as they arrive; a span is cut into pieces that several readers bring at
 * once, each past the page cache where its offset, address and length allow that. Loads come before prefetches: a piece
 * of a prefetch begins only while no load is waited for. Blocks are compared with their checksums (XXH3) by the reader
 * that brought them. Nobody needs Python's interpreter. One lock, held for a few instructions at a time.
 *
 * A layer's numbers, its array of counters and the totals belong to the caller, and outlive the team.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

enum { DAMAGED = -1, TRUNCATED = -2, CHANGED = -3 }; /* beside errno */
enum { SECTOR = 512, PAGE = 4096, PIECE = 1 << 20 }; /* bytes: PIECE is the smallest piece of a span */

typedef ssize_t (*read_fn)(int fd, void *buffer, size_t nbytes, off_t offset);

typedef struct { /* as engine/transfer.py fills it */
    int64_t fd, direct_fd; /* the same file opened twice; direct_fd: -1 where nothing can bypass the page cache */
    int64_t begin, expert_nbytes;
    int64_t block_nbytes, every; /* of what a checksum is; 0: nothing is compared */
    const uint64_t *sums;        /* [experts, blocks] */
    uint8_t *left;               /* [experts, blocks]: reads until the next that is compared */
    int64_t alignment, size, mtime_ns, ctime_ns; /* `open` sets these */
} layer_t;

typedef struct { /* a span to read */
    int64_t tag, layer, place, first, nbytes;
    char *address;
} request_t;

typedef struct { /* a span that has arrived */
    int64_t tag, error, offset, nbytes; /* where, and how long, what failed is; CHANGED: its size now, and before */
    int64_t is_changed;                 /* the file may have been written to since it was opened */
    uint64_t checksum, expected;
    int64_t again_nbytes, buffered_nbytes; /* of a piece: read a second time to compare whole blocks; of all, through
                                              the page cache */
} result_t;

typedef struct { int64_t disk_nbytes, buffered_nbytes; } totals_t; /* `disk`: asked of it, but for what was cancelled */

typedef struct span {
    request_t request;
    result_t result;
    int64_t piece_nbytes, next; /* what has been handed out */
    int num_reading;
    int is_prefetch, is_due;
    struct span *behind;
} span_t;

typedef struct { span_t *first, *last; } queue_t;

typedef struct { span_t *span; int64_t at, nbytes; int is_prefetch; } piece_t;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work, arrived;
    pthread_t *threads;
    int num_threads, num_idle, is_waking, is_closing, is_draining; /* `is_waking`: an idle one, to begin a piece */
    const layer_t *layers;
    read_fn read;
    queue_t loads, prefetches, done;
    int num_loads;                        /* submitted and not yet read */
    int num_reading, num_prefetch_pieces; /* pieces under way */
    unsigned num_arrived;
    totals_t *totals;
    uint64_t dice;
} team_t;

/* -- XXH3, 64 bits (Yann Collet, BSD) ------------------------------------------------------------------------------- */

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static const uint64_t P1 = 0x9E3779B185EBCA87, P2 = 0xC2B2AE3D27D4EB4F, P3 = 0x165667B19E3779F9;
static const uint64_t P4 = 0x85EBCA77C2B2AE63, P5 = 0x27D4EB2F165667C5;
static const uint32_t Q1 = 0x9E3779B1, Q2 = 0x85EBCA77, Q3 = 0xC2B2AE3D;

static inline uint64_t at64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value; /* both architectures are little-endian */
}

typedef uint64_t lanes_t __attribute__((vector_size(64)));

#if defined(__clang__)
#define SWAPPED(x) __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6)
#else
#define SWAPPED(x) __builtin_shuffle(x, (lanes_t){1, 0, 3, 2, 5, 4, 7, 6})
#endif

/* Adds so many stripes of 64 bytes; `ends`: a block of 1024 ends with them. */
static void stripes(uint64_t *sums, const uint8_t *in, const uint8_t *secret, int64_t num, int ends) {
    lanes_t total, value, key;
    memcpy(&total, sums, 64);
    for (int64_t i = 0; i < num; i++) {
        memcpy(&value, in + 64 * i, 64);
        memcpy(&key, secret + 8 * i, 64);
        key ^= value;
        total += SWAPPED(value) + (key & 0xFFFFFFFF) * (key >> 32);
    }
    if (ends) {
        memcpy(&key, SECRET + 128, 64);
        total = (total ^ total >> 47 ^ key) * Q1;
    }
    memcpy(sums, &total, 64);
}

static uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t sum) {
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9;
    return sum ^ sum >> 32;
}

static uint64_t mix(const uint8_t *in, const uint8_t *secret) {
    return fold(at64(in) ^ at64(secret), at64(in + 8) ^ at64(secret + 8));
}

/* Of 17 to 240 bytes: experts of toys. */
static uint64_t of_few(const uint8_t *in, int64_t nbytes) {
    uint64_t sum = (uint64_t)nbytes * P1;
    const uint8_t *end = in + nbytes;
    if (nbytes <= 128) {
        for (int64_t i = (nbytes - 1) / 32; i >= 0; i--)
            sum += mix(in + 16 * i, SECRET + 32 * i) + mix(end - 16 * (i + 1), SECRET + 32 * i + 16);
        return avalanche(sum);
    }
    for (int i = 0; i < 8; i++) sum += mix(in + 16 * i, SECRET + 16 * i);
    sum = avalanche(sum);
    for (int i = 8; i < nbytes / 16; i++) sum += mix(in + 16 * i, SECRET + 16 * (i - 8) + 3);
    return avalanche(sum + mix(end - 16, SECRET + 136 - 17));
}

/* Of up to 16 bytes. */
static uint64_t of_least(const uint8_t *in, int64_t nbytes) {
    uint64_t first = 0, last = 0, length = (uint64_t)nbytes;
    if (nbytes > 8) {
        first = at64(in) ^ at64(SECRET + 24) ^ at64(SECRET + 32);
        last = at64(in + nbytes - 8) ^ at64(SECRET + 40) ^ at64(SECRET + 48);
        return avalanche(length + __builtin_bswap64(first) + last + fold(first, last));
    }
    if (nbytes > 3) {
        memcpy(&first, in, 4), memcpy(&last, in + nbytes - 4, 4);
        uint64_t sum = (last + (first << 32)) ^ at64(SECRET + 8) ^ at64(SECRET + 16);
        sum ^= (sum << 49 | sum >> 15) ^ (sum << 24 | sum >> 40);
        sum *= 0x9FB21C651E98DF25;
        sum = (sum ^ ((sum >> 35) + length)) * 0x9FB21C651E98DF25;
        return sum ^ sum >> 28;
    }
    uint32_t combined = (uint32_t)in[0] << 16 | (uint32_t)in[nbytes >> 1] << 24 | in[nbytes - 1] | (uint32_t)nbytes << 8;
    uint64_t sum = combined ^ (uint32_t)(at64(SECRET) ^ at64(SECRET) >> 32);
    sum = (sum ^ sum >> 33) * P2;
    sum = (sum ^ sum >> 29) * P3;
    return sum ^ sum >> 32;
}

uint64_t expertly_xxh3(const uint8_t *in, int64_t nbytes) {
    if (nbytes <= 240) return nbytes > 16 ? of_few(in, nbytes) : of_least(in, nbytes);
    uint64_t sums[8] = {Q3, P1, P2, P3, P4, Q2, P5, Q1};
    int64_t num_blocks = (nbytes - 1) / 1024, rest = (nbytes - 1) % 1024 / 64;
    for (int64_t block = 0; block < num_blocks; block++) stripes(sums, in + 1024 * block, SECRET, 16, 1);
    stripes(sums, in + 1024 * num_blocks, SECRET, rest, 0);
    stripes(sums, in + nbytes - 64, SECRET + 192 - 64 - 7, 1, 0);
    uint64_t sum = (uint64_t)nbytes * P1;
    for (int i = 0; i < 4; i++)
        sum += fold(sums[2 * i] ^ at64(SECRET + 11 + 16 * i), sums[2 * i + 1] ^ at64(SECRET + 19 + 16 * i));
    return avalanche(sum);
}

/* -- one piece ------------------------------------------------------------------------------------------------------ */

static void fail(result_t *result, int64_t error, int64_t offset, int64_t nbytes) {
    if (result->error) return;
    result->error = error, result->offset = offset, result->nbytes = nbytes;
}

/* Whether all bytes are there; otherwise `result` says why not. */
static int read_all(const team_t *team, const layer_t *layer, char *to, int64_t offset, int64_t nbytes, result_t *result) {
    static const long PAUSES_US[] = {1000, 10000, 100000, 500000}; /* of an overloaded system */
    int pause = 0, is_direct = layer->direct_fd >= 0 && !((offset | (int64_t)(intptr_t)to | nbytes) % layer->alignment);
    int64_t begin = offset, total = nbytes;
    while (nbytes) {
        ssize_t count = team->read((int)(is_direct ? layer->direct_fd : layer->fd), to, (size_t)nbytes, (off_t)offset);
        if (count > 0) {
            to += count, offset += count, nbytes -= count;
        } else if (count == 0) {
            fail(result, TRUNCATED, offset, nbytes);
            return 0;
        } else if (errno == EINVAL && is_direct) {
            is_direct = 0; /* the device needs larger blocks, or a short read has left a part that is not aligned */
        } else if ((errno == EAGAIN || errno == EINTR || errno == EBUSY || errno == ENOMEM) && pause < 4) {
            struct timespec time = {PAUSES_US[pause] / 1000000, PAUSES_US[pause] % 1000000 * 1000};
            nanosleep(&time, NULL);
            pause++;
        } else {
            fail(result, errno, begin, total);
            return 0;
        }
    }
    if (!is_direct) {
        result->buffered_nbytes += total;
#if defined(POSIX_FADV_DONTNEED)
        int64_t first = begin / PAGE * PAGE; /* another reader of the file would only read them again */
        posix_fadvise((int)layer->fd, first, (offset + PAGE - 1) / PAGE * PAGE - first, POSIX_FADV_DONTNEED);
#endif
    }
    return 1;
}

/* Compare the blocks of a piece that are due, or all; one that is only partly in it is read again as a whole. */
static void compare(team_t *team, const layer_t *layer, const request_t *request, const piece_t *piece, result_t *result) {
    int64_t block = layer->block_nbytes, first = request->first + piece->at, end = first + piece->nbytes;
    int64_t of_expert = request->place * (layer->expert_nbytes / block);
    char *whole = NULL;
    for (int64_t number = first / block; number * block < end && !result->error; number++) {
        int64_t begin = number * block;
        uint8_t *left = layer->left + of_expert + number;
        const char *bytes = request->address + begin - request->first;
        if (begin < first || begin + block > end) {
            if (!result->is_changed && __atomic_load_n(left, __ATOMIC_RELAXED)) continue;
            int64_t offset = layer->begin + request->place * layer->expert_nbytes + begin;
            if (!whole && posix_memalign((void **)&whole, PAGE, (size_t)block)) {
                fail(result, ENOMEM, offset, block);
                break;
            }
            if (!read_all(team, layer, whole, offset, block, result)) break;
            result->again_nbytes += block;
            bytes = whole;
        }
        uint64_t checksum = expertly_xxh3((const uint8_t *)bytes, block), expected = layer->sums[of_expert + number];
        if (checksum != expected) {
            __atomic_store_n(left, 0, __ATOMIC_RELAXED);
            result->checksum = checksum, result->expected = expected;
            fail(result, DAMAGED, begin, block);
            break;
        }
        int64_t early = layer->every / 4 > 1 ? layer->every / 4 : 1; /* not all blocks at the same time */
        uint64_t number_drawn = __atomic_add_fetch(&team->dice, P1, __ATOMIC_RELAXED);
        int64_t until = layer->every - 1 - (int64_t)(fold(number_drawn, P2) % (uint64_t)early);
        __atomic_store_n(left, (uint8_t)until, __ATOMIC_RELAXED);
    }
    free(whole);
}

static int64_t in_ns(const struct stat *about, int is_change) {
#if defined(__APPLE__)
    struct timespec time = is_change ? about->st_ctimespec : about->st_mtimespec;
#else
    struct timespec time = is_change ? about->st_ctim : about->st_mtim;
#endif
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void bring(team_t *team, const piece_t *piece, result_t *result) {
    const request_t *request = &piece->span->request;
    const layer_t *layer = team->layers + request->layer;
    int64_t offset = layer->begin + request->place * layer->expert_nbytes + request->first + piece->at;
    int is_whole = read_all(team, layer, request->address + piece->at, offset, piece->nbytes, result);
    struct stat about;
    if (fstat((int)layer->fd, &about)) fail(result, errno, offset, piece->nbytes);
    else
        result->is_changed =
            about.st_size != layer->size || in_ns(&about, 0) != layer->mtime_ns || in_ns(&about, 1) != layer->ctime_ns;
    if (!is_whole || result->error) return;
    if (result->is_changed && (about.st_size != layer->size || !layer->block_nbytes))
        fail(result, CHANGED, about.st_size, layer->size);
    else if (result->is_changed || piece->span->is_due)
        compare(team, layer, request, piece, result);
}

/* -- the files ------------------------------------------------------------------------------------------------------ */

/* Whether a read past the page cache may begin and end within a page; not where the file has no second sector. */
static int reads_sectors(int fd) {
    void *page;
    if (posix_memalign(&page, PAGE, PAGE)) return 0;
    int is_read = pread(fd, (char *)page + SECTOR, SECTOR, SECTOR) == SECTOR;
    free(page);
    return is_read;
}

static void begin(layer_t *layer) {
    struct stat about = {0};
    fstat((int)layer->fd, &about);
    layer->size = about.st_size, layer->mtime_ns = in_ns(&about, 0), layer->ctime_ns = in_ns(&about, 1);
    int fd = (int)layer->direct_fd;
#if defined(__APPLE__)
    if (fcntl(fd, F_NOCACHE, 1)) layer->direct_fd = -1;
#else
    posix_fadvise((int)layer->fd, 0, 0, POSIX_FADV_RANDOM); /* no readahead */
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_DIRECT)) layer->direct_fd = -1;
#endif
    layer->alignment = layer->direct_fd >= 0 && reads_sectors(fd) ? SECTOR : PAGE;
}

/* -- the queues, under the lock ------------------------------------------------------------------------------------- */

static void append(queue_t *queue, span_t *span) {
    span->behind = NULL;
    if (queue->last) queue->last->behind = span;
    else queue->first = span;
    queue->last = span;
}

static void take_out(queue_t *queue, span_t *span) {
    span_t *before = NULL;
    for (span_t *each = queue->first; each != span; each = each->behind) {
        if (!each) return;
        before = each;
    }
    if (before) before->behind = span->behind;
    else queue->first = span->behind;
    if (queue->last == span) queue->last = before;
}

static void free_all(queue_t *queue) {
    for (span_t *span = queue->first; span;) {
        span_t *behind = span->behind;
        free(span);
        span = behind;
    }
    queue->first = queue->last = NULL;
}

/* The span of which the next piece may begin now, or NULL. */
static span_t *next_span(const team_t *team, int may_prefetch) {
    if (team->is_draining || team->loads.first) return team->is_draining ? NULL : team->loads.first;
    span_t *span = team->prefetches.first;
    if (!may_prefetch || team->num_loads || !span) return NULL;
    /* One span at a time, or as many small ones as there are readers, so that a load waits for no more than that. */
    int64_t num = (span->request.nbytes + span->piece_nbytes - 1) / span->piece_nbytes;
    return !span->next && team->num_prefetch_pieces && team->num_prefetch_pieces + num > team->num_threads ? NULL : span;
}

/* Unlocks, and wakes a reader if there is something for it: waking takes longer than all else here, so whoever begins a
 * piece wakes one more. */
static void unlock(team_t *team) {
    int wakes = team->num_idle && !team->is_waking && next_span(team, 1);
    team->is_waking |= wakes;
    pthread_mutex_unlock(&team->lock);
    if (wakes) pthread_cond_signal(&team->work);
}

/* The next piece to read, if one may begin now. */
static int next_piece(team_t *team, piece_t *piece, int may_prefetch) {
    span_t *span = next_span(team, may_prefetch);
    if (!span) return 0;
    int64_t rest = span->request.nbytes - span->next;
    *piece = (piece_t){span, span->next, rest < span->piece_nbytes ? rest : span->piece_nbytes, span->is_prefetch};
    span->next += piece->nbytes;
    span->num_reading++;
    team->num_reading++;
    team->num_prefetch_pieces += piece->is_prefetch;
    if (span->next == span->request.nbytes) take_out(span->is_prefetch ? &team->prefetches : &team->loads, span);
    return 1;
}

static void end_piece(team_t *team, const piece_t *piece, const result_t *result) {
    span_t *span = piece->span;
    result_t *whole = &span->result;
    team->num_reading--;
    team->num_prefetch_pieces -= piece->is_prefetch;
    span->num_reading--;
    team->totals->buffered_nbytes += result->buffered_nbytes;
    team->totals->disk_nbytes += result->again_nbytes;
    whole->is_changed |= result->is_changed;
    if (result->error && !whole->error) {
        whole->checksum = result->checksum, whole->expected = result->expected;
        fail(whole, result->error, result->offset, result->nbytes);
    }
    if (whole->error && span->next < span->request.nbytes) { /* what is left of it is read for nobody */
        take_out(span->is_prefetch ? &team->prefetches : &team->loads, span);
        span->next = span->request.nbytes;
    }
    if (span->next == span->request.nbytes && !span->num_reading) {
        append(&team->done, span);
        team->num_loads -= !span->is_prefetch;
        team->num_arrived++;
        pthread_cond_broadcast(&team->arrived);
    }
    if (team->is_draining && !team->num_reading) pthread_cond_broadcast(&team->arrived);
}

/* Read a piece without the lock, which is held before and after. */
static void serve(team_t *team, const piece_t *piece) {
    result_t result = {0};
    unlock(team);
    bring(team, piece, &result);
    pthread_mutex_lock(&team->lock);
    end_piece(team, piece, &result);
}

static void *of_readers(void *data) {
    team_t *team = data;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL); /* they are for threads of the interpreter */
#if defined(__linux__)
    prctl(PR_SET_NAME, "expertly-reader");
#endif
    piece_t piece;
    pthread_mutex_lock(&team->lock);
    while (!team->is_closing) {
        if (next_piece(team, &piece, 1)) serve(team, &piece);
        else {
            team->num_idle++;
            pthread_cond_wait(&team->work, &team->lock);
            team->num_idle--, team->is_waking = 0;
        }
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

/* -- what is called from outside, by one thread but for `until_arrived` --------------------------------------------- */

/* Of the structures above; engine/transfer.py says the same number. */
int expertly_readers_version(void) { return 2; }

/* Readers end; `until_arrived` returns. */
void expertly_readers_hush(team_t *team) {
    pthread_mutex_lock(&team->lock);
    team->is_closing = 1;
    pthread_cond_broadcast(&team->work);
    pthread_cond_broadcast(&team->arrived);
    pthread_mutex_unlock(&team->lock);
}

void expertly_readers_close(team_t *team) {
    expertly_readers_hush(team);
    for (int i = 0; i < team->num_threads; i++) pthread_join(team->threads[i], NULL);
    free_all(&team->loads), free_all(&team->prefetches), free_all(&team->done);
    pthread_cond_destroy(&team->work), pthread_cond_destroy(&team->arrived), pthread_mutex_destroy(&team->lock);
    free(team->threads);
    free(team);
}

/* `read`: NULL: pread. NULL where threads cannot be started. */
team_t *expertly_readers_open(int num_threads, layer_t *layers, int num_layers, totals_t *totals, read_fn read) {
    team_t *team = calloc(1, sizeof *team);
    pthread_t *threads = calloc((size_t)num_threads, sizeof *threads);
    if (!team || !threads) {
        free(team), free(threads);
        return NULL;
    }
    team->threads = threads, team->layers = layers, team->totals = totals, team->read = read ? read : pread;
    for (int i = 0; i < num_layers; i++) begin(layers + i);
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->work, NULL), pthread_cond_init(&team->arrived, NULL);
    for (; team->num_threads < num_threads; team->num_threads++) {
        if (pthread_create(threads + team->num_threads, NULL, of_readers, team)) {
            expertly_readers_close(team);
            return NULL;
        }
    }
    return team;
}

/* Counts a read of each block; whether one of them is to be compared. */
static int is_due(const layer_t *layer, const request_t *request) {
    if (!layer->block_nbytes) return 0;
    int due = 0;
    int64_t block = layer->block_nbytes, end = request->first + request->nbytes;
    uint8_t *left = layer->left + request->place * (layer->expert_nbytes / block);
    for (int64_t number = request->first / block; number * block < end; number++) {
        uint8_t num = __atomic_load_n(left + number, __ATOMIC_RELAXED);
        due |= !num;
        if (num) __atomic_store_n(left + number, (uint8_t)(num - 1), __ATOMIC_RELAXED);
    }
    return due;
}

/* 0, or -1 where memory is short; then nothing was submitted. */
int expertly_readers_submit(team_t *team, const request_t *requests, int num, int is_prefetch) {
    queue_t made = {0};
    int64_t total = 0;
    for (int i = 0; i < num; i++) {
        span_t *span = calloc(1, sizeof *span);
        if (!span) {
            free_all(&made);
            return -1;
        }
        const layer_t *layer = team->layers + requests[i].layer;
        int64_t piece = PIECE, nbytes = requests[i].nbytes;
        if (nbytes > PIECE) {
            int64_t share = (nbytes + team->num_threads * PAGE - 1) / (team->num_threads * PAGE) * PAGE;
            if (share > piece) piece = share;
        }
        if (layer->block_nbytes && !(layer->block_nbytes % 512)) /* each piece gets whole blocks */
            piece = (piece + layer->block_nbytes - 1) / layer->block_nbytes * layer->block_nbytes;
        span->request = requests[i], span->result.tag = requests[i].tag, span->piece_nbytes = piece;
        span->is_prefetch = is_prefetch, span->is_due = is_due(layer, requests + i);
        append(&made, span);
        total += nbytes;
    }
    if (!made.first) return 0;
    pthread_mutex_lock(&team->lock);
    queue_t *queue = is_prefetch ? &team->prefetches : &team->loads;
    if (queue->last) queue->last->behind = made.first;
    else queue->first = made.first;
    queue->last = made.last;
    if (!is_prefetch) team->num_loads += num;
    team->totals->disk_nbytes += total;
    unlock(team);
    return 0;
}

/* Take back prefetches of a layer (-1: of all) that have not begun, in their order; those that have are loads from now
 * on. `tags` has room for all. Returns how many. */
int expertly_readers_cancel(team_t *team, int64_t layer, int64_t *tags) {
    int num = 0;
    pthread_mutex_lock(&team->lock);
    for (span_t *span = team->prefetches.first; span;) {
        span_t *behind = span->behind;
        if (layer < 0 || span->request.layer == layer) {
            take_out(&team->prefetches, span);
            if (span->next) {
                span->is_prefetch = 0;
                team->num_loads++;
                append(&team->loads, span);
            } else {
                tags[num++] = span->request.tag;
                team->totals->disk_nbytes -= span->request.nbytes;
                free(span);
            }
        }
        span = behind;
    }
    unlock(team);
    return num;
}

/* 1: a span has arrived; 0: none has within that time. Who waits reads loads, too. */
int expertly_readers_take(team_t *team, int64_t timeout_ns, result_t *result) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += (end.tv_nsec + timeout_ns) / 1000000000, end.tv_nsec = (end.tv_nsec + timeout_ns) % 1000000000;
    pthread_mutex_lock(&team->lock);
    while (timeout_ns && !team->done.first) {
        piece_t piece;
        if (next_piece(team, &piece, 0)) serve(team, &piece);
        else if (pthread_cond_timedwait(&team->arrived, &team->lock, &end)) break;
    }
    span_t *span = team->done.first;
    if (span) {
        take_out(&team->done, span);
        *result = span->result;
    }
    unlock(team);
    free(span);
    return span != NULL;
}

/* For a thread that tells others: waits until more than `seen` spans ever arrived. Returns how many did; `seen` where
 * the team is closing. The caller must have returned before the team is closed for good: see `expertly_readers_hush`. */
unsigned expertly_readers_until_arrived(team_t *team, unsigned seen) {
    pthread_mutex_lock(&team->lock);
    while (team->num_arrived == seen && !team->is_closing) pthread_cond_wait(&team->arrived, &team->lock);
    unsigned num = team->is_closing ? seen : team->num_arrived;
    pthread_mutex_unlock(&team->lock);
    return num;
}

/* Drop what has not begun, wait for what has, and forget it. */
void expertly_readers_drain(team_t *team) {
    pthread_mutex_lock(&team->lock);
    team->is_draining = 1;
    queue_t *queues[] = {&team->loads, &team->prefetches, &team->done};
    for (int i = 0; i < 2; i++)
        for (span_t *span = queues[i]->first; span; span = span->behind)
            if (!span->next) team->totals->disk_nbytes -= span->request.nbytes;
    while (team->num_reading) pthread_cond_wait(&team->arrived, &team->lock);
    for (int i = 0; i < 3; i++) free_all(queues[i]);
    team->num_loads = 0, team->is_draining = 0;
    pthread_mutex_unlock(&team->lock);
}
