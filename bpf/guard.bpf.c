/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The guard, on the uplink before everything else: a tunnel packet for this node
 * whose outer source is none of our tunnel peers is counted, and dropped if so
 * configured. The tunnel device itself takes such packets from anybody.
 *
 * It never drops what it is not sure about, and nothing at all once the agent has
 * stopped refreshing the deadline: a node that joins meanwhile must not be shut out.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "lib/address.h"
#include "lib/headers.h"
#include "lib/outer.h"

/* sys/socket.h is not for BPF programs. */
#define AF_INET 2
#define AF_INET6 10

/* Written by the agent alone, field by field through a mapping. */
struct guard_config {
	__u64 deadline; /* CLOCK_MONOTONIC ns; from then on everything passes */
	__be16 port; /* tunnel destination port */
	__u8 enforce; /* drop strangers' packets; 0: count them */
	__u8 pad[5];
};

_Static_assert(sizeof(struct guard_config) == 16, "explicit padding only");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct guard_config);
} guard_config SEC(".maps");

/* Every packet moves one of these, and dropped if that is what became of it. */
struct guard_counters {
	__u64 other; /* not to the tunnel port */
	__u64 fragment; /* a later fragment of UDP: without the first it comes to nothing */
	__u64 elsewhere; /* to the tunnel port of another host; we only forward it */
	__u64 passed; /* from a tunnel peer */
	__u64 stranger; /* from somebody else */
	__u64 obscure; /* from somebody else, in headers nested deeper than is read */
	__u64 deadline; /* from somebody else, while no agent keeps the peers true */
	__u64 dropped;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct guard_counters);
} guard_counters SEC(".maps");

/* The nodes of the tunnel's forwarding table, and those the configuration adds. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096); /* set before load */
	__type(key, struct address);
	__type(value, __u32);
} guard_peers SEC(".maps");

/* Packets by stranger. LRU: whoever invents addresses only pushes out others of that kind. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct address);
	__type(value, __u64);
} guard_strangers SEC(".maps");

static __always_inline int pass(__u64 *counter)
{
	(*counter)++;
	return XDP_PASS;
}

static __always_inline void stranger_note(const struct address *address)
{
	__u64 *packets = bpf_map_lookup_elem(&guard_strangers, address), one = 1;

	if (packets)
		__sync_fetch_and_add(packets, 1);
	else
		bpf_map_update_elem(&guard_strangers, address, &one, BPF_NOEXIST);
}

/* Groups and broadcasts reach the tunnel device, too, and no route tells them apart. */
static __always_inline int destination_shared(const struct outer *o)
{
	__u32 ip = bpf_ntohl(o->destination.word[3]);

	if (o->family == bpf_htons(ETH_P_IPV6))
		return *(const __u8 *)&o->destination == 0xff;
	return ip >> 28 == 14 || ip == 0xffffffff || !ip;
}

/*
 * Does the kernel keep this packet, as far as routing goes? Asked of routing itself,
 * so that every address this host answers to counts, from the moment it does. A host
 * that does not forward keeps or drops whatever reaches it.
 */
static __always_inline int destination_ours(struct xdp_md *ctx, const struct outer *o)
{
	struct bpf_fib_lookup route = {
		.ifindex = ctx->ingress_ifindex,
		.l4_protocol = IPPROTO_UDP,
	};

	if (destination_shared(o))
		return 1;
	if (o->family == bpf_htons(ETH_P_IP)) {
		route.family = AF_INET;
		route.ipv4_src = o->source.word[3];
		route.ipv4_dst = o->destination.word[3];
	} else {
		route.family = AF_INET6;
		__builtin_memcpy(route.ipv6_src, &o->source, sizeof(route.ipv6_src));
		__builtin_memcpy(route.ipv6_dst, &o->destination, sizeof(route.ipv6_dst));
	}
	switch (bpf_fib_lookup(ctx, &route, sizeof(route), 0)) {
	case BPF_FIB_LKUP_RET_NOT_FWDED:
	case BPF_FIB_LKUP_RET_FWD_DISABLED:
		return 1;
	}
	return 0;
}

SEC("xdp.frags")
int guard(struct xdp_md *ctx)
{
	struct guard_counters *count;
	struct guard_config *cfg;
	struct outer o = {};
	enum outer_kind kind;
	__u32 zero = 0;

	count = bpf_map_lookup_elem(&guard_counters, &zero);
	cfg = bpf_map_lookup_elem(&guard_config, &zero);
	if (!count || !cfg)
		return XDP_PASS;
	kind = outer_read(ctx, &o);
	if (kind == OUTER_OTHER || (kind == OUTER_UDP && o.port != cfg->port))
		return pass(&count->other);
	if (kind == OUTER_LATER_FRAGMENT)
		return pass(&count->fragment);
	if (bpf_map_lookup_elem(&guard_peers, &o.source))
		return pass(&count->passed);
	if (bpf_ktime_get_coarse_ns() >= cfg->deadline)
		return pass(&count->deadline);
	if (o.family && !destination_ours(ctx, &o))
		return pass(&count->elsewhere);

	if (o.family)
		stranger_note(&o.source);
	if (kind == OUTER_OBSCURE)
		count->obscure++;
	else
		count->stranger++;
	if (!cfg->enforce)
		return XDP_PASS;
	count->dropped++;
	return XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
