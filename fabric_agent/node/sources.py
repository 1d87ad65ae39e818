# SPDX-License-Identifier: Apache-2.0
"""Where the agent's knowledge comes from: rtnetlink, as snapshots and as events."""

from fabric_agent.node import state as states
from fabric_agent.node.state import State
from oncache.core.netlink import Events, Netlink


async def catch_up(state: State, netlink: Netlink, events: Events) -> State:
    """Read what ``state`` knows to be out of date, until there is nothing left."""
    while True:
        if state.lost:
            state = states.with_snapshot(state, await netlink.snapshot())
        for index in state.doubtful:
            state = states.with_device(state, index, await netlink.link(index))
        state = states.without_forgotten(state)
        # Followed before they are read: nothing can fall between the two.
        events.followed = states.far_ends(state)
        for nsid in states.unread(state):
            inside = await netlink.links(nsid), await netlink.addresses(nsid)
            state = states.with_namespace(state, nsid, *inside)
        if not state.namespaces.keys() <= state.names.keys():
            names = {**state.names, **await netlink.names(known=frozenset(state.names.values()))}
            unnamed = dict.fromkeys(state.namespaces.keys() - names.keys(), "")
            state = states.with_names(state, {**unnamed, **names})
        if not (state.lost or state.doubtful or states.unread(state)):
            return state
