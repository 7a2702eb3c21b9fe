//! The conductor: moves processes until the nodes of a group are loaded evenly, and empties nodes that an operator drains
//! (paper 002, section IV).
//!
//! Each node has a conductor, and none leads. A node that is loaded more than the others (*transfer* policy) looks for a
//! node about as far below the average (*location*), chooses a process that uses about the difference (*selection*), and
//! offers the process. What nodes know of each other they learn by gossip (*information*): each message has the sender's
//! load and the newest loads that the sender has heard of, so a node sends and receives as much in a group of 1,000 as in a
//! group of 10. Messages are heartbeats too: a node without a fresh load gets no offers.
//!
//! ```text
//!   donor                                 acceptor
//!     │ ── Offer: process, own load ───────► │ judges by its own load and limits
//!     │ ◄─────────── Accept: its own load ── │ (or Decline, with the reason)
//!     │ judges by the acceptor's own word    │ keeps itself free
//!     │ ── Begin ──────────────────────────► │
//!     │ Output::BeginMove … handle_move_ended│ ── Inquire, if in doubt ──► Begin or Ended
//!     │ ── Ended ──────────────────────────► │
//!     both calm down, and observe the load
//! ```
//!
//! The paper's policies alone thrash when loads are noisy or processes are large. Therefore the loads of both nodes after
//! the move are predicted, and a move is made only if the acceptor stays clearly below the donor's former load and near
//! enough to the average that it need not give the process away again. A process that has moved rests. [`Decision`] has
//! the reason for each move and for each process that stays.
//!
//! A node takes part in one move at a time, and in a limited number a minute, whatever others say. Other nodes are
//! believed as follows: a donor begins no move that does not help by its own load and by the acceptor's own word, so false
//! hearsay costs declined offers, and may keep a node from giving processes away until its load is critical. A node that
//! lies about its own load gets processes that it does not deserve, at the rate of the limit.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs in order until there are none, and wakes the machine at
//! `poll_timeout`. Frames may be lost, late or repeated.

mod acceptor;
mod audit;
mod config;
mod decision;
mod donor;
mod drain;
mod event;
mod gossip;
mod known_nodes;
mod load;
mod move_limits;
mod planner;
mod policy;
#[cfg(test)]
mod tests;

pub use audit::{AuditOutcome, AuditRecord, AuditRole, RECORDS_MAX};
pub use config::ConductorConfig;
pub use decision::{
    Decision, LoadChange, OBSTACLES_MAX, Obstacle, ObstacleReason, PlannedMove, StayReason,
    Unavailable,
};
pub use drain::DrainStatus;
pub use event::{Event, Output};
pub use load::{LoadSample, PlacementRules, ProcessSample};
pub use policy::{InformationPolicy, LocationPolicy, Policies, SelectionPolicy, TransferPolicy};

use crate::view::View;
use acceptor::Incoming;
use audit::AuditLog;
use core::time::Duration;
use donor::Outgoing;
use drain::Drain;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{
    ConductorFrame, LoadReport, MovePurpose, NodeDemand, OfferEnd, OfferId, PastMove, ProcessKey,
    Utilization,
};
use known_nodes::KnownNodes;
use load::OwnLoad;
use move_limits::{MoveRate, ProcessHistories};
use policy::TransferState;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::{BTreeMap, VecDeque};
use std::mem::Discriminant;

/// The conductor of one node; see the module documentation.
#[derive(Debug)]
pub struct Conductor {
    config: ConductorConfig,
    random: SmallRng,
    outputs: VecDeque<Output>,
    view: View,
    /// The other nodes of the view, in the order of their numbers.
    peers: Vec<NodeId>,
    own: OwnLoad,
    known: KnownNodes,
    /// Processes that a node declined for a lasting reason of their own, until these times.
    refusals: BTreeMap<(ProcessKey, NodeId), Duration>,
    transfer_state: TransferState,
    drain: Option<Drain>,
    rate: MoveRate,
    histories: ProcessHistories,
    /// Number of moves from and to this node, by the daemon's word: also of moves that an operator requested.
    moves_under_way: usize,
    /// True from a move that this conductor did not begin until a sample after its end: the last sample may list a process
    /// that has left.
    has_unseen_move: bool,
    calm_until: Duration,
    /// Time until which a donor may begin a move that this daemon's former life accepted.
    starts_until: Duration,
    outgoing: Option<Outgoing>,
    incoming: Option<Incoming>,
    /// The latest offers of this node, for acceptors that ask.
    ended_offers: VecDeque<(NodeId, OfferId, OfferEnd)>,
    next_seq: u64,
    gossip_at: Duration,
    decision_at: Duration,
    audit: AuditLog,
    /// Kind of the last reason that was reported.
    last_stay: Option<Discriminant<StayReason>>,
}

impl Conductor {
    /// Returns the machine of a daemon that starts in a group with this view. The daemon before may have moved processes
    /// until now, so balancing begins after a minute.
    pub fn new(now: Duration, config: ConductorConfig, view: View) -> Conductor {
        let random = SmallRng::seed_from_u64(config.random_seed);
        let mut machine = Conductor {
            random,
            outputs: VecDeque::new(),
            peers: Vec::new(),
            view,
            own: OwnLoad::default(),
            known: KnownNodes::default(),
            refusals: BTreeMap::new(),
            transfer_state: TransferState::default(),
            drain: None,
            rate: MoveRate::at_start(now, config.moves_per_minute_max),
            histories: ProcessHistories::default(),
            moves_under_way: 0,
            has_unseen_move: false,
            calm_until: now + config.calm_down,
            starts_until: now + config.answer_timeout,
            outgoing: None,
            incoming: None,
            ended_offers: VecDeque::new(),
            next_seq: 1,
            gossip_at: now,
            decision_at: now + config.decision_interval,
            audit: AuditLog::default(),
            last_stay: None,
            config,
        };
        machine.list_peers();
        machine
    }

    /// Takes a view of the group; an older one is ignored.
    pub fn handle_view(&mut self, now: Duration, view: View) {
        if view.is_newer_than(&self.view) {
            self.apply_view(now, view);
        }
    }

    /// Takes the removal of this node from the group: there are no other nodes until a newer view comes.
    pub fn handle_removal(&mut self, now: Duration) {
        let view = self.view.without_nodes();
        self.apply_view(now, view);
    }

    fn apply_view(&mut self, now: Duration, view: View) {
        self.view = view;
        self.list_peers();
        let view = &self.view;
        self.known.retain(|node| view.contains(node));
        self.end_offer_to_former_member(now);
        self.end_offer_of_former_member(now);
        self.settle();
    }

    fn list_peers(&mut self) {
        let view = &self.view;
        let voters = std::iter::once(&view.contact_node).chain(&view.backups);
        let nodes = voters.chain(&view.server_nodes).copied();
        let own = self.config.node;
        self.peers = nodes
            .filter(|node| *node != own && *node != crate::view::NO_NODE)
            .collect();
        self.peers.sort_unstable();
        self.peers.dedup();
    }

    /// Returns true if a node is another node of the view.
    fn is_peer(&self, node: NodeId) -> bool {
        self.peers.binary_search(&node).is_ok()
    }

    /// Takes the load of this node and its processes, which the daemon measures about once a second.
    pub fn handle_sample(&mut self, now: Duration, sample: LoadSample) {
        let histories = &self.histories;
        let expected = |process| histories.get(process)?.expected;
        self.own
            .update(now, sample, self.config.smoothing, expected);
        self.has_unseen_move = self.has_move_of_others();
        self.refusals.retain(|_, until| *until > now);
        let here = self.own.processes().iter();
        let here = here.map(|process| process.sample.key);
        self.histories.expire(now, &self.config, here);
        self.update_shedding(now);
        self.settle();
    }

    /// Takes the number of moves from and to this node, whoever requested them. While there is one, this conductor begins
    /// and accepts no other. After each one the node calms down (paper 002, section IV-A).
    pub fn handle_moves_under_way(&mut self, now: Duration, moves: usize) {
        if moves < self.moves_under_way {
            self.calm_until = now + self.config.calm_down;
        }
        self.moves_under_way = moves;
        self.has_unseen_move |= self.has_move_of_others();
    }

    /// Returns true if a move is under way that this conductor did not begin: an operator, another node or the daemon's
    /// former life did.
    fn has_move_of_others(&self) -> bool {
        let own = self.outgoing.as_ref().is_some_and(Outgoing::is_moving);
        self.moves_under_way > usize::from(own)
    }

    /// Takes the process histories of the daemon's former life, with ages that include the time in between.
    pub fn handle_process_histories(
        &mut self,
        now: Duration,
        histories: &[(ProcessKey, Vec<PastMove>)],
    ) {
        for (process, past) in histories {
            self.histories.learn(now, *process, past);
        }
        self.histories.is_changed = false;
    }

    /// Handles a frame from the node `from`, as named by the channel's certificate.
    pub fn handle_frame(&mut self, now: Duration, from: NodeId, frame: ConductorFrame) {
        if !self.is_peer(from) {
            return self.ignore(
                from,
                frame.name(),
                "the sender is no other node of the group",
            );
        }
        match frame {
            ConductorFrame::Loads { reports } => self.on_loads(now, from, &reports),
            ConductorFrame::Offer {
                id,
                purpose,
                donor,
                process,
            } => self.on_offer(now, (from, id), purpose, donor, &process),
            ConductorFrame::Accept { id, acceptor } => self.on_accept(now, from, id, acceptor),
            ConductorFrame::Decline { id, reason } => self.on_decline(now, from, id, reason),
            ConductorFrame::Begin { id } => self.on_begin(now, from, id),
            ConductorFrame::Inquire { id } => self.on_inquire(from, id),
            ConductorFrame::Ended { id, end } => self.on_ended(now, from, id, end),
        }
        self.settle();
    }

    /// Switches balancing on or off at this node. A move under way is completed.
    pub fn handle_balancing(&mut self, now: Duration, is_on: bool) {
        self.config.is_balancing = is_on;
        self.transfer_state = TransferState::default();
        if !is_on {
            self.withdraw_offer(now, MovePurpose::Balance);
        }
        self.settle();
    }

    /// Decides at once, without waiting for the load to have been high for a while, and begins the move. All limits hold.
    pub fn handle_balance_now(&mut self, now: Duration) -> Decision {
        self.transfer_state.is_on = true;
        let decision = self.plan(now);
        if let Decision::Move(plan) = &decision {
            self.offer(now, *plan);
        }
        self.settle();
        decision
    }

    /// Begins to move all processes away, and to take none. The drain ends at `deadline`, if there is one: processes that
    /// are left then stay.
    pub fn handle_drain(&mut self, now: Duration, deadline: Option<Duration>) -> DrainStatus {
        match &mut self.drain {
            Some(drain) => (drain.deadline, drain.is_ended) = (deadline, false),
            None => self.drain = Some(Drain::new(deadline)),
        }
        self.withdraw_offer(now, MovePurpose::Balance);
        self.decision_at = now;
        // Other nodes must know at once that this one takes no processes.
        self.gossip_at = now;
        self.settle();
        self.status_of_drain(now)
    }

    /// Ends a drain: the node takes processes again. A move under way is completed.
    pub fn handle_undrain(&mut self, now: Duration) {
        self.drain = None;
        self.withdraw_offer(now, MovePurpose::Drain);
        self.gossip_at = now;
        self.settle();
    }

    /// Handles all timers due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.on_donor_timeout(now);
        self.on_acceptor_timeout(now);
        if self.audit.observe_at().is_some_and(|due| due <= now) {
            let own = self.own_demand(now).map(|own| own.utilization());
            if let Some(record) = self.audit.observe(own) {
                self.report(Event::Observed(Box::new(record)));
            }
        }
        if self.gossip_at <= now {
            self.tell_loads(now);
        }
        if self.decision_at <= now {
            self.act(now);
        }
        self.settle();
    }

    /// Returns the next output, none if there is none left.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns the time at which to call `handle_timeout`. The time may be past.
    pub fn poll_timeout(&self) -> Duration {
        let others = [
            self.outgoing
                .as_ref()
                .map(|outgoing| outgoing.due(&self.config)),
            self.incoming.as_ref().map(|incoming| incoming.inquire_at),
            self.audit.observe_at(),
        ];
        let regular = self.gossip_at.min(self.decision_at);
        others.into_iter().flatten().fold(regular, Duration::min)
    }

    /// Returns the decision that this node would make now, and its reasons.
    pub fn plan(&self, now: Duration) -> Decision {
        self.decide(now)
    }

    /// Returns the progress of a drain; none if the node is not being drained.
    pub fn drain_status(&self, now: Duration) -> Option<DrainStatus> {
        self.drain.is_some().then(|| self.status_of_drain(now))
    }

    /// Returns the latest records of the audit log, the latest last.
    pub fn audit_records(&self) -> impl Iterator<Item = &AuditRecord> {
        self.audit.records()
    }

    /// Returns the past moves of the processes here, for [`Conductor::handle_process_histories`] of the next daemon.
    pub fn process_histories(&self, now: Duration) -> Vec<(ProcessKey, Vec<PastMove>)> {
        self.histories.all(now)
    }

    /// Returns the smoothed load of this node; none before the first sample, or if the last one is old.
    pub fn own_demand(&self, now: Duration) -> Option<NodeDemand> {
        self.own.demand(now, self.config.freshness)
    }

    /// Returns the mean load of this node and the nodes that it knows; none if no load is known.
    pub fn average(&self, now: Duration) -> Option<Utilization> {
        let average = self.average_points(now);
        average.map(|points| Utilization::of(points, 100.0))
    }

    /// Returns the fresh loads of other nodes, the newest first.
    pub fn known_loads(&self, now: Duration) -> Vec<LoadReport> {
        let all = self.known.len();
        self.known.newest(now, self.config.freshness, all)
    }

    /// Returns true if no offer of or to this node is open.
    pub fn is_idle(&self) -> bool {
        self.outgoing.is_none() && self.incoming.is_none()
    }

    /// Returns this node's load if the node can take part in a move.
    fn availability(&self, now: Duration, purpose: MovePurpose) -> Result<NodeDemand, Unavailable> {
        let own = self.own_demand(now).ok_or(Unavailable::LoadUnknown)?;
        let is_balance = purpose == MovePurpose::Balance;
        if is_balance && !self.config.is_balancing {
            return Err(Unavailable::BalancingOff);
        }
        if !self.is_idle() || self.moves_under_way > 0 {
            return Err(Unavailable::Busy);
        }
        if now < self.starts_until {
            return Err(Unavailable::Starting);
        }
        if is_balance && now < self.calm_until {
            return Err(Unavailable::CalmingDown(self.calm_until - now));
        }
        let max = match purpose {
            MovePurpose::Balance => self.config.moves_per_minute_max,
            MovePurpose::Drain => self.config.drain_moves_per_minute_max,
        };
        match self.rate.moves(now) < max {
            true => Ok(own),
            false => Err(Unavailable::RateLimit { max }),
        }
    }

    /// Reports changes that handlers have made.
    fn settle(&mut self) {
        if std::mem::take(&mut self.histories.is_changed) {
            self.report(Event::HistoriesChanged);
        }
    }

    fn send(&mut self, to: NodeId, frame: ConductorFrame) {
        self.outputs.push_back(Output::Send { to, frame });
    }

    fn report(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }

    fn ignore(&mut self, from: NodeId, frame: &'static str, reason: &'static str) {
        self.report(Event::Ignored {
            from,
            frame,
            reason,
        });
    }

    /// Returns a random duration from 3/4 to 5/4 of `mean`.
    fn around(&mut self, mean: Duration) -> Duration {
        mean.mul_f64(0.75 + self.random.random::<f64>() / 2.0)
    }
}
