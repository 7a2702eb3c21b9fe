//! Replicated services of a real group: stock redis servers, one of which dies while a client uses it. Needs root. The commands stand
//! in docs/replication.md word for word, with another service address.

#[path = "../common/mod.rs"]
mod common;
mod request_stream;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use holdfast_api::control::{LegStanding, ReplicationEntry, ReplicationState};
use holdfast_testbed::cluster::{
    Cluster, ClusterSpec, IpFamily, SelfRunningGroupSpec, find_program,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use common::{PATIENCE, eventually, lock_lab};
use request_stream::RequestStream;

const PORT: u16 = 6379;
/// The service address in docs/replication.md.
const DOCUMENTED_ADDRESS: &str = "10.9.0.1";
/// The servers of docs/replication.md.
const SERVER: &str = "redis-server --bind 0.0.0.0 --protected-mode no --save ''";
const PAGE: &str = include_str!("../../../../docs/replication.md");

/// A group with n1 as contact node, and with redis servers at the other nodes.
struct RedisGroup {
    /// Ended before the lab ends.
    servers: Vec<Child>,
    cluster: Cluster,
    family: IpFamily,
}

impl RedisGroup {
    /// Brings up a group with servers at these nodes.
    fn up(name: &str, servers: &[&str]) -> RedisGroup {
        RedisGroup::up_with(name, servers, IpFamily::V4)
    }

    fn up_with(name: &str, servers: &[&str], family: IpFamily) -> RedisGroup {
        let mut spec = ClusterSpec::new(format!("{name}-{}", std::process::id()));
        spec.nodes = 1 + servers.len() as u16;
        spec.self_running = Some(SelfRunningGroupSpec { backups: 0 });
        spec.migration = true;
        spec.underlay = family;
        let mut group = RedisGroup {
            servers: Vec::new(),
            cluster: Cluster::up(spec).unwrap(),
            family,
        };
        for node in servers {
            group.start(node, SERVER);
        }
        eventually("the redis servers answer", || {
            servers
                .iter()
                .all(|node| group.redis(node, "PING") == "PONG")
        });
        group.documented(
            "n1",
            "holdfast service add redis --address 10.9.0.1 --port 6379",
        );
        group
    }

    fn start(&mut self, node: &str, line: &str) {
        assert!(PAGE.contains(line), "the page lacks `{line}`");
        let line = match self.family {
            IpFamily::V4 => line.to_owned(),
            IpFamily::V6 => line.replace("0.0.0.0", "::"),
        };
        let mut command = self.cluster.lab().command(node).unwrap();
        let folder = self.cluster.directory().display();
        command.args(["sh", "-c", &format!("exec {line} --dir {folder}")]);
        let child = command.stdout(Stdio::null()).spawn().unwrap();
        self.servers.push(child);
    }

    /// Runs a command line in a host; returns its exit status and its output.
    fn shell(&self, host: &str, line: &str) -> (bool, String) {
        let programs = find_program("holdfast").unwrap();
        let programs = programs.parent().unwrap().display();
        let mut command = self.cluster.lab().command(host).unwrap();
        command.args(["sh", "-c", &format!("PATH={programs}:$PATH; {line}")]);
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8_lossy(&text).into_owned(),
        )
    }

    /// Runs a command of the page, and returns its output.
    #[track_caller]
    fn documented(&self, host: &str, line: &str) -> String {
        assert!(PAGE.contains(line), "the page lacks `{line}`");
        self.run(host, line)
    }

    /// Runs a command for the group's service address instead of the documented one, and returns its output.
    #[track_caller]
    fn run(&self, host: &str, line: &str) -> String {
        let address = self.service().ip().to_string();
        let (success, text) = self.shell(host, &line.replace(DOCUMENTED_ADDRESS, &address));
        assert!(success, "{line}: {text}");
        println!("{host}# {line}\n{text}");
        text
    }

    /// Runs a command that is refused, and returns the message.
    #[track_caller]
    fn refused(&self, host: &str, line: &str) -> String {
        let (success, text) = self.shell(host, line);
        assert!(!success, "{line}: {text}");
        println!("{host}# {line}\n{text}");
        text
    }

    /// Asks the redis server of a node.
    fn redis(&self, node: &str, command: &str) -> String {
        let host = match self.family {
            IpFamily::V4 => "127.0.0.1",
            IpFamily::V6 => "::1",
        };
        let (_, text) = self.shell(node, &format!("redis-cli -h {host} {command}"));
        text.trim().to_owned()
    }

    fn service(&self) -> SocketAddr {
        SocketAddr::new(self.cluster.service_address(self.family), PORT)
    }

    fn connect(&self) -> Client {
        let service = self.service();
        let connected = self
            .cluster
            .lab()
            .run_in_net_namespace("c1", || TcpStream::connect_timeout(&service, PATIENCE));
        let stream = connected.unwrap().unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client {
            reader: BufReader::new(stream),
            count: 0,
            longest: Duration::ZERO,
        }
    }

    fn entry(&self) -> ReplicationEntry {
        let client = self.cluster.blocking_control_client("n1").unwrap();
        let list = client.run(|client| client.replications()).unwrap();
        list.services
            .into_iter()
            .next()
            .expect("a replicated service")
    }

    /// Returns the nodes with a leg, the primary first.
    fn legs(&self) -> Vec<String> {
        let mut legs = self.entry().legs;
        legs.sort_by_key(|leg| !leg.primary);
        legs.into_iter().map(|leg| leg.node).collect()
    }

    fn signal_server(&self, node: &str, signal: Signal) {
        let pid = self.cluster.program_pid(node, "redis-server").unwrap();
        kill(Pid::from_raw(pid.expect("a server")), signal).unwrap();
    }
}

impl Drop for RedisGroup {
    fn drop(&mut self) {
        for server in &mut self.servers {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// A client with one connection, which counts up and knows what the server must answer.
struct Client {
    reader: BufReader<TcpStream>,
    count: u64,
    /// Longest time of a request.
    longest: Duration,
}

impl Client {
    fn write(&mut self, request: &str) {
        self.reader.get_mut().write_all(request.as_bytes()).unwrap();
    }

    fn read(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("an answer");
        line.trim_end().to_owned()
    }

    /// Counts up by one, and sets a key of that number. `between` runs while the answers are on their way.
    fn step(&mut self, between: impl FnOnce()) {
        self.count += 1;
        let started = Instant::now();
        self.write(&format!(
            "INCR counter\r\nSET key{0} value{0}\r\n",
            self.count
        ));
        between();
        assert_eq!(self.read(), format!(":{}", self.count));
        assert_eq!(self.read(), "+OK");
        self.longest = self.longest.max(started.elapsed());
    }

    fn steps(&mut self, count: u64) {
        for _ in 0..count {
            self.step(|| ());
        }
    }
}

#[test]
fn clients_go_on_when_the_primary_is_killed() {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let group = RedisGroup::up("replication", &["n2", "n3"]);
    let text = group.documented("n1", "holdfast replicate redis --replicas 1 --on n2,n3");
    for line in [
        "  n2    primary  sound     0",
        "  n3    replica  sound     0",
    ] {
        assert!(text.contains(line) && PAGE.contains(line), "{text}");
    }
    let (mut busy, mut idle) = (group.connect(), group.connect());
    idle.write("PING\r\n");
    assert_eq!(idle.read(), "+PONG");
    busy.steps(1000);
    assert_eq!(group.redis("n3", "GET counter"), "1000");
    let before = busy.longest;

    busy.step(|| group.signal_server("n2", Signal::SIGKILL));
    let stall = busy.longest;
    busy.steps(1000);
    idle.write("GET counter\r\n");
    assert_eq!(
        (idle.read(), idle.read()),
        ("$4".to_owned(), "2001".to_owned())
    );
    println!("longest request before {before:?}, at the kill {stall:?}");

    let status = group.documented("n1", "holdfast replicate status");
    let line = "  n3    primary  sound     0";
    assert!(status.contains(line) && PAGE.contains(line), "{status}");
    let entry = group.entry();
    assert_eq!(
        (entry.state, entry.connections),
        (ReplicationState::Alone, 2)
    );
    assert_eq!((entry.promotions, entry.divergence_count), (1, 0));
    let legs: Vec<_> = entry.legs.iter().map(|leg| leg.node.as_str()).collect();
    assert_eq!(legs, ["n3"]);
    // Everything that was acknowledged is in the server that goes on.
    assert_eq!(group.redis("n3", "GET counter"), "2001");
    assert_eq!(group.redis("n3", "DBSIZE"), "2002");
    assert_eq!(group.redis("n3", "GET key2001"), "value2001");
    let metrics = group.cluster.blocking_control_client("n1").unwrap();
    let metrics = metrics.run(|client| client.metrics()).unwrap();
    for line in [
        "holdfast_replication_promotions_total{service=\"redis\"} 1",
        "holdfast_replication_legs{service=\"redis\",standing=\"sound\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }

    // New clients get the same server.
    let mut late = group.connect();
    late.write("GET counter\r\n");
    assert_eq!(
        (late.read(), late.read()),
        ("$4".to_owned(), "2001".to_owned())
    );

    group.documented("n1", "holdfast replicate stop redis");
    busy.steps(10);
    drop((busy, idle, late));
    eventually("the replication ends with the last connection", || {
        let (_, text) = group.shell("n1", "holdfast replicate status");
        text == "no service is replicated\n"
    });
    let mut steered = group.connect();
    steered.write("GET counter\r\n");
    assert_eq!(
        (steered.read(), steered.read()),
        ("$4".to_owned(), "2011".to_owned())
    );
}

#[test]
fn stream_goes_on_when_two_primaries_are_lost() {
    lose_two_primaries("two-losses", IpFamily::V4);
}

#[test]
fn stream_over_ipv6_goes_on_when_two_primaries_are_lost() {
    lose_two_primaries("two-losses-v6", IpFamily::V6);
}

/// The primary's process is killed, then the host of the next primary is lost, while a client sends requests all the time.
fn lose_two_primaries(name: &str, family: IpFamily) {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let group = RedisGroup::up_with(name, &["n2", "n3", "n4"], family);
    group.run("n1", "holdfast replicate redis --replicas 2 --on n2,n3,n4");
    let mut stream = RequestStream::start(group.connect().reader);

    // A quiet time, with load: nothing is dropped or promoted.
    stream.run_for(Duration::from_secs(5));
    let entry = group.entry();
    assert_eq!(group.legs(), ["n2", "n3", "n4"], "{entry:?}");
    assert_eq!(
        (entry.promotions, entry.divergence_count, entry.connections),
        (0, 0, 1),
        "{entry:?}"
    );
    let quiet = stream.take_longest();

    group.signal_server("n2", Signal::SIGKILL);
    stream.run_for(Duration::from_secs(1));
    let killed = stream.take_longest();
    let entry = group.entry();
    assert_eq!(entry.promotions, 1, "{entry:?}");
    // The replica that lacked the fewest bytes has become the primary.
    let legs = group.legs();
    let [second, last] = &legs[..] else {
        panic!("{entry:?}");
    };
    assert!(!legs.contains(&"n2".to_owned()), "{entry:?}");

    group.cluster.lab().cut(second).unwrap();
    stream.run_for(Duration::from_secs(1));
    let cut = stream.take_longest();
    let entry = group.entry();
    assert_eq!(
        (entry.promotions, entry.divergence_count),
        (2, 0),
        "{entry:?}"
    );
    assert_eq!(group.legs(), std::slice::from_ref(last), "{entry:?}");

    let count = stream.finish();
    println!(
        "{count} requests; longest round: quiet {quiet:?}, process killed {killed:?}, host lost {cut:?}"
    );
    // Everything that was acknowledged is in the server that goes on.
    assert_eq!(group.redis(last, "GET counter"), count.to_string());
    assert_eq!(group.redis(last, "DBSIZE"), (count + 1).to_string());
}

/// The servers begin with different states: one leg's answer to a request differs.
#[test]
fn differing_leg_is_reported_and_not_promoted() {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let group = RedisGroup::up("divergence", &["n2", "n3", "n4"]);
    for (node, value) in [("n2", "right"), ("n3", "wrong"), ("n4", "right")] {
        assert_eq!(group.redis(node, &format!("SET state {value}")), "OK");
    }
    group.run("n1", "holdfast replicate redis --replicas 2 --on n2,n3,n4");
    let mut client = group.connect();
    client.steps(20);
    assert_eq!(group.entry().divergence_count, 0);
    // The 20 answers before: `:N` and `+OK`, with their ends of line.
    let before: u64 = (1..=20)
        .map(|n: u64| n.to_string().len() as u64 + 3 + 5)
        .sum();
    client.write("GET state\r\n");
    assert_eq!(
        (client.read(), client.read()),
        ("$5".into(), "right".into())
    );
    eventually("the difference is reported", || {
        group.entry().divergence_count > 0
    });
    let entry = group.entry();
    let found = &entry.divergences[0];
    let local = client.reader.get_ref().local_addr().unwrap();
    assert_eq!((found.node.as_str(), found.client), ("n3", local));
    // `$5`, and the value.
    assert!(
        (before + 1..=before + 11).contains(&found.position),
        "{found:?}"
    );
    let status = group.documented("n1", "holdfast replicate status");
    let line = format!(
        "the output of n3 for {local} differs within the bytes up to {}",
        found.position
    );
    assert!(status.contains(&line), "{status}");

    client.step(|| group.signal_server("n2", Signal::SIGKILL));
    client.steps(100);
    client.write("GET state\r\n");
    assert_eq!(
        (client.read(), client.read()),
        ("$5".into(), "right".into())
    );
    assert_eq!(group.legs(), ["n4", "n3"]);
}

#[test]
fn operator_and_stopped_processes_change_the_primary() {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let group = RedisGroup::up("promotion", &["n2", "n3"]);
    group.documented("n1", "holdfast replicate redis --replicas 1 --on n2,n3");
    let mut client = group.connect();
    client.steps(200);
    group.documented("n1", "holdfast replicate promote redis n3");
    client.steps(200);
    let entry = group.entry();
    let legs: Vec<_> = entry
        .legs
        .iter()
        .map(|leg| (leg.node.as_str(), leg.primary))
        .collect();
    assert_eq!(legs, [("n3", true), ("n2", false)]);
    eventually("both legs are sound and level", || {
        let legs = group.entry().legs;
        legs.iter()
            .all(|leg| leg.standing == Some(LegStanding::Sound) && leg.lag_bytes == 0)
    });

    // The contact node's daemon dies and comes back: the connection goes on meanwhile, and its failover still works afterwards.
    let starts = group.cluster.daemon_starts("n1");
    group.cluster.kill_daemon("n1").unwrap();
    client.steps(200);
    eventually("the daemon is back", || {
        group.cluster.daemon_starts("n1") > starts
    });
    group.cluster.wait_ready().unwrap();
    eventually("the daemon knows its legs and connections again", || {
        let control = group.cluster.blocking_control_client("n1").unwrap();
        let list = control
            .run(|client| client.replications())
            .unwrap_or_default();
        list.services
            .iter()
            .any(|entry| entry.connections == 1 && entry.legs.len() == 2)
    });
    client.steps(200);
    eventually("the output is compared again", || {
        let legs = group.entry().legs;
        legs.iter()
            .all(|leg| leg.standing == Some(LegStanding::Sound))
    });

    // A stopped process keeps its connections and acknowledges, but answers nothing.
    client.step(|| group.signal_server("n3", Signal::SIGSTOP));
    println!("longest request: {:?}", client.longest);
    client.steps(200);
    let entry = group.entry();
    let legs: Vec<_> = entry.legs.iter().map(|leg| leg.node.as_str()).collect();
    assert_eq!(legs, ["n2"], "{entry:?}");
    assert_eq!(group.redis("n2", "GET counter"), client.count.to_string());
    group.signal_server("n3", Signal::SIGKILL);
}

#[test]
fn refusals_name_their_reasons() {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let group = RedisGroup::up("refusals", &["n2", "n3"]);
    let refused = |host: &str, line: &str, reason: &str| {
        let text = group.refused(host, line);
        assert!(text.contains(reason), "{line}: {text}");
    };
    refused("n1", "holdfast replicate web", "there is no service web");
    refused(
        "n1",
        "holdfast replicate redis --on n2,n9",
        "there is no node n9",
    );
    refused(
        "n1",
        "holdfast replicate redis --on n2,n1",
        "n1 is the contact node",
    );
    refused(
        "n1",
        "holdfast replicate redis --on n2",
        "1 replicas need 2 different nodes",
    );
    refused(
        "n1",
        "holdfast replicate redis --replicas 4",
        "4 is not in 1..=3",
    );
    refused(
        "n1",
        "holdfast replicate redis --replicas 2",
        "2 replicas need 3 nodes",
    );
    refused(
        "n2",
        "holdfast replicate redis --on n2,n3",
        "give the command on n1",
    );
    refused(
        "n1",
        "holdfast replicate stop redis",
        "there is no replicated service redis",
    );
    let mut early = group.connect();
    early.write("PING\r\n");
    assert_eq!(early.read(), "+PONG");
    eventually("the connection is refused", || {
        let (success, text) = group.shell("n1", "holdfast replicate redis --on n2,n3");
        !success && text.contains("has 1 connections, which would not be replicated")
    });
    drop(early);
    let mut text = String::new();
    eventually("the connection has ended", || {
        let (success, answer) = group.shell("n1", "holdfast replicate redis --on n2,n3");
        text = answer;
        success
    });
    refused(
        "n1",
        "holdfast replicate redis --on n2,n3",
        "is replicated already",
    );
    refused(
        "n1",
        "holdfast replicate promote redis n2",
        "is the primary already",
    );
    refused(
        "n1",
        "holdfast service remove redis",
        "is replicated (end that",
    );
    let client = group.connect();
    let local = client.reader.get_ref().local_addr().unwrap();
    let flow = format!("tcp:{}-{local}", group.service());
    refused(
        "n1",
        &format!("holdfast handoff {flow} --to n2"),
        "is a replicated connection of redis",
    );
    group.signal_server("n3", Signal::SIGKILL);
    eventually("the replica is dropped", || {
        group.entry().state == ReplicationState::Alone
    });
}
