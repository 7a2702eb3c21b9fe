//! The structures of `c/replicate.h`, byte for byte; both sides assert their sizes. "Service space" is the sequence numbers that the
//! client sees.

use std::net::{IpAddr, SocketAddr};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::shared_with_c::{from_mapped, to_mapped};

/// Most legs of a service: the primary and three replicas.
pub const LEGS: usize = 4;
/// Most replicated services of a contact node.
pub const MAX_REPLICATED_SERVICES: usize = 64;
/// Number of remembered digests of a connection.
pub const MARKS: usize = 8;

/// Flag of [`ReplicatedService::flags`]: timestamps are removed from SYN segments, since not all servers use them.
pub const SERVICE_STRIP_TIMESTAMPS: u32 = 1;
/// Flag of [`ReplicatedService::flags`]: "SACK permitted" is removed from SYN segments, since not all servers use it.
pub const SERVICE_STRIP_SACK: u32 = 2;
/// Flag of [`ReplicatedService::flags`]: outputs are compared by digests.
pub const SERVICE_COMPARE: u32 = 4;

/// Flag of [`LegState::flags`]: the leg has ended its output at `fin_seq`.
pub const LEG_FIN: u8 = 1;
/// Flag of [`LegState::flags`]: the leg has reset the connection.
pub const LEG_RESET: u8 = 2;
/// Flag of [`LegState::flags`]: the leg's output differs from the output that the client was shown.
pub const LEG_DIVERGED: u8 = 4;

/// Flag of [`Connection::flags`]: the client was shown the end of the output.
pub const CONNECTION_FIN_PASSED: u8 = 1;
/// Flag of [`Connection::flags`]: the lag bound cuts the primary's window.
pub const CONNECTION_HELD: u8 = 2;
/// Flag of [`Connection::flags`]: the client has ended its input.
pub const CONNECTION_CLIENT_FIN: u8 = 4;
/// Flag of [`Connection::flags`]: the connection has ended on both sides, or its client has reset it.
pub const CONNECTION_CLOSED: u8 = 8;

/// Bit of [`Connection::own_roles`] that marks roles of the connection's own.
pub const ROLES_OWN: u32 = 1 << 31;

/// Value of [`HalfOpen::state`] when some legs have not answered.
pub const HANDSHAKE_PENDING: u32 = 0;
/// Value of [`HalfOpen::state`] when all live legs have answered, and the client does not know.
pub const HANDSHAKE_ANSWERED: u32 = 1;
/// Value of [`HalfOpen::state`] when the client was shown the answer.
pub const HANDSHAKE_SHOWN: u32 = 2;

/// Bit in the options of a client or leg: timestamps.
pub const HAS_TIMESTAMPS: u8 = 1;
/// Bit in the options of a client or leg: selective acknowledgements.
pub const HAS_SACK: u8 = 2;
/// Bit in the options of a client or leg: window scale.
pub const HAS_SCALE: u8 = 4;

/// Value of [`ReplicationEvent::kind`]: all live legs have answered a handshake.
pub const REPLICATION_OPENED: u8 = 1;
/// Value of [`ReplicationEvent::kind`]: a connection has ended.
pub const REPLICATION_CLOSED: u8 = 2;
/// Value of [`ReplicationEvent::kind`]: the legs `legs` have refused a handshake.
pub const REPLICATION_REFUSED: u8 = 3;
/// Value of [`ReplicationEvent::kind`]: a leg has reset a connection.
pub const REPLICATION_LEG_RESET: u8 = 4;
/// Value of [`ReplicationEvent::kind`]: a leg has ended its output.
pub const REPLICATION_LEG_FINISHED: u8 = 5;
/// Value of [`ReplicationEvent::kind`]: the legs `legs` ended their output earlier than the leg that goes on.
pub const REPLICATION_OUTPUT_AFTER_FIN: u8 = 6;
/// Value of [`ReplicationEvent::kind`]: the digests of two legs differ at a position.
pub const REPLICATION_DIVERGED: u8 = 7;

/// Names of the replicator's counters, in the order of `enum replication_counter`.
pub const REPLICATION_COUNTER_NAMES: [&str; 19] = [
    "client_packets",
    "clones",
    "primary_packets",
    "absorbed",
    "shown_acks",
    "reflected",
    "pushed",
    "held_fins",
    "resets",
    "compared",
    "diverged",
    "malformed",
    "unknown",
    "unsent_acked",
    "outside_window",
    "gaps",
    "no_leg",
    "table_full",
    "lost_events",
];

macro_rules! shared {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }
    };
}

shared!(
    /// An address and a port.
    Endpoint {
        /// Address; IPv4 as mapped IPv6.
        address: [u8; 16],
        /// Port, network order.
        port: [u8; 2],
        /// Zero.
        pad: u16,
    }
);

shared!(
    /// The leg to which an endpoint belongs.
    LegRef {
        /// Index of the service.
        service: u16,
        /// Index of the leg.
        leg: u8,
        /// Zero.
        pad: u8,
    }
);

shared!(
    /// Path to a neighbour.
    LinkPath {
        /// Outgoing interface.
        ifindex: u32,
        /// Link address of the neighbour.
        to_link: [u8; 6],
        /// Link address of this node.
        own_link: [u8; 6],
    }
);

shared!(
    /// A leg's server and the path to it.
    LegPath {
        /// Address and port of the server; zeros for no leg.
        endpoint: Endpoint,
        /// Path to the server's node.
        path: LinkPath,
    }
);

shared!(
    /// A replicated service.
    ReplicatedService {
        /// Service address and port.
        endpoint: Endpoint,
        /// `SERVICE_` flags.
        flags: u32,
        /// Number of bytes by which the primary's output may be ahead of the slowest leg's; 0: no bound.
        lag_bytes_max: u32,
        /// Paths to the service's legs.
        legs: [LegPath; LEGS],
    }
);

shared!(
    /// Key of a connection.
    ConnectionKey {
        /// Client address; IPv4 as mapped IPv6.
        client: [u8; 16],
        /// Client port, network order.
        client_port: [u8; 2],
        /// Index of the service.
        service: u16,
    }
);

shared!(
    /// A leg's answer to a handshake.
    HandshakeAnswer {
        /// The leg's initial sequence number.
        isn: u32,
        /// The leg's timestamp.
        timestamp: u32,
        /// Right edge of the window for the client.
        edge: u32,
        /// Announced maximum segment size in bytes.
        mss: u16,
        /// Announced window scale.
        scale: u8,
        /// `HAS_` bits.
        options: u8,
    }
);

shared!(
    /// A connection whose client has not completed the handshake.
    HalfOpen {
        /// The client's initial sequence number.
        client_isn: u32,
        /// The client's timestamp.
        client_timestamp: u32,
        /// Bits of legs that have answered.
        answered: u32,
        /// Bits of legs that have refused.
        refused: u32,
        /// A `HANDSHAKE_` value.
        state: u32,
        /// Number of SYN segments of the client.
        attempts: u32,
        /// Time of the client's last SYN in nanoseconds, `CLOCK_MONOTONIC`.
        since_ns: u64,
        /// Path to the client.
        client: LinkPath,
        /// The client's window scale.
        client_scale: u8,
        /// `HAS_` bits of the client.
        client_options: u8,
        /// Zero.
        pad: u16,
        /// Roles when all live legs had answered, as [`LegRoles::to_raw`].
        live: u32,
        /// The legs' answers.
        legs: [HandshakeAnswer; LEGS],
    }
);

shared!(
    /// A leg in one connection.
    LegState {
        /// Service space minus the leg's own sequence numbers.
        sequence_offset: u32,
        /// Shown timestamps minus the leg's own.
        timestamp_offset: u32,
        /// End of the output that has arrived without a gap, service space.
        nxt: u32,
        /// Begin of a stretch of output beyond a gap.
        early_from: u32,
        /// End of that stretch; equal to the begin if there is none.
        early_to: u32,
        /// Acknowledgement of the client's stream.
        ack: u32,
        /// Right edge of the window for the client.
        edge: u32,
        /// Acknowledgement that the leg was last told, service space.
        told: u32,
        /// The leg's latest timestamp.
        timestamp: u32,
        /// Position of the leg's FIN, service space.
        fin_seq: u32,
        /// End of the output that was compared, service space.
        compared: u32,
        /// Smoothed time from input to its acknowledgement, microseconds.
        round_trip_us: u32,
        /// Announced maximum segment size in bytes.
        mss: u16,
        /// Announced window scale.
        scale: u8,
        /// Shift by which the leg reads windows.
        client_scale: u8,
        /// `HAS_` bits.
        options: u8,
        /// `LEG_` flags.
        flags: u8,
        /// Zero.
        pad: [u8; 2],
        /// Digest of the output before `nxt`.
        digest: u64,
        /// Digest of the stretch beyond the gap.
        early_digest: u64,
        /// Time since which the leg has not acknowledged input, nanoseconds of `CLOCK_MONOTONIC`; 0 if it has.
        owes_since_ns: u64,
    }
);

shared!(
    /// Digest of the output that the client was shown, up to a position.
    Mark {
        /// Number of bytes from the start of the output.
        position: u64,
        /// Digest of the output before the position.
        digest: u64,
    }
);

shared!(
    /// State of a client's connection with a replicated service.
    Connection {
        /// The programs' lock.
        lock: u32,
        /// The client's initial sequence number.
        client_isn: u32,
        /// Initial sequence number that the client was shown.
        isn: u32,
        /// End of the output that the client was sent.
        sent: u32,
        /// Acknowledgement that the client was last shown.
        shown_ack: u32,
        /// Right window edge that the client was last shown.
        shown_edge: u32,
        /// End of the client's input.
        client_nxt: u32,
        /// The client's acknowledgement.
        client_ack: u32,
        /// Right edge of the client's window.
        client_edge: u32,
        /// The client's latest timestamp.
        client_timestamp: u32,
        /// Latest timestamp that the client was shown.
        timestamp_shown: u32,
        /// Position of the client's FIN.
        client_fin_seq: u32,
        /// The connection's own roles with bit 31, or 0 for the service's roles.
        own_roles: u32,
        /// Bits of the legs that have the connection.
        present: u32,
        /// Path to the client.
        client: LinkPath,
        /// Maximum segment size that the client was shown, bytes.
        mss: u16,
        /// Window scale that the client was shown.
        scale: u8,
        /// The client's window scale.
        client_scale: u8,
        /// `HAS_` bits that were agreed on.
        options: u8,
        /// `CONNECTION_` flags.
        flags: u8,
        /// Bits of replicas that have probed, for a window or for a sign of life, since the primary's last output.
        probing: u8,
        /// Zero.
        pad: u8,
        /// Number of marks made.
        mark_next: u32,
        /// Zero.
        pad_2: u32,
        /// End of all output that was shown without a gap.
        tip: Mark,
        /// Earlier digests.
        marks: [Mark; MARKS],
        /// State of each leg in this connection.
        legs: [LegState; LEGS],
    }
);

shared!(
    /// An event that the replication programs report about a connection.
    ReplicationEvent {
        /// The connection that the event is about.
        key: ConnectionKey,
        /// A `REPLICATION_` value.
        kind: u8,
        /// The leg that the event is about.
        leg: u8,
        /// Bits of legs that have refused, or have ended their output earlier.
        legs: u8,
        /// Bits of legs that have answered a handshake.
        answered: u8,
        /// Number of input bytes that the leg has acknowledged, modulo 2^32.
        acknowledged: u32,
        /// Bits of legs with a digest.
        known: u32,
        /// Number of output bytes up to which digests were compared.
        position: u64,
        /// Digests of the output before the position.
        digests: [u64; LEGS],
    }
);

shared!(
    /// The frame of a test run, with a command for the program. The frame has room for the headers of a segment.
    TestRunFrame {
        /// Link addresses; unused.
        link: [u8; 12],
        /// Ethertype of the client's family.
        ethertype: [u8; 2],
        /// Zero.
        pad: u16,
        /// The connection that the command is about.
        key: ConnectionKey,
        /// Argument of the command.
        argument: u32,
        /// Zeros.
        rest: [u64; 8],
    }
);

/// Roles of a service's legs, or of the legs of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LegRoles {
    /// Index of the leg that the client sees.
    pub primary: u8,
    /// Bits of the legs that serve.
    pub live: u8,
}

impl LegRoles {
    /// Returns the word of the maps: bits 0 to 3 live legs, bits 8 and 9 the primary.
    #[must_use]
    pub const fn to_raw(self) -> u32 {
        (self.live & 0xf) as u32 | ((self.primary & 3) as u32) << 8
    }

    /// Returns the roles in a service's word.
    #[must_use]
    pub const fn of_service(word: u32) -> Self {
        Self {
            primary: (word >> 8 & 3) as u8,
            live: (word & 0xf) as u8,
        }
    }

    /// Returns the roles in a connection's word; `None` if it follows its service.
    #[must_use]
    pub const fn from_raw(word: u32) -> Option<Self> {
        match word & ROLES_OWN {
            0 => None,
            _ => Some(Self::of_service(word)),
        }
    }
}

impl Endpoint {
    /// Makes an endpoint from an address and a port.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address: to_mapped(address.ip()),
            port: address.port().to_be_bytes(),
            pad: 0,
        }
    }

    /// Returns the address and the port.
    #[must_use]
    pub fn socket_address(&self) -> SocketAddr {
        let port = u16::from_be_bytes(self.port);
        SocketAddr::new(from_mapped(self.address), port)
    }
}

impl ConnectionKey {
    /// Makes the key of a client's connection with a service.
    #[must_use]
    pub fn new(client: SocketAddr, service: u16) -> Self {
        Self {
            client: to_mapped(client.ip()),
            client_port: client.port().to_be_bytes(),
            service,
        }
    }

    /// Returns the address and port of the connection's client.
    #[must_use]
    pub fn client(&self) -> SocketAddr {
        let port = u16::from_be_bytes(self.client_port);
        SocketAddr::new(from_mapped(self.client), port)
    }
}

impl TestRunFrame {
    /// Makes the frame of a command about a connection.
    pub(super) fn new(key: ConnectionKey, argument: u32) -> Self {
        let ethertype: u16 = match from_mapped(key.client) {
            IpAddr::V4(_) => 0x0800,
            IpAddr::V6(_) => 0x86dd,
        };
        Self {
            ethertype: ethertype.to_be_bytes(),
            key,
            argument,
            ..Self::default()
        }
    }
}

const _: () = {
    assert!(size_of::<Endpoint>() == 20);
    assert!(size_of::<LegPath>() == 36);
    assert!(size_of::<ReplicatedService>() == 172);
    assert!(size_of::<ConnectionKey>() == 20);
    assert!(size_of::<HalfOpen>() == 120);
    assert!(size_of::<LegState>() == 80);
    assert!(size_of::<Connection>() == 552);
    assert!(size_of::<ReplicationEvent>() == 72);
    assert!(size_of::<TestRunFrame>() == 104);
};
