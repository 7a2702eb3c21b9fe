//! Everything at once, for a long time: handoffs, moves, clients that come and go, floods, and daemons that are killed. No client
//! may notice, and the daemons must not grow. Needs root; `HOLDFAST_SOAK_S` says for how long, 120 s without it.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_api::Drain;
use holdfast_api::control::{
    FlowFilter, FlowOutcome, HandoffRequest, HandoffState, Selection, SocketsWay,
};
use holdfast_bench::churn::{self, BEHIND, CLIENTS, Clients, Server};
use holdfast_bench::cluster::{Cluster, Family, Program};
use holdfast_bench::load::{Load, connect, interval};
use holdfast_bench::moves::{Attempt, Group};

const SECONDS: u64 = 120;
/// A period is half with daemons that are killed, half without: in that a daemon must not grow.
const PERIOD: Duration = Duration::from_secs(60);
const ECHO_PORT: u16 = 7400;
/// Connections that are handed off, and of the program that moves.
const ECHOES: usize = 64;
const STAY: usize = 16;
const NEW_PER_S: u32 = 10;
/// Between two moves, two handoffs, two floods and two daemons' ends.
const MOVE_EVERY: Duration = Duration::from_millis(1500);
const HANDOFF_EVERY: Duration = Duration::from_millis(700);
const FLOOD_EVERY: Duration = Duration::from_secs(3);
const KILL_EVERY: Duration = Duration::from_secs(7);
/// Ports of a flood, each with some datagrams. The same each time: a group remembers flows for two minutes.
const FLOOD_PORTS: std::ops::Range<u16> = 20_000..24_000;
/// A handoff has ended after that, whatever was killed.
const HANDOFF_MAX: Duration = Duration::from_secs(60);
/// What a daemon may have more of at the end of a quiet half than after its first seconds: memory (allocators keep some), descriptors.
const GROWTH_MAX_KIB: u64 = 12 << 10;
const DESCRIPTORS_MAX: usize = 24;

/// What was done.
#[derive(Debug, Default)]
struct Done {
    moved: usize,
    kept: usize,
    handed_off: usize,
    kills: usize,
    floods: usize,
    grown: Vec<String>,
}

#[test]
#[ignore = "takes minutes: ./x test-real runs it"]
fn nobody_notices_and_nothing_grows() {
    assert!(nix::unistd::geteuid().is_root(), "a lab needs root");
    let seconds = std::env::var("HOLDFAST_SOAK_S").map_or(SECONDS, |text| {
        text.parse()
            .expect("HOLDFAST_SOAK_S is a number of seconds")
    });
    if let Err(error) = soak(Duration::from_secs(seconds)) {
        panic!("{error:#}");
    }
}

fn soak(length: Duration) -> Result<()> {
    let name = format!("soak-{}", std::process::id());
    let spec = churn::spec(name).program(Program::Echo { port: ECHO_PORT });
    let group = Group::up(spec)?;
    let folder = tempfile::tempdir()?;
    let server = Server::start(churn::program("nginx")?, &group, folder.path())?;
    let outcome = drive(&group, &server, length);
    group.with_output(outcome, folder.path())
}

fn drive(group: &Group, server: &Server, length: Duration) -> Result<()> {
    let cluster = group.cluster();
    let service = SocketAddr::new(cluster.service_address(Family::V4), ECHO_PORT);
    let streams = connect(cluster.lab(), CLIENTS, service, ECHOES)?;
    let echoes = Load::start(streams, interval(ECHOES))?;
    let of = (STAY, NEW_PER_S);
    let clients = Clients::start(cluster.lab(), CLIENTS, server.spoken(), of)?;
    group.until("all connections exchange", || {
        clients.all_exchange().then_some(())
    })?;
    let until = Instant::now() + length;
    let stop = AtomicBool::new(false);
    let mut done = Done::default();
    let outcome = std::thread::scope(|scope| {
        let moves = scope.spawn(|| ended(&stop, move_on(group, server.pid, until, &stop)));
        let handoffs = scope.spawn(|| ended(&stop, hand_off(cluster, until, &stop)));
        let floods = scope.spawn(|| ended(&stop, flood(cluster, service, until, &stop)));
        let kills = scope.spawn(|| ended(&stop, kill(cluster, until, &stop)));
        let joined = "threads do not panic";
        (done.moved, done.kept) = moves.join().expect(joined)?;
        done.handed_off = handoffs.join().expect(joined)?;
        done.floods = floods.join().expect(joined)?;
        (done.kills, done.grown) = kills.join().expect(joined)?;
        Result::<()>::Ok(())
    });
    let broken = echoes.members().iter().filter(|one| one.is_broken());
    let broken = broken.count();
    let wrong = echoes.compared.wrong_bytes();
    echoes.stop()?;
    let seen = clients.end();
    eprintln!("{done:?}; {} connections came and went", seen.opened);
    outcome?;
    ensure!(
        seen.errors == 0 && seen.bytes_wrong == 0,
        "{} errors, {} bytes wrong: {:?}",
        seen.errors,
        seen.bytes_wrong,
        seen.failures
    );
    ensure!(
        broken == 0 && wrong == 0,
        "{broken} ended, {wrong} bytes wrong"
    );
    ensure!(done.grown.is_empty(), "{:?}", done.grown);
    ensure!(
        done.moved > 0 && done.handed_off > 0 && done.floods > 0,
        "{done:?}"
    );
    Ok(())
}

/// Has the others end when one fails.
fn ended<T>(stop: &AtomicBool, outcome: Result<T>) -> Result<T> {
    if outcome.is_err() {
        stop.store(true, Ordering::Relaxed);
    }
    outcome
}

/// Whether to go on after this pause.
fn goes_on(until: Instant, stop: &AtomicBool, pause: Duration) -> bool {
    std::thread::sleep(pause);
    Instant::now() < until && !stop.load(Ordering::Relaxed)
}

/// Moves the server there and back; moves that were made, and that were not. Where a daemon has ended, its own control does not
/// answer for a moment.
fn move_on(
    group: &Group,
    mut pid: i32,
    until: Instant,
    stop: &AtomicBool,
) -> Result<(usize, usize)> {
    let (mut moved, mut kept, mut number) = (0, 0, 0);
    while goes_on(until, stop, MOVE_EVERY) {
        match group.attempt(pid, number, SocketsWay::default()) {
            Ok(Attempt::Moved(made)) => {
                moved += 1;
                number += 1;
                pid = made.pid;
            }
            Ok(Attempt::Kept(reason)) => {
                kept += 1;
                eprintln!("the server stayed: {reason}");
            }
            Err(error) => {
                eprintln!("a move of which nothing is known: {error:#}");
                group.cluster().wait_ready()?;
                (pid, number) = whereabouts(group, pid, number)?;
            }
        }
    }
    Ok((moved, kept))
}

/// Where the server is, after a move whose daemon was killed: its PID there, and the number of the next move.
fn whereabouts(group: &Group, pid: i32, number: usize) -> Result<(i32, usize)> {
    group.until("the server is at one place", || {
        let to = holdfast_bench::moves::HOMES[(number + 1) % 2];
        let from = holdfast_bench::moves::HOMES[number % 2];
        let residents = |node| {
            let control = group.cluster().control_blocking(node).ok()?;
            let status = control.run(async |client| client.status().await).ok()?;
            Some(status.residents)
        };
        let (here, there) = (residents(from)?, residents(to)?);
        let own = group.cluster().proc(from).ok()?.join(pid.to_string());
        match (here.as_slice(), there.as_slice()) {
            ([], [there]) => Some((there.pid, number + 1)),
            ([here], []) => Some((here.pid, number)),
            // At first it is a resident of no node.
            ([], []) if own.exists() => Some((pid, number)),
            _ => None,
        }
    })
}

/// Hands all echoes from node to node; how often that ended.
fn hand_off(cluster: &Cluster, until: Instant, stop: &AtomicBool) -> Result<usize> {
    let (mut made, mut number) = (0, 0);
    while goes_on(until, stop, HANDOFF_EVERY) {
        let nodes = ["n2", "n3", "n1"];
        let (from, to) = (nodes[number % 3], nodes[(number + 1) % 3]);
        match hand_all(cluster, from, to) {
            Ok(kept) => {
                made += 1;
                if let Some(why) = kept.first() {
                    eprintln!("{from} to {to}: {} stayed, such as {why}", kept.len());
                }
            }
            // Its daemon was killed; the next one finds out what became of it.
            Err(error) => eprintln!("a handoff from {from} to {to}: {error:#}"),
        }
        number += 1;
    }
    Ok(made)
}

fn hand_all(cluster: &Cluster, from: &str, to: &str) -> Result<Vec<String>> {
    let donor = cluster.control_blocking(from)?;
    let request = HandoffRequest {
        selection: Selection::AllOf(FlowFilter {
            pool: Some("echo".to_owned()),
            ..FlowFilter::default()
        }),
        to: to.to_owned(),
        drain: Drain::default(),
    };
    let handed = donor.run(async |client| client.hand_off(&request).await)?;
    let since = Instant::now();
    loop {
        let status = donor.run(async |client| client.handoff(handed.id).await)?;
        if status.summary.state == HandoffState::Finished {
            let kept = status.results.iter().filter_map(|result| {
                let FlowOutcome::Kept { reason } = &result.outcome else {
                    return None;
                };
                Some(format!("{} stayed: {reason}", result.flow))
            });
            return Ok(kept.collect());
        }
        ensure!(
            since.elapsed() < HANDOFF_MAX,
            "exceeded time: it does not end"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Datagrams from thousands of ports to a service, at once and then again and again.
fn flood(
    cluster: &Cluster,
    service: SocketAddr,
    until: Instant,
    stop: &AtomicBool,
) -> Result<usize> {
    let mut floods = 0;
    while floods == 0 || goes_on(until, stop, FLOOD_EVERY) {
        cluster.lab().in_net(BEHIND, || -> std::io::Result<()> {
            for port in FLOOD_PORTS {
                let socket = UdpSocket::bind(("0.0.0.0", port))?;
                for _ in 0..3 {
                    socket.send_to(b"flood", service)?;
                }
            }
            Ok(())
        })??;
        floods += 1;
    }
    Ok(floods)
}

/// Kills daemons in the first half of each period, and measures them in the second. How many were killed, and which grew.
fn kill(cluster: &Cluster, until: Instant, stop: &AtomicBool) -> Result<(usize, Vec<String>)> {
    let (mut kills, mut grown) = (0, Vec::new());
    let began = Instant::now();
    let mut before: Option<Vec<Size>> = None;
    while goes_on(until, stop, KILL_EVERY) {
        let part = began.elapsed().as_secs() % PERIOD.as_secs();
        let is_quiet = part > PERIOD.as_secs() / 2;
        match (is_quiet, before.take()) {
            (false, known) => {
                if let Some(known) = known {
                    grown.extend(growth(&known, &sizes(cluster)?));
                }
                let nodes = cluster.nodes();
                // Not in step with what else happens.
                let at = began.elapsed().subsec_nanos() as usize % nodes.len();
                cluster.wait_ready()?;
                cluster.kill_daemon(&nodes[at])?;
                kills += 1;
            }
            (true, None) => {
                cluster.wait_ready()?;
                before = Some(sizes(cluster)?);
            }
            (true, known) => before = known,
        }
    }
    if let Some(known) = before {
        grown.extend(growth(&known, &sizes(cluster)?));
    }
    cluster.wait_ready()?;
    Ok((kills, grown))
}

/// A daemon's memory and descriptors.
#[derive(Debug)]
struct Size {
    node: String,
    pid: i32,
    memory_kib: u64,
    descriptors: usize,
}

fn sizes(cluster: &Cluster) -> Result<Vec<Size>> {
    let size = |node: String| {
        let pid = cluster.daemon_pid(&node)?.context("the daemon is down")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let memory = line.and_then(|line| line.split_whitespace().next());
        Ok(Size {
            memory_kib: memory.context("no RssAnon")?.parse()?,
            descriptors: std::fs::read_dir(format!("/proc/{pid}/fd"))?.count(),
            node,
            pid,
        })
    };
    cluster.nodes().into_iter().map(size).collect()
}

fn growth(before: &[Size], after: &[Size]) -> Vec<String> {
    let pairs = before.iter().zip(after);
    let grown = pairs.filter(|(before, after)| {
        before.pid == after.pid
            && (after.memory_kib > before.memory_kib + GROWTH_MAX_KIB
                || after.descriptors > before.descriptors + DESCRIPTORS_MAX)
    });
    let told = grown.map(|(before, after)| format!("{}: {before:?}, then {after:?}", after.node));
    told.collect()
}
