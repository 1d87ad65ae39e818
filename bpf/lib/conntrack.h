/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the base path's own connection tracking says of a flow, asked by kfunc.
 * 6.1's kfunc knows TCP and UDP in zone 0. Where it finds nothing the base path
 * does not track the flow, and having seen both directions must do.
 */
#pragma once

#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_helpers.h>
#include "flow.h"

/* Relocated to the running kernel: only the members named here. */
struct ip_ct_tcp {
	__u8 state;
} __attribute__((preserve_access_index));

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
} __attribute__((preserve_access_index));

struct nf_conn {
	unsigned long status;
	union nf_conntrack_proto proto;
} __attribute__((preserve_access_index));

struct bpf_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

_Static_assert(sizeof(struct bpf_ct_opts) == 12, "the kfunc takes 12 or 16");

extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
					 __u32 tuple_size, struct bpf_ct_opts *opts,
					 __u32 opts_size) __ksym __weak;
extern void bpf_ct_release(struct nf_conn *ct) __ksym __weak;

/* include/uapi/linux/netfilter/nf_conntrack_common.h and nf_conntrack_tcp.h */
#define CT_SEEN_REPLY (1 << 1)
#define CT_SRC_NAT (1 << 4)
#define CT_DST_NAT (1 << 5)
#define CT_DYING (1 << 9)
#define CT_TCP_SYN_RECV 2
#define CT_TCP_ESTABLISHED 3

enum tracking {
	UNTRACKED,
	NOT_ESTABLISHED,
	ANSWERED, /* SYN and SYN-ACK, the last step of the handshake is to come */
	ESTABLISHED,
};

static __always_inline enum tracking conntrack_tcp(__u8 state)
{
	if (state == CT_TCP_ESTABLISHED)
		return ESTABLISHED;
	return state == CT_TCP_SYN_RECV ? ANSWERED : NOT_ESTABLISHED;
}

/*
 * key: as the first hook of the journey saw the packet; of a translated flow the
 * other view is not found. Not inlined: the stack of the callers has no room for it.
 */
static __noinline enum tracking conntrack_state(struct __sk_buff *skb, const struct flow_key *key,
						enum journey journey, int translated)
{
	int out = journey == FROM_POD;
	struct bpf_ct_opts opts = { .netns_id = -1, .l4proto = key->protocol };
	enum tracking state = ESTABLISHED;
	struct bpf_sock_tuple tuple = {};
	unsigned long status;
	struct nf_conn *ct;
	__u32 size;

	if ((key->protocol != IPPROTO_TCP && key->protocol != IPPROTO_UDP) || !bpf_skb_ct_lookup ||
	    !bpf_ct_release)
		return UNTRACKED;
	if (address_is_ip4(&key->local)) {
		tuple.ipv4.saddr = (out ? key->local : key->remote).word[3];
		tuple.ipv4.daddr = (out ? key->remote : key->local).word[3];
		tuple.ipv4.sport = out ? key->local_port : key->remote_port;
		tuple.ipv4.dport = out ? key->remote_port : key->local_port;
		size = sizeof(tuple.ipv4);
	} else {
		const struct address *from = out ? &key->local : &key->remote;
		const struct address *to = out ? &key->remote : &key->local;

		__builtin_memcpy(tuple.ipv6.saddr, from, sizeof(*from));
		__builtin_memcpy(tuple.ipv6.daddr, to, sizeof(*to));
		tuple.ipv6.sport = out ? key->local_port : key->remote_port;
		tuple.ipv6.dport = out ? key->remote_port : key->local_port;
		size = sizeof(tuple.ipv6);
	}
	ct = bpf_skb_ct_lookup(skb, &tuple, size, &opts, sizeof(opts));
	if (!ct)
		return UNTRACKED;
	status = ct->status;
	/* A translation of the source, or one that the hooks do not see, is not understood. */
	if (!(status & CT_SEEN_REPLY) || status & (CT_DYING | CT_SRC_NAT) ||
	    !(status & CT_DST_NAT) != !translated)
		state = NOT_ESTABLISHED;
	else if (key->protocol == IPPROTO_TCP)
		/* "ct state established" still matches in CLOSE_WAIT: ask TCP itself. */
		state = conntrack_tcp(ct->proto.tcp.state);
	bpf_ct_release(ct);
	return state;
}
