//! Services of a group that runs itself change while clients use them. Needs root.

#[path = "../common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::Child;
use std::time::Duration;

use holdfast_api::Protocol;
use holdfast_api::control::{
    BlockingControlClient, FlowListQuery, FlowState, NewService, ServiceChange, ServiceList,
    ServiceSettings, ServiceSource, ServiceUpdate,
};
use holdfast_testbed::cluster::{Cluster, ClusterSpec, SelfRunSpec, find_program};

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
        spec.self_run = Some(SelfRunSpec { backups: 1 });
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
    assert!(group.services("n1").version > version);
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
