# SPDX-License-Identifier: Apache-2.0
"""What the plane is told of uplink and tunnel, and what is refused with which words."""

from dataclasses import replace
from ipaddress import ip_address

import pytest

from fabric_agent.node.settings import settings
from fabric_agent.node.state import State
from oncache.core import config
from oncache.core.errors import OncacheError
from oncache.core.net import Df, Link
from tests.unit.node_facts import (
    CONFIG,
    TUNNEL,
    TUNNEL_LINK,
    UPLINK,
    UPLINK_LINK,
    VXLAN,
    address,
    host,
)

RANGE = (32768, 60999)


def having(*links: Link) -> State:
    state = host()
    return replace(state, links={**state.links, **{each.index: each for each in links}})


def tunnelled(**changes: object) -> State:
    return having(replace(TUNNEL_LINK, tunnel=replace(VXLAN, **changes)))  # type: ignore[arg-type]


def test_a_flannel_host() -> None:
    told = settings(CONFIG, host(), RANGE)
    assert (told.uplink, told.tunnel, told.vni, told.port) == (UPLINK, TUNNEL, 1, 8472)
    assert (told.port_min, told.port_max) == RANGE
    assert told.local == ip_address("192.0.2.1")
    assert told.mtu == 1450
    assert (told.tos_inherit, told.ttl_inherit, told.df_inherit) == (False, False, False)
    assert (told.lease_seconds, told.mark_mask) == (10.0, 0xFF)


def test_the_devices_attributes_are_followed() -> None:
    state = tunnelled(port_min=100, port_max=200, tos_inherit=True, ttl_inherit=True, df=Df.INHERIT)
    told = settings(CONFIG, state, RANGE)
    assert (told.port_min, told.port_max) == (100, 200)
    assert told.tos_inherit
    assert told.ttl_inherit
    assert told.df_inherit


def test_without_a_local_address_it_is_the_uplinks() -> None:
    state = replace(
        tunnelled(local=None),
        addresses=frozenset(
            {
                address(UPLINK, "192.0.2.9/24", primary=False),
                address(UPLINK, "192.0.2.20/24"),
                address(UPLINK, "192.0.2.3/24", usable=False),
                address(UPLINK, "169.254.0.1/16", universe=False),
                address(UPLINK, "2001:db8::1/64"),
                address(TUNNEL, "10.1.0.0/32"),
            }
        ),
    )
    assert settings(CONFIG, state, RANGE).local == ip_address("192.0.2.20")


def test_a_tunnel_bound_to_no_device_is_taken_at_its_word() -> None:
    state = having(replace(TUNNEL_LINK, lower=None))
    assert settings(CONFIG, state, RANGE).uplink == UPLINK


def test_an_mtu_that_just_fits() -> None:
    assert settings(CONFIG, having(replace(UPLINK_LINK, mtu=1500)), RANGE).mtu == 1450


# 20 bytes more outside leave 20 less inside.
SIX = replace(TUNNEL_LINK, mtu=1430, tunnel=replace(VXLAN, local=ip_address("2001:db8::1")))


def test_a_tunnel_over_ipv6() -> None:
    told = settings(CONFIG, having(SIX), RANGE)
    assert told.local == ip_address("2001:db8::1")
    assert told.mtu == 1430
    assert (told.zero_sum6_tx, told.zero_sum6_rx) == (False, False)


@pytest.mark.parametrize(("sent", "taken"), [(True, False), (False, True)])
def test_checksums_over_ipv6_follow_the_device(sent: bool, taken: bool) -> None:
    assert SIX.tunnel is not None
    tunnel = replace(SIX.tunnel, zero_csum6_tx=sent, zero_csum6_rx=taken)
    told = settings(CONFIG, having(replace(SIX, tunnel=tunnel)), RANGE)
    assert (told.zero_sum6_tx, told.zero_sum6_rx) == (sent, taken)


def without(index: int) -> State:
    state = host()
    return replace(state, links={i: each for i, each in state.links.items() if i != index})


REFUSED = [
    ("no uplink", without(UPLINK), 4, ["und0", "does not exist"]),
    ("no tunnel", without(TUNNEL), 4, ["flannel.1", "does not exist"]),
    (
        "another kind",
        having(replace(TUNNEL_LINK, kind="bridge", tunnel=None)),
        2,
        ["flannel.1", "bridge", "vxlan"],
    ),
    ("external", tunnelled(collect_metadata=True), 4, ["flannel.1", "external"]),
    ("gbp", tunnelled(gbp=True), 4, ["group policy"]),
    ("gpe", tunnelled(gpe=True), 4, ["protocol extension"]),
    ("label", tunnelled(label_inherit=True), 4, ["flow label"]),
    ("another uplink", having(replace(TUNNEL_LINK, lower=77)), 2, ["flannel.1", "und0"]),
    ("another namespace", having(replace(TUNNEL_LINK, lower_nsid=3)), 4, ["namespace"]),
    ("too large", having(replace(UPLINK_LINK, mtu=1499)), 4, ["1450", "1499"]),
    ("IPv6 and too large", having(replace(SIX, mtu=1431)), 4, ["1431", "70 bytes", "1500"]),
    (
        "IPv6 without a local address",
        tunnelled(local=None, remote=ip_address("2001:db8::2")),
        4,
        ["IPv6", "no local address"],
    ),
    (
        "no address",
        replace(tunnelled(local=None), addresses=frozenset()),
        4,
        ["und0", "no global IPv4 address"],
    ),
]


@pytest.mark.parametrize(
    ("state", "code", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_refusals_name_what_is_wrong(state: State, code: int, words: list[str]) -> None:
    with pytest.raises(OncacheError) as caught:
        settings(CONFIG, state, RANGE)
    assert caught.value.exit_code == code
    assert caught.value.hint
    for word in words:
        assert word in caught.value.message


def test_swarm_is_named_where_it_may_be_meant() -> None:
    with pytest.raises(OncacheError) as caught:
        settings(CONFIG, without(TUNNEL), RANGE)
    assert "Docker swarm" in caught.value.hint


def test_the_built_in_overlay_is_read_like_any_other() -> None:
    own = config.parse(
        "{node: {uplink: und0}, overlay: {builtin: {vni: 1, pod_cidr: 10.1.0.0/24, peers: []}}}"
    )
    state = having(replace(TUNNEL_LINK, name="oncache0"))
    assert settings(own, state, RANGE).tunnel == TUNNEL
