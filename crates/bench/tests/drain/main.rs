//! Drains of nodes: everything that can move leaves, no client notices, and what cannot move is named and left alone. Needs
//! root.
#![cfg(target_arch = "x86_64")]

#[path = "../common/mod.rs"]
mod common;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use holdfast_api::Protocol;
use holdfast_api::control::{DrainReport, DrainRequest, DrainState, Status};
use holdfast_testbed::cluster::{
    Cluster, ClusterService, ClusterSpec, ExampleServer, IpFamily, find_program,
};
use holdfast_testbed::connection_load::{ConnectionLoad, open_connections};

use common::{LoadedGroup, PORT, eventually, lock_lab};

/// Ports of servers that can move.
const MOVABLE_PORTS: [u16; 4] = [7101, 7102, 7103, 7104];
/// Port of the server that cannot move.
const FIXED_PORT: u16 = 7105;
/// Number of connections to each server that can move.
const CONNECTIONS: usize = 4;

/// Three nodes; servers without any support for moves at n2.
struct Group {
    cluster: Cluster,
    folder: tempfile::TempDir,
}

impl Group {
    fn up() -> Group {
        let mut spec = ClusterSpec::new(format!("drain-{}", std::process::id()));
        spec.migration = true;
        let ports = MOVABLE_PORTS.into_iter().chain([FIXED_PORT]);
        spec.services = ports
            .map(|port| ClusterService::new(&format!("echo{port}"), Protocol::Tcp, port))
            .collect();
        let group = Group {
            cluster: Cluster::up(spec).unwrap(),
            folder: tempfile::tempdir().unwrap(),
        };
        let program = group.compile_echo();
        for port in MOVABLE_PORTS {
            group.start(&program, port, "");
        }
        // A pipe whose other end is outside cannot move.
        group.start(&program, FIXED_PORT, "sleep 100000 | ");
        group
    }

    fn compile_echo(&self) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/moves/echo.c");
        let program = self.folder.path().join("echo");
        let gcc = Command::new("gcc")
            .args(["-O1", "-Wall", "-o"])
            .args([&program, &source])
            .status();
        assert!(gcc.unwrap().success(), "echo.c does not compile");
        program
    }

    /// Starts a server at n2, with shell text before its command.
    fn start(&self, program: &Path, port: u16, before: &str) {
        let input = if before.is_empty() { "</dev/null" } else { "" };
        let script = format!("({before}setsid \"$0\" \"$@\" {input} >/dev/null 2>&1) &");
        let mut command = self.cluster.lab().command("n2").unwrap();
        command
            .args(["sh", "-c", &script])
            .arg(program)
            .args([self.address(port).ip().to_string(), port.to_string()])
            .arg(self.pid_file(port));
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
        assert!(status.unwrap().success(), "the server was not started");
        eventually("the server starts", || self.read_pid(port).is_some());
    }

    fn pid_file(&self, port: u16) -> PathBuf {
        self.folder.path().join(format!("pid-{port}"))
    }

    /// Returns the PID of a server on the host where it was started.
    fn read_pid(&self, port: u16) -> Option<i32> {
        let text = std::fs::read_to_string(self.pid_file(port)).ok()?;
        text.parse().ok()
    }

    fn address(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.cluster.service_address(IpFamily::V4), port)
    }

    fn status(&self, node: &str) -> Status {
        let control = self.cluster.blocking_control_client(node).unwrap();
        control.run(|client| client.status()).unwrap()
    }

    fn report(&self, node: &str) -> DrainReport {
        let control = self.cluster.blocking_control_client(node).unwrap();
        control.run(|client| client.drain_report()).unwrap()
    }

    /// Runs the command `holdfast` for a node.
    fn holdfast(&self, node: &str, words: &[&str]) -> Output {
        let socket = self.cluster.run_path(node, "control.sock").unwrap();
        let mut command = Command::new(find_program("holdfast").unwrap());
        command.args(words).arg("--socket").arg(socket);
        command.output().unwrap()
    }

    /// Opens one connection to a server, and exchanges bytes over it.
    fn exchange(&self, port: u16) -> std::io::Result<()> {
        use std::io::{Read, Write};
        let mut streams = open_connections(self.cluster.lab(), "c1", self.address(port), 1)
            .map_err(std::io::Error::other)?;
        let stream = &mut streams[0];
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.write_all(b"new client")?;
        let mut answer = [0; 10];
        stream.read_exact(&mut answer)?;
        assert_eq!(&answer, b"new client");
        Ok(())
    }
}

/// Returns the loads of clients of all servers that can move.
fn start_loads(group: &Group) -> Vec<ConnectionLoad> {
    // Before the contact node knows where the servers are, new clients go to any node.
    eventually("new clients go to n2 alone", || {
        let services = group.status("n1").services;
        let mut of_clients = services.iter().filter(|one| one.address.is_ipv4());
        of_clients.all(|service| {
            let placed = service.nodes.iter().filter(|node| node.placed_weight > 0);
            placed.map(|node| node.node.as_str()).eq(["n2"])
        })
    });
    let load = |port| {
        eventually("the server takes clients", || group.exchange(port).is_ok());
        let address = group.address(port);
        let streams = open_connections(group.cluster.lab(), "c1", address, CONNECTIONS).unwrap();
        ConnectionLoad::start(streams, Duration::from_millis(50)).unwrap()
    };
    MOVABLE_PORTS.map(load).into()
}

/// Asserts that each connection goes on, and that no byte was wrong or lost.
#[track_caller]
fn assert_all_go_on(loads: &[ConnectionLoad]) {
    let members = || loads.iter().flat_map(ConnectionLoad::connections);
    let before: Vec<u64> = members().map(|member| member.answers_received()).collect();
    eventually("every connection goes on", || {
        assert!(
            !members().any(|member| member.is_broken()),
            "a connection broke"
        );
        let counts = members().map(|member| member.answers_received());
        counts.zip(&before).all(|(now, before)| now >= before + 2)
    });
    let wrong: u64 = loads.iter().map(|load| load.compared.wrong_bytes()).sum();
    assert_eq!(wrong, 0, "wrong bytes");
}

/// Asserts that `holdfast top` shows the drain of n2, and obeys its keys.
fn assert_top_shows_the_drain(group: &Group) {
    let shown = group.holdfast("n2", &["top", "--once"]);
    assert_eq!(shown.status.code(), Some(0), "{shown:?}");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    for expected in [
        "node n2 of group",
        "this node is drained, and not safe to reboot",
        "moved to n",
        "draining",
    ] {
        assert!(shown.contains(expected), "{expected:?}: {shown}");
    }
    eprintln!("{shown}");
    switch_balancing_by_keys(group, "n3");
}

/// Switches balancing on and off in `holdfast top`, at a terminal.
fn switch_balancing_by_keys(group: &Group, node: &str) {
    use std::io::Write;
    let socket = group.cluster.run_path(node, "control.sock").unwrap();
    let program = find_program("holdfast").unwrap();
    let command = format!("{} top --socket {}", program.display(), socket.display());
    let mut terminal = Command::new("script")
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut keys = terminal.stdin.take().unwrap();
    let control = group.cluster.blocking_control_client(node).unwrap();
    for is_on in [true, false] {
        keys.write_all(b"b").unwrap();
        eventually("the key switches balancing", || {
            control.run(|client| client.balance()).unwrap().on == is_on
        });
    }
    keys.write_all(b"q").unwrap();
    assert!(terminal.wait().unwrap().success(), "holdfast top failed");
}

/// Asserts that the contact node, n1, ends and begins the drain of n2, and that other nodes are refused. In the end n2 is not
/// being drained.
fn assert_contact_node_orders_alone(group: &Group) {
    for (at, node, words) in [
        ("n3", "n2", "only the contact node, n1, drains other nodes"),
        ("n1", "n9", "the group has no node n9"),
    ] {
        for command in ["drain", "undrain"] {
            let refused = group.holdfast(at, &[command, node]);
            assert_eq!(refused.status.code(), Some(1), "{refused:?}");
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(said.contains(words), "{said}");
        }
    }
    assert!(group.status("n2").draining);
    let undrain = || {
        let undrained = group.holdfast("n1", &["undrain", "n2"]);
        assert_eq!(undrained.status.code(), Some(0), "{undrained:?}");
        assert!(!group.status("n2").draining);
    };
    undrain();
    let drained = group.holdfast("n1", &["drain", "n2", "--json"]);
    assert_eq!(drained.status.code(), Some(0), "{drained:?}");
    let report: DrainReport = serde_json::from_slice(&drained.stdout).unwrap();
    assert!(report.node == "n2" && report.safe_to_reboot, "{report:?}");
    assert!(group.status("n2").draining && !group.status("n1").draining);
    undrain();
}

#[test]
fn drained_node_loses_no_client_and_names_what_stays() {
    let Some(_lab_lock) = lock_lab() else { return };
    let group = Group::up();
    let loads = start_loads(&group);
    let fixed = group.read_pid(FIXED_PORT).unwrap();
    assert_all_go_on(&loads);

    // The command waits for the end of the drain: one process stays.
    let drained = group.holdfast("n2", &["drain", "n2", "--deadline", "10m"]);
    let shown = String::from_utf8_lossy(&drained.stdout).into_owned();
    let trouble = || format!("{drained:?}\n{}", group.cluster.log_tails());
    assert_eq!(drained.status.code(), Some(3), "{}", trouble());
    assert!(shown.contains("cannot move, and goes on at n2"), "{shown}");
    assert!(shown.contains("runs on n"), "{shown}");
    assert!(
        shown.contains("n2: not safe to reboot: 1 processes cannot move"),
        "{shown}"
    );
    eprintln!("{shown}");
    let report = group.report("n2");
    assert_eq!(
        (report.state, report.moved, report.remaining),
        (DrainState::Ended, 4, 0)
    );
    let [stuck] = &report.stuck[..] else {
        panic!("{report:#?}");
    };
    assert!(stuck.pid == fixed && !stuck.reasons.is_empty(), "{stuck:?}");
    let moved = ["n1", "n3"].map(|node| group.status(node).residents.len());
    assert_eq!(moved.iter().sum::<usize>(), 4, "{moved:?}");
    assert!(group.status("n2").draining && !group.status("n1").draining);
    assert_all_go_on(&loads);
    for port in MOVABLE_PORTS.into_iter().chain([FIXED_PORT]) {
        eventually("a server takes a new client", || {
            group.exchange(port).is_ok()
        });
    }

    for (node, words, expected) in [
        ("n2", ["balance", "status"], "no, draining"),
        ("n1", ["balance", "plan"], "balancing is off at this node"),
        ("n2", ["balance", "log"], "moved"),
        ("n1", ["balance", "on"], "balancing is on"),
        ("n1", ["balance", "plan"], "no process moves"),
        ("n1", ["balance", "off"], "balancing is off"),
    ] {
        let answer = group.holdfast(node, &words);
        let shown = String::from_utf8_lossy(&answer.stdout).into_owned();
        assert_eq!(answer.status.code(), Some(0), "{words:?}: {answer:?}");
        assert!(shown.contains(expected), "{words:?}: {shown}");
        eprintln!("{node}: {words:?}\n{shown}");
    }

    assert_top_shows_the_drain(&group);

    // A restarted daemon goes on with the drain.
    let starts = group.cluster.daemon_starts("n2");
    group.cluster.kill_daemon("n2").unwrap();
    eventually("the daemon is back", || {
        group.cluster.daemon_starts("n2") > starts
    });
    group.cluster.wait_ready().unwrap();
    assert!(group.status("n2").draining);
    eventually("the drain has ended again", || {
        group.report("n2").state == DrainState::Ended
    });
    assert!(!group.report("n2").safe_to_reboot);
    assert_all_go_on(&loads);

    // Without the process that stays, the host can be rebooted.
    let mut end = group.cluster.lab().command("n2").unwrap();
    end.args(["kill", "-KILL", &fixed.to_string()]);
    assert!(end.status().unwrap().success());
    eventually("the node is safe to reboot", || {
        group.report("n2").safe_to_reboot
    });
    let drained = group.holdfast("n2", &["drain"]);
    let shown = String::from_utf8_lossy(&drained.stdout).into_owned();
    assert_eq!(drained.status.code(), Some(0), "{drained:?}");
    assert!(shown.contains("n2: safe to reboot"), "{shown}");

    // A drained node takes nothing; a node that is drained no more takes processes again.
    assert_contact_node_orders_alone(&group);
    let [_, at_n3] = moved;
    let drained = group.holdfast("n3", &["drain"]);
    assert_eq!(
        drained.status.code(),
        Some(0),
        "{drained:?}\n{}",
        group.cluster.log_tails()
    );
    assert_eq!(group.report("n3").moved as usize, at_n3);
    assert_all_go_on(&loads);
    loads.into_iter().for_each(|load| load.stop().unwrap());
}

#[test]
fn connections_of_programs_with_sessions_are_handed_off() {
    let Some(lab_lock) = lock_lab() else { return };
    let spec = ClusterSpec::new(format!("drain-sessions-{}", std::process::id()))
        .program(ExampleServer::Echo { port: PORT });
    let group = LoadedGroup::load(Cluster::up(spec).unwrap(), lab_lock);
    let control = group.cluster.blocking_control_client("n2").unwrap();
    let request = DrainRequest::default();
    let report = control
        .run(async |client| client.drain(&request).await)
        .unwrap();
    assert!(report.connections > 0, "n2 has no connections: {report:?}");
    eventually("the node is safe to reboot", || {
        let report = control.run(|client| client.drain_report()).unwrap();
        report.safe_to_reboot && report.state == DrainState::Ended && report.connections == 0
    });
    group.assert_unharmed();
    // The program at n2 has gone on, and serves again after the drain.
    control.run(|client| client.undrain()).unwrap();
    eventually("new clients go to n2", || {
        let contact = group.cluster.blocking_control_client("n1").unwrap();
        let status = contact.run(|client| client.status()).unwrap();
        let mut nodes = status.services.iter().flat_map(|service| &service.nodes);
        nodes.any(|node| node.node == "n2" && node.placed_weight > 0)
    });
    group.finish();
}
