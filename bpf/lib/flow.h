/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Filter cache: one entry per flow of a local pod, seen from the pod, with one
 * half for each direction. Least recently used entries make room by themselves.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "address.h"

enum journey {
	FROM_POD = 1,
	FROM_WIRE = 2,
};

struct flow_key {
	struct address local; /* the pod */
	struct address remote;
	/*
	 * ICMP echo: the identifier stands on the side of the one who asks, 0 on
	 * the other. Leave to ask is not leave to be asked.
	 */
	__be16 local_port;
	__be16 remote_port;
	__u8 protocol;
	__u8 pad[3];
};

struct half {
	__u64 pod; /* index | generation << 32: one load, one comparison */
	__u64 path; /* the same; 0 on the way in */
	__u64 learned; /* coarse CLOCK_MONOTONIC, ns */
	__u64 queued; /* way in: when the pod's queue was last used, ns; 0: direct */
	__u32 generation;
	__u32 sent; /* number of the last packet given to the base path ... */
	__u32 left; /* ... and of the last one that came out of it */
	__u8 seen; /* delivered by the base path in this direction */
	__u8 ready; /* ... and in the other one too */
	__u8 hops; /* TTL that the base path takes */
	__u8 pad;
	__u8 to_mac[6]; /* as the first hook saw it; others take the base path */
	__u8 from_mac[6]; /* way in: source MAC to write */
	__u32 hash; /* way out: the kernel's flow hash, once it was needed */
	struct address peer; /* way in: outer source */
	/*
	 * A translated flow (a service): what the remote end is on the other side of
	 * the translation. Written to the packet on a hit, and the key of the entry
	 * that holds the other direction. nat_port is 0 where nothing is translated.
	 */
	struct address nat;
	__be16 nat_port;
	__u8 pad2[6];
};

struct flow {
	struct half out; /* from_pod */
	struct half in; /* from_wire */
	__u8 closed; /* FIN was seen: not fast again before another SYN */
	__u8 reset; /* RST was seen: not fast again unless conntrack disbelieves it */
	__u8 pad[6];
};

_Static_assert(sizeof(struct flow_key) == 40, "hash key: explicit padding only");
_Static_assert(sizeof(struct half) == 104, "explicit padding only");
_Static_assert(sizeof(struct flow) == 216, "explicit padding only");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536); /* limits.flows */
	__type(key, struct flow_key);
	__type(value, struct flow);
} filter_cache SEC(".maps");

static __always_inline int flow_key_equal(const struct flow_key *a, const struct flow_key *b)
{
	return address_equal(&a->local, &b->local) && address_equal(&a->remote, &b->remote) &&
	       a->local_port == b->local_port && a->remote_port == b->remote_port &&
	       a->protocol == b->protocol;
}

static __always_inline int flow_key_same_local(const struct flow_key *a, const struct flow_key *b)
{
	return address_equal(&a->local, &b->local) && a->local_port == b->local_port &&
	       a->protocol == b->protocol;
}

static __always_inline struct flow *flow_get(const struct flow_key *key)
{
	return bpf_map_lookup_elem(&filter_cache, key);
}

/* The key of the entry with the other direction: another one where the flow is translated. */
static __always_inline void flow_key_other(struct flow_key *key, const struct half *half)
{
	if (!half->nat_port)
		return;
	key->remote = half->nat;
	key->remote_port = half->nat_port;
}

static __always_inline struct half *flow_half(struct flow *flow, enum journey journey)
{
	return journey == FROM_POD ? &flow->out : &flow->in;
}

static __always_inline __u64 reference(__u32 index, __u32 generation)
{
	return index | (__u64)generation << 32;
}

/* Packets of this flow that we cannot follow are in the base path: wait for one we can. */
static __always_inline void half_unsettle(struct half *half)
{
	half->sent = half->left - 1;
}
