//! Faults at single steps of a move of a server with clients: the clients go on, wherever the server is, and nothing of
//! the move is left.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::SocketStrategy;
use holdfast_testbed::cluster::IpFamily;
use holdfast_testbed::connection_load::ConnectionLoad;

use crate::client_traffic::{CLIENTS, assert_all_go_on, connect_clients, read_pid, start_group};
use crate::faults::{CUT, HOLDER, PAUSE_MS, no_move_records_left, runs_in_full, sample};
use crate::numbered_datagrams::DatagramLoad;
use crate::world::MigrationGroup;

/// Node to which the weights send new clients.
const HOME_NODE: &str = "n2";

/// Number of connections that take some milliseconds to read or restore.
const MANY_CONNECTIONS: usize = 150;
/// Number of daemons killed when long tests run in full.
const KILLS_IN_FULL_RUN: u64 = 8;
/// Time in milliseconds for which a freeze waits before it begins.
const FREEZE_DELAY_MS: u32 = 40;

/// A node with a part in the move, or the link between donor and acceptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Donor,
    Acceptor,
    Holder,
    Both,
    Link,
}

/// A role, a step of its daemon, and the part that fails at this step.
type Case = (Role, &'static str, Role);

/// Cases in which daemons die.
pub const KILLS: [Case; 14] = [
    (Role::Donor, "move-round after", Role::Donor),
    (Role::Acceptor, "move-build after", Role::Acceptor),
    (Role::Donor, "move-freeze before", Role::Donor),
    (Role::Donor, "move-freeze before", Role::Acceptor),
    // Twice, so that both socket transfer modes are covered.
    (Role::Donor, "move-freeze after", Role::Donor),
    (Role::Donor, "move-freeze after", Role::Donor),
    (Role::Acceptor, "move-restore before", Role::Donor),
    (Role::Acceptor, "move-restore before", Role::Acceptor),
    (Role::Acceptor, "move-restore after", Role::Acceptor),
    (Role::Acceptor, "move-restore after", Role::Both),
    (Role::Holder, "arbitrate after", Role::Holder),
    (Role::Acceptor, "move-go before", Role::Acceptor),
    (Role::Acceptor, "move-go after", Role::Acceptor),
    (Role::Donor, "move-release before", Role::Donor),
];

/// Cases in which donor and acceptor do not reach each other.
pub const CUTS: [Case; 6] = [
    (Role::Acceptor, "move-build after", Role::Link),
    (Role::Donor, "move-freeze before", Role::Link),
    (Role::Donor, "move-freeze after", Role::Link),
    (Role::Acceptor, "move-restore before", Role::Link),
    (Role::Acceptor, "move-restore after", Role::Link),
    (Role::Acceptor, "move-go before", Role::Link),
];

/// A server, the node where it runs, and its clients.
struct ServerWithClients {
    world: MigrationGroup,
    folder: tempfile::TempDir,
    connections: ConnectionLoad,
    datagrams: DatagramLoad,
    current_node: &'static str,
    other_node: &'static str,
    /// True if the daemon of the node that receives new clients has died since the server left it, so that this node
    /// does not forward new clients.
    home_daemon_restarted: bool,
    /// Sockets of each daemon before the first move.
    sockets: BTreeMap<String, usize>,
}

/// Runs these cases one after the other, each from the node where the server is.
pub fn fail_at_each_step(name: &str, cases: &[Case]) -> Result<()> {
    let mut server = ServerWithClients::start(name, CLIENTS)?;
    let socket_modes = [SocketStrategy::Incremental, SocketStrategy::Collective];
    for (case, socket_mode) in sample(cases).iter().zip(socket_modes.iter().cycle()) {
        let began = std::time::Instant::now();
        let victims = server.killed_nodes(case.2);
        server
            .move_with_fault(*case, *socket_mode)
            .and_then(|()| server.assert_settled(&victims))
            .with_context(|| format!("{case:?}, {socket_mode:?}, from {}", server.current_node))?;
        eprintln!(
            "{case:?}, {socket_mode:?}: {:.1?}, the server is on {}",
            began.elapsed(),
            server.current_node
        );
    }
    server.finish(name)
}

/// Kills a daemon at an arbitrary moment of the freeze, while many connections are read or restored.
pub fn kill_during_freeze(name: &str) -> Result<()> {
    let mut server = ServerWithClients::start(name, MANY_CONNECTIONS)?;
    // Four turns cover both daemons in both modes.
    let kill_count = if runs_in_full() { KILLS_IN_FULL_RUN } else { 4 };
    for kill_index in 0..kill_count {
        let socket_mode =
            [SocketStrategy::Incremental, SocketStrategy::Collective][kill_index as usize % 2];
        let victim = if kill_index / 2 % 2 == 0 {
            server.current_node
        } else {
            server.other_node
        };
        let cluster = &server.world.cluster;
        let before = cluster.daemon_starts(victim);
        let file = cluster.run_path(server.current_node, "fault")?;
        std::fs::write(&file, format!("move-freeze before pause {FREEZE_DELAY_MS}"))?;
        server.world.begin_with_sockets(
            server.pid()?,
            server.current_node,
            server.other_node,
            socket_mode,
        )?;
        server
            .world
            .wait("the move did not reach the fault point", || {
                Ok(!file.exists())
            })?;
        let kill_time = Duration::from_millis(u64::from(FREEZE_DELAY_MS) + 2 * kill_index);
        std::thread::sleep(kill_time);
        cluster.kill_daemon(victim)?;
        let has_restarted = || Ok(cluster.daemon_starts(victim) > before);
        server
            .world
            .wait("a killed daemon was not restarted", has_restarted)?;
        cluster.wait_ready()?;
        let from = server.current_node;
        server.assert_settled(&[HOME_NODE]).with_context(|| {
            format!("{socket_mode:?}, {victim} killed {kill_time:?} after, from {from}")
        })?;
        eprintln!(
            "{socket_mode:?}, {victim} killed {kill_time:?} after, from {from}: the server is on {}",
            server.current_node
        );
    }
    server.finish(name)
}

impl ServerWithClients {
    fn start(name: &str, count: usize) -> Result<ServerWithClients> {
        let (world, folder) = start_group(name)?;
        let connections = connect_clients(&world, count)?;
        assert_all_go_on(&world, &connections)?;
        Ok(ServerWithClients {
            sockets: count_daemon_sockets(&world)?,
            datagrams: DatagramLoad::start(&world.cluster, IpFamily::V4, CLIENTS),
            world,
            folder,
            connections,
            current_node: HOME_NODE,
            other_node: "n3",
            home_daemon_restarted: false,
        })
    }

    /// Asserts that no byte was wrong, and no datagram arrived twice.
    fn finish(self, name: &str) -> Result<()> {
        let counts = self.datagrams.finish(name);
        ensure!(counts.duplicated == 0, "{counts:?}");
        self.connections.stop()
    }

    fn node_with_role(&self, role: Role) -> &'static str {
        match role {
            Role::Acceptor => self.other_node,
            Role::Holder => HOLDER,
            _ => self.current_node,
        }
    }

    /// Returns the nodes on which daemons die.
    fn killed_nodes(&self, failing_part: Role) -> Vec<&'static str> {
        match failing_part {
            Role::Both => vec![self.current_node, self.other_node],
            Role::Link => Vec::new(),
            one => vec![self.node_with_role(one)],
        }
    }

    /// Returns the server's PID at its node: its original PID, or the PID of the resident.
    fn pid(&self) -> Result<i32> {
        match &self.world.residents(self.current_node)?[..] {
            [] => read_pid(&self.folder),
            [resident] => Ok(resident.pid),
            more => anyhow::bail!("{more:?}"),
        }
    }

    fn move_with_fault(
        &self,
        (step_role, command, fault): Case,
        socket_strategy: SocketStrategy,
    ) -> Result<()> {
        let (cluster, step_node) = (&self.world.cluster, self.node_with_role(step_role));
        let victims = self.killed_nodes(fault);
        let before: Vec<u32> = victims
            .iter()
            .map(|node| cluster.daemon_starts(node))
            .collect();
        let action = match victims.contains(&step_node) {
            true => "die".to_owned(),
            false => format!("pause {PAUSE_MS}"),
        };
        let file = cluster.run_path(step_node, "fault")?;
        std::fs::write(&file, format!("{command} {action}"))?;
        self.world.begin_with_sockets(
            self.pid()?,
            self.current_node,
            self.other_node,
            socket_strategy,
        )?;
        self.world
            .wait("the move did not reach the fault point", || {
                Ok(!file.exists())
            })?;
        for node in victims.iter().filter(|node| **node != step_node) {
            cluster.kill_daemon(node)?;
        }
        if fault == Role::Link {
            cluster
                .lab()
                .cut_between(self.current_node, self.other_node)?;
            std::thread::sleep(CUT);
            cluster
                .lab()
                .heal_between(self.current_node, self.other_node)?;
        }
        for (node, before) in victims.iter().zip(before) {
            let has_restarted = || Ok(cluster.daemon_starts(node) > before);
            self.world
                .wait("a killed daemon was not restarted", has_restarted)?;
        }
        cluster.wait_ready()
    }

    /// Checks that the server is at one node, that its clients and new ones go on, and that nothing else is left.
    fn assert_settled(&mut self, victims: &[&str]) -> Result<()> {
        self.world
            .wait("records of the move are left in a run directory", || {
                no_move_records_left(&self.world)
            })?;
        let mut running_counts = [0; 2];
        self.world
            .wait("the process runs at no node, or at two", || {
                for (node, count) in [self.current_node, self.other_node]
                    .into_iter()
                    .zip(&mut running_counts)
                {
                    *count = self.world.count_processes(node, "echo")?;
                }
                Ok(running_counts.iter().sum::<usize>() == 1)
            })
            .with_context(|| format!("{running_counts:?}"))?;
        if running_counts == [0, 1] {
            (self.current_node, self.other_node) = (self.other_node, self.current_node);
        }
        self.home_daemon_restarted = self.current_node != HOME_NODE
            && (self.home_daemon_restarted || victims.contains(&HOME_NODE));
        assert_all_go_on(&self.world, &self.connections).context("connections")?;
        // Datagrams in flight when a daemon died are lost.
        self.datagrams.wait_until_all_answered();
        self.world.wait_until_no_transit()?;
        let expected = usize::from(!self.world.residents(self.current_node)?.is_empty());
        let restorers = |node| self.world.restorers(node).map(|found| found.len());
        let at_one_node =
            || Ok((restorers(self.current_node)?, restorers(self.other_node)?) == (expected, 0));
        self.world.wait("a restorer process is left", at_one_node)?;
        let mut socket_counts = BTreeMap::new();
        self.world
            .wait("a daemon has more sockets than before", || {
                socket_counts = count_daemon_sockets(&self.world)?;
                // A daemon has one more socket for each resident process.
                let extra_sockets = |node: &String| {
                    if node == self.current_node {
                        expected
                    } else {
                        0
                    }
                };
                let within_limits = |(node, count): (&String, &usize)| {
                    *count <= self.sockets[node] + extra_sockets(node)
                };
                Ok(socket_counts.iter().all(within_limits))
            })
            .with_context(|| format!("{socket_counts:?}, initially {:?}", self.sockets))?;
        match self.home_daemon_restarted {
            true => Ok(()),
            false => self.assert_new_clients_served(),
        }
    }

    /// Checks that new connections and datagrams reach the server.
    fn assert_new_clients_served(&self) -> Result<()> {
        let connections = connect_clients(&self.world, CLIENTS).context("new connections")?;
        let datagrams = DatagramLoad::start(&self.world.cluster, IpFamily::V4, CLIENTS);
        assert_all_go_on(&self.world, &connections).context("new connections")?;
        datagrams.wait_until_all_answered();
        let counts = datagrams.finish("new clients");
        ensure!(counts.lost.is_empty(), "{counts:?}");
        connections.stop()
    }
}

/// Counts the sockets of each daemon.
fn count_daemon_sockets(world: &MigrationGroup) -> Result<BTreeMap<String, usize>> {
    let count = |node: String| -> Result<(String, usize)> {
        let daemon = world.cluster.daemon_pid(&node)?.context("no daemon")?;
        let files = std::fs::read_dir(format!("/proc/{daemon}/fd"))?.flatten();
        let is_socket = |path: &PathBuf| path.to_string_lossy().starts_with("socket:");
        let links = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        Ok((node, links.filter(is_socket).count()))
    };
    world.cluster.nodes().into_iter().map(count).collect()
}
