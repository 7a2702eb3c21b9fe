//! Tests of the conductor: small groups whose frames arrive at once.

mod drain;

use super::*;
use holdfast_wire::conductor_frames::{DeclineReason, OfferedProcess, REPORTS_MAX};
use holdfast_wire::failure::{Failure, NodeFault};
use std::collections::BTreeMap;

const A: NodeId = NodeId(1);
const B: NodeId = NodeId(2);
const C: NodeId = NodeId(3);

/// Capacity of each node, in thousandths of a processor.
const CAPACITY: u32 = 1_000;
/// Time in which nodes begin no move after their start, and some more.
const STARTUP: u64 = 70;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn sample_of(number: u64, used: u32) -> ProcessSample {
    ProcessSample {
        key: ProcessKey(number),
        used,
        memory_kib: 1_000,
        clients: 10,
        freeze: Duration::from_millis(5),
        rules: PlacementRules::default(),
        blocked: None,
    }
}

fn failure() -> Failure {
    NodeFault::RestartedInMove.into()
}

/// A move that a machine has begun.
#[derive(Debug, Clone, Copy, PartialEq)]
struct BegunMove {
    at: Duration,
    ends_at: Duration,
    donor: NodeId,
    id: OfferId,
    process: ProcessKey,
    to: NodeId,
}

/// A group whose daemons measure loads each second, and move a process in one second.
struct TestGroup {
    now: Duration,
    nodes: BTreeMap<NodeId, Conductor>,
    processes: BTreeMap<NodeId, Vec<ProcessSample>>,
    under_way: Vec<BegunMove>,
    begun: Vec<BegunMove>,
    events: Vec<(NodeId, Event)>,
    /// True if moves fail.
    moves_fail: bool,
    /// Nodes whose frames are lost.
    is_cut: Vec<NodeId>,
    frames: u64,
}

impl TestGroup {
    /// Returns a group whose nodes have processes with these loads.
    fn new(loads: &[&[u32]]) -> TestGroup {
        TestGroup::with(loads, |_| {})
    }

    fn with(loads: &[&[u32]], configure: impl Fn(&mut ConductorConfig)) -> TestGroup {
        let ids: Vec<NodeId> = (1..=loads.len()).map(|id| NodeId(id as u16)).collect();
        let view = View::configured(A, ids.iter().copied());
        let mut group = TestGroup {
            now: Duration::ZERO,
            nodes: BTreeMap::new(),
            processes: BTreeMap::new(),
            under_way: Vec::new(),
            begun: Vec::new(),
            events: Vec::new(),
            moves_fail: false,
            is_cut: Vec::new(),
            frames: 0,
        };
        let mut number = 0;
        for (id, loads) in ids.into_iter().zip(loads) {
            let mut config = ConductorConfig::new(id, 7);
            configure(&mut config);
            let machine = Conductor::new(group.now, config, view.clone());
            group.nodes.insert(id, machine);
            let mut next = |used: &u32| {
                number += 1;
                sample_of(number, *used)
            };
            let processes = loads.iter().map(&mut next).collect();
            group.processes.insert(id, processes);
        }
        group
    }

    fn node(&mut self, id: NodeId) -> &mut Conductor {
        self.nodes.get_mut(&id).expect("a node of the group")
    }

    /// Returns the processes of a node, to change their samples.
    fn samples(&mut self, id: NodeId) -> &mut Vec<ProcessSample> {
        self.processes.get_mut(&id).expect("a node of the group")
    }

    /// Returns the load of a node in percent points.
    fn points(&self, id: NodeId) -> u32 {
        let used = self.processes[&id].iter().map(|process| process.used);
        used.sum::<u32>() * 100 / CAPACITY
    }

    fn measure(&mut self, id: NodeId) {
        let processes = self.processes[&id].clone();
        let sample = LoadSample {
            demand: NodeDemand {
                used: processes.iter().map(|process| process.used).sum(),
                capacity: CAPACITY,
            },
            memory_free_kib: 1 << 20,
            processes,
        };
        let now = self.now;
        self.node(id).handle_sample(now, sample);
    }

    /// Lets time pass.
    fn run(&mut self, seconds: u64) {
        for step in 0..seconds * 10 {
            self.now += Duration::from_millis(100);
            let ids: Vec<NodeId> = self.nodes.keys().copied().collect();
            self.end_moves();
            for id in ids {
                if step % 10 == 0 {
                    self.measure(id);
                }
                let now = self.now;
                if self.node(id).poll_timeout() <= now {
                    self.node(id).handle_timeout(now);
                }
            }
            self.deliver();
        }
    }

    fn end_moves(&mut self) {
        let now = self.now;
        let (ended, open): (Vec<_>, Vec<_>) =
            (self.under_way.drain(..)).partition(|begun| begun.ends_at <= now);
        self.under_way = open;
        for begun in ended {
            let result = match self.moves_fail {
                true => Err(failure()),
                false => Ok(()),
            };
            if result.is_ok() {
                let from = self.samples(begun.donor);
                let at = from.iter().position(|process| process.key == begun.process);
                let process = from.remove(at.expect("the process runs at the donor"));
                self.samples(begun.to).push(process);
            }
            for node in [begun.donor, begun.to] {
                self.node(node).handle_moves_under_way(now, 0);
            }
            self.node(begun.donor)
                .handle_move_ended(now, begun.id, result);
        }
    }

    /// Delivers frames until there are none.
    fn deliver(&mut self) {
        loop {
            let mut has_output = false;
            for id in self.nodes.keys().copied().collect::<Vec<_>>() {
                while let Some(output) = self.node(id).poll_output() {
                    has_output = true;
                    self.carry_out(id, output);
                }
            }
            if !has_output {
                return;
            }
        }
    }

    fn carry_out(&mut self, id: NodeId, output: Output) {
        let now = self.now;
        match output {
            Output::Send { to, frame } => {
                self.frames += 1;
                if !self.is_cut.contains(&id) && self.nodes.contains_key(&to) {
                    self.node(to).handle_frame(now, id, frame);
                }
            }
            Output::BeginMove {
                id: offer,
                process,
                to,
            } => {
                let begun = BegunMove {
                    at: now,
                    ends_at: now + secs(1),
                    donor: id,
                    id: offer,
                    process,
                    to,
                };
                self.begun.push(begun);
                self.under_way.push(begun);
                for node in [id, to] {
                    self.node(node).handle_moves_under_way(now, 1);
                }
            }
            Output::Event(event) => self.events.push((id, event)),
        }
    }

    /// Gives a node a frame of another, and returns the frames that it sends to that one.
    fn answers(&mut self, to: NodeId, from: NodeId, frame: ConductorFrame) -> Vec<ConductorFrame> {
        let now = self.now;
        self.node(to).handle_frame(now, from, frame);
        let mut answers = Vec::new();
        while let Some(output) = self.node(to).poll_output() {
            match output {
                Output::Send { to, frame } if to == from => answers.push(frame),
                Output::Send { .. } => {}
                output => self.carry_out(to, output),
            }
        }
        answers
    }

    fn plan(&mut self, id: NodeId) -> Decision {
        let now = self.now;
        self.node(id).plan(now)
    }
}

fn offer(seq: u64, used: u32) -> ConductorFrame {
    ConductorFrame::Offer {
        id: OfferId { boot: 7, seq },
        purpose: MovePurpose::Balance,
        donor: NodeDemand {
            used: 900,
            capacity: CAPACITY,
        },
        process: OfferedProcess {
            key: ProcessKey(100 + seq),
            used,
            deviation: 0,
            memory_kib: 1_000,
            anti_affinity_label: None,
            past_moves: Vec::new(),
        },
    }
}

fn loads(node: NodeId, used: u32, age_ms: u32) -> LoadReport {
    LoadReport {
        node,
        demand: NodeDemand {
            used,
            capacity: CAPACITY,
        },
        memory_free_kib: 1 << 20,
        is_open: true,
        age_ms,
    }
}

#[test]
fn loaded_node_gives_processes_until_loads_are_even() {
    let mut group = TestGroup::new(&[&[50; 18], &[50; 4], &[50; 2]]);
    group.run(300);
    for id in [A, B, C] {
        assert!(group.points(id).abs_diff(40) <= 8, "{:?}", group.begun);
    }
    let moves = group.begun.len();
    assert!(moves <= 12, "{:?}", group.begun);
    group.run(600);
    assert_eq!(group.begun.len(), moves, "loads are even, and moves go on");
}

#[test]
fn node_begins_no_move_in_its_first_minute() {
    let mut group = TestGroup::new(&[&[50; 18], &[]]);
    group.run(59);
    assert!(group.begun.is_empty());
    group.run(30);
    assert!(!group.begun.is_empty());
}

#[test]
fn plan_says_why_a_balanced_node_keeps_its_processes() {
    let mut group = TestGroup::new(&[&[50; 9], &[50; 8]]);
    group.run(STARTUP);
    let Decision::Stay(reason @ StayReason::Balanced { .. }) = group.plan(A) else {
        panic!("{:?}", group.plan(A));
    };
    assert!(reason.to_string().contains("45.0 %"), "{reason}");
}

#[test]
fn process_that_would_only_carry_the_load_along_stays() {
    let mut group = TestGroup::new(&[&[500, 200], &[300], &[350]]);
    group.samples(A)[1].rules.is_pinned = true;
    group.run(200);
    assert!(group.begun.is_empty(), "{:?}", group.begun);
    let plan = group.plan(A);
    let Decision::Stay(StayReason::NoBeneficialMove { obstacles, .. }) = &plan else {
        panic!("{plan:?}");
    };
    let reasons: Vec<&ObstacleReason> = obstacles.iter().map(|o| &o.reason).collect();
    assert!(
        matches!(
            reasons[..],
            [ObstacleReason::Pinned, ObstacleReason::NoGain { .. }]
        ),
        "{reasons:?}"
    );
    let stays = |(_, event): &&(NodeId, Event)| matches!(event, Event::Stays(_));
    assert_eq!(group.events.iter().filter(stays).count(), 1);
}

#[test]
fn acceptor_that_would_have_to_give_the_process_away_again_is_not_asked() {
    // The process would bring the acceptor to 60 %, and the average is 45 %.
    let mut group = TestGroup::new(&[&[350, 350], &[250], &[400]]);
    group.run(200);
    assert!(group.begun.is_empty(), "{:?}", group.begun);
    let plan = group.plan(A);
    let Decision::Stay(StayReason::NoBeneficialMove { obstacles, .. }) = &plan else {
        panic!("{plan:?}");
    };
    let reason = &obstacles[0].reason;
    assert!(
        matches!(reason, ObstacleReason::WouldBeUndone { .. }),
        "{reason}"
    );
}

#[test]
fn nodes_that_are_all_overloaded_move_nothing() {
    let mut group = TestGroup::new(&[&[95; 10], &[94; 10], &[96; 10]]);
    group.run(200);
    assert!(group.begun.is_empty(), "{:?}", group.begun);
    let plan = group.plan(C);
    assert!(
        matches!(plan, Decision::Stay(StayReason::NoBeneficialMove { .. })),
        "{plan:?}"
    );
}

#[test]
fn without_prediction_the_policies_of_the_paper_thrash() {
    let thrashes = |policies| {
        let with = |config: &mut ConductorConfig| config.policies = policies;
        let mut group = TestGroup::with(&[&[350, 350], &[250], &[400]], with);
        group.run(400);
        group.begun.len()
    };
    assert_eq!(thrashes(Policies::DEFAULT), 0);
    assert!(thrashes(Policies::PAPER) > 4);
}

#[test]
fn moves_in_any_minute_stay_within_the_limit() {
    let hurry = |config: &mut ConductorConfig| {
        config.calm_down = Duration::ZERO;
        config.moves_per_minute_max = 3;
    };
    let mut group = TestGroup::with(&[&[50; 18], &[50; 2]], hurry);
    group.run(400);
    assert!(group.begun.len() >= 5, "{:?}", group.begun);
    for begun in &group.begun {
        let minute = begun.at..begun.at + secs(60);
        let moves = group
            .begun
            .iter()
            .filter(|other| minute.contains(&other.at));
        assert!(moves.count() <= 3, "{:?}", group.begun);
    }
}

#[test]
fn both_nodes_calm_down_after_a_move() {
    let mut group = TestGroup::new(&[&[50; 18], &[50; 2]]);
    group.run(200);
    for pair in group.begun.windows(2) {
        assert!(pair[1].at >= pair[0].ends_at + secs(10), "{pair:?}");
    }
}

#[test]
fn process_that_has_moved_rests() {
    let mut group = TestGroup::new(&[&[50; 18], &[50; 2]]);
    group.run(200);
    let moved = group.begun[0];
    // All load goes to the node that took the process.
    for process in group.samples(moved.to) {
        process.used *= 3;
    }
    group.run(300);
    let again = group
        .begun
        .iter()
        .filter(|begun| begun.process == moved.process);
    assert_eq!(again.count(), 1);
    let now = group.now;
    let histories = group.node(moved.to).process_histories(now);
    let (_, past) = (histories
        .iter()
        .find(|(process, _)| *process == moved.process))
    .expect("the process has a past");
    assert_eq!(past.last().map(|past| past.from), Some(moved.donor));
}

#[test]
fn restarted_daemon_knows_past_moves_by_the_saved_histories() {
    let mut group = TestGroup::new(&[&[300, 300, 300], &[]]);
    let past = PastMove {
        from: B,
        age_s: 100,
    };
    let histories: Vec<_> = (1..=3).map(|key| (ProcessKey(key), vec![past])).collect();
    let now = group.now;
    group.node(A).handle_process_histories(now, &histories);
    group.run(STARTUP + 60);
    assert!(group.begun.is_empty());
    let plan = group.plan(A);
    let Decision::Stay(StayReason::NoBeneficialMove { obstacles, .. }) = &plan else {
        panic!("{plan:?}");
    };
    let rests = |o: &Obstacle| matches!(o.reason, ObstacleReason::MovedRecently(_));
    assert!(obstacles.iter().all(rests), "{obstacles:?}");
}

#[test]
fn failed_move_leaves_the_process_and_is_not_repeated() {
    let mut group = TestGroup::new(&[&[400, 400], &[100]]);
    group.moves_fail = true;
    group.run(400);
    let mut processes: Vec<ProcessKey> = group.begun.iter().map(|begun| begun.process).collect();
    let count = processes.len();
    processes.sort();
    processes.dedup();
    assert_eq!((group.points(A), processes.len()), (80, count));
    let failed = |(_, event): &(NodeId, Event)| match event {
        Event::Audited(record) => matches!(record.outcome, AuditOutcome::Failed(_)),
        _ => false,
    };
    assert_eq!(
        group.events.iter().filter(|event| failed(event)).count(),
        count
    );
}

#[test]
fn affinity_is_kept_by_balancing_and_by_a_drain() {
    let mut group = TestGroup::new(&[&[100, 100, 300, 300], &[], &[]]);
    for process in &mut group.samples(A)[..2] {
        process.rules.affinity_label = Some(9);
    }
    group.run(200);
    let is_labelled = |begun: &&BegunMove| begun.process.0 <= 2;
    assert!(!group.begun.is_empty() && !group.begun.iter().any(|b| is_labelled(&b)));
    let now = group.now;
    group.node(A).handle_drain(now, None);
    group.run(60);
    let targets: Vec<NodeId> = group
        .begun
        .iter()
        .filter(is_labelled)
        .map(|b| b.to)
        .collect();
    assert!(matches!(targets[..], [a, b] if a == b), "{targets:?}");
}

#[test]
fn anti_affinity_is_kept() {
    let mut group = TestGroup::new(&[&[400, 400], &[100], &[250]]);
    for id in [A, B] {
        group.samples(id)[0].rules.anti_affinity_label = Some(5);
    }
    group.samples(A)[1].rules.is_pinned = true;
    group.run(STARTUP);
    let now = group.now;
    group.node(A).handle_drain(now, None);
    group.run(60);
    // Node C may then give its own process, which has no label, to node B.
    let labelled = group.begun.iter().filter(|begun| begun.process.0 != 4);
    let targets: Vec<NodeId> = labelled.map(|begun| begun.to).collect();
    assert_eq!(targets, [C]);
}

#[test]
fn process_that_no_node_takes_does_not_hold_up_the_others_of_a_drain() {
    let mut group = TestGroup::new(&[&[300, 50, 50, 50, 50], &[100], &[100]]);
    for id in [A, B, C] {
        group.samples(id)[0].rules.anti_affinity_label = Some(5);
    }
    group.run(STARTUP);
    let now = group.now;
    group.node(A).handle_drain(now, None);
    group.run(20);
    assert_eq!(group.begun.len(), 4, "{:?}", group.begun);
    assert_eq!(group.points(A), 30);
}

#[test]
fn strangers_get_no_answer_and_change_nothing() {
    let mut group = TestGroup::new(&[&[100], &[100]]);
    group.run(STARTUP);
    let stranger = NodeId(99);
    assert!(group.answers(A, stranger, offer(1, 50)).is_empty());
    let reports = vec![loads(stranger, 0, 0), loads(B, 999, 0)];
    group.answers(A, stranger, ConductorFrame::Loads { reports });
    // Nor does a member introduce one.
    let reports = vec![loads(stranger, 0, 0)];
    group.answers(A, B, ConductorFrame::Loads { reports });
    let now = group.now;
    let known = group.node(A).known_loads(now);
    assert!(matches!(&known[..], [report] if report.node == B && report.demand.used == 100));
}

#[test]
fn acceptor_in_doubt_asks_until_it_learns_the_end() {
    let mut group = TestGroup::new(&[&[100], &[100], &[100]]);
    group.run(STARTUP);
    let id = OfferId { boot: 7, seq: 1 };
    let accepted = group.answers(B, A, offer(1, 50));
    assert!(matches!(accepted[..], [ConductorFrame::Accept { id: i, .. }] if i == id));
    // The same offer again is accepted again, another one is declined.
    let accepted = group.answers(B, A, offer(1, 50));
    assert!(matches!(accepted[..], [ConductorFrame::Accept { .. }]));
    let declined = group.answers(B, C, offer(1, 50));
    let reason = DeclineReason::Busy;
    assert!(matches!(&declined[..], [ConductorFrame::Decline { reason: r, .. }] if *r == reason));
    // The donor knows of no such offer, and says so when asked.
    group.run(3);
    assert!(group.node(B).is_idle());
    let ended = group.events.iter().find_map(|(_, event)| match event {
        Event::Audited(record) => Some(record.outcome.clone()),
        _ => None,
    });
    let withdrawn = AuditOutcome::ReportedByDonor(OfferEnd::Withdrawn);
    assert_eq!(ended, Some(withdrawn));
}

#[test]
fn past_of_a_process_is_saved_before_its_acceptance_is_sent() {
    let mut group = TestGroup::new(&[&[100], &[100]]);
    group.run(STARTUP);
    let now = group.now;
    group.node(B).handle_frame(now, A, offer(1, 50));
    let mut outputs = std::iter::from_fn(|| group.node(B).poll_output());
    // A daemon that dies after the acceptance must find the process's past on its disk.
    assert_eq!(outputs.next(), Some(Output::Event(Event::HistoriesChanged)));
    let accepted = outputs.next();
    let is_accept = |output: &Output| match output {
        Output::Send { frame, .. } => matches!(frame, ConductorFrame::Accept { .. }),
        _ => false,
    };
    assert!(accepted.as_ref().is_some_and(is_accept), "{accepted:?}");
    assert_eq!(outputs.next(), None);
}

#[test]
fn acceptor_of_a_silent_donor_gives_up() {
    let mut group = TestGroup::new(&[&[100], &[100]]);
    group.run(STARTUP);
    group.answers(B, A, offer(1, 50));
    group.is_cut = vec![A, B];
    group.run(15);
    assert!(!group.node(B).is_idle());
    group.run(15);
    assert!(group.node(B).is_idle());
}

#[test]
fn acceptor_of_a_removed_donor_is_free_at_once() {
    let mut group = TestGroup::new(&[&[100], &[100], &[100]]);
    group.run(STARTUP);
    group.answers(B, C, offer(1, 50));
    assert!(!group.node(B).is_idle());
    let mut view = View::configured(A, [A, B]);
    view.epoch = 2;
    let now = group.now;
    group.node(B).handle_view(now, view);
    assert!(group.node(B).is_idle());
}

#[test]
fn unanswered_offer_is_withdrawn() {
    let mut group = TestGroup::new(&[&[50; 18], &[]]);
    group.run(55);
    group.is_cut = vec![B];
    group.run(14);
    let unanswered = |(_, event): &(NodeId, Event)| match event {
        Event::Audited(record) => record.outcome == AuditOutcome::Unanswered,
        _ => false,
    };
    assert!(group.begun.is_empty() && group.events.iter().any(unanswered));
    group.is_cut.clear();
    group.run(30);
    assert!(!group.begun.is_empty());
}

#[test]
fn false_hearsay_costs_an_offer_and_moves_nothing() {
    let mut group = TestGroup::new(&[&[300, 300], &[600], &[600]]);
    group.run(STARTUP);
    // Node B says that C is idle, and lies about itself too.
    for _ in 0..60 {
        let reports = vec![loads(B, 0, 0), loads(C, 0, 0)];
        let now = group.now;
        let frame = ConductorFrame::Loads { reports };
        group.node(A).handle_frame(now, B, frame);
        group.run(1);
    }
    assert!(group.begun.is_empty(), "{:?}", group.begun);
}

#[test]
fn word_of_a_node_about_itself_prevails_over_hearsay() {
    let mut group = TestGroup::new(&[&[100], &[100], &[100]]);
    group.run(STARTUP);
    let known = |group: &mut TestGroup| {
        let now = group.now;
        let known = group.node(A).known_loads(now);
        known.iter().find(|r| r.node == C).map(|r| r.demand.used)
    };
    let reports = vec![loads(C, 700, 0)];
    group.answers(A, C, ConductorFrame::Loads { reports });
    let reports = vec![loads(C, 10, 0)];
    group.answers(A, B, ConductorFrame::Loads { reports });
    assert_eq!(known(&mut group), Some(700));
}

#[test]
fn old_loads_do_not_count() {
    let mut group = TestGroup::new(&[&[50; 18], &[]]);
    group.is_cut = vec![B];
    let reports = vec![loads(B, 0, 16_000)];
    group.run(STARTUP);
    group.answers(A, B, ConductorFrame::Loads { reports });
    assert_eq!(group.plan(A), Decision::Stay(StayReason::NobodyKnown));
}

#[test]
fn switched_off_node_neither_gives_nor_takes_to_even_out_loads() {
    let mut group = TestGroup::new(&[&[50; 18], &[50; 2]]);
    let now = group.now;
    group.node(A).handle_balancing(now, false);
    group.run(200);
    assert!(group.begun.is_empty());
    let off = StayReason::Unavailable(Unavailable::BalancingOff);
    assert_eq!(group.plan(A), Decision::Stay(off));
    let now = group.now;
    group.node(A).handle_balancing(now, true);
    let decision = group.node(A).handle_balance_now(now);
    assert!(matches!(decision, Decision::Move(_)), "{decision:?}");
    group.deliver();
    assert_eq!(group.begun.len(), 1);
}

#[test]
fn audit_log_has_predicted_and_observed_loads() {
    let mut group = TestGroup::new(&[&[100; 8], &[100; 2]]);
    group.run(90);
    let records: Vec<AuditRecord> = group.node(A).audit_records().cloned().collect();
    let moved = records
        .iter()
        .find(|record| record.outcome == AuditOutcome::Moved);
    let moved = moved.expect("a process moved");
    let AuditRole::Donor(plan) = &moved.role else {
        panic!("{moved:?}");
    };
    assert_eq!(plan.donor.before.to_string(), "80.0 %");
    assert_eq!(plan.donor.after.to_string(), "70.0 %");
    assert_eq!(moved.observed, Some(plan.donor.after));
    let acceptor = group
        .node(B)
        .audit_records()
        .find_map(|record| match record.role {
            AuditRole::Acceptor { own, .. } => Some((own.after, record.observed)),
            AuditRole::Donor(_) => None,
        });
    let (after, observed) = acceptor.expect("a process came");
    assert!(after.0.abs_diff(3_000) < 10 && observed.is_some_and(|o| o.0.abs_diff(3_000) < 300));
}

#[test]
fn gossip_is_bounded_in_a_large_group() {
    let all: Vec<&[u32]> = vec![&[100]; 200];
    let mut group = TestGroup::new(&all);
    group.run(20);
    let per_node = group.frames as f64 / 200.0 / 20.0;
    assert!((2.5..=3.5).contains(&per_node), "{per_node}");
    let now = group.now;
    let known = group.node(A).known_loads(now).len();
    assert!((20..=128).contains(&known), "{known}");
    group.node(A).tell_loads(now);
    let Some(Output::Send { frame, .. }) = group.node(A).poll_output() else {
        panic!("nothing was sent");
    };
    let ConductorFrame::Loads { reports } = frame else {
        panic!("{frame:?}");
    };
    assert!(reports.len() <= REPORTS_MAX && reports[0].node == A);
}
