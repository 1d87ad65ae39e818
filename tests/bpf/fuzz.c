// SPDX-License-Identifier: Apache-2.0
/*
 * The real programs on made-up packets, millions of them, against a reference.
 *
 *   fuzz name=value ... < kinds       (tests/bpf/fuzz.py sets it up and starts it)
 *
 * The kinds are valid packets, one a line: hook and bytes in hex. Every packet is a kind that
 * was damaged: first each prefix, then each header field at its edges, then at random. The
 * number of a packet and the seed say all about it, so that any of them can be made again.
 *
 * The reference was written from docs/packet-path.md and the kernel's tunnel device and shares
 * nothing with bpf/. It says from the bytes alone whether a packet may be fast, which counters
 * may move if not, and what it must look like if so. Flows start warm; what happens to them is
 * followed by three states. Broken rules are printed, each with how to see it again.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <bpf/bpf.h>
#include <bpf/libbpf.h>
#include <errno.h>
#include <linux/bpf.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))

#define MAX_PACKET 2048
#define MAX_COUNTERS 64
#define MAX_KINDS 256
#define MAX_ENTRIES 64
#define MAX_VALUE 256
#define MAX_SHOWN 10
#define BLOCK 8 /* packets; every other block keeps the state from one to the next */

/* What a test run takes at least (net/bpf/test_run.c), Ethernet and IPv4. */
#define MIN_FRAME 14
#define MIN_IP4_FRAME 34

#define ETHER 14
#define OVERHEAD 50
#define INNER (ETHER + OVERHEAD) /* of the inner IP header in a tunnel packet */
#define HEADERS 60 /* bytes from the IP header on whose fields are taken to their edges */

enum hook { FROM_POD, FROM_WIRE, TO_WIRE, TO_POD, HOOKS };

static const char *const hook_names[HOOKS] = { "from_pod", "from_wire", "to_wire", "to_pod" };

/* ---- the node, as the caller has set it up ------------------------------- */

static u64 from_pod, from_wire, to_wire, to_pod; /* descriptors of the programs */
static u64 filter_cache, path_index, path_free, counters; /* and of the maps */
static u64 uplink, pod_device, other_device; /* interface indices */
static u64 pod, remote, node, peer; /* addresses */
static u64 pod_mac, gateway_mac, node_mac, peer_mac, tunnel_mac, peer_tunnel_mac;
static u64 vni, port, port_min, port_max, mtu, mark_mask, hops;
static u64 sport, dport, echo; /* of the warm flows, seen from the pod */
static u64 tos, ttl, df; /* of the tunnel device, where not inherited */
static u64 tos_inherit, ttl_inherit, df_inherit;
static u64 seed, first, packets;

static const struct {
	const char *name;
	u64 *value;
} settings[] = {
#define SETTING(name) { #name, &name }
	SETTING(from_pod),    SETTING(from_wire),    SETTING(to_wire),	  SETTING(to_pod),
	SETTING(filter_cache), SETTING(path_index),  SETTING(path_free),   SETTING(counters),
	SETTING(uplink),      SETTING(pod_device),   SETTING(other_device), SETTING(pod),
	SETTING(remote),      SETTING(node),	     SETTING(peer),	  SETTING(pod_mac),
	SETTING(gateway_mac), SETTING(node_mac),     SETTING(peer_mac),	  SETTING(tunnel_mac),
	SETTING(peer_tunnel_mac), SETTING(vni),	     SETTING(port),	  SETTING(port_min),
	SETTING(port_max),    SETTING(mtu),	     SETTING(mark_mask),  SETTING(hops),
	SETTING(sport),	      SETTING(dport),	     SETTING(echo),	  SETTING(tos),
	SETTING(ttl),	      SETTING(df),	     SETTING(tos_inherit), SETTING(ttl_inherit),
	SETTING(df_inherit),  SETTING(seed),	     SETTING(first),	  SETTING(packets),
#undef SETTING
};

static char *counter_names[MAX_COUNTERS];
static u32 counter_count;

static void die(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	fprintf(stderr, "fuzz: ");
	vfprintf(stderr, format, arguments);
	fprintf(stderr, "\n");
	va_end(arguments);
	exit(2);
}

static void split_names(char *list)
{
	for (char *name = strtok(list, ","); name; name = strtok(NULL, ",")) {
		if (counter_count == MAX_COUNTERS)
			die("more than %d counters", MAX_COUNTERS);
		counter_names[counter_count++] = name;
	}
}

static void set(char *argument)
{
	char *value = strchr(argument, '=');

	if (!value)
		die("no value: %s", argument);
	*value++ = 0;
	if (!strcmp(argument, "names")) {
		split_names(value);
		return;
	}
	for (u32 i = 0; i < ARRAY_SIZE(settings); i++) {
		if (!strcmp(argument, settings[i].name)) {
			*settings[i].value = strtoull(value, NULL, 0);
			return;
		}
	}
	die("unknown setting %s", argument);
}

/* ---- numbers ------------------------------------------------------------- */

static u64 be(const u8 *from, u32 bytes)
{
	u64 value = 0;

	while (bytes--)
		value = value << 8 | *from++;
	return value;
}

static void put(u8 *to, u64 value, u32 bytes)
{
	while (bytes--) {
		to[bytes] = value;
		value >>= 8;
	}
}

static u64 dice;

/* splitmix64: any start is a good one. */
static u64 roll(void)
{
	u64 z = dice += 0x9e3779b97f4a7c15;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return z ^ z >> 31;
}

static u64 below(u64 limit)
{
	return roll() % limit;
}

static bool one_in(u64 odds)
{
	return !below(odds);
}

/* Ones' complement sum, folded: 0xffff over a valid header, never 0 over one with a version. */
static u32 sum16(const u8 *data, u32 length)
{
	u64 sum = 0;

	for (u32 i = 0; i + 1 < length; i += 2)
		sum += be(data + i, 2);
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

static void seal(u8 *ip, u32 length)
{
	put(ip + 10, 0, 2);
	put(ip + 10, ~sum16(ip, length), 2);
}

/* ---- the reference ------------------------------------------------------- */

enum reason {
	NOT_IPV4,
	TRUNCATED,
	IP_OPTIONS,
	FRAGMENT,
	PROTOCOL,
	TCP_FLAGS,
	ICMP_TYPE,
	NOT_TUNNEL,
	OUTER,
	VNI,
	UNKNOWN_POD,
	SPOOFED,
	MISS,
	UNCONFIRMED,
	CLOSED,
	ORDER,
	SIZE,
	TTL,
	MAC,
	PEER,
	ECN,
	CHECKSUM,
	HELPER,
	REASONS
};

static const char *const reason_names[REASONS] = {
	[NOT_IPV4] = "not_ipv4",     [TRUNCATED] = "truncated",	    [IP_OPTIONS] = "ip_options",
	[FRAGMENT] = "fragment",     [PROTOCOL] = "protocol",	    [TCP_FLAGS] = "tcp_flags",
	[ICMP_TYPE] = "icmp_type",   [NOT_TUNNEL] = "not_tunnel",   [OUTER] = "outer",
	[VNI] = "vni",		     [UNKNOWN_POD] = "unknown_pod", [SPOOFED] = "spoofed",
	[MISS] = "miss",	     [UNCONFIRMED] = "unconfirmed", [CLOSED] = "closed",
	[ORDER] = "order",	     [SIZE] = "size",		    [TTL] = "ttl",
	[MAC] = "mac",		     [PEER] = "peer",		    [ECN] = "ecn",
	[CHECKSUM] = "checksum",     [HELPER] = "helper",
};

static u32 reason_counter[REASONS]; /* index into counter_names */

#define WHY(reason) (1u << (reason))
#define STATE_REASONS (WHY(ORDER) | WHY(CLOSED) | WHY(UNCONFIRMED) | WHY(MISS))

#define FIN 0x01
#define SYN 0x02
#define RST 0x04
#define ACK 0x10

enum { OUT, IN };

/* What the bytes say. */
struct view {
	u32 reasons; /* all that apply, as far as the packet can be read; 0: it may be fast */
	bool doubtful; /* the base path drops it early, we hand it to a pod that drops it */
	bool reached; /* nothing outside of the inner IP packet is wrong */
	bool keyed; /* addresses, protocol and ports can be read */
	bool followed; /* the program can tell where this packet comes out */
	int flow; /* a warm one, -1 if none */
	u8 flags; /* of TCP */
	u8 protocol;
	u8 ttl;
	u32 local, remote;
	u16 local_port, remote_port;
};

enum { UDP_FLOW, TCP_FLOW, ECHO_FLOW, FLOWS };

static int warm_flow(const struct view *v)
{
	if (!v->keyed || v->local != pod || v->remote != remote)
		return -1;
	if (v->protocol == IPPROTO_ICMP)
		return v->local_port == echo && !v->remote_port ? ECHO_FLOW : -1;
	if (v->local_port != sport || v->remote_port != dport)
		return -1;
	return v->protocol == IPPROTO_TCP ? TCP_FLOW : UDP_FLOW;
}

static void inspect_ports(struct view *v, const u8 *l4, int direction)
{
	v->local_port = be(l4 + (direction == OUT ? 0 : 2), 2);
	v->remote_port = be(l4 + (direction == OUT ? 2 : 0), 2);
	v->keyed = true;
}

static u32 inspect_tcp(struct view *v, const u8 *l4, u32 have, int direction)
{
	u32 why = 0;

	if (have < 20)
		return WHY(TRUNCATED);
	inspect_ports(v, l4, direction);
	v->flags = l4[13];
	if ((v->flags & (FIN | SYN | RST | ACK)) != ACK)
		why |= WHY(TCP_FLAGS);
	if (l4[12] >> 4 < 5 || l4[12] >> 4 > have / 4)
		why |= WHY(TRUNCATED);
	return why;
}

static u32 inspect_udp(struct view *v, const u8 *l4, u32 have, int direction)
{
	if (have < 8)
		return WHY(TRUNCATED);
	inspect_ports(v, l4, direction);
	return be(l4 + 4, 2) == have ? 0 : WHY(TRUNCATED);
}

/* The identifier belongs to the side that asks: see the flow key in docs/packet-path.md. */
static u32 inspect_icmp(struct view *v, const u8 *l4, u32 have, int direction)
{
	bool ours = (l4[0] == 8) == (direction == OUT);

	if (have < 8)
		return WHY(TRUNCATED) | WHY(ICMP_TYPE);
	if ((l4[0] != 0 && l4[0] != 8) || l4[1])
		return WHY(ICMP_TYPE);
	v->local_port = ours ? be(l4 + 4, 2) : 0;
	v->remote_port = ours ? 0 : be(l4 + 4, 2);
	v->keyed = true;
	return 0;
}

static u32 inspect_l4(struct view *v, const u8 *l4, u32 have, int direction)
{
	switch (v->protocol) {
	case IPPROTO_TCP:
		return inspect_tcp(v, l4, have, direction);
	case IPPROTO_UDP:
		return inspect_udp(v, l4, have, direction);
	case IPPROTO_ICMP:
		return inspect_icmp(v, l4, have, direction);
	default:
		return WHY(PROTOCOL);
	}
}

/* The IP packet that is the whole rest of the frame. */
static void inspect_ip(struct view *v, const u8 *ip, u32 have, int direction)
{
	u32 header, total;

	if (have < 20) {
		v->reasons |= WHY(TRUNCATED);
		return;
	}
	header = (ip[0] & 15) * 4;
	total = be(ip + 2, 2);
	if (ip[0] >> 4 != 4 || header < 20) {
		v->reasons |= WHY(NOT_IPV4);
		return;
	}
	v->ttl = ip[8];
	v->protocol = ip[9];
	v->local = be(ip + (direction == OUT ? 12 : 16), 4);
	v->remote = be(ip + (direction == OUT ? 16 : 12), 4);
	if (total != have)
		v->reasons |= WHY(TRUNCATED);
	if (total > mtu)
		v->reasons |= WHY(SIZE);
	if (v->ttl <= hops)
		v->reasons |= WHY(TTL);
	if (header > 20)
		v->reasons |= WHY(IP_OPTIONS);
	if (sum16(ip, header > have ? 20 : header) != 0xffff)
		v->doubtful = true;
	if (be(ip + 6, 2) & 0x3fff)
		v->reasons |= WHY(FRAGMENT);
	if (be(ip + 6, 2) & 0x1fff)
		return;
	if (header > have)
		v->reasons |= WHY(TRUNCATED);
	else
		v->reasons |= inspect_l4(v, ip + header, have - header, direction);
}

static void inspect_flow(struct view *v)
{
	v->flow = warm_flow(v);
	if (v->flow < 0)
		v->reasons |= WHY(MISS);
	v->followed = v->reached && v->keyed;
}

static bool unicast(u64 mac)
{
	return mac && !(mac >> 40 & 1);
}

static struct view inspect_from_pod(const u8 *data, u32 length, u32 device)
{
	struct view v = { .flow = -1 };

	if (be(data + 12, 2) != 0x0800) {
		v.reasons = WHY(NOT_IPV4);
		return v;
	}
	v.doubtful = !unicast(be(data + 6, 6));
	inspect_ip(&v, data + ETHER, length - ETHER, OUT);
	v.reached = device == pod_device && v.local == pod;
	inspect_flow(&v);
	if (be(data, 6) != gateway_mac)
		v.reasons |= WHY(MAC);
	if (device == uplink)
		v.reasons |= WHY(UNKNOWN_POD);
	else if (!v.reached)
		v.reasons |= WHY(SPOOFED);
	return v;
}

/* RFC 6040, figure 4: what is kept, what becomes CE, and the combinations that are odd. */
static const char ecn_in[4][5] = {
	/* inner: Not-ECT, ECT(1), ECT(0), CE */
	"keep" + 0 == NULL ? "" : "kkkk", /* outer Not-ECT */
	"okoo", /* outer ECT(1) */
	"okkk", /* outer ECT(0) */
	"occc", /* outer CE */
};

static u32 inspect_outer(const u8 *data, u32 length, bool *doubtful)
{
	const u8 *ip = data + ETHER, *udp = ip + 20, *vxlan = udp + 8;
	u32 why = 0, have = length - ETHER, fragment;

	if (have < 20)
		return WHY(NOT_TUNNEL) | WHY(TRUNCATED);
	fragment = be(ip + 6, 2);
	if (ip[0] != 0x45 || ip[9] != IPPROTO_UDP || fragment & 0x1fff)
		return WHY(NOT_TUNNEL);
	if (have < 28)
		return WHY(NOT_TUNNEL) | WHY(TRUNCATED);
	if (be(udp + 2, 2) != port)
		return WHY(NOT_TUNNEL);
	if (have < 36)
		return WHY(TRUNCATED);
	if (be(data, 6) != node_mac || be(ip + 16, 4) != node || fragment & 0x2000 ||
	    be(vxlan, 4) != 0x08000000)
		why |= WHY(OUTER);
	if (be(vxlan + 4, 4) != vni << 8)
		why |= WHY(VNI);
	if (be(ip + 2, 2) != have || be(udp + 4, 2) != have - 20)
		why |= WHY(TRUNCATED);
	if (be(ip + 12, 4) != peer)
		why |= WHY(PEER);
	*doubtful = sum16(ip, 20) != 0xffff;
	return why;
}

static bool has_l4_check(const struct view *v, const u8 *ip)
{
	static const u8 place[] = { [IPPROTO_TCP] = 16, [IPPROTO_UDP] = 6, [IPPROTO_ICMP] = 2 };

	return be(ip + (ip[0] & 15) * 4 + place[v->protocol], 2);
}

static struct view inspect_from_wire(const u8 *data, u32 length)
{
	const u8 *ip = data + INNER;
	struct view v = { .flow = -1 };

	if (be(data + 12, 2) != 0x0800) {
		v.reasons = WHY(NOT_IPV4);
		return v;
	}
	v.reasons = inspect_outer(data, length, &v.doubtful);
	if (v.reasons & ~(WHY(PEER) | WHY(TRUNCATED)) || length < OVERHEAD)
		return v;
	v.reached = !v.reasons;
	if (length < INNER) {
		v.reasons |= WHY(TRUNCATED);
		return v;
	}
	if (be(ip - 2, 2) != 0x0800) {
		v.reasons |= WHY(NOT_IPV4);
		return v;
	}
	if (be(ip - ETHER, 6) != tunnel_mac)
		v.reasons |= WHY(MAC);
	if (!unicast(be(ip - 8, 6)) || be(ip - 8, 6) == tunnel_mac)
		v.doubtful = true;
	inspect_ip(&v, ip, length - INNER, IN);
	inspect_flow(&v);
	if (v.keyed && ecn_in[data[ETHER + 1] & 3][ip[1] & 3] == 'o')
		v.reasons |= WHY(ECN);
	if (v.keyed && be(data + 40, 2) && !has_l4_check(&v, ip))
		v.reasons |= WHY(CHECKSUM);
	return v;
}
