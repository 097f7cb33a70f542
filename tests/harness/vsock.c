/*
 * Connects from the guest to a port of the host, sends what is on standard input, then prints what
 * comes back. Exit code 1 if there is no connection, 2 if it breaks.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
#include <linux/vm_sockets.h>

static int copy(int from, int to)
{
	char buffer[65536];
	ssize_t got, written, done;

	while ((got = read(from, buffer, sizeof(buffer))) > 0)
		for (done = 0; done < got; done += written)
			if ((written = write(to, buffer + done, got - done)) < 0)
				return -1;
	return got;
}

int main(int argc, char **argv)
{
	struct sockaddr_vm host = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_HOST };
	int stream = socket(AF_VSOCK, SOCK_STREAM, 0);

	if (argc != 2)
		return 64;
	host.svm_port = atoi(argv[1]);
	if (stream < 0 || connect(stream, (struct sockaddr *)&host, sizeof(host)) < 0) {
		perror("connect");
		return 1;
	}
	if (copy(0, stream) < 0 || shutdown(stream, SHUT_WR) < 0 || copy(stream, 1) < 0) {
		perror("copy");
		return 2;
	}
	return 0;
}
