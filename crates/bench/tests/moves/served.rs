//! Faults at single steps of a move of a server with clients: the clients go on, wherever the server is, and nothing of
//! the move is left.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::SocketsWay;
use holdfast_bench::cluster::Family;
use holdfast_bench::load::Load;

use crate::clients::{CLIENTS, all_go_on, connected, pid, serving};
use crate::faults::{CUT, HOLDER, PAUSE_MS, is_whole, nothing_is_written, sample};
use crate::numbered::Datagrams;
use crate::world::World;

/// Node to which the weights send new clients.
const HOME: &str = "n2";

/// Number of connections that take some milliseconds to read or restore.
const MANY: usize = 150;
/// Number of daemons killed when long tests run in full.
const MOMENTS: u64 = 8;
/// Time in milliseconds for which a freeze waits before it begins.
const BEFORE_MS: u32 = 40;

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
struct Served {
    world: World,
    folder: tempfile::TempDir,
    connections: Load,
    datagrams: Datagrams,
    at: &'static str,
    to: &'static str,
    /// True if the daemon of the node that receives new clients has died since the server left it, so that this node
    /// does not forward new clients.
    forgotten: bool,
    /// Sockets of each daemon before the first move.
    sockets: BTreeMap<String, usize>,
}

/// Runs these cases one after the other, each from the node where the server is.
pub fn disturbed(name: &str, cases: &[Case]) -> Result<()> {
    let mut served = Served::begin(name, CLIENTS)?;
    let ways = [SocketsWay::Incremental, SocketsWay::Collective];
    for (case, way) in sample(cases).iter().zip(ways.iter().cycle()) {
        let began = std::time::Instant::now();
        let victims = served.victims(case.2);
        served
            .disturb(*case, *way)
            .and_then(|()| served.settled(&victims))
            .with_context(|| format!("{case:?}, {way:?}, from {}", served.at))?;
        eprintln!(
            "{case:?}, {way:?}: {:.1?}, it is on {}",
            began.elapsed(),
            served.at
        );
    }
    served.end(name)
}

/// Kills a daemon at an arbitrary moment of the freeze, while many connections are read or restored.
pub fn at_any_moment(name: &str) -> Result<()> {
    let mut served = Served::begin(name, MANY)?;
    // Four turns cover both daemons in both modes.
    let turns = if is_whole() { MOMENTS } else { 4 };
    for turn in 0..turns {
        let way = [SocketsWay::Incremental, SocketsWay::Collective][turn as usize % 2];
        let victim = if turn / 2 % 2 == 0 {
            served.at
        } else {
            served.to
        };
        let cluster = &served.world.cluster;
        let before = cluster.daemon_starts(victim);
        let file = cluster.run_file(served.at, "fault")?;
        std::fs::write(&file, format!("move-freeze before pause {BEFORE_MS}"))?;
        served
            .world
            .begin_by(served.pid()?, served.at, served.to, way)?;
        served
            .world
            .wait("it did not come so far", || Ok(!file.exists()))?;
        let moment = Duration::from_millis(u64::from(BEFORE_MS) + 2 * turn);
        std::thread::sleep(moment);
        cluster.kill_daemon(victim)?;
        let again = || Ok(cluster.daemon_starts(victim) > before);
        served.world.wait("a daemon was not restarted", again)?;
        cluster.wait_ready()?;
        let from = served.at;
        served
            .settled(&[HOME])
            .with_context(|| format!("{way:?}, {victim} killed {moment:?} after, from {from}"))?;
        eprintln!(
            "{way:?}, {victim} killed {moment:?} after, from {from}: it is on {}",
            served.at
        );
    }
    served.end(name)
}

impl Served {
    fn begin(name: &str, count: usize) -> Result<Served> {
        let (world, folder) = serving(name)?;
        let connections = connected(&world, count)?;
        all_go_on(&world, &connections)?;
        Ok(Served {
            sockets: sockets(&world)?,
            datagrams: Datagrams::start(&world.cluster, Family::V4, CLIENTS),
            world,
            folder,
            connections,
            at: HOME,
            to: "n3",
            forgotten: false,
        })
    }

    /// Asserts that no byte was wrong, and no datagram arrived twice.
    fn end(self, name: &str) -> Result<()> {
        let counts = self.datagrams.end(name);
        ensure!(counts.doubled == 0, "{counts:?}");
        self.connections.stop()
    }

    fn node(&self, role: Role) -> &'static str {
        match role {
            Role::Acceptor => self.to,
            Role::Holder => HOLDER,
            _ => self.at,
        }
    }

    /// Returns the nodes on which daemons die.
    fn victims(&self, fault: Role) -> Vec<&'static str> {
        match fault {
            Role::Both => vec![self.at, self.to],
            Role::Link => Vec::new(),
            one => vec![self.node(one)],
        }
    }

    /// Returns the server's PID at its node: its original PID, or the PID of the resident.
    fn pid(&self) -> Result<i32> {
        match &self.world.residents(self.at)?[..] {
            [] => pid(&self.folder),
            [resident] => Ok(resident.pid),
            more => anyhow::bail!("{more:?}"),
        }
    }

    fn disturb(&self, (whose, command, fault): Case, way: SocketsWay) -> Result<()> {
        let (cluster, at) = (&self.world.cluster, self.node(whose));
        let victims = self.victims(fault);
        let before: Vec<u32> = victims
            .iter()
            .map(|node| cluster.daemon_starts(node))
            .collect();
        let what = match victims.contains(&at) {
            true => "die".to_owned(),
            false => format!("pause {PAUSE_MS}"),
        };
        let file = cluster.run_file(at, "fault")?;
        std::fs::write(&file, format!("{command} {what}"))?;
        self.world.begin_by(self.pid()?, self.at, self.to, way)?;
        self.world
            .wait("it did not come so far", || Ok(!file.exists()))?;
        for node in victims.iter().filter(|node| **node != at) {
            cluster.kill_daemon(node)?;
        }
        if fault == Role::Link {
            cluster.lab().cut_between(self.at, self.to)?;
            std::thread::sleep(CUT);
            cluster.lab().heal_between(self.at, self.to)?;
        }
        for (node, before) in victims.iter().zip(before) {
            let again = || Ok(cluster.daemon_starts(node) > before);
            self.world.wait("a daemon was not restarted", again)?;
        }
        cluster.wait_ready()
    }

    /// Checks that the server is at one node, that its clients and new ones go on, and that nothing else is left.
    fn settled(&mut self, victims: &[&str]) -> Result<()> {
        self.world.wait("something is written down", || {
            nothing_is_written(&self.world)
        })?;
        let mut places = [0; 2];
        self.world
            .wait("it is nowhere, or at two places", || {
                for (node, count) in [self.at, self.to].into_iter().zip(&mut places) {
                    *count = self.world.runs(node, "echo")?;
                }
                Ok(places.iter().sum::<usize>() == 1)
            })
            .with_context(|| format!("{places:?}"))?;
        if places == [0, 1] {
            (self.at, self.to) = (self.to, self.at);
        }
        self.forgotten = self.at != HOME && (self.forgotten || victims.contains(&HOME));
        all_go_on(&self.world, &self.connections).context("connections")?;
        // Datagrams in flight when a daemon died are lost.
        self.datagrams.all_answered_again();
        self.world.nothing_is_in_transit()?;
        let expected = usize::from(!self.world.residents(self.at)?.is_empty());
        let restorers = |node| self.world.restorers(node).map(|found| found.len());
        let at_one = || Ok((restorers(self.at)?, restorers(self.to)?) == (expected, 0));
        self.world.wait("a restorer is left", at_one)?;
        let mut now = BTreeMap::new();
        self.world
            .wait("a daemon has more sockets than before", || {
                now = sockets(&self.world)?;
                // A daemon has one more socket for each resident process.
                let more = |node: &String| if node == self.at { expected } else { 0 };
                let few =
                    |(node, count): (&String, &usize)| *count <= self.sockets[node] + more(node);
                Ok(now.iter().all(few))
            })
            .with_context(|| format!("{now:?}, at first {:?}", self.sockets))?;
        match self.forgotten {
            true => Ok(()),
            false => self.new_clients(),
        }
    }

    /// Checks that new connections and datagrams reach the server.
    fn new_clients(&self) -> Result<()> {
        let new = connected(&self.world, CLIENTS).context("new connections")?;
        let datagrams = Datagrams::start(&self.world.cluster, Family::V4, CLIENTS);
        all_go_on(&self.world, &new).context("new connections")?;
        datagrams.all_answered_again();
        let counts = datagrams.end("new clients");
        ensure!(counts.lost.is_empty(), "{counts:?}");
        new.stop()
    }
}

/// Counts the sockets of each daemon.
fn sockets(world: &World) -> Result<BTreeMap<String, usize>> {
    let count = |node: String| -> Result<(String, usize)> {
        let daemon = world.cluster.daemon_pid(&node)?.context("no daemon")?;
        let files = std::fs::read_dir(format!("/proc/{daemon}/fd"))?.flatten();
        let is_socket = |path: &PathBuf| path.to_string_lossy().starts_with("socket:");
        let links = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        Ok((node, links.filter(is_socket).count()))
    };
    world.cluster.nodes().into_iter().map(count).collect()
}
