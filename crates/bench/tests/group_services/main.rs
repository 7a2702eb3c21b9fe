//! Services of a group that runs itself change while clients use them. Needs root.

#[path = "../common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::Child;
use std::time::Duration;

use holdfast_api::Protocol;
use holdfast_api::control::{
    BlockingControlClient, CheckSettings, FlowListQuery, FlowState, NewService, ServerHealth,
    ServiceChange, ServiceList, ServiceSettings, ServiceSource, ServiceUpdate,
};
use holdfast_testbed::cluster::{Cluster, ClusterSpec, SelfRunningGroupSpec, find_program};

use common::{PORT, eventually, lock_lab};

/// Longest wait for an answer to a client; below the first retransmission of a SYN.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(800);
/// Number of connections by which shares are compared.
const CONNECTIONS: usize = 48;

/// Three nodes, n1 and n2 as voters, with an echo server at each.
struct ServiceGroup {
    /// Killed before the lab ends.
    servers: Vec<Child>,
    cluster: Cluster,
}

impl ServiceGroup {
    fn up(name: &str) -> ServiceGroup {
        let mut spec = ClusterSpec::new(format!("{name}-{}", std::process::id()));
        spec.self_running = Some(SelfRunningGroupSpec { backups: 1 });
        let cluster = Cluster::up(spec).unwrap();
        let serve = |node: String| {
            let mut server = cluster.lab().command(&node).unwrap();
            server.arg(find_program("echo").unwrap());
            // A socket for both families, since the service has addresses of both.
            server.arg("--listen").arg(format!("[::]:{PORT}"));
            server.spawn().unwrap()
        };
        let servers = cluster.nodes().into_iter().map(serve).collect();
        ServiceGroup { servers, cluster }
    }

    fn client(&self, node: &str) -> BlockingControlClient {
        self.cluster.blocking_control_client(node).unwrap()
    }

    fn change(&self, node: &str, change: ServiceChange) -> anyhow::Result<u64> {
        self.cluster.change_services(node, change)
    }

    fn services(&self, node: &str) -> ServiceList {
        self.client(node).run(|client| client.services()).unwrap()
    }

    fn add_echo(&self, node: &str, addresses: &[IpAddr], settings: ServiceSettings) {
        let new = NewService {
            name: "echo".to_owned(),
            addresses: addresses.to_vec(),
            port: PORT,
            protocol: Protocol::Tcp,
            settings,
        };
        self.change(node, ServiceChange::Add(new)).unwrap();
        // Server nodes hear of it within about a second.
        eventually("all nodes have the service", || {
            let nodes = ["n1", "n2", "n3"];
            nodes.iter().all(|node| {
                let list = self.services(node);
                (list.services.iter()).any(|service| service.addresses == addresses)
            })
        });
    }

    fn connect(&self, address: IpAddr) -> std::io::Result<TcpStream> {
        let connected = self.cluster.lab().run_in_net_namespace("c1", || {
            TcpStream::connect_timeout(&SocketAddr::new(address, PORT), ANSWER_TIMEOUT)
        });
        let stream = connected.unwrap()?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        Ok(stream)
    }

    /// Opens connections. Returns them, and how many each node has.
    fn connect_many(&self, address: IpAddr) -> (Vec<TcpStream>, BTreeMap<String, usize>) {
        let mut streams: Vec<TcpStream> = Vec::new();
        for _ in 0..CONNECTIONS {
            let mut stream = self.connect(address).unwrap();
            echo(&mut stream);
            streams.push(stream);
        }
        let ports: Vec<u16> = streams
            .iter()
            .map(|stream| stream.local_addr().unwrap().port())
            .collect();
        let mut owners = BTreeMap::new();
        eventually("the contact node knows all connections", || {
            let query = FlowListQuery::default();
            let flows = self.client("n1").run(|client| client.all_flows(&query));
            let flows = flows.unwrap().flows;
            let ours = flows
                .iter()
                .filter(|entry| ports.contains(&entry.flow.remote().port()));
            owners.clear();
            for entry in ours {
                if let FlowState::Owned { owner } = &entry.state {
                    *owners.entry(owner.clone()).or_default() += 1;
                }
            }
            owners.values().sum::<usize>() == CONNECTIONS
        });
        (streams, owners)
    }
}

impl ServiceGroup {
    /// Installs a check script at each node that fails while the node has a file `ill` beside the script.
    fn install_check_script(&self, name: &str) {
        for node in self.cluster.nodes() {
            let directory = self.cluster.checks_dir(&node);
            fs::create_dir(&directory).unwrap();
            fs::set_permissions(&directory, Permissions::from_mode(0o755)).unwrap();
            let script = directory.join(name);
            let ill = directory.join("ill");
            fs::write(&script, format!("#!/bin/sh\ntest ! -e {}\n", ill.display())).unwrap();
            fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
        }
    }

    fn set_checks(&self, node: &str, checks: CheckSettings) {
        let update = ServiceUpdate {
            name: "echo".to_owned(),
            settings: ServiceSettings {
                checks,
                ..ServiceSettings::default()
            },
            ..ServiceUpdate::default()
        };
        self.change(node, ServiceChange::Set(update)).unwrap();
    }

    /// Waits until all nodes get new clients, as the contact node n1 says. Before it knows its own server, it counts on all nodes.
    fn wait_for_servers(&self) {
        eventually("all nodes get new clients", || {
            let status = self.client("n1").run(|client| client.status()).unwrap();
            let mut services = status.services.into_iter();
            services.all(|service| {
                let mut nodes = service.nodes.into_iter();
                service.server == ServerHealth::Serving && nodes.all(|node| node.placed_weight > 0)
            })
        });
    }

    /// Returns what keeps each node from getting new clients, at the contact node n1.
    fn problems_of_nodes(&self) -> BTreeMap<String, String> {
        let status = self.client("n1").run(|client| client.status()).unwrap();
        let nodes = status
            .services
            .into_iter()
            .flat_map(|service| service.nodes);
        nodes
            .filter_map(|node| Some((node.node, node.problem?)))
            .collect()
    }
}

impl Drop for ServiceGroup {
    fn drop(&mut self) {
        for server in &mut self.servers {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// Sends bytes and waits for their echo.
fn echo(stream: &mut TcpStream) {
    stream.write_all(b"are you there?").unwrap();
    let mut answer = [0; 14];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"are you there?");
}

fn weights(weights: [(&str, u32); 3]) -> ServiceSettings {
    ServiceSettings {
        weights: weights
            .map(|(node, weight)| (node.to_owned(), Some(weight)))
            .into(),
        ..ServiceSettings::default()
    }
}

#[test]
fn services_change_while_clients_use_them() {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let group = ServiceGroup::up("group-services");
    let (v4, v6) = group.cluster.lab().service_address();
    let (v4, v6) = (IpAddr::from(v4), IpAddr::from(v6));
    // Any node takes a change, also one that only serves.
    group.add_echo("n3", &[v4, v6], ServiceSettings::default());
    let list = group.services("n2");
    assert_eq!(list.source, ServiceSource::Group);
    group.wait_for_servers();
    let (mut before, owners) = group.connect_many(v4);
    assert_eq!(owners.len(), 3, "{owners:?}");
    let (mut of_v6, owners) = group.connect_many(v6);
    assert_eq!(owners.len(), 3, "{owners:?}");

    let update = ServiceUpdate {
        name: "echo".to_owned(),
        settings: weights([("n1", 0), ("n2", 1), ("n3", 0)]),
        ..ServiceUpdate::default()
    };
    group.change("n1", ServiceChange::Set(update)).unwrap();
    let (after, owners) = group.connect_many(v4);
    assert_eq!(owners.keys().collect::<Vec<_>>(), ["n2"], "{owners:?}");

    // One address ends: its clients stay, new ones come no more, and the other address is untouched.
    let update = ServiceUpdate {
        name: "echo".to_owned(),
        removed_addresses: vec![v4],
        ..ServiceUpdate::default()
    };
    group.change("n2", ServiceChange::Set(update)).unwrap();
    before.iter_mut().for_each(echo);
    group.connect(v4).unwrap_err();
    echo(&mut group.connect(v6).unwrap());

    group
        .change("n1", ServiceChange::Remove("echo".to_owned()))
        .unwrap();
    group.connect(v6).unwrap_err();
    before.iter_mut().chain(&mut of_v6).for_each(echo);
    let version = group.services("n1").version;
    drop((before, of_v6, after));
    eventually("the service has gone from all nodes", || {
        let is_empty = |node: &str| group.services(node).services.is_empty();
        ["n1", "n2", "n3"].into_iter().all(is_empty)
    });
    let metrics = group.client("n1").run(|client| client.metrics()).unwrap();
    assert!(!metrics.contains("holdfast_server_well{"), "{metrics}");
    assert!(
        metrics.contains("holdfast_peer_connected{peer=\"n2\"} 1"),
        "{metrics}"
    );
    assert!(group.services("n1").version > version);
}

#[test]
fn checks_begin_and_end_with_the_settings() {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let group = ServiceGroup::up("group-checks");
    let (v4, _) = group.cluster.lab().service_address();
    group.add_echo("n1", &[v4.into()], ServiceSettings::default());
    let ill = group.cluster.checks_dir("n2").join("ill");
    group.install_check_script("check-echo");
    fs::write(&ill, "").unwrap();
    group.wait_for_servers();
    let checks = CheckSettings {
        connect: Some(true),
        script: Some("check-echo".to_owned()),
        interval_ms: Some(100),
        ..CheckSettings::default()
    };
    group.set_checks("n3", checks);
    eventually("the script fails at n2 alone", || {
        let problems = group.problems_of_nodes();
        let mut problems = problems.iter();
        problems.next().is_some_and(|(node, problem)| {
            node == "n2" && problem.contains("ends with exit code 1")
        }) && problems.next().is_none()
    });
    let (_of_others, owners) = group.connect_many(v4.into());
    assert_eq!(
        owners.keys().collect::<Vec<_>>(),
        ["n1", "n3"],
        "{owners:?}"
    );
    let echo = &group.services("n2").services[0];
    let script = echo.checks.script.as_deref().unwrap_or_default();
    assert!(echo.checks.connect && script.ends_with("n2-checks/check-echo"));

    // A file that another user than root can write is not run.
    let script = group.cluster.checks_dir("n3").join("check-echo");
    fs::set_permissions(&script, Permissions::from_mode(0o777)).unwrap();
    eventually("the script of n3 is not run", || {
        let problems = group.problems_of_nodes();
        (problems.get("n3")).is_some_and(|problem| problem.contains("must belong to root"))
    });

    let none = CheckSettings {
        connect: Some(false),
        script: Some(String::new()),
        ..CheckSettings::default()
    };
    group.set_checks("n1", none);
    group.wait_for_servers();
}

#[test]
fn address_that_a_host_refuses_is_taken_when_the_host_allows_it() {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let group = ServiceGroup::up("group-addresses");
    let (_, v6) = group.cluster.lab().service_address();
    let set_disabled = |is_disabled: u8| {
        let mut shell = group.cluster.lab().command("n3").unwrap();
        let write = format!("echo {is_disabled} > /proc/sys/net/ipv6/conf/lo/disable_ipv6");
        let status = shell.arg("/bin/sh").arg("-c").arg(write).status();
        assert!(status.unwrap().success());
    };
    let refusals = || {
        let status = group.client("n3").run(|client| client.status()).unwrap();
        let mut problems = status.problems.into_iter();
        problems.any(|problem| problem.contains(&format!("refuses service address {v6}")))
    };
    set_disabled(1);
    group.add_echo("n1", &[v6.into()], ServiceSettings::default());
    eventually("n3 says that its host refuses", refusals);
    set_disabled(0);
    eventually("n3 has the address", || !refusals());
    let mut command = group.cluster.lab().command("n3").unwrap();
    command.args(["ip", "-6", "address", "show", "dev", "lo"]);
    let shown = String::from_utf8(command.output().unwrap().stdout).unwrap();
    assert!(shown.contains(&v6.to_string()), "{shown}");
}

#[test]
fn contact_node_that_left_neither_places_clients_nor_judges_services() {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let group = ServiceGroup::up("group-leaver");
    let (v4, _) = group.cluster.lab().service_address();
    group.add_echo("n1", &[v4.into()], ServiceSettings::default());
    let status = |node: &str| group.client(node).run(|client| client.status()).unwrap();
    group.wait_for_servers();
    let metrics = |node: &str| group.client(node).run(|client| client.metrics()).unwrap();
    assert!(metrics("n1").contains("holdfast_server_well{"));
    let n1 = group.client("n1");
    n1.run(|client| client.leave_group()).unwrap();
    eventually("n1 knows that it has left", || {
        let problems = status("n1").problems;
        problems
            .iter()
            .any(|problem| problem.contains("has left the group"))
    });
    let left = status("n1");
    assert_eq!(left.contact_node, "none");
    assert!(left.services.iter().all(|service| service.nodes.is_empty()));
    let mut problems = left.problems.iter();
    assert!(
        !problems.any(|problem| problem.contains("no node serves")),
        "{:?}",
        left.problems
    );
    assert!(!metrics("n1").contains("holdfast_server_well{"));
    eventually("the others serve", || {
        let stream = group.connect(v4.into());
        stream.is_ok_and(|mut stream| {
            echo(&mut stream);
            true
        })
    });
}

#[test]
fn refused_changes_say_why_at_the_node_that_was_asked() {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let group = ServiceGroup::up("group-refusals");
    let (v4, _) = group.cluster.lab().service_address();
    group.add_echo("n1", &[v4.into()], ServiceSettings::default());
    let refused = |change: ServiceChange, text: &str| {
        let error = group.change("n3", change).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains(text), "{error}");
    };
    let (n2, _) = group.cluster.lab().address("n2").unwrap();
    let other = |name: &str, address: IpAddr| {
        ServiceChange::Add(NewService {
            name: name.to_owned(),
            addresses: vec![address],
            port: PORT,
            protocol: Protocol::Tcp,
            settings: ServiceSettings::default(),
        })
    };
    refused(other("other", n2.into()), "a node's own address");
    refused(other("other", v4.into()), "service echo has tcp");
    refused(other("echo", v4.into()), "there is a service echo already");
    refused(other("No", v4.into()), "not a service's name");
    refused(
        ServiceChange::Remove("mail".to_owned()),
        "there is no service mail",
    );
    let update = ServiceUpdate {
        name: "echo".to_owned(),
        settings: weights([("n1", 0), ("n2", 0), ("n3", 0)]),
        ..ServiceUpdate::default()
    };
    refused(ServiceChange::Set(update), "no node would take new flows");
    assert_eq!(group.services("n3").services.len(), 1);
}
