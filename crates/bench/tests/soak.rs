//! A long run of everything at once: handoffs, moves, clients that connect and disconnect, floods, and killed daemons.
//! No client may notice, and the daemons must not grow. Needs root. `HOLDFAST_SOAK_S` sets the duration in seconds; the
//! default is 120 s.

use std::collections::BTreeSet;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{
    FlowFilter, FlowOutcome, FlowSelection, HandoffRequest, HandoffState, SocketStrategy,
};
use holdfast_api::{Drain, FlowText};
use holdfast_bench::churn::{self, BACKEND_HOST, CLIENT_HOST, ChurnClients, RunningServer};
use holdfast_testbed::cluster::{Cluster, ExampleServer, IpFamily};
use holdfast_testbed::connection_load::{ConnectionLoad, message_interval, open_connections};
use holdfast_testbed::process_moves::{MoveAttemptOutcome, NodeGroup};

const SECONDS: u64 = 120;
/// Parts of the run after which no more daemons are killed, and after which a daemon must not grow: until then, its memory
/// may fill up to what its work needs.
const LAST_KILL: f64 = 0.75;
const STEADY: f64 = 5.0 / 6.0;
const ECHO_PORT: u16 = 7400;
/// Numbers of connections that are handed off, and of connections to the program that moves.
const ECHOES: usize = 64;
const IDLE_CONNECTIONS: usize = 16;
const NEW_CONNECTIONS_PER_S: u32 = 10;
/// Intervals between two moves, two handoffs, two floods and two kills of daemons.
const MOVE_EVERY: Duration = Duration::from_millis(1500);
const HANDOFF_EVERY: Duration = Duration::from_millis(700);
const FLOOD_EVERY: Duration = Duration::from_secs(3);
const KILL_EVERY: Duration = Duration::from_secs(7);
/// Ports of a flood, each of which sends some datagrams. All floods use the same ports, because a group remembers flows
/// for two minutes.
const FLOOD_PORTS: std::ops::Range<u16> = 20_000..24_000;
/// Time without an answer after which a client is described, interval of looks, and number of described clients.
const HUNG_AFTER: Duration = Duration::from_secs(4);
const DESCRIBE_EVERY: Duration = Duration::from_millis(500);
const DESCRIBED_MAX: usize = 3;
/// Longest time for a handoff to end, whichever daemon was killed.
const HANDOFF_MAX: Duration = Duration::from_secs(60);
/// Growth of a daemon that is allowed in the last part of the run: memory (allocators keep some) and descriptors.
const GROWTH_MAX_KIB: u64 = 12 << 10;
const DESCRIPTOR_GROWTH_MAX: usize = 24;
/// Time for which a restarted daemon's memory may fill up: a group remembers flows for two minutes. A shorter run does not
/// show whether the memory is steady then.
const FILL_TIME: Duration = Duration::from_secs(120);
/// Most memory of a daemon in a run of any length.
const MEMORY_MAX_KIB: u64 = 64 << 10;

/// Counts of the actions done, and the daemons that grew.
#[derive(Debug, Default)]
struct ActionCounts {
    moved: usize,
    kept: usize,
    handed_off: usize,
    kills: usize,
    floods: usize,
    grown: Vec<String>,
}

#[test]
#[ignore = "takes minutes: ./x test-real runs it"]
fn clients_unaffected_and_daemons_do_not_grow() {
    assert!(nix::unistd::geteuid().is_root(), "a lab needs root");
    let seconds = std::env::var("HOLDFAST_SOAK_S").map_or(SECONDS, |text| {
        text.parse()
            .expect("HOLDFAST_SOAK_S is a number of seconds")
    });
    if let Err(error) = run_soak(Duration::from_secs(seconds)) {
        panic!("{error:#}");
    }
}

fn run_soak(length: Duration) -> Result<()> {
    let name = format!("soak-{}", std::process::id());
    let spec = churn::server_cluster_spec(name).program(ExampleServer::Echo { port: ECHO_PORT });
    let group = NodeGroup::up(spec)?;
    let folder = tempfile::tempdir()?;
    let server = RunningServer::start(churn::find_server_program("nginx")?, &group, folder.path())?;
    let outcome = run_actions(&group, &server, length);
    group.add_program_output(outcome, folder.path())
}

fn run_actions(group: &NodeGroup, server: &RunningServer, length: Duration) -> Result<()> {
    let cluster = group.cluster();
    let service = SocketAddr::new(cluster.service_address(IpFamily::V4), ECHO_PORT);
    let streams = open_connections(cluster.lab(), CLIENT_HOST, service, ECHOES)?;
    let echoes = ConnectionLoad::start(streams, message_interval(ECHOES))?;
    let connection_counts = (IDLE_CONNECTIONS, NEW_CONNECTIONS_PER_S);
    let clients = ChurnClients::start(
        cluster.lab(),
        CLIENT_HOST,
        server.address_and_protocol(),
        connection_counts,
    )?;
    group.wait_for("all connections exchange", || {
        clients.have_all_exchanged().then_some(())
    })?;
    let deadline = Instant::now() + length;
    let stop = AtomicBool::new(false);
    let mut done = ActionCounts::default();
    let outcome = std::thread::scope(|scope| {
        let moves =
            scope.spawn(|| stop_on_error(&stop, move_server(group, server.pid, deadline, &stop)));
        let handoffs =
            scope.spawn(|| stop_on_error(&stop, hand_off_repeatedly(cluster, deadline, &stop)));
        let floods = scope
            .spawn(|| stop_on_error(&stop, flood_repeatedly(cluster, service, deadline, &stop)));
        scope.spawn(|| watch_clients(cluster, server, &clients, deadline, &stop));
        let kills =
            scope.spawn(|| stop_on_error(&stop, kill_repeatedly(cluster, length, deadline, &stop)));
        let joined = "threads do not panic";
        (done.moved, done.kept) = moves.join().expect(joined)?;
        done.handed_off = handoffs.join().expect(joined)?;
        done.floods = floods.join().expect(joined)?;
        (done.kills, done.grown) = kills.join().expect(joined)?;
        Result::<()>::Ok(())
    });
    let broken_members = echoes.connections().iter().filter(|one| one.is_broken());
    let broken = broken_members.count();
    let wrong = echoes.compared.wrong_bytes();
    echoes.stop()?;
    let client_results = clients.end();
    eprintln!(
        "{done:?}; {} connections came and went",
        client_results.opened
    );
    ensure!(
        client_results.errors == 0 && client_results.bytes_wrong == 0,
        "{} errors, {} bytes wrong: {:?}",
        client_results.errors,
        client_results.bytes_wrong,
        client_results.failures
    );
    ensure!(
        broken == 0 && wrong == 0,
        "{broken} ended, {wrong} bytes wrong"
    );
    outcome?;
    ensure!(done.grown.is_empty(), "{:?}", done.grown);
    ensure!(
        done.moved > 0 && done.handed_off > 0 && done.floods > 0,
        "{done:?}"
    );
    Ok(())
}

/// Describes what the nodes know of the first clients that wait for an answer longer than any step of a move lasts: once a
/// client gives up, nothing is left to see. Ends the run at the first client that fails, and describes it: later, the
/// daemons' logs tell of other events.
fn watch_clients(
    cluster: &Cluster,
    server: &RunningServer,
    clients: &ChurnClients,
    deadline: Instant,
    stop: &AtomicBool,
) {
    let mut described = BTreeSet::new();
    while pause_and_continue(deadline, stop, DESCRIBE_EVERY) {
        if let Some(failure) = clients.first_failure() {
            stop.store(true, Ordering::Relaxed);
            let (address, _) = server.address_and_protocol();
            let known = failure.client.map_or_else(
                || cluster.log_tails(),
                |client| describe_flow(cluster, address, client),
            );
            eprintln!("{}\n{known}", failure.text);
        }
        let hung = clients.waiting_for(HUNG_AFTER).into_iter();
        for client in hung.take(DESCRIBED_MAX.saturating_sub(described.len())) {
            if described.insert(client) {
                let (address, _) = server.address_and_protocol();
                eprintln!(
                    "{client} waits for an answer:\n{}",
                    describe_flow(cluster, address, client)
                );
            }
        }
    }
}

/// Returns what each host's kernel and daemon know of a connection.
fn describe_flow(cluster: &Cluster, server: SocketAddr, client: SocketAddr) -> String {
    let flow: FlowText = format!("tcp:{server}-{client}").parse().expect("a flow");
    let mut text = String::new();
    for host in cluster
        .nodes()
        .iter()
        .map(String::as_str)
        .chain([CLIENT_HOST])
    {
        let filter = format!("sport = :{} or dport = :{}", client.port(), client.port());
        let sockets = cluster.lab().command(host).map(|mut command| {
            let output = command.args(["ss", "-Htanpoie", &filter]).output();
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        });
        text += &format!("{host}: sockets {sockets:?}\n");
        if let Ok(control) = cluster.blocking_control_client(host) {
            let known = control.run(async |client| client.flow(&flow).await);
            let status = control.run(async |client| client.status().await);
            let residents = status.map(|status| status.residents);
            text += &format!("{host}: daemon knows {known:?}, residents {residents:?}\n");
        }
    }
    text + &cluster.log_tails()
}

/// Tells the other threads to end if this one has failed.
fn stop_on_error<T>(stop: &AtomicBool, outcome: Result<T>) -> Result<T> {
    if outcome.is_err() {
        stop.store(true, Ordering::Relaxed);
    }
    outcome
}

/// Pauses, and returns true if the thread is to go on.
fn pause_and_continue(deadline: Instant, stop: &AtomicBool, pause: Duration) -> bool {
    std::thread::sleep(pause);
    Instant::now() < deadline && !stop.load(Ordering::Relaxed)
}

/// Moves the server there and back. Returns the numbers of moves made and of moves not made. The control socket of a
/// daemon that was killed does not answer until the daemon is restarted.
fn move_server(
    group: &NodeGroup,
    mut pid: i32,
    deadline: Instant,
    stop: &AtomicBool,
) -> Result<(usize, usize)> {
    let (mut moved, mut kept, mut number) = (0, 0, 0);
    while pause_and_continue(deadline, stop, MOVE_EVERY) {
        match group.request_move(pid, number, SocketStrategy::default()) {
            Ok(MoveAttemptOutcome::Moved(made)) => {
                moved += 1;
                number += 1;
                pid = made.pid;
            }
            Ok(MoveAttemptOutcome::Kept(reason)) => {
                kept += 1;
                eprintln!("the server stayed: {reason}");
            }
            Err(error) => {
                eprintln!("outcome of a move unknown: {error:#}");
                group.cluster().wait_ready()?;
                (pid, number) = locate_server(group, pid, number)?;
            }
        }
    }
    Ok((moved, kept))
}

/// Finds the server after a move in which a daemon was killed: returns its PID there, and the number of the next move.
fn locate_server(group: &NodeGroup, pid: i32, number: usize) -> Result<(i32, usize)> {
    group.wait_for("the server is at one node", || {
        let to = holdfast_testbed::process_moves::SERVER_NODES[(number + 1) % 2];
        let from = holdfast_testbed::process_moves::SERVER_NODES[number % 2];
        let residents = |node| {
            let control = group.cluster().blocking_control_client(node).ok()?;
            let status = control.run(async |client| client.status().await).ok()?;
            Some(status.residents)
        };
        let (at_donor, at_acceptor) = (residents(from)?, residents(to)?);
        let own = group.cluster().proc_path(from).ok()?.join(pid.to_string());
        match (at_donor.as_slice(), at_acceptor.as_slice()) {
            ([], [there]) => Some((there.pid, number + 1)),
            ([here], []) => Some((here.pid, number)),
            // Before the first move the server is a resident of no node.
            ([], []) if own.exists() => Some((pid, number)),
            _ => None,
        }
    })
}

/// Hands all echo connections from node to node; returns the number of handoffs that ended.
fn hand_off_repeatedly(cluster: &Cluster, deadline: Instant, stop: &AtomicBool) -> Result<usize> {
    let (mut made, mut number) = (0, 0);
    while pause_and_continue(deadline, stop, HANDOFF_EVERY) {
        let nodes = ["n2", "n3", "n1"];
        let (from, to) = (nodes[number % 3], nodes[(number + 1) % 3]);
        match hand_off_all(cluster, from, to) {
            Ok(kept) => {
                made += 1;
                if let Some(reason) = kept.first() {
                    eprintln!(
                        "{from} to {to}: {} connections stayed, first because: {reason}",
                        kept.len()
                    );
                }
            }
            // The donor's daemon was killed; its successor determines the outcome.
            Err(error) => eprintln!("a handoff from {from} to {to}: {error:#}"),
        }
        number += 1;
    }
    Ok(made)
}

fn hand_off_all(cluster: &Cluster, from: &str, to: &str) -> Result<Vec<String>> {
    let donor = cluster.blocking_control_client(from)?;
    let request = HandoffRequest {
        selection: FlowSelection::AllOf(FlowFilter {
            pool: Some("echo".to_owned()),
            ..FlowFilter::default()
        }),
        to: to.to_owned(),
        drain: Drain::default(),
    };
    let accepted = donor.run(async |client| client.hand_off(&request).await)?;
    let since = Instant::now();
    loop {
        let status = donor.run(async |client| client.handoff(accepted.id).await)?;
        if status.summary.state == HandoffState::Finished {
            let kept = status.results.iter().filter_map(|result| {
                let FlowOutcome::Kept { reason, .. } = &result.outcome else {
                    return None;
                };
                Some(format!("{} stayed: {reason}", result.flow))
            });
            return Ok(kept.collect());
        }
        ensure!(
            since.elapsed() < HANDOFF_MAX,
            "exceeded time: the handoff does not end"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends datagrams from thousands of ports to a service, at once and then periodically.
fn flood_repeatedly(
    cluster: &Cluster,
    service: SocketAddr,
    deadline: Instant,
    stop: &AtomicBool,
) -> Result<usize> {
    let mut floods = 0;
    while floods == 0 || pause_and_continue(deadline, stop, FLOOD_EVERY) {
        cluster
            .lab()
            .run_in_net_namespace(BACKEND_HOST, || -> std::io::Result<()> {
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

/// Kills daemons in the first part of the run, and measures them in the last part. Returns the number of kills and the
/// daemons that grew.
fn kill_repeatedly(
    cluster: &Cluster,
    length: Duration,
    deadline: Instant,
    stop: &AtomicBool,
) -> Result<(usize, Vec<String>)> {
    let mut kills = 0;
    let began = Instant::now();
    let mut steady_sizes = None;
    while pause_and_continue(deadline, stop, KILL_EVERY) {
        let part = began.elapsed().as_secs_f64() / length.as_secs_f64();
        if part < LAST_KILL {
            let nodes = cluster.nodes();
            // A choice by the clock's nanoseconds is not in step with the other actions.
            let node_index = began.elapsed().subsec_nanos() as usize % nodes.len();
            cluster.wait_ready()?;
            cluster.kill_daemon(&nodes[node_index])?;
            kills += 1;
        } else if part >= STEADY && steady_sizes.is_none() {
            cluster.wait_ready()?;
            steady_sizes = Some(daemon_sizes(cluster)?);
        }
    }
    cluster.wait_ready()?;
    let last_sizes = daemon_sizes(cluster)?;
    eprintln!("sizes of the daemons: {steady_sizes:?}, then {last_sizes:?}");
    let before = steady_sizes.context("the run is too short to measure the daemons")?;
    let is_steady = length.mul_f64(STEADY - LAST_KILL) >= FILL_TIME;
    let growth_max_kib = match is_steady {
        true => GROWTH_MAX_KIB,
        false => MEMORY_MAX_KIB,
    };
    Ok((kills, describe_growth(&before, &last_sizes, growth_max_kib)))
}

/// Memory and descriptors of a daemon.
#[derive(Debug)]
struct DaemonSize {
    node: String,
    pid: i32,
    memory_kib: u64,
    descriptors: usize,
}

fn daemon_sizes(cluster: &Cluster) -> Result<Vec<DaemonSize>> {
    let size = |node: String| {
        let pid = cluster.daemon_pid(&node)?.context("the daemon is down")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let memory = line.and_then(|line| line.split_whitespace().next());
        Ok(DaemonSize {
            memory_kib: memory.context("no RssAnon")?.parse()?,
            descriptors: std::fs::read_dir(format!("/proc/{pid}/fd"))?.count(),
            node,
            pid,
        })
    };
    cluster.nodes().into_iter().map(size).collect()
}

fn describe_growth(
    before: &[DaemonSize],
    after: &[DaemonSize],
    growth_max_kib: u64,
) -> Vec<String> {
    let pairs = before.iter().zip(after);
    let grown = pairs.filter(|(before, after)| {
        before.pid == after.pid
            && (after.memory_kib > MEMORY_MAX_KIB.min(before.memory_kib + growth_max_kib)
                || after.descriptors > before.descriptors + DESCRIPTOR_GROWTH_MAX)
    });
    let descriptions =
        grown.map(|(before, after)| format!("{}: {before:?}, then {after:?}", after.node));
    descriptions.collect()
}
