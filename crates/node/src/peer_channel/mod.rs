//! The channel between nodes: frames over TLS, with one connection in each direction for every pair of nodes.
//!
//! Each node dials every other. The connection that a node dialled carries its own frames, the accepted one the peer's,
//! so two nodes never need to agree which of two connections to keep. Both connections begin with a `Hello` each
//! way, which checks the group and that the certificate is the named node's. A peer is *up* when both directions are.
//! When one fails, both are closed, the peer is *lost*, and the node dials again with a growing delay.
//!
//! Frames are sent without a detour: [`Peers::send`] encodes, encrypts and writes to the socket before it returns, in
//! the caller's task. Only a full socket makes it queue the rest. One task per connection reads, and puts whole frames
//! into the queue that [`PeerEvents`] empties.
//!
//! Pings are sent on the dialled connection and answered on the same one. A peer that has sent nothing for several ping
//! intervals in a row is lost. The watch counts intervals instead of elapsed time: a daemon that was itself delayed
//! first reads the data that arrived meanwhile.
//!
//! The nodes of a configured group are those of the configuration. A group that runs itself learns its nodes while it runs
//! ([`Peers::set_members`]): the name in a node's certificate says who the node is, and the group gives it a number. A
//! node without a number, such as one that joins, is a *guest*: only frames of the membership are accepted from it, and
//! it is dialled only when there is something to send. These frames do not wait until both directions work. They use the
//! accepted connection if there is one, where no handoff is ahead of them, and go to the receiver that
//! [`PeerChannelOptions::membership`] names. The greeting is followed by a key for the datagrams of the membership.
//!
//! Everything runs on one thread, inside a `tokio::task::LocalSet`.

mod connection;
mod datagram_keys;
mod dial;
mod error;
mod events;
mod greet;
mod listen;
mod peer;
mod peers;
mod receive_buffer;
mod serve;
mod stats;
#[cfg(test)]
mod tests;

pub use datagram_keys::DatagramKeyTable;
pub use error::{PeerConnectionError, SendError};
pub use events::{PeerEvent, PeerEvents, ReceivedMembershipFrame};
pub use peers::Peers;
pub use stats::PeerStats;

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use holdfast_api::enrolment::digest;
use holdfast_daemon::tls::Tls;
use holdfast_wire::NodeId;
use holdfast_wire::greeting::{ConfiguredSettings, GroupMode};
use tokio::sync::mpsc;

use crate::config::{ChannelConfig, Config, PeerConfig};
use crate::metrics::Metrics;

/// Options of the channel.
#[derive(Debug, Clone)]
pub struct PeerChannelOptions {
    /// Name of this node.
    pub name: String,
    /// Number of this node; 0 until a group that runs itself gives one.
    pub node: NodeId,
    /// Boot id of this daemon, in any unit that grows from start to start (`wire::BatchId::boot`).
    pub boot: u64,
    /// Name of the group.
    pub group: String,
    /// Listening address; also the source of connections to peers.
    pub address: SocketAddr,
    /// The other nodes of a configured group.
    pub peers: Vec<PeerConfig>,
    /// Timing and buffer sizes.
    pub timing: ChannelConfig,
    /// Receiver of the membership's frames, in a group that runs itself; none in a configured group. Frames are dropped
    /// while the receiver is full.
    pub membership: Option<mpsc::Sender<ReceivedMembershipFrame>>,
    /// How the group is run, as peers compare with their own files; none to tell nothing.
    pub mode: Option<GroupMode>,
}

impl PeerChannelOptions {
    /// Returns the options that `config` gives for a daemon with this `boot`.
    pub fn new(
        config: &Config,
        boot: u64,
        membership: Option<mpsc::Sender<ReceivedMembershipFrame>>,
    ) -> PeerChannelOptions {
        PeerChannelOptions {
            name: config.node.name.clone(),
            node: config.node.id,
            boot,
            group: config.group.name.clone(),
            address: SocketAddr::new(config.node.address, config.node.port),
            peers: config.peers.clone(),
            timing: config.channel,
            membership,
            mode: Some(group_mode(config)),
        }
    }
}

/// Returns how the group is run by this configuration.
fn group_mode(config: &Config) -> GroupMode {
    if config.group.self_running.is_some() {
        return GroupMode::SelfRunning;
    }
    let number_of = |text: &str| {
        let digest = digest(text.as_bytes());
        u64::from_be_bytes(std::array::from_fn(|index| digest[index]))
    };
    let services = config.services.iter();
    let mut services: Vec<String> = services.map(|service| format!("{service:?}")).collect();
    services.sort_unstable();
    GroupMode::Configured(ConfiguredSettings {
        contact: config.group.contact,
        reach: number_of(&format!("{:?}", config.group.reach)),
        services: number_of(&services.concat()),
    })
}

/// The channel between nodes.
pub struct PeerChannel;

impl PeerChannel {
    /// Listens, dials every peer, and keeps both up until [`Peers::shutdown`]. Must be called within a `LocalSet`.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub fn start(
        options: PeerChannelOptions,
        tls: Tls,
        metrics: Metrics,
    ) -> io::Result<(Peers, PeerEvents)> {
        let listener = listen::bind(options.address)?;
        let address = listener.local_addr()?;
        let (events, receiver) = crate::engine_queue::engine_queue();
        let state = Rc::new(peers::PeerChannelState::new(
            options, address, tls, metrics, events,
        ));
        state.spawn(listen::run(state.clone(), listener));
        for peer in state.all() {
            state.dial(&peer);
        }
        Ok((Peers::new(state), receiver))
    }
}
