//! Configuration of a membership machine.

use core::time::Duration;
use holdfast_wire::membership_frames::{JoinRole, NodeName};
use std::net::SocketAddr;

/// The settings of a [`super::Membership`]. [`MembershipConfig::new`] has the defaults; each is documented at its field.
#[derive(Debug, Clone)]
pub struct MembershipConfig {
    /// The node's name, as in its certificate.
    pub name: NodeName,
    /// The address of the node's daemon, at which other nodes reach it.
    pub address: SocketAddr,
    /// The role in which the node joins, also after a wrong accusation.
    pub role: JoinRole,
    /// Names of nodes to ask for the contact node when the node knows of none. The service address is asked as well.
    pub seeds: Vec<NodeName>,
    /// Number of this daemon start, greater than any earlier one of the local node (for example nanoseconds since
    /// 1970).
    pub boot: u64,
    /// Seed of random waits and join numbers, different for each daemon start. The node's name is mixed in.
    pub random_seed: u64,
    /// Time between two heartbeats of the contact node (50 ms).
    pub heartbeat_interval: Duration,
    /// Time, from the receipt of a heartbeat, in which a voter takes part in no view with another contact node (250 ms).
    pub promise_duration: Duration,
    /// Duration of the contact node's lease, from the sending of a heartbeat that a majority answered (240 ms). Shorter
    /// than `promise_duration`, so that clocks may be 2 % fast or slow.
    pub lease_duration: Duration,
    /// Time without heartbeats or grants after which a node counts as failed (250 ms).
    pub detection_timeout: Duration,
    /// Time that each further backup in the order of succession waits longer for a silent contact node (150 ms).
    pub succession_step: Duration,
    /// Time until an unanswered frame of a vote is sent again (40 ms).
    pub vote_resend_interval: Duration,
    /// Longest duration of one attempt to decide on a view (1 s).
    pub vote_timeout: Duration,
    /// Longest random wait before a vote is tried again (80 ms); doubles with each attempt, up to 16 times.
    pub vote_backoff: Duration,
    /// Time until an unanswered `Join`, `Leave` or `Register` is sent again (500 ms); doubles up to
    /// `registration_timeout`.
    pub join_retry_interval: Duration,
    /// Time without any frame of the contact node after which a server node registers again (5 s).
    pub registration_timeout: Duration,
    /// Longest random wait of a server node before it asks for a newer view (1 s), so that a new view causes no storm.
    pub registration_spread: Duration,
    /// Most server nodes that learn of a new view in one heartbeat interval (50).
    pub notices_per_heartbeat: usize,
    /// Least time between two announcements of a changed list of server nodes to the server nodes (2 s), so that nodes that
    /// come and go cause few messages.
    pub list_announcement_interval: Duration,
    /// Time between two checks of the contact node for silent server nodes (1 s).
    pub server_node_check_interval: Duration,
    /// Time without a frame of any voter that the node knows, after which the node also believes the nodes that an operator
    /// named to join by (15 s): the group may have replaced all voters.
    pub voters_silent_after: Duration,
    /// Number of checks without any frame of a server node after which the contact node drops the node from its list (15).
    /// At the last five before that, the node is asked to register.
    pub silent_checks_max: u32,
    /// Time until an unanswered `GroupChangeRequest` is sent again (250 ms).
    pub group_change_retry_interval: Duration,
    /// Time after which a requested change of the group's settings counts as unanswered (10 s).
    pub group_change_timeout: Duration,
    /// Time until a failed save is tried again (1 s).
    pub save_retry_interval: Duration,
    /// True if the group's views are in a store outside the group, in place of votes (false); the same at all nodes. See
    /// [`super::Output::Store`].
    pub has_view_store: bool,
    /// Time between two reads of the store by a backup (250 ms). The contact node reads with each heartbeat.
    pub store_read_interval: Duration,
    /// Time without an answer after which the store counts as silent, and time with answers after which the contact node must
    /// have a lease again (1 s).
    pub store_silent_after: Duration,
}

impl MembershipConfig {
    /// Returns the defaults for the node `name` at `address`, for a daemon that started at `boot`. Without `seeds`, the
    /// node finds the contact node by the service address.
    pub fn new(name: NodeName, address: SocketAddr, role: JoinRole, boot: u64) -> MembershipConfig {
        MembershipConfig {
            name,
            address,
            role,
            seeds: Vec::new(),
            boot,
            random_seed: boot,
            heartbeat_interval: Duration::from_millis(50),
            promise_duration: Duration::from_millis(250),
            lease_duration: Duration::from_millis(240),
            detection_timeout: Duration::from_millis(250),
            succession_step: Duration::from_millis(150),
            vote_resend_interval: Duration::from_millis(40),
            vote_timeout: Duration::from_secs(1),
            vote_backoff: Duration::from_millis(80),
            join_retry_interval: Duration::from_millis(500),
            registration_timeout: Duration::from_secs(5),
            registration_spread: Duration::from_secs(1),
            notices_per_heartbeat: 50,
            list_announcement_interval: Duration::from_secs(2),
            server_node_check_interval: Duration::from_secs(1),
            voters_silent_after: Duration::from_secs(15),
            silent_checks_max: 15,
            group_change_retry_interval: Duration::from_millis(250),
            group_change_timeout: Duration::from_secs(10),
            save_retry_interval: Duration::from_secs(1),
            has_view_store: false,
            store_read_interval: Duration::from_millis(250),
            store_silent_after: Duration::from_secs(1),
        }
    }
}
