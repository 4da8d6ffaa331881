/* Calls functions of this process for another one, whose memory it shares: `caller SOCKET PID`. A connection has a
 * thread; each takes call_t and answers with what the function returned. Files are the other process's, too.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "shared.h"

typedef int64_t I;
typedef int64_t (*function_t)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, double, double);

static const char *caller; /* its process */

/* The caller's open file `number`, opened here as it is there. */
static int file_of(int number) {
    static int opened[4096];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    char path[64];
    if (number < 0 || number >= 4096) return -1;
    pthread_mutex_lock(&lock);
    snprintf(path, sizeof path, "/proc/%s/fdinfo/%d", caller, number);
    unsigned long flags = 0;
    FILE *info = fopen(path, "r");
    for (char line[128]; info && fgets(line, sizeof line, info);) sscanf(line, "flags: %lo", &flags);
    if (info) fclose(info);
    snprintf(path, sizeof path, "/proc/%s/fd/%d", caller, number);
    if (opened[number]) close(opened[number]); /* a number may mean another file by now */
    int fd = opened[number] = open(path, O_RDONLY | (flags & 040000 ? O_DIRECT : 0));
    fd = dup(fd);
    pthread_mutex_unlock(&lock);
    return fd;
}

ssize_t pread_there(int number, void *to, size_t nbytes, off_t offset) {
    int fd = file_of(number);
    ssize_t num = pread(fd, to, nbytes, offset);
    close(fd);
    return num;
}

int fstat_there(int number, struct stat *about) {
    int fd = file_of(number), failed = fstat(fd, about);
    close(fd);
    return failed;
}

/* Nothing bypasses the page cache: the caller's file is another one than that opened here. */
int fcntl_there(int number, int command, ...) {
    (void)number, (void)command;
    return -1;
}

static void *answer(void *connection) {
    const int fd = (int)(intptr_t)connection;
    for (call_t call; recv(fd, &call, sizeof call, MSG_WAITALL) == sizeof call;) {
        function_t function = (function_t)dlsym(RTLD_DEFAULT, call.name);
        if (!function) break;
        const I *i = call.integers;
        int64_t result = function(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13],
                                  i[14], i[15], i[16], i[17], i[18], i[19], call.doubles[0], call.doubles[1]);
        if (write(fd, &result, sizeof result) != sizeof result) break;
    }
    close(fd);
    return NULL;
}

int main(int argc, char **argv) {
    char path[64];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (argc != 3) return 2;
    caller = argv[2];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(path, sizeof path, "/proc/%s/fd/%d", caller, SHARED_FD);
    int memory = open(path, O_RDWR), listening = socket(AF_UNIX, SOCK_STREAM, 0);
    if (mmap(SHARED, SHARED_NBYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, memory, 0) != SHARED) {
        perror("the caller's memory");
        return 1;
    }
    snprintf(address.sun_path, sizeof address.sun_path, "%s.new", argv[1]);
    if (bind(listening, (struct sockaddr *)&address, sizeof address) || listen(listening, 64) || rename(address.sun_path, argv[1])) {
        perror(argv[1]);
        return 1;
    }
    for (;;) {
        pthread_t thread;
        int fd = accept(listening, NULL, NULL);
        if (fd >= 0 && !pthread_create(&thread, NULL, answer, (void *)(intptr_t)fd)) pthread_detach(thread);
    }
}
