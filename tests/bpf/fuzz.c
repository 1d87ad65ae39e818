// SPDX-License-Identifier: Apache-2.0
/*
 * The real programs on made-up packets, millions of them, against a reference.
 *
 *   fuzz name=value ... < kinds       (tests/bpf/fuzz.py sets it up and starts it)
 *
 * The kinds are valid packets, one a line: hook and bytes in hex. Every packet is a kind that
 * was damaged: each prefix, then each header field at its edges, and between those at random. The
 * number of a packet and the seed say all about it, so that any of them can be made again.
 *
 * The reference was written from docs/packet-path.md and the kernel's tunnel device and shares
 * nothing with bpf/. It says from the bytes alone whether a packet may be fast, which counters
 * may move if not, and what it must look like if so. Flows start warm; what happens to them is
 * followed by three states. Broken rules are printed, each with how to see it again.
 */
#define _GNU_SOURCE
#include <bpf/bpf.h>
#include <bpf/libbpf.h>
#include <errno.h>
#include <linux/bpf.h>
#include <netinet/in.h>
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

/* What a test run takes at least (net/bpf/test_run.c), with Ethernet. */
#define MIN_FRAME 14
#define MIN_IP4_FRAME 34
#define MIN_IP6_FRAME 54

#define ETHER 14
#define UDP_OVERHEAD (8 + 8 + ETHER) /* UDP, VXLAN, inner Ethernet */
#define HEADERS 60 /* bytes from the IP header on whose fields are taken to their edges */

#define ETH_IP4 0x0800
#define ETH_IP6 0x86dd

enum hook { FROM_POD, FROM_WIRE, TO_WIRE, TO_POD, HOOKS };

static const char *const hook_names[HOOKS] = { "from_pod", "from_wire", "to_wire", "to_pod" };

/* ---- the node, as the caller has set it up ------------------------------- */

/* clang-format off */
#define FOR_EACH_SETTING(X) \
	/* descriptors of programs and maps */ \
	X(from_pod) X(from_wire) X(to_wire) X(to_pod) \
	X(filter_cache) X(path_index) X(path_free) X(counters) \
	/* interface indices and MACs */ \
	X(uplink) X(pod_device) X(other_device) \
	X(pod_mac) X(gateway_mac) X(node_mac) X(peer_mac) X(tunnel_mac) X(peer_tunnel_mac) \
	/* the tunnel device; tos, ttl and df where they are not inherited */ \
	X(vni) X(port) X(port_min) X(port_max) X(mtu) \
	X(outer6) X(tos) X(ttl) X(df) X(label) X(zero_sum6_tx) X(zero_sum6_rx) \
	X(tos_inherit) X(ttl_inherit) X(df_inherit) \
	/* the warm flows seen from the pod, and the hops of the base path */ \
	X(sport) X(dport) X(echo) X(hops) X(mark_mask) \
	/* which packets */ \
	X(variant) X(seed) X(first) X(packets)
/* clang-format on */

#define X(name) static u64 name;
FOR_EACH_SETTING(X)
#undef X

/* 16 bytes in hex; IPv4 is IPv4-mapped. */
#define FOR_EACH_ADDRESS(X) X(pod4) X(pod6) X(remote4) X(remote6) X(node) X(peer)

struct address {
	u8 byte[16];
};

#define X(name) static struct address name;
FOR_EACH_ADDRESS(X)
#undef X

static const struct {
	const char *name;
	u64 *value;
} settings[] = {
#define X(name) { #name, &name },
	FOR_EACH_SETTING(X)
#undef X
};

static const struct {
	const char *name;
	struct address *value;
} addresses[] = {
#define X(name) { #name, &name },
	FOR_EACH_ADDRESS(X)
#undef X
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

static u32 unhex(const char *hex, u8 *to)
{
	u32 length = 0, byte;

	for (; sscanf(hex + 2 * length, "%2x", &byte) == 1; length++)
		to[length] = byte;
	return length;
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
	for (u32 i = 0; i < ARRAY_SIZE(addresses); i++) {
		if (!strcmp(argument, addresses[i].name)) {
			unhex(value, addresses[i].value->byte);
			return;
		}
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

/* Ones' complement sum, folded, continued from `sum`. */
static u32 sum16(const u8 *data, u32 length, u64 sum)
{
	for (u32 i = 0; i + 1 < length; i += 2)
		sum += be(data + i, 2);
	if (length % 2)
		sum += data[length - 1] << 8;
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

static bool ip4_valid(const u8 *ip, u32 length)
{
	return sum16(ip, length, 0) == 0xffff;
}

static void seal(u8 *ip, u32 length)
{
	put(ip + 10, 0, 2);
	put(ip + 10, ~sum16(ip, length, 0), 2);
}

/* ---- reading IP of both versions ------------------------------------------ */

static bool is6(const u8 *ip)
{
	return ip[0] >> 4 == 6;
}

static u32 ip_length(const u8 *ip)
{
	return is6(ip) ? 40 : (ip[0] & 15) * 4;
}

static u8 ip_protocol(const u8 *ip)
{
	return ip[is6(ip) ? 6 : 9];
}

static u8 ip_tos(const u8 *ip)
{
	return is6(ip) ? be(ip, 2) >> 4 : ip[1];
}

static u8 *ip_ttl(u8 *ip)
{
	return ip + (is6(ip) ? 7 : 8);
}

static void set_tos(u8 *ip, u8 value)
{
	if (is6(ip))
		put(ip, (be(ip, 2) & 0xf00f) | value << 4, 2);
	else
		ip[1] = value;
}

static struct address ip_address(const u8 *ip, u32 which)
{
	struct address a = { .byte = { [10] = 0xff, [11] = 0xff } };

	if (is6(ip))
		memcpy(a.byte, ip + 8 + 16 * which, 16);
	else
		memcpy(a.byte + 12, ip + 12 + 4 * which, 4);
	return a;
}

static bool equal(const struct address *a, const struct address *b)
{
	return !memcmp(a, b, sizeof(*a));
}

static bool mapped(const struct address *a)
{
	return !be(a->byte, 8) && be(a->byte + 8, 4) == 0xffff;
}

/* Sum over a transport header, all behind it, and the pseudo header: 0xffff if it holds. */
static u32 l4_sum(const u8 *ip, const u8 *l4, u32 length)
{
	u32 protocol = ip_protocol(ip);
	u64 sum = 0;

	if (protocol != IPPROTO_ICMP)
		sum = (u64)sum16(ip + (is6(ip) ? 8 : 12), is6(ip) ? 32 : 8, 0) + length + protocol;
	return sum16(l4, length, sum);
}

/* Offset of the checksum in a transport header, 0 if we know of none. */
static u32 l4_check_at(const u8 *ip)
{
	switch (ip_protocol(ip)) {
	case IPPROTO_TCP:
		return 16;
	case IPPROTO_UDP:
		return 6;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return 2;
	}
	return 0;
}

/* ---- the reference ------------------------------------------------------- */

/* The counters under base_path that one packet alone can move. */
/* clang-format off */
#define FOR_EACH_REASON(X) \
	X(not_ip) X(truncated) X(ip_options) X(fragment) X(protocol) X(tcp_flags) X(icmp_type) \
	X(not_tunnel) X(outer) X(vni) X(peer) X(ecn) X(checksum) \
	X(unknown_pod) X(spoofed) X(miss) X(unconfirmed) X(closed) X(order) \
	X(size) X(ttl) X(mac) X(helper) X(header_checksum) X(segments)
/* clang-format on */

enum reason {
#define X(name) WHY_##name,
	FOR_EACH_REASON(X) REASONS
#undef X
};

static const char *const reason_names[REASONS] = {
#define X(name) #name,
	FOR_EACH_REASON(X)
#undef X
};

static u32 reason_counter[REASONS]; /* index into counter_names */

#define WHY(name) (1u << WHY_##name)
#define STATE_REASONS (WHY(order) | WHY(closed) | WHY(unconfirmed) | WHY(miss))

#define FIN 0x01
#define SYN 0x02
#define RST 0x04
#define ACK 0x10

enum { OUT, IN };

/* What the bytes say. */
struct view {
	u32 reasons; /* all that apply, as far as the packet can be read; 0: it may be fast */
	bool doubtful; /* the base path drops it early; fast, it ends with the pod */
	bool ours; /* it comes from where the flow's packets come from */
	bool reached; /* nothing outside of the inner IP packet is wrong */
	bool keyed; /* addresses, protocol and ports can be read */
	int flow; /* a warm one, -1 if none */
	u8 flags; /* of TCP */
	u8 protocol;
	u8 ttl;
	bool ip6;
	struct address local, remote;
	u16 local_port, remote_port;
};

enum { UDP_FLOW, TCP_FLOW, ECHO_FLOW, IP6_FLOWS, FLOWS = 2 * IP6_FLOWS };

static int warm_flow(const struct view *v)
{
	int of_ip6 = v->ip6 ? IP6_FLOWS : 0;

	if (!v->keyed || !equal(&v->local, v->ip6 ? &pod6 : &pod4) ||
	    !equal(&v->remote, v->ip6 ? &remote6 : &remote4))
		return -1;
	if (v->protocol == IPPROTO_ICMP || v->protocol == IPPROTO_ICMPV6)
		return v->local_port == echo && !v->remote_port ? ECHO_FLOW + of_ip6 : -1;
	if (v->local_port != sport || v->remote_port != dport)
		return -1;
	return (v->protocol == IPPROTO_TCP ? TCP_FLOW : UDP_FLOW) + of_ip6;
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
		return WHY(truncated);
	inspect_ports(v, l4, direction);
	v->flags = l4[13];
	if ((v->flags & (FIN | SYN | RST | ACK)) != ACK)
		why |= WHY(tcp_flags);
	if (l4[12] >> 4 < 5 || l4[12] >> 4 > have / 4)
		why |= WHY(truncated);
	return why;
}

static u32 inspect_udp(struct view *v, const u8 *l4, u32 have, int direction)
{
	if (have < 8)
		return WHY(truncated);
	inspect_ports(v, l4, direction);
	return be(l4 + 4, 2) == have ? 0 : WHY(truncated);
}

/* The identifier belongs to the side that asks, the other side's port is 0. */
static u32 inspect_icmp(struct view *v, const u8 *l4, u32 have, int direction)
{
	u8 ask = v->ip6 ? 128 : 8, answer = v->ip6 ? 129 : 0;
	bool local = (l4[0] == ask) == (direction == OUT);

	if (have < 8)
		return WHY(truncated) | WHY(icmp_type);
	if ((l4[0] != ask && l4[0] != answer) || l4[1])
		return WHY(icmp_type);
	v->local_port = local ? be(l4 + 4, 2) : 0;
	v->remote_port = local ? 0 : be(l4 + 4, 2);
	v->keyed = true;
	return 0;
}

static u32 inspect_l4(struct view *v, const u8 *l4, u32 have, int direction)
{
	if (v->protocol == IPPROTO_TCP)
		return inspect_tcp(v, l4, have, direction);
	if (v->protocol == IPPROTO_UDP)
		return inspect_udp(v, l4, have, direction);
	if (v->protocol == (v->ip6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP))
		return inspect_icmp(v, l4, have, direction);
	return WHY(protocol);
}

/* Offset of the transport header, 0 if none follows. */
static u32 inspect_ip4(struct view *v, const u8 *ip, u32 have)
{
	u32 header = ip_length(ip), fragment = be(ip + 6, 2);

	if (header > 20)
		v->reasons |= WHY(ip_options);
	if (header > have)
		v->reasons |= WHY(truncated);
	if (!ip4_valid(ip, header > have ? 20 : header))
		v->reasons |= WHY(header_checksum);
	if (fragment & 0x3fff)
		v->reasons |= WHY(fragment);
	return fragment & 0x1fff ? 0 : header;
}

/* RFC 8200, 4: we look behind two extension headers, or one fewer and a fragment header. */
static u32 inspect_ip6(struct view *v, const u8 *ip, u32 have)
{
	u32 at = 40;

	for (int i = 0; i < 2; i++) {
		if (v->protocol != 0 && v->protocol != 43 && v->protocol != 60)
			break;
		v->reasons |= WHY(ip_options);
		if (have < at + 8)
			return 0;
		v->protocol = ip[at];
		at += (ip[at + 1] + 1) * 8;
	}
	if (v->protocol == 44) {
		v->reasons |= WHY(fragment);
		if (have < at + 8 || be(ip + at + 2, 2) & 0xfff8)
			return 0;
		v->protocol = ip[at];
		at += 8;
	}
	if (!mapped(&v->local) && !mapped(&v->remote))
		return at;
	v->reasons |= WHY(not_ip);
	return 0;
}

/* The IP packet that is the whole rest of the frame. */
static void inspect_ip(struct view *v, u32 ethertype, const u8 *ip, u32 have, int direction)
{
	u32 total, at;

	v->ip6 = ethertype == ETH_IP6;
	if (ethertype != ETH_IP4 && ethertype != ETH_IP6) {
		v->reasons |= WHY(not_ip);
		return;
	}
	if (have < (v->ip6 ? 40 : 20)) {
		v->reasons |= WHY(truncated);
		return;
	}
	if (ip[0] >> 4 != (v->ip6 ? 6 : 4) || ip_length(ip) < 20) {
		v->reasons |= WHY(not_ip);
		return;
	}
	total = v->ip6 ? be(ip + 4, 2) + 40 : be(ip + 2, 2);
	v->ttl = ip[v->ip6 ? 7 : 8];
	v->protocol = ip_protocol(ip);
	v->local = ip_address(ip, direction == OUT ? 0 : 1);
	v->remote = ip_address(ip, direction == OUT ? 1 : 0);
	if (total != have)
		v->reasons |= WHY(truncated);
	if (total > mtu)
		v->reasons |= WHY(size);
	if (v->ttl <= hops)
		v->reasons |= WHY(ttl);
	if (total > 0xffff)
		return;
	at = v->ip6 ? inspect_ip6(v, ip, have) : inspect_ip4(v, ip, have);
	if (at)
		v->reasons |= inspect_l4(v, ip + at, at > have ? 0 : have - at, direction);
}

static void inspect_flow(struct view *v)
{
	v->flow = warm_flow(v);
	if (v->flow < 0)
		v->reasons |= WHY(miss);
}

static bool unicast(u64 mac)
{
	return mac && !(mac >> 40 & 1);
}

static bool has_l4_check(const u8 *ip)
{
	return be(ip + ip_length(ip) + l4_check_at(ip), 2);
}

static struct view inspect_from_pod(const u8 *data, u32 length, u32 device)
{
	struct view v = { .flow = -1, .ours = device == pod_device };
	const u8 *ip = data + ETHER;

	v.doubtful = !unicast(be(data + 6, 6));
	inspect_ip(&v, be(data + 12, 2), ip, length - ETHER, OUT);
	inspect_flow(&v);
	v.reached = true;
	if (be(data, 6) != gateway_mac)
		v.reasons |= WHY(mac);
	if (device == uplink)
		v.reasons |= WHY(unknown_pod);
	else if (!v.ours || !equal(&v.local, v.ip6 ? &pod6 : &pod4))
		v.reasons |= WHY(spoofed);
	/* RFC 6935: over IPv6 there is a checksum, and ours comes from the inner one. */
	if (v.keyed && outer6 && !zero_sum6_tx && !has_l4_check(ip))
		v.reasons |= WHY(checksum);
	return v;
}

/* RFC 6040, figure 4, [outer][inner]: k(ept), c(ongestion set), o(dd: logged, re-marked, dropped).
 */
static const char ecn_in[4][5] = {
	/* inner: Not-ECT, ECT(1), ECT(0), CE */
	"kkkk", /* outer: Not-ECT */
	"okoo", /* ECT(1) */
	"okkk", /* ECT(0) */
	"occc", /* CE */
};

/* Where the inner frame begins, if what is outside is UDP over IP without anything between. */
static u32 outer_length(const u8 *data, u32 length)
{
	const u8 *ip = data + ETHER;
	u32 ethertype = be(data + 12, 2), header = ethertype == ETH_IP6 ? 40 : 20;

	if ((ethertype != ETH_IP4 && ethertype != ETH_IP6) || length < ETHER + header ||
	    ip[0] != (ethertype == ETH_IP6 ? 0x60 | (ip[0] & 15) : 0x45) ||
	    ip_protocol(ip) != IPPROTO_UDP)
		return 0;
	if (ethertype == ETH_IP4 && be(ip + 6, 2) & 0x1fff)
		return 0;
	return ETHER + header + 8 + 8;
}

static u32 inspect_tunnel(struct view *v, const u8 *data, u32 length, u32 inner)
{
	const u8 *ip = data + ETHER, *vxlan = data + inner - 8, *udp = vxlan - 8;
	struct address source = ip_address(ip, 0), target = ip_address(ip, 1);
	u32 total = is6(ip) ? be(ip + 4, 2) + 40 : be(ip + 2, 2), why = 0;

	v->ours = equal(&source, &peer) && is6(ip) == outer6;
	if (!v->ours)
		why |= WHY(peer);
	if (be(data, 6) != node_mac || !equal(&target, &node) || is6(ip) != outer6 ||
	    (!is6(ip) && be(ip + 6, 2) & 0x2000) || be(vxlan, 4) != 0x08000000)
		why |= WHY(outer);
	if (be(vxlan + 4, 4) != vni << 8)
		why |= WHY(vni);
	if (total != length - ETHER || be(udp + 4, 2) != total - ip_length(ip))
		why |= WHY(truncated);
	if (is6(ip) && !be(udp + 6, 2) && !zero_sum6_rx)
		why |= WHY(checksum);
	return why;
}

/* Nobody's address on a wire: the kernel drops packets from one. */
static bool outer_mapped(const u8 *ip)
{
	struct address source = ip_address(ip, 0), target = ip_address(ip, 1);

	return mapped(&source) || mapped(&target);
}

static struct view inspect_from_wire(const u8 *data, u32 length)
{
	struct view v = { .flow = -1 };
	u32 inner = outer_length(data, length);
	const u8 *ip = data + inner + ETHER;

	if (!inner) {
		v.reasons = WHY(not_ip) | WHY(not_tunnel);
		return v;
	}
	if (length < inner)
		v.reasons = WHY(truncated) | WHY(not_tunnel);
	if (is6(data + ETHER) && outer_mapped(data + ETHER))
		v.reasons |= WHY(outer);
	if (!is6(data + ETHER) && !ip4_valid(data + ETHER, 20))
		v.reasons |= WHY(header_checksum);
	if (v.reasons)
		return v;
	if (be(data + inner - 14, 2) != port) {
		v.reasons = WHY(not_tunnel);
		return v;
	}
	v.reasons = inspect_tunnel(&v, data, length, inner);
	v.reached = !(v.reasons & ~(WHY(peer) | WHY(checksum)));
	if (length < inner + ETHER) {
		v.reasons |= WHY(truncated);
		return v;
	}
	if (be(ip - ETHER, 6) != tunnel_mac)
		v.reasons |= WHY(mac);
	if (!unicast(be(ip - 8, 6)) || be(ip - 8, 6) == tunnel_mac)
		v.doubtful = true;
	inspect_ip(&v, be(ip - 2, 2), ip, length - inner - ETHER, IN);
	inspect_flow(&v);
	if (v.keyed && ecn_in[ip_tos(data + ETHER) & 3][ip_tos(ip) & 3] == 'o')
		v.reasons |= WHY(ecn);
	if (v.keyed && be(data + inner - 10, 2) && !has_l4_check(ip))
		v.reasons |= WHY(checksum);
	return v;
}

/* ---- what the base path makes of a packet -------------------------------- */

static u32 overhead(void)
{
	return (outer6 ? 40 : 20) + UDP_OVERHEAD;
}

/* The inner IP header after routing: net/ipv4/ip_forward.c, once for each hop. */
static void lose_hops(u8 *ip)
{
	*ip_ttl(ip) -= hops;
	if (!is6(ip))
		seal(ip, 20);
}

static void outer_ip4(u8 *ip, u8 dscp, u32 total, const u8 *inner)
{
	ip[0] = 0x45;
	ip[1] = dscp;
	put(ip + 2, total, 2);
	put(ip + 6, df << 14, 2);
	if (df_inherit) /* IPv6 is never fragmented on its way: vxlan_xmit_one() */
		put(ip + 6, is6(inner) ? 0x4000 : be(inner + 6, 2) & 0x4000, 2);
	ip[9] = IPPROTO_UDP;
	memcpy(ip + 12, node.byte + 12, 4);
	memcpy(ip + 16, peer.byte + 12, 4);
}

static void outer_ip6(u8 *ip, u8 dscp, u32 total)
{
	put(ip, 6u << 28 | dscp << 20 | label, 4);
	put(ip + 4, total - 40, 2);
	ip[6] = IPPROTO_UDP;
	memcpy(ip + 8, node.byte, 16);
	memcpy(ip + 24, peer.byte, 16);
}

/* The packet of a pod on the wire; source port and ID are left 0. Length of the result. */
static u32 encapsulate(const u8 *data, u32 length, u8 *to)
{
	u32 total = length - ETHER + overhead();
	u8 *ip = to + ETHER, *udp = ip + (outer6 ? 40 : 20), *inner = ip + overhead();
	u8 dscp, ecn;

	memset(to, 0, ETHER + overhead());
	memcpy(inner, data + ETHER, length - ETHER);
	lose_hops(inner);
	ecn = ip_tos(inner) & 3;
	dscp = ((tos_inherit ? ip_tos(inner) : tos) & 0xfc) | (ecn == 3 ? 2 : ecn);
	put(to, peer_mac, 6);
	put(to + 6, node_mac, 6);
	put(to + 12, outer6 ? ETH_IP6 : ETH_IP4, 2);
	if (outer6)
		outer_ip6(ip, dscp, total);
	else
		outer_ip4(ip, dscp, total, inner);
	*ip_ttl(ip) = ttl_inherit ? *ip_ttl(inner) : ttl;
	put(udp + 2, port, 2);
	put(udp + 4, total - (outer6 ? 40 : 20), 2);
	put(udp + 8, 0x08000000, 4);
	put(udp + 12, vni << 8, 4);
	put(inner - ETHER, peer_tunnel_mac, 6);
	put(inner - 8, tunnel_mac, 6);
	memcpy(inner - 2, data + 12, 2);
	return length + overhead();
}

/* The checksums of the outer header, once all else stands. */
static void seal_outer(u8 *data, u32 length)
{
	u8 *ip = data + ETHER, *udp = ip + 40;
	u32 sum;

	if (!outer6) {
		seal(ip, 20);
		return;
	}
	if (zero_sum6_tx)
		return;
	put(udp + 6, 0, 2);
	sum = (u16)~l4_sum(ip, udp, length - ETHER - 40);
	put(udp + 6, sum ? sum : 0xffff, 2);
}

/* What of a tunnel packet reaches the pod. Length of the result. */
static u32 deliver(const u8 *data, u32 length, u8 *to)
{
	u8 *ip = to + ETHER;

	memcpy(to, data + overhead(), length - overhead());
	put(to, pod_mac, 6);
	put(to + 6, gateway_mac, 6);
	if (ecn_in[ip_tos(data + ETHER) & 3][ip_tos(ip) & 3] == 'c')
		set_tos(ip, ip_tos(ip) | 3);
	lose_hops(ip);
	return length - overhead();
}

/* ---- programs and maps --------------------------------------------------- */

static u64 count_now[MAX_COUNTERS], count_before[MAX_COUNTERS];
static u32 cpu, cpus;

static void pin_to_one_cpu(void)
{
	cpu_set_t set;

	cpus = libbpf_num_possible_cpus();
	cpu = sched_getcpu();
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		die("cannot stay on one CPU: %s", strerror(errno));
}

static void read_counters(void)
{
	static u64 values[MAX_COUNTERS * 1024];
	u32 zero = 0;

	if (cpus > 1024 || bpf_map_lookup_elem(counters, &zero, values))
		die("cannot read the counters: %s", strerror(errno));
	memcpy(count_before, count_now, sizeof(count_now));
	memcpy(count_now, values + cpu * counter_count, counter_count * sizeof(u64));
}

struct run {
	int verdict;
	u32 length;
	u32 mark;
	u32 priority;
	u32 moved; /* index of the counter */
	u32 moves; /* how many counters moved, each step counted */
	u8 data[MAX_PACKET + 256];
};

struct input {
	u32 length;
	struct __sk_buff context;
	u8 data[MAX_PACKET];
};

static void count_moves(struct run *run)
{
	run->moves = 0;
	read_counters();
	for (u32 i = 0; i < counter_count; i++) {
		if (count_now[i] == count_before[i])
			continue;
		run->moved = i;
		run->moves += count_now[i] - count_before[i];
	}
}

/* False if the kernel does not make such a packet for a test. */
static bool try(enum hook hook, const struct input *in, struct run *run)
{
	const u64 programs[HOOKS] = { from_pod, from_wire, to_wire, to_pod };
	struct __sk_buff after;
	LIBBPF_OPTS(bpf_test_run_opts, options, .data_in = in->data, .data_size_in = in->length,
		    .data_out = run->data, .data_size_out = sizeof(run->data),
		    .ctx_in = &in->context, .ctx_size_in = sizeof(in->context), .ctx_out = &after,
		    .ctx_size_out = sizeof(after), .repeat = 1);

	if (in->length < MIN_FRAME ||
	    (in->length < MIN_IP4_FRAME && be(in->data + 12, 2) == ETH_IP4) ||
	    (in->length < MIN_IP6_FRAME && be(in->data + 12, 2) == ETH_IP6))
		return false;
	if (bpf_prog_test_run_opts(programs[hook], &options))
		die("test run of %s: %s", hook_names[hook], strerror(errno));
	run->verdict = options.retval;
	run->length = options.data_size_out;
	run->mark = after.mark;
	run->priority = after.priority;
	count_moves(run);
	return true;
}

/* A map as it was when all flows were warm. */
struct snapshot {
	int fd;
	u32 key_size, value_size, entries;
	u8 keys[MAX_ENTRIES][MAX_VALUE], values[MAX_ENTRIES][MAX_VALUE];
};

static struct snapshot flows, paths;

static void take_snapshot(struct snapshot *s, int fd)
{
	struct bpf_map_info info = {};
	u32 size = sizeof(info);
	void *key = NULL;

	if (bpf_obj_get_info_by_fd(fd, &info, &size))
		die("no information on a map: %s", strerror(errno));
	s->fd = fd;
	s->key_size = info.key_size;
	s->value_size = info.value_size;
	if (info.key_size > MAX_VALUE || info.value_size > MAX_VALUE)
		die("map %s has entries larger than %d bytes", info.name, MAX_VALUE);
	while (!bpf_map_get_next_key(fd, key, s->keys[s->entries])) {
		key = s->keys[s->entries];
		if (bpf_map_lookup_elem(fd, key, s->values[s->entries]))
			die("cannot read map %s: %s", info.name, strerror(errno));
		if (++s->entries == MAX_ENTRIES)
			die("map %s has too many entries", info.name);
	}
}

static bool in_snapshot(const struct snapshot *s, const void *key)
{
	for (u32 i = 0; i < s->entries; i++)
		if (!memcmp(s->keys[i], key, s->key_size))
			return true;
	return false;
}

/* Removes what was added since; `retire` is told the value of each. */
static void remove_others(const struct snapshot *s, void (*retire)(const void *value))
{
	u8 keys[2 * MAX_ENTRIES][MAX_VALUE], value[MAX_VALUE];
	void *key = NULL;
	u32 count = 0;

	while (count < ARRAY_SIZE(keys) && !bpf_map_get_next_key(s->fd, key, keys[count]))
		key = keys[count++];
	for (u32 i = 0; i < count; i++) {
		if (in_snapshot(s, keys[i]))
			continue;
		if (retire && !bpf_map_lookup_elem(s->fd, keys[i], value))
			retire(value);
		bpf_map_delete_elem(s->fd, keys[i]);
	}
}

static void free_path(const void *index)
{
	if (bpf_map_update_elem(path_free, NULL, index, BPF_ANY))
		die("cannot free a path: %s", strerror(errno));
}

static void restore(bool learned)
{
	if (learned) {
		remove_others(&flows, NULL);
		remove_others(&paths, free_path);
	}
	for (u32 i = 0; i < flows.entries; i++)
		if (bpf_map_update_elem(flows.fd, flows.keys[i], flows.values[i], BPF_ANY))
			die("cannot restore a flow: %s", strerror(errno));
}

/* ---- the packets --------------------------------------------------------- */

struct kind {
	enum hook hook;
	u32 length;
	u8 data[MAX_PACKET];
};

static struct kind kinds[MAX_KINDS];
static u32 kind_count;

static void read_kinds(void)
{
	char hook[16], hex[2 * MAX_PACKET + 1];
	struct kind *kind;

	while (scanf("%15s %4096s", hook, hex) == 2) {
		if (kind_count == MAX_KINDS)
			die("more than %d kinds", MAX_KINDS);
		kind = &kinds[kind_count++];
		kind->hook = strcmp(hook, hook_names[FROM_POD]) ? FROM_WIRE : FROM_POD;
		kind->length = unhex(hex, kind->data);
	}
	if (!kind_count)
		die("no kinds of packets");
}

/* Where the IP packet of the flow begins. */
static u32 ip_at(enum hook hook)
{
	return hook == FROM_POD || hook == TO_POD ? ETHER : ETHER + overhead();
}

static void fix_l4(u8 *ip, u32 have)
{
	u32 header = ip_length(ip), at = l4_check_at(ip);
	u8 *l4 = ip + header;

	if (header < 20 || have < header + 20 || !at)
		return;
	put(l4 + at, 0, 2);
	put(l4 + at, ~l4_sum(ip, l4, have - header), 2);
}

static void fix_checksums(struct input *in, enum hook hook)
{
	u8 *ip = in->data + ip_at(hook);

	if (in->length < ip_at(hook) + 20)
		return;
	fix_l4(ip, in->length - ip_at(hook));
	if (!is6(ip) && ip_length(ip) >= 20 && in->length >= ip_at(hook) + ip_length(ip))
		seal(ip, ip_length(ip));
	if (ip_at(hook) != ETHER && !outer6)
		seal(in->data + ETHER, 20);
}

static void fix_length(u8 *ip, u32 length)
{
	u8 *udp = ip + ip_length(ip);

	put(ip + (is6(ip) ? 4 : 2), is6(ip) ? length - 40 : length, 2);
	if (ip_protocol(ip) == IPPROTO_UDP && ip_length(ip) + 8 <= length)
		put(udp + 4, length - ip_length(ip), 2);
}

static void fix_lengths(struct input *in, enum hook hook)
{
	if (in->length < ip_at(hook) + 60)
		return;
	fix_length(in->data + ip_at(hook), in->length - ip_at(hook));
	if (ip_at(hook) != ETHER)
		fix_length(in->data + ETHER, in->length - ETHER);
}

static void load(struct input *in, const struct kind *kind)
{
	memset(in, 0, sizeof(*in));
	memcpy(in->data, kind->data, kind->length);
	in->length = kind->length;
}

static u32 header_bytes(const struct kind *kind)
{
	u32 all = ip_at(kind->hook) + HEADERS;

	return all < kind->length ? all : kind->length;
}

#define TAILS 20 /* bytes behind the packet */
#define BYTE_EDGES 14
#define WORD_EDGES 10

/* Shorter by one byte at a time, then longer. */
static bool nth_length(struct input *in, const struct kind *kind, u64 *n)
{
	if (*n >= kind->length + TAILS) {
		*n -= kind->length + TAILS;
		return false;
	}
	load(in, kind);
	in->length = *n < kind->length ? *n : *n + 1;
	return true;
}

static bool nth_byte(struct input *in, const struct kind *kind, u64 *n)
{
	u32 all = header_bytes(kind) * BYTE_EDGES * 2, edge = *n / 2 % BYTE_EDGES;
	u8 *byte;

	if (*n >= all) {
		*n -= all;
		return false;
	}
	load(in, kind);
	byte = &in->data[*n / 2 / BYTE_EDGES];
	if (edge < 8)
		*byte ^= 1 << edge;
	else
		*byte = (const u8[]){ 0, 0xff, 0x7f, 0x80, *byte + 1, *byte - 1 }[edge - 8];
	if (*n & 1)
		fix_checksums(in, kind->hook);
	return true;
}

static bool nth_word(struct input *in, const struct kind *kind, u64 *n)
{
	u32 all = header_bytes(kind) / 2 * WORD_EDGES * 2, edge = *n / 2 % WORD_EDGES;
	u8 *word;
	u16 old;

	if (*n >= all) {
		*n -= all;
		return false;
	}
	load(in, kind);
	word = &in->data[*n / 2 / WORD_EDGES * 2];
	old = be(word, 2);
	put(word,
	    (const u16[]){ 0, 0xffff, 0x7fff, 0x8000, old + 1, old - 1, ~old, old << 8 | old >> 8,
			   0x1fff, 0x00ff }[edge],
	    2);
	if (*n & 1)
		fix_checksums(in, kind->hook);
	return true;
}

/* The packet of this place in the lists, unless they are shorter. */
static bool nth_listed(struct input *in, u64 n, const struct kind **kind)
{
	bool (*const lists[])(struct input *, const struct kind *, u64 *) = { nth_length, nth_byte,
									      nth_word };

	for (u32 list = 0; list < ARRAY_SIZE(lists); list++) {
		for (u32 i = 0; i < kind_count; i++) {
			*kind = &kinds[i];
			if (lists[list](in, *kind, &n))
				return true;
		}
	}
	return false;
}

/* ---- damage -------------------------------------------------------------- */

static u8 *random_header_byte(struct input *in, enum hook hook)
{
	u32 all = ip_at(hook) + HEADERS;

	return &in->data[below(in->length < all ? in->length : all)];
}

static u8 *random_ip(struct input *in, enum hook hook)
{
	return in->data + (one_in(2) ? ETHER : ip_at(hook));
}

static void insert_options(struct input *in, enum hook hook)
{
	u8 *l4 = in->data + ip_at(hook) + 20;
	u32 size = 4 * (1 + below(10)), rest = in->data + in->length - l4;

	if (in->length + size > MAX_PACKET || in->length < ip_at(hook) + 20 || is6(l4 - 20))
		return;
	memmove(l4 + size, l4, rest);
	for (u32 i = 0; i < size; i++)
		l4[i] = one_in(3) ? roll() : 1;
	l4[-20] += size / 4;
	in->length += size;
}

static void resize(struct input *in, u32 length)
{
	for (u32 i = in->length; i < length; i++)
		in->data[i] = roll();
	in->length = length;
}

static void another_address(u8 *ip)
{
	const struct address *known[] = { &pod4, &pod6, &remote4, &remote6, &node, &peer };
	const struct address *chosen = known[below(ARRAY_SIZE(known))];
	u32 which = below(2);

	if (is6(ip))
		memcpy(ip + 8 + 16 * which, chosen->byte, 16);
	else
		memcpy(ip + 12 + 4 * which, chosen->byte + 12, 4);
	if (one_in(2))
		(ip + (is6(ip) ? 8 : 12))[below(is6(ip) ? 32 : 8)] = roll();
}

static void another_mac(u8 *to)
{
	const u64 known[] = { pod_mac,	       gateway_mac, node_mac,	    peer_mac, tunnel_mac,
			      peer_tunnel_mac, 0,	    0xffffffffffff, roll() };

	put(to, known[below(ARRAY_SIZE(known))], 6);
}

static void swap_ports(u8 *l4)
{
	u64 source = be(l4, 2);

	memmove(l4, l4 + 2, 2);
	put(l4 + 2, source, 2);
}

static void damage(struct input *in, enum hook hook)
{
	static const u16 fragments[] = { 0x2000, 0x4000, 0x8000, 0x0001, 0x1fff, 0x2001, 0xffff };
	static const u8 protocols[] = { 1, 6, 17, 132, 47, 58, 0, 43, 44, 60, 51, 255 };
	u8 *inner = in->data + ip_at(hook), *l4 = inner + (is6(inner) ? 40 : 20);
	const struct kind *other;
	u32 cut;

	if (in->length < ip_at(hook) + 20)
		return;
	switch (below(19)) {
	case 0:
		*random_header_byte(in, hook) ^= 1 << below(8);
		break;
	case 1:
		*random_header_byte(in, hook) = roll();
		break;
	case 2:
		put(in->data + 2 * below(in->length / 2), roll(), 2);
		break;
	case 3:
		in->length = below(in->length + 1);
		break;
	case 4:
		resize(in, in->length + 1 + below(64));
		break;
	case 5:
		resize(in, ip_at(hook) + 28 + below(1500));
		fix_lengths(in, hook);
		break;
	case 6:
		resize(in, ip_at(hook) + mtu - 2 + below(5));
		fix_lengths(in, hook);
		break;
	case 7:
		set_tos(random_ip(in, hook), roll());
		break;
	case 8:
		*ip_ttl(random_ip(in, hook)) = one_in(2) ? below(4) : roll();
		break;
	case 9:
		l4[13] = roll();
		break;
	case 10:
		insert_options(in, hook);
		break;
	case 11:
		put(random_ip(in, hook) + 6, fragments[below(ARRAY_SIZE(fragments))], 2);
		break;
	case 12:
		another_address(random_ip(in, hook));
		break;
	case 13:
		inner[is6(inner) ? 6 : 9] = protocols[below(ARRAY_SIZE(protocols))];
		break;
	case 14:
		swap_ports(l4);
		break;
	case 15:
		another_mac(in->data + (one_in(2) ? 0 : ip_at(hook) - ETHER) + 6 * below(2));
		break;
	case 16:
		if (ip_at(hook) != ETHER)
			put(inner - UDP_OVERHEAD + 6, one_in(2) ? roll() : 0, 2);
		put(l4 + l4_check_at(inner), one_in(2) ? roll() : 0, 2);
		break;
	case 17:
		put(l4 + 4, roll(), 4);
		break;
	case 18: /* the end of another kind */
		other = &kinds[below(kind_count)];
		cut = below(in->length < other->length ? in->length : other->length);
		memcpy(in->data + cut, other->data + cut, other->length - cut);
		in->length = other->length;
		break;
	}
	if (in->length > MAX_PACKET - 128)
		in->length = MAX_PACKET - 128;
}

static void make_random(struct input *in, const struct kind **kind)
{
	*kind = &kinds[below(kind_count)];
	load(in, *kind);
	for (u64 i = below(4); i; i--)
		damage(in, (*kind)->hook);
	if (one_in(2))
		fix_lengths(in, (*kind)->hook);
	if (!one_in(8))
		fix_checksums(in, (*kind)->hook);
	if (one_in(64)) {
		in->context.gso_size = below(1500);
		in->context.gso_segs = 1 + below(4);
	}
	in->context.priority = below(8);
	in->context.mark = one_in(4) ? roll() & ~mark_mask : 0;
}

static void make(struct input *in, u64 number, const struct kind **kind)
{
	dice = seed ^ number * 0xd1342543de82ef95;
	if (number % 2 || !nth_listed(in, number / 2, kind))
		make_random(in, kind);
	in->context.ifindex = (*kind)->hook == FROM_WIRE ? uplink
			      : !one_in(16)		 ? pod_device
			      : one_in(2)		 ? other_device
							 : uplink;
}

/* ---- rules --------------------------------------------------------------- */

enum state {
	WARM, /* the next packet that may be fast is fast */
	UNKNOWN, /* either is right */
	HELD, /* earlier packets are in the base path, or it was closed: nothing is fast */
};

static enum state states[FLOWS][2];
static bool closed[FLOWS]; /* by FIN or RST, or maybe by something like it */
static bool learned, touched; /* since the flows were warm */
/* Outer source port: the tunnel device keeps one to a flow, and to a flow label of IPv6. */
static u32 ports_seen[FLOWS], labels_seen[FLOWS];

static struct {
	u64 packets, refused, hits, learned, violations;
} result;

static void dump(const char *what, const u8 *data, u32 length)
{
	fprintf(stderr, "  %s (%u) ", what, length);
	for (u32 i = 0; i < length; i++)
		fprintf(stderr, "%02x", data[i]);
	fprintf(stderr, "\n");
}

static u64 number; /* of the packet at hand */

static void violation(enum hook hook, const struct input *in, const struct run *run,
		      const char *rule)
{
	if (++result.violations > MAX_SHOWN)
		return;
	fprintf(stderr, "violation: %s: %s (verdict %d, %u move(s), last %s)\n", hook_names[hook],
		rule, run->verdict, run->moves, run->moves ? counter_names[run->moved] : "none");
	dump("in ", in->data, in->length);
	dump("out", run->data, run->length);
	fprintf(stderr,
		"  device %u, mark %#x, GSO size %u; again: "
		"python -m tests.bpf.fuzz --variant %llu --seed %llu --only %llu\n",
		in->context.ifindex, in->context.mark, in->context.gso_size,
		(unsigned long long)variant, (unsigned long long)seed, (unsigned long long)number);
}

/* When one packet is made again: it and those before it that it may depend on. */
static void trace(enum hook hook, const struct input *in, const struct run *run)
{
	if (packets != 1)
		return;
	fprintf(stderr, "%llu: %s: verdict %d, %s, device %u, mark %#x -> %#x\n",
		(unsigned long long)number, hook_names[hook], run->verdict,
		run->moves ? counter_names[run->moved] : "no counter", in->context.ifindex,
		in->context.mark, run->mark);
	dump("in ", in->data, in->length);
}

static bool starts(const char *name, const char *prefix)
{
	return !strncmp(name, prefix, strlen(prefix));
}

static bool same(const struct input *in, const struct run *run)
{
	return run->length == in->length && !memcmp(run->data, in->data, in->length) &&
	       run->priority == in->context.priority;
}

static bool foreign_bits_kept(const struct input *in, const struct run *run)
{
	return !((in->context.mark ^ run->mark) & ~mark_mask);
}

/* Whatever the packet is. The rule it breaks, or NULL. */
static const char *rules_of_first_hook(enum hook hook, const struct input *in,
				       const struct run *run)
{
	const char *moved = counter_names[run->moved];

	if (run->moves != 1)
		return "exactly one counter moves";
	if (run->verdict == 7)
		return starts(moved, "hits.") && strstr(moved, hook_names[hook])
			       ? NULL
			       : "redirected: a hit is counted";
	if (run->verdict != -1)
		return "never a drop";
	if (!starts(moved, "base_path."))
		return "not redirected: a reason is counted";
	if (!same(in, run))
		return "changed only if redirected";
	return foreign_bits_kept(in, run) ? NULL : "foreign bits of the mark are kept";
}

static bool reason_applies(u32 reasons, u32 moved)
{
	for (u32 i = 0; i < REASONS; i++)
		if (reasons >> i & 1 && reason_counter[i] == moved)
			return true;
	return false;
}

static const char *rules_of_eligibility(const struct view *v, enum state state,
					const struct run *run)
{
	u32 reasons = v->reasons | (state == WARM ? 0 : STATE_REASONS);

	if (run->verdict == 7) {
		if (v->reasons)
			return "redirected only if eligible";
		return state == HELD ? "fast while the flow is held back" : NULL;
	}
	if (!v->reasons && !v->doubtful && state == WARM)
		return "an eligible packet of a warm flow is fast";
	return v->doubtful || reason_applies(reasons, run->moved) ? NULL
								  : "the reason counted applies";
}

/* An IPv4 header whose checksum was wrong stays wrong, by the same difference. */
static void keep_checksum_error(const u8 *before, const u8 *after, u8 *expected)
{
	if (is6(before) || ip4_valid(before, 20))
		return;
	if (sum16(before, 20, 0) % 0xffff == sum16(after, 20, 0) % 0xffff)
		memcpy(expected + 10, after + 10, 2);
}

/* An outer checksum over wrong ones is wrong: nobody but the pod looks at those inside. */
static bool sums_hold(const u8 *ip, u32 length)
{
	return (is6(ip) || ip4_valid(ip, 20)) &&
	       l4_sum(ip, ip + ip_length(ip), length - ip_length(ip)) == 0xffff;
}

/* Takes over what may differ: ID and source port. */
static const char *rules_of_outer(const struct view *v, const struct input *in,
				  const struct run *run, u8 *expected)
{
	u32 at = ETHER + (outer6 ? 40 : 20), source = be(run->data + at, 2), inner_label;

	if (!outer6)
		memcpy(expected + 18, run->data + 18, 2);
	memcpy(expected + at, run->data + at, 2);
	seal_outer(expected, run->length);
	if (outer6 && !sums_hold(in->data + ETHER, in->length - ETHER))
		memcpy(expected + at + 6, run->data + at + 6, 2);
	if (source < port_min || source >= port_max)
		return "the source port is in the tunnel's range";
	inner_label = v->ip6 ? be(in->data + ETHER, 4) & 0xfffff : 0;
	if (ports_seen[v->flow] && labels_seen[v->flow] == inner_label &&
	    ports_seen[v->flow] != source)
		return "a flow keeps its source port";
	ports_seen[v->flow] = source;
	labels_seen[v->flow] = inner_label;
	return NULL;
}

static const char *rules_of_output(enum hook hook, const struct view *v, const struct input *in,
				   const struct run *run)
{
	u32 length, at = hook == FROM_POD ? ETHER + overhead() : ETHER;
	u8 expected[MAX_PACKET + 256];
	const char *broken = NULL;

	if (hook == FROM_POD)
		length = encapsulate(in->data, in->length, expected);
	else
		length = deliver(in->data, in->length, expected);
	keep_checksum_error(in->data + ip_at(hook), run->data + at, expected + at);
	if (hook == FROM_POD && length == run->length)
		broken = rules_of_outer(v, in, run, expected);
	if (broken)
		return broken;
	if (length != run->length || memcmp(expected, run->data, length)) {
		if (result.violations < MAX_SHOWN)
			dump("exp", expected, length);
		return "a fast packet is what the base path would have made of it";
	}
	if (hook == FROM_POD ? run->mark != in->context.mark : run->mark & mark_mask)
		return "a fast packet carries no mark of ours";
	return NULL;
}

/* What a packet on the base path does to its flow. */
static void follow(const struct view *v, int direction)
{
	bool ends = v->protocol == IPPROTO_TCP &&
		    (v->flags & (FIN | RST) || (v->flags & (SYN | ACK)) == SYN);
	int flow = warm_flow(v);

	if (flow < 0 || !v->ours)
		return;
	touched = true;
	for (int i = OUT; i <= IN; i++) {
		if (i != direction && !ends)
			continue;
		if (v->reached)
			states[flow][i] = HELD;
		else if (states[flow][i] == WARM)
			states[flow][i] = UNKNOWN;
	}
	closed[flow] |= ends;
}

static struct view first_hook(enum hook hook, const struct input *in, struct run *run)
{
	int direction = hook == FROM_POD ? OUT : IN;
	struct view v = hook == FROM_POD
				? inspect_from_pod(in->data, in->length, in->context.ifindex)
				: inspect_from_wire(in->data, in->length);
	enum state state = v.flow < 0 ? UNKNOWN : states[v.flow][direction];
	const char *broken;

	trace(hook, in, run);
	if (in->context.gso_size) /* of no type: the kernel makes no room for those */
		v.reasons |= WHY(helper) | WHY(size) | WHY(checksum) | WHY(segments);
	broken = rules_of_first_hook(hook, in, run);
	if (!broken)
		broken = rules_of_eligibility(&v, state, run);
	if (!broken && run->verdict == 7)
		broken = rules_of_output(hook, &v, in, run);
	if (broken)
		violation(hook, in, run, broken);
	if (run->verdict == 7)
		result.hits++;
	else
		follow(&v, direction);
	return v;
}

/* ---- the second hook: learning ------------------------------------------- */

enum lesson { MUST_NOT, MAY, MUST };

static bool same_flow(const struct view *a, const struct view *b)
{
	return a->protocol == b->protocol && equal(&a->local, &b->local) &&
	       equal(&a->remote, &b->remote) && a->local_port == b->local_port &&
	       a->remote_port == b->remote_port;
}

/* Is the frame our tunnel's, leaving this node? */
static bool leaves_by_tunnel(const u8 *data, u32 length)
{
	u32 inner = outer_length(data, length);
	const u8 *ip = data + ETHER, *vxlan = data + inner - 8;
	struct address source;

	if (!inner || length < inner || is6(ip) != outer6)
		return false;
	source = ip_address(ip, 0);
	return equal(&source, &node) && (is6(ip) || !(be(ip + 6, 2) & 0x2000)) &&
	       be(data + inner - 14, 2) == port && be(vxlan, 4) == 0x08000000 &&
	       be(vxlan + 4, 4) == vni << 8;
}

/* Is this the packet that went in, come out of the base path in a way worth learning? */
static enum lesson lesson(enum hook hook, const struct view *before, const struct input *in,
			  bool damaged)
{
	const u32 shape =
		WHY(not_ip) | WHY(ip_options) | WHY(fragment) | WHY(protocol) | WHY(icmp_type);
	const u8 *ip = in->data + ip_at(hook);
	struct view v = {};

	if (in->length < ip_at(hook) + 20)
		return MUST_NOT;
	inspect_ip(&v, be(ip - 2, 2), ip, in->length - ip_at(hook), hook == TO_WIRE ? OUT : IN);
	if (v.reasons & shape || !v.keyed || !same_flow(&v, before) || v.ttl > before->ttl)
		return MUST_NOT;
	if (hook == TO_WIRE && !leaves_by_tunnel(in->data, in->length))
		return MUST_NOT;
	if (hook == TO_POD && (in->context.ifindex != pod_device || be(in->data, 6) != pod_mac ||
			       !equal(&v.local, v.ip6 ? &pod6 : &pod4)))
		return MUST_NOT;
	if (damaged || v.reasons & WHY(truncated) || (before->flow >= 0 && closed[before->flow]))
		return MAY;
	return MUST;
}

static const char *rules_of_second_hook(const struct input *in, const struct run *run)
{
	bool marked = in->context.mark & mark_mask;
	const char *moved = counter_names[run->moved];

	if (run->verdict != -1)
		return "a second hook lets everything pass";
	if (!same(in, run))
		return "a second hook changes nothing";
	if (!foreign_bits_kept(in, run))
		return "foreign bits of the mark are kept";
	if (run->moves != marked)
		return "one counter moves for a packet with our mark, none for others";
	if (marked && strcmp(moved, "learned") && !starts(moved, "not_learned."))
		return "learned or not learned";
	return NULL;
}

static const char *rules_of_learning(enum lesson lesson, const struct input *in,
				     const struct run *run)
{
	bool did = run->moves && !strcmp(counter_names[run->moved], "learned");

	result.learned += did;
	if (did && lesson == MUST_NOT)
		return "learned only from the packet that went in";
	if (!did && lesson == MUST && in->context.mark & mark_mask)
		return "learned if it is the packet that went in";
	return did && run->mark & mark_mask ? "the mark is taken off" : NULL;
}

/* The packet left the first hook for the base path: let it come out of it. */
static void second_hook(const struct view *before, const struct input *was, const struct run *ran,
			enum hook first)
{
	enum hook hook = first == FROM_POD ? TO_WIRE : TO_POD;
	bool damaged = one_in(2), forged = one_in(8);
	static struct input in;
	static struct run run;
	const char *broken;

	if (was->length < ip_at(first) + 40 || was->length > MAX_PACKET - 256 ||
	    (first == FROM_WIRE && is6(was->data + ETHER) != outer6))
		return;
	in = (struct input){ .context = { .mark = ran->mark } };
	if (hook == TO_WIRE)
		seal_outer(in.data, in.length = encapsulate(was->data, was->length, in.data));
	else
		in.length = deliver(was->data, was->length, in.data);
	in.context.ifindex = hook == TO_WIRE ? uplink : one_in(8) ? other_device : pod_device;
	if (damaged)
		damage(&in, hook);
	if (forged)
		in.context.mark ^= roll() & mark_mask;
	if (!try(hook, &in, &run))
		return;
	result.packets++;
	touched = learned = true;
	trace(hook, &in, &run);
	broken = rules_of_second_hook(&in, &run);
	if (!broken && !forged)
		broken = rules_of_learning(lesson(hook, before, &in, damaged), &in, &run);
	if (broken)
		violation(hook, &in, &run, broken);
}

/* ---- all of it ----------------------------------------------------------- */

static void warm_again(void)
{
	if (!touched)
		return;
	restore(learned);
	memset(states, 0, sizeof(states));
	memset(closed, 0, sizeof(closed));
	touched = learned = false;
}

static void one_packet(void)
{
	static struct input in;
	static struct run run;
	const struct kind *kind;
	struct view v;

	if (number % BLOCK == 0 || number / BLOCK % 2 == 0 || learned)
		warm_again();
	make(&in, number, &kind);
	if (!try(kind->hook, &in, &run)) {
		result.refused++;
		return;
	}
	result.packets++;
	v = first_hook(kind->hook, &in, &run);
	if (run.verdict == -1 && one_in(4))
		second_hook(&v, &in, &run, kind->hook);
}

/* Both hooks of a packet that may be fast, as long as it is not. */
static void warm_up(const struct kind *kind)
{
	static struct input in, out;
	static struct run run;

	load(&in, kind);
	in.context.ifindex = kind->hook == FROM_POD ? pod_device : uplink;
	if (!try(kind->hook, &in, &run) || run.verdict != -1)
		return;
	memset(&out, 0, sizeof(out));
	out.context.mark = run.mark;
	out.context.ifindex = kind->hook == FROM_POD ? uplink : pod_device;
	if (kind->hook == FROM_POD)
		seal_outer(out.data, out.length = encapsulate(in.data, in.length, out.data));
	else
		out.length = deliver(in.data, in.length, out.data);
	try(kind->hook == FROM_POD ? TO_WIRE : TO_POD, &out, &run);
}

/* From nothing: exchanges packets by the base path until no flow can become any warmer. */
static void warm_all(void)
{
	flows.fd = filter_cache;
	paths.fd = path_index;
	restore(true);
	for (u32 i = 0; i < 4 * kind_count; i++) {
		const struct kind *kind = &kinds[i % kind_count];
		struct view v = kind->hook == FROM_POD
					? inspect_from_pod(kind->data, kind->length, pod_device)
					: inspect_from_wire(kind->data, kind->length);

		if (!v.reasons)
			warm_up(kind);
	}
	take_snapshot(&flows, filter_cache);
	take_snapshot(&paths, path_index);
	if (flows.entries != FLOWS)
		die("%u flows are warm, not %d", flows.entries, FLOWS);
}

static void find_reasons(void)
{
	char name[64];

	for (u32 i = 0; i < REASONS; i++) {
		snprintf(name, sizeof(name), "base_path.%s", reason_names[i]);
		for (u32 j = 0; j < counter_count && !reason_counter[i]; j++)
			if (!strcmp(counter_names[j], name))
				reason_counter[i] = j;
		if (!reason_counter[i])
			die("there is no counter %s", name);
	}
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		set(argv[i]);
	find_reasons();
	read_kinds();
	pin_to_one_cpu();
	read_counters();
	warm_all();
	/* From the start of a block, where all is warm. */
	for (number = first / BLOCK * BLOCK; number < first + packets; number++)
		one_packet();
	printf("{\"packets\": %llu, \"violations\": %llu, \"hits\": %llu, "
	       "\"learned\": %llu, \"refused\": %llu}\n",
	       (unsigned long long)result.packets, (unsigned long long)result.violations,
	       (unsigned long long)result.hits, (unsigned long long)result.learned,
	       (unsigned long long)result.refused);
	return result.violations != 0;
}
