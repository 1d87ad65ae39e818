// SPDX-License-Identifier: Apache-2.0
/*
 * Traffic between two ends, measured: one request, one response, over and over.
 *
 *   traffic server --proto udp|tcp --kind rr|crr|stream [--address A] [--port P]
 *   traffic client --proto udp|tcp --kind rr|crr|stream  --address A   --port P
 *
 * A stream is request-response with a large request and a small response, so one loop serves
 * all kinds. Work is done in batches; between them, and a few times before the first, there is
 * a pause: an accelerator may turn a flow fast only after a gap. Pauses are not measured.
 *
 * Time and CPU. Pin both ends to one CPU: packets between namespaces are then processed on it
 * too, in soft interrupts that no process is charged for. It is never idle during a batch, so
 * the time per transaction IS the CPU per transaction, the kernel's share included. That it was
 * not idle is checked: cpu_us is the time less the share that /proc/stat calls idle. What other
 * processes took of that CPU is in both numbers: hence many batches, and the best of them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define WARMUP_TRANSACTIONS 20
#define MAX_DATAGRAM 65507
#define MAX_LOST_IN_A_ROW 25
/* Every datagram starts with its number, so that a late answer is not taken for the next. */
#define MIN_DATAGRAM ((long)sizeof(uint32_t))

enum kind { RR, CRR, STREAM };

struct options {
	bool server;
	bool tcp;
	enum kind kind;
	const char *address;
	const char *port;
	long request;
	long response;
	long cpu;
	long ready_fd;
	long batches;
	long transactions;
	double seconds;
	long step;
	long warmup;
	long pause_us;
	long timeout_ms;
};

static struct options opt = {
	.address = "0.0.0.0",
	.port = "0",
	.cpu = -1,
	.ready_fd = STDOUT_FILENO,
	.batches = 10,
	.transactions = 1000,
	.warmup = 5,
	.pause_us = 5000,
	.timeout_ms = 200,
};

static char *buffer;

static void __attribute__((noreturn, format(printf, 1, 2))) die(const char *format, ...)
{
	int code = errno;
	va_list arguments;

	va_start(arguments, format);
	fputs("traffic: ", stderr);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fprintf(stderr, ": %s\n", strerror(code));
	exit(1);
}

static void __attribute__((noreturn)) usage(const char *what)
{
	fprintf(stderr,
		"traffic: %s\n"
		"usage: traffic server|client --proto udp|tcp --kind rr|crr|stream\n"
		"  --address A --port P     where to listen, or whom to ask (numeric)\n"
		"  --request N --response N bytes\n"
		"  --cpu N                  run on this CPU only\n"
		"  --ready-fd N             server: where the line with its port goes (1)\n"
		"  --batches N | --seconds S, --transactions N (in a batch)\n"
		"  --step 1                 a batch for each line on standard input, and a line "
		"back\n"
		"  --warmup N               rounds of %d transactions before the first batch\n"
		"  --pause-us N             rest before each batch\n"
		"  --timeout-ms N           a datagram not answered by then is lost\n",
		what, WARMUP_TRANSACTIONS);
	exit(2);
}

/* ---- options ---- */

static enum kind parse_kind(const char *name)
{
	if (!strcmp(name, "rr"))
		return RR;
	if (!strcmp(name, "crr"))
		return CRR;
	if (!strcmp(name, "stream"))
		return STREAM;
	usage("--kind is rr, crr or stream");
}

static bool parse_proto(const char *name)
{
	if (!strcmp(name, "tcp"))
		return true;
	if (!strcmp(name, "udp"))
		return false;
	usage("--proto is udp or tcp");
}

static long parse_number(const char *text)
{
	char *end;
	long value = strtol(text, &end, 10);

	if (*end || end == text || value < 0)
		usage("a number was expected");
	return value;
}

static void check_options(void)
{
	if (!opt.tcp && opt.kind != RR)
		usage("udp knows only --kind rr");
	if (!opt.request)
		opt.request = opt.kind == STREAM ? 1000000 : 8;
	if (!opt.response)
		opt.response = 8;
	if (!opt.tcp && (opt.request < MIN_DATAGRAM || opt.response < MIN_DATAGRAM ||
			 opt.request > MAX_DATAGRAM || opt.response > MAX_DATAGRAM))
		usage("a datagram has 4 to 65507 bytes");
	if (!opt.transactions || (!opt.batches && opt.seconds <= 0 && !opt.step))
		usage("nothing to do: --transactions, --batches, --seconds and --step");
}

static void set_option(const char *name, const char *value)
{
	static const struct {
		const char *name;
		long *value;
	} numbers[] = {
		{ "--request", &opt.request },	 { "--response", &opt.response },
		{ "--cpu", &opt.cpu },		 { "--ready-fd", &opt.ready_fd },
		{ "--batches", &opt.batches },	 { "--transactions", &opt.transactions },
		{ "--step", &opt.step },	 { "--warmup", &opt.warmup },
		{ "--pause-us", &opt.pause_us }, { "--timeout-ms", &opt.timeout_ms },
	};

	if (!strcmp(name, "--proto"))
		opt.tcp = parse_proto(value);
	else if (!strcmp(name, "--kind"))
		opt.kind = parse_kind(value);
	else if (!strcmp(name, "--address"))
		opt.address = value;
	else if (!strcmp(name, "--port"))
		opt.port = value;
	else if (!strcmp(name, "--seconds"))
		opt.seconds = strtod(value, NULL);
	else {
		for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
			if (!strcmp(name, numbers[i].name)) {
				*numbers[i].value = parse_number(value);
				return;
			}
		}
		usage("unknown option");
	}
}

static void parse_options(int argc, char **argv)
{
	if (argc < 2 || (strcmp(argv[1], "server") && strcmp(argv[1], "client")))
		usage("say server or client first");
	if (argc % 2)
		usage("every option has a value");
	opt.server = !strcmp(argv[1], "server");
	for (int i = 2; i < argc; i += 2)
		set_option(argv[i], argv[i + 1]);
	check_options();
}

/* ---- sockets ---- */

static void pin(void)
{
	cpu_set_t set;

	if (opt.cpu < 0)
		return;
	CPU_ZERO(&set);
	CPU_SET(opt.cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		die("cannot run on CPU %ld", opt.cpu);
}

static struct addrinfo *resolve(void)
{
	struct addrinfo hints = {
		.ai_socktype = opt.tcp ? SOCK_STREAM : SOCK_DGRAM,
		.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
	};
	struct addrinfo *found;

	if (getaddrinfo(opt.address, opt.port, &hints, &found))
		usage("--address and --port are numeric");
	return found;
}

static void limit_waiting(int fd, long milliseconds)
{
	struct timeval time = {
		.tv_sec = milliseconds / 1000,
		.tv_usec = milliseconds % 1000 * 1000,
	};

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time));
}

static int open_socket(const struct addrinfo *where)
{
	static const char cubic[] = "cubic";
	int one = 1;
	int fd = socket(where->ai_family, where->ai_socktype, 0);

	if (fd < 0)
		die("socket");
	if (opt.tcp) {
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		/* A pacing algorithm would leave the CPU idle, and time is our measure of CPU. */
		setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, cubic, sizeof(cubic) - 1);
	}
	return fd;
}

/* False: the other side closed, or an error (in errno; 0 when it closed). */
static bool read_whole(int fd, size_t bytes)
{
	while (bytes) {
		ssize_t got = recv(fd, buffer, bytes, 0);

		if (got <= 0) {
			errno = got ? errno : 0;
			return false;
		}
		bytes -= got;
	}
	return true;
}

static bool write_whole(int fd, size_t bytes)
{
	while (bytes) {
		ssize_t sent = send(fd, buffer, bytes, MSG_NOSIGNAL);

		if (sent < 0)
			return false;
		bytes -= sent;
	}
	return true;
}

/* ---- server ---- */

static void say_port(int fd)
{
	struct sockaddr_storage bound;
	socklen_t length = sizeof(bound);
	char number[NI_MAXSERV];

	if (getsockname(fd, (struct sockaddr *)&bound, &length) ||
	    getnameinfo((struct sockaddr *)&bound, length, NULL, 0, number, sizeof(number),
			NI_NUMERICSERV))
		die("the bound port");
	if (dprintf(opt.ready_fd, "{\"port\": %s}\n", number) < 0)
		die("--ready-fd %ld", opt.ready_fd);
}

static void serve_udp(int fd)
{
	for (;;) {
		struct sockaddr_storage from;
		socklen_t length = sizeof(from);
		ssize_t got =
			recvfrom(fd, buffer, MAX_DATAGRAM, 0, (struct sockaddr *)&from, &length);

		/* Errors here are somebody's ICMP about an earlier answer. */
		if (got < MIN_DATAGRAM)
			continue;
		sendto(fd, buffer, opt.response, 0, (struct sockaddr *)&from, length);
	}
}

static void serve_tcp(int fd)
{
	for (;;) {
		int peer = accept(fd, NULL, NULL);

		if (peer < 0)
			continue;
		/* Closing first keeps TIME_WAIT, and so the used-up ports, away from the client. */
		while (read_whole(peer, opt.request) && write_whole(peer, opt.response) &&
		       opt.kind != CRR)
			;
		close(peer);
	}
}

static void serve(void)
{
	struct addrinfo *where = resolve();
	int fd = open_socket(where);

	if (bind(fd, where->ai_addr, where->ai_addrlen))
		die("bind %s port %s", opt.address, opt.port);
	if (opt.tcp && listen(fd, 128))
		die("listen");
	say_port(fd);
	if (opt.tcp)
		serve_tcp(fd);
	else
		serve_udp(fd);
}

/* ---- client ---- */

struct samples {
	uint32_t *ns; /* one per transaction */
	size_t count;
	size_t room;
};

struct result {
	struct samples samples;
	double *batch_us; /* per transaction */
	long batches;
	double total_us;
	long done;
	long lost;
	long stray;
	long idle_ticks;
	long all_ticks;
};

static const struct addrinfo *server;
static uint32_t number;

static double now_us(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static void rest(void)
{
	struct timespec time = {
		.tv_sec = opt.pause_us / 1000000,
		.tv_nsec = opt.pause_us % 1000000 * 1000,
	};

	nanosleep(&time, NULL);
}

static int connect_server(void)
{
	int fd = open_socket(server);

	limit_waiting(fd, opt.tcp ? 10000 : opt.timeout_ms);
	if (connect(fd, server->ai_addr, server->ai_addrlen)) {
		close(fd);
		return -1;
	}
	return fd;
}

/* Each kind's transaction says whether it was answered. */

static bool transact_udp(int fd, struct result *result)
{
	uint32_t expected = ++number;

	memcpy(buffer, &expected, sizeof(expected));
	if (send(fd, buffer, opt.request, 0) < 0)
		return false;
	for (;;) {
		uint32_t answered;

		/* Time-out, or an ICMP error: both mean that no answer comes. */
		if (recv(fd, buffer, MAX_DATAGRAM, 0) < (ssize_t)sizeof(answered))
			return false;
		memcpy(&answered, buffer, sizeof(answered));
		if (answered == expected)
			return true;
		result->stray++;
	}
}

static bool transact_tcp(int fd)
{
	if (!write_whole(fd, opt.request) || !read_whole(fd, opt.response))
		die("the connection broke");
	return true;
}

static bool transact_crr(void)
{
	int fd = connect_server();
	bool good;

	if (fd < 0)
		return false;
	good = write_whole(fd, opt.request) && read_whole(fd, opt.response) && !read_whole(fd, 1) &&
	       errno == 0;
	close(fd);
	return good;
}

static bool transact(int fd, struct result *result)
{
	static int lost_in_a_row;
	bool answered;

	if (!opt.tcp)
		answered = transact_udp(fd, result);
	else if (opt.kind == CRR)
		answered = transact_crr();
	else
		answered = transact_tcp(fd);
	lost_in_a_row = answered ? 0 : lost_in_a_row + 1;
	if (lost_in_a_row == MAX_LOST_IN_A_ROW)
		die("%s port %s does not answer", opt.address, opt.port);
	return answered;
}

static void keep_sample(struct samples *samples, double us)
{
	if (samples->count == samples->room) {
		samples->room = samples->room ? 2 * samples->room : 1 << 16;
		samples->ns = realloc(samples->ns, samples->room * sizeof(*samples->ns));
		if (!samples->ns)
			die("memory for samples");
	}
	samples->ns[samples->count++] = us * 1e3;
}

/* Clock ticks of our CPU (all CPUs together when not pinned) since boot: idle, and all. */
static void read_ticks(long *idle, long *all)
{
	FILE *file = fopen("/proc/stat", "r");
	char line[512], wanted[32] = "cpu";

	if (!file)
		die("/proc/stat");
	if (opt.cpu >= 0)
		snprintf(wanted, sizeof(wanted), "cpu%ld", opt.cpu);
	*idle = *all = 0;
	while (fgets(line, sizeof(line), file)) {
		char *save, *word = strtok_r(line, " ", &save);

		if (strcmp(word, wanted))
			continue;
		/* user nice system idle iowait irq softirq steal; guests are counted in user */
		for (int field = 0; field < 8 && (word = strtok_r(NULL, " ", &save)); field++) {
			*all += atol(word);
			if (field == 3 || field == 4)
				*idle += atol(word);
		}
		break;
	}
	fclose(file);
}

static void run_batch(int fd, struct result *result)
{
	long idle_before, all_before, idle, all, done = 0;
	double start, previous, waited = 0;

	rest();
	read_ticks(&idle_before, &all_before);
	start = previous = now_us();
	for (long i = 0; i < opt.transactions; i++) {
		bool answered = transact(fd, result);
		double now = now_us();

		if (answered) {
			keep_sample(&result->samples, now - previous);
			done++;
		} else {
			result->lost++;
			waited += now - previous;
		}
		previous = now;
	}
	read_ticks(&idle, &all);
	result->idle_ticks += idle - idle_before;
	result->all_ticks += all - all_before;
	if (!done)
		return;
	result->batch_us = realloc(result->batch_us, (result->batches + 1) * sizeof(double));
	if (!result->batch_us)
		die("memory for batches");
	result->batch_us[result->batches++] = (previous - start - waited) / done;
	result->total_us += previous - start - waited;
	result->done += done;
}

static void warm_up(int fd)
{
	/* A transaction of a stream is big enough to be a round by itself. */
	long transactions = opt.kind == STREAM ? 1 : WARMUP_TRANSACTIONS;
	struct result ignored = {};

	for (long round = 0; round < opt.warmup; round++) {
		for (long i = 0; i < transactions; i++)
			transact(fd, &ignored);
		rest();
	}
}

static int compare(const void *left, const void *right)
{
	uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;

	return (a > b) - (a < b);
}

static double percentile(const struct samples *samples, int percent)
{
	if (!samples->count)
		return 0;
	return samples->ns[(samples->count - 1) * percent / 100] / 1e3;
}

static void report(struct result *result)
{
	static const char *const kinds[] = { "rr", "crr", "stream" };
	struct samples *samples = &result->samples;
	long cpus = opt.cpu >= 0 ? 1 : sysconf(_SC_NPROCESSORS_ONLN);
	double idle = result->all_ticks ? (double)result->idle_ticks / result->all_ticks : 0;
	double mean = result->done ? result->total_us / result->done : 0;
	double bytes = (double)result->done * opt.request;

	qsort(samples->ns, samples->count, sizeof(*samples->ns), compare);
	printf("{\"proto\": \"%s\", \"kind\": \"%s\", \"cpu\": %ld, \"transactions\": %ld, "
	       "\"lost\": %ld, \"stray\": %ld, \"batches_us\": [",
	       opt.tcp ? "tcp" : "udp", kinds[opt.kind], opt.cpu, result->done, result->lost,
	       result->stray);
	for (long i = 0; i < result->batches; i++)
		printf("%s%.3f", i ? ", " : "", result->batch_us[i]);
	printf("], \"mean_us\": %.3f, \"cpu_us\": %.3f, \"idle_share\": %.4f, "
	       "\"p50_us\": %.3f, \"p99_us\": %.3f, \"bytes\": %.0f, \"seconds\": %.6f, "
	       "\"cpu_ns_per_byte\": %.6f}\n",
	       mean, mean * (1 - idle) * cpus, idle, percentile(samples, 50),
	       percentile(samples, 99), bytes, result->total_us / 1e6,
	       bytes ? result->total_us * 1e3 * (1 - idle) * cpus / bytes : 0);
}

/* Somebody else sets the pace, so that several clients can take turns batch by batch. */
static void step_batches(int fd, struct result *result)
{
	char line[16];

	while (fgets(line, sizeof(line), stdin)) {
		run_batch(fd, result);
		puts("done");
		fflush(stdout);
	}
}

static void ask(void)
{
	struct result result = {};
	double end;
	int fd = -1;

	server = resolve();
	if (opt.kind != CRR && (fd = connect_server()) < 0)
		die("connect %s port %s", opt.address, opt.port);
	warm_up(fd);
	end = now_us() + opt.seconds * 1e6;
	if (opt.step)
		step_batches(fd, &result);
	else
		for (long i = 0; opt.seconds > 0 ? now_us() < end : i < opt.batches; i++)
			run_batch(fd, &result);
	report(&result);
}

int main(int argc, char **argv)
{
	long room = MAX_DATAGRAM;

	parse_options(argc, argv);
	room = opt.request > room ? opt.request : room;
	room = opt.response > room ? opt.response : room;
	buffer = calloc(1, room);
	if (!buffer)
		die("memory for %ld bytes", room);
	pin();
	if (opt.server)
		serve();
	else
		ask();
	return 0;
}
