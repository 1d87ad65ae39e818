/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The tunnel on the wire: what the kernel's VXLAN device would have written
 * (drivers/net/vxlan/vxlan_core.c, include/net/inet_ecn.h, udp_tunnel.h).
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include "config.h"
#include "packet.h"
#include "path.h"

#define PUSH_FLAGS                                                                              \
	(BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L4_UDP | BPF_F_ADJ_ROOM_ENCAP_L2_ETH | \
	 BPF_F_ADJ_ROOM_ENCAP_L2(sizeof(struct eth)))

/* Since 6.3, which our uapi headers predate; refused before, and then the base path serves. */
#define ADJ_ROOM_DECAP_L3_IPV4 (1ULL << 7)
#define ADJ_ROOM_DECAP_L3_IPV6 (1ULL << 8)

/* udp_flow_src_port(): entropy for RSS and ECMP, the same port as on the base path. */
static __always_inline __be16 tunnel_source_port(const struct config *cfg, __u32 hash)
{
	hash ^= hash << 16;
	return bpf_htons(cfg->port_min +
			 ((__u64)hash * (__u32)(cfg->port_max - cfg->port_min) >> 32));
}

/* RFC 6040, 4.1, normal mode: CE does not travel in the outer header on the way in. */
static __always_inline __u8 tunnel_tos(const struct config *cfg, __u8 template, __u8 inner)
{
	__u8 dscp = cfg->tos_inherit ? inner : template;
	__u8 ecn = inner & ECN_MASK;

	return (dscp & ~ECN_MASK) | (ecn == ECN_CE ? 2 : ecn);
}

/*
 * What differs from packet to packet of a path. id is not random, but different
 * for each packet: where DF is clear it tells fragments apart.
 */
static __always_inline void tunnel_complete4(struct vxlan4 *h, const struct config *cfg,
					     const struct packet *p, __u8 ttl, __u32 sum,
					     __u32 hash, __u32 id)
{
	h->ip.tos = tunnel_tos(cfg, h->ip.tos, p->tos);
	h->ip.tot_len = bpf_htons(p->length + VXLAN4_OVERHEAD);
	h->ip.id = id;
	/* The sum of a path leaves out tos and whatever is zero in its header. */
	sum += bpf_htons(h->ip.tos) + h->ip.tot_len + h->ip.id;
	if (cfg->ttl_inherit) {
		h->ip.ttl = ttl;
		sum += bpf_htons(ttl << 8);
	}
	if (cfg->df_inherit) {
		/* vxlan_xmit_one(): an IPv6 packet is never fragmented on its way */
		h->ip.frag_off =
			p->is_ip6 ? bpf_htons(IP4_DF) : p->ip4.frag_off & bpf_htons(IP4_DF);
		sum += h->ip.frag_off;
	}
	h->ip.check = ~fold(sum);
	h->udp.sport = tunnel_source_port(cfg, hash);
	h->udp.len = bpf_htons(p->length + VXLAN4_OVERHEAD - IP4_HDR_LEN);
}

/* Sum of the inner IP header and all behind it, without looking at the latter: the checksum in
 * the transport header makes it the complement of the pseudo header (as the kernel's lco_csum()).
 */
static __always_inline __u32 inner_sum(const struct packet *p, __u8 ttl)
{
	__u32 length = p->length - (p->is_ip6 ? IP6_HDR_LEN : IP4_HDR_LEN), sum;

	if (p->is_ip6) {
		/* The addresses stand in both and cancel out. */
		sum = sum16(&p->ip6, 6) + bpf_htons(p->ip6.nexthdr << 8 | ttl);
		return sum + (__u16)~bpf_htons(length) + (__u16)~bpf_htons(p->ip6.nexthdr);
	}
	if (p->key.protocol == IPPROTO_ICMP)
		return 0; /* no pseudo header; a valid IPv4 header sums to nothing */
	sum = sum16(&p->ip4.saddr, 8) + bpf_htons(length) + bpf_htons(p->key.protocol);
	return (__u16)~fold(sum);
}

static __always_inline void tunnel_complete6(struct vxlan6 *h, const struct config *cfg,
					     const struct packet *p, __u8 ttl, __u32 sum,
					     __u32 hash)
{
	__u32 tos = tunnel_tos(cfg, bpf_ntohl(h->ip.flow) >> 20, p->tos);

	h->ip.flow = (h->ip.flow & bpf_htonl(0xf00fffff)) | bpf_htonl(tos << 20);
	h->ip.payload_len = bpf_htons(p->length + VXLAN6_OVERHEAD - IP6_HDR_LEN);
	if (cfg->ttl_inherit)
		h->ip.hop_limit = ttl;
	h->udp.sport = tunnel_source_port(cfg, hash);
	h->udp.len = h->ip.payload_len;
	if (cfg->zero_sum6_tx)
		return;
	sum += h->udp.sport + h->udp.len + h->udp.len + inner_sum(p, ttl);
	h->udp.check = ~fold(sum);
	if (!h->udp.check)
		h->udp.check = 0xffff;
}

/* What the outer header of an arriving packet says. */
struct outer {
	__u16 length; /* of all that is in front of the inner IP header */
	__u16 sum; /* the UDP checksum */
	__u8 tos;
	__u8 is_ip6;
	__u8 fragment;
	__u8 pad;
	__u16 udp_length;
};

static __always_inline __u64 *outer_ip4(struct cursor *c, struct counters *count, struct outer *o,
					struct packet *p)
{
	struct ip4 *ip = cursor_take(c, struct ip4);

	if (!ip || ip->protocol != IPPROTO_UDP || ip->version_ihl != IP4_VERSION_IHL ||
	    ip->frag_off & bpf_htons(IP4_OFFSET))
		return &count->base_path.not_tunnel;
	if (fold(sum16(ip, sizeof(*ip))) != 0xffff)
		return &count->base_path.header_checksum;
	o->length = sizeof(struct vxlan4);
	o->udp_length = bpf_ntohs(ip->tot_len) - IP4_HDR_LEN;
	o->tos = ip->tos;
	o->fragment = (ip->frag_off & bpf_htons(IP4_MF)) != 0;
	address_from_ip4(&p->peer, ip->saddr);
	address_from_ip4(&p->key.local, ip->daddr);
	return NULL;
}

static __always_inline __u64 *outer_ip6(struct cursor *c, struct counters *count, struct outer *o,
					struct packet *p)
{
	struct ip6 *ip = cursor_take(c, struct ip6);

	if (!ip || ip->nexthdr != IPPROTO_UDP || bpf_ntohl(ip->flow) >> 28 != IP6_VERSION)
		return &count->base_path.not_tunnel;
	/* The kernel drops it; as an address of ours it would be an IPv4 peer's. */
	if (address_is_ip4(&ip->saddr) || address_is_ip4(&ip->daddr))
		return &count->base_path.outer;
	o->length = sizeof(struct vxlan6);
	o->udp_length = bpf_ntohs(ip->payload_len);
	o->tos = bpf_ntohl(ip->flow) >> 20;
	o->is_ip6 = 1;
	p->peer = ip->saddr;
	p->key.local = ip->daddr;
	return NULL;
}

/*
 * Is this a tunnel packet for us whose inside may be looked at? The cursor is
 * left at the inner Ethernet header. Returns the counter of the reason if not.
 */
static __always_inline __u64 *tunnel_open(struct __sk_buff *skb, struct cursor *c,
					  const struct config *cfg, struct counters *count,
					  struct outer *o, struct packet *p)
{
	struct eth *eth = cursor_take(c, struct eth);
	struct vxlan *vxlan;
	struct udp *udp;
	__u64 *reason;

	if (!eth)
		return &count->base_path.truncated;
	if (eth->proto == bpf_htons(ETH_P_IP))
		reason = outer_ip4(c, count, o, p);
	else if (eth->proto == bpf_htons(ETH_P_IPV6))
		reason = outer_ip6(c, count, o, p);
	else
		return &count->base_path.not_ip;
	if (reason)
		return reason;
	udp = cursor_take(c, struct udp);
	if (!udp || udp->dport != cfg->port)
		return &count->base_path.not_tunnel;
	vxlan = cursor_take(c, struct vxlan);
	if (!vxlan)
		return &count->base_path.truncated;
	if (skb->pkt_type || !address_equal(&p->key.local, &cfg->local) || o->fragment ||
	    vxlan->flags != bpf_htonl(VXLAN_FLAGS))
		return &count->base_path.outer;
	if (vxlan->vni != cfg->vni)
		return &count->base_path.vni;
	if (bpf_ntohs(udp->len) != o->udp_length)
		return &count->base_path.truncated;
	o->sum = udp->check;
	return NULL;
}

enum ecn {
	ECN_KEEP,
	ECN_SET_CE,
	ECN_ODD, /* dropped, logged or re-marked: the base path knows which */
};

/* RFC 6040, 4.2, as the kernel's INET_ECN_decapsulate() does it. */
static __always_inline enum ecn tunnel_ecn(__u8 outer, __u8 inner)
{
	outer &= ECN_MASK;
	inner &= ECN_MASK;
	if (outer == inner || !outer || (outer == 2 && inner))
		return ECN_KEEP;
	if (outer == ECN_CE && inner)
		return ECN_SET_CE;
	return ECN_ODD;
}

static __always_inline void ip4_set_ce(struct ip4 *ip)
{
	__u32 sum = (__u16)~ip->check + bpf_htons(ip->tos | ECN_CE) + (__u16)~bpf_htons(ip->tos);

	ip->tos |= ECN_CE;
	ip->check = ~fold(sum);
}
