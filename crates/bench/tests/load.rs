//! The load of nodes with a share of the processors, of their server programs, and reported loads. Needs root.

mod common;

use std::net::SocketAddr;
use std::process::Stdio;

use holdfast_api::control::{
    BlockingControlClient, ClientError, LoadReportRequest, LoadWithdrawRequest, NodeLoadStatus,
};
use holdfast_testbed::cluster::{Cluster, ClusterSpec, ExampleServer, IpFamily};
use holdfast_testbed::connection_load::open_connections;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use common::{PORT, eventually, lock_lab};

/// Processors of each node, in thousandths.
const SHARE_MILLIS: u32 = 400;
/// Number of connections.
const CONNECTIONS: usize = 12;

/// A daemon's answers about load.
struct LoadClient(BlockingControlClient);

impl LoadClient {
    fn status(&self) -> NodeLoadStatus {
        self.0.run(|client| client.load()).unwrap()
    }

    fn share(&self) -> f64 {
        self.status().load.map_or(0.0, |load| load.load)
    }

    fn report(&self, request: &LoadReportRequest) -> Result<(), ClientError> {
        self.0.run(|client| client.report_load(request)).map(drop)
    }

    fn withdraw(&self, name: &str, pid: Option<i32>) -> bool {
        let request = LoadWithdrawRequest {
            name: name.to_owned(),
            pid,
        };
        let answer = self.0.run(|client| client.withdraw_load(&request));
        answer.unwrap().was_valid
    }
}

fn players(value: f64, pid: Option<i32>) -> LoadReportRequest {
    LoadReportRequest {
        name: "players".to_owned(),
        value,
        full_at: Some(64.0),
        pid,
        for_s: None,
    }
}

#[test]
fn loads_are_measured_and_reported() {
    let Some(_lock) = lock_lab() else { return };
    let mut spec = ClusterSpec::new(format!("load-{}", std::process::id()))
        .program(ExampleServer::Echo { port: PORT });
    spec.nodes = 2;
    spec.processors = Some(f64::from(SHARE_MILLIS) / 1000.0);
    let cluster = Cluster::up(spec).unwrap();
    let service = SocketAddr::new(cluster.service_address(IpFamily::V4), PORT);
    let _connections = open_connections(cluster.lab(), "c1", service, CONNECTIONS).unwrap();
    let [first, second] =
        ["n1", "n2"].map(|node| LoadClient(cluster.blocking_control_client(node).unwrap()));
    let has_servers = |client: &LoadClient| {
        let status = client.status();
        let capacity = status.load.as_ref().map(|load| load.capacity_millis);
        let servers = status
            .processes
            .iter()
            .filter(|process| process.name == "echo");
        capacity == Some(SHARE_MILLIS) && servers.count() == 1
    };
    eventually("both nodes measure their servers", || {
        has_servers(&first) && has_servers(&second)
    });
    eventually("all clients are counted", || {
        let clients = [&first, &second].map(|client| {
            let processes = client.status().processes.into_iter();
            processes.filter_map(|process| process.clients).sum::<u64>()
        });
        clients.iter().sum::<u64>() == CONNECTIONS as u64
    });
    busy_node_is_loaded(&cluster, (&first, &second));
    reports_count_and_end(&cluster, &second);
}

/// A busy loop at the first node loads it, and not the other one.
fn busy_node_is_loaded(cluster: &Cluster, (first, second): (&LoadClient, &LoadClient)) {
    let mut command = cluster.lab().command("n1").unwrap();
    command.args(["sh", "-c", "while :; do :; done"]);
    let mut busy_loop = command.stdin(Stdio::null()).spawn().unwrap();
    eventually("a busy node is loaded", || first.share() >= 0.9);
    let status = first.status();
    let load = status.load.expect("a load");
    assert!(load.demand_millis >= load.cpu_millis, "{load:?}");
    assert!(second.share() < 0.9, "{:?}", second.status());
    busy_loop.kill().unwrap();
    busy_loop.wait().unwrap();
    eventually("the node is idle again", || first.share() < 0.7);
}

fn reports_count_and_end(cluster: &Cluster, node: &LoadClient) {
    eventually("the node is idle", || node.share() < 0.7);
    let echo = |status: &NodeLoadStatus| {
        let mut processes = status.processes.iter();
        processes
            .find(|process| process.name == "echo")
            .map(|process| process.pid)
    };
    let pid = echo(&node.status());
    node.report(&players(48.0, pid)).unwrap();
    assert!(node.share() >= 0.75, "{:?}", node.status());
    assert_eq!(node.status().reports.len(), 1);
    assert!(node.withdraw("players", pid));
    assert!(!node.withdraw("players", pid));
    assert!(node.share() < 0.75, "{:?}", node.status());
    let brief = LoadReportRequest {
        for_s: Some(1),
        ..players(64.0, None)
    };
    node.report(&brief).unwrap();
    eventually("a report ends", || node.status().reports.is_empty());
    // A report ends with its process.
    node.report(&players(1.0, pid)).unwrap();
    let outside = cluster
        .program_pid("n2", "echo")
        .unwrap()
        .expect("a server");
    kill(Pid::from_raw(outside), Signal::SIGKILL).unwrap();
    eventually("the report of a dead process ends", || {
        node.status().reports.is_empty()
    });
    for refused in [
        LoadReportRequest {
            name: "two words".to_owned(),
            ..brief.clone()
        },
        LoadReportRequest {
            value: -1.0,
            ..brief.clone()
        },
        LoadReportRequest {
            pid: Some(i32::MAX),
            ..brief.clone()
        },
        LoadReportRequest {
            for_s: Some(0),
            ..brief
        },
    ] {
        let answer = node.report(&refused);
        assert!(
            matches!(answer, Err(ClientError::Refused { status: 409, .. })),
            "{answer:?}"
        );
    }
}
