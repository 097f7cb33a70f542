/*
 * A guest's end of TCP connections whose bytes are known on both sides.
 *
 *   net ADDRESS PORT send BYTES SEED      sends so many bytes of noise
 *   net ADDRESS PORT receive BYTES SEED   expects them, and the end behind them
 *   net ADDRESS PORT echo COUNT           has COUNT connections open at once; each sends a message of
 *                                         its own and must get it back
 *   net ADDRESS PORT latency COUNT        sends a byte and waits for one, COUNT times
 *
 * Exit code 1 if a connection fails, 2 if bytes are wrong.
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MESSAGE 1024
#define MOST 4096

static struct sockaddr_in host;

static void fail(int code, const char *what)
{
	perror(what);
	exit(code);
}

/* The bytes of image::noise. */
static void noise(uint64_t *state, unsigned char *buffer, size_t len)
{
	size_t at;

	for (at = 0; at < len; at += 8) {
		*state ^= *state << 13;
		*state ^= *state >> 7;
		*state ^= *state << 17;
		memcpy(buffer + at, state, 8);
	}
}

static int open_connection(void)
{
	int stream = socket(AF_INET, SOCK_STREAM, 0);

	if (stream < 0 || connect(stream, (struct sockaddr *)&host, sizeof(host)) < 0)
		fail(1, "connect");
	return stream;
}

static void write_all(int to, const unsigned char *buffer, size_t len)
{
	ssize_t written;

	for (; len > 0; buffer += written, len -= written)
		if ((written = write(to, buffer, len)) <= 0)
			fail(1, "write");
}

static size_t read_all(int from, unsigned char *buffer, size_t len)
{
	size_t done = 0;
	ssize_t got;

	while (done < len && (got = read(from, buffer + done, len - done)) != 0) {
		if (got < 0)
			fail(1, "read");
		done += got;
	}
	return done;
}

static void send_noise(uint64_t bytes, uint64_t state)
{
	static unsigned char buffer[65536];
	int stream = open_connection();

	for (; bytes > 0; bytes -= sizeof(buffer)) {
		noise(&state, buffer, sizeof(buffer));
		write_all(stream, buffer, sizeof(buffer));
	}
	if (shutdown(stream, SHUT_WR) < 0)
		fail(1, "shutdown");
	/* Until the host has read all. */
	if (read_all(stream, buffer, 1) != 0)
		exit(2);
}

static void receive_noise(uint64_t bytes, uint64_t state)
{
	static unsigned char buffer[65536], expected[65536];
	int stream = open_connection();
	uint64_t done;

	for (done = 0; done < bytes; done += sizeof(buffer)) {
		noise(&state, expected, sizeof(expected));
		if (read_all(stream, buffer, sizeof(buffer)) != sizeof(buffer) ||
		    memcmp(buffer, expected, sizeof(buffer))) {
			fprintf(stderr, "wrong bytes behind %llu\n", (unsigned long long)done);
			exit(2);
		}
	}
	if (read_all(stream, buffer, 1) != 0) {
		fprintf(stderr, "more than was sent\n");
		exit(2);
	}
}

static void echo(int count)
{
	static int streams[MOST];
	unsigned char sent[MESSAGE], received[MESSAGE];
	struct rlimit files = { MOST, MOST };
	uint64_t state;
	int i;

	if (count > MOST - 16 || setrlimit(RLIMIT_NOFILE, &files) < 0)
		fail(1, "setrlimit");
	for (i = 0; i < count; i++)
		streams[i] = open_connection();
	for (i = 0; i < count; i++) {
		state = 2 * i + 1;
		noise(&state, sent, MESSAGE);
		write_all(streams[i], sent, MESSAGE);
	}
	for (i = 0; i < count; i++) {
		state = 2 * i + 1;
		noise(&state, sent, MESSAGE);
		if (read_all(streams[i], received, MESSAGE) != MESSAGE || memcmp(sent, received, MESSAGE)) {
			fprintf(stderr, "wrong bytes on connection %d\n", i);
			exit(2);
		}
	}
}

static void latency(int count)
{
	int stream = open_connection(), one = 1;
	struct timespec start, end;
	unsigned char byte = 0;
	int i;

	setsockopt(stream, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (i = 0; i < count; i++) {
		write_all(stream, &byte, 1);
		if (read_all(stream, &byte, 1) != 1)
			exit(2);
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("%.0f\n", ((end.tv_sec - start.tv_sec) * 1e9 + end.tv_nsec - start.tv_nsec) / count);
}

int main(int argc, char **argv)
{
	if (argc < 5)
		return 64;
	host.sin_family = AF_INET;
	host.sin_port = htons(atoi(argv[2]));
	if (inet_pton(AF_INET, argv[1], &host.sin_addr) != 1)
		return 64;
	if (!strcmp(argv[3], "send") && argc == 6)
		send_noise(strtoull(argv[4], NULL, 10), strtoull(argv[5], NULL, 10) | 1);
	else if (!strcmp(argv[3], "receive") && argc == 6)
		receive_noise(strtoull(argv[4], NULL, 10), strtoull(argv[5], NULL, 10) | 1);
	else if (!strcmp(argv[3], "echo"))
		echo(atoi(argv[4]));
	else if (!strcmp(argv[3], "latency"))
		latency(atoi(argv[4]));
	else
		return 64;
	return 0;
}
