//! The driver: owns the machine, gives it frames, requests and timers, and carries out its outputs.

use std::collections::BTreeSet;
use std::net::UdpSocket as StdUdpSocket;
use std::time::Duration;

use holdfast_api::control::{ErrorBody, MembershipChange};
use holdfast_daemon::log_limit::{LogLimit, shortened};
use holdfast_proto::membership::{
    Event, GroupChangeFailure, Membership, OperatorError, Output, Recipient, RemovalCause,
    SaveToken, Standing, StoreRequest, StoreToken,
};
use holdfast_proto::view::NO_NODE;
use holdfast_sys::caps::{Capability, keep_only_capabilities};
use holdfast_sys::priority::become_realtime;
use holdfast_wire::authenticated_datagram::{DatagramFrame, SENDERS_MAX};
use holdfast_wire::group_data::{GroupChange, GroupChangeId, GroupChangeRefusal};
use holdfast_wire::membership_frames::{Member, MembershipFrame, MembershipState, NodeName};
use tokio::net::UdpSocket;
use tokio::sync::{mpsc, oneshot, watch};

use super::channel_link::ChannelSender;
use super::datagrams::Datagrams;
use super::etcd::{EndpointAnswer, EtcdStore};
use super::group_event::{GroupEvent, KernelLease, LeaseWriter};
use super::operator::{OperatorRequest, OperatorRequests};
use super::state_file::{DiskThread, SaveResult};
use super::status::MembershipStatus;
use super::{MembershipOptions, boot_clock};
use crate::metrics::Metrics;
use crate::peer_channel::{DatagramKeyTable, ReceivedMembershipFrame};

/// Maximum number of frames from the peer channel that are handled before timers are looked at.
const FRAMES_AT_ONCE_MAX: usize = 64;

/// Maximum length of a refused change in the log, in bytes.
const LOGGED_CHANGE_BYTES_MAX: usize = 200;

/// What an operator can do for a group whose backups cannot replace the contact node.
const TAKEOVER_REMEDY: &str = "start their daemons; if the others are dead for good, run `holdfast group takeover --force` at one backup";

/// Remedy for a node that hears none of its voters: the group may have replaced all of them.
const SEARCH_REMEDY: &str = "check the network; if the group has gone on with other nodes, name one of them in group.seeds and restart this daemon";

/// The answer to a request for a change of the group's settings: the version of the group data that has the change.
pub(super) type ChangeReply = oneshot::Sender<Result<u64, GroupChangeFailure>>;

/// An input from the engine to the membership driver.
pub(super) enum DriverInput {
    /// A request of the operator.
    Operator {
        request: OperatorRequest,
        reply: oneshot::Sender<Result<MembershipChange, ErrorBody>>,
    },
    /// A change of the group's settings, requested by the user `uid` of this host.
    ChangeSettings {
        id: GroupChangeId,
        change: Box<GroupChange>,
        uid: Option<u32>,
        reply: ChangeReply,
    },
    /// A handoff to this server node has failed.
    ServerNodeFailed(holdfast_wire::NodeId),
    /// Tells the kernel the end of the lease.
    SetLeaseWriter(LeaseWriter),
    /// End the thread.
    Stop,
}

/// The driver's inputs, besides its socket and timers.
pub(super) struct DriverInputs {
    /// Frames that the peer channel received.
    pub frames: mpsc::Receiver<ReceivedMembershipFrame>,
    /// Results of saves of the membership to disk.
    pub saves: mpsc::UnboundedReceiver<SaveResult>,
    /// Inputs from the engine.
    pub requests: mpsc::UnboundedReceiver<DriverInput>,
    /// Answers of the endpoints of the store of views; none if the voters vote.
    pub store_answers: Option<mpsc::UnboundedReceiver<EndpointAnswer>>,
    /// Names of the nodes that have answered at the seeds' addresses.
    pub seeds: watch::Receiver<BTreeSet<String>>,
}

/// Receivers of what the driver reports.
struct Reports {
    events: mpsc::UnboundedSender<GroupEvent>,
    status: watch::Sender<MembershipStatus>,
    metrics: Metrics,
}

/// State of the membership driver's thread.
pub(super) struct Driver {
    machine: Membership,
    datagrams: Datagrams,
    channel: ChannelSender,
    disk: DiskThread,
    store: Option<EtcdStore>,
    reports: Reports,
    lease_writer: Option<LeaseWriter>,
    lease_until: Option<Duration>,
    /// True once the machine has reported a lease, or the end of one.
    is_lease_known: bool,
    operator_requests: OperatorRequests,
    /// Changes of the group's settings that the engine waits for.
    changes: Vec<(GroupChangeId, ChangeReply)>,
    /// Limits lines about refused changes of the group's settings.
    refusal_log: LogLimit,
}

/// Runs the driver until it is stopped.
pub(super) fn run_thread(
    mut driver: Driver,
    socket: StdUdpSocket,
    inputs: DriverInputs,
    realtime: bool,
) {
    if realtime && let Err(error) = become_realtime() {
        tracing::warn!(%error, "no real-time priority for the membership: a busy host may lose its lease (node.realtime)");
    }
    // Datagrams are read here, so that the thread keeps only what the writing of the lease may need.
    if let Err(error) = keep_only_capabilities(&[Capability::Bpf]) {
        tracing::warn!(%error, "the membership's thread keeps its capabilities");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let served = runtime.and_then(|runtime| {
        runtime.block_on(async {
            let socket = UdpSocket::from_std(socket)?;
            driver.serve(&socket, inputs).await;
            Ok(())
        })
    });
    if let Err(error) = served {
        tracing::error!(%error, "the membership has ended: this node takes no part in its group; restart the daemon");
    }
}

impl Driver {
    pub fn new(
        machine: Membership,
        options: &MembershipOptions,
        (channel, keys): (ChannelSender, watch::Receiver<DatagramKeyTable>),
        (disk, store): (DiskThread, Option<EtcdStore>),
        (events, status, metrics): (
            mpsc::UnboundedSender<GroupEvent>,
            watch::Sender<MembershipStatus>,
            Metrics,
        ),
    ) -> Driver {
        let (name, boot) = (options.name.clone(), options.boot);
        Driver {
            machine,
            datagrams: Datagrams::new(name, boot, keys, metrics.clone()),
            channel,
            disk,
            store,
            reports: Reports {
                events,
                status,
                metrics,
            },
            lease_writer: None,
            lease_until: None,
            is_lease_known: false,
            operator_requests: OperatorRequests::default(),
            changes: Vec::new(),
            refusal_log: LogLimit::default(),
        }
    }

    async fn serve(&mut self, socket: &UdpSocket, mut inputs: DriverInputs) {
        loop {
            self.carry_out(socket);
            tokio::select! {
                ready = socket.readable() => {
                    if let Err(error) = ready {
                        tracing::warn!(%error, "the socket for heartbeats fails");
                    }
                    self.receive_datagrams(socket);
                }
                frame = inputs.frames.recv() => match frame {
                    Some(frame) => {
                        self.learn_seeds(&mut inputs.seeds);
                        self.receive_frames(frame, &mut inputs.frames);
                    }
                    None => return,
                },
                Some((token, result)) = inputs.saves.recv() => self.end_save(token, result),
                answer = next_answer(&mut inputs.store_answers) => self.handle_endpoint(answer),
                input = inputs.requests.recv() => match input {
                    Some(DriverInput::Stop) | None => return,
                    Some(input) => self.handle_input(input),
                },
                () = sleep_until(self.next_wake()) => {}
            }
            self.handle_due_timers(socket);
        }
    }

    fn next_wake(&self) -> Option<Duration> {
        let machine = self.machine.poll_timeout();
        [machine, self.operator_requests.next_timeout()]
            .into_iter()
            .flatten()
            .min()
    }

    fn handle_due_timers(&mut self, socket: &UdpSocket) {
        let is_due = |driver: &Self| {
            let due = driver.machine.poll_timeout();
            due.is_some_and(|due| due <= boot_clock::now())
        };
        if is_due(self) {
            // A node that slept hears the others before it accuses them.
            self.receive_datagrams(socket);
        }
        if is_due(self) {
            self.machine.handle_timeout(boot_clock::now());
        }
    }

    fn receive_datagrams(&mut self, socket: &UdpSocket) {
        let now = boot_clock::now();
        for (from, frame) in self.datagrams.receive(socket, now) {
            self.reports.note_heard(&from, now);
            self.machine.handle_frame(now, &from, frame);
        }
    }

    fn receive_frames(
        &mut self,
        first: ReceivedMembershipFrame,
        more: &mut mpsc::Receiver<ReceivedMembershipFrame>,
    ) {
        let now = boot_clock::now();
        let waiting = std::iter::from_fn(|| more.try_recv().ok());
        let frames = std::iter::once(first).chain(waiting);
        for received in frames.take(FRAMES_AT_ONCE_MAX) {
            let ReceivedMembershipFrame {
                from,
                certified,
                frame,
            } = received;
            self.datagrams.note_channel_frame(now, &from, &frame);
            self.reports.note_heard(&from, now);
            (self.machine).handle_channel_frame(now, &from, certified, frame);
        }
    }

    /// Learns the names of seeds, before the machine judges the seeds' answers.
    fn learn_seeds(&mut self, seeds: &mut watch::Receiver<BTreeSet<String>>) {
        if seeds.has_changed().unwrap_or(false) {
            for name in seeds.borrow_and_update().iter() {
                if let Ok(name) = name.parse() {
                    self.machine.handle_seed(&name);
                }
            }
        }
    }

    fn end_save(&mut self, token: SaveToken, result: Result<(), String>) {
        if result.is_ok() {
            self.reports.note_save_problem(None);
        }
        self.machine.handle_saved(boot_clock::now(), token, result);
    }

    fn handle_input(&mut self, input: DriverInput) {
        let now = boot_clock::now();
        match input {
            DriverInput::Operator { request, reply } => {
                self.operator_requests
                    .begin(now, &mut self.machine, &request, reply);
            }
            DriverInput::ChangeSettings {
                id,
                change,
                uid,
                reply,
            } => match self.machine.handle_group_change(now, id, *change, uid) {
                Ok(()) => self.changes.push((id, reply)),
                Err(error) => {
                    tracing::warn!(%error, "a change of the group's settings was refused");
                    let _ = reply.send(Err(GroupChangeFailure::Unanswered));
                }
            },
            DriverInput::ServerNodeFailed(id) => {
                match self.machine.handle_server_node_failed(now, id) {
                    Ok(()) => {
                        tracing::warn!(node = %id, "dropped a server node: a handoff to it failed")
                    }
                    // Only the contact node has the list.
                    Err(OperatorError::NotContactNode(_) | OperatorError::UnknownNode(_)) => {}
                    Err(error) => tracing::debug!(node = %id, %error, "a server node stays"),
                }
            }
            DriverInput::SetLeaseWriter(writer) => {
                self.lease_writer = Some(writer);
                self.write_lease();
            }
            DriverInput::Stop => {}
        }
    }

    fn carry_out(&mut self, socket: &UdpSocket) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Send { to, frame } => self.send(socket, to, frame),
                Output::Save { token, state } => self.save(token, state),
                Output::Store { token, request } => self.ask_store(token, *request),
                Output::Event(event) => self.handle_event(event),
            }
        }
        self.operator_requests
            .answer(boot_clock::now(), &self.machine);
    }

    fn ask_store(&mut self, token: StoreToken, request: StoreRequest) {
        let answer = (self.store.as_mut()).and_then(|store| store.send(token, request));
        if let Some(answer) = answer {
            self.machine
                .handle_store_answer(boot_clock::now(), token, answer);
        }
    }

    fn handle_endpoint(&mut self, answer: EndpointAnswer) {
        let answered = self
            .store
            .as_mut()
            .and_then(|store| store.on_answer(answer));
        if let Some((token, answer)) = answered {
            self.machine
                .handle_store_answer(boot_clock::now(), token, answer);
        }
    }

    fn note_store(&self, is_answering: bool) {
        let failures = self
            .store
            .as_ref()
            .map_or_else(String::new, EtcdStore::failures);
        self.reports.note_store(is_answering, &failures);
    }

    fn save(&mut self, token: SaveToken, state: Box<MembershipState>) {
        self.disk.save(token, state);
    }

    fn send(&mut self, socket: &UdpSocket, to: Recipient, frame: MembershipFrame) {
        let Recipient::Node(name) = to else {
            return self.channel.ask_seeds(frame);
        };
        let address = self.machine.address_of(&name);
        if let (Some(small), Some(address)) = (DatagramFrame::of(&frame), address) {
            let now = boot_clock::now();
            if (self.datagrams).send(socket, now, (&name, address), &small) {
                return;
            }
        }
        self.channel.send(name, address, frame);
    }

    /// Logs a refused change: any node may request changes, as long ones and as many as it likes.
    fn log_refusal(
        &self,
        change: &GroupChange,
        from: &NodeName,
        uid: Option<u32>,
        refusal: &GroupChangeRefusal,
    ) {
        if self.refusal_log.admits() {
            let change = shortened(change, LOGGED_CHANGE_BYTES_MAX);
            tracing::warn!(target: "audit", %from, uid, change, %refusal, "refused a change of the group's settings");
        }
    }

    fn handle_event(&mut self, event: Event) {
        match event {
            Event::View(view) => {
                let members = self.members();
                let Some(own) = self.machine.own_id() else {
                    return;
                };
                self.reports.note_view(&self.machine);
                self.channel.set_members(Some(own), members.clone());
                self.reports.send(GroupEvent::View { view, own, members });
            }
            Event::Lease { until } => self.on_lease(until),
            Event::Joined { id } => {
                tracing::info!(number = %id, "joined the group");
                self.reports.note_view(&self.machine);
                self.reports.clear_problem();
                self.reports.send(GroupEvent::Joined { id });
            }
            Event::Removed { cause } => self.on_removed(cause),
            Event::SettingsChanged { version } => self.on_settings(version),
            Event::SettingsUnreadable { version, error } => {
                tracing::error!(version, %error, "cannot use the group's settings: the services stay as they are");
                self.reports.note_settings_problem(Some(error.to_string()));
            }
            Event::GroupChangeDecided {
                change,
                from,
                uid,
                result,
            } => match result {
                Ok(version) => {
                    tracing::info!(target: "audit", %from, uid, %change, version, "the group's settings have changed");
                }
                Err(refusal) => self.log_refusal(&change, &from, uid, &refusal),
            },
            Event::GroupChangeEnded { id, result } => self.on_change_ended(id, result),
            Event::JoinRefused { reason } => {
                tracing::warn!(%reason, "the contact node does not take this node in");
                self.reports
                    .note_problem(format!("this node cannot join: {reason}"));
            }
            Event::ContactSilent { contact } => {
                let contact = self.name_of(contact);
                tracing::warn!(
                    contact,
                    "the contact node is silent, and the backups alone cannot replace it"
                );
                self.reports.note_contact_problem(format!(
                    "contact node {contact} is silent, and the backups alone cannot replace it; {TAKEOVER_REMEDY}"
                ));
            }
            Event::VotersSilent => self.reports.note_silent_voters(),
            Event::TakeoverStarted { contact } => {
                let contact = self.name_of(contact);
                tracing::warn!(
                    contact,
                    "the contact node is silent: this node stands for its place"
                );
                self.reports.metrics.count_takeover();
                // Replaced by the next view, which comes at once if enough backups answer.
                self.reports.note_contact_problem(match self.store {
                    Some(_) => format!("contact node {contact} is silent, and etcd has not given its place to this node yet"),
                    None => format!(
                        "contact node {contact} is silent, and too few backups answer to replace it; {TAKEOVER_REMEDY}"
                    ),
                });
            }
            Event::BackupSilent { backup } => {
                let backup = self.name_of(backup);
                tracing::warn!(backup, "removing a backup that does not answer");
            }
            Event::ServerNodeSilent { node } => tracing::warn!(%node, "dropped silent server node"),
            Event::StoreAnswers { is_answering } => self.note_store(is_answering),
            Event::StoreUnusable => {
                tracing::error!(
                    "etcd has a view that cannot follow the one that this node knows: this node does not obey it"
                );
                self.reports
                    .note_problem("etcd has an impossible view; check whether other nodes use the same etcd.prefix".to_owned());
            }
            Event::SaveFailed { error } => {
                tracing::error!(%error, "cannot save the membership: this node takes part in no vote");
                self.reports.note_save_problem(Some(format!(
                    "the membership cannot be saved, so this node takes part in no vote: {error}; make node.state_dir writable"
                )));
            }
            Event::Ignored {
                from,
                frame,
                reason,
            } => {
                tracing::debug!(%from, frame, reason, "ignored a membership frame");
                self.reports.metrics.count_ignored_membership_frame();
            }
        }
    }

    /// Reports that the group no longer has this node.
    fn on_removed(&mut self, cause: RemovalCause) {
        let reason = match cause {
            RemovalCause::Suspected => "the group took this node for failed, and it joins again",
            RemovalCause::Operator => "an operator removed this node from the group",
            RemovalCause::Left => "this node has left the group",
        };
        tracing::warn!("{reason}");
        self.reports.note_view(&self.machine);
        self.reports.note_removal(cause);
        self.channel.set_members(None, Vec::new());
        let voters = self.machine.voted_view().map(|view| &view.voters);
        let contact = voters.and_then(|voters| voters.first());
        let contact = contact.map_or(NO_NODE, |contact| contact.id);
        self.reports.send(GroupEvent::Removed { cause, contact });
    }

    fn on_lease(&mut self, until: Option<Duration>) {
        match (self.lease_until.is_some(), until.is_some()) {
            (false, true) => {
                tracing::info!("this node is the contact node and has a lease");
                self.reports.clear_problem();
            }
            (true, false) => tracing::warn!("this contact node's lease has ended"),
            _ => {}
        }
        self.lease_until = until;
        self.is_lease_known = true;
        self.write_lease();
        self.reports.note_lease(until);
        let until = until.map(boot_clock::instant_at);
        self.reports.send(GroupEvent::Lease { until });
    }

    fn write_lease(&mut self) {
        if let Some(write) = &mut self.lease_writer
            && self.is_lease_known
        {
            let until = self.lease_until.unwrap_or_default();
            write(KernelLease {
                until_ns: u64::try_from(until.as_nanos()).unwrap_or(u64::MAX),
                epoch: (self.machine.voted_view()).map_or(0, |view| view.epoch),
            });
        }
    }

    fn on_settings(&mut self, version: u64) {
        let Some(settings) = self.machine.settings() else {
            return;
        };
        self.reports.note_settings_problem(None);
        let settings = settings.clone();
        self.reports
            .send(GroupEvent::Settings { version, settings });
    }

    fn on_change_ended(&mut self, id: GroupChangeId, result: Result<u64, GroupChangeFailure>) {
        let mut ended = self.changes.extract_if(.., |(change, _)| *change == id);
        if let Some((_, reply)) = ended.next() {
            let _ = reply.send(result);
        }
    }

    /// Returns all nodes that this node knows, itself included.
    fn members(&self) -> Vec<Member> {
        let view = self.machine.voted_view();
        let voters = view.map_or(&[][..], |view| &view.voters[..]);
        let mut members: Vec<Member> = voters.to_vec();
        members.extend(self.machine.server_nodes().cloned());
        members.extend(self.machine.own_server_node());
        members.sort_unstable_by_key(|member| member.id);
        members.dedup_by_key(|member| member.id);
        members
    }

    fn name_of(&self, id: holdfast_wire::NodeId) -> String {
        let member = self.members().into_iter().find(|member| member.id == id);
        member.map_or_else(|| id.to_string(), |member| member.name.to_string())
    }
}

impl Reports {
    fn send(&self, event: GroupEvent) {
        // The engine ends before the driver.
        let _ = self.events.send(event);
    }

    fn note_view(&self, machine: &Membership) {
        let view = machine.voted_view();
        let epoch = view.map_or(0, |view| view.epoch);
        let voters = view.map_or_else(Vec::new, |view| view.voters.clone());
        let server_nodes = machine.server_nodes().cloned();
        let mut server_nodes: Vec<Member> = server_nodes.collect();
        server_nodes.extend(machine.own_server_node());
        server_nodes.sort_unstable_by_key(|member| member.id);
        server_nodes.dedup_by_key(|member| member.id);
        self.metrics.set_group_epoch(epoch);
        self.status.send_modify(|status| {
            if status.epoch != epoch {
                let contact = voters.first().map(|contact| contact.name.as_str());
                tracing::info!(
                    epoch,
                    contact,
                    voters = voters.len(),
                    "a new view of the group"
                );
                status.problem = None;
                status.contact_problem = None;
                status.search_problem = None;
            }
            status.standing = machine.standing();
            status.own = machine.own_id();
            status.epoch = epoch;
            status.voters = voters;
            status.server_nodes = server_nodes;
            if machine.standing() != Standing::Outside {
                status.removal = None;
            }
        });
    }

    fn note_removal(&self, cause: RemovalCause) {
        self.status
            .send_modify(|status| status.removal = Some(cause));
    }

    fn note_lease(&self, until: Option<Duration>) {
        self.metrics.set_lease(until.is_some());
        self.status.send_modify(|status| status.lease_until = until);
    }

    fn note_heard(&self, from: &NodeName, now: Duration) {
        self.status.send_modify(|status| {
            if status.contact_problem.is_some()
                && status
                    .contact()
                    .is_some_and(|contact| contact.name == *from)
            {
                status.contact_problem = None;
            }
            if status.search_problem.is_some()
                && status.voters.iter().any(|voter| voter.name == *from)
            {
                status.search_problem = None;
            }
            match status.heard.get_mut(from) {
                Some(heard) => *heard = now,
                None => {
                    if status.heard.len() >= SENDERS_MAX {
                        status.heard.clear();
                    }
                    status.heard.insert(from.clone(), now);
                }
            }
        });
    }

    fn note_problem(&self, problem: String) {
        self.status
            .send_modify(|status| status.problem = Some(problem));
    }

    fn note_settings_problem(&self, problem: Option<String>) {
        self.status
            .send_modify(|status| status.settings_problem = problem);
    }

    fn note_silent_voters(&self) {
        let problem = format!("no voter that this node knows answers; {SEARCH_REMEDY}");
        tracing::warn!("{problem}");
        self.status
            .send_modify(|status| status.search_problem = Some(problem));
    }

    fn note_store(&self, is_answering: bool, failures: &str) {
        self.metrics.set_view_store(is_answering);
        let problem = (!is_answering).then(|| {
            format!("etcd does not answer, so that the group cannot change, and its contact node serves no new clients; check etcd ({failures})")
        });
        match &problem {
            Some(problem) => tracing::warn!("{problem}"),
            None => tracing::info!("etcd answers"),
        }
        self.status.send_modify(|status| {
            status.store_answers = Some(is_answering);
            status.store_problem = problem;
        });
    }

    fn note_contact_problem(&self, problem: String) {
        self.status
            .send_modify(|status| status.contact_problem = Some(problem));
    }

    fn note_save_problem(&self, problem: Option<String>) {
        self.status.send_if_modified(|status| {
            let is_news = status.save_problem != problem;
            status.save_problem = problem;
            is_news
        });
    }

    fn clear_problem(&self) {
        self.status.send_modify(|status| status.problem = None);
    }
}

async fn next_answer(
    answers: &mut Option<mpsc::UnboundedReceiver<EndpointAnswer>>,
) -> EndpointAnswer {
    if let Some(answers) = answers
        && let Some(answer) = answers.recv().await
    {
        return answer;
    }
    std::future::pending().await
}

async fn sleep_until(wake: Option<Duration>) {
    match wake {
        Some(wake) => tokio::time::sleep(wake.saturating_sub(boot_clock::now())).await,
        None => std::future::pending().await,
    }
}
