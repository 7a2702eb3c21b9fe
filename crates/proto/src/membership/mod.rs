//! Membership: how a group runs itself (paper 000, section 2.3).
//!
//! One machine per node. The contact node and the backups are the *voters*: they keep the view on their disks, and decide
//! on the next one by a vote of their majority. The first voter of a view is its contact node, the others follow as
//! backups in their order of succession. Server nodes only know the view, and register with the contact node.
//!
//! The view of epoch e + 1 counts once a majority of the voters *of epoch e* has it on disk. Each epoch is one vote by
//! Lamport's single-decree Paxos. Ballot 0 belongs to the contact node, which needs no first phase: its vote is the
//! two-phase commit of paper 000, section 2.3.1. A backup that replaces a silent contact node asks for promises first, and
//! must propose a view that a voter has accepted, if there is one.
//!
//! The contact node serves only while it has a *lease*: see [`Event::Lease`]. Heartbeats renew the lease, and tell the
//! contact node and its backups that the others live. Only the contact node removes backups; backups replace the contact
//! node. Were backups to remove each other, a contact node could keep a lease by voters that have no vote any more.
//!
//! Frames are addressed by the names of nodes, since a node has a name (in its certificate) before it has a number. A
//! node gets a number when it joins, a voter a new one each time. [`JoinNumber`] tells a node from one that has lost its
//! disk, or has left for good, and joins under the same name.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs in order until there are none, and wakes the machine at
//! `poll_timeout`. Frames may be lost, late or repeated.
//!
//! Nodes trust the voters. The word of any other node that can send frames, and each host with a certificate of the group
//! can, changes nothing: see `trust`.
//!
//! Safety: two views of one epoch never exist, epochs of a node never decrease, and two nodes never hold a lease at once,
//! as long as clocks run at most 2 % fast or slow and disks keep what they saved. Liveness: once a majority of the voters
//! reach each other, one of them holds a lease, and living nodes are members.

mod acceptor;
mod backup;
mod config;
mod contact;
mod event;
mod group_changes;
mod joining;
mod lease;
mod list_copy;
mod list_keeper;
mod next_view;
mod numbers;
mod operator;
mod proposal;
mod proposer;
mod registration;
mod server_list;
mod stored_state;
#[cfg(test)]
mod test_group;
#[cfg(test)]
mod tests;
mod trust;
mod view_change;
mod view_store;

pub use config::MembershipConfig;
pub use event::{Event, GroupChangeFailure, Output, Recipient, RemovalCause, SaveToken};
pub use operator::OperatorError;
pub use view_store::{StoreAnswer, StoreRequest, StoreToken};

use self::acceptor::Voting;
use self::backup::ContactWatch;
use self::contact::ContactDuties;
use self::group_changes::OwnRequests;
use self::joining::{JoinAttempt, LeaveAttempt};
use self::registration::Registration;
use self::server_list::ServerList;
use self::stored_state::{Effect, StoredState};
use self::trust::Trust;
use self::view_store::StoreLink;
use crate::view::View;
use holdfast_wire::NodeId;
use holdfast_wire::group_data::GroupSettings;
use holdfast_wire::membership_frames::{
    GroupData, JoinNumber, JoinRefusal, JoinRole, Member, MembershipFrame, MembershipState,
    NodeName, VotedView,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

/// The place of a node in its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// The node is the contact node, with or without a lease.
    ContactNode,
    /// The node may become contact node.
    Backup,
    /// The node only serves.
    ServerNode,
    /// The node is not in the group: it joins, or it has left.
    Outside,
}

/// The membership machine of a node; see the module documentation.
#[derive(Debug)]
pub struct Membership {
    config: MembershipConfig,
    random: SmallRng,
    outputs: VecDeque<Output>,
    stored: StoredState,
    /// The view that the local node obeys: committed, and on the disk.
    view: Option<VotedView>,
    /// The settings in `view`; none without a view, or if this release cannot read them.
    settings: Option<GroupSettings>,
    own_requests: OwnRequests,
    /// Number of the changes in [`View::revision`].
    revision: u64,
    standing: Standing,
    voting: Voting,
    contact_watch: ContactWatch,
    contact: ContactDuties,
    server_list: ServerList,
    /// Time from which changes of the list of server nodes may be requested again.
    list_request_at: Duration,
    joining: Option<JoinAttempt>,
    leaving: Option<LeaveAttempt>,
    registration: Registration,
    trust: Trust,
    /// The store of the group's views; none if the voters vote.
    store: Option<StoreLink>,
    /// Times at which nodes with older views were sent the view.
    informed: BTreeMap<NodeName, Duration>,
}

impl Membership {
    /// Returns the machine of the first node of a new group: its contact node, the only voter of epoch 1.
    pub fn create(now: Duration, config: MembershipConfig) -> Membership {
        let mut machine = Membership::new(now, config, MembershipState::default());
        let join = JoinNumber(machine.random.random());
        let own = Member {
            id: NodeId(1),
            name: machine.config.name.clone(),
            address: machine.config.address,
            join,
        };
        let view = VotedView {
            epoch: 1,
            voters: vec![own],
            next_id: 2,
            group_data: GroupData {
                version: 0,
                bytes: bytes::Bytes::new(),
            },
        };
        machine.stored.state.join = Some(join);
        machine.stored.state.committed = Some(view.clone());
        machine.stored.mark_changed();
        machine.stored.defer(Effect::Apply {
            view,
            announce: false,
        });
        machine.settle(now);
        machine
    }

    /// Returns the machine of a node without saved state, which joins the group in the role of its configuration.
    pub fn join(now: Duration, config: MembershipConfig) -> Membership {
        let mut machine = Membership::new(now, config, MembershipState::default());
        machine.start_joining();
        machine.settle(now);
        machine
    }

    /// Returns the machine of a node whose daemon restarts with the state on its disk. A node that was outside the group
    /// joins.
    ///
    /// The node abstains from votes for one `promise_duration`, since the state does not contain its promise to the
    /// contact node.
    pub fn restore(now: Duration, config: MembershipConfig, state: MembershipState) -> Membership {
        let mut machine = Membership::new(now, config, state);
        machine.voting.abstains_until = now + machine.config.promise_duration;
        if machine.store.is_some() {
            // Votes of a group that has voted before.
            let state = &mut machine.stored.state;
            (state.promised, state.accepted) = (None, None);
        }
        machine.view = machine.stored.state.committed.clone();
        if let Some(view) = &machine.view {
            machine.server_list.note_voters(&view.voters);
        }
        machine.update_settings(None);
        machine.standing = machine.standing_in_view();
        match machine.standing {
            Standing::ContactNode => machine.begin_contact_duties(now),
            Standing::ServerNode => {
                machine.register_soon(now);
                machine.request_list_of_contact(now);
            }
            Standing::Backup => {}
            Standing::Outside => machine.start_joining(),
        }
        machine.report_view();
        machine.settle(now);
        machine
    }

    fn new(now: Duration, config: MembershipConfig, state: MembershipState) -> Membership {
        let fold = |seed: u64, byte: u8| (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let seed = config.name.as_str().bytes().fold(config.random_seed, fold);
        Membership {
            random: SmallRng::seed_from_u64(seed),
            outputs: VecDeque::new(),
            stored: StoredState::new(state),
            view: None,
            settings: None,
            own_requests: OwnRequests::default(),
            revision: 0,
            standing: Standing::Outside,
            voting: Voting::default(),
            contact_watch: ContactWatch::new(now),
            contact: ContactDuties::default(),
            server_list: ServerList::default(),
            list_request_at: now,
            joining: None,
            leaving: None,
            registration: Registration::new(now, &config),
            trust: Trust::new(now),
            store: config.has_view_store.then(|| StoreLink::new(now)),
            informed: BTreeMap::new(),
            config,
        }
    }

    /// Handles a frame from the node `from`, as named by a datagram's authentication code. Nothing is known of the role that
    /// the sender's certificate admits to.
    pub fn handle_frame(&mut self, now: Duration, from: &NodeName, frame: MembershipFrame) {
        self.handle_channel_frame(now, from, None, frame);
    }

    /// Handles a frame from the node `from`, as named by the channel's certificate, which admits the sender to the role
    /// `certified`; none if the certificate, of an earlier release, names no role.
    pub fn handle_channel_frame(
        &mut self,
        now: Duration,
        from: &NodeName,
        certified: Option<JoinRole>,
        frame: MembershipFrame,
    ) {
        use MembershipFrame as F;
        if *from == self.config.name {
            return self.ignore(from, frame.name(), "a node sends no frames to itself");
        }
        self.note_contact_alive(now, from);
        self.note_server_node_alive(from);
        let Some(frame) = self.refuse_unbelieved(now, from, frame) else {
            return self.settle(now);
        };
        if self.store.is_some() && is_vote(&frame) {
            let reason = "the sender votes on views, which this node keeps in a store";
            return self.ignore(from, frame.name(), reason);
        }
        match frame {
            F::Prepare { epoch, ballot } => self.on_prepare(now, from, epoch, ballot),
            F::Promise {
                epoch,
                ballot,
                accepted,
            } => self.on_promise(now, from, epoch, ballot, accepted),
            F::Propose { ballot, view } => self.on_propose(now, from, ballot, view),
            F::Accept { epoch, ballot } => self.on_accept(from, epoch, ballot),
            F::Reject {
                epoch,
                ballot,
                promised_round,
            } => self.on_reject(now, from, epoch, ballot, promised_round),
            F::Commit { view } => self.on_commit(now, from, view),
            F::Removed { view, rejoin } => self.on_removed(now, from, &view, rejoin),
            F::Heartbeat(heartbeat) => self.on_heartbeat(now, from, heartbeat),
            F::LeaseGrant {
                epoch,
                boot,
                sequence,
                join,
            } => self.on_lease_grant(now, from, (epoch, boot, sequence), join),
            F::ViewRequest { epoch } => self.on_view_request(from, epoch),
            F::WhoIsContact => self.on_who_is_contact(now, from),
            F::Contact {
                view,
                is_registered,
                server_list,
            } => self.on_contact(now, from, view, is_registered.then_some(server_list)),
            F::NotContact { view } => self.on_not_contact(now, from, view),
            F::Join { role, join, .. } if self.refuses_role(from, certified, role) => {
                let reason = JoinRefusal::NotAdmittedAsBackup;
                self.send(from.clone(), MembershipFrame::JoinRefused { join, reason });
            }
            F::Join {
                role,
                address,
                join,
            } => self.on_join(now, from, role, address, join),
            F::Joined { id, join, view } => self.on_joined(now, from, id, join, view),
            F::JoinRefused { join, reason } => self.on_join_refused(from, join, reason),
            F::Register { id, address, join } => self.on_register(now, from, id, address, join),
            F::Leave { join } => self.on_leave(from, join),
            F::ServerNodes {
                version,
                base,
                changes,
            } => self.on_server_nodes(now, from, version, base, changes),
            F::ServerNodesRequest { known } => self.on_server_nodes_request(now, from, known),
            F::GroupChangeRequest { id, change, uid } => {
                self.on_group_change_request(now, from, id, change, uid);
            }
            F::GroupChangeResponse { id, result } => {
                self.on_group_change_response(from, id, result);
            }
        }
        self.settle(now);
    }

    /// Handles the end of a save: the disk has the state, or an explanation says why not.
    pub fn handle_saved(&mut self, now: Duration, token: SaveToken, result: Result<(), String>) {
        let retry_at = now + self.config.save_retry_interval;
        let is_open = self.stored.end_save(token, result.is_ok(), retry_at);
        if let (true, Err(error)) = (is_open, result) {
            self.report(Event::SaveFailed { error });
        }
        self.settle(now);
    }

    /// Handles all timers due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        let Some(due) = self.poll_timeout().filter(|due| *due <= now) else {
            return;
        };
        if now - due > self.config.heartbeat_interval {
            // This daemon has slept, and the frames of others may still be unread.
            self.contact_watch.excused_until = now + 2 * self.config.heartbeat_interval;
            self.contact.grants.excuse_silence(now);
            self.trust.excuse_silence(now);
        }
        if self.stored.retry_at().is_some_and(|due| due <= now) {
            self.stored.retry();
        }
        self.on_proposal_timeout(now);
        self.on_store_timeout(now);
        match self.standing {
            Standing::ContactNode if self.contact.heartbeat_at <= now => self.send_heartbeats(now),
            Standing::Backup if self.takeover_at().is_some_and(|due| due <= now) => {
                self.start_takeover(now);
            }
            Standing::ServerNode => self.on_registration_timeout(now),
            _ => {}
        }
        self.on_joining_timeout(now);
        self.on_leaving_timeout(now);
        self.on_group_changes_timeout(now);
        self.on_search_timeout(now);
        self.settle(now);
    }

    /// Returns the next output, none if there is none left.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns the time at which to call `handle_timeout`, none for never. The time may be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let of_standing = match self.standing {
            Standing::ContactNode => Some(self.contact.heartbeat_at),
            Standing::Backup => self.takeover_at(),
            Standing::ServerNode => Some(self.registration.next_timeout()),
            Standing::Outside => None,
        };
        let due = [
            self.stored.retry_at(),
            self.voting.proposal_timeout(),
            self.joining.as_ref().and_then(|joining| joining.retry_at),
            self.leaving.as_ref().map(|leaving| leaving.retry_at),
            self.own_requests.next_timeout(),
            self.search_at(),
            self.store_timeout(),
            of_standing,
        ];
        due.into_iter().flatten().min()
    }

    /// Returns true if the local node is contact node and has a lease.
    pub fn is_serving(&self, now: Duration) -> bool {
        self.standing == Standing::ContactNode
            && self.contact.lease_until.is_some_and(|until| until > now)
    }

    /// Returns the place of the local node in the group.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Returns the number of the local node; none outside the group.
    pub fn own_id(&self) -> Option<NodeId> {
        match self.standing {
            Standing::ContactNode | Standing::Backup => self.own_voter().map(|own| own.id),
            Standing::ServerNode => self.stored.state.server_node_id,
            Standing::Outside => None,
        }
    }

    /// Returns the local node as a server node; none in another role.
    pub fn own_server_node(&self) -> Option<Member> {
        let state = &self.stored.state;
        let id = state.server_node_id;
        let id = id.filter(|_| self.standing == Standing::ServerNode)?;
        Some(Member {
            id,
            name: self.config.name.clone(),
            address: self.config.address,
            join: state.join?,
        })
    }

    /// Returns the newest committed view that the local node knows, with the group data.
    pub fn voted_view(&self) -> Option<&VotedView> {
        self.view.as_ref()
    }

    /// Returns the server nodes that the local node knows: all of them at the contact node, a recent copy at other members.
    pub fn server_nodes(&self) -> impl Iterator<Item = &Member> {
        self.server_list.members()
    }

    /// Returns the address of a node's daemon, if the local node knows the node.
    pub fn address_of(&self, name: &NodeName) -> Option<SocketAddr> {
        let voter = self.view.as_ref().and_then(|view| view.voter(name));
        let member = voter.or_else(|| self.server_list.by_name(name));
        let known = self
            .joining
            .as_ref()
            .and_then(|joining| joining.member(name));
        let joiner = self.contact.joiners.get(name).map(|joiner| joiner.address);
        member.or(known).map(|member| member.address).or(joiner)
    }

    /// Returns the view for the other machines; none outside the group.
    pub fn current_view(&self) -> Option<View> {
        let view = self.view.as_ref()?;
        let contact_node = view.contact()?.id;
        let server_nodes = self.server_list.members().map(|member| member.id);
        let own = self.stored.state.server_node_id;
        (self.standing != Standing::Outside).then(|| View {
            epoch: view.epoch,
            revision: self.revision,
            contact_node,
            backups: view.voters[1..].iter().map(|voter| voter.id).collect(),
            server_nodes: server_nodes.chain(own).collect(),
        })
    }

    /// Carries out everything that an input has made possible.
    fn settle(&mut self, now: Duration) {
        loop {
            while let Some(effect) = self.stored.next_effect() {
                self.on_effect(now, effect);
            }
            if !self.propose_pending_changes(now) {
                break;
            }
        }
        self.refresh_store(now);
        self.update_lease(now);
        if let Some((token, state)) = self.stored.begin_save() {
            self.outputs.push_back(Output::Save { token, state });
        }
    }

    fn on_effect(&mut self, now: Duration, effect: Effect) {
        let committed = self.committed_epoch();
        match effect {
            Effect::Send { to, epoch, frame } if epoch > committed => self.send(to, frame),
            Effect::OwnPromise { epoch, ballot } => self.count_own_promise(now, epoch, ballot),
            Effect::OwnAccept { epoch, ballot } => self.count_own_acceptance(now, epoch, ballot),
            Effect::Apply { view, announce } => self.apply_view(now, view, announce),
            Effect::RequestJoin => self.request_join(now),
            Effect::Send { .. } => {}
        }
    }

    fn send(&mut self, to: NodeName, frame: MembershipFrame) {
        let to = Recipient::Node(to);
        self.outputs.push_back(Output::Send { to, frame });
    }

    fn report(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }

    fn report_view(&mut self) {
        if let Some(view) = self.current_view() {
            self.report(Event::View(view));
        }
    }

    fn ignore(&mut self, from: &NodeName, frame: &'static str, reason: &'static str) {
        self.report(Event::Ignored {
            from: from.clone(),
            frame,
            reason,
        });
    }

    /// Returns the epoch of the newest view that the local node knows to be committed, on the disk or about to be.
    fn committed_epoch(&self) -> u64 {
        let committed = self.stored.state.committed.as_ref();
        committed.map_or(0, |view| view.epoch)
    }

    /// Returns true if the voter is the local node in its present life.
    fn is_own(&self, voter: &Member) -> bool {
        voter.name == self.config.name && Some(voter.join) == self.stored.state.join
    }

    /// Returns the local node as a voter of the view that it obeys.
    fn own_voter(&self) -> Option<&Member> {
        let voters = &self.view.as_ref()?.voters;
        voters.iter().find(|voter| self.is_own(voter))
    }

    /// Returns the contact node of the view that the local node obeys.
    fn contact_member(&self) -> Option<&Member> {
        self.view.as_ref()?.contact()
    }

    fn is_contact_name(&self, name: &NodeName) -> bool {
        (self.contact_member()).is_some_and(|contact| contact.name == *name)
    }

    fn standing_in_view(&self) -> Standing {
        let contact = self.contact_member();
        if contact.is_some_and(|contact| self.is_own(contact)) {
            Standing::ContactNode
        } else if self.own_voter().is_some() {
            Standing::Backup
        } else if self.stored.state.server_node_id.is_some() && self.view.is_some() {
            Standing::ServerNode
        } else {
            Standing::Outside
        }
    }

    /// Returns a random duration below `longest`.
    fn random_wait(&mut self, longest: Duration) -> Duration {
        longest.mul_f64(self.random.random::<f64>())
    }

    /// Returns a wait that doubles with each attempt up to `longest`, shortened at random by up to a half.
    fn retry_wait(&mut self, attempts: u32, longest: Duration) -> Duration {
        let wait = self.config.join_retry_interval * 2_u32.pow(attempts.min(10));
        let wait = wait.min(longest);
        wait / 2 + self.random_wait(wait / 2)
    }
}

/// Returns true for the frames of a vote on a view.
fn is_vote(frame: &MembershipFrame) -> bool {
    matches!(
        frame,
        MembershipFrame::Prepare { .. }
            | MembershipFrame::Promise { .. }
            | MembershipFrame::Propose { .. }
            | MembershipFrame::Accept { .. }
            | MembershipFrame::Reject { .. }
    )
}
