# SPDX-License-Identifier: Apache-2.0
"""Takes one check after another out of the programs, and expects a test to notice.

    python -m tests.mutation [NAME ...]          the last line is one JSON object

The tree is never touched: a mutant is a copy of it with one check less, whose programs are built
and whose test is run. A snippet that is not in the source exactly once is an error.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("bench", "bpf", "fabric_agent", "netns_tests", "oncache", "tests", "pyproject.toml")
CFLAGS = [
    "-O2",
    "-g",
    "-target",
    "bpf",
    "-mcpu=v3",
    f"-I/usr/include/{os.uname().machine}-linux-gnu",
]
WORKERS = 2

MAIN = "oncache.bpf.c"
PACKET, TUNNEL, RING = "lib/packet.h", "lib/tunnel.h", "lib/ring.h"
PROGRAMS = "tests/bpf/test_oncache_programs.py::test_"
CHECKS = "tests/bpf/test_oncache_checks.py::test_"
IP6 = "tests/bpf/test_oncache_ip6.py::test_"
FRAMES = "netns_tests/test_short_frames.py::test_"
POD = PROGRAMS + "from_pod_leaves_it_to_the_base_path"
WIRE = PROGRAMS + "from_wire_leaves_it_to_the_base_path"


@dataclass(frozen=True)
class Edit:
    """`snippet`, once in `file` below bpf/, becomes `instead`."""

    file: str
    snippet: str
    instead: str = ""


@dataclass(frozen=True)
class Mutant:
    """A check that is taken out, and the test that must fail then."""

    name: str
    test: str
    edits: tuple[Edit, ...]


def without(name: str, test: str, file: str, snippet: str, instead: str = "") -> Mutant:
    return Mutant(name, test, (Edit(file, snippet, instead),))


MUTANTS = (
    # --- the packet
    without(
        "fragment",
        f"{POD}[first fragment]",
        PACKET,
        "if (p->ip4.frag_off & bpf_htons(IP4_MF | IP4_OFFSET)) {",
        "if (0) {",
    ),
    without(
        "later fragment",
        f"{POD}[last fragment]",
        PACKET,
        "p->ip4.frag_off & bpf_htons(IP4_MF | IP4_OFFSET)",
        "p->ip4.frag_off & bpf_htons(IP4_MF)",
    ),
    without(
        "options",
        f"{POD}[router alert]",
        PACKET,
        "if (options) {\n\t\t*odd = &count->base_path.ip_options;",
        "if (options) {",
    ),
    without("version", f"{POD}[version 5]", PACKET, "p->ip4.version_ihl >> 4 != 4 || "),
    without(
        "udp length",
        f"{POD}[udp length wrong]",
        PACKET,
        "if (bpf_ntohs(udp->len) != p->length - p->header)",
        "if (0)",
    ),
    without(
        "tcp header too short",
        f"{POD}[tcp header too short]",
        PACKET,
        "if (tcp->doff < 5 << 4)",
        "if (0)",
    ),
    without(
        "tcp header too long",
        f"{POD}[tcp header too long]",
        PACKET,
        "if (!reason && p->header > p->length)",
        "if (0)",
    ),
    without("icmp code", f"{POD}[echo with a code]", PACKET, " || icmp->code)", ")"),
    without(
        "who asks",
        f"{POD}[the peer's ping answered]",
        PACKET,
        "asks = (icmp->type == ask) == (journey == FROM_POD);",
        "asks = journey == FROM_POD;",
    ),
    without(
        "IPv6 extension headers",
        f"{IP6}extension_headers_take_the_base_path[hop-by-hop-6in4]",
        PACKET,
        "*odd = &count->base_path.ip_options;\n\t\textension = ",
        "extension = ",
    ),
    without(
        "IPv6 fragment",
        f"{IP6}extension_headers_take_the_base_path[first fragment-6in4]",
        PACKET,
        "*odd = &count->base_path.fragment;\n\tfragment = ",
        "fragment = ",
    ),
    without(
        "mapped address",
        f"{IP6}a_mapped_address_is_no_ipv4_flow[6in4]",
        PACKET,
        "if (address_is_ip4(&p->key.local) || address_is_ip4(&p->key.remote))",
        "if (0)",
    ),
    without(
        "tcp flags",
        f"{POD}[all flags]",
        MAIN,
        "if (p->key.protocol == IPPROTO_TCP &&\n\t    (p->tcp_flags & "
        "(TCP_SYN | TCP_FIN | TCP_RST | TCP_ACK)) != TCP_ACK)",
        "if (0)",
    ),
    without(
        "length",
        f"{CHECKS}a_pods_frame_that_is_not_as_long_as_it_says[bytes behind]",
        MAIN,
        "if (!reason && skb->len != p.length + sizeof(struct eth))",
        "if (0)",
    ),
    without(
        "vlan from pod",
        f"{FRAMES}a_vlan_tag_keeps_a_frame_on_the_base_path[from_pod]",
        MAIN,
        "if (skb->vlan_present)\n\t\treturn leave(&count->base_path.vlan);\n"
        "\tif (cursor_start(skb, &c, POD_HEADERS))",
        "if (cursor_start(skb, &c, POD_HEADERS))",
    ),
    without(
        "vlan from wire",
        f"{FRAMES}a_vlan_tag_keeps_a_frame_on_the_base_path[from_wire]",
        MAIN,
        "if (skb->vlan_present)\n\t\treturn leave(&count->base_path.vlan);\n"
        "\tif (cursor_start(skb, &c, WIRE_HEADERS))",
        "if (cursor_start(skb, &c, WIRE_HEADERS))",
    ),
    # --- the tunnel
    without(
        "length on arrival",
        f"{CHECKS}an_arriving_frame_that_is_not_as_long_as_it_says[bytes behind]",
        MAIN,
        "skb->len != (__u32)p.length + outer.length ||\n\t\t\t",
    ),
    without(
        "length of the tunnel packet",
        f"{CHECKS}an_arriving_frame_that_is_not_as_long_as_it_says[tunnel]",
        MAIN,
        " ||\n\t\t\touter.udp_length != p.length + UDP_OVERHEAD))",
        "))",
    ),
    without(
        "outer udp length",
        f"{CHECKS}an_arriving_frame_that_is_not_as_long_as_it_says[udp]",
        TUNNEL,
        "if (bpf_ntohs(udp->len) != o->udp_length)",
        "if (0)",
    ),
    without("vni", f"{WIRE}[another vni]", TUNNEL, "if (vxlan->vni != cfg->vni)", "if (0)"),
    without(
        "tunnel port",
        f"{WIRE}[another port]",
        TUNNEL,
        "if (!udp || udp->dport != cfg->port)",
        "if (!udp)",
    ),
    without("pkt_type", f"{WIRE}[another mac]", TUNNEL, "skb->pkt_type || "),
    without(
        "outer destination",
        f"{WIRE}[another address]",
        TUNNEL,
        "!address_equal(&p->key.local, &cfg->local) || ",
    ),
    without("outer first fragment", f"{WIRE}[outer first fragment]", TUNNEL, "o->fragment ||"),
    without(
        "vxlan flags",
        f"{WIRE}[vxlan flags]",
        TUNNEL,
        " ||\n\t    vxlan->flags != bpf_htonl(VXLAN_FLAGS))\n\t\treturn &count->base_path.outer;",
        ")\n\t\treturn &count->base_path.outer;",
    ),
    without(
        "mapped outer address",
        f"{CHECKS}a_mapped_outer_source_is_no_ipv4_peer",
        TUNNEL,
        "if (address_is_ip4(&ip->saddr) || address_is_ip4(&ip->daddr))",
        "if (0)",
    ),
    without(
        "peer",
        f"{WIRE}[stranger]",
        MAIN,
        "if (!address_equal(&half->peer, &p->peer))",
        "if (0)",
    ),
    without(
        "known peer",
        f"{WIRE}[stranger, unknown flow]",
        MAIN,
        "if (!cfg || !peer_known(&p->peer))",
        "if (!cfg)",
    ),
    without(
        "ecn odd",
        f"{WIRE}[ce on not-ect]",
        MAIN,
        "if (tunnel_ecn(o->tos, p->tos) == ECN_ODD)",
        "if (0)",
    ),
    without(
        "checksum",
        f"{WIRE}[only the outer checksum]",
        MAIN,
        "if (o->sum && !p->l4_check)",
        "if (0)",
    ),
    without(
        "no checksum over IPv6",
        f"{IP6}no_checksum_over_ipv6_is_the_base_paths_to_refuse[6in6]",
        MAIN,
        "if (!o->sum && o->is_ip6 && !cfg->zero_sum6_rx)",
        "if (0)",
    ),
    without(
        "checksum of segments",
        f"{IP6}segments_over_ipv6_have_no_checksum_to_derive[4in6]",
        MAIN,
        "(skb->gso_size || !p->l4_check)",
        "!p->l4_check",
    ),
    # --- whose it is
    without(
        "spoof",
        f"{PROGRAMS}a_foreign_source_is_neither_fast_nor_noted",
        MAIN,
        "if (!pod_owns(pod, &p->key.local))",
        "if (0)",
    ),
    without(
        "foreign device",
        f"{PROGRAMS}packets_of_one_pod_do_not_use_anothers_entries",
        MAIN,
        "if (pod->ifindex != skb->ifindex) /* the neighbour's flow, not ours */",
        "if (0)",
    ),
    without(
        "foreign end of a flow",
        f"{CHECKS}another_pod_does_not_end_a_flow[FA]",
        MAIN,
        "if (journey == FROM_POD && (!pod || pod->ifindex != skb->ifindex))",
        "if (0)",
    ),
    without(
        "stranger's end of a flow",
        f"{CHECKS}a_stranger_does_not_end_a_flow[S]",
        MAIN,
        "if (journey == FROM_WIRE && flow->in.seen && !address_equal(&flow->in.peer, &p->peer))",
        "if (0)",
    ),
    # --- the path
    without(
        "size",
        f"{POD}[too big]",
        MAIN,
        "if (size > cfg->mtu || (state->mtu && size > state->mtu) ||",
        "if ((state->mtu && size > state->mtu) ||",
    ),
    without(
        "mtu of a path",
        f"{PROGRAMS}a_smaller_mtu_of_one_path_counts",
        MAIN,
        "(state->mtu && size > state->mtu)",
        "0",
    ),
    without(
        "size on arrival",
        f"{WIRE}[too big for the pod]",
        MAIN,
        "if (packet_size(skb, p) > cfg->mtu)",
        "if (0)",
    ),
    without(
        "ttl",
        f"{POD}[ttl 1]",
        MAIN,
        "if (p->ttl <= half->hops)\n\t\treturn &count->base_path.ttl;\n\tif (!mac_equal",
        "if (!mac_equal",
    ),
    without(
        "ttl on arrival",
        f"{WIRE}[inner ttl 1]",
        MAIN,
        "if (p->ttl <= half->hops)\n\t\treturn &count->base_path.ttl;\n\tif (tunnel_ecn",
        "if (tunnel_ecn",
    ),
    without(
        "mac",
        f"{POD}[another gateway]",
        MAIN,
        "if (!mac_equal(p->to_mac, half->to_mac))\n\t\treturn &count->base_path.mac;\n\t/* UDP",
        "/* UDP",
    ),
    without(
        "inner mac",
        f"{WIRE}[inner mac]",
        MAIN,
        "if (!mac_equal(p->to_mac, half->to_mac))\n\t\treturn &count->base_path.mac;\n\tif (packet",
        "if (packet",
    ),
    # --- the flow
    without(
        "closed",
        f"{PROGRAMS}fin_and_rst_end_a_flow[out-fin]",
        MAIN,
        "if (flow->closed)\n\t\treturn leave(&count->base_path.closed);\n"
        "\tif (reason)\n\t\treturn pod_miss",
        "if (reason)\n\t\treturn pod_miss",
    ),
    without(
        "reset", f"{PROGRAMS}fin_and_rst_end_a_flow[out-rst]", MAIN, "if (flow->reset)", "if (0)"
    ),
    without(
        "a new connection",
        f"{PROGRAMS}a_new_connection_of_the_same_tuple_starts_from_nothing",
        MAIN,
        "if (packet_opens(p)) {",
        "if (0) {",
    ),
    without(
        "both directions",
        f"{PROGRAMS}one_direction_alone_is_not_enough",
        MAIN,
        "if (!half->ready)",
        "if (0)",
    ),
    without(
        "lease",
        f"{PROGRAMS}the_lease_sends_a_packet_by_the_base_path",
        MAIN,
        "if (now - half->learned > cfg->lease)",
        "if (0)",
    ),
    without(
        "order",
        f"{PROGRAMS}not_fast_while_an_earlier_packet_is_on_its_way",
        MAIN,
        "if (half->sent != half->left)",
        "if (0)",
    ),
    without(
        "order after what cannot be followed",
        f"{PROGRAMS}what_cannot_be_followed_holds_its_flow_back_once[fragment]",
        MAIN,
        "\thalf_unsettle(half);\n\tif (p->key.protocol == IPPROTO_TCP)\n",
        "\tif (p->key.protocol == IPPROTO_TCP)\n",
    ),
    without(
        "order after a packet there was no room for",
        f"{CHECKS}nothing_overtakes_what_the_kernel_refused_room_for[out]",
        MAIN,
        "PUSH_FLAGS | flags)) {\n\t\thalf_unsettle(half);",
        "PUSH_FLAGS | flags)) {",
    ),
    without(
        "order after one on arrival",
        f"{CHECKS}nothing_overtakes_what_the_kernel_refused_room_for[in]",
        MAIN,
        "-(__s32)overhead, BPF_ADJ_ROOM_MAC, flags)) {\n\t\thalf_unsettle(half);",
        "-(__s32)overhead, BPF_ADJ_ROOM_MAC, flags)) {",
    ),
    # --- validity
    without(
        "generation of everything",
        f"{PROGRAMS}invalidation_is_at_the_next_packet[all]",
        MAIN,
        "half->generation != cfg->generation || ",
    ),
    without(
        "generation of a pod",
        f"{PROGRAMS}invalidation_is_at_the_next_packet[pod]",
        MAIN,
        " || half->pod >> 32 != pod->generation",
    ),
    without(
        "generation of a path",
        f"{PROGRAMS}invalidation_is_at_the_next_packet[path]",
        MAIN,
        "if (half->path >> 32 != state->generation)",
        "if (0)",
    ),
    without(
        "deadline",
        f"{PROGRAMS}the_dead_mans_switch",
        MAIN,
        "if (!config_alive(cfg, now))",
        "if (0)",
    ),
    # --- learning
    without(
        "paused",
        f"{PROGRAMS}nothing_is_learned_while_paused",
        MAIN,
        "if (!cfg->learning || ",
        "if (",
    ),
    Mutant(
        "epoch",
        f"{PROGRAMS}a_packet_of_the_old_state_cannot_install",
        (
            Edit(MAIN, "slot->epoch != cfg->epoch ||"),
            Edit(MAIN, "if (*(volatile const __u32 *)&cfg->epoch != slot->epoch)", "if (0)"),
        ),
    ),
    without(
        "journey",
        f"{PROGRAMS}a_mark_of_the_other_journey_teaches_nothing",
        MAIN,
        " || slot->journey != journey)",
        ")",
    ),
    without(
        "mark",
        f"{PROGRAMS}the_second_hook_takes_the_mark_off",
        RING,
        "skb->mark &= ~cfg->mark_mask;",
    ),
    without(
        "unused slot",
        f"{CHECKS}a_mark_that_names_no_slot_is_left_as_it_was",
        RING,
        "if (!slot || !slot->number)",
        "if (!slot)",
    ),
    without(
        "translated",
        f"{PROGRAMS}a_translated_packet_teaches_nothing",
        MAIN,
        "if (*translated && *tracking == UNTRACKED)",
        "if (0)",
    ),
    without(
        "hops",
        f"{CHECKS}a_packet_with_more_hops_left_than_it_had_teaches_nothing",
        MAIN,
        "if (slot->ttl < p->ttl || ",
        "if (",
    ),
    without(
        "foreign pod",
        f"{CHECKS}only_the_pod_itself_teaches[another pod's address]",
        MAIN,
        "!pod_owns(pod, &p.key.local) ||",
    ),
    without(
        "foreign pod's mac",
        f"{CHECKS}only_the_pod_itself_teaches[another pod's mac]",
        MAIN,
        " ||\n\t    !mac_equal(p.to_mac, pod->mac))",
        ")",
    ),
    without(
        "tunnel's own address",
        f"{PROGRAMS}only_our_tunnel_teaches[another source]",
        MAIN,
        "outer->ip.frag_off & bpf_htons(IP4_MF | IP4_OFFSET) ||\n"
        "\t    !address_equal(&source, &cfg->local) ||",
        "outer->ip.frag_off & bpf_htons(IP4_MF | IP4_OFFSET) ||",
    ),
    without(
        "tunnel's own vni",
        f"{PROGRAMS}only_our_tunnel_teaches[another vni]",
        MAIN,
        " &&\n\t       vxlan->vni == cfg->vni;",
        ";",
    ),
    without(
        "conntrack",
        f"{CHECKS}only_established_flows_teach[udp unanswered]",
        MAIN,
        "if (*tracking == NOT_ESTABLISHED)",
        "if (0)",
    ),
    without(
        "conntrack's tcp state",
        f"{CHECKS}only_established_flows_teach[half closed]",
        "lib/conntrack.h",
        "state = conntrack_tcp(ct->proto.tcp.state);",
        "state = ESTABLISHED;",
    ),
    without(
        "conntrack's translation",
        f"{CHECKS}only_established_flows_teach[hidden nat]",
        "lib/conntrack.h",
        " ||\n\t    !(status & CT_DST_NAT) != !translated)",
        ")",
    ),
    without(
        "the end of the handshake",
        f"{CHECKS}the_answer_to_a_handshake_teaches_but_is_not_enough",
        "lib/conntrack.h",
        "return state == CT_TCP_SYN_RECV ? ANSWERED : NOT_ESTABLISHED;",
        "return state == CT_TCP_SYN_RECV ? ESTABLISHED : NOT_ESTABLISHED;",
    ),
)


class Rotten(Exception):
    """A mutant that no longer fits the source."""


def mutate(bpf: Path, mutant: Mutant) -> None:
    """Apply a mutant to a copy of bpf/; Rotten if it is not exactly there."""
    for edit in mutant.edits:
        path = bpf / edit.file
        text = path.read_text(encoding="utf-8")
        if text.count(edit.snippet) != 1:
            raise Rotten(
                f"{mutant.name}: {edit.file} has {text.count(edit.snippet)} times {edit.snippet!r}"
            )
        path.write_text(text.replace(edit.snippet, edit.instead), encoding="utf-8")


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """What building and testing the programs takes."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        home = Path(folder)
        for name in COPIED:
            copy = shutil.copy if (ROOT / name).is_file() else shutil.copytree
            copy(ROOT / name, home / name)
        yield home


def build(home: Path) -> None:
    """The programs of a copy. Unused code is no error: a check less leaves some."""
    target = home / "oncache" / "bpf" / "oncache.bpf.o"
    command = ["clang", *CFLAGS, "-c", str(home / "bpf" / MAIN), "-o", str(target)]
    subprocess.run(command, check=True)
    subprocess.run(["llvm-strip", "-g", str(target)], check=True)


def pytest_says(home: Path, arguments: Iterable[str]) -> str:
    """What pytest prints in a copy of the tree: a line for each test that failed, and a sum."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def caught(mutant: Mutant) -> bool:
    """Whether the test fails. One that cannot even start has not noticed anything."""
    with copy_of_the_tree() as home:
        mutate(home / "bpf", mutant)
        build(home)
        said = pytest_says(home, [mutant.test])
    if "1 failed" not in said and "1 passed" not in said:
        raise Rotten(f"{mutant.name}: {mutant.test} neither failed nor passed:\n{said}")
    return "1 failed" in said


def require_all_pass(mutants: Sequence[Mutant]) -> None:
    """A test that fails without any mutant proves nothing."""
    with copy_of_the_tree() as home:
        build(home)
        said = pytest_says(home, sorted({mutant.test for mutant in mutants}))
    if "failed" in said or "error" in said.lower() or "passed" not in said:
        raise Rotten(f"the tests do not pass on the unchanged source:\n{said}")


def run(mutants: Sequence[Mutant]) -> list[str]:
    """The names of those that no test noticed."""
    survived = []
    with ThreadPoolExecutor(WORKERS) as pool:
        for mutant, noticed in zip(mutants, pool.map(caught, mutants), strict=True):
            print(f"{'caught' if noticed else 'SURVIVED':<9} {mutant.name}", flush=True)
            if not noticed:
                survived.append(mutant.name)
    return survived


def main(arguments: Sequence[str] = sys.argv[1:]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args(arguments).names
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    try:
        require_all_pass(mutants)
        survived = run(mutants)
    except Rotten as error:
        print(f"error: {error}\nnext: correct the table in tests/mutation.py", file=sys.stderr)
        return 2
    caught_ones = len(mutants) - len(survived)
    print(json.dumps({"removed": len(mutants), "caught": caught_ones, "survived": survived}))
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
