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
//! Everything runs on one thread, inside a `tokio::task::LocalSet`.

mod connection;
mod dial;
mod error;
mod events;
mod greet;
mod listen;
mod peer;
mod peers;
mod serve;
mod stats;
#[cfg(test)]
mod tests;

pub use error::{PeerConnectionError, SendError};
pub use events::{PeerEvent, PeerEvents};
pub use peers::Peers;
pub use stats::PeerStats;

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use holdfast_daemon::tls::Tls;
use holdfast_wire::NodeId;

use crate::config::{ChannelConfig, Config, PeerConfig};
use crate::metrics::Metrics;

/// Options of the channel.
#[derive(Debug, Clone)]
pub struct PeerChannelOptions {
    /// This node.
    pub node: NodeId,
    /// Boot id of this daemon, in any unit that grows from start to start (`wire::BatchId::boot`).
    pub boot: u64,
    /// Name of the group.
    pub group: String,
    /// Listening address; also the source of connections to peers.
    pub address: SocketAddr,
    /// The other nodes.
    pub peers: Vec<PeerConfig>,
    /// Timing and buffer sizes.
    pub timing: ChannelConfig,
}

impl PeerChannelOptions {
    /// Returns the options that `config` gives for a daemon with this `boot`.
    pub fn new(config: &Config, boot: u64) -> PeerChannelOptions {
        PeerChannelOptions {
            node: config.node.id,
            boot,
            group: config.group.name.clone(),
            address: SocketAddr::new(config.node.address, config.node.port),
            peers: config.peers.clone(),
            timing: config.channel,
        }
    }
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
        let mut tasks = vec![tokio::task::spawn_local(listen::run(
            state.clone(),
            listener,
        ))];
        for id in state.ids() {
            tasks.push(tokio::task::spawn_local(dial::run(state.clone(), id)));
        }
        state.add_tasks(tasks.iter().map(|task| task.abort_handle()).collect());
        Ok((Peers::new(state), receiver))
    }
}
