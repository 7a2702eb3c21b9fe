//! A group in memory: machines whose frames arrive at once, and whose disks save at once, unless a test says otherwise.

use super::{
    Event, Membership, MembershipConfig, Output, Recipient, SaveToken, Standing, StoreAnswer,
    StoreRequest,
};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{
    JoinNumber, JoinRole, Member, MembershipFrame, MembershipState, NodeName, VotedView,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

pub fn ms(number: u64) -> Duration {
    Duration::from_millis(number)
}

pub fn name(number: u16) -> NodeName {
    format!("n{number}").parse().expect("a short name")
}

fn number(name: &NodeName) -> u16 {
    let digits = name.as_str().trim_start_matches('n');
    digits.parse().expect("a name of a test")
}

fn address(number: u16) -> SocketAddr {
    let [high, low] = number.to_be_bytes();
    SocketAddr::from((Ipv4Addr::new(10, 0, high, low), 7400))
}

/// Returns a member whose number, name and join go by one number.
pub fn member(number: u16) -> Member {
    Member {
        id: NodeId(number),
        name: name(number),
        address: address(number),
        join: JoinNumber(u64::from(number)),
    }
}

/// The nodes, by the number in their names.
#[derive(Default)]
pub struct TestGroup {
    pub now: Duration,
    pub machines: BTreeMap<u16, Membership>,
    pub disks: BTreeMap<u16, MembershipState>,
    boots: BTreeMap<u16, u64>,
    roles: BTreeMap<u16, JoinRole>,
    /// The roles in the certificates of nodes whose certificates are not those of backups.
    pub certified: BTreeMap<u16, Option<JoinRole>>,
    pub events: Vec<(u16, Event)>,
    /// All frames that were sent: sender, receiver (0 is the service address), frame.
    pub sent: Vec<(u16, u16, MembershipFrame)>,
    frames: VecDeque<(u16, u16, MembershipFrame)>,
    /// Nodes that neither send nor receive.
    pub isolated: BTreeSet<u16>,
    /// Nodes that receive nothing.
    pub deaf: BTreeSet<u16>,
    /// Daemons that are stopped.
    pub stopped: BTreeSet<u16>,
    /// Nodes whose saves do not end.
    pub slow_disks: BTreeSet<u16>,
    /// The store of views; none if the voters vote.
    pub store: Option<TestStore>,
    /// Duration of a save at all other nodes.
    pub save_duration: Duration,
    /// The open save of each node, and its end.
    open_saves: BTreeMap<u16, (SaveToken, MembershipState, Duration)>,
}

/// A store of views that answers at once.
#[derive(Default)]
pub struct TestStore {
    pub view: Option<VotedView>,
    /// True without a majority of the store's members.
    pub is_down: bool,
    /// Nodes that do not reach the store.
    pub cut: BTreeSet<u16>,
    /// Nodes whose proposals are stored without an answer.
    pub unanswered: BTreeSet<u16>,
}

impl TestStore {
    fn answer(&mut self, node: u16, request: StoreRequest) -> Option<StoreAnswer> {
        if self.is_down || self.cut.contains(&node) {
            return Some(StoreAnswer::Unavailable);
        }
        let StoreRequest::Propose { expected, view } = request else {
            return Some(StoreAnswer::View(self.view.clone()));
        };
        if expected != self.view.as_ref().map(|view| view.epoch) {
            return Some(StoreAnswer::View(self.view.clone()));
        }
        self.view = Some(view);
        (!self.unanswered.contains(&node)).then_some(StoreAnswer::Stored)
    }
}

impl TestGroup {
    /// Returns a group with a store of views, of `voters` nodes named `n1` and so on, after all have joined.
    pub fn with_store(voters: u16) -> TestGroup {
        let mut group = TestGroup {
            store: Some(TestStore::default()),
            ..TestGroup::default()
        };
        group.start(1, JoinRole::Backup);
        group.run(ms(400));
        for node in 2..=voters {
            group.start(node, JoinRole::Backup);
            group.run(ms(200));
        }
        assert_eq!(group.voters(1), (1..=voters).collect::<Vec<_>>());
        group
    }

    /// Returns the store of views.
    pub fn store(&mut self) -> &mut TestStore {
        self.store.as_mut().expect("a group with a store")
    }

    /// Returns a group of `voters` nodes named `n1` and so on, after all have joined.
    pub fn with_voters(voters: u16) -> TestGroup {
        let mut group = TestGroup::default();
        group.start(1, JoinRole::Backup);
        group.run(ms(100));
        for node in 2..=voters {
            group.start(node, JoinRole::Backup);
            group.run(ms(200));
        }
        assert_eq!(group.voters(1), (1..=voters).collect::<Vec<_>>());
        group
    }

    /// Starts the daemon of a node; `n1` creates the group if it has no disk.
    pub fn start(&mut self, node: u16, role: JoinRole) {
        self.roles.insert(node, role);
        let boot = self.boots.entry(node).or_default();
        *boot += 1;
        let mut config = MembershipConfig::new(name(node), address(node), role, *boot);
        config.seeds = vec![name(1), name(2)];
        config.has_view_store = self.store.is_some();
        let machine = match self.disks.get(&node) {
            Some(state) => Membership::restore(self.now, config, state.clone()),
            None if node == 1 => Membership::create(self.now, config),
            None => Membership::join(self.now, config),
        };
        self.machines.insert(node, machine);
        self.settle();
    }

    pub fn restart(&mut self, node: u16) {
        let role = self.roles[&node];
        self.start(node, role);
    }

    pub fn crash(&mut self, node: u16) {
        self.machines.remove(&node);
        self.open_saves.remove(&node);
    }

    pub fn machine(&mut self, node: u16) -> &mut Membership {
        self.machines.get_mut(&node).expect("the daemon runs")
    }

    /// Lets time pass in steps of a millisecond.
    pub fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += ms(1);
            for node in self.machines.keys().copied().collect::<Vec<_>>() {
                let now = self.now;
                let machine = self.machine(node);
                let is_due = machine.poll_timeout().is_some_and(|due| due <= now);
                if is_due && !self.stopped.contains(&node) {
                    self.machine(node).handle_timeout(now);
                }
                self.finish_due_save(node);
            }
            self.settle();
        }
    }

    /// Carries out all outputs, and delivers all frames.
    pub fn settle(&mut self) {
        loop {
            for node in self.machines.keys().copied().collect::<Vec<_>>() {
                while let Some(output) = self.machine(node).poll_output() {
                    self.carry_out(node, output);
                }
            }
            let Some((from, to, frame)) = self.frames.pop_front() else {
                return;
            };
            let is_reached = !self.isolated.contains(&from) && !self.isolated.contains(&to);
            // A stopped daemon loses the frame, which is worse than to read it late.
            if self.stopped.contains(&to) || self.deaf.contains(&to) {
                continue;
            }
            if is_reached && self.machines.contains_key(&to) {
                self.deliver(from, to, frame);
            }
        }
    }

    /// Hands a frame to a node whose daemon runs, with the role in the sender's certificate.
    pub fn deliver(&mut self, from: u16, to: u16, frame: MembershipFrame) {
        let certified = self.certified.get(&from).copied();
        let certified = certified.unwrap_or(Some(JoinRole::Backup));
        let now = self.now;
        let machine = self.machine(to);
        machine.handle_channel_frame(now, &name(from), certified, frame);
    }

    fn carry_out(&mut self, node: u16, output: Output) {
        match output {
            Output::Send { to, frame } => {
                let receiver = match &to {
                    Recipient::Node(name) => number(name),
                    Recipient::ServiceAddress => 0,
                };
                self.sent.push((node, receiver, frame.clone()));
                let receiver = match receiver {
                    0 => self.serving().first().copied().unwrap_or(0),
                    receiver => receiver,
                };
                if to == Recipient::ServiceAddress && receiver != 0 {
                    self.machine(node).handle_seed(&name(receiver));
                }
                if receiver != node {
                    self.frames.push_back((node, receiver, frame));
                }
            }
            Output::Save { token, state } => {
                let end = self.now + self.save_duration;
                self.open_saves.insert(node, (token, *state, end));
                self.finish_due_save(node);
            }
            Output::Store { token, request } => {
                let now = self.now;
                if let Some(answer) = self.store().answer(node, *request) {
                    self.machine(node).handle_store_answer(now, token, answer);
                }
            }
            Output::Event(event) => self.events.push((node, event)),
        }
    }

    fn finish_due_save(&mut self, node: u16) {
        let save = self.open_saves.get(&node);
        let is_due = save.is_some_and(|(_, _, end)| *end <= self.now);
        if is_due && !self.slow_disks.contains(&node) {
            self.finish_save(node);
        }
    }

    /// Ends the open save of a node.
    pub fn finish_save(&mut self, node: u16) {
        if let Some((token, state, _)) = self.open_saves.remove(&node) {
            self.disks.insert(node, state);
            let now = self.now;
            self.machine(node).handle_saved(now, token, Ok(()));
        }
    }

    /// Lets the open save of a node fail.
    pub fn fail_save(&mut self, node: u16) {
        if let Some((token, ..)) = self.open_saves.remove(&node) {
            let now = self.now;
            self.machine(node)
                .handle_saved(now, token, Err("disk full".to_owned()));
        }
    }

    /// Returns the nodes that have a lease.
    pub fn serving(&self) -> Vec<u16> {
        let machines = self.machines.iter();
        let serving = machines.filter(|(_, machine)| machine.is_serving(self.now));
        serving.map(|(node, _)| *node).collect()
    }

    /// Returns the voters of a node's view, contact node first.
    pub fn voters(&self, node: u16) -> Vec<u16> {
        let view = self.machines[&node].voted_view();
        let voters = view.map_or(&[][..], |view| &view.voters[..]);
        voters.iter().map(|voter| number(&voter.name)).collect()
    }

    pub fn epoch(&self, node: u16) -> u64 {
        self.machines[&node]
            .voted_view()
            .map_or(0, |view| view.epoch)
    }

    pub fn standing(&self, node: u16) -> Standing {
        self.machines[&node].standing()
    }

    pub fn id(&self, node: u16) -> NodeId {
        self.machines[&node].own_id().expect("a member")
    }

    /// Returns true if a node has reported such an event.
    pub fn has_event(&self, node: u16, is_it: impl Fn(&Event) -> bool) -> bool {
        self.events
            .iter()
            .any(|(of, event)| *of == node && is_it(event))
    }
}
