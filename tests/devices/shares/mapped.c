// Keeps pages of a file mapped, and counts in each of them, for ever: what it wrote must still be in the
// mapping a round later, and in the file once it was written back. A line for each round; what is wrong
// goes to standard error, and ends it.

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 16 };

static void must(int well, const char *what) {
    if (!well) {
        perror(what);
        exit(1);
    }
}

static void same(uint64_t have, uint64_t want, int page, const char *where) {
    if (have != want) {
        fprintf(stderr, "page %d has %llu in the %s, not %llu\n", page, (unsigned long long)have, where,
                (unsigned long long)want);
        exit(1);
    }
}

int main(int argc, char **argv) {
    must(argc == 2, "usage: mapped FILE");
    int file = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
    must(file >= 0, argv[1]);
    must(ftruncate(file, PAGES * PAGE) == 0, "ftruncate");
    char *map = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    must(map != MAP_FAILED, "mmap");
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    must(fcntl(file, F_SETLK, &whole) == 0, "lock");
    for (uint64_t round = 1;; round++) {
        for (int page = 0; page < PAGES; page++) {
            volatile uint64_t *place = (uint64_t *)(map + page * PAGE);
            same(*place, round - 1, page, "mapping");
            *place = round;
        }
        must(msync(map, PAGES * PAGE, MS_SYNC) == 0, "msync");
        for (int page = 0; page < PAGES; page++) {
            uint64_t written = 0;
            must(pread(file, &written, sizeof written, page * PAGE) == sizeof written, "pread");
            same(written, round, page, "file");
        }
        must(write(1, "\n", 1) == 1, "write");
        usleep(500000);
    }
}
