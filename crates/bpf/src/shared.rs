//! The structures of `c/shared.h`, byte for byte; both sides assert their sizes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Slots in one half of a service's placement table.
pub const PLACEMENT_SLOTS: usize = 1024;
/// Services one node can serve.
pub const MAX_SERVICES: usize = 64;
/// Nodes of a group; ids run from 1 to `MAX_NODES - 1`.
pub const MAX_NODES: usize = 256;
/// The mark of packets that are for a node's stack although their address is another's: see `c/shared.h`.
pub const PRIVATE_MARK: u32 = 0x686f_6c64;
/// Convoys; they are numbered from 1 on.
pub const MAX_CONVOYS: usize = 256;
/// Flows that can be held at a time.
pub const MAX_HOLD_SLOTS: u32 = 65536;

macro_rules! shared {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }
    };
}

shared!(
    /// A flow; local is the service's side. IPv4 as mapped IPv6, ports in network order.
    FlowKey {
        /// Service address.
        local: [u8; 16],
        /// Client address.
        remote: [u8; 16],
        /// Service port, network order.
        local_port: [u8; 2],
        /// Client port, network order.
        remote_port: [u8; 2],
        /// IP protocol number (6 or 17).
        protocol: u8,
        /// Zero.
        pad: [u8; 3],
    }
);

shared!(
    /// What a handshake has left, for a connection that is put into a listener's queue.
    Handshake {
        /// The peer's last timestamp; 0: not known.
        peer_timestamp: u32,
        /// Our next timestamp.
        timestamp: u32,
        /// The peer's MSS.
        mss: u16,
        /// Our window scale.
        receive_scale: u8,
        /// The peer's window scale.
        send_scale: u8,
        /// Not 0: ECN was negotiated.
        ecn: u8,
        /// Not 0: window scales were negotiated.
        scales: u8,
        /// Not 0: selective acknowledgements were negotiated.
        sack: u8,
        /// Not 0: timestamps were negotiated.
        timestamps: u8,
        /// Not 0: our timestamps count microseconds.
        microseconds: u8,
        /// Zero.
        pad: [u8; 3],
        /// Sequence number of the packet that ends the handshake.
        sequence: u32,
    }
);

shared!(
    /// Where packets of a connection go whose other end has left its host.
    Translation {
        /// To this node.
        node: u16,
        /// Zero.
        pad: u16,
        /// How often the other end had moved before the move that led there.
        hops: u32,
    }
);

shared!(
    /// What this node may do with a flow.
    FlowValue {
        /// Ownership epoch.
        epoch: u32,
        /// A [`FlowState`]; 0 in a change: the convoy alone is to be set.
        state: u8,
        /// The convoy whose state it has, if that has one; 0: none.
        convoy: u8,
        /// The other node of a handoff.
        peer: u16,
        /// Index into the hold counters.
        hold_slot: u32,
        /// Last packet, seconds of the monotonic clock.
        seen_s: u32,
    }
);

shared!(
    /// The state that all flows of a process that moves have.
    Convoy {
        /// A [`FlowState`]; 0: each flow has its own.
        state: u8,
        /// By so much their epochs are later than their own values say.
        ahead: u8,
        /// The other node of the move.
        peer: u16,
        /// Zero.
        pad: u32,
    }
);

shared!(
    /// The holder's record of a flow.
    Record {
        /// Ownership epoch.
        epoch: u32,
        /// Owner; the donor while in transit.
        owner: u16,
        /// Acceptor, while in transit.
        acceptor: u16,
        /// [`RECORD_OWNED`] or [`RECORD_TRANSIT`].
        state: u8,
        /// Not 0: while in transit, packets go by way of the donor.
        by_donor: u8,
        /// Zero.
        pad: [u8; 2],
    }
);

/// [`Record::state`]: one node owns the flow.
pub const RECORD_OWNED: u8 = 1;
/// [`Record::state`]: the flow is in transit and has no owner.
pub const RECORD_TRANSIT: u8 = 2;

shared!(
    /// A service's address and port; port 0 stands for the address alone.
    ServiceKey {
        /// Service address.
        address: [u8; 16],
        /// Service port, network order.
        port: [u8; 2],
        /// IP protocol number.
        protocol: u8,
        /// Zero.
        pad: u8,
    }
);

shared!(
    /// Where new flows of a service go.
    Service {
        /// Row of the placement table.
        index: u16,
        /// Which half of the row is current.
        generation: u8,
        /// Not 0: the whole service belongs to `port_owner` (paper 002, section II-A).
        by_port: u8,
        /// Owner with `by_port`.
        port_owner: u16,
        /// Not 0: the other half holds the table before the last change.
        has_previous: u8,
        /// Zero.
        pad: u8,
    }
);

shared!(
    /// Another node that has, or had, the server of a service.
    Successor {
        /// The node.
        node: u16,
        /// `SUCCESSOR_SERVES` and the like.
        role: u16,
    }
);

/// New clients go to the node, unless somebody listens here.
pub const SUCCESSOR_SERVES: u16 = 0;
/// New clients go to the node in any case: what listens here ends handshakes that had begun, or does not run yet.
pub const SUCCESSOR_ALONE: u16 = 1;
/// The server has come here from the node, where handshakes that had begun there end.
pub const SUCCESSOR_BEFORE: u16 = 2;

shared!(
    /// How a node is reached.
    Node {
        /// Node address, mapped when IPv4.
        address: [u8; 16],
        /// Link address of the next hop.
        link: [u8; 6],
        /// Our link address towards it.
        own_link: [u8; 6],
        /// Interface towards it.
        ifindex: u32,
        /// [`NODE_KNOWN`], [`NODE_ENCAP`], [`NODE_V6`], [`NODE_HOLDER`].
        flags: u16,
        /// Zero.
        pad: u16,
    }
);

/// [`Node::flags`]: the entry is filled.
pub const NODE_KNOWN: u16 = 1;
/// [`Node::flags`]: reached by encapsulation.
pub const NODE_ENCAP: u16 = 2;
/// [`Node::flags`]: its address is IPv6.
pub const NODE_V6: u16 = 4;
/// [`Node::flags`]: it holds the steering table.
pub const NODE_HOLDER: u16 = 8;

shared!(
    /// What the programs need to know of their node.
    Config {
        /// This node's id.
        own_id: u16,
        /// [`REACH_STEER`] or [`REACH_BROADCAST`].
        reach: u8,
        /// Not 0: this node holds the steering table.
        holder: u8,
        /// The TUN that holds packets in transit.
        hold_ifindex: u32,
        /// Largest MSS a SYN-ACK over IPv4 offers, bytes; 0: no limit.
        mss_clamp_v4: u16,
        /// The same over IPv6.
        mss_clamp_v6: u16,
        /// MTU of the node's interface, bytes of the network layer.
        mtu: u16,
        /// Link address the pool shares (broadcast).
        shared_link: [u8; 6],
        /// 0: the filters fail closed.
        ready: u32,
    }
);

/// [`Config::reach`]: the holder forwards each flow to its owner.
pub const REACH_STEER: u8 = 0;
/// [`Config::reach`]: every node receives every packet.
pub const REACH_BROADCAST: u8 = 1;

shared!(
    /// What the programs tell the daemon.
    Event {
        /// The flow.
        flow: FlowKey,
        /// Its epoch.
        epoch: u32,
        /// An `EVENT_` constant.
        kind: u8,
        /// For [`EVENT_CLOSED`] the TCP state it came from.
        detail: u8,
        /// Zero.
        pad: [u8; 2],
    }
);

/// A handshake completed, or a datagram was answered: the flow is ours.
pub const EVENT_ESTABLISHED: u8 = 1;
/// The flow's socket closed.
pub const EVENT_CLOSED: u8 = 2;
/// The flow's socket has closed, and a new connection between the same ports has gone to the node where the server is now.
pub const EVENT_FOLLOWED: u8 = 3;

shared!(
    /// Congestion state for a socket about to be restored.
    Congestion {
        /// Congestion window, segments.
        cwnd: u32,
        /// Slow-start threshold, segments.
        ssthresh: u32,
        /// Not 0: ECN was negotiated.
        ecn: u32,
    }
);

/// What this node may do with a flow (`enum flow_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FlowState {
    /// Ours: both directions pass.
    Owned = 1,
    /// Ours, a handoff is being prepared: out-of-order segments are copied to the hold.
    Prepared = 2,
    /// Donor: nothing leaves, what arrives goes on to the acceptor.
    TransitOut = 3,
    /// Acceptor: nothing leaves, what arrives is held.
    TransitIn = 4,
    /// Ours; what arrives is held until the hold is empty.
    Flushing = 5,
    /// Was ours: nothing leaves, what arrives goes on to the new owner.
    Moved = 6,
    /// The socket closed; its last packets still pass.
    Closing = 7,
    /// Ours for a moment still: what brings data goes on to the acceptor, what acknowledges passes.
    Leaving = 8,
}

impl FlowState {
    /// The state a map value holds; `None` for a number no program writes.
    #[must_use]
    pub fn from_raw(raw: u8) -> Option<Self> {
        use FlowState::{
            Closing, Flushing, Leaving, Moved, Owned, Prepared, TransitIn, TransitOut,
        };
        [
            Owned, Prepared, TransitOut, TransitIn, Flushing, Moved, Closing, Leaving,
        ]
        .into_iter()
        .find(|state| *state as u8 == raw)
    }
}

impl FlowKey {
    /// The key of a flow between two socket addresses; `protocol` is the IP protocol number.
    #[must_use]
    pub fn new(protocol: u8, local: SocketAddr, remote: SocketAddr) -> Self {
        Self {
            local: mapped(local.ip()),
            remote: mapped(remote.ip()),
            local_port: local.port().to_be_bytes(),
            remote_port: remote.port().to_be_bytes(),
            protocol,
            pad: [0; 3],
        }
    }

    /// The service's side.
    #[must_use]
    pub fn local(&self) -> SocketAddr {
        SocketAddr::new(unmapped(self.local), u16::from_be_bytes(self.local_port))
    }

    /// The client's side.
    #[must_use]
    pub fn remote(&self) -> SocketAddr {
        SocketAddr::new(unmapped(self.remote), u16::from_be_bytes(self.remote_port))
    }
}

/// An address as the maps have it: IPv4 as mapped IPv6.
#[must_use]
pub fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address behind the maps' form.
#[must_use]
pub fn unmapped(octets: [u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(octets);
    v6.to_ipv4_mapped()
        .map_or(IpAddr::V6(v6), |v4: Ipv4Addr| IpAddr::V4(v4))
}

/// Names of the counters, in the order of `enum counter`; those of drops begin with `drop_`.
pub const COUNTER_NAMES: [&str; 24] = [
    "steered_link",
    "steered_encap",
    "steered_self",
    "decapsulated",
    "held",
    "forwarded_straggler",
    "copied_out_of_order",
    "too_big_sent",
    "passed_previous",
    "events_lost",
    "drop_egress_transit",
    "drop_egress_not_owner",
    "drop_no_socket",
    "drop_other_owner",
    "drop_transit_elsewhere",
    "drop_no_node",
    "drop_fragment_without_first",
    "drop_malformed",
    "drop_not_a_peer",
    "drop_not_ready",
    "drop_too_big",
    "drop_flows_full",
    "drop_not_a_service",
    "drop_hops_used_up",
];

const _: () = {
    assert!(size_of::<FlowKey>() == 40);
    assert!(size_of::<Convoy>() == 8);
    assert!(size_of::<FlowValue>() == 16);
    assert!(size_of::<Record>() == 12);
    assert!(size_of::<ServiceKey>() == 20);
    assert!(size_of::<Service>() == 8);
    assert!(size_of::<Node>() == 36);
    assert!(size_of::<Translation>() == 8);
    assert!(size_of::<Config>() == 24);
    assert!(size_of::<Event>() == 48);
    assert!(size_of::<Handshake>() == 24);
    assert!(size_of::<Successor>() == 4);
};
