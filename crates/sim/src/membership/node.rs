//! A node: its clock, its disk, its kernel's lease, and its daemon's state machine.

use super::{MembershipBug, MembershipRunConfig};
use crate::time::Time;
use holdfast_proto::membership::{Membership, MembershipConfig, SaveToken, Standing, StoreToken};
use holdfast_wire::membership_frames::{JoinRole, MembershipState, NodeName};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Time after which impatient nodes take a silent node for failed.
const IMPATIENT_DETECTION_TIMEOUT: Duration = Duration::from_millis(80);

/// Time between two checks for silent server nodes.
const SERVER_NODE_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// A clock that runs fast or slow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    drift_ppm: i64,
}

const MILLION: i128 = 1_000_000;

impl Clock {
    /// Returns the clock's time.
    pub(super) fn read(self, now: Time) -> Duration {
        let ns = i128::from(now.0) * (MILLION + i128::from(self.drift_ppm)) / MILLION;
        Duration::from_nanos(u64::try_from(ns).unwrap_or(0))
    }

    /// Returns the first time at which the clock shows `at` or more.
    pub(super) fn time_of(self, at: Duration) -> Time {
        let ns = i128::from(Time::from(at).0) * MILLION;
        let rate = MILLION + i128::from(self.drift_ppm);
        Time(u64::try_from((ns + rate - 1) / rate).unwrap_or(u64::MAX))
    }
}

/// A node of the group.
#[derive(Debug)]
pub(super) struct SimulatedNode {
    pub(super) name: NodeName,
    pub(super) role: JoinRole,
    impatient: bool,
    pub(super) clock: Clock,
    /// The daemon's state machine; none if the daemon is dead.
    pub(super) machine: Option<Membership>,
    /// Number of the daemon's deaths.
    pub(super) incarnation: u64,
    /// Time of the next wake-up that is queued.
    pub(super) next_wake: Option<Time>,
    /// Time until which the daemon is stopped.
    pub(super) stopped_until: Time,
    pub(super) disk: Option<MembershipState>,
    /// The save that the disk has not finished.
    pub(super) saving: Option<(SaveToken, MembershipState)>,
    /// The end of the lease in the kernel's map, which outlives the daemon.
    pub(super) lease_until: Time,
    /// The highest epoch that the node obeyed.
    pub(super) epoch: u64,
    /// Number of the daemon's last heartbeat.
    pub(super) last_heartbeat: u64,
    /// Token of the daemon's last request to the store of views.
    pub(super) last_store_token: StoreToken,
    /// True if the group's views are in a store.
    has_view_store: bool,
    /// True if the daemon has asked to join.
    pub(super) has_joined_once: bool,
    /// True if the daemon has asked for the list of server nodes.
    pub(super) has_list_request: bool,
    /// True if the node has left the group for good.
    pub(super) is_gone: bool,
    /// Frames that the node has sent and received.
    pub(super) frames: u64,
    pub(super) server_node_check_interval: Duration,
}

/// Returns the name of the node with this index.
pub(super) fn node_name(index: usize) -> NodeName {
    let name = NodeName::try_from(format!("n{}", index + 1));
    name.unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the index of the node with this name.
pub(super) fn node_index(name: &NodeName) -> usize {
    let number = name.as_str().trim_start_matches('n').parse::<usize>();
    number.map_or(usize::MAX, |number| number - 1)
}

impl SimulatedNode {
    pub(super) fn new(config: &MembershipRunConfig, index: usize) -> SimulatedNode {
        SimulatedNode {
            name: node_name(index),
            role: match index < config.voters {
                true => JoinRole::Backup,
                false => JoinRole::ServerNode,
            },
            impatient: config.impatient,
            clock: Clock {
                drift_ppm: config.clock_drifts_ppm[index],
            },
            machine: None,
            incarnation: 0,
            next_wake: None,
            stopped_until: Time::ZERO,
            disk: None,
            saving: None,
            lease_until: Time::ZERO,
            epoch: 0,
            last_heartbeat: 0,
            last_store_token: StoreToken(0),
            has_view_store: config.store,
            has_joined_once: false,
            has_list_request: false,
            is_gone: false,
            frames: 0,
            server_node_check_interval: SERVER_NODE_CHECK_INTERVAL,
        }
    }

    pub(super) fn is_backup(&self) -> bool {
        self.role == JoinRole::Backup
    }

    /// Returns true if the daemon runs and votes.
    pub(super) fn is_voter(&self) -> bool {
        let standing = self.machine.as_ref().map(Membership::standing);
        matches!(standing, Some(Standing::ContactNode | Standing::Backup))
    }

    /// Starts the daemon with the state on the disk. The first node creates the group if its disk is empty: no frame has
    /// left it then.
    pub(super) fn start(&mut self, now: Time, seed: u64, bug: Option<MembershipBug>) {
        let index = node_index(&self.name);
        let address = SocketAddr::from((Ipv4Addr::from(0x0a00_0001 + index as u32), 7400));
        let boot = self.incarnation + 1;
        let mut config = MembershipConfig::new(self.name.clone(), address, self.role, boot);
        config.random_seed = seed ^ (boot << 32);
        config.seeds = vec![node_name(0), node_name(1)];
        // Server nodes that are gone leave the list long before the end of a run.
        config.server_node_check_interval = self.server_node_check_interval;
        if self.impatient {
            config.detection_timeout = IMPATIENT_DETECTION_TIMEOUT;
        }
        config.has_view_store = self.has_view_store;
        if bug == Some(MembershipBug::ServesBeforeFormerLeaseEnds) {
            config.promise_duration = Duration::ZERO;
        }
        if bug == Some(MembershipBug::LeaseOutlivesPromise) {
            config.lease_duration = 2 * config.promise_duration;
        }
        let clock = self.clock.read(now);
        let machine = match self.disk.clone() {
            None if index == 0 => Membership::create(clock, config),
            None => Membership::join(clock, config),
            Some(mut state) => {
                corrupt(&mut state, bug);
                let started_at = match bug {
                    Some(MembershipBug::RestartVotesAtOnce) => {
                        clock.saturating_sub(config.promise_duration)
                    }
                    _ => clock,
                };
                Membership::restore(started_at, config, state)
            }
        };
        self.machine = Some(machine);
        (self.next_wake, self.last_heartbeat) = (None, 0);
        (self.has_joined_once, self.has_list_request) = (false, false);
    }

    /// Kills the daemon. `is_saved` tells whether the open save has reached the disk.
    pub(super) fn crash(&mut self, is_saved: bool) -> Option<MembershipState> {
        self.machine = None;
        self.incarnation += 1;
        self.stopped_until = Time::ZERO;
        let (_, state) = self.saving.take()?;
        is_saved.then_some(state)
    }
}

/// Removes from a saved state the part that a deliberate bug forgets.
fn corrupt(state: &mut MembershipState, bug: Option<MembershipBug>) {
    match bug {
        Some(MembershipBug::ForgetsAcceptance) => state.accepted = None,
        Some(MembershipBug::ReusesNodeIds) => {
            if let Some(view) = &mut state.committed {
                let highest = view.voters.iter().map(|voter| voter.id.0).max();
                view.next_id = u32::from(highest.unwrap_or(0)) + 1;
            }
        }
        _ => {}
    }
}
