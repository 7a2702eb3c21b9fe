//! The structures of `c/shared.h`, byte for byte; both sides assert their sizes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Number of slots in one half of a service's placement table.
pub const PLACEMENT_SLOTS: usize = 1024;
/// Most services of one node.
pub const MAX_SERVICES: usize = 64;
/// Size of the table of paths to nodes: any number that a group can give has its place.
pub const MAX_NODES: usize = 65_536;
/// Maximum number of addresses of nodes from which encapsulated packets are accepted.
pub const MAX_NODE_ADDRESSES: usize = 8_192;
/// Mark of packets that this node's stack receives although their address belongs to another host: see `c/shared.h`.
pub const PRIVATE_MARK: u32 = 0x686f_6c64;
/// Size of the flow group table; flow groups are numbered from 1.
pub const MAX_FLOW_GROUPS: usize = 256;
/// Most flows that can be held at a time.
pub const MAX_HOLD_SLOTS: u32 = 65536;

/// The slot that counts the new clients in the hold: they wait for the contact node to serve.
pub const NEW_CLIENTS_SLOT: u32 = MAX_HOLD_SLOTS - 1;

/// Most new clients in the hold.
pub const NEW_CLIENTS_MAX: u16 = 4096;

macro_rules! shared {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }
    };
}

shared!(
    /// Key of a flow; local is the service's side. IPv4 as mapped IPv6, ports in network order.
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
    /// Results of a handshake, for a connection that is put into a listener's queue.
    Handshake {
        /// The peer's last timestamp; 0 if unknown.
        peer_timestamp: u32,
        /// Next timestamp of this side.
        timestamp: u32,
        /// The peer's MSS.
        mss: u16,
        /// Window scale of this side.
        receive_scale: u8,
        /// The peer's window scale.
        send_scale: u8,
        /// Nonzero if ECN was negotiated.
        ecn: u8,
        /// Nonzero if window scales were negotiated.
        window_scaling: u8,
        /// Nonzero if selective acknowledgements were negotiated.
        sack: u8,
        /// Nonzero if timestamps were negotiated.
        timestamps: u8,
        /// Nonzero if the timestamps of this side count microseconds.
        microseconds: u8,
        /// Zero.
        pad: [u8; 3],
        /// Sequence number of the packet that ends the handshake.
        sequence: u32,
    }
);

shared!(
    /// Destination of a connection's packets after its other end has moved away from its host.
    Translation {
        /// ID of the destination node.
        node: u16,
        /// Zero.
        pad: u16,
        /// Number of moves of the other end before the move to that node.
        hops: u32,
    }
);

shared!(
    /// State of a flow at this node.
    FlowValue {
        /// Ownership epoch.
        epoch: u32,
        /// A [`FlowState`]; 0 in a change that sets the flow group alone.
        state: u8,
        /// Flow group that overrides the state, if the group has one; 0 for none.
        flow_group: u8,
        /// The other node of a handoff.
        peer: u16,
        /// Index into the hold counters.
        hold_slot: u32,
        /// Time of the last packet, seconds of the monotonic clock.
        last_packet_s: u32,
    }
);

shared!(
    /// Common state of a flow group, all flows of a process that is moving.
    FlowGroup {
        /// A [`FlowState`]; 0 if each flow has its own.
        state: u8,
        /// Number added to the flows' own epochs.
        epoch_offset: u8,
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
        /// Nonzero if packets go via the donor while in transit.
        via_donor: u8,
        /// Zero.
        pad: [u8; 2],
    }
);

/// [`Record::state`]: one node owns the flow.
pub const RECORD_OWNED: u8 = 1;
/// [`Record::state`]: the flow is in transit and has no owner.
pub const RECORD_TRANSIT: u8 = 2;

shared!(
    /// Address and port of a service; port 0 stands for all ports of the address.
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

/// Flag of [`Service::flags`]: the other half of the row holds the table before the last change.
pub const HAS_PREVIOUS: u8 = 1;
/// Flag of [`Service::flags`]: the replicator of this node takes the packets without a record.
pub const IS_REPLICATED: u8 = 2;

shared!(
    /// Destination of new flows of a service.
    Service {
        /// Row of the placement table.
        index: u16,
        /// Current half of the row.
        generation: u8,
        /// Nonzero if the whole service belongs to `port_owner` (paper 002, section II-A).
        by_port: u8,
        /// Owner of the service with `by_port`.
        port_owner: u16,
        /// [`HAS_PREVIOUS`] and [`IS_REPLICATED`].
        flags: u8,
        /// Nonzero if the current half of the row names the node of this map.
        own_node_placed: u8,
    }
);

shared!(
    /// Another node that has, or had, the server of a service.
    Successor {
        /// ID of the node.
        node: u16,
        /// [`SUCCESSOR_FALLBACK`], [`SUCCESSOR_EXCLUSIVE`] or [`SUCCESSOR_PREVIOUS`].
        role: u16,
    }
);

/// [`Successor::role`]: the node gets new clients, unless a server listens here.
pub const SUCCESSOR_FALLBACK: u16 = 0;
/// [`Successor::role`]: the node gets new clients in any case; a listener here only completes handshakes in progress,
/// or does not run yet.
pub const SUCCESSOR_EXCLUSIVE: u16 = 1;
/// [`Successor::role`]: the server has moved here from the node, which completes its handshakes in progress.
pub const SUCCESSOR_PREVIOUS: u16 = 2;

shared!(
    /// Address of a node, and link-layer path to it.
    Node {
        /// Node address, mapped when IPv4.
        address: [u8; 16],
        /// Link address of the next hop.
        link: [u8; 6],
        /// Own link address towards the node.
        own_link: [u8; 6],
        /// Interface towards the node.
        ifindex: u32,
        /// [`NODE_KNOWN`], [`NODE_ENCAP`], [`NODE_V6`], [`NODE_HOLDER`].
        flags: u16,
        /// Zero.
        pad: u16,
    }
);

/// [`Node::flags`]: the entry is in use.
pub const NODE_KNOWN: u16 = 1;
/// [`Node::flags`]: packets to the node are encapsulated.
pub const NODE_ENCAP: u16 = 2;
/// [`Node::flags`]: the node's address is IPv6.
pub const NODE_V6: u16 = 4;
/// [`Node::flags`]: the node holds the steering table.
pub const NODE_HOLDER: u16 = 8;

shared!(
    /// Configuration of the programs on this node.
    Config {
        /// ID of this node.
        own_id: u16,
        /// [`REACH_STEER`] or [`REACH_BROADCAST`].
        reach: u8,
        /// [`ROLE_NONE`], [`ROLE_HOLDER`] or [`ROLE_FORMER_HOLDER`].
        role: u8,
        /// Interface index of the TUN that holds packets in transit.
        hold_ifindex: u32,
        /// Largest MSS that a SYN-ACK over IPv4 offers, bytes; 0 for no limit.
        mss_clamp_v4: u16,
        /// Largest MSS that a SYN-ACK over IPv6 offers, bytes; 0 for no limit.
        mss_clamp_v6: u16,
        /// MTU of the node's interface, bytes of the network layer.
        mtu: u16,
        /// Link address that the pool shares (broadcast).
        shared_link: [u8; 6],
        /// Zero until the daemon has filled the maps; the filters drop the packets of services until then.
        ready: u32,
    }
);

/// [`Config::role`]: this node does not steer.
pub const ROLE_NONE: u8 = 0;
/// [`Config::role`]: this node holds the steering table.
pub const ROLE_HOLDER: u8 = 1;
/// [`Config::role`]: this node forwards by its former table, and packets without a record to the contact node.
pub const ROLE_FORMER_HOLDER: u8 = 2;

/// [`Config::reach`]: the holder forwards each flow to its owner.
pub const REACH_STEER: u8 = 0;
/// [`Config::reach`]: every node receives every packet.
pub const REACH_BROADCAST: u8 = 1;

shared!(
    /// Event from the programs to the daemon.
    Event {
        /// Key of the flow.
        flow: FlowKey,
        /// Epoch of the flow.
        epoch: u32,
        /// An `EVENT_` constant.
        kind: u8,
        /// TCP state before the event [`EVENT_CLOSED`].
        detail: u8,
        /// Zero.
        pad: [u8; 2],
    }
);

/// [`Event::kind`]: a handshake completed, or a datagram was answered, so this node owns the flow.
pub const EVENT_ESTABLISHED: u8 = 1;
/// [`Event::kind`]: the flow's socket closed.
pub const EVENT_CLOSED: u8 = 2;
/// [`Event::kind`]: the flow's socket has closed, and a new connection between the same ports has gone to the node
/// to which the server has moved.
pub const EVENT_SUPERSEDED: u8 = 3;

shared!(
    /// Congestion state for a socket about to be restored.
    Congestion {
        /// Congestion window, segments.
        cwnd: u32,
        /// Slow-start threshold, segments.
        ssthresh: u32,
        /// Nonzero if ECN was negotiated.
        ecn: u32,
    }
);

/// State of a flow at this node (`enum flow_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FlowState {
    /// Owner: both directions pass.
    Owned = 1,
    /// Owner that prepares a handoff: out-of-order segments are copied to the hold.
    Prepared = 2,
    /// Donor: outgoing packets are dropped, incoming ones are forwarded to the acceptor.
    TransitOut = 3,
    /// Acceptor: outgoing packets are dropped, incoming ones are held.
    TransitIn = 4,
    /// Owner again: incoming packets are held until the hold is empty.
    Flushing = 5,
    /// Former owner: outgoing packets are dropped, incoming ones are forwarded to the new owner.
    Moved = 6,
    /// The socket closed; its last packets still pass.
    Closing = 7,
    /// Owner before the freeze: incoming data is forwarded to the acceptor, acknowledgements pass.
    RedirectingData = 8,
}

impl FlowState {
    /// Converts the state in a map value; `None` for an unknown number.
    #[must_use]
    pub fn from_raw(raw: u8) -> Option<Self> {
        use FlowState::{
            Closing, Flushing, Moved, Owned, Prepared, RedirectingData, TransitIn, TransitOut,
        };
        [
            Owned,
            Prepared,
            TransitOut,
            TransitIn,
            Flushing,
            Moved,
            Closing,
            RedirectingData,
        ]
        .into_iter()
        .find(|state| *state as u8 == raw)
    }
}

impl FlowKey {
    /// Makes the key of a flow between two socket addresses; `protocol` is the IP protocol number.
    #[must_use]
    pub fn new(protocol: u8, local: SocketAddr, remote: SocketAddr) -> Self {
        Self {
            local: to_mapped(local.ip()),
            remote: to_mapped(remote.ip()),
            local_port: local.port().to_be_bytes(),
            remote_port: remote.port().to_be_bytes(),
            protocol,
            pad: [0; 3],
        }
    }

    /// Returns the service's side.
    #[must_use]
    pub fn local(&self) -> SocketAddr {
        SocketAddr::new(from_mapped(self.local), u16::from_be_bytes(self.local_port))
    }

    /// Returns the client's side.
    #[must_use]
    pub fn remote(&self) -> SocketAddr {
        SocketAddr::new(
            from_mapped(self.remote),
            u16::from_be_bytes(self.remote_port),
        )
    }
}

/// Converts an address to the maps' form: IPv4 as mapped IPv6.
#[must_use]
pub fn to_mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Converts an address from the maps' form.
#[must_use]
pub fn from_mapped(octets: [u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(octets);
    v6.to_ipv4_mapped()
        .map_or(IpAddr::V6(v6), |v4: Ipv4Addr| IpAddr::V4(v4))
}

/// Names of the counters, in the order of `enum counter`; names of dropped packets begin with `drop_`.
pub const COUNTER_NAMES: [&str; 25] = [
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
    "drop_no_lease",
];

const _: () = {
    assert!(size_of::<FlowKey>() == 40);
    assert!(size_of::<FlowGroup>() == 8);
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
