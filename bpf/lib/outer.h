/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The outer addresses and UDP port of a frame, through whatever the kernel reads
 * through on its way to them: VLAN tags, IPv4 options, IPv6 extension headers. For
 * XDP programs; nothing here decides.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include "address.h"
#include "headers.h"

/* More than anybody sends; the kernel itself strips any number of priority tags. */
#define OUTER_TAGS_MAX 4
#define OUTER_EXTENSIONS_MAX 8

#define IP6_OFFSET 0xfff8

struct vlan_tag {
	__be16 tci;
	__be16 proto; /* of what follows */
};

/* The beginning of every IPv6 extension header (RFC 8200, 4; RFC 4302, 2). */
struct ip6_extension {
	__u8 next;
	__u8 length; /* units and offset differ by kind */
	__be16 offset; /* of a fragment: upper 13 bits */
};

enum outer_kind {
	OUTER_OTHER, /* not UDP, or what the kernel itself throws away */
	OUTER_UDP,
	OUTER_LATER_FRAGMENT, /* no port in it; useless without the first one */
	OUTER_OBSCURE, /* headers nested deeper than is read */
};

struct outer {
	struct address source;
	struct address destination;
	__be16 family; /* ETH_P_IP or ETH_P_IPV6; 0: not reached */
	__be16 port; /* UDP destination */
};

/* The helper reaches every buffer of a frame, but costs as much as the rest of the way. */
static __always_inline int outer_load(struct xdp_md *ctx, __u32 at, void *to, __u32 size)
{
	void *from = (void *)(long)ctx->data + at;

	if (from + size > (void *)(long)ctx->data_end)
		return bpf_xdp_load_bytes(ctx, at, to, size);
	__builtin_memcpy(to, from, size);
	return 0;
}

static __always_inline int vlan_proto(__be16 proto)
{
	return proto == bpf_htons(ETH_P_8021Q) || proto == bpf_htons(ETH_P_8021AD);
}

static __always_inline enum outer_kind outer_udp(struct xdp_md *ctx, __u32 at, struct outer *o)
{
	struct udp udp;

	if (outer_load(ctx, at, &udp, sizeof(udp)))
		return OUTER_OTHER;
	o->port = udp.dport;
	return OUTER_UDP;
}

/*
 * The first fragment holds the whole UDP header: offsets count eight bytes, and the
 * kernel refuses fragments without any.
 */
static __always_inline enum outer_kind outer_ip4(struct xdp_md *ctx, __u32 at, struct outer *o)
{
	struct ip4 ip;

	if (outer_load(ctx, at, &ip, sizeof(ip)))
		return OUTER_OTHER;
	if (ip.version_ihl >> 4 != 4 || (ip.version_ihl & 15) < 5 || ip.protocol != IPPROTO_UDP)
		return OUTER_OTHER;
	o->family = bpf_htons(ETH_P_IP);
	address_from_ip4(&o->source, ip.saddr);
	address_from_ip4(&o->destination, ip.daddr);
	if (ip.frag_off & bpf_htons(IP4_OFFSET))
		return OUTER_LATER_FRAGMENT;
	return outer_udp(ctx, at + (ip.version_ihl & 15) * 4, o);
}

/* Length of an extension header, 0 if it is none that the kernel reads through. */
static __always_inline __u32 extension_length(__u8 kind, const struct ip6_extension *extension)
{
	switch (kind) {
	case IP6_HOPOPTS:
	case IP6_ROUTING:
	case IP6_DSTOPTS:
		return (extension->length + 1) * 8;
	case IP6_FRAGMENT:
		return 8;
	case IPPROTO_AH:
		return (extension->length + 2) * 4;
	}
	return 0;
}

static __always_inline enum outer_kind outer_ip6(struct xdp_md *ctx, __u32 at, struct outer *o)
{
	struct ip6_extension extension;
	struct ip6 ip;
	__u32 length;
	__u8 next;

	if (outer_load(ctx, at, &ip, sizeof(ip)) || bpf_ntohl(ip.flow) >> 28 != IP6_VERSION)
		return OUTER_OTHER;
	if (address_is_ip4(&ip.saddr)) /* nobody's, and it would look like an IPv4 peer's */
		return OUTER_OTHER;
	o->family = bpf_htons(ETH_P_IPV6);
	o->source = ip.saddr;
	o->destination = ip.daddr;
	next = ip.nexthdr;
	at += sizeof(ip);
	for (int i = 0; i < OUTER_EXTENSIONS_MAX; i++) {
		if (next == IPPROTO_UDP)
			return outer_udp(ctx, at, o);
		if (outer_load(ctx, at, &extension, sizeof(extension)))
			return OUTER_OTHER;
		length = extension_length(next, &extension);
		if (!length)
			return OUTER_OTHER;
		if (next == IP6_FRAGMENT && extension.offset & bpf_htons(IP6_OFFSET))
			return OUTER_LATER_FRAGMENT;
		next = extension.next;
		at += length;
	}
	return OUTER_OBSCURE;
}

static __always_inline enum outer_kind outer_read(struct xdp_md *ctx, struct outer *o)
{
	__u32 at = sizeof(struct eth);
	struct vlan_tag tag;
	struct eth eth;
	__be16 proto;

	if (outer_load(ctx, 0, &eth, sizeof(eth)))
		return OUTER_OTHER;
	proto = eth.proto;
	for (int i = 0; i < OUTER_TAGS_MAX && vlan_proto(proto); i++) {
		if (outer_load(ctx, at, &tag, sizeof(tag)))
			return OUTER_OTHER;
		proto = tag.proto;
		at += sizeof(tag);
	}
	if (vlan_proto(proto))
		return OUTER_OBSCURE;
	if (proto == bpf_htons(ETH_P_IP))
		return outer_ip4(ctx, at, o);
	if (proto == bpf_htons(ETH_P_IPV6))
		return outer_ip6(ctx, at, o);
	return OUTER_OTHER;
}
