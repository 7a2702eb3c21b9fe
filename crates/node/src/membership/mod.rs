//! Membership of a group that runs itself: feeds the machine of `proto::membership`, and carries out its outputs.
//!
//! The machine runs on a thread of its own, the *driver*, at real-time priority. The lease of a contact node lasts 240 ms,
//! and the event loop of the engine may be busy with moves for a good part of that. The driver therefore has a socket for
//! heartbeats and lease grants, and tells the kernel the end of the lease by itself. All larger frames need the
//! certificates of the peer channel, and so pass through the thread of the event loop, which also agrees on the keys of
//! datagrams:
//!
//! ```text
//!   event loop's thread                          driver                          disk thread
//!   peer channel ── ReceivedMembershipFrame ──►  machine  ── state ────────────► StateFile
//!   ChannelLink  ◄── frames, members ──────────    │  ▲   ◄── written, or why not
//!   engine       ◄── GroupEvent ───────────────    │  └──► UDP: heartbeats, lease grants
//!                ── OperatorRequest ──────────►    └─────► lease in the kernel (LeaseWriter)
//! ```
//!
//! With `group.store`, the driver also passes requests to the threads of `etcd`, and their answers to the machine.

mod boot_clock;
mod channel_link;
mod datagrams;
mod driver;
mod etcd;
mod group_event;
mod operator;
mod state_file;
mod status;
#[cfg(test)]
mod tests;

pub use etcd::EtcdError;
pub(crate) use etcd::check_endpoints;
pub use group_event::{GroupEvent, GroupEvents, KernelLease, LeaseWriter};
pub use operator::OperatorRequest;
pub use state_file::{StateFile, StateFileError};
pub use status::MembershipStatus;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use holdfast_api::control::{ErrorBody, MembershipChange};
use holdfast_daemon::private_files::private_directory;
use holdfast_proto::membership::{GroupChangeFailure, Membership, MembershipConfig, Output};
use holdfast_wire::NodeId;
use holdfast_wire::group_data::{GroupChange, GroupChangeId};
use holdfast_wire::membership_frames::{JoinRole, NodeName, NodeNameError};
use tokio::sync::{mpsc, oneshot, watch};

use crate::config::{Config, EtcdConfig};
use crate::metrics::Metrics;
use crate::peer_channel::{Peers, ReceivedMembershipFrame};
use channel_link::ChannelLink;
use driver::{Driver, DriverInput, DriverInputs};
use etcd::EtcdStore;
use state_file::DiskThread;

/// Maximum number of received frames that wait for the driver; further ones are dropped, as the network might do.
pub const RECEIVED_FRAMES_MAX: usize = 1_024;

/// Settings of a node's membership.
#[derive(Debug, Clone)]
pub struct MembershipOptions {
    /// Name of the node, as in its certificate.
    pub name: NodeName,
    /// Name of the group.
    pub group: String,
    /// Address of the node's daemon: TCP for the peer channel, UDP for heartbeats.
    pub address: SocketAddr,
    /// Role in which the node joins.
    pub role: JoinRole,
    /// Addresses of daemons to ask for the contact node.
    pub seeds: Vec<SocketAddr>,
    /// Number of this start of the daemon, greater than any earlier one.
    pub boot: u64,
    /// Directory for the node's state.
    pub state_dir: PathBuf,
    /// True if the driver runs at real-time priority.
    pub realtime: bool,
    /// The store of the group's views; none if the voters vote.
    pub store: Option<EtcdConfig>,
}

/// Reason why the membership of a node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    /// The node's name is too long for a group.
    #[error(transparent)]
    Name(#[from] NodeNameError),
    /// The group's nodes are configured.
    #[error(
        "group.contact names the contact node of a configured group; remove the key, and the group runs itself"
    )]
    Configured,
    /// The saved membership cannot be used.
    #[error(transparent)]
    StateFile(#[from] StateFileError),
    /// The node is in a group already.
    #[error("this node has a saved membership in {}; remove the file to leave that group behind", .0.display())]
    AlreadyMember(PathBuf),
    /// The node knows no way into a group.
    #[error(
        "this node is in no group and has no group.seeds to ask; name a node of the group there, or begin a group with \
         `holdfastd --create-group`"
    )]
    NoSeeds,
    /// The client of the store of views cannot start.
    #[error("the store of the group's views (group.store): {0}")]
    Store(#[from] EtcdError),
    /// The system refused an operation.
    #[error("{what}: {source}")]
    System {
        /// Object of the refused operation, in words.
        what: String,
        /// The error of the system.
        source: io::Error,
    },
}

impl MembershipOptions {
    /// Returns the options that `config` gives to a daemon with this `boot`.
    ///
    /// # Errors
    /// The group's nodes are configured, or the node's name is too long.
    pub fn new(config: &Config, boot: u64) -> Result<MembershipOptions, MembershipError> {
        let Some(self_running) = &config.group.self_running else {
            return Err(MembershipError::Configured);
        };
        Ok(MembershipOptions {
            name: config.node.name.parse()?,
            group: config.group.name.clone(),
            address: SocketAddr::new(config.node.address, config.node.port),
            role: self_running.role,
            seeds: self_running.seeds.clone(),
            boot,
            state_dir: config.node.state_dir.clone(),
            realtime: config.node.realtime,
            store: self_running.store.clone(),
        })
    }

    fn state_file(&self) -> StateFile {
        StateFile::new(&self.state_dir, self.group.clone(), self.name.clone())
    }

    fn machine_config(&self) -> MembershipConfig {
        let mut config =
            MembershipConfig::new(self.name.clone(), self.address, self.role, self.boot);
        config.random_seed = random_number();
        config.has_view_store = self.store.is_some();
        config
    }
}

/// Begins a group whose contact node is this node: writes the node's first saved membership. The daemon must not run.
///
/// # Errors
/// The node is in a group already, or the file cannot be written.
pub fn create_group(options: &MembershipOptions) -> Result<(), MembershipError> {
    let directory = &options.state_dir;
    private_directory(directory).map_err(|source| MembershipError::System {
        what: "the directory of the saved membership (node.state_dir)".to_owned(),
        source,
    })?;
    let file = options.state_file();
    if file.read()?.is_some() {
        return Err(MembershipError::AlreadyMember(file.path().to_owned()));
    }
    let mut machine = Membership::create(boot_clock::now(), options.machine_config());
    while let Some(output) = machine.poll_output() {
        if let Output::Save { state, .. } = output {
            file.write(*state)?;
        }
    }
    Ok(())
}

/// The running membership of a node. Dropping the value ends the driver; a lease then ends by itself.
pub struct GroupMembership {
    inputs: mpsc::UnboundedSender<DriverInput>,
    status: watch::Receiver<MembershipStatus>,
    thread: Option<JoinHandle<()>>,
}

impl GroupMembership {
    /// Starts the driver, with the frames that the peer channel receives for it. Must be called within a `LocalSet`.
    ///
    /// # Errors
    /// The saved membership cannot be used, the node knows no way into a group, or the system refuses a socket or thread.
    pub fn start(
        options: MembershipOptions,
        frames: mpsc::Receiver<ReceivedMembershipFrame>,
        peers: Peers,
        metrics: Metrics,
    ) -> Result<(GroupMembership, GroupEvents), MembershipError> {
        let system_error = |what: &str| {
            let what = what.to_owned();
            move |source| MembershipError::System { what, source }
        };
        private_directory(&options.state_dir).map_err(system_error(
            "the directory of the saved membership (node.state_dir)",
        ))?;
        let file = options.state_file();
        let saved = file.read()?;
        if saved.is_none() && options.seeds.is_empty() {
            return Err(MembershipError::NoSeeds);
        }
        let now = boot_clock::now();
        let machine = match saved {
            Some(state) => Membership::restore(now, options.machine_config(), state),
            None => Membership::join(now, options.machine_config()),
        };
        let what = format!("the UDP socket for heartbeats at {}", options.address);
        let socket = datagrams::bind(options.address).map_err(system_error(&what))?;
        let (disk, saves) = DiskThread::start(file).map_err(system_error("the disk thread"))?;
        let store = options
            .store
            .as_ref()
            .map(|store| EtcdStore::start(store, &options.group, &options.name));
        let (store, store_answers) = store.transpose()?.unzip();
        let (keys, seeds) = (peers.watch_datagram_keys(), peers.watch_seeds());
        let (link, channel) = ChannelLink::new(peers, options.seeds.clone());
        let (event_sender, events) = mpsc::unbounded_channel();
        let (status_sender, status) = watch::channel(MembershipStatus {
            has_store: options.store.is_some(),
            ..MembershipStatus::default()
        });
        let (inputs, input_receiver) = mpsc::unbounded_channel();
        let reports = (event_sender, status_sender, metrics);
        let driver = Driver::new(machine, &options, (channel, keys), (disk, store), reports);
        let inputs_of_driver = DriverInputs {
            frames,
            saves,
            requests: input_receiver,
            store_answers,
            seeds,
        };
        let realtime = options.realtime;
        let thread = std::thread::Builder::new()
            .name("membership".to_owned())
            .spawn(move || driver::run_thread(driver, socket, inputs_of_driver, realtime))
            .map_err(system_error("the membership's thread"))?;
        tokio::task::spawn_local(link.run());
        let membership = GroupMembership {
            inputs,
            status,
            thread: Some(thread),
        };
        Ok((membership, GroupEvents::new(events)))
    }

    /// Lets the driver tell the kernel the end of this node's lease, now and at each change. Before the first news of the
    /// lease, the driver leaves the kernel the lease that an earlier daemon has renewed.
    pub fn set_lease_writer(&self, writer: LeaseWriter) {
        // A driver that has ended has no lease.
        let _ = self.inputs.send(DriverInput::SetLeaseWriter(writer));
    }

    /// Passes on an operator's request. The answer comes when the group has decided, or after a time limit.
    pub fn request(
        &self,
        request: OperatorRequest,
        reply: oneshot::Sender<Result<MembershipChange, ErrorBody>>,
    ) {
        let _ = self.inputs.send(DriverInput::Operator { request, reply });
    }

    /// Requests a change of the group's settings, for the user `uid` of this host. The caller chooses a random `id`, and
    /// repeats it with a repeated request. The answer is the version of the group data with the change.
    pub fn change_settings(
        &self,
        id: GroupChangeId,
        change: GroupChange,
        uid: Option<u32>,
        reply: oneshot::Sender<Result<u64, GroupChangeFailure>>,
    ) {
        let change = Box::new(change);
        let _ = self.inputs.send(DriverInput::ChangeSettings {
            id,
            change,
            uid,
            reply,
        });
    }

    /// Drops a server node from the group's list, at the contact node: a handoff to the node has failed.
    pub fn report_failed_server_node(&self, node: NodeId) {
        let _ = self.inputs.send(DriverInput::ServerNodeFailed(node));
    }

    /// Returns what this node knows of the group at this moment.
    pub fn status(&self) -> MembershipStatus {
        self.status.borrow().clone()
    }

    /// Returns the same as [`GroupMembership::status`], to be watched.
    pub fn watch_status(&self) -> watch::Receiver<MembershipStatus> {
        self.status.clone()
    }
}

impl Drop for GroupMembership {
    fn drop(&mut self) {
        let _ = self.inputs.send(DriverInput::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the membership's thread has panicked");
        }
    }
}

/// Returns a random number that no other node can guess.
fn random_number() -> u64 {
    u64::from_le_bytes(random_bytes())
}

/// Returns random bytes of the system, fit for keys.
pub(crate) fn random_bytes<const LENGTH: usize>() -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    let provider: Arc<_> = rustls::crypto::ring::default_provider().into();
    if provider.secure_random.fill(&mut bytes).is_err() {
        // The kernel refuses random numbers only without getrandom(2) and /dev/urandom.
        tracing::error!("the system has no random numbers: mount /dev");
        std::process::abort();
    }
    bytes
}
