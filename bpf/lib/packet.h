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
	struct ip4 ip;
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
	int asks;

	if (!icmp)
		return &count->base_path.truncated;
	if ((icmp->type != ICMP_ECHO && icmp->type != ICMP_ECHOREPLY) || icmp->code)
		return &count->base_path.icmp_type;
	asks = (icmp->type == ICMP_ECHO) == (journey == FROM_POD);
	p->key.local_port = asks ? icmp->id : 0;
	p->key.remote_port = asks ? 0 : icmp->id;
	p->has_key = 1;
	p->header += sizeof(*icmp);
	p->l4_check = icmp->check;
	return NULL;
}

/*
 * Ethernet and IPv4 at the cursor, seen from the pod's side. Returns the counter
 * of the reason why the packet is not eligible, NULL if it is. p must be zeroed.
 */
static __always_inline __u64 *packet_describe(struct cursor *c, struct packet *p,
					      enum journey journey, struct counters *count)
{
	struct eth *eth = cursor_take(c, struct eth);
	__u64 *odd = NULL, *reason;
	struct ip4 *ip;
	__u32 options;

	if (!eth)
		return &count->base_path.truncated;
	mac_copy(p->to_mac, eth->dst);
	if (eth->proto != bpf_htons(ETH_P_IP))
		return &count->base_path.not_ipv4;
	ip = cursor_take(c, struct ip4);
	if (!ip)
		return &count->base_path.truncated;
	p->ip = *ip;
	p->length = bpf_ntohs(ip->tot_len);
	p->header = IP4_HDR_LEN;
	if (p->ip.version_ihl >> 4 != 4 || (p->ip.version_ihl & 15) < 5)
		return &count->base_path.not_ipv4;
	address_from_ip4(journey == FROM_POD ? &p->key.local : &p->key.remote, p->ip.saddr);
	address_from_ip4(journey == FROM_POD ? &p->key.remote : &p->key.local, p->ip.daddr);
	p->key.protocol = p->ip.protocol;

	if (p->ip.frag_off & bpf_htons(IP4_MF | IP4_OFFSET)) {
		odd = &count->base_path.fragment;
		if (p->ip.frag_off & bpf_htons(IP4_OFFSET))
			return odd; /* no transport header here, whatever the bytes say */
	}
	/* IHL is 5 or more; the mask tells the verifier that this is at most 60. */
	options = (p->ip.version_ihl - 5) * 4 & 60;
	if (options) {
		odd = &count->base_path.ip_options;
		c->pos += options;
		p->header += options;
	}
	if (p->ip.protocol == IPPROTO_TCP)
		reason = packet_tcp(c, p, journey, count);
	else if (p->ip.protocol == IPPROTO_UDP)
		reason = packet_udp(c, p, journey, count);
	else if (p->ip.protocol == IPPROTO_ICMP)
		reason = packet_icmp(c, p, journey, count);
	else
		return &count->base_path.protocol;
	if (odd)
		return odd;
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
