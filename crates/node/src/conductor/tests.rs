//! Tests of the driver: scans and frames in, frames and moves out.

use std::path::Path;

use holdfast_api::control::{BlockerEntry, DrainState};

use holdfast_wire::conductor_frames::NodeDemand;

use super::*;
use crate::load::TreeLoad;

const OWN: NodeId = NodeId(1);
const OTHER: NodeId = NodeId(2);

/// Most seconds in which two nodes agree on a move.
const NEGOTIATION_S_MAX: u64 = 60;

fn config(directory: &Path, node: u16) -> Config {
    let directory = directory.join(node.to_string());
    std::fs::create_dir_all(&directory).unwrap();
    let other = if node == 1 { 2 } else { 1 };
    let text = format!(
        "[node]\nname = \"n{node}\"\nid = {node}\naddress = \"10.0.0.{node}\"\ninterface = \"eth0\"\n\
         run_dir = \"{0}\"\nstate_dir = \"{0}\"\n[group]\nname = \"g\"\nreach = \"steer\"\ncontact = \"n1\"\n\
         [tls]\nca = \"a\"\ncert = \"b\"\nkey = \"c\"\n\
         [[peer]]\nname = \"n{other}\"\nid = {other}\naddress = \"10.0.0.{other}\"\n",
        directory.display()
    );
    Config::parse(Path::new("/holdfast.toml"), &text).unwrap()
}

fn driver(directory: &Path, node: u16) -> ConductorDriver {
    let view = View::configured(OWN, [OWN, OTHER]);
    ConductorDriver::new(&config(directory, node), 1, view)
}

fn check(pid: i32, blockers: Vec<BlockerEntry>) -> ProcessCheck {
    ProcessCheck {
        pid,
        name: "server".to_owned(),
        movable: blockers.is_empty(),
        blockers,
        to: None,
        refusals: Vec::new(),
        processes: vec![pid],
        threads: 1,
        mappings: 10,
        descriptors: 4,
        sockets: 1,
        memory_bytes: 1 << 20,
        forwarded: Vec::new(),
        predicted_freeze_us: 1_000.0,
    }
}

fn process(pid: i32, blockers: Vec<BlockerEntry>) -> ScannedProcess {
    ScannedProcess {
        pid,
        started_ticks: 9,
        name: "server".to_owned(),
        check: Some(Ok(check(pid, blockers))),
    }
}

/// Gives a driver a scan with these processes, all of which came from `from`, if that is given.
fn scan(
    driver: &mut ConductorDriver,
    now: Duration,
    processes: Vec<ScannedProcess>,
    from: Option<NodeId>,
) {
    let number = driver.last_scan + 1;
    driver.last_scan = number;
    let tree = |process: &ScannedProcess| {
        let load = TreeLoad {
            started_ticks: process.started_ticks,
            cpu_millis: 100,
            memory_kib: 1_024,
            ..TreeLoad::default()
        };
        (process.pid, load)
    };
    let measured = NodeMeasurement {
        cpu_millis: 150,
        capacity_millis: 2_000,
        memory_free_kib: 1 << 20,
        trees: processes.iter().map(tree).collect(),
        ..NodeMeasurement::default()
    };
    let scan = Scan { number, processes };
    let freeze = |_: &ProcessCheck| Duration::from_millis(1);
    let facts = ScanFacts {
        contact: OWN,
        is_migration_enabled: true,
        resident_from: &|_| from,
        freeze_of: &freeze,
        measured: Some(&measured),
        clients: &BTreeMap::from([(42, 7)]),
    };
    driver.handle_scan(now, scan, &facts);
}

/// Delivers all frames between two drivers. Returns the move that a driver requests.
fn exchange(drivers: &mut [ConductorDriver; 2], now: Duration) -> Option<(NodeId, i32, NodeId)> {
    let mut begun = None;
    loop {
        let mut is_quiet = true;
        for index in 0..2 {
            let from = [OWN, OTHER][index];
            while let Some(output) = drivers[index].next_output(now) {
                is_quiet = false;
                match output {
                    DriverOutput::Send { to, frame } => {
                        assert_ne!(to, from);
                        drivers[1 - index].handle_frame(now, from, frame);
                    }
                    DriverOutput::BeginMove { pid, to } => begun = Some((from, pid, to)),
                }
            }
        }
        if is_quiet {
            return begun;
        }
    }
}

fn name(node: NodeId) -> String {
    format!("n{node}")
}

fn moved() -> MoveResult {
    MoveResult {
        end: Ok(()),
        freeze_us: Some(2_000.0),
        forwarded: 0,
    }
}

#[test]
fn drained_process_leaves_with_its_key() {
    let directory = tempfile::tempdir().unwrap();
    let mut drivers = [1, 2].map(|node| driver(directory.path(), node));
    drivers[0].drain(Duration::ZERO, None);
    assert_eq!(drivers[0].next_scan_plan().1, CheckScope::All);
    assert!(
        drivers[0]
            .drain_report(Duration::ZERO, &name)
            .waiting
            .is_some()
    );
    let begun = (0..NEGOTIATION_S_MAX).find_map(|second| {
        let now = Duration::from_secs(second);
        scan(&mut drivers[0], now, vec![process(42, Vec::new())], None);
        scan(&mut drivers[1], now, Vec::new(), None);
        drivers
            .iter_mut()
            .for_each(|driver| driver.handle_timeout(now));
        exchange(&mut drivers, now).map(|begun| (now, begun))
    });
    let (now, begun) = begun.expect("the process moves");
    assert_eq!(begun, (OWN, 42, OTHER));
    assert!(drivers[1].draining_nodes().contains(&OWN));
    let key = *drivers[0].processes.keys().next().unwrap();
    drivers[0].handle_move_ended(now, moved());
    // The stopped process stays for a moment, until its new clients have followed.
    for _ in 0..2 {
        scan(&mut drivers[0], now, vec![process(42, Vec::new())], None);
        assert!(drivers[0].processes.is_empty());
    }
    exchange(&mut drivers, now);
    scan(&mut drivers[0], now, Vec::new(), None);
    // The acceptor knows the process by its former key, also after a restart of its daemon.
    scan(
        &mut drivers[1],
        now,
        vec![process(7, Vec::new())],
        Some(OWN),
    );
    assert!(drivers[1].processes.keys().eq([&key]));
    exchange(&mut drivers, now);
    let report = drivers[0].drain_report(now, &name);
    assert_eq!((report.state, report.moved), (DrainState::Ended, 1));
    assert!(report.safe_to_reboot, "{report:?}");
    let one = &report.moves[0];
    assert_eq!(
        (one.pid, one.to.as_str(), one.freeze_us),
        (42, "n2", Some(2_000.0))
    );
    let log = drivers[0].balance_log(now, &name);
    assert_eq!(log.records.last().unwrap().outcome, "moved");
    let mut restarted = driver(directory.path(), 2);
    assert_eq!(restarted.machine.process_histories(now).len(), 1);
    scan(&mut restarted, now, vec![process(7, Vec::new())], Some(OWN));
    assert!(restarted.processes.keys().eq([&key]));
}

#[test]
fn process_that_cannot_move_is_named_and_stays() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = driver(directory.path(), 1);
    driver.drain(Duration::ZERO, None);
    let blocker = BlockerEntry {
        pid: 43,
        fd: Some(3),
        path: Some("pipe:[5]".to_owned()),
        reason: "the other end is outside".to_owned(),
    };
    scan(
        &mut driver,
        Duration::ZERO,
        vec![process(42, vec![blocker])],
        None,
    );
    let report = driver.drain_report(Duration::ZERO, &name);
    assert_eq!((report.state, report.remaining), (DrainState::Ended, 0));
    assert!(!report.safe_to_reboot);
    assert_eq!(report.stuck[0].pid, 42);
    let reason = "process 43, descriptor 3 (pipe:[5]): the other end is outside";
    assert_eq!(report.stuck[0].reasons, [reason]);
}

#[test]
fn restarted_daemon_goes_on_with_its_drain() {
    let directory = tempfile::tempdir().unwrap();
    let now = Duration::ZERO;
    let mut first = driver(directory.path(), 1);
    assert_eq!(first.drain_report(now, &name).state, DrainState::Off);
    first.drain(now, Some(Duration::from_secs(6_000)));
    let mut second = driver(directory.path(), 1);
    let report = second.drain_report(now, &name);
    assert_eq!(report.state, DrainState::Draining);
    let left = report.deadline_s.unwrap();
    assert!((5_000..=6_000).contains(&left), "{left}");
    second.undrain(now);
    assert!(!driver(directory.path(), 1).is_draining());
}

#[test]
fn drain_ends_at_its_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = driver(directory.path(), 1);
    driver.drain(Duration::ZERO, Some(Duration::from_secs(5)));
    scan(
        &mut driver,
        Duration::ZERO,
        vec![process(42, Vec::new())],
        None,
    );
    let report = driver.drain_report(Duration::ZERO, &name);
    assert_eq!((report.state, report.remaining), (DrainState::Draining, 1));
    let late = Duration::from_secs(6);
    scan(&mut driver, late, vec![process(42, Vec::new())], None);
    let report = driver.drain_report(late, &name);
    assert_eq!((report.state, report.remaining), (DrainState::Ended, 1));
    assert!(!report.safe_to_reboot);
}

#[test]
fn only_a_node_itself_says_that_it_is_being_drained() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = driver(directory.path(), 1);
    let report = |node, is_open| LoadReport {
        node,
        demand: NodeDemand::default(),
        memory_free_kib: 0,
        is_open,
        age_ms: 0,
    };
    let loads = |reports: &[LoadReport]| ConductorFrame::Loads {
        reports: reports.to_vec(),
    };
    let third = NodeId(3);
    driver.handle_frame(Duration::ZERO, OTHER, loads(&[report(third, false)]));
    assert_eq!(driver.draining_nodes(), BTreeSet::new());
    driver.handle_frame(Duration::ZERO, OTHER, loads(&[report(OTHER, false)]));
    assert_eq!(driver.draining_nodes(), [OTHER].into());
    driver.handle_frame(Duration::ZERO, OTHER, loads(&[report(OTHER, true)]));
    assert_eq!(driver.draining_nodes(), BTreeSet::new());
}

#[test]
fn balancing_is_off_by_default_and_the_plan_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = driver(directory.path(), 1);
    let now = Duration::from_secs(90);
    scan(&mut driver, now, vec![process(42, Vec::new())], None);
    let plan = driver.plan(now, &name);
    assert!(plan.reason.unwrap().contains("balancing is off"));
    driver.set_balancing(now, true).unwrap();
    assert!(driver.balance_status(now, &name).on);
    let plan = driver.plan(now, &name);
    assert!(
        plan.reason
            .unwrap()
            .contains("no other node has told its load")
    );
    assert!(self::driver(directory.path(), 1).is_balancing);
}

#[test]
fn sample_has_the_measured_loads() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = driver(directory.path(), 1);
    let now = Duration::ZERO;
    scan(
        &mut driver,
        now,
        vec![process(42, Vec::new()), process(43, Vec::new())],
        None,
    );
    let demand = NodeDemand {
        used: 150,
        capacity: 2_000,
    };
    assert_eq!(driver.machine.own_demand(now), Some(demand));
    let mut loads: Vec<(i32, u32, u64, u32)> = (driver.processes.values())
        .map(|one| (one.pid, one.used, one.memory_kib, one.clients))
        .collect();
    loads.sort_unstable();
    assert_eq!(loads, [(42, 100, 1_024, 7), (43, 100, 1_024, 0)]);
}

#[test]
fn drain_waits_for_the_first_measurement() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = driver(directory.path(), 1);
    driver.drain(Duration::ZERO, None);
    let freeze = |_: &ProcessCheck| Duration::from_millis(1);
    let facts = ScanFacts {
        contact: OWN,
        is_migration_enabled: true,
        resident_from: &|_| None,
        freeze_of: &freeze,
        measured: None,
        clients: &BTreeMap::new(),
    };
    let first = Scan {
        number: 1,
        processes: vec![process(42, Vec::new())],
    };
    driver.last_scan = 1;
    driver.handle_scan(Duration::ZERO, first, &facts);
    assert!(!driver.drain_report(Duration::ZERO, &name).safe_to_reboot);
    let now = Duration::from_secs(1);
    scan(&mut driver, now, vec![process(42, Vec::new())], None);
    let report = driver.drain_report(now, &name);
    assert_eq!((report.state, report.remaining), (DrainState::Draining, 1));
}

#[test]
fn pinned_process_stays_in_a_drain_and_leaves_once_free() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = driver(directory.path(), 1);
    let at = Duration::from_secs;
    let names = |id: NodeId| format!("n{}", id.0);
    scan(&mut driver, at(1), vec![process(42, Vec::new())], None);
    assert!(!driver.pin(41, true).unwrap(), "no such process");
    assert!(driver.pin(42, true).unwrap());
    driver.drain(at(2), None);
    scan(&mut driver, at(2), vec![process(42, Vec::new())], None);
    let report = driver.drain_report(at(2), &names);
    assert_eq!(report.state, DrainState::Ended);
    assert_eq!(report.stuck.len(), 1, "{report:?}");
    assert!(report.stuck[0].reasons[0].contains("pinned"), "{report:?}");
    assert!(driver.balance_status(at(2), &names).processes[0].pinned);

    // A restarted daemon remembers the pin; another process with the PID has none.
    let mut restarted = self::driver(directory.path(), 1);
    scan(&mut restarted, at(3), vec![process(42, Vec::new())], None);
    assert!(restarted.balance_status(at(3), &names).processes[0].pinned);
    let mut other = process(42, Vec::new());
    other.started_ticks += 1;
    scan(&mut restarted, at(4), vec![other], None);
    assert!(!restarted.balance_status(at(4), &names).processes[0].pinned);
    assert!(restarted.saved.pins.is_empty());

    assert!(driver.pin(42, false).unwrap());
    scan(&mut driver, at(5), vec![process(42, Vec::new())], None);
    let report = driver.drain_report(at(5), &names);
    assert_eq!((report.stuck.len(), report.remaining), (0, 1), "{report:?}");
}

#[test]
fn pin_that_cannot_be_saved_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = driver(directory.path(), 1);
    let now = Duration::from_secs(1);
    scan(&mut driver, now, vec![process(42, Vec::new())], None);
    let names = |id: NodeId| format!("n{}", id.0);
    std::fs::remove_dir_all(directory.path()).unwrap();
    std::fs::write(directory.path(), "in the way").unwrap();
    let refused = driver.pin(42, true).unwrap_err();
    std::fs::remove_file(directory.path()).unwrap();
    assert_eq!(refused.kind(), std::io::ErrorKind::NotADirectory);
    assert!(!driver.balance_status(now, &names).processes[0].pinned);
    assert!(driver.saved.pins.is_empty());
}

#[test]
fn rules_of_the_file_are_for_processes_of_a_name() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path(), 1);
    let rule = |process: &str, apart: &str| crate::config::BalanceRule {
        process: process.to_owned(),
        is_pinned: true,
        together: None,
        apart: Some(apart.to_owned()),
    };
    config.balance.rules = vec![rule("server", "a"), rule("other", "b")];
    let view = View::configured(OWN, [OWN, OTHER]);
    let mut driver = ConductorDriver::new(&config, 1, view);
    let rules = driver.rules_of(&process(42, Vec::new()));
    assert!(
        rules.is_pinned && rules.affinity_label.is_none() && rules.anti_affinity_label.is_some()
    );
    let unnamed = ScannedProcess {
        name: "else".to_owned(),
        ..process(43, Vec::new())
    };
    assert_eq!(driver.rules_of(&unnamed), PlacementRules::default());
    // The operator's word at run time counts more.
    scan(
        &mut driver,
        Duration::from_secs(1),
        vec![process(42, Vec::new())],
        None,
    );
    assert!(driver.pin(42, false).unwrap());
    assert!(!driver.rules_of(&process(42, Vec::new())).is_pinned);
}
