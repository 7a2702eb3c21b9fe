//! The contact node's host is lost while a server with clients moves: the server and all its connections end at exactly one
//! node, and the clients go on. The test gives the views to the daemons instead of the group.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{FlowListQuery, FlowState, MigrationOutcome};
use holdfast_api::{FlowText, Protocol};
use holdfast_testbed::cluster::{Cluster, IpFamily};
use holdfast_testbed::connection_load::ConnectionLoad;
use holdfast_testbed::network_counters::read_host;

use crate::client_traffic::{
    CLIENTS, assert_all_go_on, connect_clients, read_pid, server_group_spec, start_server,
};
use crate::common::PORT;
use crate::common::test_views::{LONG_LEASE, View};
use crate::faults::{no_move_records_left, sample};
use crate::world::MigrationGroup;

/// The contact node whose host is lost.
const CONTACT: &str = "n1";
/// A node that takes no part in the moves.
const BYSTANDER: &str = "n4";

/// Time in milliseconds for which a daemon waits at a step: long enough for a new view, and shorter than the donor waits
/// for the holder's answer to its divert (500 ms).
const PAUSE_MS: u32 = 300;

/// A party to a move.
#[derive(Clone, Copy, Debug)]
enum Party {
    Donor,
    Acceptor,
}

use Party::{Acceptor, Donor};

/// The steps of a move, each at a moment when the move is under way, in its order.
const STEPS: [(Party, &str); 15] = [
    (Donor, "move-check after"),
    (Acceptor, "move-build before"),
    (Acceptor, "move-build after"),
    (Donor, "move-round after"),
    (Acceptor, "move-arm after"),
    (Donor, "move-note after"),
    (Donor, "move-freeze before"),
    (Donor, "move-freeze after"),
    (Acceptor, "move-restore before"),
    (Acceptor, "move-restore after"),
    (Acceptor, "move-go before"),
    (Acceptor, "move-go after"),
    (Donor, "move-release before"),
    (Donor, "move-release after"),
    (Acceptor, "move-forget before"),
];

/// The steps before the holder diverts the process, and before the holder commits the process.
const DECISIONS: [(Party, &str); 2] =
    [(Donor, "move-note after"), (Acceptor, "move-restore after")];

/// A server that moves between two nodes, and its clients.
struct MovingServer {
    world: MigrationGroup,
    folder: tempfile::TempDir,
    connections: ConnectionLoad,
    epoch: u64,
    current_node: &'static str,
    other_node: &'static str,
    /// Resets of the clients' connections before the first move.
    resets: u64,
}

/// Loses the contact node's host at a sample of a move's steps. The next contact node is donor, acceptor or neither in turn.
pub fn lose_contact_at_each_step(name: &str) -> Result<()> {
    let mut server = MovingServer::start(name)?;
    for (turn, step) in sample(&STEPS).into_iter().enumerate() {
        let next = [BYSTANDER, server.other_node, server.current_node][turn % 3];
        server
            .move_and_lose_contact(step, None, next)
            .and_then(|()| server.return_contact(next))
            .with_context(|| format!("{step:?}, then {next} is contact node"))
            .map_err(|error| server.world.cluster.with_logs(error))?;
    }
    server.connections.stop()
}

/// Loses the contact node's host just before and just after its decisions about a move.
pub fn lose_contact_at_its_decisions(name: &str) -> Result<()> {
    let mut server = MovingServer::start(name)?;
    for step in DECISIONS {
        for decision in ["arbitrate before die", "arbitrate after die"] {
            for next in sample(&[BYSTANDER, "n2", "n3"]) {
                server
                    .move_and_lose_contact(step, Some(decision), next)
                    .and_then(|()| server.return_contact(next))
                    .with_context(|| format!("{step:?}, {decision}, then {next} is contact node"))
                    .map_err(|error| server.world.cluster.with_logs(error))?;
            }
        }
    }
    server.connections.stop()
}

impl MovingServer {
    /// Brings up the group, with the server at n2.
    fn start(name: &str) -> Result<MovingServer> {
        let mut spec = server_group_spec(name);
        spec.nodes = 4;
        spec.daemon_environment
            .insert("HOLDFAST_TEST_VIEWS".into(), "1".into());
        for service in &mut spec.services {
            service.weights.insert(BYSTANDER.to_owned(), 0);
        }
        let cluster = Cluster::up(spec)?;
        let epoch = 2;
        give_view(&cluster, epoch, CONTACT, &[]);
        let (world, folder) = start_server(cluster, "echo", IpFamily::V4, ("", "</dev/null"))?;
        let connections = connect_clients(&world, CLIENTS)?;
        assert_all_go_on(&world, &connections)?;
        Ok(MovingServer {
            resets: count_resets(&world)?,
            world,
            folder,
            connections,
            epoch,
            current_node: "n2",
            other_node: "n3",
        })
    }

    /// Returns the server's PID at its node: its original PID, or the PID of the resident.
    fn pid(&self) -> Result<i32> {
        match &self.world.residents(self.current_node)?[..] {
            [] => read_pid(&self.folder),
            [resident] => Ok(resident.pid),
            more => anyhow::bail!("{more:?}"),
        }
    }

    /// Moves the server, and loses the contact node's host while a party waits at a step. With a `decision`, the contact
    /// node's daemon dies there before.
    fn move_and_lose_contact(
        &mut self,
        (party, command): (Party, &str),
        decision: Option<&str>,
        next: &str,
    ) -> Result<()> {
        let node = match party {
            Donor => self.current_node,
            Acceptor => self.other_node,
        };
        let cluster = &self.world.cluster;
        let file = cluster.run_path(node, "fault")?;
        std::fs::write(&file, format!("{command} pause {PAUSE_MS}"))?;
        let pid = self.pid()?;
        let id = self.world.begin(pid, self.current_node, self.other_node)?;
        self.world
            .wait("the move did not reach the fault point", || {
                Ok(!file.exists())
            })?;
        if let Some(decision) = decision {
            cluster.set_daemon_restart(CONTACT, false);
            let file = cluster.run_path(CONTACT, "fault")?;
            std::fs::write(&file, decision)?;
            self.world
                .wait("the contact node did not reach its decision", || {
                    Ok(!file.exists())
                })?;
        }
        cluster.lab().cut(CONTACT)?;
        self.epoch += 1;
        give_view(cluster, self.epoch, next, &[CONTACT]);
        let status = self.world.wait_for_migration(self.current_node, id)?;
        let is_moved = status.outcome == MigrationOutcome::Moved;
        eprintln!("{command}, then {next}: {:?}", status.outcome);
        if is_moved {
            (self.current_node, self.other_node) = (self.other_node, self.current_node);
        }
        assert_all_go_on(&self.world, &self.connections)?;
        self.assert_at_one_node(next)
    }

    /// Makes the former contact node contact node again, after its host is back.
    fn return_contact(&mut self, successor: &str) -> Result<()> {
        let cluster = &self.world.cluster;
        cluster.set_daemon_restart(CONTACT, true);
        self.world
            .wait("the former contact node's daemon does not start", || {
                let control = cluster.blocking_control_client(CONTACT)?;
                Ok(control.run(async |client| client.status().await).is_ok())
            })?;
        self.epoch += 1;
        give_view(cluster, self.epoch, successor, &[]);
        cluster.lab().heal(CONTACT)?;
        cluster.wait_ready()?;
        self.epoch += 1;
        give_view(cluster, self.epoch, CONTACT, &[]);
        self.world
            .wait("records of the move are left in a run directory", || {
                no_move_records_left(&self.world)
            })?;
        assert_all_go_on(&self.world, &self.connections)?;
        self.assert_at_one_node(CONTACT)?;
        self.world.wait_until_no_transit()
    }

    /// Asserts that the server and each of its connections are at the current node alone, that the contact node knows, and
    /// that no client saw a reset.
    fn assert_at_one_node(&self, contact: &str) -> Result<()> {
        let clients: BTreeSet<SocketAddr> = self.clients().collect();
        for node in self.world.cluster.nodes() {
            let is_home = node == self.current_node;
            let mut last = (0, BTreeSet::new());
            self.world
                .wait("the server or connections are at the wrong node", || {
                    let processes = self.world.count_processes(&node, "echo")?;
                    last = (processes, self.established_clients(&node)?);
                    Ok(match is_home {
                        true => last == (1, clients.clone()),
                        false => last == (0, BTreeSet::new()),
                    })
                })
                .with_context(|| format!("{node} has {last:?}, home is {}", self.current_node))?;
        }
        self.world
            .wait("the contact node does not know the owner", || {
                self.are_recorded_at_home(contact)
            })
            .with_context(|| format!("{contact}, home is {}", self.current_node))?;
        let resets = count_resets(&self.world)? - self.resets;
        ensure!(resets == 0, "{resets} connections were reset");
        Ok(())
    }

    fn clients(&self) -> impl Iterator<Item = SocketAddr> {
        self.connections
            .connections()
            .iter()
            .map(|member| member.client)
    }

    /// Returns the clients with an established connection to the server's port at a node.
    fn established_clients(&self, node: &str) -> Result<BTreeSet<SocketAddr>> {
        let mut command = self.world.cluster.lab().command(node)?;
        command.args(["ss", "-Htn", "state", "established", "sport", "="]);
        let output = command
            .arg(format!(":{PORT}"))
            .stdin(Stdio::null())
            .output()?;
        ensure!(output.status.success(), "ss: {output:?}");
        let text = String::from_utf8(output.stdout)?;
        let client = |line: &str| -> Result<SocketAddr> {
            let address = line.split_whitespace().nth(3).context("no client")?;
            Ok(address.parse()?)
        };
        text.lines().map(client).collect()
    }

    /// Returns true if the contact node has the current node as owner of all connections.
    fn are_recorded_at_home(&self, contact: &str) -> Result<bool> {
        let cluster = &self.world.cluster;
        let service = SocketAddr::new(cluster.service_address(IpFamily::V4), PORT);
        let control = cluster.blocking_control_client(contact)?;
        let query = FlowListQuery {
            protocol: Some(Protocol::Tcp),
            ..FlowListQuery::default()
        };
        let list = control.run(async |client| client.flows(&query).await)?;
        let is_recorded = |client: SocketAddr| {
            let flow = FlowText::new(Protocol::Tcp, service, client).ok();
            let mut entries = list.flows.iter();
            let entry = entries.find(|entry| Some(entry.flow) == flow);
            entry.is_some_and(|entry| {
                matches!(&entry.state, FlowState::Owned { owner } if owner == self.current_node)
            })
        };
        Ok(self.clients().all(is_recorded))
    }
}

fn give_view(cluster: &Cluster, epoch: u64, contact: &str, without: &[&str]) {
    let view = View {
        epoch,
        contact,
        without,
    };
    view.give(cluster, LONG_LEASE);
}

/// Returns the number of the clients' connections that were reset (`EstabResets` of RFC 4022).
fn count_resets(world: &MigrationGroup) -> Result<u64> {
    let values = read_host(world.cluster.lab(), "c1")?;
    values
        .get("Tcp.EstabResets")
        .copied()
        .context("no such counter")
}
