// SPDX-License-Identifier: Apache-2.0
/*
 * Traffic shaped like a collective operation: flows of equal size in phases, barriers between.
 *
 *   collective --bytes N [--repeat N] [--seed N] [--congestion NAME] < plan
 *
 * The plan has a line for each rank and one for each phase:
 *
 *   rank /run/netns/host0 10.20.0.1
 *   phase 0>2 2>4 4>6 6>0
 *
 * One process drives all ranks: it opens each socket in the network namespace of its rank and
 * bound to the rank's address. So the barrier costs nothing and sends nothing: a phase ends when
 * the last byte of its last flow was read, and only then the next begins.
 *
 * Each pair of ranks has one TCP connection for as long as the program runs. The seed decides
 * the source ports, and with them what a fabric that hashes makes of the flows.
 *
 * When all connections are up it says "ready" on standard output; it begins once standard input,
 * after an empty line that ends the plan, has another line or its end. What it reports is one line
 * of JSON: the seconds of all and of each phase, all its repetitions together, and for each phase
 * and five-tuple the bytes that arrived.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 256
#define MAX_FLOWS 65536 /* in all phases */
#define CHUNK (256 << 10)
#define PORT_MIN 16384
#define PORT_COUNT 16384
#define PORT_TRIES 64
#define STALL_MS 20000

struct rank {
	int namespace;
	struct in_addr address;
};

/* A connection from one rank to another. */
struct pair {
	int from, to;
	int out, in; /* sockets: the sender's, the receiver's */
	uint16_t source_port, port;
	long to_send, to_receive; /* of this phase */
};

struct flow {
	struct pair *pair;
	long received;
};

struct phase {
	struct flow *flows;
	int count;
	double seconds;
};

static struct {
	long bytes;
	long repeat;
	long seed;
	const char *congestion;
} opt = { .repeat = 1, .congestion = "cubic" };

static struct rank ranks[MAX_RANKS];
static int rank_count;
static struct flow flows[MAX_FLOWS];
static int flow_count;
static struct phase *phases;
static int phase_count;
static struct pair *pairs[MAX_RANKS][MAX_RANKS];
static char buffer[CHUNK];
static uint64_t random_state;
static int poller;

static void __attribute__((noreturn, format(printf, 1, 2))) die(const char *format, ...)
{
	int code = errno;
	va_list arguments;

	va_start(arguments, format);
	fputs("collective: ", stderr);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fprintf(stderr, ": %s\n", strerror(code));
	exit(1);
}

static void __attribute__((noreturn)) usage(const char *what)
{
	fprintf(stderr,
		"collective: %s\n"
		"usage: collective --bytes N [--repeat N] [--seed N] [--congestion NAME] < plan\n"
		"  --bytes N            of each flow in each phase\n"
		"  --repeat N           the phases so many times (1)\n"
		"  --seed N             of the source ports\n"
		"  --congestion NAME    congestion control (cubic)\n"
		"plan: lines 'rank NAMESPACE-PATH ADDRESS' and 'phase 0>2 2>0 ...', an empty "
		"line\n",
		what);
	exit(2);
}

/* ---- options and plan ---- */

static long parse_number(const char *text)
{
	char *end;
	long value = strtol(text, &end, 10);

	if (*end || end == text || value < 0)
		usage("a number was expected");
	return value;
}

static void parse_options(int argc, char **argv)
{
	if (argc % 2 == 0)
		usage("every option has a value");
	for (int i = 1; i < argc; i += 2) {
		if (!strcmp(argv[i], "--bytes"))
			opt.bytes = parse_number(argv[i + 1]);
		else if (!strcmp(argv[i], "--repeat"))
			opt.repeat = parse_number(argv[i + 1]);
		else if (!strcmp(argv[i], "--seed"))
			opt.seed = parse_number(argv[i + 1]);
		else if (!strcmp(argv[i], "--congestion"))
			opt.congestion = argv[i + 1];
		else
			usage("unknown option");
	}
	if (!opt.bytes || !opt.repeat)
		usage("nothing to do: --bytes and --repeat");
}

static void add_rank(char *save)
{
	char *path = strtok_r(NULL, " \n", &save), *address = strtok_r(NULL, " \n", &save);
	struct rank *rank = &ranks[rank_count];

	if (rank_count == MAX_RANKS || !path || !address ||
	    inet_pton(AF_INET, address, &rank->address) != 1)
		usage("a rank is 'rank NAMESPACE-PATH ADDRESS'");
	rank->namespace = open(path, O_RDONLY | O_CLOEXEC);
	if (rank->namespace < 0)
		die("%s", path);
	rank_count++;
}

static struct pair *pair_of(int from, int to)
{
	struct pair **pair = &pairs[from][to];

	if (*pair)
		return *pair;
	*pair = calloc(1, sizeof(**pair));
	if (!*pair)
		die("memory");
	(*pair)->from = from;
	(*pair)->to = to;
	return *pair;
}

static void add_phase(char *save)
{
	struct phase *phase;
	char *word;

	phases = realloc(phases, (phase_count + 1) * sizeof(*phases));
	if (!phases)
		die("memory");
	phase = &phases[phase_count++];
	*phase = (struct phase){ .flows = &flows[flow_count] };
	while ((word = strtok_r(NULL, " \n", &save))) {
		int from, to;

		if (sscanf(word, "%d>%d", &from, &to) != 2 || from < 0 || from >= rank_count ||
		    to < 0 || to >= rank_count || from == to || flow_count == MAX_FLOWS)
			usage("a phase is 'phase FROM>TO ...' of ranks named before");
		flows[flow_count++].pair = pair_of(from, to);
		phase->count++;
	}
}

static void read_plan(void)
{
	char *line = NULL;
	size_t room = 0;

	while (getline(&line, &room, stdin) > 0 && line[0] != '\n') {
		char *save, *word = strtok_r(line, " \n", &save);

		if (word && !strcmp(word, "rank"))
			add_rank(save);
		else if (word && !strcmp(word, "phase"))
			add_phase(save);
		else
			usage("a line of the plan begins with 'rank' or 'phase'");
	}
	free(line);
	if (!flow_count)
		usage("the plan has no flows");
}

/* ---- connections ---- */

/* splitmix64: any seed, 0 too, gives a good sequence. */
static uint64_t next_random(void)
{
	uint64_t z = (random_state += 0x9e3779b97f4a7c15u);

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static int open_socket(const struct rank *rank)
{
	int one = 1, fd;

	if (setns(rank->namespace, CLONE_NEWNET))
		die("enter a network namespace");
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		die("socket");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, opt.congestion, strlen(opt.congestion)))
		die("congestion control %s", opt.congestion);
	return fd;
}

/* On a port of the generator's choice; on one of the kernel's if all of these are taken. */
static uint16_t bind_port(int fd, const struct rank *rank, bool chosen)
{
	struct sockaddr_in where = { .sin_family = AF_INET, .sin_addr = rank->address };
	socklen_t length = sizeof(where);

	for (int attempt = chosen ? 0 : PORT_TRIES; attempt <= PORT_TRIES; attempt++) {
		where.sin_port =
			attempt < PORT_TRIES ? htons(PORT_MIN + next_random() % PORT_COUNT) : 0;
		if (!bind(fd, (struct sockaddr *)&where, sizeof(where))) {
			getsockname(fd, (struct sockaddr *)&where, &length);
			return ntohs(where.sin_port);
		}
		if (errno != EADDRINUSE)
			die("bind");
	}
	die("bind");
}

static void watch(int fd, struct pair *pair, int operation, uint32_t events)
{
	struct epoll_event event = { .events = events, .data.ptr = pair };

	if (epoll_ctl(poller, operation, fd, &event))
		die("epoll_ctl");
}

static void connect_pair(struct pair *pair)
{
	const struct rank *from = &ranks[pair->from], *to = &ranks[pair->to];
	struct sockaddr_in where = { .sin_family = AF_INET, .sin_addr = to->address };
	int listener = open_socket(to);

	pair->port = bind_port(listener, to, false);
	if (listen(listener, 1))
		die("listen");
	pair->out = open_socket(from);
	pair->source_port = bind_port(pair->out, from, true);
	where.sin_port = htons(pair->port);
	if (connect(pair->out, (struct sockaddr *)&where, sizeof(where)))
		die("connect rank %d to rank %d", pair->from, pair->to);
	pair->in = accept(listener, NULL, NULL);
	if (pair->in < 0)
		die("accept");
	close(listener);
	fcntl(pair->out, F_SETFL, O_NONBLOCK);
	fcntl(pair->in, F_SETFL, O_NONBLOCK);
	/* Input is only looked for at one end and room for output at the other, so the event
	 * tells the end. */
	watch(pair->in, pair, EPOLL_CTL_ADD, EPOLLIN);
	watch(pair->out, pair, EPOLL_CTL_ADD, 0);
}

static void connect_all(void)
{
	random_state = opt.seed;
	poller = epoll_create1(EPOLL_CLOEXEC);
	if (poller < 0)
		die("epoll_create1");
	for (int from = 0; from < rank_count; from++)
		for (int to = 0; to < rank_count; to++)
			if (pairs[from][to])
				connect_pair(pairs[from][to]);
}

/* ---- phases ---- */

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static void feed(struct pair *pair)
{
	while (pair->to_send) {
		size_t piece = pair->to_send < CHUNK ? pair->to_send : CHUNK;
		ssize_t sent = send(pair->out, buffer, piece, MSG_NOSIGNAL);

		if (sent < 0) {
			if (errno == EAGAIN)
				return;
			die("send from rank %d to rank %d", pair->from, pair->to);
		}
		pair->to_send -= sent;
	}
	watch(pair->out, pair, EPOLL_CTL_MOD, 0);
}

/* True when the flow's last byte of this phase has arrived. */
static bool drain(struct pair *pair)
{
	while (pair->to_receive) {
		ssize_t got = recv(pair->in, buffer, CHUNK, 0);

		if (got < 0 && errno == EAGAIN)
			return false;
		if (got <= 0)
			die("receive at rank %d from rank %d", pair->to, pair->from);
		pair->to_receive -= got;
	}
	return true;
}

static void run_phase(struct phase *phase)
{
	struct epoll_event events[64];
	int open = phase->count;
	double start = now();

	for (int i = 0; i < phase->count; i++) {
		struct pair *pair = phase->flows[i].pair;

		pair->to_send = pair->to_receive = opt.bytes;
		watch(pair->out, pair, EPOLL_CTL_MOD, EPOLLOUT);
	}
	while (open) {
		int count = epoll_wait(poller, events, 64, STALL_MS);

		if (count < 0)
			die("epoll_wait");
		if (!count) {
			errno = ETIMEDOUT;
			die("%d flows of a phase stand still", open);
		}
		for (int i = 0; i < count; i++) {
			struct pair *pair = events[i].data.ptr;

			if (events[i].events & EPOLLOUT)
				feed(pair);
			if (events[i].events & ~EPOLLOUT && pair->to_receive)
				open -= drain(pair);
		}
	}
	phase->seconds += now() - start;
	for (int i = 0; i < phase->count; i++)
		phase->flows[i].received += opt.bytes - phase->flows[i].pair->to_receive;
}

/* ---- report ---- */

static void report_flow(int number, const struct flow *flow)
{
	const struct pair *pair = flow->pair;
	char source[INET_ADDRSTRLEN], destination[INET_ADDRSTRLEN];

	inet_ntop(AF_INET, &ranks[pair->from].address, source, sizeof(source));
	inet_ntop(AF_INET, &ranks[pair->to].address, destination, sizeof(destination));
	printf("{\"phase\": %d, \"source\": \"%s\", \"source_port\": %u, \"destination\": \"%s\", "
	       "\"port\": %u, \"bytes\": %ld}",
	       number, source, pair->source_port, destination, pair->port, flow->received);
}

static void report(double seconds)
{
	const char *separator = "";

	printf("{\"seconds\": %.6f, \"congestion\": \"%s\", \"phase_seconds\": [", seconds,
	       opt.congestion);
	for (int i = 0; i < phase_count; i++)
		printf("%s%.6f", i ? ", " : "", phases[i].seconds);
	printf("], \"flows\": [");
	for (int i = 0; i < phase_count; i++)
		for (int j = 0; j < phases[i].count; j++) {
			printf("%s", separator);
			report_flow(i, &phases[i].flows[j]);
			separator = ", ";
		}
	printf("]}\n");
}

int main(int argc, char **argv)
{
	double start;

	parse_options(argc, argv);
	read_plan();
	connect_all();
	puts("ready");
	fflush(stdout);
	getchar();
	start = now();
	for (long i = 0; i < opt.repeat; i++)
		for (int j = 0; j < phase_count; j++)
			run_phase(&phases[j]);
	report(now() - start);
	return 0;
}
