//! Stock nginx on three nodes behind `holdfast proxy`, as an operator runs them. In labs; need root and nginx.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use holdfast_api::control::{
    FlowListQuery, FlowOutcome, FlowSelection, FlowState, HandoffRequest, HandoffState,
    HandoffStatus, NodeList, ServiceChange, ServiceSettings, ServiceUpdate,
};
use holdfast_api::{Drain, FlowText, Protocol};
use holdfast_testbed::cluster::{
    Cluster, ClusterService, ClusterSpec, IpFamily, SelfRunningGroupSpec, find_program,
};
use holdfast_testbed::connection_load::open_connections;
use holdfast_testbed::process_lab::find_system_program;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

const PORT: u16 = 80;
const CLIENT_HOST: &str = "c1";
/// Length of nginx's answer, in bytes.
const FILE_BYTES: usize = 64 * 1024;
/// Clients of each address family.
const CLIENTS: usize = 4;
/// Longest wait for any condition, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A group whose service `web` is served by nginx behind a proxy on each node.
struct ProxiedGroup {
    nodes: BTreeMap<String, ProxiedNode>,
    cluster: Cluster,
    _lab_lock: MutexGuard<'static, ()>,
}

struct ProxiedNode {
    nginx: Child,
    proxy: Child,
    events: PathBuf,
}

impl ProxiedGroup {
    /// Brings the group up; none without root.
    fn up(name: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: a lab needs root");
            return None;
        }
        let lab_lock = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let mut spec = ClusterSpec::new(format!("{name}-{}", std::process::id()));
        spec.self_running = Some(SelfRunningGroupSpec { backups: 2 });
        spec.services
            .push(ClusterService::new("web", Protocol::Tcp, PORT));
        let mut group = Self {
            nodes: BTreeMap::new(),
            cluster: Cluster::up(spec).unwrap(),
            _lab_lock: lab_lock,
        };
        for node in group.cluster.nodes() {
            group.start_node(&node);
        }
        Some(group)
    }

    /// Starts nginx and its proxy on a node, and waits until both serve.
    fn start_node(&mut self, node: &str) {
        let directory = self.cluster.directory().join(format!("{node}-web"));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("file"), file_content()).unwrap();
        let own = directory.display();
        let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {own}/{name};\n"))
            .concat();
        // Each client connects anew after 20 requests, so that connections of a node that leaves end soon.
        let config = format!(
            "daemon off;\nuser root;\nworker_processes 1;\npid {own}/nginx.pid;\nerror_log {own}/error.log;\n\
             events {{ worker_connections 1024; }}\nhttp {{\n{paths}access_log off;\nkeepalive_requests 20;\n\
             server {{ listen 127.0.0.1:8080 proxy_protocol; root {own};\nadd_header X-Node {node};\n\
             add_header X-Client-Address $proxy_protocol_addr;\nadd_header X-Client-Port $proxy_protocol_port; }}\n}}\n"
        );
        let config_path = directory.join("nginx.conf");
        fs::write(&config_path, config).unwrap();
        let nginx = find_system_program("nginx", "nginx").unwrap();
        let mut command = self.cluster.lab().command(node).unwrap();
        command
            .arg(nginx)
            .args(["-e", "stderr", "-c"])
            .arg(config_path);
        let nginx = command.stdin(Stdio::null()).spawn().unwrap();

        let events = directory.join("proxy.events");
        let mut command = self.cluster.lab().command(node).unwrap();
        command.arg(find_program("holdfast").unwrap());
        command.args([
            "proxy",
            "web",
            "--to",
            "127.0.0.1:8080",
            "--proxy-protocol",
            "--drain",
            "50",
            "--json",
        ]);
        let stdout = File::create(&events).unwrap();
        let proxy = command.stdin(Stdio::null()).stdout(stdout).spawn().unwrap();
        let node_parts = ProxiedNode {
            nginx,
            proxy,
            events,
        };
        eventually("the proxy listens at both addresses", || {
            node_parts.count_events("listening") == 2
        });
        self.nodes.insert(node.to_owned(), node_parts);
        eventually("nginx has its PID file", || {
            directory.join("nginx.pid").exists()
        });
    }

    /// Ends the proxy of a node as a service manager does, then nginx. Returns the proxy's numbers.
    fn stop_node(&mut self, node: &str) -> Value {
        let mut parts = self.nodes.remove(node).unwrap();
        signal(&parts.proxy, Signal::SIGTERM);
        let status = parts.proxy.wait().unwrap();
        let stopped = parts.events().pop().unwrap();
        assert!(status.success(), "{node}: {status}, {stopped}");
        assert_eq!(stopped["event"], "stopped");
        stopped
    }

    fn service_address(&self, family: IpFamily) -> SocketAddr {
        SocketAddr::new(self.cluster.service_address(family), PORT)
    }

    /// Sets the nodes' shares of new connections, and waits until handshakes that began before are complete.
    fn set_weights(&self, weights: &[(&str, u32)]) {
        let weights = weights
            .iter()
            .map(|(node, weight)| ((*node).to_owned(), Some(*weight)));
        let update = ServiceUpdate {
            name: "web".to_owned(),
            settings: ServiceSettings {
                weights: weights.collect(),
                ..ServiceSettings::default()
            },
            ..ServiceUpdate::default()
        };
        self.cluster
            .change_services("n2", ServiceChange::Set(update))
            .unwrap();
        thread::sleep(Duration::from_millis(200));
    }

    /// Lets a node leave the group, and ends its daemon.
    fn leave(&self, node: &str) {
        let control = self.cluster.blocking_control_client(node).unwrap();
        control
            .run(async |client| client.leave_group().await)
            .unwrap();
        self.cluster.set_daemon_restart(node, false);
        self.cluster.signal_daemon(node, Signal::SIGTERM).unwrap();
        eventually("the daemon ends", || {
            self.cluster.daemon_pid(node).unwrap().is_none()
        });
        // The others decide later about a node whose lease had ended, which leaves by itself.
        eventually("the group is without the node", || {
            let nodes = self.membership().nodes;
            nodes.iter().all(|member| member.name != node)
        });
    }

    /// Starts the daemon of a node that has left; returns when the node is in the group again.
    fn join(&self, node: &str) {
        self.cluster.set_daemon_restart(node, true);
        self.cluster.wait_ready().unwrap();
    }

    /// Returns the group as a node that never leaves knows it.
    fn membership(&self) -> NodeList {
        let control = self.cluster.blocking_control_client("n2").unwrap();
        control.run(async |client| client.nodes().await).unwrap()
    }

    fn connect(&self) -> TcpStream {
        let address = self.service_address(IpFamily::V4);
        let mut streams = open_connections(self.cluster.lab(), CLIENT_HOST, address, 1).unwrap();
        let stream = streams.remove(0);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Returns the owner of a flow, once the contact node knows the flow.
    fn owner(&self, flow: FlowText) -> String {
        let control = self.cluster.blocking_control_client("n1").unwrap();
        let mut owner = None;
        eventually("the contact node knows the flow", || {
            let query = FlowListQuery::default();
            let list = control
                .run(async |client| client.flows(&query).await)
                .unwrap();
            let entry = list.flows.into_iter().find(|entry| entry.flow == flow);
            owner = entry.and_then(|entry| match entry.state {
                FlowState::Owned { owner } => Some(owner),
                FlowState::Transit { .. } => None,
            });
            owner.is_some()
        });
        owner.unwrap()
    }

    /// Hands a flow off; returns the finished handoff.
    fn hand_off(&self, from: &str, flow: FlowText, to: &str) -> HandoffStatus {
        let request = HandoffRequest {
            selection: FlowSelection::Flows(vec![flow]),
            to: to.to_owned(),
            drain: Drain::None,
        };
        let control = self.cluster.blocking_control_client(from).unwrap();
        // The proxy serves a client before the daemon has processed its message about the connection.
        let mut accepted = None;
        eventually("the daemon knows the proxy's connection", || {
            accepted = control
                .run(async |client| client.hand_off(&request).await)
                .ok();
            accepted.is_some()
        });
        let accepted = accepted.unwrap();
        let mut status = None;
        eventually("the handoff has a result", || {
            let answer = control
                .run(async |client| client.handoff(accepted.id).await)
                .unwrap();
            let is_finished = answer.summary.state == HandoffState::Finished;
            status = Some(answer);
            is_finished
        });
        status.unwrap()
    }
}

impl ProxiedNode {
    /// Returns the events that the proxy has printed so far.
    fn events(&self) -> Vec<Value> {
        let text = fs::read_to_string(&self.events).unwrap();
        let complete = text
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'));
        complete
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    fn count_events(&self, name: &str) -> usize {
        let events = self.events();
        events.iter().filter(|event| event["event"] == name).count()
    }
}

impl Drop for ProxiedNode {
    fn drop(&mut self) {
        for child in [&mut self.proxy, &mut self.nginx] {
            // nginx ends its workers on SIGTERM. A child that has ended is not signalled, since it was waited for.
            if child.try_wait().is_ok_and(|status| status.is_none()) {
                signal(child, Signal::SIGTERM);
            }
        }
        let _ = self.nginx.wait();
        // A proxy that still drains has no client left to wait for.
        let _ = self.proxy.kill();
        let _ = self.proxy.wait();
    }
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
}

#[track_caller]
fn eventually(awaited: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(
            Instant::now() < deadline,
            "exceeded time: not within {PATIENCE:?}: {awaited}"
        );
        thread::sleep(Duration::from_millis(10));
    }
}

fn file_content() -> Vec<u8> {
    let word = |number: usize| ((number as u32).wrapping_mul(2_654_435_761)).to_be_bytes();
    (0..FILE_BYTES / 4).flat_map(word).collect()
}

/// One answer of nginx.
struct Answer {
    node: String,
    /// True if the server ends the connection after this answer.
    is_last: bool,
}

/// Requests the file; compares every byte, and the client's address that nginx knows.
fn request_file(stream: &mut TcpStream, expected: &[u8]) -> io::Result<Answer> {
    stream.write_all(b"GET /file HTTP/1.1\r\nHost: web\r\n\r\n")?;
    let mut head = Vec::new();
    let mut byte = [0; 1];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let field = |name: &str| {
        let line = head
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, format!("no {name} in {head}")))
    };
    let own = stream.local_addr()?;
    if field("X-Client-Address")? != own.ip().to_string()
        || field("X-Client-Port")? != own.port().to_string()
    {
        let text = format!("the client {own} is not in {head}");
        return Err(io::Error::new(ErrorKind::InvalidData, text));
    }
    let mut body = vec![0; expected.len()];
    stream.read_exact(&mut body)?;
    if body != expected {
        return Err(io::Error::new(ErrorKind::InvalidData, "wrong bytes"));
    }
    Ok(Answer {
        node: field("X-Node")?.to_owned(),
        is_last: field("Connection")? == "close",
    })
}

/// Clients that request the file over and over.
struct HttpLoad {
    shared: Arc<LoadState>,
    clients: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct LoadState {
    stop: AtomicBool,
    /// Number of answers by node.
    answers: Mutex<BTreeMap<String, u64>>,
    errors: Mutex<Vec<String>>,
}

impl HttpLoad {
    fn start(group: &ProxiedGroup) -> Self {
        let shared = Arc::new(LoadState::default());
        let addresses = [IpFamily::V4, IpFamily::V6].map(|family| group.service_address(family));
        let clients = addresses.into_iter().flat_map(|address| [address; CLIENTS]);
        let clients = clients.map(|address| {
            let shared = Arc::clone(&shared);
            // A thread gets its namespace before it runs on its own.
            let (ready, is_ready) = std::sync::mpsc::channel();
            let lab_name = group.cluster.lab().name().to_owned();
            let client = thread::spawn(move || {
                let lab = holdfast_lab::Lab::open(&lab_name).unwrap();
                lab.enter_net_namespace(CLIENT_HOST).unwrap();
                ready.send(()).unwrap();
                shared.run_client(address);
            });
            is_ready.recv().unwrap();
            client
        });
        let clients = clients.collect();
        Self { shared, clients }
    }

    fn answers(&self, node: &str) -> u64 {
        let answers = self.shared.answers.lock().unwrap();
        answers.get(node).copied().unwrap_or(0)
    }

    /// Waits until each of these nodes has answered 200 requests more than at the call.
    #[track_caller]
    fn wait_for_answers(&self, nodes: &[&str]) {
        let before: Vec<u64> = nodes.iter().map(|node| self.answers(node)).collect();
        eventually("every node answers", || {
            self.assert_no_error();
            let mut pairs = nodes.iter().zip(&before);
            pairs.all(|(node, before)| self.answers(node) >= before + 200)
        });
    }

    #[track_caller]
    fn assert_no_error(&self) {
        let errors = self.shared.errors.lock().unwrap();
        assert!(errors.is_empty(), "{errors:?}");
    }

    /// Ends the load between two requests of each client.
    #[track_caller]
    fn finish(self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.assert_no_error();
        for client in self.clients {
            client.join().unwrap();
        }
        let errors = self.shared.errors.lock().unwrap();
        assert!(errors.is_empty(), "{errors:?}");
    }
}

impl LoadState {
    fn run_client(&self, address: SocketAddr) {
        let expected = file_content();
        while !self.stop.load(Ordering::Relaxed) {
            if let Err(error) = self.run_connection(address, &expected) {
                self.errors
                    .lock()
                    .unwrap()
                    .push(format!("{address}: {error}"));
                return;
            }
        }
    }

    fn run_connection(&self, address: SocketAddr, expected: &[u8]) -> io::Result<()> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        while !self.stop.load(Ordering::Relaxed) {
            let answer = request_file(&mut stream, expected)?;
            *self.answers.lock().unwrap().entry(answer.node).or_default() += 1;
            if answer.is_last {
                break;
            }
        }
        Ok(())
    }
}

/// A running wrk, which requests the file as fast as it can.
struct RunningWrk {
    child: Child,
    output: PathBuf,
}

impl RunningWrk {
    /// Starts wrk at the client's host; none if wrk is not installed.
    fn start(group: &ProxiedGroup) -> Option<Self> {
        let Ok(program) = find_system_program("wrk", "wrk") else {
            eprintln!("without wrk: it is not installed");
            return None;
        };
        let output = group.cluster.directory().join("wrk.log");
        let file = File::create(&output).unwrap();
        let url = format!("http://{}/file", group.service_address(IpFamily::V4));
        let mut command = group.cluster.lab().command(CLIENT_HOST).unwrap();
        command
            .arg(program)
            .args(["-t", "1", "-c", "16", "-d", "1h", "--timeout", "60s"]);
        command.arg(url).stdin(Stdio::null());
        let child = command
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .spawn()
            .unwrap();
        Some(Self { child, output })
    }

    /// Ends wrk, and asserts that it met no error.
    #[track_caller]
    fn finish(mut self) {
        // wrk reports its results on SIGINT.
        signal(&self.child, Signal::SIGINT);
        self.child.wait().unwrap();
        let text = fs::read_to_string(&self.output).unwrap();
        assert!(text.contains(" requests in "), "{text}");
        for error in ["Socket errors", "Non-2xx"] {
            assert!(!text.contains(error), "{text}");
        }
    }
}

#[test]
fn nginx_behind_proxies_serves_while_nodes_leave_and_join() {
    let Some(mut group) = ProxiedGroup::up("t-proxy") else {
        return;
    };
    let load = HttpLoad::start(&group);
    let wrk = RunningWrk::start(&group);
    load.wait_for_answers(&["n1", "n2", "n3"]);

    // The second one is the contact node.
    for node in ["n3", "n1"] {
        group.set_weights(&[(node, 0)]);
        let totals = group.stop_node(node);
        assert!(totals["complete"].as_u64() > Some(0), "{totals}");
        group.leave(node);
        let others: Vec<&str> = ["n1", "n2", "n3"]
            .into_iter()
            .filter(|other| *other != node)
            .collect();
        load.wait_for_answers(&others);
        group.join(node);
        group.start_node(node);
        group.set_weights(&[(node, 1)]);
        load.wait_for_answers(&[node]);
    }

    load.finish();
    if let Some(wrk) = wrk {
        wrk.finish();
    }
    for node in ["n1", "n2", "n3"] {
        let totals = group.stop_node(node);
        // The clients that end in the middle of an answer reset their connections.
        for count in ["server_resets", "refused", "cut"] {
            assert_eq!(totals[count], 0, "{node}: {totals}");
        }
    }
}

#[test]
fn handoff_of_a_proxied_connection_is_declined_by_name() {
    let Some(group) = ProxiedGroup::up("t-proxy-handoff") else {
        return;
    };
    let mut client = group.connect();
    let expected = file_content();
    request_file(&mut client, &expected).unwrap();
    let service = group.service_address(IpFamily::V4);
    let flow = FlowText::new(Protocol::Tcp, service, client.local_addr().unwrap()).unwrap();
    let owner = group.owner(flow);
    let other = ["n1", "n2"]
        .into_iter()
        .find(|node| *node != owner)
        .unwrap();
    let status = group.hand_off(&owner, flow, other);
    match &status.results[..] {
        [result] => match &result.outcome {
            FlowOutcome::Kept { reason, .. } => assert!(reason.contains("proxy"), "{reason}"),
            outcome => panic!("{outcome:?}"),
        },
        results => panic!("{results:?}"),
    }
    request_file(&mut client, &expected).unwrap();
}

#[test]
fn clients_of_a_dead_server_are_reset() {
    let Some(mut group) = ProxiedGroup::up("t-proxy-dead") else {
        return;
    };
    group.set_weights(&[("n1", 0), ("n2", 1), ("n3", 0)]);
    let node = group.nodes.get_mut("n2").unwrap();
    signal(&node.nginx, Signal::SIGTERM);
    node.nginx.wait().unwrap();
    let address = group.service_address(IpFamily::V4);
    // The reset may arrive before connect(2) returns.
    let connect_and_read =
        || TcpStream::connect(address).and_then(|mut client| client.read(&mut [0; 1]));
    let result = group
        .cluster
        .lab()
        .run_in_net_namespace(CLIENT_HOST, connect_and_read);
    let error = result.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    assert_eq!(group.nodes["n2"].count_events("server_unavailable"), 1);
}
