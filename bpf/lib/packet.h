/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Describe: from bytes to one small struct. Nothing here decides or changes.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include "counters.h"
#include "flow.h"
#include "headers.h"
#include "mac.h"
#include "sum.h"

struct cursor {
	void *pos;
	void *end;
};

#define ECN_MASK 3
#define ECN_CE 3

struct packet {
	struct flow_key key;
	struct address peer; /* from_wire: outer source */
	__u16 length; /* of the IP packet */
	__u16 header; /* IP and transport header, bytes */
	__u16 l4_check; /* transport checksum as it stands */
	__u8 tcp_flags;
	__u8 has_key; /* the flow is known even if the packet is not eligible */
	__u8 ttl; /* or hop limit */
	__u8 tos; /* or traffic class */
	__u8 is_ip6;
	__u8 pad;
	union {
		struct ip4 ip4;
		struct ip6 ip6;
	};
	__u8 to_mac[6];
};

/*
 * Some drivers leave only the Ethernet header in the linear part. Headers are
 * pulled in only then: pulling unshares the packet, which costs a copy.
 */
static __always_inline int cursor_start(struct __sk_buff *skb, struct cursor *c, __u32 want)
{
	c->pos = (void *)(long)skb->data;
	c->end = (void *)(long)skb->data_end;
	if (c->pos + want <= c->end || c->end - c->pos >= skb->len)
		return 0;
	if (bpf_skb_pull_data(skb, want < skb->len ? want : skb->len))
		return -1;
	c->pos = (void *)(long)skb->data;
	c->end = (void *)(long)skb->data_end;
	return 0;
}

#define cursor_take(c, type)                                                            \
	({                                                                              \
		type *__hdr = (c)->pos;                                                 \
		(void *)(__hdr + 1) <= (c)->end ? ((c)->pos = __hdr + 1, __hdr) : NULL; \
	})

static __always_inline void packet_ports(struct packet *p, enum journey journey, __be16 source,
					 __be16 destination)
{
	p->key.local_port = journey == FROM_POD ? source : destination;
	p->key.remote_port = journey == FROM_POD ? destination : source;
	p->has_key = 1;
}

static __always_inline __u64 *packet_tcp(struct cursor *c, struct packet *p, enum journey journey,
					 struct counters *count)
{
	struct tcp *tcp = cursor_take(c, struct tcp);

	if (!tcp)
		return &count->base_path.truncated;
	packet_ports(p, journey, tcp->sport, tcp->dport);
	p->tcp_flags = tcp->flags;
	p->header += (tcp->doff >> 4) * 4;
	p->l4_check = tcp->check;
	if (tcp->doff < 5 << 4)
		return &count->base_path.truncated;
	return NULL;
}

static __always_inline __u64 *packet_udp(struct cursor *c, struct packet *p, enum journey journey,
					 struct counters *count)
{
	struct udp *udp = cursor_take(c, struct udp);

	if (!udp)
		return &count->base_path.truncated;
	packet_ports(p, journey, udp->sport, udp->dport);
	p->l4_check = udp->check;
	if (bpf_ntohs(udp->len) != p->length - p->header)
		return &count->base_path.truncated;
	p->header += sizeof(*udp);
	return NULL;
}

static __always_inline __u64 *packet_icmp(struct cursor *c, struct packet *p, enum journey journey,
					  struct counters *count)
{
	struct icmp_echo *icmp = cursor_take(c, struct icmp_echo);
	__u8 ask = p->is_ip6 ? ICMP6_ECHO : ICMP_ECHO;
	__u8 answer = p->is_ip6 ? ICMP6_ECHOREPLY : ICMP_ECHOREPLY;
	int asks;

	if (!icmp)
		return &count->base_path.truncated;
	if ((icmp->type != ask && icmp->type != answer) || icmp->code)
		return &count->base_path.icmp_type;
	asks = (icmp->type == ask) == (journey == FROM_POD);
	p->key.local_port = asks ? icmp->id : 0;
	p->key.remote_port = asks ? 0 : icmp->id;
	p->has_key = 1;
	p->header += sizeof(*icmp);
	p->l4_check = icmp->check;
	return NULL;
}

/* Reads the IPv4 header; *odd says why the packet is not eligible though its flow can be told. */
static __always_inline __u64 *packet_ip4(struct cursor *c, struct packet *p, enum journey journey,
					 struct counters *count, __u64 **odd)
{
	struct ip4 *ip = cursor_take(c, struct ip4);
	__u32 options;

	if (!ip)
		return &count->base_path.truncated;
	p->ip4 = *ip;
	p->length = bpf_ntohs(ip->tot_len);
	p->header = IP4_HDR_LEN;
	p->ttl = p->ip4.ttl;
	p->tos = p->ip4.tos;
	if (p->ip4.version_ihl >> 4 != 4 || (p->ip4.version_ihl & 15) < 5)
		return &count->base_path.not_ip;
	address_from_ip4(journey == FROM_POD ? &p->key.local : &p->key.remote, p->ip4.saddr);
	address_from_ip4(journey == FROM_POD ? &p->key.remote : &p->key.local, p->ip4.daddr);
	p->key.protocol = p->ip4.protocol;

	if (p->ip4.frag_off & bpf_htons(IP4_MF | IP4_OFFSET)) {
		*odd = &count->base_path.fragment;
		if (p->ip4.frag_off & bpf_htons(IP4_OFFSET))
			return *odd; /* no transport header here, whatever the bytes say */
	}
	/* IHL is 5 or more; the mask tells the verifier that this is at most 60. */
	options = (p->ip4.version_ihl - 5) * 4 & 60;
	if (options) {
		*odd = &count->base_path.ip_options;
		c->pos += options;
		p->header += options;
	}
	return NULL;
}

/* Looks for the transport header behind extension headers, as packet_ip4() does behind options. */
static __always_inline __u64 *packet_extensions(struct cursor *c, struct packet *p,
						struct counters *count, __u64 **odd)
{
	struct extension6 *extension;
	struct fragment6 *fragment;
	__u32 skip;

#pragma unroll
	for (int i = 0; i < EXTENSIONS6; i++) {
		if (p->key.protocol != IP6_HOPOPTS && p->key.protocol != IP6_ROUTING &&
		    p->key.protocol != IP6_DSTOPTS)
			break;
		*odd = &count->base_path.ip_options;
		extension = cursor_take(c, struct extension6);
		if (!extension)
			return *odd;
		p->key.protocol = extension->nexthdr;
		skip = extension->length * 8;
		c->pos += skip;
		p->header += sizeof(*extension) + skip;
	}
	if (p->key.protocol != IP6_FRAGMENT)
		return NULL;
	*odd = &count->base_path.fragment;
	fragment = cursor_take(c, struct fragment6);
	if (!fragment || fragment->offset & bpf_htons(FRAGMENT6_OFFSET))
		return *odd; /* no transport header here, whatever the bytes say */
	p->key.protocol = fragment->nexthdr;
	p->header += sizeof(*fragment);
	return NULL;
}

static __always_inline __u64 *packet_ip6(struct cursor *c, struct packet *p, enum journey journey,
					 struct counters *count, __u64 **odd)
{
	struct ip6 *ip = cursor_take(c, struct ip6);
	__u64 *reason;

	if (!ip)
		return &count->base_path.truncated;
	p->ip6 = *ip;
	p->is_ip6 = 1;
	if (bpf_ntohl(ip->flow) >> 28 != IP6_VERSION)
		return &count->base_path.not_ip;
	if (bpf_ntohs(ip->payload_len) > 0xffff - IP6_HDR_LEN)
		return &count->base_path.size;
	p->length = bpf_ntohs(ip->payload_len) + IP6_HDR_LEN;
	p->header = IP6_HDR_LEN;
	p->ttl = ip->hop_limit;
	p->tos = bpf_ntohl(ip->flow) >> 20;
	p->key.local = journey == FROM_POD ? ip->saddr : ip->daddr;
	p->key.remote = journey == FROM_POD ? ip->daddr : ip->saddr;
	p->key.protocol = ip->nexthdr;
	reason = packet_extensions(c, p, count, odd);
	if (reason)
		return reason;
	/* The base path answers for an IPv4-mapped address; as a key it would be another flow. */
	if (address_is_ip4(&p->key.local) || address_is_ip4(&p->key.remote))
		return &count->base_path.not_ip;
	return NULL;
}

/*
 * Ethernet and IP at the cursor, seen from the pod's side. Returns the counter
 * of the reason why the packet is not eligible, NULL if it is. p must be zeroed.
 */
static __always_inline __u64 *packet_describe(struct cursor *c, struct packet *p,
					      enum journey journey, struct counters *count)
{
	struct eth *eth = cursor_take(c, struct eth);
	__u64 *odd = NULL, *reason;

	if (!eth)
		return &count->base_path.truncated;
	mac_copy(p->to_mac, eth->dst);
	if (eth->proto == bpf_htons(ETH_P_IP))
		reason = packet_ip4(c, p, journey, count, &odd);
	else if (eth->proto == bpf_htons(ETH_P_IPV6))
		reason = packet_ip6(c, p, journey, count, &odd);
	else
		return &count->base_path.not_ip;
	if (reason)
		return reason;
	if (p->key.protocol == IPPROTO_TCP)
		reason = packet_tcp(c, p, journey, count);
	else if (p->key.protocol == IPPROTO_UDP)
		reason = packet_udp(c, p, journey, count);
	else if (p->key.protocol == (p->is_ip6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP))
		reason = packet_icmp(c, p, journey, count);
	else
		return odd ? odd : &count->base_path.protocol;
	if (odd)
		return odd;
	/* The next router drops it; sent on it would be kept wrong. */
	if (!p->is_ip6 && fold(sum16(&p->ip4, sizeof(p->ip4))) != 0xffff)
		return &count->base_path.header_checksum;
	if (!reason && p->header > p->length)
		return &count->base_path.truncated;
	return reason;
}

/* SYN alone begins a connection; with ACK it is the first packet the other way. */
static __always_inline int packet_opens(const struct packet *p)
{
	return p->key.protocol == IPPROTO_TCP && (p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

static __always_inline int packet_accepts(const struct packet *p)
{
	return p->key.protocol == IPPROTO_TCP &&
	       (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_FIN | TCP_RST)) == (TCP_SYN | TCP_ACK);
}

/* Size on the path of the largest packet this one stands for (GSO: one segment). */
static __always_inline __u32 packet_size(const struct __sk_buff *skb, const struct packet *p)
{
	return skb->gso_size ? skb->gso_size + p->header : p->length;
}

/* TTL less the hops of the base path; the checksum as repeated ip_decrease_ttl() leaves it. */
static __always_inline void ip4_lose_hops(struct ip4 *ip, __u8 hops)
{
	__u32 sum = ip->check + bpf_htons((__u16)hops << 8);

	ip->check = sum >= 0xffff ? sum - 0xffff : sum;
	ip->ttl -= hops;
}

/* rt_tos2priority(), which forwarding applies: net/ipv4/route.c, ip_tos2prio. */
static __always_inline __u32 ip4_priority(__u8 tos)
{
	return 0x4620 >> ((tos >> 3 & 3) * 4) & 0xf;
}
