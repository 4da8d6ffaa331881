/* A team of threads that share out the chunks of one job at a time.
 *
 * Who has a job computes it and waits for nobody but those who are within it: a thread that the system has put off its
 * processor before it joined is not waited for, as it is at the end of a parallel region of OpenMP, so that a neighbour
 * who takes a processor takes no more than that. Threads that wait spin for as long as a layer of a small model leaves
 * between two jobs, then sleep.
 */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

enum { SPINS = 8192 }; /* some 100 to 400 us */

static struct {
    pthread_mutex_t job, sleep; /* one job at a time; for `woken` */
    pthread_cond_t woken;
    int num_threads; /* beside those who have jobs */
    void (*function)(void *);
    void *data;
    atomic_uint number;    /* of the job */
    atomic_int open;       /* threads that may still join it */
    atomic_int num_within; /* that have perhaps joined */
    atomic_int num_asleep;
} team = {.job = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .woken = PTHREAD_COND_INITIALIZER};

static void wait_for_job(unsigned seen) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load(&team.number) != seen) return;
        RELAX();
    }
    pthread_mutex_lock(&team.sleep);
    atomic_fetch_add(&team.num_asleep, 1);
    while (atomic_load(&team.number) == seen) pthread_cond_wait(&team.woken, &team.sleep);
    atomic_fetch_sub(&team.num_asleep, 1);
    pthread_mutex_unlock(&team.sleep);
}

static void *of_team(void *number) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL); /* they are for threads of the interpreter */
#if defined(__linux__)
    prctl(PR_SET_NAME, "expertly-team");
#endif
    for (unsigned seen = (unsigned)(uintptr_t)number;;) {
        wait_for_job(seen);
        seen = atomic_load(&team.number);
        atomic_fetch_add(&team.num_within, 1);
        int open = atomic_load(&team.open); /* who has the job closes it first and looks who is within then */
        while (open > 0 && !atomic_compare_exchange_weak(&team.open, &open, open - 1)) {}
        if (open > 0) team.function(team.data);
        atomic_fetch_sub(&team.num_within, 1);
    }
    return NULL;
}

/* A forked child has none of the threads, and perhaps locks that nobody will open. */
static void team_of_child(void) {
    pthread_mutex_init(&team.job, NULL);
    pthread_mutex_init(&team.sleep, NULL);
    pthread_cond_init(&team.woken, NULL);
    team.num_threads = 0;
    atomic_store(&team.open, 0);
    atomic_store(&team.num_within, 0);
    atomic_store(&team.num_asleep, 0);
}

__attribute__((constructor)) static void team_begins(void) { pthread_atfork(NULL, NULL, team_of_child); }

/* `function(data)` on up to `num_threads` threads, this one among them; each returns when there is nothing left to do.
 * Another's job leaves this one to itself.
 */
static void run_on_team(void (*function)(void *), void *data, int num_threads) {
    if (pthread_mutex_trylock(&team.job)) {
        function(data);
        return;
    }
    while (team.num_threads < num_threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, of_team, (void *)(uintptr_t)atomic_load(&team.number))) break;
        pthread_detach(thread);
        team.num_threads++;
    }
    team.function = function;
    team.data = data;
    atomic_store(&team.open, num_threads - 1);
    atomic_fetch_add(&team.number, 1);
    if (atomic_load(&team.num_asleep)) {
        pthread_mutex_lock(&team.sleep);
        pthread_cond_broadcast(&team.woken);
        pthread_mutex_unlock(&team.sleep);
    }
    function(data);
    atomic_store(&team.open, 0);
    while (atomic_load(&team.num_within)) RELAX();
    pthread_mutex_unlock(&team.job);
}
