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

#define PUSH_FLAGS                                                                               \
	(BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP | \
	 BPF_F_ADJ_ROOM_ENCAP_L2_ETH | BPF_F_ADJ_ROOM_ENCAP_L2(sizeof(struct eth)))

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

static __always_inline __u32 tunnel_sum(const struct vxlan4 *h)
{
	const __u16 *word = (const void *)h + sizeof(struct eth);
	__u32 sum = 0;

#pragma unroll
	for (int i = 0; i < IP4_HDR_LEN / 2; i++)
		sum += word[i];
	return sum;
}

static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/*
 * What differs from packet to packet of a path. id is not random, but different
 * for each packet: where DF is clear it tells fragments apart.
 */
static __always_inline void tunnel_complete(struct vxlan4 *h, const struct config *cfg,
					    const struct ip4 *inner, __u16 length, __u32 sum,
					    __u32 hash, __u32 id)
{
	h->ip.tos = tunnel_tos(cfg, h->ip.tos, inner->tos);
	h->ip.tot_len = bpf_htons(length + VXLAN4_OVERHEAD);
	h->ip.id = id;
	/* The sum of a path leaves out tos and whatever is zero in its header. */
	sum += bpf_htons(h->ip.tos) + h->ip.tot_len + h->ip.id;
	if (cfg->ttl_inherit) {
		h->ip.ttl = inner->ttl;
		sum += bpf_htons(inner->ttl << 8);
	}
	if (cfg->df_inherit) {
		h->ip.frag_off = inner->frag_off & bpf_htons(IP4_DF);
		sum += h->ip.frag_off;
	}
	h->ip.check = ~fold(sum);
	h->udp.sport = tunnel_source_port(cfg, hash);
	h->udp.len = bpf_htons(length + VXLAN4_OVERHEAD - IP4_HDR_LEN);
}

/*
 * Is this a tunnel packet for us whose inside may be looked at? The cursor is
 * left at the inner Ethernet header. Returns the counter of the reason if not.
 */
static __always_inline __u64 *tunnel_open(struct __sk_buff *skb, struct cursor *c,
					  const struct config *cfg, struct counters *count,
					  struct vxlan4 *outer)
{
	struct eth *eth = cursor_take(c, struct eth);
	struct vxlan *vxlan;
	struct ip4 *ip;
	struct udp *udp;

	if (!eth)
		return &count->base_path.truncated;
	if (eth->proto != bpf_htons(ETH_P_IP))
		return &count->base_path.not_ipv4;
	ip = cursor_take(c, struct ip4);
	if (!ip || ip->protocol != IPPROTO_UDP || ip->version_ihl != IP4_VERSION_IHL ||
	    ip->frag_off & bpf_htons(IP4_OFFSET))
		return &count->base_path.not_tunnel;
	udp = cursor_take(c, struct udp);
	if (!udp || udp->dport != cfg->port)
		return &count->base_path.not_tunnel;
	vxlan = cursor_take(c, struct vxlan);
	if (!vxlan)
		return &count->base_path.truncated;
	if (skb->pkt_type || ip->daddr != cfg->local.word[3] || ip->frag_off & bpf_htons(IP4_MF) ||
	    vxlan->flags != bpf_htonl(VXLAN_FLAGS))
		return &count->base_path.outer;
	if (vxlan->vni != cfg->vni)
		return &count->base_path.vni;
	if (skb->len != bpf_ntohs(ip->tot_len) + sizeof(*eth) ||
	    bpf_ntohs(udp->len) != bpf_ntohs(ip->tot_len) - IP4_HDR_LEN)
		return &count->base_path.truncated;
	outer->ip = *ip;
	outer->udp = *udp;
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
