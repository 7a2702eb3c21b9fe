//! A busy loop in a lab's host that has a share of the processors is measured as at that share, and an idle host beside it
//! as idle. Needs root.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use holdfast_lab::{Lab, LabSpec};
use holdfast_node::load::{NodeLoadMeter, NodeMeasurement};

/// Processors of each host.
const SHARE: f64 = 0.2;
/// The same in thousandths.
const SHARE_MILLIS: u32 = 200;
/// Processor time that counts as all of the share, in thousandths. The kernel grants whole slices.
const WHOLE_SHARE: std::ops::RangeInclusive<u32> = 170..=230;
/// Limit for a condition that must become true.
const WAIT_MAX: Duration = Duration::from_secs(120);
/// Set for the part of the test that runs inside a host: PID of the process to measure there.
const ROOT_VARIABLE: &str = "HOLDFAST_MEASURED_PID";
/// Number of measurements in one run inside a host.
const MEASUREMENTS: usize = 3;

/// Prints measurements inside a host; does nothing outside.
#[test]
fn measure_inside_host() {
    let Ok(root) = std::env::var(ROOT_VARIABLE) else {
        return;
    };
    let root: i32 = root.parse().expect("a PID");
    let mut meter = NodeLoadMeter::new("eth0");
    let started = Instant::now();
    for _ in 0..=MEASUREMENTS {
        if let Some(measured) = meter.measure(started.elapsed(), &[root]) {
            let tree = measured.trees.get(&root).cloned().unwrap_or_default();
            let NodeMeasurement {
                cpu_millis,
                capacity_millis,
                waiting_millis,
                ..
            } = measured;
            println!(
                "\nmeasured {cpu_millis} {capacity_millis} {waiting_millis} {}",
                tree.cpu_millis
            );
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// One measurement in a host.
#[derive(Debug, Clone, Copy)]
struct Measured {
    cpu_millis: u32,
    capacity_millis: u32,
    waiting_millis: u32,
    tree_millis: u32,
}

/// Measures a host and the tree of a process of its PID namespace.
fn measure(lab: &Lab, host: &str, root: i32) -> Vec<Measured> {
    let program = std::env::current_exe().expect("this program");
    let mut command = lab.command(host).expect("a host");
    command.arg(program);
    command.args(["measure_inside_host", "--exact", "--nocapture"]);
    let output = command.env(ROOT_VARIABLE, root.to_string()).output();
    let output = output.expect("a run");
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text
        .lines()
        .filter_map(|line| line.strip_prefix("measured "));
    let measured = lines.map(|line| {
        let numbers: Vec<u32> = line
            .split(' ')
            .filter_map(|word| word.parse().ok())
            .collect();
        let [cpu_millis, capacity_millis, waiting_millis, tree_millis] = numbers[..] else {
            panic!("{line}");
        };
        Measured {
            cpu_millis,
            capacity_millis,
            waiting_millis,
            tree_millis,
        }
    });
    let measured: Vec<Measured> = measured.collect();
    assert_eq!(measured.len(), MEASUREMENTS, "{output:?}");
    measured
}

/// Returns the PID, in the PID namespace of the reader's host, of the process of `host` with this text in its command
/// line.
fn find_process(lab: &Lab, host: &str, text: &str) -> i32 {
    let script = format!("pgrep -o -f '{text}'");
    let started = Instant::now();
    loop {
        let mut command = lab.command(host).expect("a host");
        let output = command.args(["sh", "-c", &script]).output().expect("a run");
        let found = String::from_utf8_lossy(&output.stdout);
        if let Ok(pid) = found.trim().parse() {
            return pid;
        }
        assert!(started.elapsed() < WAIT_MAX, "exceeded time: {text} runs");
    }
}

#[test]
fn busy_loop_has_the_share_of_its_host() {
    if !Path::new("/proc/self/ns/cgroup").exists() || !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return;
    }
    let name = format!("share-{}", std::process::id());
    let spec = LabSpec::new(&name).nodes(2).clients(0).processors(SHARE);
    let lab = Lab::up(&spec).expect("a lab");
    let mut command: Command = lab.command("n1").expect("a host");
    command.args(["sh", "-c", ": busy-loop; while :; do :; done"]);
    let mut busy_loop = command.stdin(Stdio::null()).spawn().expect("a loop");
    let root = find_process(&lab, "n1", "^sh -c : busy-loop");
    let started = Instant::now();
    // Other work of the machine may leave the host less than its share at times.
    loop {
        let measured = measure(&lab, "n1", root);
        for one in &measured {
            assert_eq!(one.capacity_millis, SHARE_MILLIS, "{one:?}");
            assert!(
                one.cpu_millis <= *WHOLE_SHARE.end(),
                "more than the share: {one:?}"
            );
        }
        let is_whole = |one: &&Measured| {
            WHOLE_SHARE.contains(&one.cpu_millis)
                && WHOLE_SHARE.contains(&one.tree_millis)
                // The loop wants a whole processor.
                && one.waiting_millis >= 300
        };
        if measured.iter().any(|one| is_whole(&one)) {
            break;
        }
        assert!(
            started.elapsed() < WAIT_MAX,
            "exceeded time: the whole share, {measured:?}"
        );
    }
    for one in measure(&lab, "n2", 1) {
        assert_eq!(one.capacity_millis, SHARE_MILLIS, "{one:?}");
        assert!(one.cpu_millis < SHARE_MILLIS / 2, "an idle host: {one:?}");
    }
    busy_loop.kill().expect("ended");
    busy_loop.wait().expect("ended");
}
