/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The ONCache plane: the overlay's own wire format from caches.
 *
 *   from_pod   ingress of the pod's host side device   hit: push header, to the uplink
 *   to_wire    egress of the uplink                    learns from what left
 *   from_wire  ingress of the uplink                   hit: strip header, into the pod
 *   to_pod     egress of the pod's host side device    learns from what arrives
 *
 * Every hook describes the packet, decides, and only then rewrites. Whatever is
 * not certain goes on to the base path unchanged.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>
#include "lib/address.h"
#include "lib/config.h"
#include "lib/conntrack.h"
#include "lib/counters.h"
#include "lib/flow.h"
#include "lib/headers.h"
#include "lib/mac.h"
#include "lib/nat.h"
#include "lib/packet.h"
#include "lib/path.h"
#include "lib/peer.h"
#include "lib/pod.h"
#include "lib/ring.h"
#include "lib/tunnel.h"

/* The most that is ever read. */
#define POD_HEADERS (sizeof(struct frame6) + sizeof(struct fragment6) + sizeof(struct tcp))
#define WIRE_HEADERS (sizeof(struct vxlan6) + POD_HEADERS - sizeof(struct eth))

/* Longest a pod's receive queue takes to hand over what was put there. */
#define QUEUE_DRAINED_NS 1000000

/* Why this half may not be used, NULL if it may. */
static __always_inline __u64 *half_unfit(const struct flow *flow, const struct half *half,
					 const struct pod *pod, const struct config *cfg, __u64 now,
					 struct counters *count)
{
	if (flow->reset)
		return &count->base_path.closed;
	if (!half->ready)
		return &count->base_path.unconfirmed;
	if (half->generation != cfg->generation || half->pod >> 32 != pod->generation)
		return &count->base_path.stale;
	if (now - half->learned > cfg->lease)
		return &count->base_path.lease;
	if (half->sent != half->left)
		return &count->base_path.order;
	return NULL;
}

static __always_inline void flow_ends(struct flow *flow, const struct packet *p)
{
	if (p->tcp_flags & TCP_FIN)
		flow->closed = 1;
	else if (p->tcp_flags & TCP_RST)
		flow->reset = 1;
}

/*
 * A packet that no entry may carry or learn from: what does it mean for its flow?
 * Nothing, if it did not come from where the flow's packets come from.
 */
static __noinline int flow_disturbed(struct __sk_buff *skb, const struct packet *p,
				     enum journey journey)
{
	struct flow *flow = flow_get(&p->key);
	struct flow_key key = p->key;
	struct half *half;
	struct pod *pod;

	if (!flow)
		return 0;
	half = flow_half(flow, journey);
	pod = pod_get(flow->out.seen ? flow->out.pod : flow->in.pod);
	if (journey == FROM_POD && (!pod || pod->ifindex != skb->ifindex))
		return 0;
	if (journey == FROM_WIRE && flow->in.seen && !address_equal(&flow->in.peer, &p->peer))
		return 0;
	if (journey == FROM_WIRE && !peer_known(&p->peer))
		return 0;
	flow_key_other(&key, half);
	if (packet_opens(p)) {
		bpf_map_delete_elem(&filter_cache, &key);
		return bpf_map_delete_elem(&filter_cache, &p->key);
	}
	half_unsettle(half);
	if (p->key.protocol == IPPROTO_TCP)
		flow_ends(flow, p);
	if (half->nat_port && p->key.protocol == IPPROTO_TCP) {
		flow = flow_get(&key);
		if (flow)
			flow_ends(flow, p);
	}
	return 0;
}

static __always_inline __u64 *packet_flags(const struct packet *p, struct counters *count)
{
	if (p->key.protocol == IPPROTO_TCP &&
	    (p->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST | TCP_ACK)) != TCP_ACK)
		return &count->base_path.tcp_flags;
	return NULL;
}

static __always_inline __u64 *config_down(const struct config *cfg, __u64 now,
					  struct counters *count)
{
	if (!cfg->deadline)
		return &count->base_path.disabled;
	if (!config_alive(cfg, now))
		return &count->base_path.deadline;
	return NULL;
}

/* ---- pod to wire ------------------------------------------------------- */

/* Not inlined, like wire_miss(): the way of a hit stays short. */
static __noinline int pod_miss(struct __sk_buff *skb, const struct packet *p, struct half *half,
			       struct counters *count, __u64 *reason)
{
	struct config *cfg = config_get();
	__u32 index, number;
	struct pod *pod = pod_of_device(skb->ifindex, &index);

	if (!cfg || !pod || pod->ifindex != skb->ifindex)
		return leave(&count->base_path.unknown_pod);
	if (!pod_owns(pod, &p->key.local))
		return leave(&count->base_path.spoofed);
	number = ring_note(skb, cfg, p, FROM_POD, reference(index, pod->generation));
	if (half && number)
		half->sent = number;
	return leave(reason);
}

/*
 * skb_get_hash(), before there is a second header, as the tunnel device takes it.
 * A TCP socket's packets bring theirs and change it to change the route; for others
 * the kernel dissects each packet of the flow anew, with the same result.
 */
static __always_inline __u32 flow_hash(struct __sk_buff *skb, const struct packet *p,
				       struct half *half)
{
	if (skb->hash)
		return skb->hash;
	if (p->is_ip6) /* the flow label is part of it, and may change */
		return bpf_get_hash_recalc(skb);
	if (!half->hash)
		half->hash = bpf_get_hash_recalc(skb);
	return half->hash;
}

/* Makes room and writes the new header with the inner IP header, changed, behind it. */
static __always_inline int push_header(struct __sk_buff *skb, struct half *half,
				       struct counters *count, __u32 overhead, __u64 flags,
				       const void *header, __u32 length, __u32 uplink)
{
	if (bpf_skb_adjust_room(skb, overhead, BPF_ADJ_ROOM_MAC, PUSH_FLAGS | flags)) {
		half_unsettle(half);
		return leave(&count->base_path.helper);
	}
	/* Written by helper: a program with direct writes unshares every packet it sees. */
	if (bpf_skb_store_bytes(skb, 0, header, length, 0)) {
		count->dropped.unfinished++;
		return TC_ACT_SHOT;
	}
	count->hits.from_pod++;
	return bpf_redirect(uplink, 0);
}

struct push4 {
	union {
		struct vxlan4 outer;
		__u64 word[sizeof(struct vxlan4) / 8];
	};
	struct ip4 ip4;
};

union push6 {
	struct vxlan6 outer;
	__u64 word[PATH_HEADER_MAX / 8];
};

static __always_inline void push4_outer(struct __sk_buff *skb, const struct path *path,
					const struct config *cfg, const struct packet *p,
					struct half *half, struct counters *count, struct push4 *h)
{
	__u32 hash = flow_hash(skb, p, half);

#pragma unroll
	for (__u32 i = 0; i < sizeof(struct vxlan4) / 8; i++)
		h->word[i] = path->header.word[i];
	tunnel_complete4(&h->outer, cfg, p, p->ttl - half->hops, path->sum, hash,
			 hash + count->hits.from_pod);
}

/* IPv4 in IPv4. */
static __always_inline int push(struct __sk_buff *skb, const struct config *cfg,
				const struct path *path, const struct packet *p, struct half *half,
				struct counters *count)
{
	struct push4 h;
	int verdict;

	push4_outer(skb, path, cfg, p, half, count, &h);
	h.ip4 = p->ip4;
	ip4_lose_hops(&h.ip4, half->hops);
	verdict = push_header(skb, half, count, VXLAN4_OVERHEAD, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, &h,
			      sizeof(h.outer) + sizeof(h.ip4), path->ifindex);
	if (verdict == TC_ACT_REDIRECT && half->hops) /* it has been forwarded */
		skb->priority = ip4_priority(p->tos);
	return verdict;
}

/* The inner header after the outer one, where that was written without it. */
static __always_inline int push_inner(struct __sk_buff *skb, const struct packet *p, __u8 hops,
				      __u32 at, int verdict, struct counters *count)
{
	struct ip4 ip = p->ip4;
	struct ip6 ip6 = p->ip6;
	long failed;

	if (verdict != TC_ACT_REDIRECT)
		return verdict;
	if (p->is_ip6) {
		ip6.hop_limit -= hops;
		failed = bpf_skb_store_bytes(skb, at, &ip6, sizeof(ip6), 0);
	} else {
		ip4_lose_hops(&ip, hops);
		failed = bpf_skb_store_bytes(skb, at, &ip, sizeof(ip), 0);
		if (hops)
			skb->priority = ip4_priority(p->tos);
	}
	if (!failed)
		return verdict;
	count->hits.from_pod--;
	count->dropped.unfinished++;
	return TC_ACT_SHOT;
}

/* With IPv6 inside or outside. */
static __noinline int push_other(struct __sk_buff *skb, const struct path *path,
				 const struct packet *p, struct half *half, struct counters *count)
{
	struct config *cfg = config_get();
	union {
		struct push4 v4;
		union push6 v6;
	} h;
	int verdict;

	if (!cfg)
		return leave(&count->base_path.helper);
	if (path->length == sizeof(struct vxlan4)) {
		push4_outer(skb, path, cfg, p, half, count, &h.v4);
		verdict =
			push_header(skb, half, count, VXLAN4_OVERHEAD, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4,
				    &h.v4, sizeof(h.v4.outer), path->ifindex);
		return push_inner(skb, p, half->hops, sizeof(h.v4.outer), verdict, count);
	}
#pragma unroll
	for (int i = 0; i < PATH_HEADER_MAX / 8; i++)
		h.v6.word[i] = path->header.word[i];
	tunnel_complete6(&h.v6.outer, cfg, p, p->ttl - half->hops, path->sum,
			 flow_hash(skb, p, half));
	verdict = push_header(skb, half, count, VXLAN6_OVERHEAD, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6,
			      &h.v6, sizeof(h.v6.outer), path->ifindex);
	return push_inner(skb, p, half->hops, sizeof(h.v6.outer), verdict, count);
}

/* Why this packet may not take the path its flow has, NULL if it may. */
static __always_inline __u64 *pod_unfit(struct __sk_buff *skb, const struct config *cfg,
					const struct packet *p, const struct flow *flow, __u64 now,
					struct counters *count, struct path **path)
{
	const struct half *half = &flow->out;
	struct path_state *state = path_state_get(half->path);
	struct pod *pod = pod_get(half->pod);
	__u64 *reason;
	__u32 size;

	*path = path_get(half->path);
	if (!pod || !*path || !state)
		return &count->base_path.stale;
	reason = half_unfit(flow, half, pod, cfg, now, count);
	if (reason)
		return reason;
	if (half->path >> 32 != state->generation)
		return &count->base_path.stale;
	if (pod->ifindex != skb->ifindex) /* the neighbour's flow, not ours */
		return &count->base_path.spoofed;
	size = packet_size(skb, p);
	if (size > cfg->mtu || (state->mtu && size > state->mtu) ||
	    p->length > 0xffff - VXLAN6_OVERHEAD)
		return &count->base_path.size;
	if (p->ttl <= half->hops)
		return &count->base_path.ttl;
	if (!mac_equal(p->to_mac, half->to_mac))
		return &count->base_path.mac;
	/* UDP over IPv6: a checksum of all can be had from the inner one, those of segments not. */
	if ((*path)->length == sizeof(struct vxlan6) && !cfg->zero_sum6_tx &&
	    (skb->gso_size || !p->l4_check))
		return &count->base_path.checksum;
	return NULL;
}

SEC("tc")
int from_pod(struct __sk_buff *skb)
{
	struct counters *count = counters_get();
	struct config *cfg = config_get();
	struct packet p = {};
	struct cursor c;
	struct flow *flow;
	struct path *path;
	__u64 *reason, now;
	int verdict;

	if (!count || !cfg)
		return TC_ACT_UNSPEC;
	now = bpf_ktime_get_coarse_ns();
	reason = config_down(cfg, now, count);
	if (reason)
		return leave(reason);
	if (skb->vlan_present)
		return leave(&count->base_path.vlan);
	if (cursor_start(skb, &c, POD_HEADERS))
		return leave(&count->base_path.truncated);
	reason = packet_describe(&c, &p, FROM_POD, count);
	if (!reason)
		reason = packet_flags(&p, count);
	if (!reason && skb->len != p.length + sizeof(struct eth))
		reason = &count->base_path.truncated;
	if (reason && !packet_accepts(&p)) {
		if (p.has_key)
			flow_disturbed(skb, &p, FROM_POD);
		return leave(reason);
	}

	flow = flow_get(&p.key);
	if (!flow)
		return pod_miss(skb, &p, NULL, count, reason ? reason : &count->base_path.miss);
	if (flow->closed)
		return leave(&count->base_path.closed);
	if (reason)
		return pod_miss(skb, &p, &flow->out, count, reason);
	reason = pod_unfit(skb, cfg, &p, flow, now, count, &path);
	if (reason)
		return pod_miss(skb, &p, &flow->out, count, reason);
	if (!flow->out.nat_port && !p.is_ip6 && path->length == sizeof(struct vxlan4))
		return push(skb, cfg, path, &p, &flow->out, count);
	if (flow->out.nat_port)
		nat_ip(&p, &flow->out, FROM_POD);
	verdict = push_other(skb, path, &p, &flow->out, count);
	if (verdict != TC_ACT_REDIRECT || !flow->out.nat_port)
		return verdict;
	if (!nat_l4(skb, &p, &flow->out, path->length, FROM_POD))
		return verdict;
	count->hits.from_pod--;
	count->dropped.unfinished++;
	return TC_ACT_SHOT;
}

/* ---- wire to pod ------------------------------------------------------- */

static __noinline int wire_miss(struct __sk_buff *skb, const struct packet *p, struct half *half,
				struct counters *count, __u64 *reason)
{
	struct config *cfg = config_get();
	__u32 number;

	if (!cfg || !peer_known(&p->peer))
		return leave(&count->base_path.peer);
	number = ring_note(skb, cfg, p, FROM_WIRE, 0);
	if (half && number)
		half->sent = number;
	return leave(reason);
}

/* Takes the header off and writes the pod's; 0 if that went well. */
static __always_inline int strip_header(struct __sk_buff *skb, struct half *half,
					struct counters *count, __u32 overhead, __u64 flags,
					const void *frame, __u32 length)
{
	if (bpf_skb_adjust_room(skb, -(__s32)overhead, BPF_ADJ_ROOM_MAC, flags)) {
		half_unsettle(half);
		return leave(&count->base_path.helper);
	}
	if (bpf_skb_store_bytes(skb, 0, frame, length, 0)) {
		count->dropped.unfinished++;
		return TC_ACT_SHOT;
	}
	return 0;
}

static __always_inline void frame_eth(struct eth *eth, const struct pod *pod,
				      const struct half *half, __be16 proto)
{
	mac_copy(eth->dst, pod->mac);
	mac_copy(eth->src, half->from_mac);
	eth->proto = proto;
}

/* What the NIC verified is the inner checksum only if there was no outer one. */
static __always_inline __u64 strip_flags(const struct outer *o, const struct packet *p)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;

	if (!o->sum)
		flags |= BPF_F_ADJ_ROOM_NO_CSUM_RESET;
	if (o->is_ip6 != p->is_ip6)
		flags |= p->is_ip6 ? ADJ_ROOM_DECAP_L3_IPV6 : ADJ_ROOM_DECAP_L3_IPV4;
	return flags;
}

/* Of IPv4, whatever was outside. */
static __always_inline int strip4(struct __sk_buff *skb, const struct packet *p,
				  const struct outer *o, struct half *half, const struct pod *pod,
				  struct counters *count)
{
	struct ip4 ip = p->ip4;
	struct frame4 h;

	if (tunnel_ecn(o->tos, p->tos) == ECN_SET_CE)
		ip4_set_ce(&ip);
	ip4_lose_hops(&ip, half->hops);
	frame_eth(&h.eth, pod, half, bpf_htons(ETH_P_IP));
	h.ip = ip;
	if (!o->is_ip6)
		return strip_header(skb, half, count, VXLAN4_OVERHEAD, strip_flags(o, p), &h,
				    sizeof(h));
	return strip_header(skb, half, count, VXLAN6_OVERHEAD, strip_flags(o, p), &h, sizeof(h));
}

static __noinline int strip6(struct __sk_buff *skb, const struct packet *p, const struct outer *o,
			     struct flow *flow, struct counters *count)
{
	struct pod *pod = pod_get(flow->in.pod);
	__u32 overhead = o->is_ip6 ? VXLAN6_OVERHEAD : VXLAN4_OVERHEAD;
	struct frame6 h;

	if (!pod)
		return leave(&count->base_path.stale);
	h.ip = p->ip6;
	if (tunnel_ecn(o->tos, p->tos) == ECN_SET_CE)
		h.ip.flow |= bpf_htonl(ECN_CE << 20);
	h.ip.hop_limit -= flow->in.hops;
	frame_eth(&h.eth, pod, &flow->in, bpf_htons(ETH_P_IPV6));
	return strip_header(skb, &flow->in, count, overhead, strip_flags(o, p), &h, sizeof(h));
}

/*
 * Straight into the pod's namespace once the pod's receive queue has drained;
 * before that through the queue, behind what the base path put there.
 */
static __always_inline int into_pod(struct __sk_buff *skb, struct half *half, __u32 ifindex)
{
	if (half->queued) {
		__u64 now = bpf_ktime_get_ns();

		if (now - half->queued < QUEUE_DRAINED_NS) {
			half->queued = now;
			return bpf_redirect(ifindex, 0);
		}
		half->queued = 0;
	}
	/* Crossing into another namespace clears these on the base path. */
	skb->mark = 0;
	skb->priority = 0;
	return bpf_redirect_peer(ifindex, 0);
}

/* Why this packet may not take the fast path of its flow, NULL if it may. */
static __always_inline __u64 *wire_unfit(struct __sk_buff *skb, const struct config *cfg,
					 const struct packet *p, const struct outer *o,
					 const struct flow *flow, __u64 now, struct counters *count,
					 struct pod **pod)
{
	const struct half *half = &flow->in;
	__u64 *reason;

	*pod = pod_get(half->pod);
	if (!*pod)
		return &count->base_path.stale;
	reason = half_unfit(flow, half, *pod, cfg, now, count);
	if (reason)
		return reason;
	if (!address_equal(&half->peer, &p->peer))
		return &count->base_path.peer;
	if (!mac_equal(p->to_mac, half->to_mac))
		return &count->base_path.mac;
	if (packet_size(skb, p) > cfg->mtu)
		return &count->base_path.size;
	/* What is stripped keeps its type of segments; UDP, unlike TCP, would look at the tunnel's.
	 */
	if (skb->gso_size && p->key.protocol == IPPROTO_UDP)
		return &count->base_path.segments;
	if (p->ttl <= half->hops)
		return &count->base_path.ttl;
	if (tunnel_ecn(o->tos, p->tos) == ECN_ODD)
		return &count->base_path.ecn;
	/*
	 * The outer checksum goes unverified. The pod verifies the inner one, so
	 * only a packet without an inner one loses by it.
	 */
	if (o->sum && !p->l4_check)
		return &count->base_path.checksum;
	if (!o->sum && o->is_ip6 && !cfg->zero_sum6_rx)
		return &count->base_path.checksum;
	return NULL;
}

SEC("tc")
int from_wire(struct __sk_buff *skb)
{
	struct counters *count = counters_get();
	struct config *cfg = config_get();
	struct outer outer = {};
	struct packet p = {};
	__u64 *reason, now;
	struct cursor c;
	struct flow *flow;
	struct half *half;
	struct pod *pod;
	__u32 ifindex;
	int failed;

	if (!count || !cfg)
		return TC_ACT_UNSPEC;
	now = bpf_ktime_get_coarse_ns();
	reason = config_down(cfg, now, count);
	if (reason)
		return leave(reason);
	if (skb->vlan_present)
		return leave(&count->base_path.vlan);
	if (cursor_start(skb, &c, WIRE_HEADERS))
		return leave(&count->base_path.truncated);
	reason = tunnel_open(skb, &c, cfg, count, &outer, &p);
	if (reason)
		return leave(reason);
	reason = packet_describe(&c, &p, FROM_WIRE, count);
	if (!reason)
		reason = packet_flags(&p, count);
	if (!reason && (skb->len != (__u32)p.length + outer.length ||
			outer.udp_length != p.length + UDP_OVERHEAD))
		reason = &count->base_path.truncated;
	if (reason && !packet_accepts(&p)) {
		if (p.has_key)
			flow_disturbed(skb, &p, FROM_WIRE);
		return leave(reason);
	}

	flow = flow_get(&p.key);
	if (!flow)
		return wire_miss(skb, &p, NULL, count, reason ? reason : &count->base_path.miss);
	if (flow->closed)
		return leave(&count->base_path.closed);
	if (reason)
		return wire_miss(skb, &p, &flow->in, count, reason);
	half = &flow->in;
	reason = wire_unfit(skb, cfg, &p, &outer, flow, now, count, &pod);
	if (reason)
		return wire_miss(skb, &p, half, count, reason);

	ifindex = pod->ifindex;
	if (half->nat_port)
		nat_ip(&p, half, FROM_WIRE);
	if (p.is_ip6)
		failed = strip6(skb, &p, &outer, flow, count);
	else
		failed = strip4(skb, &p, &outer, half, pod, count);
	if (failed)
		return failed;
	if (half->nat_port && nat_l4(skb, &p, half, sizeof(struct eth), FROM_WIRE)) {
		count->dropped.unfinished++;
		return TC_ACT_SHOT;
	}
	count->hits.from_wire++;
	return into_pod(skb, half, ifindex);
}

/* ---- learning ---------------------------------------------------------- */

static const struct flow flow_unseen;

/* Takes our mark off the packet. The counter of the reason why it teaches nothing, or NULL. */
static __always_inline __u64 *learn_start(struct __sk_buff *skb, const struct config *cfg,
					  struct slot *slot, enum journey journey,
					  struct counters *count)
{
	if (!ring_take(skb, cfg, slot) || slot->journey != journey)
		return &count->not_learned.mark;
	if (!cfg->learning || slot->epoch != cfg->epoch ||
	    !config_alive(cfg, bpf_ktime_get_coarse_ns()))
		return &count->not_learned.paused;
	return NULL;
}

/* Is what the second hook sees what the first one wrote down, and worth an entry? */
static __always_inline __u64 *learn_check(struct __sk_buff *skb, const struct slot *slot,
					  const struct packet *p, struct counters *count,
					  enum tracking *tracking, int *translated)
{
	*translated = !flow_key_equal(&slot->key, &p->key);
	if (slot->ttl < p->ttl || !flow_key_same_local(&slot->key, &p->key))
		return &count->not_learned.translated;
	*tracking = conntrack_state(skb, &slot->key, slot->journey, *translated);
	if (*translated && *tracking == UNTRACKED)
		return &count->not_learned.translated;
	if (*tracking == NOT_ESTABLISHED)
		return &count->not_learned.unestablished;
	return NULL;
}

/* The flow's entry, made if there is none; NULL if there may or can be none. */
static __always_inline struct flow *learn_entry(const struct flow_key *key, enum tracking tracking,
						struct counters *count)
{
	struct flow *flow = flow_get(key);

	if (!flow) {
		bpf_map_update_elem(&filter_cache, key, &flow_unseen, BPF_NOEXIST);
		flow = flow_get(key);
	}
	if (!flow) {
		count->not_learned.full++;
		return NULL;
	}
	if (flow->closed || (flow->reset && tracking != ESTABLISHED)) {
		count->not_learned.unestablished++;
		return NULL;
	}
	flow->reset = 0;
	return flow;
}

/* Was the other direction delivered under the state that holds now? */
static __always_inline int half_current(const struct half *half, __u64 pod, __u32 generation)
{
	return half->seen && half->pod == pod && half->generation == generation;
}

/*
 * Publishes a half, and both once each direction has been delivered and the flow
 * is established. The caller has read the generations; the epoch is looked at after
 * them, because the agent moves it before them: a packet of the old state never
 * carries a new generation.
 */
static __always_inline int learn_half(struct half *half, struct half *other,
				      const struct config *cfg, const struct slot *slot,
				      const struct packet *p, enum tracking tracking, __u64 pod,
				      __u64 path, int translated, struct counters *count)
{
	__u32 generation = *(volatile const __u32 *)&cfg->generation;

	if (*(volatile const __u32 *)&cfg->epoch != slot->epoch)
		return leave(&count->not_learned.paused);
	half->pod = pod;
	half->path = path;
	half->generation = generation;
	half->hops = slot->ttl - p->ttl;
	half->peer = slot->peer;
	half->nat = p->key.remote;
	half->nat_port = translated ? p->key.remote_port : 0;
	mac_copy(half->to_mac, slot->to_mac);
	half->learned = bpf_ktime_get_coarse_ns();
	half->left = slot->number;
	/*
	 * Others may be on the way that were written down before there was an entry
	 * to note it in, but none before the first packet of a direction.
	 */
	if (!half->sent)
		half->sent = slot->number - !packet_accepts(p);
	half->seen = 1;
	half->ready = tracking != ANSWERED && other && half_current(other, pod, generation);
	if (half->ready && other)
		other->ready = 1;
	return leave(&count->learned);
}

/* The path of a packet that the base path has just encapsulated, without what varies. */
static __always_inline void path_from4(struct path *path, const struct config *cfg,
				       const struct vxlan4 *outer)
{
	struct vxlan4 *h = &path->header.v4;

	path->length = sizeof(*outer);
	*h = *outer;
	h->ip.tot_len = 0;
	h->ip.id = 0;
	h->ip.check = 0;
	h->ip.tos = cfg->tos_inherit ? 0 : outer->ip.tos & ~ECN_MASK;
	if (cfg->ttl_inherit)
		h->ip.ttl = 0;
	if (cfg->df_inherit)
		h->ip.frag_off = 0;
	h->udp.sport = 0;
	h->udp.len = 0;
	h->udp.check = 0;
	path->sum = fold(sum16((void *)h + sizeof(h->eth), sizeof(h->ip)) - bpf_htons(h->ip.tos));
}

static __always_inline void path_from6(struct path *path, const struct config *cfg,
				       const struct vxlan6 *outer)
{
	__u32 drop = cfg->tos_inherit ? 0x0ff00000 : ECN_MASK << 20;
	struct vxlan6 *h = &path->header.v6;

	path->length = sizeof(*outer);
	*h = *outer;
	h->ip.flow &= ~bpf_htonl(drop);
	h->ip.payload_len = 0;
	if (cfg->ttl_inherit)
		h->ip.hop_limit = 0;
	h->udp.sport = 0;
	h->udp.len = 0;
	h->udp.check = 0;
	/* Pseudo header, UDP header, VXLAN header and inner Ethernet header. */
	path->sum = fold(sum16((void *)h + sizeof(h->eth) + 8, sizeof(*h) - sizeof(h->eth) - 8) +
			 bpf_htons(IPPROTO_UDP));
}

static __always_inline int vxlan_expected(const struct config *cfg, const struct udp *udp,
					  const struct vxlan *vxlan)
{
	return udp->dport == cfg->port && vxlan->flags == bpf_htonl(VXLAN_FLAGS) &&
	       vxlan->vni == cfg->vni;
}

/* Fills path from the packet and moves the cursor to the inner frame; 0 if it is our tunnel's. */
static __always_inline int path_read4(struct cursor *c, const struct config *cfg, struct path *path)
{
	struct vxlan4 *outer = cursor_take(c, struct vxlan4);
	struct address source;
	struct vxlan vxlan;
	struct udp udp;

	if (!outer)
		return -1;
	udp = outer->udp;
	vxlan = outer->vxlan;
	address_from_ip4(&source, outer->ip.saddr);
	if (outer->ip.version_ihl != IP4_VERSION_IHL || outer->ip.protocol != IPPROTO_UDP ||
	    outer->ip.frag_off & bpf_htons(IP4_MF | IP4_OFFSET) ||
	    !address_equal(&source, &cfg->local) || !vxlan_expected(cfg, &udp, &vxlan))
		return -1;
	path_from4(path, cfg, outer);
	c->pos = &outer->inner;
	return 0;
}

static __always_inline int path_read6(struct cursor *c, const struct config *cfg, struct path *path)
{
	struct vxlan6 *outer = cursor_take(c, struct vxlan6);
	struct address source;
	struct vxlan vxlan;
	struct udp udp;

	if (!outer)
		return -1;
	udp = outer->udp;
	vxlan = outer->vxlan;
	source = outer->ip.saddr;
	if (bpf_ntohl(outer->ip.flow) >> 28 != IP6_VERSION || outer->ip.nexthdr != IPPROTO_UDP ||
	    !address_equal(&source, &cfg->local) || !vxlan_expected(cfg, &udp, &vxlan))
		return -1;
	path_from6(path, cfg, outer);
	c->pos = &outer->inner;
	return 0;
}

/* Not inlined: the stack of to_wire() has no room for more. */
static __noinline int path_read(struct __sk_buff *skb, struct path *path, struct packet *p,
				struct counters *count)
{
	struct config *cfg = config_get();
	struct cursor c;
	struct eth *eth;
	int failed;

	if (!cfg || skb->vlan_present || cursor_start(skb, &c, WIRE_HEADERS))
		return -1;
	eth = c.pos;
	if ((void *)(eth + 1) > c.end)
		return -1;
	path->ifindex = cfg->uplink;
	if (eth->proto == bpf_htons(ETH_P_IP))
		failed = path_read4(&c, cfg, path);
	else if (eth->proto == bpf_htons(ETH_P_IPV6))
		failed = path_read6(&c, cfg, path);
	else
		return -1;
	if (failed || packet_describe(&c, p, FROM_POD, count))
		return -1;
	return 0;
}

SEC("tc")
int to_wire(struct __sk_buff *skb)
{
	enum tracking tracking = UNTRACKED;
	struct counters *count;
	struct path_state *state;
	struct path path = {};
	struct slot slot = {};
	struct packet p = {};
	struct config *cfg;
	struct flow *flow, *pair;
	int translated;
	__u64 *reason;
	long index;

	if (!skb->mark) /* the fast path's own packets leave here */
		return TC_ACT_UNSPEC;
	count = counters_get();
	cfg = config_get();
	if (!count || !cfg || !(skb->mark & cfg->mark_mask))
		return TC_ACT_UNSPEC;
	reason = learn_start(skb, cfg, &slot, FROM_POD, count);
	if (reason)
		return leave(reason);

	if (path_read(skb, &path, &p, count))
		return leave(&count->not_learned.tunnel);

	reason = learn_check(skb, &slot, &p, count, &tracking, &translated);
	if (reason)
		return leave(reason);
	index = path_intern(&path);
	state = path_state_get(index);
	if (index < 0 || !state)
		return leave(&count->not_learned.full);
	flow = learn_entry(&slot.key, tracking, count);
	if (!flow)
		return TC_ACT_UNSPEC;
	pair = translated ? flow_get(&p.key) : flow;
	return learn_half(&flow->out, pair ? &pair->in : NULL, cfg, &slot, &p, tracking, slot.pod,
			  reference(index, *(volatile __u32 *)&state->generation), translated,
			  count);
}

SEC("tc")
int to_pod(struct __sk_buff *skb)
{
	enum tracking tracking = UNTRACKED;
	struct counters *count;
	struct slot slot = {};
	struct packet p = {};
	struct config *cfg;
	struct flow *flow, *pair;
	int translated;
	struct cursor c;
	struct eth *eth;
	struct pod *pod;
	__u8 from_mac[6];
	__u64 *reason;
	__u32 index;

	if (!skb->mark)
		return TC_ACT_UNSPEC;
	count = counters_get();
	cfg = config_get();
	if (!count || !cfg || !(skb->mark & cfg->mark_mask))
		return TC_ACT_UNSPEC;
	reason = learn_start(skb, cfg, &slot, FROM_WIRE, count);
	if (reason)
		return leave(reason);

	if (cursor_start(skb, &c, POD_HEADERS))
		return leave(&count->not_learned.translated);
	eth = c.pos;
	if ((void *)(eth + 1) > c.end)
		return leave(&count->not_learned.translated);
	mac_copy(from_mac, eth->src);
	if (packet_describe(&c, &p, FROM_WIRE, count))
		return leave(&count->not_learned.translated);
	/* A bridge that floods shows the packet at other pods, too. */
	pod = pod_of_device(skb->ifindex, &index);
	if (!pod || pod->ifindex != skb->ifindex || !pod_owns(pod, &p.key.local) ||
	    !mac_equal(p.to_mac, pod->mac))
		return leave(&count->not_learned.foreign);

	reason = learn_check(skb, &slot, &p, count, &tracking, &translated);
	if (reason)
		return leave(reason);
	flow = learn_entry(&slot.key, tracking, count);
	if (!flow)
		return TC_ACT_UNSPEC;
	pair = translated ? flow_get(&p.key) : flow;
	mac_copy(flow->in.from_mac, from_mac);
	/* The pod's receive queue is not seen: see into_pod(). */
	flow->in.queued = bpf_ktime_get_ns();
	return learn_half(&flow->in, pair ? &pair->out : NULL, cfg, &slot, &p, tracking,
			  reference(index, *(volatile __u32 *)&pod->generation), 0, translated,
			  count);
}

char _license[] SEC("license") = "Dual BSD/GPL";
